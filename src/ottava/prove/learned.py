"""What a kernel reads, learned from calls with marked numbers: a map of places, and no list of faults.

A product out[i, j] = sum of L[i, l] R[j, l] is linear in each operand: one-hot numbers in one show the other, number by
number. A place is marked by the digits of its index, one call a digit; the outputs say which place is read where
another one belongs, and a search over short formulas says it in words. Attention shows its probabilities against
one-hot values, and the scales of a cast move with the rows and columns that they look at. The settings of an optimizer
are fitted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.numerics.formats import FORMATS, Format, get_format
from ottava.numerics.rounding import code_values, encode
from ottava.numerics.tensor import QuantizationSpec
from ottava.prove.codes import on_grid
from ottava.prove.judge import cast_spec, expect, gemm_specs
from ottava.prove.matrix import KernelCase

_BASE = 4
"""Of the digits: 2^-1 to 2^2 are numbers of every format."""
_LOOKS = 6
"""Places of the one-hot numbers that are tried."""
_SECONDS = 10.0
_POINTS = 1021
"""Of a case that a formula is held against; a prime, so that a stride meets all rests."""
_STEPS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)

Outputs = Callable[[KernelCase], Mapping[str, Tensor] | None]
"""Numbers of a call on other operands; None: it raises or misbehaves."""


class Reading(NamedTuple):
    """Of a matrix: which place is read where each belongs."""

    case: KernelCase
    name: str
    got: Tensor
    """(P, 2): row and column read; -1: nothing."""
    right: Tensor
    """(P, 2): row and column that belong there."""
    shape: tuple[int, int]
    free: Mapping[str, Tensor]
    """What a formula may be made of: (P,) each."""

    @property
    def wrong(self) -> Tensor:
        """(P,)."""
        return (self.got != self.right).any(1)

    def mask(self, chosen: Tensor) -> Tensor:
        """Chosen points as places of the matrix."""
        mask = torch.zeros(self.shape, dtype=torch.bool)
        mask[tuple(self.right[chosen].t())] = True
        return mask


def refilled(x: Tensor, values: Tensor) -> Tensor:
    """The same memory and strides with other numbers."""
    memory = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).clone()
    made = torch.empty(0, dtype=x.dtype, device=x.device)
    made = made.set_(memory.untyped_storage(), x.storage_offset(), x.shape, x.stride())
    target, source = (made.view(torch.uint8), values.view(torch.uint8)) if x.dtype.itemsize == 1 else (made, values)
    target.copy_(source.reshape(x.shape))
    return made


class _Side(NamedTuple):
    """An operand as a matrix, or its scales."""

    name: str
    turned: bool
    x: Tensor
    fmt: Format | None

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = math.prod(self.x.shape[:-1]), self.x.shape[-1]
        return (cols, rows) if self.turned else (rows, cols)

    @property
    def rows(self) -> int:
        """Of one group."""
        return self.x.shape[-2] if self.x.dim() == 3 and self.name == "b" else self.shape[0]

    def holding(self, values: Tensor) -> Tensor:
        """The tensor with these numbers, (rows, cols) in the order of `shape`."""
        y = (values.t() if self.turned else values).contiguous().to(self.x.device)
        if self.fmt is not None:
            y = encode(y.float(), self.fmt)
        elif self.x.dtype == torch.uint8:
            y = (y.double().log2().round() + 127).to(torch.uint8)
        return refilled(self.x, y if self.x.dtype.itemsize == 1 else y.to(self.x.dtype))


def _side(kind: str, what: Mapping[str, Any], case: KernelCase, name: str, turned: bool = False) -> _Side:
    x = case.inputs[name]
    if kind == "linear" or name.startswith("scale"):
        return _Side(name, turned, x, None)
    spec = gemm_specs(what)[name == "b"]
    return _Side(name, turned, x, next((fmt for fmt in FORMATS.values() if fmt.dtype == x.dtype), spec.format))


def _products(kind: str) -> tuple[tuple[str, tuple[str, bool], tuple[str, bool]], ...]:
    """(result, left operand and whether it is turned, right one)."""
    if kind == "linear":
        return (
            ("y", ("x", False), ("weight", False)),
            ("dx", ("grad", False), ("weight", True)),
            ("dw", ("grad", True), ("x", True)),
        )
    return (("out", ("a", False), ("b", False)),)


def readings(
    kind: str, what: Mapping[str, Any], cases: Sequence[KernelCase], outputs: Outputs
) -> Iterator[list[Reading]]:
    """Of each operand, of its scales behind it: what some cases read."""
    began = time.perf_counter()
    for result, left, right in _products(kind):
        for swapped in (False, True):
            for scales in (False, True) if kind != "linear" else (False,):
                made = []
                for case in cases:
                    if time.perf_counter() - began > _SECONDS:
                        break
                    sides = (_side(kind, what, case, *left), _side(kind, what, case, *right))
                    one = _reading(kind, what, case, result, sides, swapped, scales, outputs)
                    made += [] if one is None else [one]
                if made:
                    yield made


def _reading(
    kind: str, what: Mapping[str, Any], case: KernelCase, result: str, sides: tuple[_Side, _Side],
    swapped: bool, scales: bool, outputs: Outputs,
) -> Reading | None:  # fmt: skip
    """Marks one operand, or its scales, and shows it to one-hot numbers in the other one."""
    marked, other = sides[::-1] if swapped else sides
    inputs: dict[str, Any] = dict(case.inputs)
    for name in [name for name in inputs if name.startswith("scale")]:
        inputs[name] = _side(kind, what, case, name).holding(torch.ones(_as_matrix(inputs[name]).shape))
    target = marked
    if scales:
        target = _side(kind, what, case, f"scale_inv_{marked.name}")
        if target.x.numel() < 2 or target.x.dim() < 2:
            return None
        inputs[marked.name] = marked.holding(torch.ones(marked.shape))
    (rows, k), others = marked.shape, other.rows
    size = math.prod(target.shape)
    if not (rows and k and others and size):
        return None
    digits = max(1, math.ceil(math.log(size, _BASE) - 1e-9))
    index = torch.arange(size).view(target.shape)
    offsets = [*range(0, k, others)]
    offsets = offsets if len(offsets) <= _LOOKS else offsets[: _LOOKS // 2] + offsets[-_LOOKS // 2 :]
    points: list[tuple[Tensor, Tensor]] = []
    for offset in offsets:
        place = (torch.arange(others) + offset) % k
        hot = torch.zeros(others, k)
        hot[torch.arange(others), place] = 1.0
        inputs[other.name] = other.holding(hot.repeat(other.shape[0] // others, 1))
        seen = []
        for power in (*range(-1, digits), -1):
            values = 0.5 * (torch.ones(target.shape) if power < 0 else 2.0 ** (index // _BASE**power % _BASE))
            got = outputs(replace(case, inputs={**inputs, target.name: target.holding(values)}, before=None))
            if got is None or got[result].dim() < 2:
                return None
            seen.append(got[result].reshape(-1, got[result].shape[-1]))
        if not torch.equal(seen[0].nan_to_num(), seen.pop().nan_to_num()):
            return None  # what earlier calls left behind
        points.append((_decoded(seen, swapped), place))
    return _pointed(kind, what, case, marked, target, scales, points)


def _as_matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)


def _decoded(seen: Sequence[Tensor], swapped: bool) -> Tensor:
    """Of each number of a result the index that it was made of, (row of the marked, row of the other); -1: nothing."""
    first, *marked = (x.t() if swapped else x for x in seen)
    index, sure = torch.where(first.isfinite(), 0, -9), (first != 0) & first.isfinite()
    for power, x in enumerate(marked):
        digit = torch.where(sure, x / torch.where(sure, first, 1.0), 1.0).abs().log2()
        whole = digit.nan_to_num(-9.0, -9.0, -9.0).round()
        bad = sure & (((digit - whole).abs() > 0.3) | (whole < 0) | (whole >= _BASE))
        index = torch.where(bad | (index < -1), -9, index + whole.long() * _BASE**power)
    return torch.where(first == 0, -1, index)


def _pointed(
    kind: str, what: Mapping[str, Any], case: KernelCase, marked: _Side, target: _Side, scales: bool,
    points: Sequence[tuple[Tensor, Tensor]],
) -> Reading | None:  # fmt: skip
    """Indices as rows and columns, beside those that belong there."""
    groups = case.inputs["ends"].tolist() if kind == "grouped" else []
    count = len(points[0][0])
    found: list[Tensor] = []
    for index, place in points:
        row = torch.arange(count)[:, None].expand(index.shape)
        free = [row, place.expand(index.shape), torch.arange(index.shape[1]).expand(index.shape)]
        if groups:  # of each row of out its group, and its place in it
            n = len(index) if marked.name == "b" else 0
            of = torch.full((index.shape[1] if n else count,), -1)
            inside = torch.zeros_like(of)
            for g, (start, stop) in enumerate(pairwise([0, *groups])):
                of[start:stop], inside[start:stop] = g, torch.arange(max(stop - start, 0))
            of, inside = ((x if n else x[:, None]).expand(index.shape) for x in (of, inside))
            free += [of, inside]
            row = row + of * n if n else row
        column = free[1]
        keep = (free[3] >= 0) if groups else torch.ones_like(row, dtype=torch.bool)
        told = torch.stack([index, row, column, *free])
        found.append(told[:, keep])
    index, row, column, *free = torch.cat(found, 1)
    sure = index >= -1
    if 2 * int(sure.sum()) < len(sure):
        return None
    index, row, column, *free = (x[sure] for x in (index, row, column, *free))
    shape, width = target.shape, target.shape[1]
    if scales:
        spec = gemm_specs(what)[marked.name == "b"]
        high, wide = spec.granularity.block_shape((len(marked.x.reshape(-1, marked.shape[1])), marked.shape[1]))
        per = marked.x.shape[-2] if marked.x.dim() == 3 else 0
        grid = -(-per // high)
        row = row // per * grid + row % per // high if per else row // high
        column = column // wide
    got = torch.stack([torch.where(index < 0, -1, index // width), torch.where(index < 0, -1, index % width)], 1)
    first, last = ("i", "l") if kind == "linear" else ("n", "m") if marked.name == "b" else ("m", "n")
    names = (first, "j" if kind == "linear" else "k", last, "g", "row of the group")
    return Reading(
        case,
        target.name,
        got,
        torch.stack([row, column], 1),
        (shape[0], shape[1]),
        dict(zip(names, free, strict=False)),
    )


# --- formulas --------------------------------------------------------------------------------------------------------


def formula(made: Sequence[Reading], chosen: Sequence[Tensor], axis: int) -> str | None:
    """What row (axis 0) or column (1) is read at the chosen points of all cases, as a short formula.

    Example:
        >>> k = torch.arange(8)
        >>> right, got = (torch.stack([0 * k, x], 1) for x in (k, k ^ 1))
        >>> one = Reading(KernelCase("", {}), "b", got, right, (1, 8), {"n": 0 * k, "k": k})
        >>> formula([one], [one.wrong], 1)
        'k ^ 1'
    """

    def of(take: Callable[[Reading], Tensor]) -> Tensor:
        parts = [take(one)[at] for one, at in zip(made, chosen, strict=True)]
        return torch.cat([part[:: len(part) // _POINTS | 1] for part in parts])

    got = of(lambda one: one.got[:, axis])
    last = of(lambda one: torch.full_like(one.got[:, axis], one.shape[axis] - 1))
    own = of(lambda one: one.right[:, axis])
    turned = of(lambda one: one.right[:, 1] * one.shape[0] + one.right[:, 0])
    width = of(lambda one: torch.full_like(one.right[:, 0], one.shape[1]))
    names = [name for one in made[:1] for name in one.free]
    free = {name: of(partial(_free_of, name=name)) for name in names}
    usual = ("row", "column")[axis]
    known = {name: x for name, x in free.items() if bool((x == own).all())} or {usual: own}
    place = "place in the transpose"
    tried = [*_forms(known | {n: x for n, x in free.items() if n not in known}, last)]
    tried += [(f"{usual} of the {place}", turned // width if axis == 0 else turned % width)]
    tried += [(f"{text}, from the end", last - x) for text, x in tried[:1]]
    return next((text for text, x in tried if bool((x == got).all())), None)


def _free_of(one: Reading, name: str) -> Tensor:
    return one.free[name]


def _forms(free: Mapping[str, Tensor], last: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, x in free.items():
        yield name, x
        yield f"{name} ^ 1", x ^ 1
    yield from _shifted(free, last, (1, -1))
    yield "0", 0 * last
    yield "last", last
    for n in _STEPS:
        for name, x in free.items():
            yield f"{name} // {n}", x // n
            yield f"{name} // {n} * {n}", x // n * n
            yield f"{name} % {n}", x % n
            for by in (1, -1):
                yield f"{name} // {n} {'+' if by > 0 else '-'} 1", x // n + by
            yield f"{name} // {n}, at most the last", torch.minimum(x // n, last)
            yield f"{name} // {n} * {n} + {n - 1}", torch.minimum(x // n * n + n - 1, last)
            yield f"{name} // {n} * {n} + {n - 1} - {name} % {n}", x // n * n + n - 1 - x % n
    yield from _shifted(free, last, (2, -2, 3, -3, 4, -4, 16, -16, 32, -32))


def _shifted(free: Mapping[str, Tensor], last: Tensor, steps: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    for by in steps:
        for name, x in free.items():
            text = f"{name} {'+' if by > 0 else '-'} {abs(by)}"
            yield text, x + by
            yield f"{text}, at most the last", torch.minimum(x + by, last).clamp(min=0)
            yield f"{text}, and round again", (x + by) % (last + 1)


Where = Callable[[Sequence[tuple[KernelCase, str, Tensor, Tensor]]], str]
"""(case, name, places, other places) of some cases -> which places they are, in words; "" if no words are known."""


def _said_of(made: Sequence[Reading], where: Where) -> tuple[str, str] | None:
    """A name and a sentence; None where all places are read that belong there, or no words are known."""
    name, wrong = made[0].name, [one.wrong for one in made]
    if not any(bool(at.any()) for at in wrong):
        return None
    unread = [(one.got[:, 0] < 0) & (one.right[:, 0] >= 0) for one in made]
    part = where([(one.case, name, one.mask(at), one.mask(~at)) for one, at in zip(made, wrong, strict=True)])
    if all(bool((at == none).all()) for at, none in zip(wrong, unread, strict=True)):
        return f"{name} not read", f"Some numbers of {name} have no effect on the result: {part or 'no rule is known'}"
    read = [one.got[:, 0] >= 0 for one in made]
    if not any(bool(one.got.any()) for one in made):
        return f"{name} kept", f"New numbers of {name} have no effect: it keeps those of an earlier call"
    # a formula for all places says more
    for chosen, place in ((read, "everywhere"), ([one.wrong & at for one, at in zip(made, read, strict=True)], part)):
        if (found := [formula(made, chosen, axis) for axis in (0, 1)]) and None not in found:
            own = ", ".join(list(made[0].free)[:2])
            end = "" if place == "everywhere" else f", but only {place}" if place else ", in some places"
            said = f"Where {name}[{own}] belongs, it reads row {found[0]} and column {found[1]} of {name}{end}"
            return f"{name} read elsewhere", said
    return None


def read_elsewhere(
    kind: str, what: Mapping[str, Any], cases: Sequence[KernelCase], outputs: Outputs, where: Where
) -> tuple[str, str] | None:
    """The first operand, or its scales, of which a kernel reads other places: (a name, a sentence)."""
    alone = {"attention": _attention_said, "optimizer": _fitted, "cast": _seen_said, "encode": _threshold}
    if kind not in ("gemm", "grouped", "linear"):
        return alone[kind](what, cases, outputs) if kind in alone else None
    for made in readings(kind, what, cases, outputs):
        if (said := _said_of(made, where)) is not None:
            return said
    return _misread(what, cases, outputs, where) if kind == "gemm" else None


def _misread(
    what: Mapping[str, Any], cases: Sequence[KernelCase], outputs: Outputs, where: Where
) -> tuple[str, str] | None:
    """The first operand of a GEMM whose codes are read as other numbers: (a name, a sentence)."""
    for swapped in (False, True):
        found: list[tuple[Any, Tensor, Tensor, Tensor]] = []
        for case in cases:
            sides = [_side("gemm", what, case, name) for name in "ab"]
            marked, other = sides[::-1] if swapped else sides
            if 0 in (*marked.shape, *other.shape) or marked.fmt is None:
                continue
            inputs: dict[str, Any] = dict(case.inputs)
            for name in [name for name in inputs if name.startswith("scale")]:
                inputs[name] = _side("gemm", what, case, name).holding(torch.ones(_as_matrix(inputs[name]).shape))
            hot = torch.zeros(other.shape)
            place = torch.arange(other.shape[0]) % other.shape[1]
            hot[torch.arange(other.shape[0]), place] = 1.0
            inputs[other.name] = other.holding(hot)
            table = code_values(marked.fmt).double()
            known = table.isfinite().nonzero().flatten()
            codes = known[torch.arange(math.prod(marked.shape)).view(marked.shape) * 7 % len(known)]
            inputs[marked.name] = refilled(marked.x, codes.to(torch.uint8))
            if (got := outputs(replace(case, inputs=inputs, before=None))) is None:
                return None
            out = got["out"].t() if swapped else got["out"]
            found.append((case, codes[:, place], out, table[codes[:, place]]))
        wrong = [out != right for _, _, out, right in found]
        if not any(bool(mask.any()) for mask in wrong):
            continue
        codes, out, right = (
            torch.cat([one[i][mask] for one, mask in zip(found, wrong, strict=True)]) for i in (1, 2, 3)
        )
        name = "b" if swapped else "a"
        bad = codes.unique()
        rest = [torch.isin(one[1], bad) & ~mask for one, mask in zip(found, wrong, strict=True)]
        part = where([(one[0], name, mask, more) for one, mask, more in zip(found, wrong, rest, strict=True)])
        said = codes_said(codes, out, right, name)
        if said is not None:
            return f"codes of {name} misread", said + (f", but only {part}" if part not in ("", "everywhere") else "")
    return None


def codes_said(codes: Tensor, got: Tensor, right: Tensor, name: str = "") -> str | None:
    """Which number each wrong code is read as; None where one code is read as several numbers, and none tells why."""
    end = f" of {name}" if name else ""
    if bool((got == right.abs()).all()) or bool((got == -right).all()):
        return f"Codes{end} are read with another sign"
    if bool((got == 0).all()) and len(codes.unique()) > 4:
        small = float(right.abs().max())
        return f"Codes{end} of magnitudes up to {small:g} are read as zero"
    ratio = (got / torch.where(right == 0, math.nan, right)).nan_to_num(0.0)
    if len(codes.unique()) > 4 and float(ratio.max() - ratio.min()) < 1e-9 and float(ratio.abs().max()) > 0:
        return f"Codes{end} are read as {float(ratio[0]):g} times their numbers"
    pairs = sorted({(int(c), float(g), float(r)) for c, g, r in zip(codes, got, right, strict=True)})
    if len({c for c, _, _ in pairs}) < len(pairs):
        return None
    shown = "; ".join(f"0x{c:02X} as {g:g} in place of {r:g}" for c, g, r in pairs[:3])
    return f"Codes{end} are read as other numbers ({len(pairs)} of them): {shown}"


# --- attention, casts, optimizers ------------------------------------------------------------------------------------


def _probabilities(case: KernelCase, outputs: Outputs, **changed: Tensor) -> Tensor | None:
    """(B, H, queries, keys), from values that are one-hot, a few keys a call; None: too many keys, or it raises."""
    v = case.inputs["v"]
    keys, width = v.shape[-2:]
    if keys > 16 * width:
        return None
    seen = []
    for start in range(0, keys, width):
        hot = torch.eye(width).expand(*v.shape[:2], width, width)
        shown = torch.zeros(*v.shape[:2], keys, width)
        count = min(width, keys - start)
        shown[..., start : start + count, :] = hot[..., :count, :]
        inputs = {**case.inputs, **changed, "v": refilled(v, shown.to(v.dtype))}
        if (got := outputs(replace(case, inputs=inputs, before=None))) is None:
            return None
        seen.append(got["o"][..., :count])
    return torch.cat(seen, -1)


def _attention_said(what: Mapping[str, Any], cases: Sequence[KernelCase], outputs: Outputs) -> tuple[str, str] | None:
    """Keys that a query sees, the sum of their weights, and the factor of the scores."""
    lows: set[int] = set()
    highs: set[int] = set()
    shares: set[float] = set()
    factors: set[float] = set()
    for case in cases:
        q, keys = case.inputs["q"], case.inputs["k"].shape[-2]
        flat = _probabilities(case, outputs, q=refilled(q, torch.zeros_like(q)))
        if flat is None or not bool(flat.isfinite().all()):
            continue
        apart = torch.arange(keys) - torch.arange(q.shape[-2])[:, None]
        seen = flat.amax((0, 1)) > 1e-6
        right = apart <= 0 if what.get("causal") else torch.ones_like(seen)
        if not torch.equal(seen, right):
            if bool(seen.any()):
                low, high = int(apart[seen].min()), int(apart[seen].max())
                lows.add(low if low > 1 - keys else -(10**6))
                highs.add(high if high < keys - 1 else 10**6)
            continue
        shares |= {round(float(x), 3) for x in (flat.sum(-1) - 1).flatten()}
        scores = (q.double() @ case.inputs["k"].double().mT) / math.sqrt(q.shape[-1])
        real = _probabilities(case, outputs)
        if real is None:
            continue
        logs, clear = real.clamp(min=1e-300).log(), (real > 1e-3) & right
        pairs = [
            side - torch.where(clear, side, 0.0).sum(-1, keepdim=True) / clear.sum(-1, keepdim=True).clamp(min=1)
            for side in (logs, scores)
        ]
        by = float((pairs[0] * pairs[1])[clear].sum() / pairs[1][clear].square().sum().clamp(min=1e-9))
        factors |= {round(by, 2)} if float(pairs[1][clear].square().sum()) > 1 else set()
    lows, highs = lows - {-(10**6)}, highs - {10**6}
    if lows | highs and len(lows) < 2 and len(highs) < 2:
        low, high = min(lows, default=0), min(highs, default=0)
        begin = f"{-low} before it" if lows else "the first"
        end = f"{abs(high)} {'behind' if high > 0 else 'before'} it" if high else "its own" if highs else "the last"
        return "other keys seen", f"A query sees the keys from {begin} to {end}"
    if shares and max(map(abs, shares)) > 0.02:
        total = 1 + max(shares, key=abs)
        return "weights of another sum", f"With equal scores the weights of a query sum to {total:g}, not to 1"
    if factors and all(abs(by - 1) > 0.04 for by in factors):
        shown = " or ".join(f"{by:g}" for by in sorted(factors)[:4])
        return "softmax scale", f"Scores are multiplied by {shown} times 1 / sqrt(D)"
    return None


def _seen_said(what: Mapping[str, Any], cases: Sequence[KernelCase], outputs: Outputs) -> tuple[str, str] | None:
    """Rows and columns that move each scale, against those of its block."""
    spec = cast_spec(what)
    assert spec is not None
    for axis, word in ((0, "row"), (1, "column")):
        told: list[tuple[Tensor, int]] = []
        for case in cases:
            x = case.inputs["x"]
            if not 1 < x.shape[axis] <= 160 or 0 in x.shape or 0 in x.stride() or len(told) > 1:
                continue
            seen = _moved(case, axis, spec, outputs)
            if seen is not None:
                told.append((seen, spec.granularity.block_shape((x.shape[0], x.shape[1]))[axis]))
        blocks = [(torch.arange(len(seen))[:, None] // size == torch.arange(seen.shape[1])) for seen, size in told]
        if all(torch.equal(seen, right) for (seen, _), right in zip(told, blocks, strict=True)):
            continue
        ends = [_ends(told, last) for last in (False, True)]
        if None not in ends:
            return "scale of other blocks", f"A scale is made of the {word}s from {ends[0]} to {ends[1]}"
        for which, said in ((0, "looks past"), (1, "also looks at")):
            out = [
                ((right & ~seen, seen & ~right)[which]).any(1) for (seen, _), right in zip(told, blocks, strict=True)
            ]
            if any(bool(lines.any()) for lines in out):
                one = next(lines for lines in out if bool(lines.any())).nonzero().flatten().tolist()
                shown = ", ".join(map(str, one[:6])) + (" ..." if len(one) > 6 else "")
                return "amax of other numbers", f"The amax {said} {word}s {shown}"
    return None


def _ends(told: Sequence[tuple[Tensor, int]], last: bool) -> str | None:
    """The first line that moves each scale, or the last, as a formula of its block's."""
    made = []
    for seen, size in told:
        count, blocks = seen.shape
        index = torch.arange(count)[:, None].expand(count, blocks)
        own = torch.arange(blocks) * size
        if not bool(seen.any(0).all()):
            return None
        low, high = (torch.where(seen, index, away) for away in (count, -1))
        low, high = low.amin(0), high.amax(0)
        if bool(((high - low + 1) != seen.sum(0)).any()):
            return None
        right = (own + size - 1).clamp(max=count - 1) if last else own
        pair = [torch.stack([x, x], 1) for x in (high if last else low, right)]
        free = {"its last one" if last else "its first one": right}
        made.append(Reading(KernelCase("", {}), "", pair[0], pair[1], (count, count), free))
    return formula(made, [torch.ones_like(one.wrong) for one in made], 0)


