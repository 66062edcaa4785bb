"""Loss spikes undone: rewind, replay the same batches in high precision, decide whose fault it was, and go on.

    the spike comes again without FP8    the data, or the training itself: the batch is skipped (then the whole window)
    it does not                          FP8: the replay stays, training goes on in high precision for a while, then in
                                         FP8 again; each relapse doubles the while, and a `fallback` may be applied

In high precision the doors still note every amax (`autocast(calibrating=True)`), so that predicted scales have seen
what was new when FP8 comes back. Everything since a snapshot is repeated: a step must depend on nothing but the model,
its optimizer, torch's random generators, the batch, and what is in `extras`. A step that enters an ottava.autocast of
its own decides for itself, and cannot be replayed in high precision.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ottava.ambient import autocast
from ottava.debug.analysis.loss import LEAST, robust_z
from ottava.debug.remedy.snapshot import Snapshot, Stateful
from ottava.quantizer import Quantizer

TrainStep = Callable[[Any], Any]
"""(batch) -> loss, or (loss, grad_norm): forward, backward and the optimizer's step."""
_FORGIVEN = 4
"""FP8 that was well for so many times the last hold starts again with the first one."""


class EventLog(Protocol):
    """Where events go; a `RunWriter` is one."""

    def event(self, step: int, kind: str, **facts: Any) -> None:
        """Notes one."""


@dataclass(frozen=True)
class Spike:
    """A loss spike, and what became of it."""

    step: int
    """At which it was seen, counted from 1."""
    loss: float
    z: float
    """Robust standard deviations above the median before; inf where a number was not finite."""
    rewound_to: int
    """Steps done in the snapshot."""
    cause: str
    """"data", "fp8" or "transient"."""
    replayed_loss: float
    """Of the replay that decided: in high precision, or as it was for "transient"."""
    action: str
    """What was done."""
    skipped: tuple[int, ...] = ()
    """Steps whose batches were left out."""


