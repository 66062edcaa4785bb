"""Which way of being wrong gives these numbers: hypotheses, then calls under changed conditions, then a place.

A hypothesis is a faulty reference. Of each case it gives some wrong numbers, which the right ones would fail, and it
speaks against some right ones. The answer is the hypothesis that gives all wrong numbers and speaks against none; or
one that does so in a part that a sentence can name, such as rows beyond the last whole 16; or two that turn different
knobs. If none does, the adapter is called again with clean memory, with contiguous operands and so on: what makes the
result right is the reason. Else the answer says what the wrong numbers are, and where they lie.
"""

# mypy: disable-error-code="misc"
# (a lambda with a default has no type that mypy infers)
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.base.text import progress
from ottava.prove.codes import Allowed, law_of, noise_of
from ottava.prove.expected import expect
from ottava.prove.factors import alone, factored
from ottava.prove.hypotheses import Asked, Fault, all_hypotheses
from ottava.prove.matrix import KernelCase

_SIZES = (2, 4, 8, 16, 32, 64, 128)


class Part(NamedTuple):
    """One result of one case, and two kinds of its numbers."""

    case: KernelCase
    got: Any
    """All results."""
    name: str
    given: Tensor
    """Numbers of which a sentence must be true."""
    others: Tensor
    """Numbers of which it must not be."""
    allowed: Allowed | None = None

    @property
    def right(self) -> Tensor:
        """Numbers that are allowed; 0.5 everywhere if nothing says which are."""
        return self.allowed.right if self.allowed is not None else torch.full(self.given.shape, 0.5)


Where = Callable[[Part], Tensor | bool]


def part_of(kind: str, parts: Sequence[Part]) -> str:
    """A sentence that is true of all given numbers, and of none of the others; "" if none is known.

    Example:
        >>> given = torch.arange(40)[:, None].expand(40, 5) >= 32
        >>> part_of("cast", [Part(KernelCase("", {"x": torch.ones(40, 5)}), {}, "data", given, ~given)])
        'in rows beyond the last whole 32'
    """
    if not any(bool(part.others.any()) for part in parts):
        return "everywhere"
    for text, where in _sentences(kind, parts):
        for part in parts:
            holds = where(part)
            inside = holds if isinstance(holds, Tensor) else torch.tensor(holds).expand(part.given.shape)
            if bool((part.given & ~inside).any()) or bool((part.others & inside).any()):
                break
        else:
            return text
    return _tail(parts) or _sizes_of(kind, parts)


