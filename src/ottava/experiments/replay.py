"""Replays one batch under any recipe, with the same numbers every time, and leaves no trace in the model.

After each replay it restores gradients, buffers, all state of predicted scales (histories, staged amaxes, cached
weights, the counters of `ScalingState`) and torch's random generators. It never touches parameters and optimizer.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import math
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from types import CellType, FunctionType, MethodType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ottava.engine.autocast import autocast
from ottava.engine.functional import QuantizedLayer, quantized_layers
from ottava.engine.state import Advice
from ottava.numerics.tensor import QuantizedTensor
from ottava.ops.gemm import whole
from ottava.recipe import GEMMS, TENSOR_OF, Override, Recipe, get_recipe
from ottava.record.random_state import random_states, random_states_kept

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> scalar; calls the model."""
_OF_MODULES = frozenset(vars(nn.Module()))
_SMALL = 1 << 20
"""Bytes of a tensor up to which an attribute is copied, as buffers are."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of one replay."""

    loss: float
    gradients: tuple[Tensor | None, ...]
    """One per trained parameter, in the model's order; None for a parameter without one. Empty if only losses count."""


@dataclass(frozen=True)
class Deviation:
    """The distance of one replay from another."""

    loss: float
    """Loss of the replay."""
    error: float
    """0 to 1. For gradients: root mean square over parameters of |g - g0| / |g0|, each at most 1, so that small
    parameters count like large ones. For losses: |loss - loss0| / |loss0|. 1 if a number is not finite."""
    angle_deg: float
    """Angle between the whole gradients; NaN for losses."""


class Replay:
    """A batch that can be run again.

    Args:
        model: any module with ottava layers.
        batch: passed to `loss` as it is.
        loss: (model, batch) -> scalar.
        random: states of torch's generators at the start of every replay; None: the present states.
        target: compare "gradient" (runs backward) or "loss".

    Example:
        >>> import ottava
        >>> model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
        >>> report = ottava.convert(model, "tensorwise")
        >>> x = torch.randn(8, 64, dtype=torch.bfloat16)
        >>> replay = Replay(model, x, lambda net, batch: net(batch).float().square().mean())
        >>> reference = replay.run(None)
        >>> 0.01 < replay.compare(replay.run(ottava.RECIPES["tensorwise"]), reference).error < 0.1
        True
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss,
        *,
        random: Mapping[str, Tensor] | None = None,
        target: str = "gradient",
    ) -> None:
        self.model, self.batch, self.loss, self.target = model, batch, loss, target
        self.random = random_states() if random is None else random
        self.runs = 0

    def run(self, recipe: Recipe | None, *, own: bool = False) -> Outcome:
        """Runs the batch under a recipe; None: in high precision; own: every layer under its own recipe."""
        self.runs += 1
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        with untouched(self.model), random_states_kept(self.random):
            context = autocast() if own else autocast(recipe, enabled=recipe is not None)
            with torch.set_grad_enabled(self.target == "gradient"), context, torch.compiler.set_stance("force_eager"):
                value = self.loss(self.model, self.batch)
                if self.target == "gradient":
                    value.backward()
            gradients = tuple(p.grad for p in parameters) if self.target == "gradient" else ()
            return Outcome(float(value.detach()), gradients)

    def compare(self, outcome: Outcome, reference: Outcome) -> Deviation:
        """The deviation of `outcome` from `reference`."""
        if self.target == "loss":
            gap = abs(outcome.loss - reference.loss) / max(abs(reference.loss), 1e-30)
            return Deviation(outcome.loss, min(gap, 1.0) if math.isfinite(gap) else 1.0, math.nan)
        return Deviation(outcome.loss, *gradient_error(outcome.gradients, reference.gradients))


def gradient_error(got: Sequence[Tensor | None], reference: Sequence[Tensor | None]) -> tuple[float, float]:
    """`Deviation.error` and `Deviation.angle_deg` of two gradients. Tensors that are None or zero in the reference do
    not count.

    Example:
        >>> one, other = [torch.tensor([3.0, 0.0])], [torch.tensor([0.0, 3.0])]
        >>> error, angle = gradient_error(one, other)
        >>> error, round(angle)
        (1.0, 90)
    """
    shares, dot, norm, norm0 = [], 0.0, 0.0, 0.0
    for g, g0 in zip(got, reference, strict=True):
        if g0 is None:
            continue
        a = torch.zeros_like(g0) if g is None else g
        a, b = a.double().flatten(), g0.double().flatten()
        square = float(b @ b)
        if square == 0.0:
            continue
        share = float((a - b) @ (a - b)) / square
        shares.append(min(share, 1.0) if math.isfinite(share) else 1.0)
        dot, norm, norm0 = dot + float(a @ b), norm + float(a @ a), norm0 + square
    if not shares:
        return 0.0, 0.0
    error = math.sqrt(sum(shares) / len(shares))
    if not math.isfinite(norm) or norm == 0.0:
        return error, 90.0
    return error, math.degrees(math.acos(max(-1.0, min(1.0, dot / math.sqrt(norm * norm0)))))


def ottava_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Full name -> layer with a recipe, in the order of the model.

    Raises:
        ValueError: the model has none, or two have one name because they were converted separately.
    """
    layers: dict[str, QuantizedLayer] = {}
    for layer in quantized_layers(model):
        if layer.name in layers:
            raise ValueError(
                f"two layers have the name {layer.name!r}, because they were converted separately; call ottava.convert "
                "on the whole model, so that each layer gets its full name"
            )
        layers[layer.name] = layer
    if not layers:
        raise ValueError("the model has no ottava layers; call ottava.convert(model) first, or convert a copy of it")
    return layers


