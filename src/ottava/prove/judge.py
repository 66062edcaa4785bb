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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ottava.base.errors import need_known
from ottava.numerics.accumulator import get_accumulator
from ottava.numerics.formats import E4M3, E8M0, FORMATS, Format, get_format
from ottava.numerics.rounding import encode
from ottava.numerics.scaling import Granularity, exponent_bytes, read_scales
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.prove.codes import (
    SCALE_SLACK,
    U32,
    Allowed,
    Values,
    decode_allowed,
    dtype_of,
    encode_allowed,
    numbers_of,
    on_grid,
    significant,
)  # fmt: skip
from ottava.recipe import ATTENTION_TENSORS, AttentionRecipe, get_recipe

_TWO_LEVELS = (None, "truncate", "away", torch.bfloat16, torch.float16)
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
    exponent: str | torch.dtype | None = None,
    nudge: float = 1.0,
    outer: Tensor | None = None,
) -> Tensor:
    """The multipliers that decode, float64: the recipe's rule, from its definition; 1 where amax has no scale.

    exponent: another rule; of a two-level scale the rounding of the block's, or a type that the tensor's is rounded to.
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
    """The amax of each block of x, its multiplier, and the ends of that where an E4M3 scale may round otherwise.

    Takes amax, exponent, scale_top and outer out of the knobs.
    """
    amax = way.pop("amax", None)
    amax = block_amax(x, spec.granularity) if amax is None else amax
    amax = amax.expand(spec.granularity.grid_shape((x.shape[0], x.shape[1]))) if amax.numel() == 1 else amax
    asked, outer = (way.pop("scale_top", None), way.pop("exponent", None)), way.pop("outer", None)
    right = scale_inv_of(amax, spec, *asked, outer=outer)
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
    scales = Allowed(low, high, kinds, more, free=unsure if two_levels else None, center=scale)
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


def decoded(codes: Tensor, scale: Tensor, spec: QuantizationSpec, change: Any = None) -> Tensor:
    """Codes (R, C), whose numbers `change` changes, times their scales, float64; the format is that of the dtype."""
    values = numbers_of(codes, spec.format)
    values = values if change is None else change(values, spec.format)
    return values * spread(scales_of(scale, spec), spec, tuple(values.shape)) if values.numel() else values


def gemm_specs(what: Values) -> tuple[QuantizationSpec, QuantizationSpec]:
    """The cells of fprop."""
    gemm = get_recipe(what.get("recipe", "tensorwise")).fprop
    assert gemm.lhs is not None
    assert gemm.rhs is not None
    return gemm.lhs, gemm.rhs


def gemm_allowed(
    inputs: Values, what: Values, *, operands: Any = None, accumulator: str | None = None,
    codes: Any = None, late: bool = False, crossed: str = "", weights: Any = None, **way: Any,
) -> dict[str, Allowed]:  # fmt: skip
    """out of a GEMM; the bits of a named accumulator.

    codes: see `decoded`. late: sums are made of codes, and scaled at the end. weights: K -> how often a column counts.
    crossed: the operand whose scales are chosen by the other one's rows.
    """
    lhs, rhs = gemm_specs(what)
    dtype = dtype_of(what, "out")
    name = accumulator or what.get("accumulator", "fp32")
    a, b, scale_a, scale_b = (inputs[key] for key in ("a", "b", "scale_inv_a", "scale_inv_b"))
    if get_accumulator(name).emulated and not any((operands, codes, crossed, weights)):
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
        a, b = decoded(a, scale_a, lhs, codes), decoded(b, scale_b, rhs, codes)
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
        for scale in (scales if spec.scale_format == "e4m3" else scales[:1])
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


def _cast_together(spec: QuantizationSpec | None, *parts: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Tensors (and how far they may be off) after a cast with one scale for all of them."""
    if spec is None:
        return list(parts)
    flat, off = (torch.cat([part[i].reshape(1, -1) for part in parts], 1) for i in (0, 1))
    sizes = [part[0].numel() for part in parts]
    cast = [side.split(sizes, 1) for side in cast_interval(flat, spec, off)]
    return [(cast[0][i].view(part[0].shape), cast[1][i].view(part[0].shape)) for i, part in enumerate(parts)]


def _times(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], u: float) -> tuple[Tensor, Tensor]:
    """A product of two tensors and how far they may be off; the sums in it err by u of their magnitudes."""
    (x, dx), (y, dy) = a, b
    return x @ y, dx @ y.abs() + (x.abs() + dx) @ dy + u * (x.abs() @ y.abs())


