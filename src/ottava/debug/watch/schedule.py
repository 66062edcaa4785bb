"""Which steps are looked at in full, and what makes the watch look at more of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ottava.debug.analysis.loss import LEAST, WINDOW, robust_z
from ottava.debug.layer_names import only_simulated
from ottava.debug.run.schema import SlotKey
from ottava.debug.statistics import STATISTICS
from ottava.debug.tally import Tallies, Tally
from ottava.debug.watch.config import Triggers


@dataclass(frozen=True)
class Trigger:
    """Why the watch looks closer."""

    reason: str
    """loss_z, clipping, row_sqnr or nonfinite."""
    value: float
    threshold: float
    layer: str = ""
    tensor: str = ""

    def facts(self) -> dict[str, Any]:
        """For an event; without empty places."""
        place = {"layer": self.layer, "tensor": self.tensor} if self.layer else {}
        return {"reason": self.reason, "value": self.value, "threshold": self.threshold, **place}


class Schedule:
    """Decides, step by step.

    Args:
        every: distance of full looks; between 1 and it there is one at every power of two.
        triggers: their thresholds, and how long a burst is.

    Example:
        >>> schedule = Schedule(50, Triggers())
        >>> [step for step in range(1, 151) if schedule.looks(step)]
        [1, 2, 4, 8, 16, 32, 50, 100, 150]
    """

    def __init__(self, every: int, triggers: Triggers) -> None:
        self.every, self.triggers = every, triggers
        self.burst_until = 0
        """Last step of the running burst."""
        self._next_burst = 0
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def looks(self, step: int) -> bool:
        """Whether that step is looked at in full."""
        early = 0 < step < self.every and step & (step - 1) == 0
        return early or step % self.every == 0 or step <= self.burst_until

    def start_burst(self, step: int) -> bool:
        """Looks at the next steps in full; False where the last burst is too close."""
        if step < self._next_burst:
            return False
        self.burst_until = step + self.triggers.burst
        self._next_burst = step + self.triggers.cooldown
        return True

    def resume(self, events: Iterable[Mapping[str, Any]], losses: Iterable[float]) -> None:
        """Takes up the schedule of a run that is gone on with.

        Args:
            events: lines of events.jsonl, up to the step of the resumption: a burst goes on, and so does its rest.
            losses: of its steps, which the next ones are compared with.
        """
        for event in events:
            if event.get("kind") == "burst":
                self.burst_until = int(event["until"])
                self._next_burst = int(event["step"]) + self.triggers.cooldown
        self._losses.extend(value for value in losses if math.isfinite(value))

    def loss(self, value: float) -> Trigger | None:
        """Takes in the loss of a step."""
        if not math.isfinite(value):
            return Trigger("nonfinite", value, 0.0) if self.triggers.nonfinite else None
        found = None
        if self.triggers.loss_z is not None and len(self._losses) >= LEAST:
            z = robust_z(value, self._losses)
            found = Trigger("loss_z", z, self.triggers.loss_z) if z > self.triggers.loss_z else None
        self._losses.append(value)
        return found

    def tallies(self, seen: Mapping[SlotKey, Tally]) -> list[Trigger]:
        """Takes in a full look; at most one trigger a reason, the worst."""
        found: list[Trigger] = []
        keys, rows = list(seen), Tallies.of(seen).rows
        simulated = np.array([only_simulated(key.layer, key.source) for key in keys], dtype=bool)
        for name, reason, limit, scale in (
            ("overflow_pct", "clipping", self.triggers.clipping, 0.01),
            ("row_sqnr_p50_db", "row_sqnr", self.triggers.row_sqnr_db, -1.0),
            ("nonfinite", "nonfinite", 0.0 if self.triggers.nonfinite else None, 1.0),
        ):
            if limit is None or not keys:
                continue
            badness = scale * STATISTICS[name].finish(rows)
            left_out = np.isnan(badness) | (simulated & (reason != "nonfinite"))
            badness = np.where(left_out, -math.inf, badness)
            worst = int(badness.argmax())
            if badness[worst] > (limit if scale > 0 else -limit):
                value = float(badness[worst]) * math.copysign(1, scale)
                found.append(Trigger(reason, value, limit, keys[worst].layer, keys[worst].tensor))
        return found

    def light(self, keys: Iterable[SlotKey], amaxes: Iterable[float]) -> Trigger | None:
        """Takes in the amaxes of a step."""
        if not self.triggers.nonfinite:
            return None
        wrong = ((key, amax) for key, amax in zip(keys, amaxes, strict=True) if not math.isfinite(amax))
        return next((Trigger("nonfinite", amax, 0.0, key.layer, key.tensor) for key, amax in wrong), None)