def _moved(case: KernelCase, axis: int, spec: QuantizationSpec, outputs: Outputs) -> Tensor | None:
    """(lines, blocks along the axis): whether a large line moves a scale of a block."""
    x, lines = case.inputs["x"], []
    grid = spec.granularity.grid_shape((x.shape[0], x.shape[1]))
    for line in (*range(-1, x.shape[axis]), -1):
        values = torch.ones(x.shape)
        if line >= 0:
            values.select(axis, line).fill_(64.0)
        got = outputs(replace(case, inputs={"x": refilled(x, values.to(x.dtype))}, before=None))
        if got is None or got["scale_inv"].numel() != math.prod(grid) or not bool(got["scale_inv"].isfinite().all()):
            return None
        lines.append(got["scale_inv"].reshape(grid))
    if not torch.equal(lines[0], lines.pop()):
        return None  # what earlier calls left behind
    return torch.stack([(one != lines[0]).any(1 - axis) for one in lines[1:]])


def _threshold(what: Mapping[str, Any], cases: Sequence[KernelCase], outputs: Outputs) -> tuple[str, str] | None:
    """From which share of a step on an encoder rounds up, or how often if that is left to chance."""
    fmt, shares, ups = get_format(what.get("format", "e4m3")), [], []
    for case in cases:
        x, got = case.inputs["x"].double().flatten(), (outputs(case) or {}).get("codes")
        if got is None or got.numel() != len(x):
            continue
        low, high = (on_grid(x, fmt, way).abs() for way in ("truncate", "away"))
        inside = x.isfinite() & (low < x.abs()) & (x.abs() < high) & (got.flatten().isfinite())
        size = got.flatten().abs()
        if bool((inside & (size != low) & (size != high)).any()):
            return None
        shares.append(((x.abs() - low) / (high - low))[inside])
        ups.append((size == high)[inside])
    share, up = torch.cat([*shares, torch.zeros(0)]), torch.cat([*ups, torch.zeros(0, dtype=torch.bool)])
    if not bool(up.any()) or bool(up.all()):
        return None
    least, most = float(share[up].min()), float(share[~up].max())
    if most <= least:
        end = f"{least:.4g}" if least - most < 0.01 else f"somewhere between {most:.3g} and {least:.3g}"
        return (
            None
            if most <= 0.5 <= least
            else ("another threshold", f"It rounds up from {end} of a step on, not from 0.5")
        )
    if "stochastic" not in str(what.get("rounding")):
        return None
    tenth = (share * 10).long().clamp(0, 9)
    off = [
        float(up[tenth == n].double().mean() - share[tenth == n].mean()) if int((tenth == n).sum()) > 99 else 0.0
        for n in range(10)
    ]
    n = max(range(10), key=lambda n: abs(off[n]))
    chance, mean = 100 * float(up[tenth == n].double().mean()), 100 * float(share[tenth == n].mean())
    said = f"Numbers that lie {mean:.0f} % of a step above their lower neighbour round up in {chance:.0f} % of cases"
    return ("biased chance", said) if abs(off[n]) > 0.03 else None


