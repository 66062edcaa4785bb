"""What each result may be: references in float64, and bounds made of units of rounding. No constant tolerance anywhere.

    codes    see `codes`
    casts    the scale that the recipe asks for; then codes of x under the scale that the adapter itself wrote
    GEMMs    |out - exact| <= (K + 4) u sum |a b|, the bound of any order of fp32 sums; nothing where every partial sum
             is a whole multiple, below 2**24, of the smallest product; then one rounding to the output's type
    layers   the same, and the codes that may flip because a scale may differ in its last bits

Every function takes knobs, each a way of being wrong, which `hypotheses` turns. The defaults are right. `ottava.ops` is
the other reference: its bits, where they are met, make a result "exact".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ottava.numerics.accumulator import get_accumulator
from ottava.numerics.formats import E4M3, E8M0, FORMATS
from ottava.numerics.rounding import encode
from ottava.numerics.scaling import Granularity, exponent_bytes, read_scales
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.prove.codes import (
    SCALE_SLACK,
    U32,
    Allowed,
    Values,
    dtype_of,
    numbers_of,
    on_grid,
    significant,
)  # fmt: skip
from ottava.recipe import get_recipe

_TWO_LEVELS = (None, "truncate", "away", torch.bfloat16, torch.float16)
_LOG2 = 2.0**-18
"""What a logarithm to base 2 in FP32 may hide of an amax: half a unit at 64 to 128, times ln 2, rounded up."""
_TINY = 1e-10
"""Below this amax libraries end the growth of a scale (torchao at 1e-12): a smaller scale is no error."""


# --- casts -----------------------------------------------------------------------------------------------------------


def cast_spec(what: Values) -> QuantizationSpec | None:
    """The cell of the recipe that a cast follows; None: high precision."""
    gemm = get_recipe(what.get("recipe", "tensorwise"))
    cells = {"x": gemm.fprop.lhs, "weight": gemm.fprop.rhs, "grad": gemm.dgrad.lhs}
    return cells[what.get("operand", "x")]


def stored(grid: Tensor, spec: QuantizationSpec) -> Tensor:
    """Scales (one entry a block) as an adapter holds them: () for a tensor, bytes for E8M0."""
    if spec.scale_format.startswith("e8m0"):
        return exponent_bytes(grid)
    return grid.reshape(()) if spec.granularity == Granularity(None, None) else grid


def scales_of(held: Tensor, spec: QuantizationSpec) -> Tensor:
    """The inverse of `stored`, float64 and two dimensions."""
    held = held.view(torch.uint8) if held.dtype == E8M0.dtype else held
    return read_scales(held).double().reshape(held.shape if held.dim() == 2 else (1, -1))


def spread(grid: Tensor, spec: QuantizationSpec, shape: tuple[int, ...]) -> Tensor:
    """One entry a block -> one an element."""
    return spec.granularity.expand(grid, (shape[0], shape[1])).expand(shape)


def block_amax(x: Tensor, granularity: Granularity) -> Tensor:
    """The largest magnitude of each block, float64; NaN and infinities stay."""
    blocks = granularity.blocks(x.double().abs())
    grid = granularity.grid_shape((x.shape[0], x.shape[1]))
    return blocks.amax((1, 3)) if blocks.numel() else x.new_zeros(grid, dtype=torch.float64)


def scale_inv_of(
    amax: Tensor,
    spec: QuantizationSpec,
    top: float | None = None,
    exponent: str | float | torch.dtype | None = None,
    nudge: float = 1.0,
    outer: Tensor | None = None,
) -> Tensor:
    """The multipliers that decode, float64: the recipe's rule, from its definition; 1 where amax has no scale.

    exponent: another rule; of a two-level scale the rounding of the block's, or a type that the tensor's is rounded to.
        A number: OCP's floor, and one more from that significand of amax on; negative: above it.
    nudge: what the ratio is multiplied by before a two-level scale is rounded. outer: another scale of the tensor.
    """
    top, kind = top or spec.format.max, spec.scale_format
    usable = (amax > 0) & amax.isfinite()
    safe = torch.where(usable, amax, 1.0)
    ratio = safe / top  # float64: 29 bits below those of fp32
    if kind == "e4m3" and exponent in _TWO_LEVELS and bool(usable.any()):
        # the block's scale is an E4M3 number, and the tensor's brings the largest of them to 448
        tensor = torch.where(usable, amax, 0.0).amax() / (spec.format.max * E4M3.max) if outer is None else outer
        tensor = tensor.to(exponent).double() if isinstance(exponent, torch.dtype) else tensor
        how = exponent if isinstance(exponent, str) else "nearest"
        nudge *= 1 + 1e-13 * (how == "truncate") - 1e-13 * (how == "away")  # float64's own error steps over no code
        return torch.where(usable, on_grid(ratio / tensor * nudge, E4M3, how) * tensor, 1.0)
    if exponent == "none" or (kind in ("fp32", "e4m3") and exponent is None):
        y = ratio
    else:
        mantissa, power = torch.frexp(ratio)  # 0.5 <= mantissa < 1
        up = (mantissa > 0.5).to(power.dtype)
        late = (mantissa >= 0.5).to(power.dtype) * (torch.frexp(safe)[0] == math.frexp(top)[0])
        whole = {
            "up": power - 1 + up,
            "open": power - 1 + up.maximum(late),
            "down": power - 1,
            "nearest": power - 1 + (mantissa >= math.sqrt(0.5)),
        }
        whole["floor"] = torch.frexp(safe)[1] - 1 - spec.format.emax
        whole["bare"] = torch.frexp(safe)[1] - 1
        if kind == "e8m0_floor":
            whole["up"], whole["ceil"] = whole["floor"], whole["up"]
        if isinstance(exponent, float):
            significand = 2 * torch.frexp(safe)[0]
            whole[str(exponent)] = whole["floor"] + (
                (significand >= exponent) if exponent > 0 else (significand > -exponent)
            )
        y = torch.ldexp(torch.ones_like(ratio), whole[str(exponent or "up")])
        y = y.clamp(2.0**-127, 2.0**127) if kind.startswith("e8m0") else y
    # a scale beyond fp32 is the largest of its kind
    largest = torch.finfo(torch.float32).max if kind == "fp32" else 2.0**127
    y = y if kind.startswith("e8m0") else y.clamp(min=1 / largest)
    return torch.where(usable, y, 1.0)


def _slack(spec: QuantizationSpec) -> float:
    """The share by which a right scale may be off."""
    return SCALE_SLACK if spec.scale_format in ("fp32", "e4m3") else 0.0


def _scales_asked(x: Tensor, spec: QuantizationSpec, way: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The amax of each block of x, its multiplier, and the ends of that where a scale may round otherwise.

    Takes amax, exponent, scale_top and outer out of the knobs.
    """
    amax = way.pop("amax", None)
    amax = block_amax(x, spec.granularity) if amax is None else amax
    amax = amax.expand(spec.granularity.grid_shape((x.shape[0], x.shape[1]))) if amax.numel() == 1 else amax
    asked, outer = (way.pop("scale_top", None), way.pop("exponent", None)), way.pop("outer", None)
    right = scale_inv_of(amax, spec, *asked, outer=outer)
    if spec.scale_format == "pow2" and asked[1] is None:  # a log2 in FP32 takes an amax just above a threshold for it
        return amax, right, scale_inv_of(amax * (1 - _LOG2), spec, *asked).minimum(right), right
    if spec.scale_format != "e4m3":
        return amax, right, right, right
    low, high = (scale_inv_of(amax, spec, *asked, by, outer) for by in (1 - SCALE_SLACK, 1 + SCALE_SLACK))
    return amax, right, low, high