def spelled_out(cells: Mapping[str, Recipe], gemms: Sequence[str] = GEMMS) -> Recipe:
    """A recipe for `autocast` that gives each of these layers its cells in these GEMMs, and high precision elsewhere.

    Example:
        >>> import ottava
        >>> recipe = spelled_out({"fc*": ottava.RECIPES["rowwise"]}, ["fprop"])
        >>> [recipe.for_layer(name).fprop.quantized for name in ("fc*", "fc1")], recipe.for_layer("fc*").wgrad.quantized
        ([True, False], False)
    """
    overrides = tuple(
        Override(only_pattern(name), tuple((gemm, getattr(recipe, gemm)) for gemm in gemms))
        for name, recipe in cells.items()
    )
    return replace(get_recipe("bf16"), name="replay", overrides=overrides)


def only_pattern(name: str) -> str:
    """A pattern for an override that matches only this name.

    Example:
        >>> only_pattern("experts[3].fc1")
        'experts[[]3].fc1'
    """
    return "".join(f"[{c}]" if c in "*?[" else c for c in name) or "*"


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restores what forward and backward change: gradients, buffers, attributes of modules, of objects of the script's
    classes in them and of these classes, the state of predicted scales, and numbers, iterators and random numbers of
    the script. What objects of libraries and files hold is not seen."""
    gradients = [(p, p.grad) for p in model.parameters()]
    met: set[int] = set()  # what many modules hold is looked at once
    modules, script = [_Attributes(m, met) for m in model.modules()], _Globals(model)
    tensors = {id(t): t for m in modules for t in m.tensors()}.values()
    values = [(t, t.clone()) for t in tensors]
    states = {id(s): (s, _copied(vars(s))) for m in modules if (s := m.attributes.get("scaling_state")) is not None}
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for module in modules:
                module.restore()
            script.restore()
            for tensor, value in values:
                tensor.copy_(value)
            for state, attributes in states.values():
                vars(state).clear()
                vars(state).update(attributes)


_ITERATORS = tuple(map(type, (itertools.count(), itertools.cycle(()), iter([]), iter(()), iter(range(0)))))
_SHORT, _FEW, _MANY = 10_000, 256, 4096
_PLAIN = (int, float, complex, str, bytes, NoneType)
_COLLECTIONS = (
    *(list, dict, set),
    *(collections.deque, collections.Counter, collections.OrderedDict, collections.defaultdict),
)
_SOURCES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LIBRARY = "-packages|/src/ottava/"


def _of_library(module: str) -> bool:
    """Whether this module is no script, nor one beside it."""
    file = getattr(sys.modules.get(module), "__file__", None) or "-packages"
    known = module.partition(".")[0] in sys.stdlib_module_names or re.search(_LIBRARY, file) is not None
    return known and module != "__main__"


def _is_own(value: Any) -> bool:
    """Whether this is an object of the script's classes, and no module, tensor or optimizer."""
    others = (nn.Module, Tensor, torch.optim.Optimizer, type)
    return not isinstance(value, others) and hasattr(value, "__dict__") and not _of_library(type(value).__module__)