def _fitted(what: Mapping[str, Any], cases: Sequence[KernelCase], outputs: Outputs) -> tuple[str, str] | None:
    """The setting of an optimizer that, with another value, gives all its numbers."""
    told = [(case, got["parameter"]) for case in cases[:3] if (got := outputs(case)) is not None]
    betas = what.get("betas", (0.9, 0.999))
    usual = {"lr": 1e-3, "beta1": betas[0], "beta2": betas[1], "eps": 1e-8, "weight_decay": 0.01}
    usual = {name: float(what.get(name, value)) for name, value in usual.items()}

    def under(name: str, value: float) -> dict[str, Any]:
        if name.startswith("beta"):
            return {**what, "betas": (value, betas[1]) if name == "beta1" else (betas[0], value)}
        return {**what, name: value}

    def off(name: str, value: float) -> float:
        far = []
        for case, got in told:
            allowed = expect("optimizer", case.inputs, under(name, value))["parameter"]
            far.append(float((got - allowed.right).abs().nan_to_num(1e9).mean()))
        return sum(far)

    for name in usual if told else ():
        turned = name.startswith("beta")
        start = [10.0**e for e in (range(-4, 1) if turned else range(-12, 2))] + [
            (1 - usual[name] if turned else usual[name]) * by for by in (0.5, 2.0)
        ]

        def at(log: float, name: str = name, turned: bool = turned) -> float:
            return off(name, 1 - math.exp(log) if turned else math.exp(log))

        best = min((math.log(value) for value in start if value > 0), key=at)
        low, high = best - 2.3, best + (2.3 if not turned else min(2.3, -best))
        for _ in range(40):
            one, two = low + (high - low) * 0.382, low + (high - low) * 0.618
            low, high = (low, two) if at(one) < at(two) else (one, high)
        value = 1 - math.exp((low + high) / 2) if turned else math.exp((low + high) / 2)
        for tried in (0.0, float(f"{value:.2g}"), float(f"{value:.3g}"), value):
            fits = [expect("optimizer", case.inputs, under(name, tried))["parameter"].wrong(got) for case, got in told]
            if not any(bool(mask.any()) for mask in fits):
                return f"{name} {tried:g}", f"It uses {name} = {tried:g}, where {usual[name]:g} belongs"
    return None
