"""What codes may be: neighbours in the table of a format, so that ties, truncation and saturation are indices of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.numerics.formats import FORMATS, Format, get_format
from ottava.numerics.rounding import code_values, decode, encode

U32 = 2.0**-24
SCALE_SLACK = 4 * U32
"""max / amax, its inverse, and the product with x: three roundings, and one for a scale made from 1 / max."""
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
Values = Mapping[str, Any]
EIGHT = tuple(fmt for fmt in FORMATS.values() if fmt.bits <= 8 and fmt.name != "E8M0")
"""The formats of numbers in at most eight bits."""


def dtype_of(what: Values, name: str) -> torch.dtype:
    """The dtype that a fact names; BF16 if none does."""
    return DTYPES.get(str(what.get(name)).removeprefix("torch."), torch.bfloat16)


class Allowed(NamedTuple):
    """What one result may be, element by element."""

    low: Tensor
    """float64; NaN asks for NaN."""
    high: Tensor
    """float64: the largest number allowed."""
    dtypes: tuple[torch.dtype, ...]
    """The result's."""
    also: tuple[Tensor | float, ...] = ()
    """Other numbers that are right; NaN among them means that NaN is right."""
    free: Tensor | None = None
    """Where any number is right."""
    signed: bool = False
    """Whether the sign of a zero counts."""
    exact: Tensor | None = None
    """The numbers of ottava's own reference."""
    drawn: Tensor | None = None
    """Stochastic rounding: the number whose mean the results are, float64; NaN: not told."""
    center: Tensor | None = None
    """A right number, where the lower end is none."""

    @property
    def right(self) -> Tensor:
        """Right numbers, float64."""
        return next(x for x in (self.center, self.exact, self.low) if x is not None)

    def wrong(self, got: Tensor) -> Tensor:
        """Where a result (float64) is not allowed."""
        good = ((got >= self.low) & (got <= self.high)) | (got.isnan() & self.low.isnan())
        if self.signed:
            good &= (got != 0) | (got.signbit() == self.low.signbit()) | (self.low != 0)
        for other in self.also:
            value = torch.as_tensor(other, dtype=torch.float64, device=got.device)
            good |= (got == value) | (got.isnan() & value.isnan())
        if self.drawn is not None:
            good &= ~_biased(got, self.drawn, self.low, self.high)
        return ~(good if self.free is None else good | self.free)


_SURE = math.log(2 / 1e-12)
"""One run in 10^12 of a right kernel is called biased."""