def _roundings(spec: QuantizationSpec, way: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The rounding that a right number has, and all that a cast may have; takes it out of the knobs."""
    how = way.pop("rounding", spec.rounding.replace("nearest_even", "nearest"))
    return ("nearest", ("down", "up")) if how == "stochastic" else (how, (how,))


def cast_allowed(inputs: Values, what: Values, got: Values | None = None, **way: Any) -> dict[str, Allowed]:
    """Scales and codes of a cast; codes are those under the adapter's own scales, where these are allowed.

    got: what an adapter without knobs wrote.
    """
    spec = cast_spec(what)
    assert spec is not None
    x, fmt = way.pop("x", inputs["x"]), spec.format
    shape = tuple(x.shape)
    slack = SCALE_SLACK if way.get("exponent") == "none" else _slack(spec)
    told, hidden = "amax" in way, way.pop("unwritten", None)
    amax, right, *around = _scales_asked(x, spec, way)
    rule = way.pop("written", lambda scale: scale)
    written, low, high = (rule(one) for one in (right, *around))
    # an amax of zero has no right scale, but a kernel that sees none of some numbers takes 1
    unseen = (amax == 0) & (block_amax(x, spec.granularity) > 0) & torch.tensor(told)
    known = (amax > 0) & amax.isfinite() | unseen
    low, high = low * (1 - slack), torch.where((amax < _TINY) & ~unseen, 1e30, high * (1 + slack))
    # FP32's subnormal numbers: hardware may flush them; a block whose E4M3 scale is 0 decodes to 0 under any codes
    flushed = (amax < 2.0**-126) & ~unseen | (around[0] == 0)
    two_levels = spec.scale_format == "e4m3"
    right = torch.where(right == 0, 1.0, right)
    low, high = torch.where(known & ~flushed, low, 0.0), torch.where(known & ~flushed, high, math.inf)
    bad = ~amax.isfinite()
    bad = bad.any().expand(bad.shape) if two_levels else bad  # the tensor's scale is not told either
    own = None
    if got is not None and got["scale_inv"].numel() == right.numel():
        own = scales_of(got["scale_inv"], spec).reshape(right.shape)
        right = torch.where((own >= low) & (own <= high) & (own > 0), own, right)
    rounding, ways = _roundings(spec, way)
    z = torch.where(x.isinf(), x.double(), x.double() / spread(right, spec, shape))
    edges = torch.stack([on_grid(z * by, fmt, one, **way) for by in (1 - slack, 1 + slack) for one in ways])
    data_low, data_high = edges.amin(0), edges.amax(0)
    drawn = z if len(ways) > 1 else None
    center = torch.where(x.isinf(), math.nan, on_grid(z, fmt, rounding, **way)) if got is None else None
    # a block with NaN or infinity has no scale of its own; there NaN must stay visible, the rest is not told
    poisoned, seen = spread(bad, spec, shape), x.isnan() & torch.tensor(fmt.has_nan)
    also: tuple[Tensor | float, ...] = ()
    if own is not None:
        seen &= ~spread(own.isnan(), spec, shape)
        # an infinity must not pass for the largest of the other numbers of its block
        rest = block_amax(x.nan_to_num(0.0, 0.0, 0.0), spec.granularity)
        theirs = scale_inv_of(rest, spec)
        of_rest = bad & (rest > 0) & (own != 1) & ((own - theirs).abs() <= theirs * slack)
        passes = x.isinf() & spread(of_rest, spec, shape)
        data_low, data_high = (torch.where(passes, math.nan, side) for side in (data_low, data_high))
        also = (torch.where(passes, x.double(), data_low),) if fmt.has_infinity else ()
        poisoned = poisoned & ~passes
    free = (poisoned & ~seen) | spread(flushed, spec, shape) & (x != 0)
    if hidden is not None:  # what nobody writes holds NaN
        free = free & ~hidden
        data_low, data_high = (torch.where(hidden, math.nan, one) for one in (data_low, data_high))
    held = stored_shape(spec.granularity.grid_shape((x.shape[0], x.shape[1])), spec)
    low, high, scale, unsure = (one.reshape(held) for one in (low, high, written.float().double(), bad))
    kinds = (torch.uint8, torch.float8_e8m0fnu) if spec.scale_format.startswith("e8m0") else (torch.float32,)
    more = (math.nan,) if bool(bad.any()) else ()
    # a format without a code of NaN shows it in the scale alone
    hides = torch.zeros_like(unsure) if fmt.has_nan else amax.isnan().reshape(held)
    low, high = (torch.where(hides, math.nan, one) for one in (low, high))
    scales = Allowed(low, high, kinds, more, free=unsure & ~hides if two_levels else None, center=scale)
    signed, dtypes = fmt.has_negative_zero and drawn is None, tuple(dict.fromkeys((fmt.storage_dtype, torch.uint8)))
    data = Allowed(data_low, data_high, dtypes, also, free=free, signed=signed, drawn=drawn, center=center)
    return {"scale_inv": scales, "data": data}


def stored_shape(grid: tuple[int, int], spec: QuantizationSpec) -> tuple[int, ...]:
    """The shape of `stored`."""
    return () if spec.granularity == Granularity(None, None) else grid


# --- sums ------------------------------------------------------------------------------------------------------------


def _granule(x: Tensor) -> Tensor:
    """The largest power of two that divides every number of a row, (R, 1); infinite for a row of zeros."""
    mantissa, power = torch.frexp(x.nan_to_num(0.0, 0.0, 0.0))
    whole = (mantissa * 2.0**53).to(torch.int64)
    lowest = torch.ldexp((whole & -whole).double(), power - 53)
    if not x.shape[1]:
        return x.new_full((x.shape[0], 1), math.inf)
    return torch.where(whole == 0, math.inf, lowest).amin(1, keepdim=True)


def product(
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype,
    *,
    slack: tuple[Tensor, Tensor] | None = None,
    unit: float = U32,
    steps: tuple[torch.dtype | int, int] | None = None,
    split: tuple[torch.dtype, Callable[[int], Sequence[int]], torch.dtype] | None = None,
) -> Allowed:
    """a (M, K) @ b (N, K).T in fp32 sums of any order, rounded once.

    slack: how far each number of a and b may be off.
    steps: a type (or bits, see `significant`), and how many products go into it at once, one step after the other.
    split: a type that sums of parts of K are rounded to, the ends of these parts, and the type in which they are
        added, one after the other.
    """
    k = a.shape[1]
    center, size = a @ b.t(), a.abs() @ b.abs().t()
    if steps is not None:
        center = torch.zeros_like(center)
        for x, y in zip(a.split(steps[1], 1), b.split(steps[1], 1), strict=True):
            center = center + x @ y.t()
            kind = steps[0]
            center = significant(center, kind) if isinstance(kind, int) else center.float().to(kind).double()
    if split is not None:
        kind, ends, into = split
        center = torch.zeros_like(center)
        for begin, end in pairwise((0, *ends(k))):
            x, y = a[:, begin:end], b[:, begin:end]
            center = (center + (x @ y.t()).float().to(kind).double()).float().to(into).double()
    error = (k + 4) * unit * size
    whole = size <= 2.0**24 * (_granule(a) * _granule(b).t())
    error = torch.where(whole & (unit == U32), 0.0, error + k * 2.0**-52 * size)
    if slack is not None:
        da, db = slack
        error = error + (da @ b.abs().t() + a.abs() @ db.t() + da @ db.t())
    return between(center, error, dtype)


def between(center: Tensor, error: Tensor, dtype: torch.dtype) -> Allowed:
    """Numbers within error of center, rounded to a type."""
    error = torch.where(center.isfinite(), error, 0.0)
    low, high = ((center + sign * error).to(torch.float32).to(dtype).double() for sign in (-1, 1))
    return Allowed(low, high, (dtype,), exact=center.to(torch.float32).to(dtype).double())


def decoded(codes: Tensor, scale: Tensor, spec: QuantizationSpec, change: Any = None, columns: Any = None) -> Tensor:
    """Codes (R, C), whose numbers `change` changes, times their scales, float64; the format is that of the dtype.

    columns: (columns, size of a block, size) -> which block of K's scale each of them gets.
    """
    values = numbers_of(codes, spec.format)
    values = values if change is None else change(values, spec.format)
    if columns is None or not values.numel():
        return values * spread(scales_of(scale, spec), spec, tuple(values.shape)) if values.numel() else values
    grid, (high, wide) = scales_of(scale, spec), spec.granularity.block_shape((values.shape[0], values.shape[1]))
    which = columns(torch.arange(values.shape[1]), wide, values.shape[1]).clamp(0, grid.shape[1] - 1)
    return values * grid[torch.arange(len(values)) // high][:, which]


def gemm_specs(what: Values) -> tuple[QuantizationSpec, QuantizationSpec]:
    """The cells of fprop."""
    gemm = get_recipe(what.get("recipe", "tensorwise")).fprop
    assert gemm.lhs is not None
    assert gemm.rhs is not None
    return gemm.lhs, gemm.rhs


def gemm_allowed(
    inputs: Values, what: Values, *, operands: Any = None, accumulator: str | None = None,
    codes: Any = None, late: bool = False, crossed: str = "", weights: Any = None, columns: Any = None, **way: Any,
) -> dict[str, Allowed]:  # fmt: skip
    """out of a GEMM; the bits of a named accumulator.

    codes: see `decoded`. late: sums are made of codes, and scaled at the end. weights: K -> how often a column counts.
    crossed: the operand whose scales are chosen by the other one's rows. columns: of a and b, see `decoded`.
    """
    lhs, rhs = gemm_specs(what)
    dtype = dtype_of(what, "out")
    name = accumulator or what.get("accumulator", "fp32")
    a, b, scale_a, scale_b = (inputs[key] for key in ("a", "b", "scale_inv_a", "scale_inv_b"))
    if get_accumulator(name).emulated and not any((operands, codes, crossed, weights, columns)):
        from ottava.ops.gemm import gemm

        sides = (operand(x.contiguous(), y.contiguous(), spec) for x, y, spec in ((a, scale_a, lhs), (b, scale_b, rhs)))
        y = gemm(*sides, out_dtype=dtype, accumulator=name).double()
        return {"out": Allowed(y, y, (dtype,), exact=y)}
    if late:
        rows, columns = (scales_of(x, spec).amax(1, keepdim=True) for x, spec in ((scale_a, lhs), (scale_b, rhs)))
        one = product(numbers_of(a, lhs.format), numbers_of(b, rhs.format), torch.float32, **way)
        grid = rows * columns.t()
        low, high = ((end * grid).float().to(dtype).double() for end in (one.low, one.high))
        return {"out": Allowed(low, high, (dtype,))}
    if crossed == "a":
        a, b = numbers_of(a, lhs.format), _crossed(decoded(b, scale_b, rhs), scale_a, lhs)
    elif crossed == "b":
        a, b = _crossed(decoded(a, scale_a, lhs), scale_b, rhs), numbers_of(b, rhs.format)
    else:
        of_a, of_b = columns or (None, None)
        a, b = decoded(a, scale_a, lhs, codes, of_a), decoded(b, scale_b, rhs, codes, of_b)
    if weights is not None:
        a = torch.where(weights(a.shape[1]) == 0, 0.0, a * weights(a.shape[1]))
    if operands is not None:
        a, b = operands(a), operands(b)
    return {"out": product(a, b, dtype, **way)}


def _crossed(x: Tensor, scale: Tensor, spec: QuantizationSpec) -> Tensor:
    """x times the scales of the other operand, each row with those that the row of that number has there."""
    if spec.granularity.rows is None:
        raise ValueError("one scale for all rows is chosen by none")
    grid = scales_of(scale, spec)
    mine = grid[(torch.arange(len(x)) // spec.granularity.rows).clamp(max=len(grid) - 1)]
    return x * Granularity(1, spec.granularity.cols).expand(mine, (x.shape[0], x.shape[1])).expand(x.shape)


def operand(codes: Tensor, scale: Tensor, spec: QuantizationSpec) -> QuantizedTensor:
    """An adapter's codes and scales as a tensor of ottava; the format is that of the dtype."""
    fmt = next((fmt for fmt in FORMATS.values() if fmt.dtype == codes.dtype), spec.format)
    return QuantizedTensor(codes, scales_of(scale, spec).float(), replace(spec, format=fmt), torch.bfloat16)


def grouped_allowed(
    inputs: Values, what: Values, *, ends: Tensor | None = None, experts: Any = None, **way: Any
) -> dict[str, Allowed]:
    """out of a grouped GEMM: group after group. Rows beyond the last group are not judged.

    experts: (group, rows of each group) -> the weight that a group meets.
    """
    lhs, a, b = gemm_specs(what)[0], inputs["a"], inputs["b"]
    stops = [int(end) for end in (inputs["ends"] if ends is None else ends)]
    dtype = dtype_of(what, "out")
    low, high, exact = torch.zeros(3, a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    free = torch.ones_like(low, dtype=torch.bool)
    start = 0
    sizes = [stop - begin for begin, stop in zip([0, *stops], stops, strict=False)]
    for group, stop in enumerate(stops):
        if stop > start:
            which, rows = group if experts is None else experts(group, sizes), slice(start, stop)
            scale = inputs["scale_inv_a"][rows] if lhs.granularity.rows == 1 else inputs["scale_inv_a"]
            one = {"a": a[rows], "b": b[which], "scale_inv_a": scale, "scale_inv_b": inputs["scale_inv_b"][which]}
            allowed = gemm_allowed(one, what, **way)["out"]
            low[rows], high[rows], free[rows] = allowed.low, allowed.high, False
            exact[rows] = allowed.low if allowed.exact is None else allowed.exact
        start = max(start, stop)
    return {"out": Allowed(low, high, (dtype,), free=free, exact=exact)}


# --- layers ----------------------------------------------------------------------------------------------------------


def cast_interval(
    x: Tensor, spec: QuantizationSpec | None, off: Tensor | None = None, **way: Any
) -> tuple[Tensor, Tensor]:
    """x (R, C) after a cast, and how far a cast with another legitimate scale may be from it: both float64.

    off: how far x may be from what is cast.
    """
    moved = torch.zeros_like(x, dtype=torch.float64) if off is None else off
    if spec is None:
        return x.double(), moved
    spec = replace(spec, granularity=way.pop("granularity", spec.granularity))
    fmt, shape, other = way.pop("format", spec.format), tuple(x.shape), way.pop("other_top", None)
    if other is not None:
        center, far = cast_interval(x, spec, off)
        return center * (spec.format.max / other), far * (spec.format.max / other)
    if (misread := way.pop("misread", None)) is not None:  # codes are right, and multiplied by another scale
        grid = _scales_asked(x, spec, {})[1]
        own, other = (spread(s.reshape(grid.shape), spec, shape) for s in (grid, misread(grid)))
        center, far = (one * other / torch.where(own == 0, 1.0, own) for one in cast_interval(x, spec, off))
        return center, far
    if (turned := way.pop("turned", None)) is not None:  # as it was cast along the other dimension
        center, far = cast_interval(x.t(), turned)
        return center.t(), far.t()
    if (twice := way.pop("twice", None)) is not None:
        x = cast_interval(x.t(), twice)[0].t()  # what is cast has been cast along the other dimension
    if (read := way.pop("read", fmt)) != fmt:
        center, _ = cast_interval(x, spec)
        scale = spread(_scales_asked(x, spec, {})[1], spec, shape)
        codes = encode((center / torch.where(scale == 0, 1.0, scale)).float(), fmt).view(torch.uint8)
        center = numbers_of(codes, read) * scale
        return center, torch.zeros_like(center)
    way.setdefault("scale_top", fmt.max)
    slack = _slack(spec)
    if off is not None and x.numel():  # the amax moves, too
        top = float(x.abs().amax())
        slack += (float((x.abs() + off).amax()) - top + top - float((x.abs() - off).amax())) / max(top, _TINY)
    scales = [spread(s.float().double(), spec, shape) for s in _scales_asked(x, spec, way)[1:]]
    rounding, ways = _roundings(spec, way)

    def cast(x: Tensor, scale: Tensor, how: str, by: float = 1.0) -> Tensor:
        return on_grid(x.double() / torch.where(scale == 0, 1.0, scale) * by, fmt, how, **way) * scale

    center = cast(x, scales[0], rounding)
    ends = [x.double()] if off is None else [x - moved, x + moved]
    edges = [
        cast(end, scale, one, by)
        for scale in (scales if spec.scale_format == "e4m3" or not torch.equal(scales[0], scales[1]) else scales[:1])
        for end in ends
        for by in (1 - slack, 1 + slack)
        for one in ways
    ]
    far = torch.stack([(edge - center).abs() for edge in edges]).amax(0) + slack * center.abs()
    if slack > fmt.eps / 4:  # hardly known what is cast: any cast of it lies within half a step of it
        half = (x.abs() + moved) * (1 + slack) * fmt.eps / 2 + scales[0] * (1 + slack) * fmt.min_subnormal
        far = far.maximum((x.double() - center).abs() + moved + half)
    return center, far


def linear_allowed(inputs: Values, what: Values, *, cells: Any = None, **way: Any) -> dict[str, Allowed]:
    """y, dx and dw of a linear layer under a recipe.

    cells: {"fprop.lhs": knobs of `cast_interval`, or "skip"} for single casts.
    """
    recipe = get_recipe(what.get("recipe", "tensorwise"))
    x, weight, grad = (inputs[key] for key in ("x", "weight", "grad"))
    rows, dy = x.reshape(-1, x.shape[-1]), grad.reshape(-1, weight.shape[0])
    gemms = (
        ("fprop", "y", rows, weight, (*x.shape[:-1], weight.shape[0])),
        ("dgrad", "dx", dy, weight.t(), tuple(x.shape)),
        ("wgrad", "dw", dy.t(), rows.t(), tuple(weight.shape)),
    )
    results = {}
    for gemm, name, *operands, shape in gemms:
        sides = []
        for side, one in zip(("lhs", "rhs"), operands, strict=True):
            knobs = (cells or {}).get(f"{gemm}.{side}", {})
            spec = None if knobs == "skip" else getattr(getattr(recipe, gemm), side)
            sides.append(cast_interval(one, spec, **({} if knobs == "skip" else knobs)))
        (a, da), (b, db) = sides
        allowed = product(a, b, weight.dtype if name == "dw" else x.dtype, slack=(da, db), **way)
        low, high, exact = (getattr(allowed, end).reshape(shape) for end in ("low", "high", "exact"))
        results[name] = allowed._replace(low=low, high=high, exact=exact)
    return results
