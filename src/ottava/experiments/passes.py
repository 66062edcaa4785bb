"""Runs a program again and collects its gradients, without a trace in `p.grad`, in hooks or in other processes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ottava.engine.autocast import Ambient
from ottava.experiments.program import Backward, Forward, Operation, Program, Slot, leaves, tensors_in, tree_map
from ottava.experiments.surroundings import Kept, NotReplayableError, under_ambient, under_autocasts
from ottava.recipe import get_recipe

Gradients = list[Tensor | None]
"""One per parameter."""


@dataclass(frozen=True)
class Way:
    """How the models of a program run: with their casts, without, or with some."""

    ambient: Callable[[Ambient], Ambient] = lambda ambient: ambient
    """ottava's settings, from those of the run."""
    switched: Callable[[], AbstractContextManager[Any]] = nullcontext
    """A context around each forward and its backward."""


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
        with under_autocasts(around.autocasts), under_ambient(self.way.ambient(around.ambient)), self.way.switched():
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
        return self.values[x.number] if isinstance(x, Slot) else x.value() if isinstance(x, Kept) else x

    def _apart(self, x: Any) -> Any:
        """The same without its graph: the gradients that came back count every path."""
        value = self._value(x)
        return value.detach().requires_grad_(value.requires_grad) if isinstance(x, Slot) else value

    def _operation(self, entry: Operation) -> None:
        args, kwargs = tree_map(self._value, entry.arguments)
        with torch.set_grad_enabled(entry.gradients), under_autocasts(entry.autocasts):
            results = list(tensors_in(entry.function(*args, **kwargs)))
        if len(results) != len(entry.results):
            raise NotReplayableError("an operation of the loss returned other tensors than in the step")
        self.values |= {slot: x for slot, x in zip(entry.results, results, strict=True) if slot is not None}

    def _backward(self, entry: Backward) -> None:
        assert entry.root is not None  # or the program is broken
        root = self.values[entry.root]
        self.losses.append(root.detach())
        if not self.backward:
            self.live, self.ends = [], []
            return
        gradient = None if entry.gradient is None else entry.gradient.value()
        with self.way.switched():
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
            with self.way.switched():
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
    before = [(p, p.grad, p._post_accumulate_grad_hooks) for p in parameters]
    hooks = [(h, dict(h)) for _, _, h in before if h]
    for p, _, _ in before:
        p.grad = None
    for live, _ in hooks:
        live.clear()
    try:
        yield
    finally:
        for p, gradient, _ in before:
            p.grad = gradient
        for live, saved in hooks:
            live.update(saved)


@contextmanager
def _uncompiled() -> Iterator[None]:
    if "torch._dynamo" not in sys.modules:  # its import takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def without_casts(ambient: Ambient) -> Ambient:
    """ottava's settings without casts. Not enabled=False: torch's BF16 GEMM is 30 times slower on some CPUs."""
    return replace(ambient, recipe=get_recipe("bf16"), enabled=True, calibrating=False, batch_invariant=False)
