"""The time axis of the page: the loss with fewer points, events as marks and in words, the worst tensor of each look.

The facts of an event fill its sentence in `SENTENCES`. An event that has none, or lacks a fact, becomes a list of its
facts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ottava.base.text import number
from ottava.measure.layer_names import symbol
from ottava.report.grid import Grid, Values, Worst

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
        step = int(event["step"])
        shown.append(
            {"step": step, "kind": kind, "letter": kind[:1].upper(), "quiet": kind in QUIET, "text": event_text(event)}
        )
    return shown


SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "trigger clipping": "the cast clipped {value_pct} of {tensor_symbol} of {layer}; the limit is {threshold_pct}",
        "trigger row_sqnr": "the median row of {tensor_symbol} of {layer} has {value} dB; the limit is {threshold} dB",
        "trigger loss_z": "the loss lies {value} deviations above the median of the last 64; the limit is {threshold}",
        "trigger scale_error": "the predicted scale of {tensor_symbol} of {layer} is {value} octaves from the current "
        "one; the limit is {threshold}",
        "trigger scale_drift": "the scale of {tensor_symbol} of {layer} is {value} octaves from the median of its last "
        "looks; the limit is {threshold}",
        "trigger history": "the history of {tensor_symbol} of {layer} is saturated: it predicts the scale {value}",
        "trigger nonfinite": "{tensor_symbol} of {layer} has an infinity or NaN",
        "trigger nonfinite, no tensor": "the loss is not finite",
        "burst": "every step up to {until} gets a full look",
        "flight": "stored the amaxes of steps {first} to {last}: {why}",
        "overhead": "watching took {share_pct} of the time; now a look every {every} steps, amaxes every {light_every}",
        "dump": "wrote {tensor_symbol} of {layer} to {file}, {nbytes} bytes",
        "resumed": "the run was resumed after this step",
        "fallback": "{layer}, {gemm}: from {from} to {to}, because {why}; applied: {applied}",
        "spike": "loss {loss}, {z} deviations up; {replayed_loss} replayed in high precision; cause: {cause}; {action}",
        "rewind": "the training went back to step {to}",
        "warning": "{text}",
    }
)
"""Kind, or kind and reason -> sentence. `NAME_pct` is a fact in percent, `tensor_symbol` the tensor's symbol."""
_SHOWN_ELSEWHERE = frozenset({"step", "rank", "kind"})


def event_text(event: Mapping[str, Any]) -> str:
    """The sentence of an event, without step and kind.

    Example:
        >>> event_text({"step": 7, "kind": "burst", "until": 1023})
        'every step up to 1,023 gets a full look'
        >>> event_text({"step": 7, "kind": "of a later version", "value": 0.02})
        'value 0.0200'
    """
    kind = str(event.get("kind", ""))
    if "reason" in event:
        kind = f"{kind} {event['reason']}"
    facts = {key: fact(value) for key, value in event.items()}
    facts |= {f"{key}_pct": number(100 * value, "%") for key, value in event.items() if isinstance(value, float)}
    if "tensor" in event:
        facts["tensor_symbol"] = symbol(str(event["tensor"]))
    elif f"{kind}, no tensor" in SENTENCES:
        kind = f"{kind}, no tensor"
    try:
        return SENTENCES[kind].format_map(facts)
    except KeyError:
        return ", ".join(f"{key} {text}" for key, text in facts.items() if key in event and key not in _SHOWN_ELSEWHERE)


def fact(value: Any) -> str:
    """A value of an event as text.

    Example:
        >>> [fact(v) for v in (True, None, 65536, 0.5, "bf16", [1])]
        ['yes', 'unknown', '65,536', '0.500', 'bf16', '[1]']
    """
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "unknown"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value)


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
