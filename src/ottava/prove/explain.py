"""Which way of being wrong gives these numbers: hypotheses, then calls under changed conditions, then a place.

A hypothesis explains a case if the faulty reference allows every wrong number of it and refuses the right ones; a bound
without end explains nothing. One that explains half of the wrong cases is the answer; a draw goes to the one that
leaves fewer wrong numbers, then to bits before bounds, then to the earlier entry. If none does, the adapter is called
again with clean memory, with contiguous operands and so on: what makes the result right is the reason. Else the answer
is where the wrong numbers lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.prove.hypotheses import Asked, Fault, all_hypotheses
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
    """The inputs of the call before; of the first one of these shapes, if there was one."""
    allowed: Mapping[str, Allowed] | None = None
    """What the results may be."""

    @property
    def size(self) -> int:
        """Numbers of all results."""
        return sum(x.numel() for x in self.got.values())


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
    rights = [expect(kind, one.case.inputs, what) for one in failures]
    best: tuple[float, ...] = (math.inf,)
    winner: Fault | None = None
    for place, hypothesis in enumerate(h for h in all_hypotheses() if kind in h.kinds):
        left, solved, wide = 0.0, 0, 0.0
        for number, failure in enumerate(failures):
            one = _left(hypothesis, kind, what, failure, rights[number]) or _Left(1.0, 1.0)
            solved += one.left == 0
            left, wide = left + one.left, wide + one.wide
            if number >= 2 and not solved:
                break
        # a bound that is wide enough explains anything: it must hold in every case, and comes last
        if solved * 2 < len(failures) or (hypothesis.loose and solved < len(failures)):
            continue
        head = (hypothesis.loose, -solved / len(failures), round(left / len(failures), 3))
        if head > best[:3]:
            continue
        against = sum(_against(hypothesis, kind, what, one) for one in passed)
        score = (*head, against, round(wide / len(failures), 1), place)
        if score < best:
            best, winner = score, hypothesis
        if best[:5] == (False, -1.0, 0.0, 0, 0.0):
            break  # no later entry is better
    if (winner is None or winner.loose) and (probe := _probe(failures, rerun)) is not None:
        return probe
    if winner is None:
        return _place(kind, what, failures)
    _, share, _, contrary, loosely, _ = best
    count, bits = round(-share * len(failures)), "within its bound" if loosely else "bit for bit"
    which = f"all {count}" if count == len(failures) else f"{count} of {len(failures)}"
    sentence = f"{winner.sentence}. This gives {which} wrong cases looked at {bits}."
    if contrary:
        sentence += f" {contrary} of {len(passed)} right cases speak against it: it holds in part."
    if share > -1.0:
        sentence += f" The others: {_place(kind, what, failures)['sentence']}."
    return {"hypothesis": winner.name, "sentence": sentence}


class _Left(NamedTuple):
    """What a hypothesis leaves of a case, as shares of its wrong numbers."""

    left: float
    """Not given by it."""
    wide: float
    """Given by a bound of more than one number."""


def _left(
    hypothesis: Fault, kind: str, what: Mapping[str, Any], failure: Failure, right: Mapping[str, Allowed]
) -> _Left | None:
    """What a hypothesis leaves of a case; None: it says nothing.

    It says nothing either of a number that it leaves free, and of a case where the right numbers would pass under it.
    """
    allowed = _supposed_of(hypothesis, kind, what, failure)
    if allowed is None:
        return None
    left = wide = refused = total = 0
    for name, mask in failure.wrong.items():
        one, got = allowed[name], failure.got[name]
        empty = (one.high - one.low).isinf()
        if one.free is not None:
            empty |= one.free
        left += int((one.wrong(got) | (empty & mask)).sum())  # a right number that it makes wrong counts, too
        wide += int(((one.high > one.low) & mask).sum())
        if not hypothesis.loose:
            refused += int((one.wrong(right[name].right) & mask).sum())
        total += int(mask.sum())
    none = not hypothesis.loose and 4 * refused < total
    return _Left(1.0 if none else min(1.0, left / max(total, 1)), wide / max(total, 1))


def _against(hypothesis: Fault, kind: str, what: Mapping[str, Any], passed: Failure) -> bool:
    """Whether a case without a wrong number would have some."""
    allowed = _supposed_of(hypothesis, kind, what, passed)
    return allowed is not None and any(bool(allowed[name].wrong(got).any()) for name, got in passed.got.items())


def _supposed_of(hypothesis: Fault, kind: str, what: Mapping[str, Any], failure: Failure) -> dict[str, Allowed] | None:
    call = Asked(kind, failure.case.inputs, what, failure.case.before or failure.previous)
    try:
        allowed = supposed(hypothesis, call)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError):
        return None  # the fault has no meaning for these shapes
    if allowed is None or any(n not in allowed or allowed[n].low.shape != x.shape for n, x in failure.got.items()):
        return None
    return allowed


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
        if "only" not in after or name in after["only"]:
            factor = after.get("times", after.get("only", {}).get(name, 1.0))
            low, high = (_bent(side, factor, one.dtypes[0], after) for side in (one.low, one.high))
            if factor != 1.0:
                low, high = torch.minimum(low, high), torch.maximum(low, high)
            allowed[name] = one._replace(low=low, high=high, also=one.also if factor == 1.0 else ())
    return allowed


def _bent(x: Tensor, factor: float, dtype: torch.dtype, after: Mapping[str, Any]) -> Tensor:
    """A result that is multiplied, rounded to another type, clamped, or cut off."""
    x = (x * factor).float().to(dtype).double() if factor != 1.0 else x
    x = x.to(after["through"]).double() if "through" in after else x
    x = x.clamp(-after["clamp"], after["clamp"]) if "clamp" in after else x
    return ((x.float().view(torch.int32) >> 16) << 16).view(torch.float32).double() if "cut" in after else x


# --- calls under changed conditions ----------------------------------------------------------------------------------

_PROBES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "": (
            "not repeatable",
            "The same call again gives the right numbers: it depends on earlier calls, or on chance",
        ),
        "plain": (
            "strides or offset ignored",
            "It is right with contiguous operands: it ignores strides, or a storage offset",
        ),
        "fill": (
            "reads what nobody wrote",
            "It is right with buffers of zeros: it adds to a buffer, or leaves parts unwritten",
        ),
        "around": (
            "reads past its operands",
            "It is right with zeros around the operands: it reads memory beyond them",
        ),
        "plain fill around": ("memory around the operands", "It is right with contiguous operands in clean memory"),
    }
)
"""What is changed -> a name, a sentence."""
_CHANGES: Mapping[str, Any] = MappingProxyType({"plain": True, "fill": "zero", "around": "zero"})


def _probe(failures: Sequence[Failure], rerun: Rerun) -> dict[str, str] | None:
    """The change of conditions that makes most of the wrong cases right."""
    for change, (name, sentence) in _PROBES.items():
        conditions = {key: _CHANGES[key] for key in change.split()}
        right = sum(not rerun(failure.case, **conditions) for failure in failures)
        if right * 2 >= len(failures):
            return {"hypothesis": name, "sentence": f"{sentence} ({right} of {len(failures)} wrong cases)."}
    return None


# --- places ----------------------------------------------------------------------------------------------------------


def _place(kind: str, what: Mapping[str, Any], failures: Sequence[Failure]) -> dict[str, str]:
    """Where the wrong numbers lie, or which numbers they are."""
    said = [_hidden(kind, what, failure) or _pattern(failure) for failure in failures]
    # a small case may be all wrong: the others say where
    told = [one for one in said if "everywhere" not in one[0]] or said
    name = max(dict.fromkeys(told), key=told.count)
    return {"hypothesis": name[0], "sentence": name[1]}


def _hidden(kind: str, what: Mapping[str, Any], failure: Failure) -> tuple[str, str] | None:
    """NaN that is not shown."""
    name, mask = next(iter(failure.wrong.items()))
    right = expect(kind, failure.case.inputs, what)[name].right
    if not bool(right[mask].isnan().all()):
        return None
    shown = failure.got[name][mask].unique()
    values = ", ".join(f"{float(value):g}" for value in shown[:3]) + (" ..." if len(shown) > 3 else "")
    return "NaN hidden", f"{name} holds {values} where NaN belongs, and no hypothesis gives these numbers"


def _pattern(failure: Failure) -> tuple[str, str]:
    name, mask = next(iter(failure.wrong.items()))
    rows = mask.reshape(-1, mask.shape[-1]) if mask.dim() else mask.reshape(1, 1)
    if bool(failure.got[name][mask].isnan().all()):
        text = f"{name} holds NaN where numbers belong"
        if bool(mask.all()):
            return "NaN everywhere", f"{text}, everywhere: it was not written, or NaN has spread"
        for dim, word in ((1, "rows"), (0, "columns")):
            first = int(rows.any(dim).int().argmax())
            if bool(rows.narrow(1 - dim, first, rows.shape[1 - dim] - first).all()):
                return "tail not written", f"{text} in all {word} from {first} on: they are not written"
        return "NaN", f"{text}: not written, or NaN has spread from a neighbour"
    if mask.dim() >= 2 and mask.numel() > 1 and not bool(mask.all()):
        for dim, word in ((1, "rows"), (0, "columns")):
            lines, count = rows.any(dim).nonzero().flatten(), rows.shape[1 - dim]
            if len(lines) < count and len(lines) <= max(1, count // 2):
                ends = f"{int(lines[0])} to {int(lines[-1])}"
                return f"some {word}", f"{name} is wrong in {len(lines)} of {count} {word} only, {ends}"
    places = f"{int(mask.sum())} of {mask.numel()}"
    return "not explained", f"{name} is wrong in {places} places, and no hypothesis gives these numbers"