def _biased(got: Tensor, mean: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The numbers of a sign that round up, or down, too often: Bernstein's bound on a sum of coins, so no repeats.

    Each number lies between two neighbours and takes the upper one with probability (mean - low) / (high - low).
    """
    step = high - low
    told = (step > 0) & mean.isfinite() & (got >= low) & (got <= high)
    p = torch.where(told, (mean - low) / torch.where(told, step, 1.0), 0.0).clamp(0, 1)
    off = torch.where(told, (got - low) / torch.where(told, step, 1.0) - p, 0.0)
    biased = torch.zeros_like(told)
    for side in (told & (mean > 0), told & (mean < 0)):
        spread = float((p * (1 - p))[side].sum())
        bound = _SURE / 3 + math.sqrt(_SURE**2 / 9 + 2 * _SURE * spread)
        # a scale that is off by some units of FP32 moves every mean
        slack = float((mean.abs() / torch.where(told, step, 1.0))[side].sum()) * SCALE_SLACK
        if abs(float(off[side].sum())) > bound + slack:
            biased |= side
    return biased


def numbers_of(result: Tensor, fmt: Format | None) -> Tensor:
    """A result in float64: codes (of a format, if bytes) as their values, in memory of its own."""
    if fmt is not None and result.dtype == torch.uint8:
        values = table(fmt, result.device)[result.to(torch.int64) & ((1 << fmt.bits) - 1)]
        return torch.where(result.to(torch.int64) >> fmt.bits == 0, values, math.nan)  # no code
    for known in FORMATS.values():
        if known.dtype == result.dtype and known.bits == 8:
            return decode(result, known).double()
    return result.detach().double()


def table(fmt: Format, device: torch.device) -> Tensor:
    """The value of each code, float64."""
    return code_values(fmt).double().to(device)


def on_grid(
    x: Tensor,
    fmt: Format,
    rounding: str = "nearest",
    overflow: str = "saturate",
    *,
    top: float | None = None,
    flush: bool = False,
    lost_nan: float | None = None,
    plain_zero: bool = False,
    before: torch.dtype | int | None = None,
    carry: str = "",
) -> Tensor:
    """x on the grid of a format, float64, found in the table of its codes.

    Args:
        rounding: nearest, ties_away, ties_up, truncate, away, up, down.
        overflow: saturate, nan or inf.
        top: the largest number kept, where another one than the format's.
        flush: subnormal results become zero.
        lost_nan: the number that stands for NaN.
        plain_zero: -0 becomes 0.
        before: a type that x is rounded to first, or the number of significant bits.
        carry: of a mantissa that rounds up past its end: "lost" leaves the exponent as it is, "held" the mantissa, too.
    """
    x = significant(x, before) if isinstance(before, int) else (x if before is None else x.to(before)).double()
    size = x.abs().nan_to_num(0.0, posinf=math.inf)
    values = table(fmt, x.device)[: 1 << (fmt.bits - int(fmt.signed))]
    values = values[values.isfinite()]
    beyond = 2 * fmt.clip - fmt.max
    grid = torch.cat([values, values.new_tensor([beyond, math.inf])])
    index = torch.searchsorted(grid, size.contiguous(), right=True).sub_(1).clamp_(0, len(values))
    below, above = grid[index], grid[(index + 1).clamp_(max=len(values))]
    middle = (below + above) / 2
    negative = x.signbit()
    if rounding == "nearest" and fmt.mantissa_bits == 0:
        rounding = "ties_away"  # of the significands 1 and 2 the even one is 2
    up = {
        "nearest": (size > middle) | ((size == middle) & (index % 2 == 1)),
        "ties_away": size >= middle,
        "ties_down": size > middle,
        "ties_up": (size > middle) | ((size == middle) & ~negative),
        "truncate": torch.zeros_like(negative),
        "away": size > below,
        "up": (size > below) & ~negative,
        "down": (size > below) & negative,
    }[rounding]
    index = torch.where(up & (size > below), index + 1, index).clamp_(max=len(values))
    if carry:
        past = up & (size > below) & (index % (1 << fmt.mantissa_bits) == 0)
        index = torch.where(past, index - (1 << fmt.mantissa_bits if carry == "lost" else 1), index).clamp_(min=0)
    index = torch.where(size >= beyond, len(values), index)
    end = {"saturate": fmt.max, "nan": math.nan, "inf": math.inf}[overflow]
    y = torch.where(index >= len(values), end, grid[index.clamp(max=len(values) - 1)])
    if rounding in ("truncate", "down", "up") and overflow == "saturate":
        y = torch.where(size >= fmt.max, end, y)
    if top is not None:
        y = torch.where(y > top, top, y)
    if flush:
        y = torch.where(y < fmt.min_normal, 0.0, y)
    y = torch.where(x.isinf() & (overflow != "saturate"), math.inf if fmt.has_infinity else math.nan, y)
    y = torch.where(negative, -y, y) if fmt.signed else y
    y = torch.where(x.isnan(), math.nan if lost_nan is None else lost_nan, y)
    return y + 0.0 if plain_zero or not fmt.has_negative_zero else y


def significant(x: Tensor, bits: int) -> Tensor:
    """x rounded to that many significant bits, ties to even, float64; cut off to them if they are negative."""
    mantissa, power = torch.frexp(x.double())
    whole = mantissa * 2.0 ** abs(bits)
    return torch.ldexp(whole.round() if bits > 0 else whole.trunc(), power - abs(bits))


def in_bad_tile(bad: Tensor, size: int) -> Tensor:
    """Of each row, whether one of its tile of `size` rows is bad."""
    tiles = torch.nn.functional.pad(bad, (0, -len(bad) % size)).view(-1, size).any(1)
    return tiles.repeat_interleave(size)[: len(bad)]


def encode_allowed(x: Tensor, what: Values, **way: Any) -> Allowed:
    """The codes of x, by their values."""
    fmt, drawn = get_format(what.get("format", "e4m3")), None
    rounding, overflow = str(what.get("rounding", "nearest")), str(what.get("overflow", "saturate"))
    carried: tuple[Tensor | float, ...] = ()
    if rounding == "stochastic" and "rounding" not in way:
        ends = ("down", "up") if "carry" not in way else ("truncate", "away")
        low, high = (on_grid(x, fmt, end, overflow, **way) for end in ends)
        drawn = x.double()
        if "carry" in way:
            high, carried, drawn = low, (high,), None
    else:
        way = {"rounding": rounding.replace("_even", ""), "overflow": overflow} | way
        low = high = on_grid(x, fmt, **way)
    also = carried
    infinite = x.isinf()
    if bool(infinite.any()):
        # OFP8's saturation mode keeps the largest number, ottava and others show NaN: all three are in use
        end = torch.where(x > 0, fmt.max, -fmt.max).double()
        low, high = low.clone(), high.clone()
        also += (torch.where(infinite, end, low), torch.where(infinite, math.nan, low))
    free = None if fmt.has_nan else x.isnan() | infinite
    dtypes = tuple(dict.fromkeys((fmt.storage_dtype, torch.uint8)))
    return Allowed(low, high, dtypes, also, free, rounding != "stochastic" and fmt.has_negative_zero, low, drawn)


def grown_largest(x: Tensor, fmt: Format) -> Tensor:
    """Numbers of a format, its largest replaced by the next power of two."""
    return torch.where(x.abs() == fmt.max, torch.copysign(x.new_tensor(2.0 ** math.ceil(math.log2(fmt.max))), x), x)


def decode_allowed(
    codes: Tensor,
    what: Values,
    *,
    fmt: Format | None = None,
    flush: bool = False,
    lost_nan: float | None = None,
    finite: bool = False,
    normal: bool = False,
    zero: bool = False,
    integers: bool = False,
    grown: bool = False,
    halved: bool = False,
    plain_zero: bool = False,
) -> Allowed:
    """The values of codes; finite: codes of infinity and NaN are read as numbers of one more binade.

    normal: codes of subnormal numbers are read as normal ones; zero: that of zero, too. integers: codes are numbers in
    two's complement. grown: the largest number is the next power of two. halved: subnormal numbers are.
    plain_zero: -0 becomes 0.
    """
    fmt = fmt or get_format(what.get("format", "e4m3"))
    held = codes.view(torch.uint8).to(torch.int64) & ((1 << fmt.bits) - 1)
    y = table(fmt, codes.device)[held]
    if finite or normal or lost_nan is not None:
        mantissa = held & ((1 << fmt.mantissa_bits) - 1)
        power = (held >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
        beyond = torch.ldexp(1 + mantissa.double() * fmt.eps, power - fmt.bias)
        beyond = torch.where((held >> (fmt.bits - 1)) == 1, -beyond, beyond) if fmt.signed else beyond
        beyond = beyond if lost_nan is None else torch.full_like(y, lost_nan)
        small = (power == 0) & ((mantissa > 0) | zero)
        y = torch.where(small if normal else y.isnan() if lost_nan is not None else ~y.isfinite(), beyond, y)
    y = grown_largest(y, fmt) if grown else y
    y = (held - (held >> (fmt.bits - 1) << fmt.bits)).double() if integers else y
    if flush:
        y = torch.where(y.abs() < fmt.min_normal, 0.0 * y, y)
    y = torch.where(y.abs() < fmt.min_normal, y / 2, y) if halved else y
    y = y + 0.0 if plain_zero else y
    return Allowed(y, y, (torch.float32, torch.bfloat16), signed=True, exact=y)


# --- what a kernel reads that reads wrongly ---------------------------------------------------------------------------


def bytewise(change: Callable[[Tensor], Tensor | None], x: Tensor) -> Tensor | None:
    """A change of where codes lie."""
    if x.dtype.itemsize != 1:
        return change(x)
    new = change(x.view(torch.uint8))
    return None if new is None else new.contiguous().view(x.dtype)


def in_order(x: Tensor, order: Callable[[int], list[int]]) -> Tensor | None:
    """The columns in another order; number n of n is zero."""
    if x.shape[-1] < 2:
        return None
    return torch.cat([x, torch.zeros_like(x[..., :1])], -1)[..., order(x.shape[-1])]


def fp4_as(x: Tensor, fmt: Format, step: float) -> Tensor:
    """Numbers of E2M1 whose codes are read as whole multiples of a step."""
    codes = written_codes(x, fmt).double()
    return torch.copysign(codes % 8 * step, x) if fmt.name == "E2M1" else x


def by_memory(x: Tensor) -> Tensor | None:
    """What a kernel reads that takes a tensor for contiguous."""
    if x.is_contiguous() or 0 in x.stride():
        return None
    return torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())


def written_codes(x: Tensor, fmt: Format) -> Tensor:
    """Codes of x as bytes."""
    return encode(on_grid(x, fmt).float(), fmt).view(torch.uint8)


def run_on(v: Tensor, size: int) -> Tensor:
    """Rows that end at a multiple of `size`, with what lies behind them in memory."""
    more = -v.shape[-1] % size
    return torch.nn.functional.pad(v.reshape(-1), (0, more)).unfold(0, v.shape[-1] + more, v.shape[-1])


def tiled(scale: Tensor, back: bool) -> Tensor | None:
    """Scales in tiles of 128 x 4, as a tensor core of Blackwell reads them; back: out of tiles, row by row."""
    if scale.dim() < 2 or scale.shape[-2] % 128 or scale.shape[-1] % 4 or not scale.numel():
        return None
    (*lead, rows, cols) = scale.shape
    cut = (rows // 128, cols // 4, 32, 4, 4) if back else (rows // 128, 4, 32, cols // 4, 4)
    return scale.reshape(*lead, *cut).transpose(-4, -2).reshape(scale.shape)


def without_tail(x: Tensor, size: int) -> Tensor | None:
    """Zero bytes beyond the last whole `size` columns; None: there are none."""
    whole = x.shape[-1] // size * size
    if whole == x.shape[-1]:
        return None
    y = x.view(torch.uint8).clone()
    y[..., whole:] = 0
    return y.view(x.dtype)


def without_subnormals(codes: Tensor) -> Tensor | None:
    """Zeros in place of subnormal numbers; None: these are no codes."""
    fmt = next((fmt for fmt in EIGHT if fmt.dtype == codes.dtype), None)
    if fmt is None:
        return None
    held = codes.view(torch.uint8)
    return torch.where(numbers_of(codes, fmt).abs() < fmt.min_normal, held & 0x80, held).view(codes.dtype)


def ends_of(k: int, count: int = 0, size: int = 0, low: bool = False) -> list[int]:
    """The ends of parts of K: so many of them (low: each begins at K * i // count), or of that size each."""
    width = size or max(1, -(-k // count))
    return [k * i // count for i in range(1, count + 1)] if low else [*range(width, k, width), k]


def law_of(fmt: Format, cases: Sequence[Any]) -> tuple[str, str] | None:
    """One number that all numbers between two magnitudes become: (a name, a sentence); of cases of a code."""
    rows = []
    for one in cases:
        if len(one.got) > 1:  # a cast, whose codes hang on their scale
            return None
        ((name, got),) = one.got.items()
        right, wrong = one.allowed[name].right, one.wrong.get(name, torch.zeros_like(got))
        x = one.case.inputs.get("x", right)
        rows.append(torch.stack([t.double().abs().flatten() for t in (x, right, got, wrong * x.isfinite())]))
    x, right, got, wrong = torch.cat(rows, 1)
    bad = wrong > 0
    if not bool(bad.any()) or bool(((x >= x[bad].min()) & (x <= x[bad].max()) & ~bad).any()):
        return None
    (low, high), least, values, small = x[bad].aminmax(), float(right[bad].min()), got[bad], fmt.min_subnormal
    if bool((values == 0).all()) and small / 2 <= low and high <= small:
        said = f"Numbers from half of the smallest number on, {small / 2:g}, become zero, not the smallest"
        return "smallest number flushed", said
    if least >= fmt.max or ((finite := bool(values.isfinite().any())) and not bool((values == fmt.max).all())):
        return None
    end = f"{fmt.max:g}, the largest: it saturates too early" if finite else "infinity or NaN: it ends too early"
    return "ends too early", f"Numbers whose results are {least:g} or more become {end}"


_SPREADS = tuple((a / 4, a / 4 + length) for a in range(-4, 5) for length in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1, 2))
"""Where random numbers may begin and end, in steps of the format."""


def noise_of(fmt: Format, cases: Sequence[Any]) -> tuple[str, str] | None:
    """Which random share of a step is added before the rest is cut off: (a name, a sentence); right is 0 to 1.

    A number a share f behind its code goes k codes further if the noise lies from k - f to k + 1 - f.
    """
    moved, behind, negative = [], [], []
    for one in cases:
        for name, allowed in one.allowed.items():
            if allowed.drawn is None:
                continue
            x, got = allowed.drawn, one.got[name]
            size = x.abs()
            low, high = on_grid(size, fmt, "truncate"), on_grid(size, fmt, "away")
            known = (high > low) & (size < fmt.max) & got.isfinite() & ((got == 0) | (got.signbit() == x.signbit()))
            codes = (written_codes(y.float()[known], fmt).int() for y in (got.abs(), low))
            moved.append(next(codes) - next(codes))
            behind.append(((size - low) / (high - low))[known])
            negative.append(x[known] < 0)
    if not moved or sum(len(part) for part in moved) < 200:
        return None
    steps, share, below = (torch.cat(parts) for parts in (moved, behind, negative))
    spreads = []
    for side in (below, ~below):
        k, f = steps[side], share[side]

        def odds(begin: float, end: float, k: Tensor = k, f: Tensor = f) -> Tensor:
            reach = (k + 1 - f).clamp(max=end) - (k - f).clamp(min=begin)
            return (reach / (end - begin)).clamp(min=1e-9).log()

        best = max(_SPREADS, key=lambda spread: float(odds(*spread).sum())) if len(k) else (0.0, 1.0)
        if len(k) and float((odds(*best) < -20).double().mean()) > 0.001:
            return None  # no spread gives these
        spreads.append(best)
    if set(spreads) == {(0.0, 1.0)}:
        return None
    spans = [f"from {begin:g} to {end:g}" for begin, end in dict.fromkeys(spreads)]
    text = f"{spans[0]} of a step" if len(spans) == 1 else f"{spans[0]} of a step below zero, {spans[1]} above it"
    return (
        "random share of another size",
        f"What random rounding adds before it cuts off reaches {text}, not from 0 to 1",
    )
