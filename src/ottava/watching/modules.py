"""Watches the linear layers of any PyTorch model from outside: the tensors that go in and out of their GEMMs.

torch's global forward hooks see every module, also those made later; a hook on the output gets its gradient. The tap
adds no node to the graph and replaces no output, so in-place operations and views after a layer work as usual. It
passes each tensor on as the GEMM gets it, detached and (rows, columns), and keeps none.

Users register nothing: `ModuleNames` looks a new module up in the models known so far. If no model has it, it is the
outermost module of another model, because a forward begins with the outermost module.

A forward counts once even if it is computed twice. A forward under no_grad does not count: it is evaluation, or the
first pass of reentrant checkpointing, whose recomputation counts. A recomputation of non-reentrant checkpointing does
not count.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ottava.base.errors import Guard
from ottava.engine.functional import QuantizedLayer, quantized_layers
from ottava.measure.layer_names import SYMBOLS, layer_kind
from ottava.recipe import Recipe
from ottava.watching.adapters import Adapter, Part, adapter_of, casting, recipe_of
from ottava.watching.functional import GATHERED, FunctionalTap, Origin, Owner, owns_a_matrix, weights_of_gemms
from ottava.watching.operands import (
    GlobalHooks,
    autocast_dtype,
    edges_to,
    made_by,
    plain,
    repeats_a_forward,
    unobserved,
    whole,
)

TRANSPARENT = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes of torch.compile, FSDP and checkpoint_wrapper that hold the wrapped module."""
WRAPPERS = frozenset(
    {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "Float16Module", "FullyShardedDataParallel"}
)
"""Classes whose attribute `module` is the model. In any class that has no other child it is, too."""


class ModuleNames:
    """The names of all modules met so far.

    Args:
        model: the only model whose modules get names; None: every model whose forward runs.
        found: called once with name and module of each module.

    Edge cases: a module in two places has the name of the first place, as in `named_modules`. If a second model has
        layers of the same names, its names begin with its class. The names of a deleted model are free again.

    Example:
        >>> names = ModuleNames()
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> names.learn(model)
        >>> names.of(model[0]), names.of(nn.Linear(2, 2)) is None
        ('0', True)
    """

    def __init__(
        self, model: nn.Module | None = None, found: Callable[[str, nn.Module], None] = lambda name, module: None
    ) -> None:
        self._found = found
        self._only = model is not None
        self._roots: list[tuple[weakref.ref[nn.Module], str]] = []
        self._names: dict[int, tuple[weakref.ref[nn.Module], str | None]] = {}  # by id; None: the model is not watched
        self._owners: dict[str, weakref.ref[nn.Module]] = {}
        self._holders: dict[int, tuple[weakref.ref[Tensor], weakref.ref[nn.Module] | None, str]] = {}
        self._lock = threading.RLock()
        if model is not None:
            self._take_in(model, "")

    def knows(self, module: nn.Module) -> bool:
        """Whether the module has been met."""
        entry = self._names.get(id(module))
        return entry is not None and entry[0]() is module

    def of(self, module: nn.Module) -> str | None:
        """The module's full name; None if the module has not been met or belongs to a model that is not watched."""
        entry = self._names.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def learn(self, module: nn.Module) -> None:
        """Finds the names of a module whose forward begins, and of all modules in it."""
        with self._lock:
            if self.knows(module):
                return
            self._roots = [(root, prefix) for root, prefix in self._roots if root() is not None]
            if module._modules or module._parameters or adapter_of(module) is not None:
                for root, prefix in self._roots:  # perhaps a late addition to a known model
                    if (alive := root()) is not None:
                        self._scan(alive, prefix)
                if self.knows(module):
                    return
                if not self._only:
                    self._take_in(module, self._prefix(module))
                    return
            for inner in module.modules():  # an activation, a loss, or another model: never ask again
                if not self.knows(inner):
                    self._names[id(inner)] = (weakref.ref(inner), None)

    def holder(self, parameter: Tensor) -> tuple[nn.Module, str, str] | None:
        """(module, full name of the module, name of the parameter in it) for a parameter; None if unknown. Of several
        modules that share it, such as embedding and head, it prefers a layer with a GEMM."""
        entry = self._holders.get(id(parameter))
        if entry is not None and entry[0]() is parameter and (entry[1] is None or entry[1]() is not None):
            module = None if entry[1] is None else entry[1]()
            return None if module is None else (module, self.of(module) or "", entry[2])
        best: tuple[nn.Module, str, str] | None = None
        for reference, name in [*self._names.values()]:
            module = reference()
            if name is None or module is None:
                continue
            key = next((key for key, p in module._parameters.items() if p is parameter), None)
            if key is not None and (best is None or adapter_of(best[0]) is None):
                best = (module, name, key)
        place = (None, "") if best is None else (weakref.ref(best[0]), best[2])
        self._holders[id(parameter)] = (weakref.ref(parameter), *place)
        return best

    def parameter(self, parameter: Tensor) -> str:
        """The full name of a parameter; "" if it is unknown."""
        holder = self.holder(parameter)
        if holder is None:
            return ""
        return f"{holder[1]}.{holder[2]}" if holder[1] else holder[2]

    def roots(self) -> Iterator[nn.Module]:
        """The models."""
        return (alive for root, _ in self._roots if (alive := root()) is not None)

    def compiled(self) -> Iterator[nn.Module]:
        """Modules that are known to run as compiled code."""
        for root, _ in self._roots:
            if (alive := root()) is not None:
                for _, module in walk(alive):
                    if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
                        yield module

    def _take_in(self, root: nn.Module, prefix: str) -> None:
        self._roots.append((weakref.ref(root), prefix))
        self._scan(root, prefix)

    def _scan(self, root: nn.Module, prefix: str) -> None:
        for name, module in walk(root):
            if self.of(module) is not None:
                continue
            full = f"{prefix}{name}" if name else prefix.removesuffix(".") or type(root).__name__
            self._names[id(module)] = (weakref.ref(module), full)
            if name or not module._modules:  # the model as a whole is no layer
                self._owners[full] = weakref.ref(module)
            self._found(full, module)

    def _prefix(self, root: nn.Module) -> str:
        """A prefix for the names of another model, so that no two living modules share a name."""

        def taken(prefix: str) -> bool:
            for name, module in walk(root):
                if not name and module._modules:
                    continue
                owner = self._owners.get(f"{prefix}{name}" if name else prefix.removesuffix(".") or kind)
                if owner is not None and owner() not in (None, module):
                    return True
            return False

        kind = type(root).__name__
        number, prefix = 1, ""
        while taken(prefix):
            prefix = f"{kind}." if number == 1 else f"{kind} {number}."
            number += 1
        return prefix


