"""Events in words: one entry of `SENTENCES` a kind.

A sentence is filled with the facts of the event; one that lacks a fact, or has no sentence, is told fact by fact.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ottava.debug.run.schema import symbol
from ottava.text import number

SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "trigger clipping": "{value_pct} of {tensor_symbol} of {layer} were clipped; the limit is {threshold_pct}",
        "trigger row_sqnr": "the median row of {tensor_symbol} of {layer} has {value} dB; the limit is {threshold} dB",
        "trigger loss_z": "the loss lies {value} deviations above the median of the last 64; the limit is {threshold}",
        "trigger nonfinite": "{tensor_symbol} of {layer} holds an infinity or NaN",
        "trigger nonfinite, no tensor": "the loss is no finite number",
        "burst": "every step up to {until} is looked at in full",
        "flight": "the amaxes of steps {first} to {last} went on record: {why}",
        "overhead": "watching took {share_pct} of the time; now looks every {every} steps, amaxes every {light_every}",
        "dump": "{tensor_symbol} of {layer} is in {file}, {nbytes} bytes",
        "resumed": "the run was resumed after this step",
        "fallback": "{layer}, {gemm}: from {from} to {to}, for {why}; applied: {applied}",
        "spike": "loss {loss}, {z} deviations up; {replayed_loss} when replayed in high precision: {cause}, {action}",
        "rewind": "back to step {to}",
        "warning": "{text}",
    }
)
"""By kind, or kind and reason. `NAME_pct` is a fact that is a share, `tensor_symbol` the tensor as papers write it."""
_SAID_ELSEWHERE = frozenset({"step", "rank", "kind"})


def event_text(event: Mapping[str, Any]) -> str:
    """What happened, without step and kind.

    Example:
        >>> event_text({"step": 7, "kind": "burst", "until": 1023})
        'every step up to 1,023 is looked at in full'
        >>> event_text({"step": 7, "kind": "of a later version", "value": 0.02})
        'value 0.0200'
    """
    kind = str(event.get("kind", ""))
    if "reason" in event:
        kind = f"{kind} {event['reason']}"
    known = {key: fact(value) for key, value in event.items()}
    known |= {f"{key}_pct": number(100 * value, "%") for key, value in event.items() if isinstance(value, float)}
    if "tensor" in event:
        known["tensor_symbol"] = symbol(str(event["tensor"]))
    elif f"{kind}, no tensor" in SENTENCES:
        kind = f"{kind}, no tensor"
    try:
        return SENTENCES[kind].format_map(known)
    except KeyError:
        return ", ".join(f"{key} {text}" for key, text in known.items() if key in event and key not in _SAID_ELSEWHERE)


def fact(value: Any) -> str:
    """A value of an event.

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
