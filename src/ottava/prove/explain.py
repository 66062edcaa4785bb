"""Which way of being wrong gives these numbers: hypotheses, then calls under changed conditions, then a place.

A hypothesis is a faulty reference. Of each case it gives some wrong numbers, which the right ones would fail, and it
speaks against some right ones. The answer is the hypothesis that gives all wrong numbers and speaks against none; or
one that does so in a part that a sentence can name, such as rows beyond the last whole 16; or two that turn different
knobs. If none does, the adapter is called again with clean memory, with contiguous operands and so on: what makes the
result right is the reason. Else the answer says what the wrong numbers are, and where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.prove.codes import Allowed
from ottava.prove.hypotheses import Asked, Fault, all_hypotheses
from ottava.prove.judge import expect
from ottava.prove.matrix import KernelCase
from ottava.prove.places import Part, copied, part_of, relation

_AFTER = ("times", "cut", "through", "clamp", "only", "keys", "plus")
_ALMOST = 0.99
"""A share that counts as all: a number may be right by chance."""


class Failure(NamedTuple):
    """A case whose results are wrong."""

    case: KernelCase
    got: Mapping[str, Tensor]
    """All results as float64."""
    wrong: Mapping[str, Tensor]
    """Where they are wrong; results without a wrong element are left out."""
    previous: Mapping[str, Any] | None = None
    """The inputs of the call before, of these shapes if there was one."""
    first: Mapping[str, Any] | None = None
    """The inputs of the first call of these shapes, if there was one."""
    allowed: Mapping[str, Allowed] | None = None
    """What the results may be."""
    call: Asked | None = None
    """What a hypothesis may look at; `explain` fills it in."""

    @property
    def size(self) -> int:
        """Numbers of all results."""
        return sum(x.numel() for x in self.got.values())


Rerun = Callable[..., Mapping[str, Tensor]]
"""(case, fill=, around=, plain=) -> where the results of another call are wrong."""


class _Told(NamedTuple):
    """What a hypothesis says of one result of one case."""

    given: Tensor
    """Wrong numbers that it gives."""
    against: Tensor
    """Right numbers that it makes wrong."""
    wide: float
    """Share of the given ones that a bound gives, not a number."""


class _Fit(NamedTuple):
    """A hypothesis, held against all cases."""

    fault: Fault
    told: list[dict[str, _Told]]
    """One entry for each failure."""
    share: float
    """Of the wrong numbers that it gives, the mean over cases."""
    solved: int
    """Cases of which it gives all wrong numbers."""
    against: float
    """Right numbers that it makes wrong, beside those that it gives."""
    wide: float

    @property
    def score(self) -> tuple[float, ...]:
        """The smallest is the best; a draw goes to the earlier entry."""
        return self.fault.loose, -round(self.share, 2), round(self.against, 2), round(self.wide, 1)


def explain(
    kind: str, what: Mapping[str, Any], failures: Sequence[Failure], passed: Sequence[Failure], rerun: Rerun
) -> dict[str, str] | None:
    """{"hypothesis", "sentence"} of what is wrong; None only if there is no failure.

    passed: cases without a wrong number, which a hypothesis had better not make wrong.
    """
    if not failures:
        return None

    def known(one: Failure) -> Failure:
        call = Asked(kind, one.case.inputs, what, one.case.before or one.previous, one.first)
        return one._replace(call=call, allowed=one.allowed or expect(kind, one.case.inputs, what))

    held, passed = [*map(known, failures)], [*map(known, passed)]
    fits: list[_Fit] = []
    for hypothesis in all_hypotheses():
        if kind not in hypothesis.kinds or (fit := _fit(hypothesis, held)) is None:
            continue
        whole = fit.share >= 0.995 and fit.against < 0.005 and fit.wide < 0.05 and not hypothesis.loose
        if whole and not any(_contrary(hypothesis, passed)):
            return _named(fit, len(failures), "")  # no later entry is better
        fits.append(fit)
    fits.sort(key=lambda fit: fit.score)
    full = [fit for fit in fits if fit.share >= _ALMOST and not fit.fault.loose]
    if not full:
        full = [fit for fit in _merged(fits[:6], held) if fit.share >= _ALMOST]
    clean = [fit for fit in full if fit.against < 1 - _ALMOST]
    told = {id(fit): _contrary(fit.fault, passed) for fit in clean[:6]}
    if best := next((fit for fit in clean[:6] if not any(told[id(fit)])), None):
        return _named(best, len(failures), "")
    for fit in [*clean[:6], *full[:12]]:
        right = told.get(id(fit)) or _contrary(fit.fault, passed)
        both = zip([*held, *passed], [*fit.told, *right], strict=True)
        parts = [Part(one.case, one.got, name, t.given, t.against) for one, of in both for name, t in of.items()]
        if where := part_of(kind, parts):
            return _named(fit, len(failures), where)
    if (probe := _probe(failures, rerun)) is not None:
        return probe
    if clean:
        return _named(clean[0], len(failures), "")
    return _loose(fits, held, passed, kind) or _place(kind, held, passed)


def _named(fit: _Fit, count: int, where: str) -> dict[str, str]:
    kind = "within its bound" if fit.wide > 0.05 else "bit for bit"
    part = f", but only {where}" if where else ""
    which = f"all {count}" if fit.solved == count else f"{fit.solved} of {count}"
    said = f"{fit.fault.sentence}{part}. This gives {which} wrong cases looked at {kind}."
    return {"hypothesis": fit.fault.name, "sentence": said}


def _loose(
    fits: Sequence[_Fit], held: Sequence[Failure], passed: Sequence[Failure], kind: str
) -> dict[str, str] | None:
    """A bound that holds in every case; else a hypothesis that gives most of the numbers."""
    for fit in fits:
        if fit.fault.loose and fit.solved == len(held):
            return _named(fit, len(held), "")
    for fit in fits:
        if not fit.fault.loose and fit.solved * 2 >= len(held) and fit.against < 0.05:
            rest = [one for one, of in zip(held, fit.told, strict=True) if _share(one.wrong, of) < 1]
            others = f" The others: {_place(kind, rest, passed)['sentence']}." if rest else ""
            said = _named(fit, len(held), "")
            return said | {"sentence": f"{said['sentence']}{others}"}
    return None


def _share(wrong: Mapping[str, Tensor], told: Mapping[str, _Told]) -> float:
    """Of the wrong numbers of a case, those that a hypothesis gives."""
    given = sum(int(told[name].given.sum()) for name in wrong if name in told)
    return given / sum(int(mask.sum()) for mask in wrong.values())


def _fit(hypothesis: Fault, held: Sequence[Failure]) -> _Fit | None:
    """None: it gives next to nothing."""
    told: list[dict[str, _Told]] = []
    share = against = wide = 0.0
    solved = 0
    for number, failure in enumerate(held):
        told.append(_told(hypothesis, failure))
        mine = _share(failure.wrong, told[-1])
        share, solved = share + mine, solved + (mine == 1.0)
        given = sum(int(one.given.sum()) for one in told[-1].values())
        spoken = sum(int(one.against.sum()) for one in told[-1].values())
        against += spoken / max(given + spoken, 1)
        wide += max((one.wide for one in told[-1].values()), default=0.0)
        if number >= 2 and share < 0.05:
            return None
    count = len(held)
    return _Fit(hypothesis, told, share / count, solved, against / count, wide / count) if share else None


def _told(hypothesis: Fault, failure: Failure) -> dict[str, _Told]:
    """Nothing of numbers that it leaves free, nor of those that would be right under it."""
    allowed, told = _supposed_of(hypothesis, failure), {}
    assert failure.allowed is not None
    for name, one in (allowed or {}).items():
        got, right = failure.got[name], failure.allowed[name]
        wrong = failure.wrong.get(name, torch.zeros_like(got, dtype=torch.bool))
        refuses = one.wrong(got)
        given = wrong & ~refuses & ~(one.high - one.low).isinf()
        if one.free is not None:
            given &= ~one.free
        if not hypothesis.loose:
            parted = one.wrong(right.right)
            # a bound of sums is wide: it parts from the right numbers as a whole, not at each of them
            given &= parted if 4 * int((parted & wrong).sum()) < int(wrong.sum()) else True
        count = int(given.sum())
        told[name] = _Told(given, ~wrong & refuses, float(((one.high > one.low) & given).sum()) / max(count, 1))
    return told


def _contrary(hypothesis: Fault, passed: Sequence[Failure]) -> list[dict[str, _Told]]:
    """Of each right case what a hypothesis speaks against."""
    told = (_told(hypothesis, one) for one in passed)
    return [{name: one for name, one in of.items() if bool(one.against.any())} for of in told]


def _merged(fits: Sequence[_Fit], held: Sequence[Failure]) -> Iterator[_Fit]:
    """Pairs of the best hypotheses, one on top of the other, where they turn different knobs."""
    for one, two in combinations([fit.fault for fit in fits if not fit.fault.loose], 2):

        def knobs(call: Asked, one: Fault = one, two: Fault = two) -> dict[str, Any] | None:
            first, second = one.knobs(call), two.knobs(call)
            return None if first is None or second is None or first.keys() & second.keys() else first | second

        both = Fault(f"{one.name}; {two.name}", f"{one.sentence}. And {two.sentence}", one.kinds, knobs)
        if (fit := _fit(both, held)) is not None:
            yield fit


def _supposed_of(hypothesis: Fault, failure: Failure) -> dict[str, Allowed] | None:
    assert failure.call is not None
    try:
        allowed = supposed(hypothesis, failure.call)
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
    if "plus" in after:
        more = expect(call.kind, after["plus"], what, None, **knobs)
        for name, one in allowed.items():
            pairs = zip(one[:2], more[name][:2], strict=True)
            low, high = ((x + y).float().to(one.dtypes[0]).double() for x, y in pairs)
            allowed[name] = Allowed(low, high, one.dtypes, free=one.free)
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

_PROBES = (
    "not repeatable: The same call again gives the right numbers: it depends on earlier calls, or on chance",
    "strides or offset ignored: It is right with contiguous operands: it ignores strides, or a storage offset",
    "reads what nobody wrote: It is right with buffers of zeros: it adds to a buffer, or leaves parts unwritten",
    "reads past its operands: It is right with zeros around the operands: it reads memory beyond them",
    "memory around the operands: It is right with contiguous operands in clean memory",
)
_CHANGES = MappingProxyType({"plain": True, "fill": "zero", "around": "zero"})
_CONDITIONS = ((), ("plain",), ("fill",), ("around",), tuple(_CHANGES))
"""Of each probe: what is changed."""


def _probe(failures: Sequence[Failure], rerun: Rerun) -> dict[str, str] | None:
    """The change of conditions that makes most of the wrong cases right."""
    for changed, text in zip(_CONDITIONS, _PROBES, strict=True):
        conditions, (name, _, sentence) = {key: _CHANGES[key] for key in changed}, text.partition(": ")
        right = sum(not rerun(failure.case, **conditions) for failure in failures)
        if right * 2 >= len(failures):
            return {"hypothesis": name, "sentence": f"{sentence} ({right} of {len(failures)} wrong cases)."}
    return None


def _place(kind: str, failures: Sequence[Failure], passed: Sequence[Failure]) -> dict[str, str]:
    """What the wrong numbers are, and where they lie: there are none in cases that passed."""
    masks = [(one, name, mask) for one in failures for name, mask in one.wrong.items()]
    masks += [(one, n, x != x) for one in passed for n, x in one.got.items() if bool((x == x).all())]
    names = dict.fromkeys(name for _, name, mask in masks if bool(mask.any()))
    every = [Part(one.case, one.got, n, m, ~m, (one.allowed or {}).get(n)) for one, n, m in masks if n in names]
    parts, met = ([part for part in every if bool(part.given.any()) is wrong] for wrong in (True, False))
    name, said = copied(parts) or relation(parts)
    where = part_of(kind, parts + met)
    if name == "NaN" and not where and all(bool(part.given.all()) for part in parts):
        name, where = "NaN everywhere", "everywhere in some cases"
    if name == "NaN" and where.startswith(("in rows beyond", "in columns beyond", "behind", "from")):
        name = "tail not written"
    if name == "not explained" and where:
        name = "some places"
    if not where:
        most = max(parts, key=lambda part: part.given.numel())
        where = f"in {int(most.given.sum())} of {most.given.numel()} places"
    return {"hypothesis": name, "sentence": f"Wrong {where}: {', '.join(names)} {said}"}
