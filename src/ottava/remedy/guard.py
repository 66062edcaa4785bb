"""Undoes loss spikes: rewinds, replays the same batches in high precision, finds the cause, and goes on.

    the spike comes again without FP8    the data or the training caused it: skip the batch (then the whole window)
    it does not come again               FP8 caused it: keep the replay, train in high precision for a while, then in
                                         FP8 again; each relapse doubles the while, and a `fallback` may be applied

In high precision the doors still note every amax (`autocast(calibrating=True)`), so predicted scales are up to date
when FP8 comes back. The guard repeats everything since a snapshot. A step must therefore depend only on the model, its
optimizer, torch's random generators, the batch, and `extras`. A step with an ottava.autocast of its own cannot be
replayed in high precision.
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

from ottava.engine.autocast import autocast
from ottava.engine.quantizer import Quantizer
from ottava.experiments.snapshot import Snapshot, Stateful
from ottava.measure.limits import LEAST, robust_z

TrainStep = Callable[[Any], Any]
"""(batch) -> loss, or (loss, grad_norm): forward, backward and the optimizer's step."""
_FORGIVEN = 4
"""After so many times the last hold without a relapse, the next hold is as short as the first."""


class EventLog(Protocol):
    """Gets events; a `RunWriter` is one."""

    def event(self, step: int, kind: str, **facts: Any) -> None:
        """Writes an event."""


@dataclass(frozen=True)
class Spike:
    """A loss spike and how the guard handled it."""

    step: int
    """Step of the spike, counted from 1."""
    loss: float
    z: float
    """Robust standard deviations above the median of earlier losses; inf if a number was not finite."""
    rewound_to: int
    """Steps done in the snapshot."""
    cause: str
    """"data" or "fp8"."""
    replayed_loss: float
    """Loss of the replay in high precision."""
    action: str
    """Action of the guard."""
    skipped: tuple[int, ...] = ()
    """Steps whose batches were skipped."""


class SpikeGuard:
    """Runs the steps of any training loop and undoes loss spikes.

    Args:
        model: a model with ottava layers.
        optimizer: its optimizer.
        train_step: (batch) -> loss, or (loss, grad_norm); must do a whole step: forward, backward, optimizer.step, and
            learning rate. A replay calls it again with the same batch.
        extras: other objects with a state_dict that a step changes: schedulers, gradient scalers.
        snapshots: number of snapshots to keep.
        every: steps from one snapshot to the next. The guard keeps all batches since the oldest snapshot.
        z: a spike is so many robust standard deviations above the median of the last `window` losses.
        window: see `z`.
        lead: a snapshot must be so many steps older than the spike, if there is one, because the cause of a spike often
            comes some steps before it.
        hold: steps in high precision after a spike that FP8 caused.
        fallback: called with (model, spike) at the second spike that FP8 caused; see `fallback.Fallback`.
        log: gets "spike" and "rewind" events.
        on_rewind: called with the step of the snapshot before the later steps run again, for example to cut back a log.

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
    ) -> None:
        for name, value in (("snapshots", snapshots), ("every", every), ("window", window)):
            if value < 1:
                raise ValueError(f"SpikeGuard: {name} is {value}; needs 1 or more")
        if not z > 0:
            raise ValueError(f"SpikeGuard: z is {z}; needs a positive number, such as 6")
        self.model, self.optimizer, self.train_step, self.extras = model, optimizer, train_step, tuple(extras)
        self.every, self.z, self.window, self.lead, self.hold = every, z, window, lead, hold
        self.fallback, self.log, self.on_rewind = fallback, log, on_rewind
        self.step = 0
        """Number of batches so far, with skipped ones."""
        self.spikes: list[Spike] = []
        """All spikes so far."""
        self.high_precision_until = 0
        """Last step in high precision."""
        self._blamed = 0
        self._snapshots: deque[tuple[Snapshot, tuple[float, ...]]] = deque(maxlen=snapshots)
        self._batches: dict[int, Any] = {}
        self._losses: deque[float] = deque(maxlen=window)
        self._skipped: set[int] = set()

    def __call__(self, batch: Any) -> float:
        """Does one step; if it spikes, undoes it and does it again. Returns its loss; NaN if the batch was skipped.

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
        """Runs one step; returns its loss and the distance above earlier losses."""
        context: AbstractContextManager[None] = nullcontext()
        if high_precision:
            predicts = any(isinstance(m, Quantizer) and m.spec is not None for m in self.model.modules())
            context = autocast(enabled=False, calibrating=predicts)
        with context:
            answer = self.train_step(self._batches[step])
        several = answer if isinstance(answer, (tuple, list)) else (answer,)
        numbers = [float(v.detach()) if isinstance(v, Tensor) else float(v) for v in several if v is not None]
        if not all(math.isfinite(number) for number in numbers):
            return numbers[0], math.inf
        z = robust_z(numbers[0], self._losses) if len(self._losses) >= min(LEAST, self.window) else 0.0
        if z <= self.z:
            self._losses.append(numbers[0])
        return numbers[0], z

    def _keep(self) -> None:
        """Takes a snapshot and drops the batches that no snapshot needs."""
        snapshot = Snapshot.take(self.model, self.optimizer, self.step, self.extras)
        self._snapshots.append((snapshot, tuple(self._losses)))
        oldest = self._snapshots[0][0].step
        self._batches = {step: batch for step, batch in self._batches.items() if step > oldest}

    def _recover(self, loss: float, z: float) -> float:
        spiked = self.step
        start = self._rewind(spiked)
        facts = spiked, loss, z, start
        replayed, again = self._replay(start, spiked, high_precision=True)
        spike, last = self._skip(facts, replayed) if again else (self._hold(facts, replayed), replayed)
        self.spikes.append(spike)
        if self.log is not None:
            said = {"cause": spike.cause, "action": spike.action}
            self.log.event(spiked, "spike", loss=loss, z=z, replayed_loss=spike.replayed_loss, **said)
            self.log.event(spiked, "rewind", to=start, skipped=list(spike.skipped), **said)
        if spike.cause == "fp8" and self._blamed > 1 and self.fallback is not None:
            self.fallback(self.model, spike)
        return last

    def _skip(self, facts: tuple[int, float, float, int], replayed: float) -> tuple[Spike, float]:
        """Skips the batch; if that is not enough, all batches since the snapshot."""
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
        """Keeps the replay, and high precision for a while."""
        earlier = [spike.step for spike in self.spikes if spike.cause == "fp8"]
        if earlier and facts[0] - earlier[-1] > _FORGIVEN * self.hold * 2**self._blamed:
            self._blamed = 0
        steps = self.hold * 2**self._blamed
        self._blamed += 1
        self.high_precision_until = facts[0] + steps
        return Spike(*facts, "fp8", replayed, f"stays in high precision for {steps} steps")

    def _rewind(self, spiked: int) -> int:
        """Rewinds to the newest snapshot that is old enough, or to the oldest; drops younger ones; returns its step."""
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
        """Repeats the steps after `start` without the skipped ones; stops at a spike. high_precision None: as they ran.
        Returns the last loss, and whether it was a spike."""
        loss = math.nan
        for step in range(start + 1, last + 1):
            if step in self._skipped:
                continue
            high = step <= self.high_precision_until if high_precision is None else high_precision
            loss, z = self._run(step, high_precision=high)
            if z > self.z:
                return loss, True
        return loss, False
