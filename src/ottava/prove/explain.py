"""Which way of being wrong gives these numbers: hypotheses, then calls under changed conditions, then a place.

A hypothesis explains a case if the faulty reference allows every number of it. One that explains most of the wrong
cases is the answer; a draw goes to the one that leaves fewer wrong numbers, then to the earlier entry. If none does,
the adapter is called again with clean memory, with contiguous operands and so on: what makes the result right is the
reason. Else the answer is where the wrong numbers lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.prove.faults import all_hypotheses
from ottava.prove.hypotheses import Asked, Fault
from ottava.prove.judge import Allowed, expect
from ottava.prove.matrix import KernelCase

_AFTER = ("times", "cut", "through", "clamp", "only", "keys")


class Failure(NamedTuple):
    """A case whose results are wrong."""

    case: KernelCase
    got: Mapping[str, Tensor]
    """All results as float64."""
    wrong: Mapping[str, Tensor]
    """Where they are wrong; results without a wrong element are left out."""
    previous: Mapping[str, Any] | None = None
    """The inputs of the call before."""


Rerun = Callable[..., Mapping[str, Tensor]]
"""(case, fill=, around=, plain=) -> where the results of another call are wrong."""


def explain(
    kind: str, what: Mapping[str, Any], failures: Sequence[Failure], passed: Sequence[Failure], rerun: Rerun
) -> dict[str, str] | None:
    """{"hypothesis", "sentence"} of what is wrong; None only if there is no failure.

    passed: cases without a wrong number, which a hypothesis had better not make wrong.
    """
    if not failures:
        return None
    best: tuple[float, float, float, int] | None = None
    winner: Fault | None = None
    for place, hypothesis in enumerate(h for h in all_hypotheses() if kind in h.kinds):
        left, solved, applies = 0.0, 0.0, 0
        for number, failure in enumerate(failures):
            before = sum(int(mask.sum()) for mask in failure.wrong.values())
            after = _left(hypothesis, kind, what, failure, failure.wrong)
            applies += after is not None
            solved += after == 0
            left += min(1.0, 1.0 if after is None else after / max(before, 1))
            if number >= 2 and not solved and left > 0.8 * (number + 1):
                left += len(failures) - number - 1
                break
        if not applies:
            continue
        solved = 0.55 * solved if hypothesis.loose else solved
        against = 0
        if solved and -solved / len(failures) <= (best or (0.0,))[0]:
            against = sum((_left(hypothesis, kind, what, one, one.got) or 0) > 0 for one in passed)
        score = (-solved / len(failures), round(left / len(failures), 3), against, place)
        if best is None or score < best:
            best, winner = score, hypothesis
        if best[:3] == (-1.0, 0.0, 0):
            break  # no later entry is better
    assert best is not None
    assert winner is not None
    if -best[0] >= 0.5:
        share = -best[0] / (0.55 if winner.loose else 1)
        sentence = f"{winner.sentence}. This gives {_share(share, failures)} bit for bit or within its bound."
        return {"hypothesis": winner.name, "sentence": sentence}
    if (probe := _probe(failures, rerun)) is not None:
        return probe
    place_of = _place(failures)
    mostly = best[1] < 0.2 or (-best[0] > 0 and best[1] < 0.7)
    if mostly or (place_of["hypothesis"] == "not explained" and best[1] < 0.9):
        sentence = f"{winner.sentence}. This explains {1 - best[1]:.0%} of the wrong numbers."
        return {"hypothesis": winner.name, "sentence": sentence}
    return place_of


def _share(share: float, failures: Sequence[Failure]) -> str:
    count = round(share * len(failures))
    return (
        f"all {count} wrong cases looked at"
        if count == len(failures)
        else f"{count} of {len(failures)} wrong cases looked at"
    )


def _left(
    hypothesis: Fault, kind: str, what: Mapping[str, Any], failure: Failure, results: Iterable[str]
) -> int | None:
    """How many numbers of some results a hypothesis leaves wrong; None: it says nothing."""
    call = Asked(kind, failure.case.inputs, what, failure.case.before or failure.previous)
    try:
        allowed = supposed(hypothesis, call)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError):
        return None  # the fault has no meaning for these shapes
    if allowed is None:
        return None
    count = 0
    for name in results:
        if name not in allowed or allowed[name].low.shape != failure.got[name].shape:
            return None
        count += int(allowed[name].wrong(failure.got[name]).sum())
    return count


def supposed(hypothesis: Fault, call: Asked) -> dict[str, Allowed] | None:
    """What the results would be if a hypothesis were true."""
    knobs = hypothesis.knobs(call)
    if knobs is None:
        return None
    inputs, what = knobs.pop("inputs", call.inputs), knobs.pop("what", call.what)
    values = knobs.pop("values", None)
    after = {key: knobs.pop(key) for key in _AFTER if key in knobs}
    if "cut" in after:
        what = {**what, "out": "float32"}
    if "keys" in after:
        inputs = {**inputs, **{side: inputs[side][:, :, : after["keys"]] for side in "kv"}}
    allowed = expect(call.kind, inputs, what, None, **knobs)
    if values is not None:
        name = "codes" if call.kind == "encode" else "data"
        allowed[name] = Allowed(values, values, allowed[name].dtypes, free=allowed[name].free)
    for name, one in allowed.items():
        low, high = one.low, one.high
        factor = after.get("times", after.get("only", {}).get(name, 1.0))
        if "only" in after and name not in after["only"]:
            continue
        if factor != 1.0:
            ends = [(side * factor).float().to(one.dtypes[0]).double() for side in (low, high)]
            low, high = torch.minimum(*ends), torch.maximum(*ends)
        if "through" in after:
            low, high = (side.to(after["through"]).double() for side in (low, high))
        if "clamp" in after:
            low, high = (side.clamp(-after["clamp"], after["clamp"]) for side in (low, high))
        if "cut" in after:
            bits = ((side.float().view(torch.int32) >> 16) << 16 for side in (low, high))
            low, high = (cut.view(torch.float32).double() for cut in bits)
        allowed[name] = one._replace(low=low, high=high, also=one.also if factor == 1.0 else ())
    return allowed


# --- calls under changed conditions ----------------------------------------------------------------------------------

_PROBES: tuple[tuple[str, str, str], ...] = (
    ("", "not repeatable", "The same call again gives the right numbers: it depends on earlier calls, or on chance"),
    (
        "plain",
        "strides or offset ignored",
        "It is right with contiguous operands: it ignores strides, or a storage offset",
    ),
    (
        "fill",
        "reads what nobody wrote",
        "It is right with buffers of zeros: it adds to a buffer, or leaves parts unwritten",
    ),
    ("around", "reads past its operands", "It is right with zeros around the operands: it reads memory beyond them"),
    ("plain fill around", "memory around the operands", "It is right with contiguous operands in clean memory"),
)
"""What is changed, a name, a sentence."""
_CHANGES: Mapping[str, Any] = MappingProxyType({"plain": True, "fill": "zero", "around": "zero"})


def _probe(failures: Sequence[Failure], rerun: Rerun) -> dict[str, str] | None:
    """The change of conditions that makes most of the wrong cases right."""
    for change, name, sentence in _PROBES:
        conditions = {key: _CHANGES[key] for key in change.split()}
        right = sum(not rerun(failure.case, **conditions) for failure in failures)
        if right * 2 >= len(failures):
            return {"hypothesis": name, "sentence": f"{sentence} ({right} of {len(failures)} wrong cases)."}
    return None


# --- places ----------------------------------------------------------------------------------------------------------


def _place(failures: Sequence[Failure]) -> dict[str, str]:
    """Where the wrong numbers lie."""
    said = [_pattern(failure) for failure in failures]
    # a small case may be all wrong: the others say where
    told = [one for one in said if "everywhere" not in one[0]] or said
    name = max(dict.fromkeys(told), key=told.count)
    return {"hypothesis": name[0], "sentence": name[1]}


def _pattern(failure: Failure) -> tuple[str, str]:
    name, mask = next(iter(failure.wrong.items()))
    got = failure.got[name]
    if bool(got[mask].isnan().all()):
        text = "holds NaN where numbers belong"
        rows = mask.reshape(-1, mask.shape[-1]) if mask.dim() else mask.reshape(1, 1)
        if bool(mask.all()):
            return "NaN everywhere", f"{name} {text}, everywhere: it was not written, or NaN has spread"
        first = int(rows.any(1).int().argmax())
        if bool(rows[first:].all()):
            return "tail not written", f"{name} {text} in all rows from {first} on: they are not written"
        column = int(rows.any(0).int().argmax())
        if bool(rows[:, column:].all()):
            return "tail not written", f"{name} {text} in all columns from {column} on: they are not written"
        return "NaN", f"{name} {text}: not written, or NaN has spread from a neighbour"
    if mask.dim() >= 2 and mask.numel() > 1 and not bool(mask.all()):
        rows = mask.reshape(-1, mask.shape[-1])
        for dim, word in ((1, "rows"), (0, "columns")):
            lines = rows.any(dim).nonzero().flatten()
            if len(lines) < rows.shape[1 - dim] and len(lines) <= max(1, rows.shape[1 - dim] // 2):
                return (
                    f"some {word}",
                    f"{name} is wrong in {len(lines)} of {rows.shape[1 - dim]} {word} only, "
                    f"{int(lines[0])} to {int(lines[-1])}",
                )
    return (
        "not explained",
        f"{name} is wrong in {int(mask.sum())} of {mask.numel()} places, and no hypothesis gives these numbers",
    )
