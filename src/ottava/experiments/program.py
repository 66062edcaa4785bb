"""Records what a training step computes around its models, so that the step can be run again without the user's code.

    forward     a call of a model: its arguments and surroundings, and the gradients that came back to its outputs
    operation   what the training loop computes from the outputs: the loss, seen by a TorchFunctionMode
    backward    the tensor on which backward() was called

Together they are a program. Nobody calls the user's loss function again: a replay repeats its operations. A loss that
cannot be repeated so, such as one with an autograd.Function, is replaced by the gradients that came back.

A `Player` runs a program again and collects its gradients, without a trace in `p.grad`, in hooks or in other processes.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ottava.base.errors import Guard
from ottava.engine.autocast import Ambient
from ottava.experiments.handmade import Exact
from ottava.experiments.snapshot import (
    Autocasts,
    Kept,
    NotReplayableError,
    Saved,
    Surroundings,
    autocasts,
    saved_by,
    under_ambient,
    under_autocasts,
    under_saved,
)
from ottava.recipe import get_recipe

_MOST_OPERATIONS = 4096
_WRITES = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__imod__")


class Slot(NamedTuple):
    """The place of a tensor that the program makes."""

    number: int


@dataclasses.dataclass(eq=False)
class Forward:
    """A training forward of a model."""

    module: nn.Module
    arguments: Any
    """(args, kwargs) with Kept and Slot in place of tensors."""
    around: Surroundings
    slots: tuple[int, ...] = ()
    """The slot of each tensor in what it returned."""
    outputs: tuple[int, ...] = ()
    """Numbers of the tensors in it that need a gradient, each once."""
    inner: frozenset[int] = frozenset()
    """Those of them from which another one was computed inside the model, such as the logits behind its loss."""
    gradients: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    """Number of an output -> the gradient that came back to it, over all backwards."""
    scalar: bool = False
    """Whether an output that needs a gradient is a scalar: the model computes its loss itself."""
    chained: bool = False
    """Whether an argument was made by an earlier forward."""

    @property
    def samples(self) -> int:
        """Length of the first dimension that most tensor arguments share; 0: none."""
        sizes = [x.value().shape[0] for x in leaves(self.arguments) if isinstance(x, Kept) and x.value().dim()]
        return max(sizes, key=sizes.count) if sizes else 0

    def part(self, rows: slice | None) -> tuple[Any, Any]:
        """(args, kwargs) with some rows of every tensor whose first dimension is the samples."""
        count = 0 if rows is None else self.samples

        def cut(x: Any) -> Any:
            if not isinstance(x, Kept):
                return x
            value = x.value()
            return value[rows] if count and value.dim() and value.shape[0] == count else value

        return tree_map(cut, self.arguments)  # type: ignore[no-any-return]


class Operation(NamedTuple):
    """A function of torch that the training loop called on what a model gave."""

    function: Callable[..., Any]
    arguments: Any
    results: tuple[int | None, ...]
    """The slot of each tensor in the result."""
    writes: bool
    """Whether it writes to an argument."""
    gradients: bool
    """Whether gradients were on."""
    autocasts: Autocasts
    saved: Saved


class Backward(NamedTuple):
    """A call of backward()."""

    root: int | None
    """Slot of the root; None: the program did not make it."""
    value: Kept
    """The root, see `_derived`."""
    loss: Kept
    """The loss before a GradScaler multiplied it."""
    gradient: Kept | None
    retain: bool


Entry = Forward | Operation | Backward


@dataclasses.dataclass(eq=False)
class Program:
    """What one optimizer step computed."""

    entries: list[Entry]
    broken: str = ""
    """Why the operations behind the models cannot be repeated."""

    @property
    def forwards(self) -> list[Forward]:
        """The forwards, in order."""
        return [entry for entry in self.entries if isinstance(entry, Forward)]

    @property
    def backwards(self) -> list[Backward]:
        """The backwards, in order."""
        return [entry for entry in self.entries if isinstance(entry, Backward)]

    def needed(self) -> list[Entry]:
        """The entries without the operations that no backward needs, such as sums for a log."""
        wanted = {entry.root for entry in self.backwards}
        kept: list[Entry] = []
        for entry in reversed(self.entries):
            if isinstance(entry, Operation):
                slots = [x.number for x in leaves(entry.arguments) if isinstance(x, Slot)]
                if not (wanted & {*entry.results} or (entry.writes and slots)):
                    continue
                wanted |= {*slots}
            elif isinstance(entry, Forward):
                wanted |= {x.number for x in leaves(entry.arguments) if isinstance(x, Slot)}
            kept.append(entry)
        return kept[::-1]

    @property
    def modules(self) -> list[nn.Module]:
        """The models that ran."""
        return list({id(f.module): f.module for f in self.forwards}.values())


class Recorder:
    """Records a step of these models.

    Args:
        roots: the models, as the training calls them.
        guard: wraps what the training calls, so that an error in it does not end the training.

    Example:
        >>> model = nn.Linear(4, 4)
        >>> recorder = Recorder([model])
        >>> loss = model(torch.ones(2, 4)).square().mean()
        >>> recorder.backward(loss, loss, None, False)
        >>> loss.backward()
        >>> program = recorder.finish()
        >>> [type(entry).__name__ for entry in program.entries], program.broken
        (['Forward', 'Operation', 'Operation', 'Backward'], '')
    """

    def __init__(self, roots: Sequence[nn.Module], guard: Guard = lambda hook: hook) -> None:
        self.program, self._guard = Program([]), guard
        self._slots = 0
        self._known: dict[int, tuple[Tensor, int]] = {}
        self._history: dict[int, Any] = {}
        self._inside: list[Forward | None] = []
        self._tail = _Tail(self)
        self.compiled = has_compiled()
        self._handles: list[Any] = []
        for root in roots:
            self._handles += [
                root.register_forward_pre_hook(guard(self._before), prepend=True, with_kwargs=True),
                root.register_forward_hook(guard(self._after), with_kwargs=True, always_call=True),
            ]

    @property
    def in_forward(self) -> bool:
        """Whether a forward of a model runs now."""
        return bool(self._inside)

    def finish(self) -> Program:
        """Ends the recording and removes every hook."""
        self.close()
        if (self.compiled or has_compiled()) and any(entry.root is None for entry in self.program.backwards):
            self.program.broken = self.program.broken or "this process runs compiled code"
        return self.program

    def close(self) -> None:
        """Removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._tail.close()
        self._known.clear()
        self._history.clear()

    # --- forwards -------------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._tail.leave()
        trains = torch.is_grad_enabled() and not self._inside and torch._C._current_graph_task_id() == -1
        traced = torch._C._get_tracing_state() is not None
        if not trains or traced or torch._C._are_functorch_transforms_active():  # whose tensors end with it
            self._inside.append(None)
            return
        arguments = self._kept((tuple(args), dict(kwargs)))
        chained = any(isinstance(leaf, Slot) for leaf in leaves(arguments))
        self._inside.append(Forward(module, arguments, Surroundings.of(module), chained=chained))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._inside:
            return
        forward = self._inside.pop()
        if forward is None or output is None:  # None: the forward raised
            if not self._inside and self.program.entries:
                self._enter()
            return
        self.program.entries.append(forward)
        found = list(tensors_in(output))
        forward.slots = tuple(map(self._know, found))
        floats = {id(x): i for i, x in enumerate(found) if x.requires_grad and x.is_floating_point()}
        forward.outputs = tuple(floats.values())
        forward.inner = _inner({i: found[i] for i in forward.outputs})
        for number in forward.outputs:
            forward.scalar |= found[number].numel() == 1
            found[number].register_hook(self._guard(partial(_keep, forward, number)))
        self._enter()

    def _enter(self) -> None:
        if not self.compiled:
            self._tail.enter()

    # --- operations -----------------------------------------------------------------------------------------------

    def operation(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a function of torch, and records it if it reads what the program has made."""
        note = self._guard(self._begun)(function, args, kwargs)
        result = function(*args, **kwargs)
        if note is not None:
            self._guard(note)(result)
        return result

    def _begun(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Callable[[Any], None] | None:
        """What records a call, once its result is there; None for a call that the program needs not know."""
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(self._number(x) is not None for x in given):
            return None
        name = getattr(function, "__name__", "")
        writes = name in _WRITES or (name.endswith("_") and not name.startswith("__")) or kwargs.get("out") is not None
        for x in given:
            self._check(x)
        arguments = self._kept((args, kwargs), copies=writes)
        state = torch.is_grad_enabled(), autocasts(), saved_by()

        def note(result: Any) -> None:
            found = list(tensors_in(result))
            if not found and name != "__setitem__":
                return
            if len(self.program.entries) > _MOST_OPERATIONS:
                self.program.broken = f"the loss has more than {_MOST_OPERATIONS} operations"
                self._tail.leave()
                return
            slots = tuple(self._know(x) for x in found)
            self.program.entries.append(Operation(function, arguments, slots, writes, *state))
            for x in given if writes else ():
                if self._number(x) is not None:
                    self._history[self._number(x) or 0] = x.grad_fn

        return note

    def _check(self, x: Tensor) -> None:
        """Notes a tensor whose history the program did not see: an autograd.Function made or changed it."""
        number = self._number(x)
        if number is None:
            if x.requires_grad and not x.is_leaf:
                self.program.broken = "the loss reads a tensor with a graph that was not recorded"
        elif self._history.get(number) is not x.grad_fn:
            self.program.broken = "an autograd.Function or a compiled function is part of the loss"

    # --- backwards ------------------------------------------------------------------------------------------------

    def backward(self, root: Tensor, loss: Tensor, gradient: Tensor | None, retain: bool) -> None:
        """Notes a backward that is about to begin."""
        self._tail.leave()
        number = self._number(root)
        if number is None:
            self.program.broken = self.program.broken or "the loss was not computed from what the model returned"
        else:
            self._check(root)
        kept = None if gradient is None else Kept(gradient)
        value, before = (Kept(_derived(x.detach(), gradient)) for x in (root, loss))
        self.program.entries.append(Backward(number, value, before, kept, retain))
        if not retain:
            self._known.clear()
            self._history.clear()

    # --- tensors --------------------------------------------------------------------------------------------------

    def _number(self, x: Tensor) -> int | None:
        entry = self._known.get(id(x))
        return entry[1] if entry is not None and entry[0] is x else None

    def _know(self, x: Tensor) -> int:
        number = self._number(x)
        if number is None:
            number = self._slots
            self._slots += 1
            self._known[id(x)] = (x, number)
        self._history[number] = x.grad_fn
        return number

    def _kept(self, tree: Any, *, copies: bool = False) -> Any:
        def keep(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            number = self._number(x)
            return Slot(number) if number is not None else Kept(x, copies=copies)

        return tree_map(keep, tree)


class Below(TorchFunctionMode):
    """A mode that lies below all others, so that they come and go as they like: each of them pops the top. Only torch's
    own DeviceContext insists on the very bottom. It leaves before torch compiles, or torch would compile again in the
    first step without it."""

    def __init__(self) -> None:
        super().__init__()
        self.active = False
        self._thread = 0
        self._compiles: Any = None

    def enter(self) -> Self:
        """Begins to see calls; returns itself."""
        self.active, self._thread = True, threading.get_ident()
        self.heed_compiler()
        if self not in _stack():
            others = [torch.overrides._pop_mode() for _ in _stack()][::-1]
            device = others and type(others[0]).__name__ == "DeviceContext"
            for one in (*others[: int(bool(device))], self, *others[int(bool(device)) :]):
                torch.overrides._push_mode(one)
        return self

    def leave(self, *_: Any) -> None:
        """Sees no more calls."""
        self.active = False
        if self in _stack():  # not while one of its own calls runs: it is off the stack then, and comes back idle
            others = [torch.overrides._pop_mode() for _ in _stack()][::-1]
            for one in others:
                if one is not self:
                    torch.overrides._push_mode(one)

    @property
    def stray(self) -> bool:
        """Whether another thread entered it, out of whose stack only that one can take it."""
        return self._thread != threading.get_ident()

    def close(self) -> None:
        """Leaves for good."""
        self.leave()
        if self._compiles is not None:
            self._compiles.remove_start_callback(self.leave)
            self._compiles = None

    def heed_compiler(self) -> None:
        """Asks to be told when torch.compile begins, as soon as it can be."""
        dynamo = sys.modules.get("torch._dynamo.callback")
        if self._compiles is None and (handler := getattr(dynamo, "callback_handler", None)) is not None:
            self._compiles = handler
            handler.register_start_callback(self.leave)


class _Tail(Below):
    """Sees the functions of torch that the training loop calls."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not self.active or torch._C._current_graph_task_id() != -1:
            return func(*args, **kwargs)
        return self._recorder.operation(func, args, kwargs)


def _stack() -> list[Any]:
    return [*torch.overrides._get_current_function_mode_stack()]


def has_compiled() -> bool:
    """Whether torch has compiled code in this process: a new mode would make it compile again."""
    module = sys.modules.get("torch._dynamo.utils")
    return module is not None and bool(module.counters["frames"])


def _derived(root: Tensor, gradient: Tensor | None) -> Tensor:
    """The number whose derivative a backward takes: that of a whole tensor is its product with the gradient given."""
    return root if root.numel() == 1 or gradient is None else (root * gradient).sum()


def _keep(forward: Forward, number: int, gradient: Tensor | None) -> None:
    if torch.compiler.is_compiling() or gradient is None:  # compiled code gives an output none that the loss ignores
        return
    with torch.no_grad():
        before = forward.gradients.get(number)
        forward.gradients[number] = gradient.detach() if before is None else before + gradient


def _inner(outputs: Mapping[int, Tensor]) -> frozenset[int]:
    """The outputs on the way to another output."""
    if len(outputs) < 2:
        return frozenset()
    ends = {x.grad_fn: i for i, x in outputs.items() if x.grad_fn is not None}
    found: set[int] = set()
    seen = set(ends)
    waiting = [after for node in ends for after, _ in node.next_functions]
    while waiting and len(found) < len(ends):
        node = waiting.pop()
        if node in ends:
            found.add(ends[node])
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [after for after, _ in node.next_functions]
    return frozenset(found)


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """As torch's; a Slot is a leaf."""
    return pytree.tree_map(change, tree, is_leaf=lambda x: isinstance(x, Slot))


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree; a Slot is one."""
    return pytree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, Slot))


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors of what a model returned, in a fixed order: containers, dataclasses, mappings."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name, None))


Gradients = list[Tensor | None]
"""One per parameter."""


@dataclass(frozen=True)
class Way:
    """How the models of a program run: with their casts, without, or with some."""

    ambient: Callable[[Ambient], Ambient] = lambda ambient: ambient
    """ottava's settings, from those of the run."""
    switched: Callable[[], AbstractContextManager[Any]] = nullcontext
    """A context around each forward and its backward."""
    mode: Exact | None = None
    """The same, and around each operation of the loss."""
    saves: bool = True
    """Whether the script's hooks pack what waits for the backward; without casts none does, for packing may be one."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """The surroundings of a forward and of its backward."""
        with self.switched(), self.mode or nullcontext():
            yield


AS_IT_RAN = Way()


@dataclass(eq=False)
class Pass:
    """What one run of a program gave."""

    gradients: Gradients
    noise: Gradients | None = None
    """Twice the gradient of the first half of the samples, less the whole gradient."""
    losses: list[Tensor] = field(default_factory=list)
    """The root of each backward; empty if gradients of outputs were replayed."""


class Player:
    """Runs a program.

    Args:
        program: what a step has computed.
        parameters: gradients are collected for these.
    """

    def __init__(self, program: Program, parameters: Sequence[nn.Parameter]) -> None:
        self.program, self.parameters = program, list(parameters)
        self.accumulates = any(type(p).__name__ == "DTensor" or hasattr(p, "device_mesh") for p in self.parameters)
        """Whether gradients must pass through `p.grad`: FSDP2 and reentrant checkpointing need that."""

    @property
    def tail(self) -> bool:
        """Whether the operations behind the models can be repeated."""
        return not self.program.broken and bool(self.program.backwards)

    def run(self, way: Way, *, tail: bool, halves: bool = False, rows: slice | None = None) -> Pass:
        """Runs everything.

        Args:
            tail: repeat the operations behind the models; False: take the gradients that came back to their outputs.
            halves: also collect `Pass.noise`, if there are two backwards or outputs with two rows.
            rows: some samples of each forward only.
        Raises:
            NotReplayableError: a tensor has been overwritten.
        """
        if way.mode is not None:
            way.mode.begin()
        run = _Run(self, way, tail=tail, halves=halves, rows=rows)
        with torch.enable_grad(), _uncompiled(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.accumulates:
                with _bare(self.parameters):
                    return run.play()
            try:
                return run.play()
            except RuntimeError as error:
                if "heckpoint" not in str(error):
                    raise
            self.accumulates = True  # reentrant checkpointing takes no torch.autograd.grad
            with _bare(self.parameters):
                return _Run(self, way, tail=tail, halves=halves, rows=rows).play()

    def losses(self, way: Way) -> list[Tensor]:
        """The losses under the present weights, without a backward."""
        with torch.no_grad(), _uncompiled(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Run(self, way, tail=True, halves=False, rows=None, backward=False).play().losses


class _Run:
    def __init__(
        self, player: Player, way: Way, *, tail: bool, halves: bool, rows: slice | None, backward: bool = True
    ) -> None:
        self.player, self.way, self.tail, self.rows, self.backward = player, way, tail, rows, backward
        program = player.program
        self.entries = program.needed() if tail else program.forwards
        self.units = len(program.backwards) if tail else len(program.forwards)
        self.chained = any(f.chained for f in program.forwards)
        self.by_unit = halves and self.units >= 2 and self.units % 2 == 0
        self.by_row = halves and not self.by_unit and not (self.chained and tail)
        self.values: dict[int, Tensor] = {}
        self.live: list[dict[int, Tensor]] = []
        self.ends: list[dict[int, Tensor]] = []
        self.in_place = any(isinstance(entry, Operation) and entry.writes for entry in self.entries)
        self.pending: dict[tuple[int, int], Tensor] = {}
        self.total: Gradients = [None] * len(player.parameters)
        self.first: Gradients = [None] * len(player.parameters)
        self.halved = False
        self.done = 0
        self.losses: list[Tensor] = []

    def play(self) -> Pass:
        for entry in self.entries:
            if isinstance(entry, Forward):
                self._forward(entry)
            elif isinstance(entry, Operation):
                self._operation(entry)
            else:
                self._backward(entry)
        noise = None
        if self.halved:
            pairs = zip(self.first, self.total, strict=True)
            noise = [None if g is None else (-g if a is None else 2 * a - g) for a, g in pairs]
        return Pass(self.total, noise, self.losses)

    def _forward(self, entry: Forward) -> None:
        entry.around.restore(entry.module)
        args, kwargs = tree_map(self._value if self.tail else self._apart, entry.part(self.rows))
        around = entry.around
        under = under_ambient(self.way.ambient(around.ambient)), under_saved(around.saved if self.way.saves else None)
        with under_autocasts(around.autocasts), under[0], under[1], self.way.on():
            outputs = list(tensors_in(entry.module(*args, **kwargs)))
        if len(outputs) != len(entry.slots):
            raise NotReplayableError("the model returned other tensors than in the step")
        self.values |= dict(zip(entry.slots, outputs, strict=True))
        wanted = {i: outputs[i] for i in entry.outputs}
        self.live.append(wanted)
        if not self.tail:
            known = {i: g for i, g in entry.gradients.items() if i not in entry.inner and g.shape == wanted[i].shape}
            self.pending |= {(len(self.live) - 1, i): g for i, g in known.items()}
            self._pull()
        elif not self.chained:  # what comes behind the model gets ends of its own, so that no path counts twice
            ends = {i: x.detach().requires_grad_() for i, x in wanted.items()}
            self.ends.append(ends)
            self.values |= {entry.slots[i]: x.clone() if self.in_place else x for i, x in ends.items()}

    def _value(self, x: Any) -> Any:
        if isinstance(x, Slot) and x.number not in self.values:  # without the tail no operation is repeated
            raise NotReplayableError(
                "the loss has other bits when it is repeated, and models read results of operations"
            )
        return self.values[x.number] if isinstance(x, Slot) else x.value() if isinstance(x, Kept) else x

    def _apart(self, x: Any) -> Any:
        """The same without its graph: the gradients that came back count every path."""
        value = self._value(x)
        return value.detach().requires_grad_(value.requires_grad) if isinstance(x, Slot) else value

    def _operation(self, entry: Operation) -> None:
        args, kwargs = tree_map(self._value, entry.arguments)
        under = under_autocasts(entry.autocasts), under_saved(entry.saved if self.way.saves else None)
        with torch.set_grad_enabled(entry.gradients), under[0], under[1], self.way.mode or nullcontext():
            results = list(tensors_in(entry.function(*args, **kwargs)))
        if len(results) != len(entry.results):
            raise NotReplayableError("an operation of the loss returned other tensors than in the step")
        self.values |= {slot: x for slot, x in zip(entry.results, results, strict=True) if slot is not None}

    def _backward(self, entry: Backward) -> None:
        assert entry.root is not None  # or the program is broken
        root = self.values[entry.root]
        gradient = None if entry.gradient is None else entry.gradient.value()
        self.losses.append(_derived(root.detach(), gradient))
        if not self.backward:
            self.live, self.ends = [], []
            return
        with self.way.on():
            if self.chained:
                self._add(self._gradients([root], [gradient], retain=entry.retain), self.done % 2 == 0)
            else:
                places = [(k, i) for k, ends in enumerate(self.ends) for i in ends]
                outputs = [self.ends[k][i] for k, i in places]
                own = self._leaves_of_loss()
                found = torch.autograd.grad(root, [*outputs, *own], gradient, retain_graph=True, allow_unused=True)
                for place, g in zip(places, found, strict=False):
                    if g is not None:
                        before = self.pending.get(place)
                        self.pending[place] = g if before is None else before + g
                of_loss = dict(zip(map(id, own), found[len(places) :], strict=True))
                self._add([of_loss.get(id(p)) for p in self.player.parameters], self.done % 2 == 0)
        if not entry.retain:
            self._pull()
        else:
            self.done += 1

    def _leaves_of_loss(self) -> list[Tensor]:
        """Parameters of the models that the operations behind them use, too."""
        known = {id(p) for p in self.player.parameters}
        found = {
            id(x.leaf): x.leaf
            for entry in self.entries
            if isinstance(entry, Operation)
            for x in leaves(entry.arguments)
            if isinstance(x, Kept) and x.leaf is not None and id(x.leaf) in known
        }
        return list(found.values())

    def _pull(self) -> None:
        """The backward of the models from the gradients of their outputs."""
        places = list(self.pending)
        if places and not (self.chained and self.tail):
            outputs = [self.live[k][i] for k, i in places]
            gradients = [self.pending[place] for place in places]
            with self.way.on():
                masked = [_first_half(g) for g in gradients] if self.by_row else []
                some = bool(masked) and any(m is not g for m, g in zip(masked, gradients, strict=True))
                self._add(self._gradients(outputs, gradients, retain=some), self.done % 2 == 0)
                if some:
                    self.halved = True
                    _accumulate(self.first, self._gradients(outputs, masked, retain=False))
        self.live, self.ends, self.pending = [], [], {}
        self.values = {} if self.tail else self.values
        self.done += 1

    def _gradients(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], *, retain: bool) -> Gradients:
        parameters = self.player.parameters
        if not self.player.accumulates:
            wanted = [p for p in parameters if p.requires_grad]
            found = torch.autograd.grad(outputs, wanted, gradients, retain_graph=retain, allow_unused=True)
            by_id = dict(zip(map(id, wanted), found, strict=True))
            return [by_id.get(id(p)) for p in parameters]
        torch.autograd.backward(outputs, gradients, retain_graph=retain)
        result = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        return result

    def _add(self, found: Gradients, first: bool) -> None:
        _accumulate(self.total, found)
        if self.by_unit:
            self.halved = True
            if first:
                _accumulate(self.first, found)


def _accumulate(total: Gradients, found: Gradients) -> None:
    for i, g in enumerate(found):
        if g is not None:
            before = total[i]
            total[i] = g.detach() if before is None else before + g


def _first_half(gradient: Tensor) -> Tensor:
    """Zero for the second half of its rows; itself if it has no two rows in any dimension but the last."""
    for dim in range(max(gradient.dim() - 1, 1) if gradient.dim() else 0):
        if (size := gradient.shape[dim]) >= 2:
            masked = gradient.clone()
            masked.narrow(dim, size // 2, size - size // 2).zero_()
            return masked
    return gradient


@contextmanager
def _bare(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Parameters without gradients and without the hooks that run when one has been accumulated."""
    with ExitStack() as stack:
        for p in parameters:
            stack.callback(setattr, p, "grad", p.grad)
            p.grad = None
            if hooks := p._post_accumulate_grad_hooks:
                stack.callback(hooks.update, dict(hooks))
                hooks.clear()
        yield


def _uncompiled() -> AbstractContextManager[Any]:
    known = "torch._dynamo" in sys.modules  # its import takes seconds
    return torch.compiler.set_stance("force_eager") if known else nullcontext()


def without_casts(ambient: Ambient) -> Ambient:
    """ottava's settings without casts. Not enabled=False: torch's BF16 GEMM is 30 times slower on some CPUs."""
    return replace(ambient, recipe=get_recipe("bf16"), enabled=True, calibrating=False, batch_invariant=False)
