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
Said = Iterator[tuple[str, str]]
"""A name and a sentence."""


def probed(
    kind: str, what: Mapping[str, Any], failures: Sequence[Failure], rerun: Rerun, calls: bool
) -> dict[str, str] | None:
    """What the first measurement says that parts from the reference; None: all agree. calls: only what repeats one."""
    for look in (_calls,) if calls else (_rounding, _doubled, _lines):
        try:
            said = next(look(kind, what, _usual(failures), rerun), None)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError, AttributeError):
            continue  # the kernel raises on such operands, or the measurement has no meaning for these shapes
        if said is not None:
            return dict(zip(("hypothesis", "sentence"), said, strict=True))
    return None


def _usual(failures: Sequence[Failure]) -> list[KernelCase]:
    """Wrong cases, those of ordinary finite numbers first, without numbers of an earlier call."""
    cases = [replace(one.case, before=None) for one in failures if one.size <= 1 << 15] or [failures[0].case]

    def odd(case: KernelCase) -> tuple[bool, ...]:
        finite = all(bool(x.float().isfinite().all()) and bool(x.any()) for x in case.inputs.values())
        return not case.plain, not finite, "normal" not in case.name

    return sorted(cases, key=odd)


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


def _calls(kind: str, what: Mapping[str, Any], cases: Sequence[KernelCase], rerun: Rerun) -> Said:
    """What an earlier call changes."""
    if _drawn(kind, what):
        return
    for case in cases[:2]:
        names = [name for name in case.inputs if name != "ends"]
        other = _with(case, **{name: _changed(name, case.inputs[name]) for name in names})
        one, two, three, _, behind = (rerun(c) for c in (case, case, case, other, case))
        placed = rerun(replace(case, before=other.inputs)) if kind != "optimizer" else behind
        if one is None or two is None or three is None or behind is None or placed is None:
            continue
        for name, x in two.got.items():
            steps, right = (x - one.got[name], three.got[name] - x), two.right(name)
            near = 0.02 * right.abs() + 1e-6 * x.abs().nan_to_num().amax()
            if bool(steps[0].any()) and all(bool(((step - right).abs() <= near).all()) for step in steps):
                yield (
                    "added to earlier calls",
                    f"The same call again adds the right {name} to {name} of the call before",
                )
        if told := _unlike(two, three):
            chance = "it depends on earlier calls, or on chance"
            yield "not repeatable", f"The same call gives other numbers in {told} each time: {chance}"
        for late, when in ((behind, "after a call on other operands"), (placed, "if its operands change in place")):
            if told := _unlike(late, three):
                kept = _stale(kind, what, case, other, late, names)
                yield "kept of an earlier call", f"The same call gives other numbers in {told} {when}: {kept}"


def _drawn(kind: str, what: Mapping[str, Any]) -> bool:
    """Whether a call rounds at random."""
    spec = cast_spec(what) if kind == "cast" else None
    return "stochastic" in str(what.get("rounding") if spec is None else spec.rounding)


def _unlike(one: Failure, two: Failure) -> str:
    names = [n for n, x in one.got.items() if not torch.equal(x.nan_to_num(7.0), two.got[n].nan_to_num(7.0))]
    return " and ".join(names)


def _stale(
    kind: str, what: Mapping[str, Any], case: KernelCase, other: KernelCase, late: Failure, names: Sequence[str]
) -> str:
    """The input, or the scale, of the other call that gives the numbers."""
    ways: dict[str, dict[str, Any]] = {name: {} for name in names}
    if kind == "cast" and (spec := cast_spec(what)) is not None:
        amax = block_amax(other.inputs["x"], spec.granularity)
        ways = {"the amax": {"amax": amax}, "the result": {"x": other.inputs["x"]}}
    for name, knobs in ways.items() if late.wrong else ():
        inputs = {**case.inputs, name: other.inputs[name]} if not knobs else case.inputs
        allowed = expect(kind, inputs, what, None, **knobs)
        if not any(bool(one.wrong(late.got[n]).any()) for n, one in allowed.items() if n in late.wrong):
            return f"it uses {name} of the call before"
    return "something of the call before is kept"