def walk(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`named_modules` without the names of wrappers.

    Example:
        >>> [name for name, _ in walk(nn.Sequential(nn.Sequential(nn.Linear(2, 2))))]
        ['', '0', '0.0']
    """
    seen: set[int] = set()
    stack = [("", root)]
    while stack:
        name, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        inside = []
        for key, child in module._modules.items():
            if child is None:
                continue
            wraps = len(module._modules) == 1 or type(module).__name__ in WRAPPERS
            if key in TRANSPARENT or (key == "module" and wraps):
                inside.append((name, child))
            else:
                inside.append((f"{name}.{key}" if name else key, child))
        stack += reversed(inside)


See = Callable[..., None]
"""Called with (layer, tensor, matrix): the full name, a long name such as "grad_output", and the tensor. The dtype of
the GEMM is the fourth argument if torch.autocast changes it."""

_Hand = Callable[[Tensor], None]
LOOKS_BEFORE_WARNING = 2
_AT_DOORS = frozenset({"input", "weight", "grad_output"})
_COMPILED = "runs in a compiled region, which calls no hooks; watch with compiled='eager'"
_COMPILED_QUIETLY = (
    "called no forward hooks: it is compiled (then watch with compiled='eager'), runs in a CUDA graph, is called as a "
    "function, or did not run"
)
_COMPUTED = "W: torch's parametrize computes it at every call; the watch would change the run by computing it once more"
_NOT_ASKED = "the settings do not ask for it"
_WITHOUT_GRAD = "ran without gradients only"
_NO_GEMM = (
    "the watch saw no GEMM with it: an unknown operation or an autograd.Function uses it, a GEMM outside of its module "
    "does, or it is no weight"
)
_ELSEWHERE = "a GEMM outside of its module uses it, where the watch sees no calls"
_CALLS_COMPILED = "its module calls compiled functions, which the watch cannot see into"
_OTHER_ROWS = (
    "X has {} rows and Y {}: one of them is this rank's part, and the layer gathers or scatters it (sequence "
    "parallelism)"
)
_TORCH_GRUMBLES = r"Using `torch\.compile\(module\)` when there are global hooks"


class _Linear:
    """A layer, or a part of one, with what the coverage says about it."""

    __slots__ = ("adapter", "found_at", "module", "name", "seen", "shape", "type", "whys", "without_grad")

    def __init__(
        self, name: str, module: nn.Module, adapter: Adapter | None, weight: Tensor | None, looks: int
    ) -> None:
        self.name, self.module = name, weakref.ref(module)
        self.adapter = adapter
        """None: a parameter that a GEMM may use without a layer."""
        self.type = type(module).__name__
        turned = -1 if adapter is not None and adapter.transposed else 1  # [N, K]
        self.shape = None if weight is None or weight.numel() == 0 else list(weight.shape)[::turned]
        self.found_at = looks
        self.seen: dict[str, int] = {}
        self.whys: dict[str, None] = {adapter.why: None} if adapter is not None and adapter.why else {}
        self.without_grad = False


class ModuleTap:
    """Calls `see` with the tensors of every linear layer.

    Args:
        see: called with (layer, tensor, matrix), and the dtype of the GEMM if autocast changes it; tensor is one of
            `tensors`, matrix is detached and (R, C).
        tensors: long names. The tap passes the weight on once between `attach` and `detach`. grad_input and
            grad_weight are the gradients that this call of the layer adds.
        model: the only model to watch; None: every model of the process.
        wants: whether (layer, tensor) is wanted; called before the tensor is prepared.
        asked: whether the settings ask for a layer; the tap never warns about other layers.
        own: True watches ottava's layers completely. False leaves X, W and dY to their doors.
        learned: called when a module is new, before its first forward.
        guard: wraps what forward and backward call, all but the end of a forward, which leaves nothing behind.

    Edge cases: the weight has the parameter's dtype, also under autocast. Of a DTensor the tap sees the local shard. It
        skips weights in packed or foreign formats and tensors of the wrong shape; `coverage` gives the reason.

    Example:
        >>> seen = []
        >>> tap = ModuleTap(lambda layer, tensor, x: seen.append((layer, tensor, tuple(x.shape))))
        >>> tap.attach()
        >>> nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True))(torch.ones(2, 3, 4)).sum().backward()
        >>> tap.detach()
        >>> seen
        [('0', 'input', (6, 4)), ('0', 'weight', (8, 4)), ('0', 'grad_output', (6, 8))]
    """

    def __init__(
        self,
        see: See,
        *,
        tensors: Collection[str] = ("input", "weight", "grad_output"),
        model: nn.Module | None = None,
        wants: Callable[[str, str], bool] = lambda layer, tensor: True,
        asked: Callable[[str], bool] = lambda layer: True,
        own: bool = False,
        learned: Callable[[], None] = lambda: None,
        guard: Guard = lambda hook: hook,
    ) -> None:
        self._learned = learned
        self._see, self._wants, self._asked, self._own = see, wants, asked, own
        self._tensors = frozenset(tensors)
        self._lock = threading.RLock()
        self._sites: dict[int, tuple[weakref.ref[nn.Module], str, Adapter]] = {}
        self._linears: dict[str, _Linear] = {}
        self._weights: set[str] = set()
        self._owners: dict[int, Owner] = {}
        self._functional = FunctionalTap(self._took, guard)
        self._looked_back = False
        self.before: dict[str, str] = {}
        """Layer -> the operation that made its input."""
        self._hooks = GlobalHooks(guard(self._before), guard(self._after), self._left)
        self._on_gradient, self._on_edge = guard(self._gradient), guard(self._edge)
        self._period = 0
        self._looks = 0
        self._warned = False
        self.names = ModuleNames(model, self._found)

    # --- on and off -----------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Starts watching. A new step begins, in which the tap passes each weight on again."""
        if self._hooks.attached:
            return
        if not self._period:  # only once: a new filter makes Python repeat earlier warnings
            warnings.filterwarnings("ignore", message=_TORCH_GRUMBLES, category=UserWarning)
        self._period += 1
        self._weights.clear()
        self._hooks.attach()

    def detach(self) -> None:
        """Stops watching; ignores the gradients of forwards that already ran."""
        self._hooks.detach()
        self._period += 1

    def looked(self) -> str | None:
        """Ends a watched step; warns once if layers never show up, and returns that warning."""
        self._looks += 1
        if self._warned or self._looks < LOOKS_BEFORE_WARNING:
            return None
        text = self._complaint()
        if text is not None:
            self._warned = True
            warnings.warn(text, stacklevel=2)
        return text

    def look_back(self, root: Tensor) -> None:
        """Searches the graph of a loss once for GEMMs that the hooks missed, so that `coverage` can name them."""
        if self._looked_back or not self._hooks.attached:
            return
        self._looked_back = True
        with self._lock:
            for parameter in weights_of_gemms(root):
                if (holder := self.names.holder(parameter)) is None or adapter_of(holder[0]) is not None:
                    continue
                layer = _layer_of(holder)
                if not any(name == layer or name.startswith(f"{layer}.") for name in self._linears):
                    linear = _Linear(layer, holder[0], None, parameter, self._looks)
                    linear.whys[_ELSEWHERE] = None
                    self._linears[layer] = linear

    def coverage(self) -> list[dict[str, Any]]:
        """Every linear layer: name, type (its class), kind, shape [N, K], seen, tensors, and why some are missing."""
        with self._lock:
            return [self._entry(linear) for linear in self._linears.values() if self._listed(linear)]

    def recipe_of(self, layer: str) -> Recipe | None:
        """The recipe that a layer of another package casts by; None if it does not cast, or is unknown."""
        linear = self._linears.get(layer)
        module = None if linear is None else linear.module()
        return None if module is None else recipe_of(module)

    def recipes(self) -> list[Recipe]:
        """The recipes that layers of other packages cast by."""
        return [recipe for layer in self._linears if (recipe := self.recipe_of(layer)) is not None]

    # --- layers -------------------------------------------------------------------------------------------

    def _found(self, name: str, module: nn.Module) -> None:
        adapter = adapter_of(module)
        own = {id(p) for p in module._parameters.values() if p is not None}
        # layers below a module may multiply its parameters: its attention, or its experts, under a recipe
        below = quantized_layers(module) if own and not isinstance(module, QuantizedLayer) else []
        if getattr(module, "_is_replica", False) or any(id(layer.parameter) in own for layer in below):
            return
        if adapter is None:
            if owns_a_matrix(module):
                self._found_owner(name, module)
            return
        self._sites[id(module)] = (weakref.ref(module), name, adapter)
        for suffix, weight in adapter.weights(module):
            linear = self._linears.get(name + suffix)
            if linear is None or linear.module() is None:
                linear = self._linears[name + suffix] = _Linear(name + suffix, module, adapter, weight, self._looks)
                if is_parametrized(module):
                    linear.whys.setdefault(_COMPUTED)

    def _found_owner(self, name: str, module: nn.Module) -> None:
        """Adds a module that may use its parameters itself; those of three dimensions are almost surely weights."""
        self._owners[id(module)] = Owner(module)
        if "Conv" in type(module).__name__:
            return
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 3 and min(parameter.shape) > 1:
                full = f"{name}.{key}" if name else key
                self._linears.setdefault(full, _Linear(full, module, None, parameter, self._looks))

    def _listed(self, linear: _Linear) -> bool:
        module = linear.module()
        if linear.adapter is None and not linear.seen:  # if its matrices were seen one by one, list those
            return not any(name.startswith(f"{linear.name}.") and x.seen for name, x in self._linears.items())
        return bool(linear.seen) or (module is not None and (self._own or not isinstance(module, QuantizedLayer)))

    def _entry(self, linear: _Linear) -> dict[str, Any]:
        whys = list(linear.whys)
        if not linear.seen:
            whys = whys or [self._why_unseen(linear)] if linear.adapter is None else [*whys, self._why_unseen(linear)]
        return {
            "name": linear.name,
            "type": linear.type,
            "kind": layer_kind(linear.name),
            "shape": linear.shape,
            "seen": bool(linear.seen),
            "tensors": list(linear.seen),
            "why": "; ".join(whys),
            **casting(linear.module(), self.recipe_of(linear.name)),
        }

    def _why_unseen(self, linear: _Linear) -> str:
        if not self._asked(linear.name):
            return _NOT_ASKED
        if linear.without_grad:
            return _WITHOUT_GRAD if linear.adapter is not None else f"{_WITHOUT_GRAD}, or inside an autograd.Function"
        module = linear.module()
        if module is None:
            return "was deleted before it ran in a watched step"
        if any(module is inner for outer in self.names.compiled() for inner in outer.modules()):
            return _COMPILED
        if linear.adapter is None:
            owner = self._owners.get(id(module))
            return _CALLS_COMPILED if owner is not None and owner.compiled else _NO_GEMM
        return _COMPILED_QUIETLY

    def _complaint(self) -> str | None:
        with self._lock:
            mute = [
                entry
                for linear in self._linears.values()
                if not linear.seen and self._looks - linear.found_at >= LOOKS_BEFORE_WARNING and self._listed(linear)
                for entry in [self._entry(linear)]
                if entry["why"] != _NOT_ASKED and not entry["why"].startswith(_WITHOUT_GRAD)
            ]
            nothing = not self._linears
        if nothing and (living := _living_linears()):
            return (
                f"watch: saw no layer in {self._looks} steps, though this process has {living} linear layers: the code "
                f"that runs them {_COMPILED_QUIETLY}"
            )
        if not mute:
            return None
        shown = [f"  {entry['name']} ({entry['type']}): {entry['why']}" for entry in mute[:8]]
        more = [f"  ... and {len(mute) - len(shown)} more"] if len(mute) > len(shown) else []
        head = (
            f"watch: {len(mute)} of {len(self._linears)} linear layers gave no sample in {self._looks} watched steps:"
        )
        return "\n".join([head, *shown, *more])

    # --- hooks ----------------------------------------------------------------------------------------------------
    # Dynamo traces hooks that exist while it compiles. Each hook must ask is_compiling first, so that nothing of a tap
    # gets into a graph or its guards.

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not self.names.knows(module):
            self.names.learn(module)
            self._learned()
        owner = self._owners.get(id(module))
        self._functional.enter(module, looks=owner is not None and owner.promises(module))

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._functional.leave(module)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        site = self._sites.get(id(module))
        if site is not None and not self.before.get(site[1]) and args and isinstance(args[0], Tensor):
            self.before[site[1]] = made_by(args[0])
        if site is None or site[0]() is not module or not self._counts(module, site):
            return
        _, name, adapter = site
        for part in adapter.call(module, args, kwargs, output):
            self._take(name + part.suffix, module, adapter, part)

    def _counts(self, module: nn.Module, site: tuple[weakref.ref[nn.Module], str, Adapter]) -> bool:
        if self._doors_tell(module) and self._tensors <= _AT_DOORS:
            return False
        if not torch.is_grad_enabled():
            for suffix, _ in site[2].weights(module):
                self._linears[site[1] + suffix].without_grad = True
            return False
        return not (torch._C._current_graph_task_id() != -1 and repeats_a_forward())

    def _doors_tell(self, module: nn.Module | None) -> bool:
        return not self._own and module is not None and isinstance(module, QuantizedLayer) and _casts(module)

    def _took(self, source: Origin, parts: Iterator[Part]) -> None:
        """Handles a product outside of a layer."""
        holder = self.names.holder(source.parameter) if self._hooks.attached else None
        if holder is None:
            return
        module, layer = holder[0], _layer_of(holder)
        if (owner := self._owners.get(id(module))) is not None:
            owner.fruitless = 0
        if not torch.is_grad_enabled() or source.gathered:
            linear = self._linears.setdefault(layer, _Linear(layer, module, None, None, self._looks))
            linear.without_grad = linear.without_grad or not source.gathered
            if source.gathered:
                linear.whys.setdefault(GATHERED, None)
        elif not (torch._C._current_graph_task_id() != -1 and repeats_a_forward()):
            for part in parts:
                self._take(layer + part.suffix, module, None, part)

    def _take(self, layer: str, module: nn.Module, adapter: Adapter | None, part: Part) -> None:
        linear = self._linears.get(layer)
        if linear is None:
            linear = self._linears.setdefault(layer, _Linear(layer, module, adapter, None, self._looks))
        weight, sizes = part.weight, linear.shape
        turned = adapter is not None and adapter.transposed and weight is not None and weight.dim() == 2
        arrange_weight = part.arrange_weight or (torch.Tensor.t if turned else torch.Tensor.detach)  # to (N, K)
        if weight is not None and weight.numel() and (linear.shape is None or len(linear.shape) > 2):
            sizes = linear.shape = list(arrange_weight(weight.detach()).shape)
        if sizes is not None and weight is not None and not weight.is_floating_point():
            sizes = None  # packed: its shape is not [N, K]
        dtype, (width, depth) = None, sizes[:2] if sizes else (None, None)
        for x in part.inputs:
            dtype = autocast_dtype(x) if part.cast else None
            self._hand(linear, "input", dtype, depth, part.arrange_input or torch.Tensor.detach, x)
        if weight is not None and layer not in self._weights:
            self._weights.add(layer)
            self._hand(linear, "weight", None, None, arrange_weight, weight)
        y = part.output
        if y is None:
            return
        arrange = part.arrange or torch.Tensor.detach
        if part.arrange is None and part.inputs and _rows(part.inputs[0]) != _rows(y):
            linear.whys.setdefault(_OTHER_ROWS.format(_rows(part.inputs[0]), _rows(y)), None)
        self._hand(linear, "output", None, width, arrange, y)
        if not y.requires_grad:
            return
        if "grad_output" in self._tensors:
            dtype = dtype or (autocast_dtype(y) if part.cast else None)
            hand = partial(self._hand, linear, "grad_output", dtype, width, arrange)
            whole(y).register_hook(partial(self._on_gradient, self._period, hand, y.shape))
        self._hook_edges(linear, part, arrange_weight)

    def _hook_edges(self, linear: _Linear, part: Part, arrange_weight: Callable[[Tensor], Tensor]) -> None:
        """Watches grad_input and grad_weight: the gradients on the graph's edges from the layer to these tensors."""
        targets = [("grad_input", x) for x in part.inputs if "grad_input" in self._tensors]
        if part.weight is not None and "grad_weight" in self._tensors:
            targets.append(("grad_weight", part.weight))
        for tensor, target in targets:
            if not target.requires_grad or part.output is None:
                continue
            edges = list(edges_to(target, part.output, part.inputs))
            if not edges:
                linear.whys.setdefault(f"{SYMBOLS[tensor]}: the graph does not lead to it", None)
            arrange = arrange_weight if tensor == "grad_weight" else part.arrange_input or torch.Tensor.detach
            hand = partial(self._hand, linear, tensor, None, None, arrange)
            for node, index in edges:
                node.register_hook(partial(self._on_edge, self._period, hand, index))

    def _edge(self, period: int, hand: _Hand, index: int, grad_inputs: Sequence[Tensor | None], _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        gradient = grad_inputs[index]
        if gradient is not None:
            self._gradient(period, hand, gradient.shape, gradient)

    def _gradient(self, period: int, hand: _Hand, shape: torch.Size, gradient: Tensor) -> None:
        if torch.compiler.is_compiling() or period != self._period:
            return
        if gradient.shape != shape:
            gradient = gradient.detach().reshape(shape)
        hand(gradient)

    def _hand(
        self,
        linear: _Linear,
        tensor: str,
        dtype: torch.dtype | None,
        width: int | None,
        arrange: Callable[[Tensor], Tensor],
        x: Tensor,
    ) -> None:
        if tensor not in self._tensors or not self._wants(linear.name, tensor):
            return
        if tensor in _AT_DOORS and self._doors_tell(linear.module()):
            return
        with unobserved(x):
            numbers, why = plain(x)
            if why:
                linear.whys.setdefault(f"{SYMBOLS[tensor]}: {why}", None)
            if numbers is None:
                return
            matrix = arrange(numbers)
            matrix = matrix.reshape(-1, matrix.shape[-1])
            if width is not None and matrix.shape[1] != width:
                why = f"is {matrix.shape[1]} wide, but the weight needs {width}: the layer gathers or splits it"
                linear.whys.setdefault(f"{SYMBOLS[tensor]}: {why}", None)
                return
            with self._lock:
                linear.seen[tensor] = linear.seen.get(tensor, 0) + 1
                self._see(linear.name, tensor, matrix, *(() if dtype in (None, matrix.dtype) else (dtype,)))


def _layer_of(holder: tuple[nn.Module, str, str]) -> str:
    """The layer name of a GEMM, from (module, name of the module, name of its weight)."""
    _, name, key = holder
    return name if key == "weight" else f"{name}.{key}" if name else key


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1] if x.dim() and x.shape[-1] else 0


def _casts(layer: Any) -> bool:
    """Whether the last call of an ottava layer cast anything: in high precision it does not use its doors."""
    call = layer.last_call
    recipe = layer.resolved if call is None else call.recipe
    return bool(recipe.casts)


def _living_linears() -> int:
    """The number of layers of known classes in this process. Reads every object, so call it once."""
    count = 0
    for thing in gc.get_objects():
        if (
            issubclass(type(thing), nn.Module)
            and adapter_of(thing) is not None
            and not isinstance(thing, QuantizedLayer)
        ):
            count += 1
    return count