def _inside(value: Any) -> Iterable[Any] | None:
    """What a collection holds, a class or an object of the script's, or a function's closure; None: another kind."""
    match value:
        case functools.partial():
            return value.func, *value.args, *value.keywords.values()
        case MethodType():
            return value.__self__, value.__func__
        case FunctionType():
            return None if _of_library(value.__module__ or "") else value.__closure__
        case CellType():
            return [value.cell_contents] if value != CellType() else None  # an empty one
    if isinstance(value, _SOURCES):
        return ()
    if type(value) in (*_COLLECTIONS, tuple):
        return [*(value.values() if isinstance(value, dict) else value)] if len(value) <= _FEW else ()
    if _is_own(value):
        return *vars(value).values(), type(value)
    return [*vars(value).values()] if isinstance(value, type) and not _of_library(value.__module__) else None


def _behind(values: Iterable[Any], met: set[int]) -> list[Any]:
    """Of these, and of what they hold, all that `_inside` looks into and nobody has met."""
    found: list[Any] = []
    waiting = collections.deque(values)
    while waiting and len(found) < _MANY:
        value = waiting.popleft()
        if not isinstance(value, _PLAIN) and id(value) not in met and (inside := _inside(value)) is not None:
            met.add(id(value))
            found.append(value)
            waiting.extend(inside)
    return found


def _held(values: Iterable[Any]) -> Iterator[Callable[[], object]]:
    """What puts back each of these: a collection's contents, attributes of an object or a class, what a function's
    closure holds, the state of a source of random numbers."""
    for value in values:
        if type(value) in _COLLECTIONS:
            yield functools.partial(_refill, value, value.copy())
        elif isinstance(value, CellType):
            yield functools.partial(setattr, value, "cell_contents", _there(value.cell_contents))
        elif _is_own(value):
            yield functools.partial(_refill, vars(value), {k: _there(v) for k, v in vars(value).items()})
        elif isinstance(value, type):
            yield functools.partial(_redefine, value, {*vars(value)}, {k: _there(v) for k, v in vars(value).items()})
        elif isinstance(value, torch.Generator | np.random.RandomState):
            source: Any = value
            yield functools.partial(source.set_state, source.get_state())
        elif isinstance(value, np.random.Generator):
            yield functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
        elif isinstance(value, random.Random):
            yield functools.partial(value.setstate, value.getstate())


def _refill(live: Any, saved: Any) -> None:
    live.clear()
    (live.update if isinstance(live, dict | set) else live.extend)(saved)


def _redefine(owner: type, names: set[str], saved: Mapping[str, Any]) -> None:
    for name, value in [*vars(owner).items()]:
        if name not in names:
            delattr(owner, name)
        elif name in saved and value is not saved[name]:
            setattr(owner, name, saved[name])


def _there(value: Any) -> Any:
    """The same; of an iterator one at the same place. Python 3.14 has no copies of those of itertools."""
    if isinstance(value, _ITERATORS):
        with warnings.catch_warnings(), suppress(TypeError):
            warnings.simplefilter("ignore", DeprecationWarning)
            if isinstance(value, itertools.cycle):  # a copy would draw from the same iterator in its first round
                reduced: Any = value.__reduce__()
                _, (source,), (kept, rounds) = reduced
                again: Any = itertools.cycle(copy.copy(source))
                again.__setstate__(([*kept], rounds))
                return again
            return copy.copy(value)
    return value


def _counts(value: Any) -> bool:
    """Whether this draws random numbers, or is a short collection of numbers: a thread may fill others meanwhile."""
    if type(value) in _COLLECTIONS:
        inside = value.values() if isinstance(value, dict) else value
        return len(value) <= _SHORT and all(isinstance(x, _PLAIN) for x in inside)
    return isinstance(value, _SOURCES)