# --- rounding --------------------------------------------------------------------------------------------------------


def _rounding(kind: str, what: Mapping[str, Any], cases: Sequence[KernelCase], rerun: Rerun) -> Said:
    """Of an encoder, or of a cast under scales of 1: from which number on a code rounds up."""
    if kind not in ("encode", "cast"):
        return
    whole = [one for one in cases if one.inputs["x"].is_contiguous() and one.inputs["x"].numel()]
    case = min(whole, key=lambda one: abs(math.log2(one.inputs["x"].numel() / 512)))
    shape, spec = tuple(case.inputs["x"].shape), cast_spec(what) if kind == "cast" else None
    fmt, name = (get_format(what.get("format", "e4m3")), "codes") if spec is None else (spec.format, "data")
    ends = torch.zeros(shape, dtype=torch.bool)
    if spec is not None:
        high, wide = spec.granularity.block_shape(shape)
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
            scale = torch.ones(())
            if spec is not None:
                scale = spread(seen.got["scale_inv"].reshape(spec.granularity.grid_shape(shape)), spec, shape)
            made.append([(one * scale).flatten()[room[: len(part)]] for one in (seen.got[name], seen.right(name))])
        got, right = (torch.cat(side) for side in zip(*made, strict=True))
        return got, right

    yield from _chances(codes) if _drawn(kind, what) else _thresholds(codes, table(fmt, ends.device), fmt.min_normal)


Codes = Callable[[Tensor], tuple[Tensor, Tensor]]


