"""Decides which steps get a full look, and which numbers trigger a burst of looks."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ottava.measure.layer_names import only_simulated
from ottava.measure.limits import LEAST, WINDOW, robust_z
from ottava.measure.statistics import STATISTICS
from ottava.measure.tally import Tallies, Tally
from ottava.record.schema import SlotKey
from ottava.watching.config import Period, Triggers

_READ = (
    *("overflow_pct", "row_sqnr_p50_db", "nonfinite", "scale_error_max", "scale_error_min"),
    *("scale_current", "scale_delayed"),
)
_DRIFT_LOOKS, _LEAST_LOOKS = 16, 4
_LARGEST_SCALE = 2.0**126
_JUMP = 6.0  # octaves from one step to the next
_JUMPS_A_STEP, _JUMPS = 8, 512
_JUMP_PAUSE = 64  # steps after a jump in which the same cast reports none


@dataclass(frozen=True)
class Trigger:
    """The reason for a burst of full looks."""

    reason: str
    """loss_z, clipping, row_sqnr, nonfinite, scale_error, scale_drift or history."""
    value: float
    threshold: float
    layer: str = ""
    tensor: str = ""

    def facts(self) -> dict[str, Any]:
        """Facts of the event; without layer and tensor if they are empty."""
        place = {"layer": self.layer, "tensor": self.tensor} if self.layer else {}
        return {"reason": self.reason, "value": self.value, "threshold": self.threshold, **place}


class Spent:
    """The time that watching takes on the host, without that of the experiments inside it.

    A context around whatever the training waits for; the outermost one counts.

    Args:
        experiments: their seconds so far.

    Example:
        >>> spent = Spent(lambda: 0.0)
        >>> with spent, spent:
        ...     inside = spent.seconds
        >>> 0 < inside < spent.seconds == spent.seconds
        True
    """

    def __init__(self, experiments: Callable[[], float]) -> None:
        self._experiments, self._depth, self._done, self._began = experiments, 0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Until now."""
        return self._done + (self.now() - self._began if self._depth else 0.0)

    def now(self) -> float:
        """A clock that stands still while experiments run."""
        return time.perf_counter() - self._experiments()

    def __enter__(self) -> None:
        if not self._depth:
            self._began = self.now()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if self._depth == 1:
            self._done += self.now() - self._began
        self._depth -= 1


class Jump(NamedTuple):
    """An amax that differs by more than 6 octaves from that of the step before."""

    key: SlotKey
    before: float
    after: float

    @property
    def octaves(self) -> float:
        """log2(after / before)."""
        return math.log2(self.after / self.before)


class Jumps:
    """Compares the amaxes of every step with those of the step before.

    It names at most 8 jumps in a step, the largest, and 512 in a run. After a jump, a cast has none for 64 steps.

    Example:
        >>> jumps, key = Jumps(), SlotKey("fc1", "input", "row", "tensorwise", *("",) * 4, "door")
        >>> [[jump.octaves for jump in jumps(step, [key], [amax])] for step, amax in enumerate((1.0, 2.0, 2.0**15), 1)]
        [[], [], [14.0]]
    """

    def __init__(self) -> None:
        self._keys: Sequence[SlotKey] = ()
        self._places = np.zeros(0, dtype=np.int64)
        self._known: dict[SlotKey, int] = {}
        self._last = np.zeros(0)
        self._quiet_until = np.zeros(0, dtype=np.int64)
        self._left = _JUMPS

    def __call__(self, step: int, keys: Sequence[SlotKey], amaxes: Sequence[float]) -> list[Jump]:
        """The jumps of a step: finite amaxes, none of them 0."""
        if keys != self._keys:
            self._keys = keys
            self._places = np.array([self._known.setdefault(key, len(self._known)) for key in keys], dtype=np.int64)
            new = len(self._known) - len(self._last)
            self._last = np.append(self._last, np.full(new, math.nan))
            self._quiet_until = np.append(self._quiet_until, np.zeros(new, dtype=np.int64))
        now = np.asarray(amaxes, dtype=np.float64)
        usable = np.isfinite(now) & (now > 0)
        logs = np.full(len(now), math.nan)
        logs[usable] = np.log2(now[usable])
        before = self._last[self._places]
        moved = np.abs(logs - before)
        self._last[self._places] = np.where(usable, logs, before)
        found = np.flatnonzero((moved > _JUMP) & (self._quiet_until[self._places] < step))
        largest = found[np.argsort(-moved[found], kind="stable")][: min(_JUMPS_A_STEP, self._left)]
        self._quiet_until[self._places[largest]] = step + _JUMP_PAUSE
        self._left -= len(largest)
        return [Jump(keys[i], float(2.0 ** before[i]), float(now[i])) for i in largest.tolist()]