class SpikeGuard:
    """Runs the steps of any training loop and undoes loss spikes.

    Args:
        model: with ottava layers.
        optimizer: its optimizer.
        train_step: (batch) -> loss, or (loss, grad_norm); must do all of a step: forward, backward, optimizer.step, and
            learning rate. Called again with the same batch when a spike is replayed.
        extras: what else a step changes and has a state_dict: schedulers, gradient scalers.
        snapshots: how many are kept.
        every: steps from one to the next. Batches since the oldest one are kept too.
        z: robust standard deviations above the median of the last `window` losses.
        window: see `z`.
        lead: a snapshot must be this many steps older than the spike, where there is one: what causes a spike often
            comes some steps before it.
        hold: steps in high precision after FP8 was to blame.
        fallback: called with (model, spike) when FP8 was to blame for the second time; see `fallback.Fallback`.
        log: where "spike" and "rewind" events go.
        on_rewind: called with the number of steps that are left, before the others are done again: to cut back a log.
        confirm: first replay the steps as they were; where the spike does not come again, it was neither ("transient":
            a machine, or a step that is not deterministic), and that replay stays.

    Example:
        >>> import torch, ottava
        >>> generator = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> report = ottava.convert(model.bfloat16(), "tensorwise")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def train_step(x):
        ...     optimizer.zero_grad()
        ...     loss = (model(x) - x).float().square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> guard = SpikeGuard(model, optimizer, train_step, every=10)
        >>> batches = [torch.randn(32, 64, dtype=torch.bfloat16) for _ in range(40)]
        >>> batches[30] *= 1e4                                            # a poisoned batch
        >>> losses = [guard(x) for x in batches]
        >>> guard.spikes[0].step, guard.spikes[0].cause, guard.spikes[0].skipped, losses[-1] < 2
        (31, 'data', (31,), True)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        train_step: TrainStep,
        *,
        extras: Sequence[Stateful] = (),
        snapshots: int = 3,
        every: int = 50,
        z: float = 6.0,
        window: int = 64,
        lead: int = 8,
        hold: int = 100,
        fallback: Callable[[nn.Module, Spike], object] | None = None,
        log: EventLog | None = None,
        on_rewind: Callable[[int], object] | None = None,
        confirm: bool = False,
    ) -> None:
        for name, value in (("snapshots", snapshots), ("every", every), ("window", window)):
            if value < 1:
                raise ValueError(f"SpikeGuard: {name} is {value}; needs 1 or more")
        if not z > 0:
            raise ValueError(f"SpikeGuard: z is {z}; needs a positive number, such as 6")
        self.model, self.optimizer, self.train_step, self.extras = model, optimizer, train_step, tuple(extras)
        self.every, self.z, self.window, self.lead, self.hold = every, z, window, lead, hold
        self.fallback, self.log, self.on_rewind, self.confirm = fallback, log, on_rewind, confirm
        self.step = 0
        """Batches taken in, those that were skipped among them."""
        self.spikes: list[Spike] = []
        """All so far."""
        self.high_precision_until = 0
        """Last step that runs in high precision."""
        self._blamed = 0
        self._snapshots: deque[tuple[Snapshot, tuple[float, ...]]] = deque(maxlen=snapshots)
        self._batches: dict[int, Any] = {}
        self._losses: deque[float] = deque(maxlen=window)
        self._skipped: set[int] = set()

    def __call__(self, batch: Any) -> float:
        """Does one step; if it spikes, undoes it and does it again. Returns its loss, NaN where it was skipped.

        Edge cases: a loss that is not finite counts as a spike from the first step on, any other from step 17 on.
        """
        if not self._snapshots:
            self._keep()
        self.step += 1
        self._batches[self.step] = batch
        loss, z = self._run(self.step, high_precision=self.step <= self.high_precision_until)
        if z > self.z:
            loss = self._recover(loss, z)
        if self.step % self.every == 0:
            self._keep()
        return loss

    @property
    def in_high_precision(self) -> bool:
        """Whether the next step runs without FP8."""
        return self.step < self.high_precision_until

    def _run(self, step: int, *, high_precision: bool) -> tuple[float, float]:
        """One step: its loss, and how far above the ones before."""
        context: AbstractContextManager[None] = nullcontext()
        if high_precision:
            predicts = any(isinstance(m, Quantizer) and m.spec is not None for m in self.model.modules())
            context = autocast(enabled=False, calibrating=predicts)
        with context:
            answer = self.train_step(self._batches[step])
        numbers = [float(v.detach()) if isinstance(v, Tensor) else float(v) for v in _several(answer) if v is not None]
        if not all(math.isfinite(number) for number in numbers):
            return numbers[0], math.inf
        z = robust_z(numbers[0], self._losses) if len(self._losses) >= min(LEAST, self.window) else 0.0
        if z <= self.z:
            self._losses.append(numbers[0])
        return numbers[0], z

    def _keep(self) -> None:
        """A snapshot; batches that no snapshot needs any more are forgotten."""
        snapshot = Snapshot.take(self.model, self.optimizer, self.step, self.extras)
        self._snapshots.append((snapshot, tuple(self._losses)))
        oldest = self._snapshots[0][0].step
        self._batches = {step: batch for step, batch in self._batches.items() if step > oldest}

    def _recover(self, loss: float, z: float) -> float:
        spiked = self.step
        start = self._rewind(spiked)
        spike, last = self._decide((spiked, loss, z, start))
        self.spikes.append(spike)
        if self.log is not None:
            facts = {"cause": spike.cause, "action": spike.action}
            self.log.event(spiked, "spike", loss=loss, z=z, replayed_loss=spike.replayed_loss, **facts)
            self.log.event(spiked, "rewind", to=start, skipped=list(spike.skipped), **facts)
        if spike.cause == "fp8" and self._blamed > 1 and self.fallback is not None:
            self.fallback(self.model, spike)
        return last

    def _decide(self, facts: tuple[int, float, float, int]) -> tuple[Spike, float]:
        """From the snapshot: whose fault it was, and the loss that stands for the step."""
        spiked, start = facts[0], facts[3]
        if self.confirm:
            last, again = self._replay(start, spiked, high_precision=None)
            if not again:
                return Spike(*facts, "transient", last, "the replay stays"), last
            self._rewind(spiked)
        replayed, again = self._replay(start, spiked, high_precision=True)
        return self._skip(facts, replayed) if again else (self._hold(facts, replayed), replayed)

    def _skip(self, facts: tuple[int, float, float, int], replayed: float) -> tuple[Spike, float]:
        """The data: without the batch; if that was not or is not enough, without any since the snapshot."""
        spiked, start = facts[0], facts[3]
        self._rewind(spiked)
        relapse = any(spike.cause == "data" and spike.rewound_to == start for spike in self.spikes)
        if not relapse:
            self._skipped.add(spiked)
            if not self._replay(start, spiked, high_precision=None)[1]:
                return Spike(*facts, "data", replayed, "skipped the batch", (spiked,)), math.nan
            self._rewind(spiked)
        window = tuple(range(start + 1, spiked + 1))
        self._skipped.update(window)
        action = f"skipped all {len(window)} batches since the snapshot"
        return Spike(*facts, "data", replayed, action, window), math.nan

    def _hold(self, facts: tuple[int, float, float, int], replayed: float) -> Spike:
        """FP8: the replay stays, and so does high precision for a while."""
        earlier = [spike.step for spike in self.spikes if spike.cause == "fp8"]
        if earlier and facts[0] - earlier[-1] > _FORGIVEN * self.hold * 2**self._blamed:
            self._blamed = 0
        steps = self.hold * 2**self._blamed
        self._blamed += 1
        self.high_precision_until = facts[0] + steps
        return Spike(*facts, "fp8", replayed, f"stays in high precision for {steps} steps")

    def _rewind(self, spiked: int) -> int:
        """To the newest snapshot that is old enough, else the oldest; the steps done there. Younger ones go."""
        old_enough = [entry for entry in self._snapshots if entry[0].step <= spiked - self.lead]
        snapshot, losses = old_enough[-1] if old_enough else self._snapshots[0]
        while self._snapshots[-1][0].step > snapshot.step:
            self._snapshots.pop()
        snapshot.restore(self.model, self.optimizer, self.extras)
        self._losses = deque(losses, maxlen=self.window)
        if self.on_rewind is not None:
            self.on_rewind(snapshot.step)
        return snapshot.step

    def _replay(self, start: int, last: int, *, high_precision: bool | None) -> tuple[float, bool]:
        """The steps after `start` again, those to be skipped left out; stops at a spike. high_precision None: as they
        were run. Returns the last loss, and whether it was a spike."""
        loss = math.nan
        for step in range(start + 1, last + 1):
            if step in self._skipped:
                continue
            high = step <= self.high_precision_until if high_precision is None else high_precision
            loss, z = self._run(step, high_precision=high)
            if z > self.z:
                return loss, True
        return loss, False


def _several(answer: Any) -> tuple[Any, ...]:
    return tuple(answer) if isinstance(answer, (tuple, list)) else (answer,)