class _Globals:
    """Numbers, iterators and sources of random numbers of the script and of the modules that define a model."""

    def __init__(self, model: nn.Module) -> None:
        found = [sys.modules.get(name) for name in {type(m).__module__ for m in model.modules()}]
        own = [m for m in found if not re.search(_LIBRARY, getattr(m, "__file__", None) or "-packages")]
        spaces = [vars(m) for m in {*own, sys.modules["__main__"]}]
        reached = _behind([v for s in spaces for v in s.values()], set())
        spaces += [vars(o) for o in reached if _is_own(o)]
        classes = [o for o in reached if isinstance(o, type)]
        cells = [o for o in reached if isinstance(o, CellType)]
        kinds = _ITERATORS + _PLAIN
        self._spaces = [
            (s, {k: _there(v) for k, v in s.items() if isinstance(v, kinds) and k[:2] != "__"}) for s in spaces
        ]
        self._contents = [*_held(v for space, _ in self._spaces for v in space.values() if _counts(v))]
        self._contents += _held(v for o in classes for v in vars(o).values() if _counts(v))
        for one in classes:
            plain = {k: _there(v) for k, v in vars(one).items() if isinstance(v, kinds) and k[:2] != "__"}
            self._contents.append(functools.partial(_redefine, one, {*vars(one)}, plain))
        self._contents += _held(o for o in cells if isinstance(o.cell_contents, kinds))
        self._contents += _held(o.cell_contents for o in cells if _counts(o.cell_contents))

    def restore(self) -> None:
        for space, names in self._spaces:
            space.update(names)
        for put_back in self._contents:
            put_back()


class _Attributes:
    """What a module holds beside its parameters and children: by name, and what collections and objects hold."""

    def __init__(self, module: nn.Module, met: set[int]) -> None:
        self.module = module
        self.attributes: dict[str, Any] = {k: _there(v) for k, v in vars(module).items()}
        own = [v for k, v in self.attributes.items() if k == "_buffers" or k not in _OF_MODULES]
        hooks = [
            h for k, v in self.attributes.items() if k.endswith("hooks") and isinstance(v, dict) for h in v.values()
        ]
        self._reached = _behind([*own, *hooks, type(module)], met)
        self._contents = [*_held(self._reached)]

    def tensors(self) -> Iterator[Tensor]:
        """Buffers and small tensors that a forward may write to."""
        inside = (v for x in self._reached for v in _inside(x) or ())
        for value in (*self.attributes.values(), *self.module._buffers.values(), *inside):
            plain = isinstance(value, Tensor) and not value.is_inference() and not value.requires_grad
            if plain and (value.nbytes <= _SMALL or any(value is b for b in self.module._buffers.values())):
                yield value

    def restore(self) -> None:
        """Puts everything back but the numbers in tensors."""
        vars(self.module).clear()
        vars(self.module).update(self.attributes)
        for put_back in self._contents:
            put_back()


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    mutable = (set, dict, list, Advice)
    return {name: value.copy() if isinstance(value, mutable) else value for name, value in attributes.items()}


@contextmanager
def door_hooks(layer: Any, hook: Callable[[str, Tensor, Any], Any]) -> Iterator[None]:
    """Calls hook(tensor, x, (row, col)) after every cast of a layer. If it returns something, that replaces the
    operands."""
    with ExitStack() as stack:
        for name, door in layer.quantizers.named_children():
            told = functools.partial(lambda name, _, args, output: hook(name, args[0], output), name)
            stack.enter_context(door.register_forward_hook(told))
        yield


def one_operand(gemm: str, quantized: str | None) -> Callable[[str, Tensor, Any], Any]:
    """A hook that gives a GEMM the decoded cast of one operand, and the other in high precision; None: both decoded."""
    lhs, rhs = TENSOR_OF[gemm, "lhs"], TENSOR_OF[gemm, "rhs"]

    def hook(tensor: str, x: Tensor, output: tuple[Any, Any]) -> tuple[Any, Any]:
        operands = list(output)
        for name, direction in (lhs, rhs):
            index = int(direction == "col")
            operand = operands[index]
            if name != tensor or not isinstance(operand, QuantizedTensor):
                continue
            if quantized is None or quantized == tensor:
                operands[index] = whole(operand).to(x.dtype)
            else:
                exact = x.t() if direction == "col" else x
                transform = operand.spec.transform
                operands[index] = exact if transform is None else whole(operand, operand.transformed(exact)).to(x.dtype)
        return operands[0], operands[1]

    return hook