def _thresholds(codes: Codes, values: Tensor, normal: float) -> Said:
    """Between each two codes, by halving."""
    grid = values[values.isfinite() & (values >= 0)].unique()
    low, high = (torch.cat([side, -side]) for side in (grid[:-1], grid[1:]))
    fits = (codes(low.float())[0] == low) & (codes(high.float())[0] == high)
    share = []
    for which in (0, 1):
        down, up = (side.abs().float().view(torch.int32).long() for side in (low, high))
        for _ in range(31):
            middle = (down + up) // 2
            x = middle.to(torch.int32).view(torch.float32) * torch.where(high < 0, -1.0, 1.0)
            above = codes(x)[which].abs() > low.abs()
            down, up = torch.where(above, down, middle), torch.where(above, middle, up)
        share.append((up.to(torch.int32).view(torch.float32).double() - low.abs()) / (high - low).abs())
    wrong = fits & (share[0] != share[1])
    if not bool(wrong.any()) or 2 * int(fits.sum()) < len(fits):
        return
    even = (torch.arange(len(low)) % (len(low) // 2)) % 2 == 0
    places = (
        (f"below the smallest normal number {normal:g}", high.abs() <= normal),
        (f"from the smallest normal number {normal:g} on", low.abs() >= normal),
        ("for positive numbers", high > 0),
        ("for negative numbers", high < 0),
        ("where the lower code is even", even),
        ("where the lower code is odd", ~even),
    )
    where = ", ".join(text for text, inside in places if not bool((wrong & ~inside).any())) or "everywhere"
    got, right = (" to ".join(dict.fromkeys(f"{100 * float(x):.4g}" for x in one[wrong].aminmax())) for one in share)
    said = f"Codes round up from {got} % of the step between two codes on; {right} % is right. So it is {where}"
    yield "another threshold", said


def _chances(codes: Codes) -> Said:
    """Between 1 and the next code above it."""
    size, at = 1 << 13, [n / 16 for n in range(1, 16)]
    steps = (2.0**-n for n in range(10, 0, -1))
    step = next((by for by in steps if float(codes(torch.full((1,), 1 + by))[1]) == 1 + by), 1.0)
    ups = [[(codes(torch.full((size,), 1 + step * share))[0] > 1.0) for _ in range(2)] for share in at]
    if all(bool(up.all()) or not bool(up.any()) for pair in ups for up in pair):
        yield "one random number", "All equal numbers of a call round the same way: they share one random number"
    shares = [float(torch.cat(pair).double().mean()) for pair in ups]
    told = ", ".join(
        f"{100 * share:.0f} % of those {100 * x:.3g} % above" for x, share in zip(at[1::2], shares[1::2], strict=True)
    )
    if max(abs(share - x) for share, x in zip(shares, at, strict=True)) > 0.03:
        by = [share / x for share, x in zip(shares, at, strict=True)]
        often = f": {sum(by) / len(by):.2g} times as often as they should" if max(by) - min(by) < 0.1 * max(by) else ""
        yield "biased chance", f"Of numbers between two codes these round up: {told} the lower one{often}"
    for period in (2**n for n in range(9)):
        if all(torch.equal(up[period:], up[:-period]) for pair in ups for up in pair):
            yield "chance repeats", f"Equal numbers {period} places apart round the same way"
    if all(torch.equal(*pair) for pair in ups):
        yield "chance repeats", "The same call again rounds every number as before: the seed does not change"


# --- operands that grow ----------------------------------------------------------------------------------------------


def _doubled(kind: str, what: Mapping[str, Any], cases: Sequence[KernelCase], rerun: Rerun) -> Said:
    """How results grow if all of an operand, or of its scales, is four times as large."""
    for case, (name, x) in [(one, pair) for one in cases[:2] for pair in one.inputs.items()]:
        if name == "ends" or (x.dtype.itemsize == 1 and not name.startswith("scale")):
            continue
        old, new = rerun(case), rerun(_with(case, **{name: _changed(name, x)}))
        for result in old.got if old is not None and new is not None else ():
            by, right = _ratio(old.got[result], new.got[result]), _ratio(old.right(result), new.right(result))
            if by is None or right is None or 0.8 < by / right < 1.25:
                continue
            why = {1.0: "{} is not applied", right**2: "{} is applied twice", 1 / right: "it divides by {}"}
            said = next((f": {text.format(name)}" for value, text in why.items() if 0.95 < by / value < 1.05), "")
            grown = f"{result} becomes {by:.3g} times as large; {right:.3g} times is right{said}"
            yield f"{result} does not follow {name}", f"If {name} is 4 times as large, {grown}"


def _ratio(old: Tensor, new: Tensor) -> float | None:
    """What nearly all numbers were multiplied by; None: no one number."""
    ratio = (new / old)[(old != 0) & old.isfinite() & new.isfinite()]
    middle = float(ratio.median()) if len(ratio) > 3 else 0.0
    return middle if middle > 0 and float(((ratio / middle - 1).abs() < 0.1).double().mean()) > 0.9 else None


# --- lines -----------------------------------------------------------------------------------------------------------


class _Moved(NamedTuple):
    """What a line of an operand moves of a result."""

    line: int
    got: list[int]
    right: list[int]
    by: Mapping[int, float]
    """Of the lines that should move, how far they do, against how far they should."""


def _lines(kind: str, what: Mapping[str, Any], cases: Sequence[KernelCase], rerun: Rerun) -> Said:
    """Which lines of a result move with a line of an operand."""
    near, began = [], time.perf_counter()
    small = [one for one in cases if sum(x.numel() for x in one.inputs.values()) < 1 << 15][:2]
    for case, name in [(one, n) for one in small for n in sorted(one.inputs, key=lambda n: n[:5] != "scale")]:
        x, base = case.inputs[name], rerun(case)
        for dim in range(x.dim() if base is not None and name != "ends" else 0):
            moved: dict[tuple[str, str], list[_Moved]] = {}
            for line in _picked(x.shape[dim], kind == "attention" and dim == 2):
                if time.perf_counter() - began < _SECONDS:
                    other = _changed(name, x, (slice(None),) * dim + (line,), 6 if kind == "cast" else 2)
                    for key, one in _moves(line, base, rerun(_with(case, **{name: other}))):
                        moved.setdefault(key, []).append(one)
            word = "column" if dim == x.dim() - 1 else "row" if dim == x.dim() - 2 else "part"
            for (result, out), every in moved.items():
                if wrong := [one for one in every if one.got != one.right]:
                    told = "; ".join(
                        f"{word.capitalize()} {one.line} of {name} moves {_listed(one.got, out)} of {result}, "
                        f"not {_listed(one.right, out)}"
                        for one in wrong[:3]
                    )
                    count = f"{len(wrong)} of {len(every)} {word}s tried ({case.name})"
                    yield f"other lines of {name}", f"{told}. So it is for {count}"
                elif kind == "attention" and out == "row" and (said := _weights(every, name, result)):
                    near.append((f"{name} weighs otherwise", said))
    yield from near


def _picked(size: int, every: bool) -> list[int]:
    usual = {0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 64, size // 2, size - 2, size - 1}
    return [*range(size)] if every and size <= 64 else sorted(i for i in usual if 0 <= i < size)


def _moves(line: int, base: Failure, seen: Failure | None) -> Iterator[tuple[tuple[str, str], _Moved]]:
    """Of each result its rows and its columns; of scales the entries, in memory's order."""
    for result, x in base.got.items() if seen is not None and base.allowed is not None else ():
        width = 1 if result == "scale_inv" or not x.dim() else x.shape[-1]
        sides = (x, seen.got[result], base.right(result), seen.right(result))
        old, new, was, is_ = (y.reshape(-1, width) for y in sides)
        slack = (base.allowed[result].high - base.allowed[result].low).nan_to_num(0.0).reshape(-1, width)
        got = (old != new) & ~(old.isnan() & new.isnan())
        may, should = (was != is_) & ~(was.isnan() & is_.isnan()), (was - is_).abs() > 2 * slack
        share = torch.where(should, (new - old) / (is_ - was), math.nan)
        for axis, out in enumerate(("entry" if result == "scale_inv" else "row", "column")):
            moved, must = got.any(1 - axis), should.any(1 - axis)
            right = torch.where(moved, may.any(1 - axis), must)
            by = {i: float(share.select(axis, i).nanmedian()) for i in must.nonzero().flatten().tolist()[:64]}
            yield (result, out), _Moved(line, *(y.nonzero().flatten().tolist() for y in (moved, right)), by)


def _listed(lines: Sequence[int], word: str) -> str:
    """Some numbers as runs.

    Example:
        >>> _listed((0, 1, 2, 5), "entry")
        'entries 0 to 2, 5'
    """
    if not lines:
        return "nothing"
    runs = [[line for _, line in run] for _, run in groupby(enumerate(lines), lambda pair: pair[1] - pair[0])]
    told = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:4])
    several = word.replace("entry", "entrie") + "s" if len(lines) > 1 else word
    return f"{several} {told}{' and so on' if len(runs) > 4 else ''}"


def _weights(every: Sequence[_Moved], name: str, result: str) -> str:
    """How much lines of an operand move one line of the result, in runs of equal shares."""
    for row in sorted({row for one in every for row in one.by}, reverse=True):
        shares = [(one.line, one.by[row]) for one in every if row in one.by and math.isfinite(one.by[row])]
        runs: list[tuple[float, list[int]]] = []
        for line, by in shares:
            near = runs and abs(by - runs[-1][0]) < 0.1 * abs(by)
            runs[-1][1].append(line) if near else runs.append((by, [line]))
        if len(shares) > 1 and len(runs) <= 8 and any(abs(by - 1) > 0.05 for by, _ in runs):
            told = "; ".join(f"{_listed(run, 'row')} {by:.2g} times" for by, run in runs)
            return f"In row {row} of {result}, rows of {name} weigh as follows, where once is right: {told}"
    return ""
