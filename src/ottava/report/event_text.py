"""Events in words: one entry of `SENTENCES` for each kind.

The facts of the event fill its sentence. An event that has no sentence, or lacks a fact, becomes a list of its facts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ottava.base.text import number
from ottava.measure.layer_names import symbol

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