class Schedule:
    """Decides for each step.

    Args:
        every: distance of full looks; before the first of them, every power of two has one too.
        triggers: thresholds, and the length of a burst.
        periods: steps of full looks in place of `every`.

    Example:
        >>> schedule = Schedule(50, Triggers())
        >>> [step for step in range(1, 151) if schedule.looks(step)]
        [1, 2, 4, 8, 16, 32, 50, 100, 150]
    """

    def __init__(self, every: int, triggers: Triggers, periods: Sequence[Period] = ()) -> None:
        self.every, self.triggers, self.periods = every, triggers, tuple(periods)
        self.burst_until = 0
        """Last step of the running burst."""
        self._next_burst = 0
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._scales: dict[SlotKey, deque[float]] = {}

    def looks(self, step: int) -> bool:
        """Whether this step gets a full look."""
        if self.periods:
            return self.bursts(step) or any(period.chooses(step) for period in self.periods)
        early = 0 < step < self.every and step & (step - 1) == 0
        return early or step % self.every == 0 or self.bursts(step)

    def bursts(self, step: int) -> bool:
        """Whether a burst has this step."""
        return step <= self.burst_until

    def only(self, step: int) -> list[Period] | None:
        """The periods whose tensors the look at this step is for; None: all tensors."""
        if not self.periods or self.bursts(step):
            return None
        return [period for period in self.periods if period.chooses(step)]

    def start_burst(self, step: int) -> bool:
        """Starts a burst of full looks; False if the last burst is too close."""
        if step < self._next_burst:
            return False
        self.burst_until = step + self.triggers.burst
        self._next_burst = step + self.triggers.cooldown
        return True

    def resume(self, events: Iterable[Mapping[str, Any]], losses: Iterable[float]) -> None:
        """Restores the schedule of a resumed run.

        Args:
            events: lines of events.jsonl up to the resumed step. A burst goes on, and so does its cooldown.
            losses: losses of earlier steps, to compare the next ones with.
        """
        for event in events:
            if event.get("kind") == "burst":
                self.burst_until = int(event["until"])
                self._next_burst = int(event["step"]) + self.triggers.cooldown
        self._losses.extend(value for value in losses if math.isfinite(value))

    def loss(self, value: float) -> Trigger | None:
        """Adds the loss of a step; the trigger, if it is one."""
        if not math.isfinite(value):
            return Trigger("nonfinite", value, 0.0) if self.triggers.nonfinite else None
        trigger = None
        if self.triggers.loss_z is not None and len(self._losses) >= LEAST:
            z = robust_z(value, self._losses)
            trigger = Trigger("loss_z", z, self.triggers.loss_z) if z > self.triggers.loss_z else None
        self._losses.append(value)
        return trigger

    def tallies(self, seen: Mapping[SlotKey, Tally]) -> list[Trigger]:
        """The triggers of a full look: for each reason only the worst cast."""
        triggers: list[Trigger] = []
        if not seen:
            return triggers
        keys, rows = list(seen), Tallies.of(seen).rows
        simulated = np.array([only_simulated(key.layer, key.source) for key in keys], dtype=bool)
        for reason, (limit, sign, values) in self._conditions(keys, rows).items():
            if limit is None:
                continue
            excluded = np.isnan(values) | (simulated & (reason != "nonfinite"))
            badness = np.where(excluded, -math.inf, sign * values)
            worst = int(badness.argmax())
            if badness[worst] > sign * limit:
                triggers.append(Trigger(reason, float(values[worst]), limit, keys[worst].layer, keys[worst].tensor))
        return triggers

    def _conditions(self, keys: list[SlotKey], rows: Tally) -> dict[str, tuple[float | None, float, Any]]:
        """Reason -> limit, 1 if larger values are worse or else -1, and the value of each cast."""
        triggers = self.triggers
        columns = {name: np.asarray(STATISTICS[name].finish(rows)) for name in _READ}
        predicted = columns["scale_delayed"]
        ends = (predicted >= _LARGEST_SCALE) | (predicted <= 1 / _LARGEST_SCALE)
        error = np.fmax(columns["scale_error_max"], -columns["scale_error_min"])
        drift = np.full(len(keys), math.nan)
        for i, (key, scale) in enumerate(zip(keys, columns["scale_current"].tolist(), strict=True)):
            if not scale > 0 or math.isinf(scale):
                continue
            earlier = self._scales.setdefault(key, deque(maxlen=_DRIFT_LOOKS))
            if len(earlier) >= _LEAST_LOOKS:
                drift[i] = abs(math.log2(scale) - float(np.median(earlier)))
            earlier.append(math.log2(scale))
        return {
            "clipping": (triggers.clipping, 1.0, 0.01 * columns["overflow_pct"]),
            "row_sqnr": (triggers.row_sqnr_db, -1.0, columns["row_sqnr_p50_db"]),
            "nonfinite": (0.0 if triggers.nonfinite else None, 1.0, columns["nonfinite"]),
            "scale_error": (triggers.scale_error, 1.0, error),
            "scale_drift": (triggers.scale_drift, 1.0, drift),
            "history": (0.0 if triggers.history else None, 1.0, np.where(ends, predicted, 0.0)),
        }

    def jumped(self, jumps: Sequence[Jump]) -> Trigger | None:
        """The trigger of the largest jump of a step, if it is as large as a drift of the scale that triggers."""
        limit = self.triggers.scale_drift
        if limit is None or not jumps or abs(jumps[0].octaves) <= limit:
            return None
        key = jumps[0].key
        return Trigger("scale_drift", abs(jumps[0].octaves), limit, key.layer, key.tensor)

    def light(self, keys: Iterable[SlotKey], amaxes: Iterable[float]) -> Trigger | None:
        """The trigger of the amaxes of a step, if any is not finite."""
        if not self.triggers.nonfinite:
            return None
        wrong = ((key, amax) for key, amax in zip(keys, amaxes, strict=True) if not math.isfinite(amax))
        return next((Trigger("nonfinite", amax, 0.0, key.layer, key.tensor) for key, amax in wrong), None)
