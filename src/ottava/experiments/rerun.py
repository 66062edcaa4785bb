"""Runs the last steps of a training again from a snapshot: as they ran, without casts, and under remedies.

The ring keeps one or two snapshots on the CPU and what every step since has computed. Clipping is repeated by its law:
where the run's gradient was shortened to a length, a longer gradient of a replay is shortened to it, too. Afterwards
the run is as it was, bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ottava.engine.autocast import Ambient
from ottava.experiments.casts import Casts, only_without
from ottava.experiments.nonfinite import first_nonfinite
from ottava.experiments.passes import AS_IT_RAN, Gradients, Player, Way
from ottava.experiments.program import Program
from ottava.experiments.shadow import local, nothing_changes, parameters_of
from ottava.experiments.snapshot import Snapshot
from ottava.experiments.surroundings import NotReplayableError
from ottava.measure.limits import LEAST, robust_z
from ottava.recipe import Recipe, get_recipe

CALM = 6.0
"""A replay is inside the noise if its last loss is at most so many robust deviations above the median before."""
_REMEDIES = ("tensorwise", "rowwise", "blockwise")


@dataclass(frozen=True)
class _Step:
    """A step that can run again."""

    number: int
    program: Program
    settings: tuple[dict[str, Any], ...]
    """Of the optimizer's groups."""
    length: float
    """Norm of the gradient as the optimizer saw it."""