def _tail(parts: Sequence[Part]) -> str:
    """The rows or columns at the end that hold all given numbers: from one on, so many, or behind whole multiples."""
    for dim, word in ((0, "row"), (1, "column")):
        spans: list[tuple[int, int]] = []
        for part in (part for part in parts if part.given.numel()):
            given = part.given.reshape(-1, part.given.shape[-1] if part.given.dim() > 1 else part.given.numel())
            lines, size = given.all(1 - dim), given.shape[dim]
            first = size - int(lines.sum())
            whole = bool(lines[first:].all()) and bool(given.any(1 - dim).eq(lines).all())
            spans.append((first if whole else -1, size))
        found, free = ([span for span in spans if (span[0] == span[1]) is none] for none in (False, True))
        firsts, counts = {first for first, _ in found}, {size - first for first, size in found}
        if not firsts or min(firsts) < 0:
            continue
        # a case without such numbers ends before that line
        if len(firsts) == 1 and min(firsts) >= max((size for _, size in free), default=0):
            return f"from {word} {firsts.pop()} on"
        if len(counts) == 1 and len(found) > 1 and not free:
            return f"in the last {counts.pop()} {word}s"
        for n in range(3, 257):
            if all(first == size // n * n for first, size in spans):
                return f"in {word}s beyond the last whole {n}"
    return ""


def _sentences(kind: str, parts: Sequence[Part]) -> Iterator[tuple[str, Where]]:
    names = tuple(dict.fromkeys(part.name for part in parts if bool(part.given.any())))
    yield f"in {' and '.join(names)}", lambda part: part.name in names
    end = f" of {names[0]}" if names and len({part.name for part in parts}) > 1 else ""
    for text, where in _of_one(kind) if names else ():
        yield text + end, lambda part, where=where: where(part) if part.name == names[0] else False
    if len(names) > 1:
        yield from _of_one(kind)


def _of_one(kind: str) -> Iterator[tuple[str, Where]]:
    yield from _of_cases(kind)
    yield from _of_values(kind)
    for size in reversed(_SIZES):
        yield (
            f"behind the last whole {size} elements",
            lambda part, n=size: torch.arange(part.given.numel()).view(part.given.shape) >= part.given.numel() // n * n,
        )
    for dim, word in ((0, "row"), (1, "column")):

        def on(chosen: Callable[[Tensor, int], Tensor], dim: int = dim) -> Where:
            return lambda part: chosen(*_lines(part, kind, dim))

        yield f"in the last {word}", on(lambda i, n: i == n - 1)
        yield f"in the first {word}", on(lambda i, n: i == 0)
        yield f"in all {word}s but the first", on(lambda i, n: i > 0)
        yield f"in the second half of the {word}s", on(lambda i, n: i >= n // 2)
        for size in reversed(_SIZES):
            yield f"in {word}s beyond the last whole {size}", on(lambda i, n, size=size: i >= n // size * size)
        for size in _SIZES[3:]:
            yield f"from {word} {size} on", on(lambda i, n, size=size: i >= size)
            yield f"before {word} {size}", on(lambda i, n, size=size: i < size)
        for every, rest in ((n, rest) for n in (*_SIZES[:5], 3, 5, 6, 12) for rest in range(n)):
            text = f"in {word}s {rest}, {rest + every}, {rest + 2 * every} and so on"
            yield text, on(lambda i, n, every=every, rest=rest: i % every == rest)
    if kind == "grouped":
        yield from _of_groups()


def _lines(part: Part, kind: str, dim: int) -> tuple[Tensor, int]:
    """The number of the row or column of each number, and their count; of a scale the first one that it serves."""
    shape = part.given.shape or torch.Size((1,))
    if kind == "cast" and part.name == "scale_inv" and len(shape) == 2 and part.given.numel():
        whole = part.case.inputs["x"].shape[dim]
        size = next((size for size in (1, *_SIZES) if -(-whole // size) == shape[dim]), max(whole, 1))
        return (size * torch.arange(shape[dim])).view((1, -1) if dim else (-1, 1)).expand(shape), whole
    rows = math.prod(shape[:-1]) if kind in ("encode", "decode", "linear") else (1, *shape)[-2]
    index = torch.arange((rows, shape[-1])[dim]).view((1, -1) if dim else (-1, 1)).expand(rows, shape[-1])
    same = index.numel() == part.given.numel()
    return (index.reshape if same else index.expand)(part.given.shape), (rows, shape[-1])[dim]


def _of_groups() -> Iterator[tuple[str, Where]]:
    def rows(chosen: Callable[..., Tensor]) -> Where:
        """Of each row: its place in its group, the size of the group, whether an empty group lies before it."""

        def where(part: Part) -> Tensor:
            told, empty = [], 0
            for start, stop in pairwise([0, *part.case.inputs["ends"].tolist()]):
                told += [(place, stop - start, empty) for place in range(stop - start)]
                empty |= start == stop
            told += [(-1, 0, 0)] * (part.given.shape[0] - len(told))
            return chosen(*torch.tensor(told).view(-1, 3).t()[:, :, None]).expand(part.given.shape)

        return where

    yield "in the last row of a group", rows(lambda i, n, behind: i == n - 1)
    yield "in the first row of a group", rows(lambda i, n, behind: i == 0)
    for size in reversed(_SIZES):
        text = f"in rows of a group beyond its last whole {size}"
        yield text, rows(lambda i, n, behind, size=size: i >= n // size * size)


def _of_cases(kind: str) -> Iterator[tuple[str, Where]]:
    """What is true of whole cases: of a dtype, of strides, of sizes."""

    def first(part: Part) -> Tensor:
        x: Tensor = next(iter(part.case.inputs.values()))
        return x

    for dtype, word in ((torch.bfloat16, "BF16"), (torch.float32, "FP32"), (torch.float8_e5m2, "E5M2"), (torch.float8_e4m3fn, "E4M3")):  # fmt: skip  # noqa: E501
        yield f"for operands in {word}", lambda part, dtype=dtype: first(part).dtype == dtype
    yield (
        "for operands that are not contiguous",
        lambda part: not all(x.is_contiguous() for x in part.case.inputs.values() if isinstance(x, Tensor)),
    )
    yield "for operands of one dimension", lambda part: first(part).dim() == 1
    yield "for operands of three dimensions", lambda part: first(part).dim() > 2
    yield "where all of x is zero", lambda part: not bool(first(part).float().any())
    yield "for a second call in the same memory", lambda part: part.case.before is not None
    for (name, one), (other, two) in combinations(_sizes(kind), 2):
        yield f"where {name} equals {other}", lambda p, f=one, g=two: f(p) == g(p)
        yield f"where {name} is not {other}", lambda p, f=one, g=two: f(p) != g(p)
    for name, size_of in _sizes(kind):
        for size in _SIZES:
            yield f"where {name} is no multiple of {size}", lambda p, f=size_of, n=size: (f(p) or n) % n != 0
            yield f"where {name} is at most {size}", lambda p, f=size_of, n=size: (f(p) or n + 1) <= n
            yield f"where {name} is more than {size}", lambda p, f=size_of, n=size: (f(p) or 0) > n
            yield f"where {name} is at least {size}", lambda p, f=size_of, n=size: (f(p) or 0) >= n


def _sizes(kind: str) -> tuple[tuple[str, Callable[[Part], int]], ...]:
    def of(name: str, dim: int) -> Callable[[Part], int]:
        return lambda part: int(part.case.inputs[name].shape[dim]) if part.case.inputs[name].dim() >= abs(dim) else 0

    return {
        "gemm": (("K", of("a", 1)), ("M", of("a", 0)), ("N", of("b", 0))),
        "grouped": (("K", of("a", 1)), ("N", of("b", 1))),
        "cast": (("K", of("x", 1)), ("M", of("x", 0))),
        "linear": (("K", of("weight", 1)), ("N", of("weight", 0)), ("M", lambda p: p.case.inputs["x"][..., 0].numel())),
        "attention": (("S", of("q", 2)), ("D", of("q", 3)), ("the number of heads", of("q", 1)), ("B", of("q", 0))),
        "optimizer": (("the number of elements", lambda p: p.case.inputs["parameter"].numel()),),
    }.get(kind, ())


def _of_values(kind: str) -> Iterator[tuple[str, Where]]:
    """What is true of a number by its right value, or by the input that it is made of."""
    key = {"encode": "x", "cast": "x", "optimizer": "grad"}.get(kind)

    def made_of(part: Part) -> Tensor:
        assert key is not None
        x: Tensor = part.case.inputs[key].double()
        return x if x.shape == part.given.shape else x.new_full(part.given.shape, 0.5)

    if key is not None:
        yield "where it is zero", lambda part: made_of(part) == 0
        yield "for infinity", lambda part: made_of(part).isinf()
        yield "for NaN", lambda part: made_of(part).isnan()
        yield "for NaN with the sign bit", lambda part: made_of(part).isnan() & made_of(part).signbit()
        yield "for -0", lambda part: (made_of(part) == 0) & made_of(part).signbit()
        yield "for negative numbers", lambda part: made_of(part) < 0
        yield "for positive numbers", lambda part: made_of(part) > 0
        yield "for FP32's subnormal numbers", lambda part: (made_of(part) != 0) & (made_of(part).abs() < 2.0**-126)

    def whole_power(x: Tensor) -> Tensor:
        return torch.frexp(x.nan_to_num(0.3))[0].abs() == 0.5

    yield "where NaN is right", lambda part: part.right.isnan()
    yield "where NaN or infinity is right", lambda part: ~part.right.isfinite()
    if kind == "encode":
        text = "where it rounds up to a power of two"
        yield text, lambda part: whole_power(part.right) & (made_of(part).abs() < part.right.abs())
    else:
        yield "where a number with a fraction is right", lambda part: part.right % 1 != 0
    yield "where zero is right", lambda part: part.right == 0
    yield "where -0 is right", lambda part: (part.right == 0) & part.right.signbit()
    yield "where infinity is right", lambda part: part.right.isinf()
    yield "where a negative number is right", lambda part: part.right < 0
    yield "where a power of two is right", lambda part: whole_power(part.right)
    for name, smallest in (("E4M3", 2.0**-6), ("E5M2", 2.0**-14), ("E2M1", 1.0), ("E4M3FNUZ", 2.0**-7)):
        text = f"normal number of {name} is right"
        yield f"where a sub{text}", lambda part, s=smallest: (part.right != 0) & (part.right.abs() < s)
        yield f"where a {text}", lambda part, s=smallest: part.right.abs() >= s


def _sizes_of(kind: str, parts: Sequence[Part]) -> str:
    """The magnitudes of the given numbers, or their significands, if no other number has one of them."""
    if kind not in ("encode", "decode", "cast"):
        return ""
    inside, outside = [], []
    for part in parts:
        x = part.case.inputs["x"].double() if kind != "decode" else None if part.allowed is None else part.allowed.right
        if kind == "cast" and x is not None and part.name == "scale_inv" and part.allowed is not None:
            x = part.allowed.right  # of an amax, but for a factor
        if x is None or x.shape != part.given.shape:
            return ""
        inside.append(x[part.given].abs())
        outside.append(x[part.others].abs())
    held, rest = torch.cat(inside), torch.cat(outside)
    held, rest = held[held.isfinite()], rest[rest.isfinite()]
    for change, word in ((lambda x: x, "magnitudes"), (lambda x: 2 * torch.frexp(x)[0], "significands")):
        if not len(held):
            break
        told, others = change(held), change(rest)
        low, high = told.min(), told.max()
        if not bool(((others >= low) & (others <= high)).any()):
            return f"for {word} from {low:g} to {high:g}"
    return ""


def relation(parts: Sequence[Part]) -> tuple[str, str]:
    """What the given numbers are: (a name, a sentence)."""
    pairs = [
        (part.got[part.name][part.given], part.allowed.right[part.given]) for part in parts if part.allowed is not None
    ]
    got, right = (torch.cat([pair[i] for pair in pairs]) for i in (0, 1))
    if said := _chance(parts):
        return "random rounding biased", said
    if not bool(right.isfinite().any()):
        shown = ", ".join(f"{float(value):g}" for value in got.unique()[:3]) + (" ..." if len(got.unique()) > 3 else "")
        return "NaN hidden", f"holds {shown} where {'NaN' if bool(right.isnan().all()) else 'NaN or infinity'} belongs"
    if bool(got.isnan().all()):
        return "NaN", "holds NaN where numbers belong: it was not written, or NaN has spread"
    if bool((got == 0).all()):
        return "zeros", "is zero where other numbers belong"
    if len(got) > 1 and bool((got == got[0]).all()):
        return "one number", f"is {float(got[0]):g} wherever it is wrong"
    pairs = sorted({*zip(right.tolist(), got.tolist(), strict=True)} if len(got) < 1 << 16 else ())
    if 1 < len(pairs) < min(20, len(got) // 2) and len({of for of, _ in pairs}) == len(pairs):
        return "other codes", f"is {', '.join(f'{is_:g} for {of:g}' for of, is_ in pairs[:4])}"
    ratio = got / torch.where(right == 0, math.nan, right)
    usual = ratio[ratio.isfinite() & (ratio != 0)]
    if len(usual) * 2 > len(got) and float(usual.max() - usual.min()) <= 0.02 * abs(float(usual.median())):
        return "a factor", f"is {float(usual.median()):.4g} times what it should be"
    if len(usual) * 2 > len(got) and bool((torch.frexp(usual)[0].abs() == 0.5).all()):
        shown = ", ".join(f"{float(x):g}" for x in usual.unique()[:4])
        return "powers of two", f"is off by factors that are powers of two: {shown}"
    off = float(((got - right).abs() / right.abs().clamp(min=1e-300)).nan_to_num(math.inf, math.inf).median())
    said = f"wrong by {off:.2g} of its size or more" if math.isfinite(off) else "infinite or NaN"
    return "not explained", f"is {said} in half of the wrong places, and no hypothesis gives it"


def _chance(parts: Sequence[Part]) -> str:
    """How often neighbours are taken that chance should choose; "" if other numbers are wrong, too."""
    found: list[Tensor] = []
    for part in parts:
        if part.allowed is None or (mean := part.allowed.drawn) is None:
            return ""
        low, high, got = (x[part.given] for x in (part.allowed.low, part.allowed.high, part.got[part.name]))
        up, chance = ((x - low) / (high - low) for x in (got, mean[part.given]))
        if not bool(((got == low) | (got == high)).all()):
            return ""
        turned = mean[part.given] < 0  # away from zero
        found.append(torch.stack([torch.where(turned, 1 - x, x) for x in (up, chance)]))
    taken, asked = (100 * float(x) for x in torch.cat(found, 1).nanmean(1))
    return f"goes away from zero in {taken:.3g} % of them, and chance asks for {asked:.3g} %"


_AFTER = ("times", "cut", "through", "clamp", "floor", "only", "keys", "plus", "wrap", "turned")
_ALMOST = 0.99
"""A share that counts as all: a number may be right by chance."""
_WORK = 8_000_000  # numbers that two causes at once are tried on: some seconds


class Failure(NamedTuple):
    """A case whose results are wrong."""

    case: KernelCase
    got: Mapping[str, Tensor]
    """All results as float64."""
    wrong: Mapping[str, Tensor]
    """Where they are wrong; results without a wrong element are left out."""
    allowed: Mapping[str, Allowed] | None = None
    """What the results may be."""
    call: Asked | None = None
    """What a hypothesis may look at; None: this case alone."""

    @property
    def size(self) -> int:
        """Numbers of all results."""
        return sum(x.numel() for x in self.got.values())


Rerun = Callable[..., Any]
"""(case, fill=, around=, plain=, fresh=, whole=) -> where the results of another call are wrong; see `certificate`."""


class _Told(NamedTuple):
    """What a hypothesis says of one result of one case."""

    given: Tensor
    """Wrong numbers that it gives."""
    refused: Tensor
    """Wrong numbers that it does not allow."""
    against: Tensor
    """Right numbers that it makes wrong."""
    wide: float
    """Share of the given ones that a bound gives, not a number."""
    untold: int
    """Wrong numbers that it leaves open: its bound has no end there, or also allows the right ones."""


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
        return self.fault.loose, -round(self.share, 2), round(self.against, 2), -self.solved, round(self.wide, 1)


def explain(
    kind: str,
    what: Mapping[str, Any],
    failures: Sequence[Failure],
    passed: Sequence[Failure],
    rerun: Rerun,
    larger: Sequence[Failure] = (),
) -> dict[str, str] | None:
    """{"hypothesis", "sentence"} of what is wrong; None only if there is no failure.

    passed: cases without a wrong number, which a hypothesis had better not make wrong.
    larger: failures that tell hypotheses apart which fit the others alike.
    """
    if not failures:
        return None

    def known(one: Failure) -> Failure:
        call = one.call or Asked(kind, one.case.inputs, what, one.case.before)
        return one._replace(call=call, allowed=one.allowed or expect(kind, one.case.inputs, what))

    held, passed, larger = [*map(known, failures)], [*map(known, passed)], [*map(known, larger)]

    def holds(fault: Fault) -> bool:
        fit = _fit(fault, larger) if larger else None
        return not larger or (fit is not None and fit.share >= _ALMOST and fit.against < 1 - _ALMOST)

    empty = all(bool(one.got[n][at].isnan().all()) for one in failures for n, at in one.wrong.items())
    if empty and (probe := _unwritten(kind, held, passed, rerun) or _probe(kind, what, held, rerun)) is not None:
        return probe  # memory holds NaN, which fits many hypotheses
    fits: list[_Fit] = []
    for hypothesis in progress([*_known(kind)], "looking for the cause"):
        if (fit := _fit(hypothesis, held)) is None:
            continue
        whole = fit.share >= 0.995 and fit.against < 0.005 and fit.wide < 0.05 and not hypothesis.loose
        if whole and fit.solved == len(held) and not any(_contrary(hypothesis, passed)) and holds(hypothesis):
            return _with_twins(fit, kind, held, passed)  # no later entry is better
        fits.append(fit)
    fits.sort(key=lambda fit: fit.score)
    full = [fit for fit in fits if fit.share >= _ALMOST and not fit.fault.loose]
    clean = [fit for fit in full if fit.against < 1 - _ALMOST]
    told = {id(fit): _contrary(fit.fault, passed) for fit in clean[:6]}
    fine = sorted((fit for fit in clean[:6] if not any(told[id(fit)])), key=lambda fit: not holds(fit.fault))
    whole = bool(fine) and fine[0].solved == len(held)
    exact = None if whole else _exact(factored(kind), held, [*passed, *larger])
    if exact is not None:
        return _named(exact, len(failures), "")
    if fine:
        return _with_twins(fine[0], kind, held, passed)
    for law in (law_of, noise_of) if kind in ("encode", "decode", "cast") else ():
        if said := law(Asked(kind, {}, what, None).format, [*held, *larger, *passed]):
            return {"hypothesis": said[0], "sentence": said[1]}
    for fit in [*clean[:6], *full[:12]]:
        right = told.get(id(fit)) or _contrary(fit.fault, passed)
        both = zip(
            [*held, *larger, *passed], [*fit.told, *(_told(fit.fault, one) for one in larger), *right], strict=True
        )
        parts = [
            Part(one.case, one.got, name, t.given, t.against, (one.allowed or {}).get(name))
            for one, of in both
            for name, t in of.items()
        ]
        if where := part_of(kind, parts):
            strided = where.startswith("for operands that are not")  # a contiguous call tells more
            return (_probe(kind, what, held, rerun) if strided else None) or _named(fit, len(failures), where)
    if (probe := _probe(kind, what, held, rerun)) is not None:
        return probe
    if clean:
        return _named(clean[0], len(failures), "")
    return _loose(fits, held, passed, kind) or _place(kind, [*held, *larger], passed)


def _known(kind: str) -> Iterator[Fault]:
    """The hypotheses of a kind."""
    yield from (one for faults in (all_hypotheses(), alone()) for one in faults if kind in one.kinds)


def _with_twins(fit: _Fit, kind: str, held: Sequence[Failure], passed: Sequence[Failure]) -> dict[str, str]:
    """Names a hypothesis, and another of its name that gives the same numbers: they do not tell the operand."""
    said = _named(fit, len(held), "")
    for one in (one for one in _known(kind) if one.name == fit.fault.name and one.sentence != fit.fault.sentence):
        other = _fit(one, held)
        if other is None or (other.solved, round(other.share, 2)) < (fit.solved, round(fit.share, 2)):
            continue
        if other.against < 0.005 and not any(_contrary(one, passed)):
            return said | {"sentence": f"{said['sentence']} So does this: {one.sentence}."}
    return said


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
            both = zip(held, fit.told, strict=True)
            rest = [one for one, of in both if not of or any(bool(told.refused.any()) for told in of.values())]
            others = f" The others: {_place(kind, rest, passed)['sentence']}." if rest else ""
            said = _with_twins(fit, kind, held, passed)
            return said | {"sentence": f"{said['sentence']}{others}"}
    return None


def _share(wrong: Mapping[str, Tensor], told: Mapping[str, _Told]) -> float:
    """Of the wrong numbers of a case that a hypothesis tells of, those that it gives; of all, if it tells of few."""
    given = sum(int(told[name].given.sum()) for name in wrong if name in told)
    count = sum(int(mask.sum()) for mask in wrong.values())
    spoken = count - sum(one.untold for one in told.values())
    if not spoken:
        return math.nan
    return given / (spoken if 50 * spoken >= count else count)  # of 2 % or less it tells too little


def _fit(hypothesis: Fault, held: Sequence[Failure]) -> _Fit | None:
    """Holds a hypothesis against all cases; None if it gives next to nothing. Cases it leaves open do not count."""
    told: list[dict[str, _Told]] = []
    share = against = wide = 0.0
    solved = missed = seen = 0
    for failure in held:
        told.append(_told(hypothesis, failure))
        mine = _share(failure.wrong, told[-1])
        if not math.isnan(mine):
            share, solved, missed, seen = share + mine, solved + (mine == 1.0), missed + (mine < 0.9), seen + 1
        given = sum(int(one.given.sum()) for one in told[-1].values())
        spoken = sum(int(one.against.sum()) for one in told[-1].values())
        against += spoken / max(given + spoken, 1)
        wide += max((one.wide for one in told[-1].values()), default=0.0)
        if 2 * missed > len(held) or (share == 0 if seen == 2 else seen > 2 and share < 0.05):
            return None  # nobody asks for one that gives less than half of the cases
    count = len(held)
    return _Fit(hypothesis, told, share / seen, solved, against / count, wide / count) if share else None


def _told(hypothesis: Fault, failure: Failure) -> dict[str, _Told]:
    """Nothing of numbers that it leaves free, nor of those that would be right under it."""
    allowed, told = _supposed_of(hypothesis, failure), {}
    assert failure.allowed is not None
    for name, one in (allowed or {}).items():
        got, right = failure.got[name], failure.allowed[name]
        wrong = failure.wrong.get(name, torch.zeros_like(got, dtype=torch.bool))
        refuses = one.wrong(got)
        allows = wrong & ~refuses
        given = allows & ~(one.high - one.low).isinf()
        if not hypothesis.loose:
            parted = one.wrong(right.right) | (one.wrong(right.high) if right.drawn is not None else False)
            # a bound of sums is wide: it parts from the right numbers as a whole, not at each of them
            given &= parted if 4 * int((parted & wrong).sum()) < int(wrong.sum()) else True
        untold = int((allows & ~given).sum())
        if one.free is not None:
            given &= ~one.free
        count = int(given.sum())
        told[name] = _Told(
            given,
            wrong & refuses,
            ~wrong & refuses,
            float(((one.high > one.low) & given).sum()) / max(count, 1),
            untold,
        )
    return told


def _exact(faults: Iterator[Fault], held: Sequence[Failure], others: Sequence[Failure]) -> _Fit | None:
    """The first hypothesis that gives all wrong numbers of all cases, and makes no right one wrong."""
    for fault in progress([*islice(faults, max(400, _WORK // max(held[0].size, 1)))], "looking for two causes at once"):
        told: list[dict[str, _Told]] = []
        for one in held:
            told.append(_told(fault, one))
            if not _share(one.wrong, told[-1]) >= _ALMOST or any(bool(of.against.any()) for of in told[-1].values()):
                break
        else:
            wide = sum(max(of.wide for of in one.values()) for one in told) / len(held)
            if not any(_contrary(fault, others)):
                return _Fit(fault, told, 1.0, len(held), 0.0, wide)
    return None


def _contrary(hypothesis: Fault, passed: Sequence[Failure]) -> list[dict[str, _Told]]:
    """Of each right case what a hypothesis speaks against."""
    told = (_told(hypothesis, one) for one in passed)
    return [{name: one for name, one in of.items() if bool(one.against.any())} for of in told]


def _supposed_of(hypothesis: Fault, failure: Failure) -> dict[str, Allowed] | None:
    assert failure.call is not None
    try:
        allowed = supposed(hypothesis, failure.call)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError):
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
        free, known = allowed[name].free, call.inputs["x"].isfinite()  # codes of NaN and infinity are others' business
        free = ~known if free is None else free | ~known
        low, high = values if isinstance(values, tuple) else (values, values)
        allowed[name] = Allowed(low, high, allowed[name].dtypes, free=free)
    if "plus" in after:
        more = expect(call.kind, after["plus"], what, None, **knobs)
        for name, one in [(name, one) for name, one in allowed.items() if name in after.get("only", allowed)]:
            pairs = zip(one[:2], more[name][:2], strict=True)
            low, high = ((x + y).float().to(one.dtypes[0]).double() for x, y in pairs)
            allowed[name] = Allowed(low, high, one.dtypes, free=one.free)
    for name, one in allowed.items():
        if "only" not in after or name in after["only"]:
            factor = after.get("times", after.get("only", {}).get(name, 1.0))
            low, high = (_bent(side, factor, one.dtypes[0], after) for side in (one.low, one.high))
            if factor != 1.0:
                low, high = torch.minimum(low, high), torch.maximum(low, high)
                if math.frexp(factor)[0] not in (0.5, -0.5):  # what is multiplied here has been rounded
                    off = torch.finfo(one.dtypes[0]).eps * torch.maximum(low.abs(), high.abs())
                    low, high = low - off, high + off
            allowed[name] = one._replace(low=low, high=high, also=one.also if factor == 1.0 else ())
    for name in after.get("turned", ()):
        low, high = (x.reshape(-1, x.shape[-1]).t().reshape(x.shape) for x in allowed[name][:2])
        allowed[name] = Allowed(low, high, allowed[name].dtypes)
    if wrap := -allowed["out"].low.shape[1] % after["wrap"] if "wrap" in after else 0:
        for side in (allowed["out"].low, allowed["out"].high):
            side[1:, :wrap] = 0.0
    return allowed


def _bent(x: Tensor, factor: float, dtype: torch.dtype, after: Mapping[str, Any]) -> Tensor:
    """A result that is multiplied, rounded to another type, clamped, or cut off."""
    x = (x * factor).float().to(dtype).double() if factor != 1.0 else x
    x = x.to(after["through"]).double() if "through" in after else x
    x = x.clamp(-after["clamp"], after["clamp"]) if "clamp" in after else x
    x = x.clamp(min=after["floor"]) if "floor" in after else x
    return ((x.float().view(torch.int32) >> 16) << 16).view(torch.float32).double() if "cut" in after else x


# --- calls under changed conditions ----------------------------------------------------------------------------------

_PROBES = (
    "not repeatable: The same call again gives the right numbers: it depends on earlier calls, or on chance",
    "kept between calls: It is right as the first call of a process: it keeps something of earlier calls",
    "strides or offset ignored: It is right with contiguous operands: it ignores strides, or a storage offset",
    "reads what nobody wrote: It is right with buffers of zeros: it adds to what a buffer holds, or writes no zeros",
    "reads past its operands: It is right with zeros around the operands: it reads memory beyond them",
    "memory around the operands: It is right with contiguous operands in clean memory",
)
_CHANGES = MappingProxyType({"plain": True, "fill": "zero", "around": "zero"})
_CONDITIONS = ((), ("fresh",), ("plain",), ("fill",), ("around",), tuple(_CHANGES))
"""Of each probe: what is changed."""


def _unwritten(
    kind: str, failures: Sequence[Failure], passed: Sequence[Failure], rerun: Rerun
) -> dict[str, str] | None:
    """Whether numbers that are NaN follow what the buffer held before."""
    parts: list[Part] = []
    told = False  # whether some of them are no zeros
    for one in failures if failures[0].case.buffers else ():
        again, allowed = rerun(one.case, fill="zero", whole=True), one.allowed or {}
        if not isinstance(again, Failure) or any(bool(again.got[n][mask].any()) for n, mask in one.wrong.items()):
            return None
        told |= any(bool(allowed[name].right[mask].any()) for name, mask in one.wrong.items())
        for n, mask in one.wrong.items():
            parts.append(Part(one.case, one.got, n, mask, one.got[n] == one.got[n], allowed[n]))
    if not told:
        return None
    names, last = dict.fromkeys(part.name for part in parts), parts[-1].given
    met = [(one, name, one.got[name]) for one in passed for name in names]
    parts += [Part(one.case, one.got, n, x > math.inf, x == x, (one.allowed or {})[n]) for one, n, x in met]
    where = part_of(kind, parts) or f"in {int(last.sum())} of {last.numel()} places"
    said = f"{' and '.join(names)} is not written {where}: it keeps what the buffer held"
    return {"hypothesis": "tail not written", "sentence": said}


def _kept(kind: str, what: Mapping[str, Any], failure: Failure, rerun: Rerun) -> str:
    """What a kernel keeps of a call whose inputs lay in the same memory; "" if nothing tells."""
    assert failure.call is not None
    now = {name: x.clone() for name, x in failure.case.inputs.items()}
    before = {name: x.flip(0) * 3 if x.dtype in (torch.float32, torch.bfloat16) else x for name, x in now.items()}
    held, results = {name: x.clone() for name, x in before.items()}, []
    for numbers in (before, now):
        for name, x in numbers.items():
            held[name].data.copy_(x)  # as an optimizer does that tells nobody
        results.append(rerun(replace(failure.case, inputs=held, before=None), whole=True))
    first, second = results
    if not isinstance(first, Failure) or not isinstance(second, Failure) or not second.wrong:
        return ""
    if kind == "optimizer":
        return " The optimizer keeps moments outside of the given state, so a parameter starts with those of another."
    call, allowed = failure.call._replace(inputs=now, before=before, latest=before), expect(kind, now, what)
    one, none = second._replace(call=call, allowed=allowed), call._replace(before=None, first=None, latest=None)
    for fault in _known(kind):
        fit = _fit(fault, [one]) if not fault.loose and fault.knobs(none) is None else None
        if fit is not None and fit.share >= _ALMOST:
            parts = [Part(one.case, one.got, n, t.given, t.against, allowed[n]) for n, t in fit.told[0].items()]
            if where := part_of(kind, parts):
                return f" {fault.sentence}" + ("." if where == "everywhere" else f", but only {where}.")
    for name in second.wrong:
        added, slack = second.got[name] - first.got[name], 2.0**-7 * (second.got[name].abs() + first.got[name].abs())
        if bool(((added >= allowed[name].low - slack) & (added <= allowed[name].high + slack)).all()):
            return f" {name} is added to what the call before left."
    return ""


def _probe(kind: str, what: Mapping[str, Any], failures: Sequence[Failure], rerun: Rerun) -> dict[str, str] | None:
    """The change of conditions that makes most of the wrong cases right."""
    for changed, text in zip(_CONDITIONS, _PROBES, strict=True):
        conditions, (name, _, sentence) = {key: _CHANGES.get(key, True) for key in changed}, text.partition(": ")
        tried = failures[:1] if "fresh" in conditions else failures  # a process takes seconds
        right = sum(not rerun(failure.case, **conditions) for failure in tried)
        if right * 2 >= len(tried):
            wrong = {one for failure in failures for one in failure.wrong}
            if "fresh" in conditions and len(wrong) < len(failures[0].got):
                sentence += f", which shows in {' and '.join(one for one in failures[0].got if one in wrong)}"
            rights = [(one.allowed or {})[n].right[mask] for one in failures for n, mask in one.wrong.items()]
            sentence = sentence.split(", or writes")[0] if any(bool(x.any()) for x in rights) else sentence
            more = _kept(kind, what, failures[0], rerun) if "fresh" in conditions else ""
            return {"hypothesis": name, "sentence": f"{sentence} ({right} of {len(tried)} wrong cases).{more}"}
    return None


def _place(kind: str, failures: Sequence[Failure], passed: Sequence[Failure]) -> dict[str, str]:
    """What the wrong numbers are, and where they lie: there are none in cases that passed."""
    masks = [(one, name, mask) for one in failures for name, mask in one.wrong.items()]
    masks += [(one, n, x != x) for one in passed for n, x in one.got.items() if bool((x == x).all())]
    names = dict.fromkeys(name for _, name, mask in masks if bool(mask.any()))
    every = [Part(one.case, one.got, n, m, ~m, (one.allowed or {}).get(n)) for one, n, m in masks if n in names]
    parts, met = ([part for part in every if bool(part.given.any()) is wrong] for wrong in (True, False))
    name, said = relation(parts)
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
