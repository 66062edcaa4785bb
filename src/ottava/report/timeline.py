"""The time axis of the page: the loss with fewer points, events as marks, and the worst tensor of each look."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ottava.measure.layer_names import symbol
from ottava.report.event_text import event_text
from ottava.report.grid import Grid, Worst
from ottava.report.scales import Values

EVENT_LETTERS = MappingProxyType(
    {
        "trigger": "T",
        "burst": "B",
        "flight": "L",
        "dump": "D",
        "check": "C",
        "resumed": "R",
        "fallback": "F",
        "spike": "S",
        "rewind": "R",
        "warning": "W",
        "overhead": "O",
    }
)
"""Kind of event -> letter on its mark; other kinds have their first letter."""
QUIET = frozenset({"burst", "flight", "dump", "overhead"})
"""Events about the watch, not about the training: only in the table, not in the picture."""


def thin(steps: npt.NDArray[np.int64], values: Values, most: int) -> list[list[float | None]]:
    """At most `most` points of a series with its peaks: the first lowest and the first highest of each stretch.

    Returns:
        [steps, values]; None for a value that is not finite.

    Example:
        >>> thin(np.arange(6), np.array([1.0, 9.0, 1.0, 1.0, 1.0, np.nan]), most=4)
        [[0, 1, 3, 5], [1.0, 9.0, 1.0, None]]
    """
    keep = np.arange(len(steps))
    if len(steps) > most:
        peaks: set[int] = {0, len(steps) - 1}
        for chunk in np.array_split(keep, max(1, most // 2)):
            finite = chunk[np.isfinite(values[chunk])]
            if len(finite):
                peaks |= {int(finite[np.argmin(values[finite])]), int(finite[np.argmax(values[finite])])}
        keep = np.array(sorted(peaks))
    shown = [float(v) if math.isfinite(v) else None for v in values[keep]]
    return [[int(step) for step in steps[keep]], shown]


def not_finite_from(steps: npt.NDArray[np.int64], values: Values) -> int | None:
    """The step from which no value is finite; None if the last value is finite, or no value ever was.

    Example:
        >>> not_finite_from(np.array([1, 2, 3]), np.array([2.0, np.nan, np.inf]))
        2
    """
    finite = np.flatnonzero(np.isfinite(values))
    if not len(finite) or finite[-1] == len(values) - 1:
        return None
    return int(steps[finite[-1] + 1])


def marks(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Events, as the page shows them: step, kind, letter, quiet, text.

    Example:
        >>> marks([{"step": 7, "rank": 0, "kind": "burst", "until": 23}])
        [{'step': 7, 'kind': 'burst', 'letter': 'B', 'quiet': True, 'text': 'every step up to 23 gets a full look'}]
    """
    shown = []
    for event in sorted(events, key=lambda event: int(event["step"])):
        kind = str(event.get("kind", "event"))
        letter = EVENT_LETTERS.get(kind, kind[:1].upper())
        step = int(event["step"])
        shown.append({"step": step, "kind": kind, "letter": letter, "quiet": kind in QUIET, "text": event_text(event)})
    return shown


def worst_runs(grid: Grid, worst: Sequence[Worst | None]) -> list[dict[str, Any]]:
    """The strip of worst tensors in words; neighbouring looks with the same worst tensor and statistic are one row.

    Returns:
        first and last step, layer, tensor (symbol), metric, and the worst value with its step and slot.
    """
    runs: list[dict[str, Any]] = []
    for (first, last), cell in zip(grid.looks, worst, strict=True):
        if cell is None:
            continue
        slot = grid.slots[cell.slot]
        place = {"layer": slot.layer, "tensor": symbol(slot.tensor), "metric": cell.metric}
        step = int(grid.step[cell.slot, cell.look])
        peak = {"value": cell.value, "level": cell.level, "step": step, "slot": cell.slot}
        if runs and all(runs[-1][key] == value for key, value in place.items()) and runs[-1]["slot"] == cell.slot:
            runs[-1]["last"] = last
            if cell.level > runs[-1]["level"]:
                runs[-1] |= peak
        else:
            runs.append({"first": first, "last": last, **place, **peak})
    return runs