class Ring:
    """Keeps what a replay needs.

    Args:
        every: steps from one snapshot to the next.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._kept: deque[tuple[Snapshot, list[_Step]]] = deque(maxlen=2)
        self._optimizer: Optimizer | None = None
        self._model: nn.Module | None = None
        self.nonfinite: dict[str, Any] | None = None
        """The first operation of the last replay whose result was not finite; see `nonfinite`."""

    def note(self, number: int, program: Program, optimizer: Optimizer) -> None:
        """An optimizer is about to make this step."""
        if program.broken:
            raise NotReplayableError(f"no step can run again: {program.broken}")
        self._model, self._optimizer = nn.ModuleList(program.modules), optimizer
        if self._kept:
            settings = tuple({k: copy.copy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups)
            for forward in program.forwards:
                forward.gradients.clear()  # they are as large as the outputs
            length = _length([p.grad for p in _held(optimizer)])
            self._kept[-1][1].append(_Step(number, program, settings, length))

    def begin(self, done: int) -> None:
        """A step begins: takes a snapshot if it is time."""
        if self._model is None or self._optimizer is None:
            return
        if not self._kept or done - self._kept[-1][0].step >= self.every:
            known = {id(p) for p in self._model.parameters()}
            if any(id(p) not in known for p in _held(self._optimizer)):
                raise NotReplayableError("the optimizer holds parameters outside of the models that ran")
            self._kept.append((Snapshot.take(self._model, self._optimizer, done), []))

    def forget(self) -> None:
        """Drops everything."""
        self._kept.clear()

    def replay(
        self,
        casts: Casts | None,
        before: Sequence[float],
        blamed: Iterable[tuple[str, str]],
        name_of_module: Callable[[nn.Module], str],
    ) -> dict[str, Any] | None:
        """Runs the kept steps again; None: there are none.

        Args:
            casts: of the models.
            before: losses of the run before the event.
            blamed: the set of an ablation.
            name_of_module: full name of a module.
        """
        steps = [step for _, kept in self._kept for step in kept]
        if not steps or self._model is None or self._optimizer is None:
            return None
        snapshot, model, optimizer = self._kept[0][0], self._model, self._optimizer
        arms: list[dict[str, Any]] = []
        with nothing_changes([model]):
            present = Snapshot.take(model, optimizer, steps[-1].number)
            try:
                lengths = self._lengths(snapshot, steps, arms)
                if not math.isfinite(lengths[-1]):  # the weights are those before that step
                    program = steps[len(lengths) - 1].program
                    player = Player(program, parameters_of(program.modules))
                    self.nonfinite = first_nonfinite(player, name_of_module, tail=True)
                limit = _clipped_to(steps, lengths)
                ran = [_loss(step.program) for step in steps]
                differs = _difference(steps, ran, arms[0]["losses"])
                for name, way, lr in _others(casts, blamed):
                    losses = self._run(snapshot, steps, way, lr=lr, limit=limit)
                    arms.append({"name": name, "losses": losses, "calm": _calm(losses, before)})
                    if arms[-1]["calm"] and name != "high precision":
                        break
            finally:
                present.restore(model, optimizer)
        for arm in arms:
            arm["losses"] = [x if math.isfinite(x) else None for x in arm["losses"]]
        return {"from": steps[0].number, "reproduces": differs is None, "differs": differs, "arms": arms}

    def _lengths(self, snapshot: Snapshot, steps: Sequence[_Step], arms: list[dict[str, Any]]) -> list[float]:
        """Runs the steps as they ran, with the lengths that their gradients had; the lengths before clipping."""
        lengths: list[float] = []
        arms.append({"name": "as it ran", "losses": self._run(snapshot, steps, AS_IT_RAN, lengths=lengths)})
        return lengths

    def _run(
        self,
        snapshot: Snapshot,
        steps: Sequence[_Step],
        way: Way,
        *,
        lr: float = 1.0,
        limit: float | None = None,
        lengths: list[float] | None = None,
    ) -> list[float]:
        """The losses of the steps. lengths: gets those of the gradients, which are cut to the lengths of the run."""
        assert self._model is not None
        assert self._optimizer is not None
        snapshot.restore(self._model, self._optimizer)
        losses = []
        for step in steps:
            parameters = parameters_of(step.program.modules)
            found = Player(step.program, parameters).run(way, tail=True)
            ratio = _scale(step.program)
            losses.append(math.fsum(float(x) for x in found.losses) / max(len(found.losses), 1) / ratio)
            gradients = [None if g is None else g / ratio if ratio != 1 else g for g in found.gradients]
            length = _length(gradients)
            if not (math.isfinite(losses[-1]) and math.isfinite(length)):
                if lengths is not None:
                    lengths.append(math.nan)
                break
            if lengths is not None:
                lengths.append(length)
                factor = step.length / length if length > 0 else 1.0
                factor = factor if abs(factor - 1) > 1e-5 else 1.0
            else:
                factor = min(1.0, limit / length) if limit is not None and length > 0 else 1.0
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient if gradient is None or factor == 1 else gradient * factor
            for group, settings in zip(self._optimizer.param_groups, step.settings, strict=True):
                group.update(settings)
                group["lr"] = settings["lr"] * lr
            self._optimizer.step()
        return losses


def _others(casts: Casts | None, blamed: Iterable[tuple[str, str]]) -> Iterable[tuple[str, Way, float]]:
    """Name, way and factor of the learning rate of every arm behind the first: remedies, cheapest first."""
    if casts is not None and casts.mode == "real":
        yield "high precision", casts.without, 1.0
        if casts.recipes:
            for name in _REMEDIES:
                if name != casts.recipe:
                    yield name, Way(partial(_under, get_recipe(name))), 1.0
        if blamed := list(blamed):
            yield "bf16 in " + ", ".join(f"{n} {g}".strip() for n, g in blamed), only_without(casts, blamed), 1.0
    yield "half the learning rate", AS_IT_RAN, 0.5


def _under(recipe: Recipe, ambient: Ambient) -> Ambient:
    return replace(ambient, recipe=recipe, enabled=True)


def _calm(losses: Sequence[float], before: Sequence[float]) -> bool | None:
    """Whether the last loss is inside the noise of those before the event; None: too few are known."""
    if len(before) < LEAST // 2:
        return None
    return math.isfinite(losses[-1]) and robust_z(losses[-1], before) <= CALM


def _clipped_to(steps: Sequence[_Step], lengths: Sequence[float]) -> float | None:
    """The length to which the run has cut its gradients; None: it has not, or changed them in another way."""
    pairs = [(step.length, length) for step, length in zip(steps, lengths, strict=False) if length > 0]
    cut = [used for used, length in pairs if math.isfinite(used) and used / length < 0.999]
    limit = max(cut, default=math.inf)
    return limit if cut and all(not step.length > 1.001 * limit for step in steps) else None


def _difference(steps: Sequence[_Step], ran: Sequence[float], again: Sequence[float]) -> str | None:
    for step, one, other in zip(steps, ran, again, strict=False):
        if not (one == other or (math.isnan(one) and math.isnan(other))):
            return f"the loss of step {step.number} was {one:.9g} and is {other:.9g}"
    return None


def _loss(program: Program) -> float:
    values = [float(entry.loss.value()) for entry in program.backwards]
    return math.fsum(values) / max(len(values), 1)


def _scale(program: Program) -> float:
    for entry in program.backwards:
        root, loss = float(entry.value.value()), float(entry.loss.value())
        if loss and math.isfinite(root / loss):
            return root / loss
    return 1.0


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _length(gradients: Gradients) -> float:
    norms = [torch.linalg.vector_norm(local(g), dtype=torch.float64) for g in gradients if g is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0
