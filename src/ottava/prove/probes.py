"""Measurements on a kernel that is wrong: what calls on other operands show. They say what was seen, and name no cause.

    calls      the same call again, after a call on other operands, and on operands that changed in place
    rounding   the number from which on each code rounds up, found by halving; of stochastic rounding, how often
    doubled    how results grow with an operand
    lines      which lines of the results move with a line of an operand, and how far

Each is held against the same measurement on the reference; nothing is said where both agree.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.numerics.formats import get_format
from ottava.prove.codes import Allowed, table
from ottava.prove.hypotheses import Asked
from ottava.prove.judge import block_amax, cast_spec, expect, spread
from ottava.prove.matrix import KernelCase

_SECONDS = 20.0
"""For the lines of all operands."""


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
    latest: Mapping[str, Any] | None = None
    """The inputs of the call before, whatever its shapes."""
    allowed: Mapping[str, Allowed] | None = None
    """What the results may be."""
    call: Asked | None = None
    """What a hypothesis may look at; `explain` fills it in."""

    @property
    def size(self) -> int:
        """Numbers of all results."""
        return sum(x.numel() for x in self.got.values())

    def right(self, name: str) -> Tensor:
        """Right numbers of a result."""
        assert self.allowed is not None
        return self.allowed[name].right


Rerun = Callable[..., Failure | None]
"""(case, fill=, around=, plain=) -> the results of another call; None: it raises."""
Said = dict[str, str]


def probed(kind: str, what: Mapping[str, Any], failures: Sequence[Failure], rerun: Rerun) -> Said | None:
    """What the first measurement says that parts from the reference; None: all agree."""
    for look in (_calls, _rounding, _doubled, _lines):
        try:
            said = next(look(kind, what, _usual(failures), rerun), None)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError, AttributeError):
            continue  # the kernel raises on such operands, or the measurement has no meaning for these shapes
        if said is not None:
            return dict(zip(("hypothesis", "sentence"), said, strict=True))
    return None


def _usual(failures: Sequence[Failure]) -> list[KernelCase]:
    """Wrong cases of ordinary finite numbers, the largest of them first, without numbers of an earlier call."""
    cases = [replace(one.case, before=None) for one in failures if one.size <= 1 << 15] or [failures[0].case]

    def odd(case: KernelCase) -> tuple[bool, ...]:
        floats = [x.float() for x in case.inputs.values() if isinstance(x, Tensor)]
        return (
            not case.plain,
            not all(bool(x.isfinite().all()) and bool(x.any()) for x in floats),
            "normal" not in case.name,
        )

    return sorted(reversed(cases), key=odd)


def _changed(name: str, x: Tensor, at: Any = ..., by: int = 2) -> Tensor:
    """An operand with other numbers: codes with the other sign, scales and numbers 2 ** by times as large."""
    memory = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).clone()
    y = torch.empty(0, dtype=x.dtype).set_(memory.untyped_storage(), x.storage_offset(), x.shape, x.stride())
    held = y.view(torch.uint8) if x.dtype.itemsize == 1 else y
    if x.dtype.itemsize > 1:
        held[at] = held[at] * 2.0**by
    elif name.startswith("scale"):
        held[at] = (held[at].int() + by).clamp(max=254).to(torch.uint8)
    else:
        held[at] = held[at] ^ (8 if x.dtype == torch.uint8 and int(held.max()) < 16 else 128)
    return y


def _with(case: KernelCase, **inputs: Tensor) -> KernelCase:
    return replace(case, inputs={**case.inputs, **inputs})


# --- calls -----------------------------------------------------------------------------------------------------------


def _calls(kind: str, what: Mapping[str, Any], cases: Sequence[KernelCase], rerun: Rerun) -> Iterator[tuple[str, str]]:
    """What an earlier call changes."""
    if "stochastic" in str(what.get("rounding", cast_spec(what).rounding if kind == "cast" else "")):
        return
    for case in cases[:2]:
        tensors = [name for name, x in case.inputs.items() if isinstance(x, Tensor) and name != "ends"]
        other = _with(case, **{name: _changed(name, case.inputs[name]) for name in tensors})
        one, two, three, _, behind = (rerun(c) for c in (case, case, case, other, case))
        placed = rerun(replace(case, before=other.inputs)) if kind != "optimizer" else behind
        if one is None or two is None or three is None or behind is None or placed is None:
            continue
        for name, x in two.got.items():
            step, next_step = x - one.got[name], three.got[name] - x
            near = 0.02 * two.right(name).abs() + 1e-6 * x.abs().nan_to_num().amax()
            if bool(step.any()) and all(bool(((y - two.right(name)).abs() <= near).all()) for y in (step, next_step)):
                yield (
                    "added to earlier calls",
                    f"The same call again adds the right {name} to {name} of the call before",
                )
        same = [n for n in three.got if torch.equal(three.got[n].nan_to_num(7.0), two.got[n].nan_to_num(7.0))]
        if len(same) < len(three.got):
            names = " and ".join(n for n in three.got if n not in same)
            yield (
                "not repeatable",
                f"The same call gives other numbers in {names} each time: it depends on earlier calls, or on chance",
            )
        for late, when in ((behind, "after a call on other operands"), (placed, "if its operands change in place")):
            names = [n for n in three.got if not torch.equal(late.got[n].nan_to_num(7.0), three.got[n].nan_to_num(7.0))]
            if names:
                kept = _stale(kind, what, case, other, late, tensors)
                told = " and ".join(names)
                yield (
                    "kept of an earlier call",
                    f"The same call gives other numbers in {told} {when}"
                    + (f": it uses {kept} of the call before" if kept else ": something of the call before is kept"),
                )


def _stale(
    kind: str, what: Mapping[str, Any], case: KernelCase, other: KernelCase, late: Failure, names: Sequence[str]
) -> str:
    """The input, or the scale, of the other call that gives the numbers."""
    ways: dict[str, dict[str, Any]] = {name: {} for name in names}
    if kind == "cast" and (spec := cast_spec(what)) is not None:
        ways = {
            "the amax": {"amax": block_amax(other.inputs["x"], spec.granularity)},
            "the result": {"x": other.inputs["x"]},
        }
    for name, knobs in ways.items() if late.wrong else ():
        inputs = {**case.inputs, name: other.inputs[name]} if not knobs else case.inputs
        allowed = expect(kind, inputs, what, None, **knobs)
        if not any(bool(one.wrong(late.got[n]).any()) for n, one in allowed.items() if n in late.wrong):
            return name
    return ""


# --- rounding --------------------------------------------------------------------------------------------------------


def _rounding(
    kind: str, what: Mapping[str, Any], cases: Sequence[KernelCase], rerun: Rerun
) -> Iterator[tuple[str, str]]:
    """Of an encoder, or of a cast under scales of 1: from which number on a code rounds up."""
    if kind not in ("encode", "cast"):
        return
    whole = [one for one in cases if one.inputs["x"].is_contiguous() and one.inputs["x"].numel()]
    case = min(whole, key=lambda one: abs(math.log2(one.inputs["x"].numel() / 512)))
    spec = cast_spec(what) if kind == "cast" else None
    fmt, name = (get_format(what.get("format", "e4m3")), "codes") if spec is None else (spec.format, "data")
    shape = case.inputs["x"].shape
    ends = torch.zeros(shape, dtype=torch.bool)
    if spec is not None:
        high, wide = spec.granularity.block_shape(tuple(shape))
        ends[::high, ::wide] = True
    room = (~ends).flatten().nonzero().flatten()

    def codes(x: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers that x (n,) becomes, and the right ones."""
        made = []
        for part in x.split(len(room)):
            y = torch.full((ends.numel(),), fmt.max)
            y[room] = part.repeat(-(-len(room) // len(part)))[: len(room)]
            seen = rerun(_with(case, x=y.view(shape)))
            assert seen is not None
            scale = (
                spread(seen.got["scale_inv"].reshape(spec.granularity.grid_shape(tuple(shape))), spec, tuple(shape))
                if spec
                else 1.0
            )
            made.append([(one * scale).flatten()[room[: len(part)]] for one in (seen.got[name], seen.right(name))])
        got, right = (torch.cat(side) for side in zip(*made, strict=True))
        return got, right

    stochastic = "stochastic" in str(what.get("rounding") if spec is None else spec.rounding)
    yield from _chances(codes) if stochastic else _thresholds(codes, table(fmt, torch.device("cpu")), fmt.min_normal)


def _thresholds(
    codes: Callable[[Tensor], tuple[Tensor, Tensor]], values: Tensor, normal: float
) -> Iterator[tuple[str, str]]:
    grid = values[values.isfinite() & (values >= 0)].unique()
    low, high = (torch.cat([side, -side]) for side in (grid[:-1], grid[1:]))
    fits = (codes(low.float())[0] == low) & (codes(high.float())[0] == high)
    ends = []
    for which in (0, 1):
        down, up = (side.abs().float().view(torch.int32).long() for side in (low, high))
        for _ in range(31):
            middle = (down + up) // 2
            x = middle.to(torch.int32).view(torch.float32) * torch.where(high < 0, -1.0, 1.0)
            above = codes(x)[which].abs() > low.abs()
            down, up = torch.where(above, down, middle), torch.where(above, middle, up)
        ends.append(up.to(torch.int32).view(torch.float32).double())
    share = [(end - low.abs()) / (high - low).abs() for end in ends]
    wrong = fits & (ends[0] != ends[1])
    if not bool(wrong.any()) or 2 * int(fits.sum()) < len(fits):
        return
    where = []
    if bool((high[wrong].abs() <= normal).all()):
        where.append(f"below the smallest normal number {normal:g}")
    elif bool((low[wrong].abs() >= normal).all()):
        where.append(f"from the smallest normal number {normal:g} on")
    for text, of in (("positive", high > 0), ("negative", high < 0)):
        if not bool((wrong & ~of).any()):
            where.append(f"for {text} numbers")
    even = (torch.arange(len(low)) % (len(low) // 2)) % 2 == 0
    for text, of in (("even", even), ("odd", ~even)):
        if not bool((wrong & ~of).any()):
            where.append(f"where the lower code is {text}")
    got, right = (
        f"{100 * float(one[wrong].min()):.4g} %"
        + (
            f" to {100 * float(one[wrong].max()):.4g} %"
            if float(one[wrong].max()) - float(one[wrong].min()) > 1e-4
            else ""
        )
        for one in share
    )
    place = ", ".join(where) or "everywhere"
    yield (
        "another threshold",
        f"Codes round up from {got} of the step between two codes on; {right} is right. So it is {place}",
    )


_SHARES = tuple(n / 16 for n in range(1, 16))


def _chances(codes: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Iterator[tuple[str, str]]:
    """Between 1 and the next code above it."""
    size = 1 << 13
    step = next(
        by
        for by in (2.0**-n for n in range(10, -1, -1))
        if float(codes(torch.full((1,), 1 + by))[1]) == 1 + by or by == 1
    )
    ups = [[(codes(torch.full((size,), 1 + step * share))[0] > 1.0) for _ in range(2)] for share in _SHARES]
    if all(bool(up.all()) or not bool(up.any()) for pair in ups for up in pair):
        yield (
            "one random number for all",
            "All equal numbers of a call round the same way: they share one random number",
        )
    shares = [float(torch.cat(pair).double().mean()) for pair in ups]
    told = ", ".join(
        f"{100 * share:.0f} % of those {100 * at:.3g} % above"
        for at, share in list(zip(_SHARES, shares, strict=True))[1::2]
    )
    if max(abs(share - at) for share, at in zip(shares, _SHARES, strict=True)) > 0.03:
        by = [share / at for share, at in zip(shares, _SHARES, strict=True)]
        often = f": {sum(by) / len(by):.2g} times as often as they should" if max(by) - min(by) < 0.1 * max(by) else ""
        yield "biased chance", f"Of numbers between two codes these round up: {told} the lower one{often}"
    for period in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        if all(torch.equal(up[period:], up[:-period]) for pair in ups for up in pair):
            yield "chance repeats", f"Equal numbers {period} places apart round the same way"
    if all(torch.equal(*pair) for pair in ups):
        yield "chance repeats", "The same call again rounds every number as before: the seed does not change"


# --- doubled operands ------------------------------------------------------------------------------------------------


def _doubled(
    kind: str, what: Mapping[str, Any], cases: Sequence[KernelCase], rerun: Rerun
) -> Iterator[tuple[str, str]]:
    """How results grow if all of an operand, or of its scales, is four times as large."""
    for case in cases[:2]:
        base = rerun(case)
        for name, x in case.inputs.items():
            if base is None or name == "ends" or (x.dtype.itemsize == 1 and not name.startswith("scale")):
                continue
            if (grown := rerun(_with(case, **{name: _changed(name, x)}))) is None:
                continue
            for result in base.got:
                by, right = (
                    _ratio(*pair)
                    for pair in ((base.got[result], grown.got[result]), (base.right(result), grown.right(result)))
                )
                if by is None or right is None or 0.8 < by / right < 1.25:
                    continue
                why = {
                    1.0: f": {name} is not applied",
                    right**2: f": {name} is applied twice",
                    1 / right: f": it divides by {name}",
                }
                said = next((text for value, text in why.items() if 0.95 < by / value < 1.05), "")
                yield (
                    f"{result} does not follow {name}",
                    f"If {name} is 4 times as large, {result} becomes {by:.3g} times as large; {right:.3g} times is right{said}",
                )


def _ratio(old: Tensor, new: Tensor) -> float | None:
    """What nearly all numbers were multiplied by; None: no one number."""
    ratio = (new / old)[(old != 0) & old.isfinite() & new.isfinite()]
    if len(ratio) < 4:
        return None
    middle = float(ratio.median())
    return middle if middle > 0 and float(((ratio / middle - 1).abs() < 0.1).double().mean()) > 0.9 else None


# --- lines -----------------------------------------------------------------------------------------------------------


class _Moved(NamedTuple):
    """What a line of an operand moves of a result."""

    line: int
    got: tuple[int, ...]
    right: tuple[int, ...]
    by: Mapping[int, float]
    """Of the lines that should move, how far they do, against how far they should."""


def _lines(kind: str, what: Mapping[str, Any], cases: Sequence[KernelCase], rerun: Rerun) -> Iterator[tuple[str, str]]:
    """Which lines of a result move with a line of an operand."""
    began, near = time.perf_counter(), []
    for case in [one for one in cases if sum(x.numel() for x in one.inputs.values()) < 1 << 15][:2]:
        base = rerun(case)
        for name, x in sorted(case.inputs.items(), key=lambda pair: not pair[0].startswith("scale")):
            for dim in range(x.dim()) if base is not None and x.dim() and name != "ends" else ():
                picked = _picked(x.shape[dim], kind == "attention" and dim == 2)
                moved: dict[tuple[str, int], list[_Moved]] = {}
                for line in picked:
                    if time.perf_counter() - began > _SECONDS:
                        break
                    at = (slice(None),) * dim + (line,)
                    seen = rerun(_with(case, **{name: _changed(name, x, at, 6 if kind == "cast" else 2)}))
                    for key, one in _moves(kind, line, base, seen) if seen is not None else ():
                        moved.setdefault(key, []).append(one)
                word = (
                    ("row", "column")[dim == x.dim() - 1]
                    if dim >= x.dim() - 2
                    else ("group", "head")[dim]
                    if x.dim() > 2
                    else "row"
                )
                for (result, axis), every in moved.items():
                    if wrong := [one for one in every if one.got != one.right]:
                        out = "entr" if result == "scale_inv" else ("row", "column")[axis]
                        told = "; ".join(_told(one, word, name, out, result) for one in wrong[:3])
                        yield (
                            f"other lines of {name}",
                            f"{told}. So it is for {len(wrong)} of {len(every)} {word}s tried ({case.name})",
                        )
                    elif kind == "attention" and axis == 0 and (said := _weights(every, name, result)):
                        near.append((f"{name} weighs otherwise", said))
    yield from near


def _picked(size: int, every: bool) -> list[int]:
    usual = {0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 64, size // 2, size - 2, size - 1}
    return [*range(size)] if every and size <= 64 else sorted(i for i in usual if 0 <= i < size)


def _moves(kind: str, line: int, base: Failure, seen: Failure) -> Iterator[tuple[tuple[str, int], _Moved]]:
    assert base.allowed is not None
    for result, x in base.got.items():
        width = 1 if result == "scale_inv" else x.shape[-1] if x.dim() else 1
        old, new, was, is_ = (
            y.reshape(-1, width) for y in (x, seen.got[result], base.right(result), seen.right(result))
        )
        slack = ((one := base.allowed[result]).high - one.low).nan_to_num(0.0).reshape(-1, width)
        got = (old != new) & ~(old.isnan() & new.isnan())
        should = (was - is_).abs() > slack * 2
        may = (was != is_) & ~(was.isnan() & is_.isnan())
        share = torch.where(should, (new - old) / (is_ - was), math.nan)
        for axis in (0, 1):
            lines = got.any(1 - axis), should.any(1 - axis), may.any(1 - axis)
            right = torch.where(lines[0], lines[2], lines[1])
            by = {i: float(share.select(axis, i).nanmedian()) for i in lines[1].nonzero().flatten().tolist()[:64]}
            yield (result, axis), _Moved(line, *(tuple(y.nonzero().flatten().tolist()) for y in (lines[0], right)), by)


def _told(one: _Moved, word: str, name: str, out: str, result: str) -> str:
    got, right = (_listed(side, out) for side in (one.got, one.right))
    return f"{word.capitalize()} {one.line} of {name} moves {got} of {result}, not {right}"


def _listed(lines: Sequence[int], word: str) -> str:
    """Some numbers as runs.

    Example:
        >>> _listed((0, 1, 2, 5), "row")
        'rows 0 to 2, 5'
    """
    if not lines:
        return "nothing"
    runs = [[line for _, line in run] for _, run in groupby(enumerate(lines), lambda pair: pair[1] - pair[0])]
    told = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    plural = {"entr": ("entry", "entries")}.get(word, (word, f"{word}s"))[len(lines) > 1]
    return f"{plural} {', '.join(told[:4])}{' and so on' if len(told) > 4 else ''}"


def _weights(every: Sequence[_Moved], name: str, result: str) -> str:
    """How much lines of an operand move one line of the result, in runs of equal shares."""
    for row in sorted({row for one in every for row in one.by})[::-1]:
        shares = [(one.line, one.by[row]) for one in every if row in one.by and math.isfinite(one.by[row])]
        if len(shares) < 2 or all(abs(by - 1) < 0.05 for _, by in shares):
            continue
        runs = [
            [line for line, _ in run] + [by]
            for by, run in groupby(shares, lambda pair: float(f"{pair[1]:.2g}"))
            for run in [list(run)]
        ]
        if len(runs) <= 8:
            told = "; ".join(f"{_listed(run[:-1], 'row')} {run[-1]:.2g} times" for run in runs)
            return f"In row {row} of {result}, rows of {name} weigh as follows, where once is right: {told}"
    return ""