def _moved_odds(share: Tensor, off: Tensor) -> Tensor:
    """By which part of it a share of a softmax may change if each score is off by that much.

    Against the others together its odds change by a factor of e ** (what it is off + what the worst is off) at most.
    """
    kept = (-(off.amax(-1, keepdim=True) + off)).exp()
    rest = 1 - share
    return rest * (1 - kept) / torch.minimum(rest * kept + share, rest + share * kept).clamp(min=1e-300)


def _turned(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].mT, pair[1].mT


def _seen(queries: int, keys: int, offset: int, window: int, tile: int) -> Tensor:
    """The keys that each query sees under a causal mask; see `attention_allowed`."""
    if tile:
        return torch.arange(queries)[:, None] // tile >= torch.arange(keys) // tile
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(offset)
    return seen.triu(1 - window) if window else seen


def _behind_tiles(scores: Tensor, total: Tensor, tile: int, lazy: float) -> Tensor:
    """Weights of the running maximum behind each tile of keys, and of rises by `lazy` octaves, over the sum."""
    ends = [min(j // tile * tile + tile, scores.shape[-1]) - 1 for j in range(scores.shape[-1])]
    top = scores.cummax(-1).values[..., ends]
    rise = top.diff(dim=-1, append=top[..., -1:])
    later = torch.where(rise >= lazy * math.log(2), rise, 0.0).flip(-1).cumsum(-1).flip(-1)
    return (scores - top - later).exp() * torch.where(total == 0, 0.0, 1 / total)


def _attention_grads(
    given: tuple[tuple[Tensor, Tensor], ...],
    s: tuple[Tensor, Tensor],
    of_p: tuple[Tensor, Tensor],
    of_o: tuple[Tensor, Tensor],
    scale: float,
    u: float,
    specs: Mapping[str, QuantizationSpec],
    fault: str,
    last: int,
) -> list[tuple[Tensor, Tensor]]:
    """dq, dk and dv, and how far they may be off; given: q, k, v and grad, s: the probabilities that meet v."""
    (q, k, v, g), (p, ep), (o, eo) = given, of_p, of_o
    queries, keys, width = q[0].shape[-2], k[0].shape[-2], v[0].shape[-1]
    dp, edp = _times(g, _turned(v), (width + 4) * U32 + u)
    delta = (g[0] * o).sum(-1, keepdim=True)
    edelta = (g[0].abs() * (eo + u * o.abs()) + g[1] * o.abs()).sum(-1, keepdim=True)
    edelta += (width + 4) * U32 * (g[0] * o).abs().sum(-1, keepdim=True)
    if fault == "no delta":
        delta = torch.zeros_like(delta)
    ds = p * (dp - delta)
    eds = ep * (dp - delta).abs() + (p + ep) * (edp + edelta) + 2 * u * ds.abs()
    (dscores,) = _cast_together(specs.get("dp"), (ds, eds))
    factor = 1.0 if fault == "gradients without scale" else scale
    by_key, by_query = dscores, dscores
    if last:
        by_key = ds * (torch.arange(keys) // last == (keys - 1) // last), eds
        late = (torch.arange(queries) // last == (queries - 1) // last)[:, None]
        by_query, s = (ds * late, eds), (s[0] * late, s[1])
    dq, dk = _times(by_key, k, (keys + 4) * U32), _times(_turned(by_query), q, (queries + 4) * U32)
    dq, dk = ((x * factor, off * factor) for x, off in (dq, dk))
    return _cast_together(specs.get("dqkv"), dq, dk, _times(_turned(s), g, (queries + 4) * U32))


def attention_allowed(
    inputs: Values,
    what: Values,
    *,
    scale: float | None = None,
    offset: int = 0,
    causal: bool | None = None,
    fault: str = "",
    pad: int = 0,
    window: int = 0,
    tile: int = 0,
    rescaled: int = 0,
    lazy: float = math.inf,
    back: str = "",
    last: int = 0,
    rounded: Mapping[str, torch.dtype] | None = None,
    casts: Mapping[str, str] | None = None,
) -> dict[str, Allowed]:
    """o, dq, dk and dv of softmax(q k.T / sqrt(D)) v; each rounding of an ordinary kernel to the operands' type counts.

    Args:
        offset: by which the causal mask is late; None is right.
        fault: what else is wrong, see `hypotheses`.
        pad: keys are padded to a multiple of it, with zeros that count.
        window: keys that a query sees, itself among them; 0: all.
        tile: the causal mask hides whole tiles of so many keys.
        rescaled: the tile of keys behind which the sum of values is not rescaled to a score larger by `lazy` octaves.
        back: the backward alone: "masked" hides what lies before the tile of a key, "seen" hides nothing,
            and "again" makes a softmax of all.
        last: the backward keeps only the last tile of so many keys (for dq) or queries (for dk and dv).
        rounded: "scores" or "p", and a type that they are rounded to.
        casts: tensor of `AttentionRecipe` -> a format in place of its own, or "skip".
    """
    given = [
        (inputs[key].double(), torch.zeros_like(inputs[key], dtype=torch.float64)) for key in ("q", "k", "v", "grad")
    ]
    (queries, depth), keys, dtype = inputs["q"].shape[-2:], inputs["v"].shape[-2], inputs["q"].dtype
    casts = casts or {}
    known = {name: spec for name in ATTENTION_TENSORS if (spec := getattr(AttentionRecipe(), name)) is not None}
    changed = {n: replace(known[n], format=get_format(to)) for n, to in casts.items() if to != "skip"}
    specs = (known if what.get("recipe") == "fp8" else {}) | changed
    specs = {name: spec for name, spec in specs.items() if casts.get(name) != "skip"}
    q, k, v = _cast_together(specs.get("qkv"), *given[:3])
    (g,) = _cast_together(specs.get("do"), given[3])
    u = max(torch.finfo(dtype).eps / 2, U32)
    scale = 1 / math.sqrt(depth) if scale is None else scale
    scores, off = (x * scale for x in _times(q, _turned(k), (depth + 4) * U32))
    off = off + 2 * u * scores.abs()  # sums in fp32, then one rounding of the scores
    raw = scores
    if what.get("causal", False) if causal is None else causal:
        seen = _seen(queries, keys, offset, window, tile).to(scores.device)
        scores, off = scores.masked_fill(~seen, -math.inf), off.masked_fill(~seen, 0.0)
    if rounded and "scores" in rounded:
        scores = scores.to(rounded["scores"]).double()
    top = scores.amax(-1, keepdim=True).clamp(min=-1e300)
    raised = (scores - top).exp()
    total = raised.sum(-1, keepdim=True)
    if pad:  # keys of zeros behind the last one, which nobody hides
        total = total + (-keys % pad) * (-top).exp()
    share = raised / torch.where(total == 0, 1.0, total)
    p = raised if fault == "not normalized" else share
    moved = _moved_odds(share, off) + (keys + 16) * U32 + 2 * u
    ep = p * moved
    p = p.to(rounded["p"]).double() if rounded and "p" in rounded else p
    (s,) = _cast_together(specs.get("s"), (p, ep))
    summed = (late := _behind_tiles(scores, total, rescaled, lazy), late * moved) if rescaled else s
    ((o, eo),) = _cast_together(specs.get("o"), _times(summed, v, (keys + 4) * U32))
    if fault == "dv not normalized":
        s = raised, ep
    if back in ("seen", "again"):
        s = p, ep = (raw - top).exp() / torch.where(total == 0, 1.0, total) if back == "seen" else raw.softmax(-1), ep
    elif back == "masked":
        s = p, ep = p * _seen(queries, keys, 0, 0, tile or 1).to(p.device), ep
    mine = p @ v[0] if back == "again" else o
    grads = _attention_grads((q, k, v, g), s, (p, ep), (mine, eo), scale, u, specs, fault, last)
    # second order: the bounds above are of first order, and errors of a few percent multiply
    return {
        name: between(center, error * 1.1 + torch.finfo(torch.float32).tiny, dtype)
        for name, (center, error) in zip(("o", "dq", "dk", "dv"), [(o, eo), *grads], strict=True)
    }


# --- optimizers ------------------------------------------------------------------------------------------------------


def adamw(
    p: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    t: int,
    what: Values,
    *,
    fault: str = "",
    stale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One step in float64: parameter, both moments, and the error that fp32 may make of the parameter."""
    lr, (b1, b2) = float(what.get("lr", 1e-3)), what.get("betas", (0.9, 0.999))
    eps, decay = float(what.get("eps", 1e-8)), float(what.get("weight_decay", 0.01))
    g = gradient if stale is None else stale
    if fault in ("betas swapped", "betas of moments swapped"):
        b1, b2 = b2, b1
    if fault == "decay coupled":
        g, decay = g + decay * p, 0.0
    t = {"step one late": t - 1, "step one early": t + 1, "step stays 1": 1, "step counted twice": 2 * t}.get(fault, t)
    if fault in ("clipped norm", "clipped"):
        g = g.clamp(-1, 1) if fault == "clipped" else g / max(float(g.norm()), 1.0)
    kept = 1 - (decay if fault == "decay without lr" else lr * decay)
    kept = 1.0 if fault == "no decay" else kept
    kept = 1 - lr * decay / (1 - b1**t) if fault == "decay corrected" and b1**t < 1 else kept
    kept = float(torch.tensor(kept).bfloat16()) if fault == "decay factor rounded" else kept
    begins = fault == "moments begin as the gradient" and t == 1
    m = g if begins else b1 * m + (1 - b1) * g if fault != "momentum undamped" else b1 * m + g
    v = g * g if begins else b2 * v + (1 - b2) * (g.abs() if fault == "gradient not squared" else g * g)
    m = m.float().bfloat16().double() if fault == "first moment rounded" else m
    v = v.float().bfloat16().double() if fault == "second moment rounded" else v
    c1, c2 = (1 - beta**t for beta in ((b1, b2) if fault != "betas of moments swapped" else (b2, b1)))
    c1 = 1.0 if fault in ("no bias correction", "first moment uncorrected") else c1
    c2 = 1.0 if fault in ("no bias correction", "second moment uncorrected") else c2
    c1, c2 = (1 / c1, 1 / c2) if fault == "corrections multiply" and c1 and c2 else (c1, c2)
    hat = v / c2 if c2 else v * math.inf
    root = (hat + eps).sqrt() if fault == "eps under the root" else hat.sqrt() + eps
    if fault == "eps corrected too":
        root = v.sqrt() * (1 / math.sqrt(c2) if c2 else math.inf) + eps / (math.sqrt(c2) if c2 else 1)
    root = {"no root": hat, "no second moment": torch.ones_like(hat)}.get(fault, root)
    direction = m / c1 if c1 else m * math.inf
    if fault in ("sign", "sign of the first moment"):
        direction = -direction if fault == "sign" else direction.sign()
    if fault == "nesterov":
        direction = (b1 * m + (1 - b1) * g) / c1
    step = lr * direction / root
    behind = (p * kept).float().bfloat16().double() if fault == "decay rounded" else p * kept
    after = (p - step) * kept if fault == "decay after the step" else behind - step
    # a moment is a chain of roundings, the update a dozen, the parameter three
    error = 4 * U32 * p.abs() + (16 + 8 * t) * U32 * lr * (m.abs() + abs(1 - b1) * g.abs()) / c1 / root if c1 else after
    return after, m, v, error


def optimizer_allowed(
    inputs: Values, what: Values, *, fault: str = "", moments: tuple[str | None, str | None] | None = None
) -> dict[str, Allowed]:
    """The parameter after each of some steps; inputs: parameter, and grads (steps, ...).

    moments: how the first and the second are kept; None: as was told.
    """
    p, dtype = inputs["parameter"].double(), inputs["parameter"].dtype
    m, v, wide = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
    dm, dv = torch.zeros_like(p), torch.zeros_like(p)  # how far another rounding may bring a stored moment
    told = str(what.get("moments", "float32"))
    told = {"float32": "fp32", "bfloat16": "bf16"}.get(told, told)
    names = (told, told) if moments is None else tuple(told if name is None else name for name in moments)
    u, (b1, b2), lr = torch.finfo(dtype).eps / 2, what.get("betas", (0.9, 0.999)), float(what.get("lr", 1e-3))
    steps = []
    for t, g in enumerate(inputs["grad"].double(), start=1):
        stale = inputs["grad"][t - 2].double() if fault == "gradient of the step before" and t > 1 else None
        kept = m * b1 / (1 - b1)
        was = p, m, v
        p, m, v, error = adamw(p, g, m, v, t, what, fault=fault, stale=stale)
        if fault == "zero gradients skipped":
            p, m, v = (torch.where(g == 0, old, new) for old, new in zip(was, (p, m, v), strict=True))
        if names != ("fp32", "fp32"):
            # a sum that cancels keeps the roundings of its terms
            dm, dv = b1 * dm + 8 * U32 * (1 - b1) * (g.abs() + kept.abs()), b2 * dv
            share = torch.where(dv < v, dv / torch.where(v > 0, v, 1.0), torch.where(dv > 0, math.inf, 0.0))
            root = (v / (1 - b2**t)).sqrt() + float(what.get("eps", 1e-8))
            step, moved = lr * m.abs() / (1 - b1**t) / root, lr * dm / (1 - b1**t) / root
            error = error + ((step + moved) * share).nan_to_num(0.0, posinf=math.inf) + moved
            (m, dm), (v, dv) = _held(names[0], m, dm, False), _held(names[1], v, dv, True)
        if fault == "moments forgotten":
            m, v = torch.zeros_like(p), torch.zeros_like(p)
        wide = wide + error + (0.0 if dtype == torch.float32 else 1.01 * u * p.abs())
        steps.append(between(p, wide, dtype))
        p = p.to(dtype).double() if dtype != torch.float32 else p
    low, high, exact = (torch.stack([getattr(one, end) for one in steps]) for end in ("low", "high", "exact"))
    return {"parameter": Allowed(low, high, (dtype,), exact=exact)}


def _held(name: str, moment: Tensor, off: Tensor, positive: bool) -> tuple[Tensor, Tensor]:
    """A moment out of its storage, and how far it moves if what is stored moves by `off` and a few roundings."""
    from ottava.optim.storage import STORAGES

    if name == "fp32":
        return moment, off
    need_known("", "moments", name, STORAGES)
    storage = STORAGES[name]
    # neighbours in turn, and large numbers against small ones: the ends of a group set its grid
    turn = torch.where(torch.arange(moment.numel(), device=moment.device).view(moment.shape) % 2 == 0, 1.0, -1.0)
    ends = torch.where(moment.abs() > moment.abs().median(), 1.0, -1.0)
    read = []
    small = 64 * U32 * moment.abs()  # alone, too: what moves a group's ends moves its grid
    away = [(way * sign, by) for sign in (turn, ends * moment.sign()) for way in (1, -1) for by in (small, small + off)]
    for sign, by in [(turn, 0 * small), *away]:
        x = (moment + sign * by).float()
        held = storage.empty(x)
        storage.write([held], [x.clamp(min=0) if positive else x], positive=positive)
        read.append(storage.read([held], positive=positive)[0].double().view(moment.shape))
        if "_exponent" in held:  # the exponent of a group, and so all of its grid, hangs on its smallest number
            return read[0], _half_steps(moment, held, storage.groups["_exponent"]) * 2 * (moment.abs() + off) + off
    moved = torch.stack([(one - read[0]).abs() for one in read]).amax(0)
    return read[0], 1.1 * moved + 64 * U32 * read[0].abs()  # a power in fp32 is off by some units


def _half_steps(moment: Tensor, held: Mapping[str, Tensor], size: int) -> Tensor:
    """How far, as a share of it, a number may be from what a grid of E4M3 under a power reads, see `optim.storage`.

    A power x ** (e / 16) lies half a step from its code: 2**-4 of it, and 2**-10 where it is subnormal.
    """

    def each(name: str) -> Tensor:
        return held[name].double().view(-1).repeat_interleave(size)[: moment.numel()].view(moment.shape)

    exponent, center = (each("_exponent") - 1).clamp(min=1) / 16, each("_center")
    raised = (moment.abs() / torch.where(center == 0, 1.0, center)) ** exponent
    half = (2.0**-10 / torch.where(raised == 0, 1.0, raised)).clamp(2.0**-4, 0.75)
    return (1 - half) ** (-1 / exponent) - 1


def expect(kind: str, inputs: Values, what: Values, got: Values | None = None, **way: Any) -> dict[str, Allowed]:
    """What each result of a call may be; knobs in `way` make it the result of a faulty kernel."""
    if kind == "cast":
        return cast_allowed(inputs, what, got, **way)
    made: Mapping[str, Callable[..., dict[str, Allowed]]] = {
        "encode": lambda inputs, what, **way: {"codes": encode_allowed(inputs["x"], what, **way)},
        "decode": lambda inputs, what, **way: {"values": decode_allowed(inputs["codes"], what, **way)},
        "gemm": gemm_allowed,
        "grouped": grouped_allowed,
        "linear": linear_allowed,
        "attention": attention_allowed,
        "optimizer": optimizer_allowed,
    }
    return made[kind](inputs, what, **way)


def result_format(kind: str, name: str, what: Values) -> Format | None:
    """The format of a result that is codes."""
    if (kind, name) == ("encode", "codes"):
        return get_format(what.get("format", "e4m3"))
    spec = cast_spec(what) if kind == "cast" else None
    if spec is None:
        return None
    return spec.format if name == "data" else E8M0 if spec.scale_format.startswith("e8m0") else None
