"""Right building blocks of the adapters in this folder, in plain torch.

Codes come from a table of all numbers of a format and the midpoints between them, in fp64. Scales come from frexp.
Products are summed in fp64. Nothing here calls ottava: what an adapter takes from here unchanged is right, and
`self_check.py` compares every adapter with these functions.

    tensorwise        one scale, fp32:  scale = fp32(top / amax), scale_inv = fp32(1 / scale)
    rowwise           a scale for each row, a power of two
    blockwise         1x128 (weights 128x128), a power of two;  blockwise_fp32: the same in fp32
    mxfp8, mxfp4      1x32, a power of two in a byte (E8M0), exponents rounded up

An amax of 0, infinity or NaN takes the scale 1. Infinite inputs become NaN codes. Finite ones saturate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from ottava.prove import adapter
except ImportError:  # a checkout without the kit: the mark alone

    def adapter(kind: str, **what: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Attaches nothing: public.json has kind and what of each adapter."""
        return lambda function: function


class Format(NamedTuple):
    """What a code means."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    top: float
    dtype: torch.dtype

    @property
    def sign(self) -> int:
        """The bit of the sign."""
        return 1 << (self.exponent_bits + self.mantissa_bits)


E4M3 = Format(4, 3, 7, 448.0, torch.float8_e4m3fn)
E5M2 = Format(5, 2, 15, 57344.0, torch.float8_e5m2)
E2M1 = Format(2, 1, 1, 6.0, torch.uint8)
E4M3FNUZ = Format(4, 3, 8, 240.0, torch.float8_e4m3fnuz)


def value_of(code: int, fmt: Format) -> float:
    """The number of a code without its sign, by the formula of the standard; specials are not looked at."""
    field, mantissa = code >> fmt.mantissa_bits, code & ((1 << fmt.mantissa_bits) - 1)
    fraction = mantissa / (1 << fmt.mantissa_bits)
    return math.ldexp(fraction, 1 - fmt.bias) if field == 0 else math.ldexp(1 + fraction, field - fmt.bias)


def magnitudes(fmt: Format) -> Tensor:
    """All finite magnitudes in the order of their codes, fp64."""
    numbers = [value_of(code, fmt) for code in range(fmt.sign)]
    return torch.tensor([n for n in numbers if n <= fmt.top], dtype=torch.float64)


def round_to(x: Tensor, fmt: Format, ties: str = "even") -> Tensor:
    """The codes of |x|, as int64, saturated: ties to the even code, or "away" from zero."""
    numbers, size = magnitudes(fmt).to(x.device), x.abs().to(torch.float64).nan_to_num(0.0, math.inf).contiguous()
    middles = (numbers[1:] + numbers[:-1]) / 2
    code = torch.searchsorted(middles, size)  # middles below |x|
    tie = (code < middles.numel()) & (middles[code.clamp(max=middles.numel() - 1)] == size)
    return code + (tie & ((code % 2 == 1) | (ties == "away"))).to(torch.int64)


def truncate_to(x: Tensor, fmt: Format) -> Tensor:
    """The codes of the next number toward zero."""
    size = x.abs().to(torch.float64).nan_to_num(0.0, math.inf).contiguous()
    return torch.searchsorted(magnitudes(fmt).to(x.device), size, right=True) - 1


def finish(code: Tensor, x: Tensor, fmt: Format) -> Tensor:
    """Codes of magnitudes with the signs of x, and NaN where x is not finite; in the format's dtype."""
    if fmt.dtype != torch.uint8:
        code = torch.where(x.isfinite(), code, fmt.sign - 1)
    code = code | torch.where(torch.signbit(x), fmt.sign, 0)
    return code.to(torch.uint8).view(fmt.dtype)


def encode(x: Tensor, fmt: Format) -> Tensor:
    """Right codes: to nearest even, finite numbers saturate, NaN and infinities become NaN."""
    return finish(round_to(x, fmt), x, fmt)


def table(fmt: Format, specials: bool = True) -> Tensor:
    """The numbers of all 256 codes, fp64; without specials the formula alone."""
    half = [value_of(code, fmt) for code in range(fmt.sign)]
    numbers = torch.tensor(half + [-n for n in half], dtype=torch.float64)
    if specials and fmt is E4M3:
        numbers[[0x7F, 0xFF]] = math.nan
    if specials and fmt is E5M2:
        for code in range(0x7C, 0x80):
            numbers[[code, code | 0x80]] = math.nan
        numbers[0x7C], numbers[0xFC] = math.inf, -math.inf
    if specials and fmt is E4M3FNUZ:
        numbers[0x80] = math.nan
    return numbers


def decode(codes: Tensor, fmt: Format | None = None) -> Tensor:
    """Right numbers, fp64; the format of float8 tensors is that of their dtype unless one is given."""
    if fmt is None:
        fmt = {f.dtype: f for f in (E4M3, E5M2, E2M1, E4M3FNUZ)}[codes.dtype]
    bits = codes if codes.dtype == torch.uint8 else codes.contiguous().view(torch.uint8)
    return table(fmt).to(codes.device)[bits.to(torch.int64) & (2 * fmt.sign - 1)]


# --- casts ---


class Cell(NamedTuple):
    """How a recipe casts an operand; None means the whole extent."""

    fmt: Format
    rows: int | None
    cols: int | None
    scales: str


def cell(recipe: str, operand: str = "x") -> Cell:
    """The cell of x, weight or grad."""
    fmt = E5M2 if recipe == "tensorwise" and operand == "grad" else E2M1 if recipe == "mxfp4" else E4M3
    if recipe == "tensorwise":
        return Cell(fmt, None, None, "fp32")
    if recipe == "rowwise":
        return Cell(fmt, 1, None, "pow2")
    if recipe in ("blockwise", "blockwise_fp32"):
        return Cell(fmt, 128 if operand == "weight" else 1, 128, "pow2" if recipe == "blockwise" else "fp32")
    return Cell(fmt, 1, 32, "e8m0")


def blocks(x: Tensor, how: Cell) -> Tensor:
    """x as (grid rows, rows, grid columns, columns), with zeros to whole blocks."""
    rows, cols = how.rows or max(x.shape[0], 1), how.cols or max(x.shape[1], 1)
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % cols, 0, -x.shape[0] % rows))
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // cols, cols)


def amax_of(x: Tensor, how: Cell) -> Tensor:
    """The largest magnitude of each block, fp32; NaN and infinities show, and of nothing it is 0."""
    if x.numel() == 0:
        return torch.zeros(-(-x.shape[0] // how.rows) if how.rows else 1, -(-x.shape[1] // how.cols) if how.cols else 1)
    return blocks(x.to(torch.float32).abs(), how).amax(dim=(1, 3))


def scales_of(amax: Tensor, how: Cell) -> tuple[Tensor, Tensor]:
    """(scale, scale_inv), fp32."""
    usable = (amax > 0) & amax.isfinite()
    amax = torch.where(usable, amax, 1.0)
    if how.scales == "fp32":
        scale = (torch.full_like(amax, how.fmt.top) / amax).clamp(max=torch.finfo(torch.float32).max)
        inverse = torch.ones_like(scale) / scale
    else:
        octaves = octaves_of(amax, how.fmt)
        scale, inverse = power(-octaves), power(octaves)
    return torch.where(usable, scale, 1.0), torch.where(usable, inverse, 1.0)


def octaves_of(amax: Tensor, fmt: Format) -> Tensor:
    """The smallest whole e with amax <= top * 2**e, exactly, from -127 to 127."""
    mantissa, exponent = torch.frexp(amax.to(torch.float64))
    top_mantissa, top_exponent = math.frexp(fmt.top)
    return (exponent - top_exponent + (mantissa > top_mantissa)).clamp(-127, 127)


def power(exponent: Tensor) -> Tensor:
    """2**exponent, fp32, exact."""
    return torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent).to(torch.float32)


def spread(per_block: Tensor, shape: tuple[int, int], how: Cell) -> Tensor:
    """One entry of each block for each of its elements."""
    rows, cols = how.rows or max(shape[0], 1), how.cols or max(shape[1], 1)
    return per_block.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[: shape[0], : shape[1]]


def scaled(x: Tensor, scale: Tensor, how: Cell) -> Tensor:
    """x times the scales of its blocks, in fp32; infinities become NaN where the format has one."""
    wide = x.to(torch.float32)
    wide = torch.where(wide.isinf(), math.nan, wide) if how.fmt is not E2M1 else wide
    return wide * spread(scale, (x.shape[0], x.shape[1]), how)


def codes_of(y: Tensor, fmt: Format) -> Tensor:
    """As `encode`, of products: infinite ones saturate, NaN becomes NaN (the largest number in FP4)."""
    if fmt is E2M1:
        return finish(torch.where(y.isnan(), 7, round_to(y, fmt)), y.nan_to_num(6.0), fmt)
    return encode(y.clamp(-fmt.top, fmt.top), fmt)


def layout(scale_inv: Tensor, how: Cell, amax: Tensor | None = None) -> Tensor:
    """Scales as the protocol stores them; blocks of FP4 that are not finite have NaN (255)."""
    if how.scales != "e8m0":
        return scale_inv.reshape(()) if how.rows is None else scale_inv
    byte = (torch.frexp(scale_inv.to(torch.float64))[1] - 1 + 127).to(torch.uint8)
    if how.fmt is E2M1 and amax is not None:
        byte = torch.where(amax.isfinite(), byte, torch.full_like(byte, 255))
    return byte


def cast(x: Tensor, how: Cell, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A right cast, or one with other amaxes."""
    amax = amax_of(x, how) if amax is None else amax
    scale, inverse = scales_of(amax, how)
    return codes_of(scaled(x, scale, how), how.fmt), layout(inverse, how, amax)


def uncast(data: Tensor, scale_inv: Tensor, how: Cell) -> Tensor:
    """The numbers of a cast, fp64."""
    return decode(data, how.fmt) * spread(read_scales(scale_inv), (data.shape[0], data.shape[1]), how)


def read_scales(scale_inv: Tensor) -> Tensor:
    """A grid of scales, fp64: E8M0's bytes are powers of two, and 255 is NaN."""
    if scale_inv.dtype in (torch.uint8, torch.float8_e8m0fnu):
        byte = scale_inv.view(torch.uint8)
        wide = torch.ldexp(torch.ones(byte.shape, dtype=torch.float64), byte.to(torch.int64) - 127)
        scale_inv = torch.where(byte == 255, math.nan, wide)
    return scale_inv.to(torch.float64).reshape(scale_inv.shape if scale_inv.dim() == 2 else (1, 1))


# --- products ---

OUT = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def operands(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """Both operands of a GEMM as numbers, fp64; a is cast like x, b like a weight."""
    side_a, side_b = cell(recipe, "x"), cell(recipe, "weight")
    wide_a = decode(a) * spread(read_scales(scale_a), (a.shape[0], a.shape[1]), side_a)
    return wide_a, decode(b) * spread(read_scales(scale_b), (b.shape[0], b.shape[1]), side_b)


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, recipe: str) -> Tensor:
    """The right product, fp64."""
    wide_a, wide_b = operands(a, b, scale_a, scale_b, recipe)
    return wide_a @ wide_b.t()


def short_sum(a: Tensor, b: Tensor, bits: int = 13, group: int = 32) -> Tensor:
    """Sums as Hopper's tensor cores make them, of codes as numbers (M, K) and (N, K); fp64 that holds few bits.

    32 products and the accumulator so far are cut off at 2**(E - 13), E being the largest exponent among them (of
    operands, added); their sum is cut to 13 bits behind its leading one.
    """
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    for start in range(0, a.shape[1], group):
        x, y = a[:, None, start : start + group], b[None, :, start : start + group]
        terms = torch.cat([x * y, total[:, :, None]], 2)
        exponents = torch.cat([exponent_of(x) + exponent_of(y), exponent_of(total, -1000)[:, :, None]], 2)
        largest = torch.where(terms == 0, -1000, exponents).amax(2, keepdim=True)
        grid = torch.ldexp(torch.ones(largest.shape, dtype=torch.float64), largest.clamp(min=-900) - bits)
        total = ((terms / grid).trunc() * grid).sum(2)
        step = torch.ldexp(torch.ones_like(total), exponent_of(total, -1000).clamp(min=-900) - bits)
        total = (total / step).trunc() * step
    return total


def exponent_of(x: Tensor, floor: int = -6) -> Tensor:
    """floor(log2 |x|) of each number, at least `floor` (E4M3's smallest normal exponent)."""
    return torch.where(x == 0, floor, (torch.frexp(x)[1] - 1).clamp(min=floor)).to(torch.int64)


def groups(ends: Tensor) -> list[tuple[int, int, int]]:
    """(group, first row, end) of all groups."""
    last = [0, *ends.tolist()]
    return [(g, last[g], last[g + 1]) for g in range(len(last) - 1)]


def of_group(scale: Tensor, g: int, count: int) -> Tensor:
    """The scales of group g: an entry of its own, or the one scale that all share."""
    return scale[g] if scale.dim() > 0 and scale.shape[0] == count else scale


def grouped(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, recipe: str) -> Tensor:
    """The right grouped product, fp64; rows of no group are zero."""
    y = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for g, start, end in groups(ends):
        if end > start:
            rows = rows_of(scale_a, start, end, g, recipe, b.shape[0])
            y[start:end] = product(a[start:end], b[g], rows, of_group(scale_b, g, b.shape[0]), recipe)
    return y


def rows_of(scale_a: Tensor, start: int, end: int, g: int, recipe: str, count: int) -> Tensor:
    """The scales of the rows of a group: their own, or under tensorwise the one of all or of the group."""
    if recipe == "tensorwise":
        return scale_a if scale_a.numel() == 1 else scale_a.reshape(count)[g]
    return scale_a[start:end]


# --- linear layers, attention, AdamW ---


def linear_gemm(a: Tensor, b: Tensor, side_a: Cell, side_b: Cell) -> Tensor:
    """a (M, K) @ b (N, K).T, both cast; fp64."""
    return uncast(*cast(a, side_a), side_a) @ uncast(*cast(b, side_b), side_b).t()


def linear(x: Tensor, weight: Tensor, grad: Tensor, recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """(y, dx, dw) of a linear layer whose three GEMMs cast both operands, in the dtype of x and weight."""
    rows, dy = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    side, square, back = cell(recipe), cell(recipe, "weight"), cell(recipe, "grad")
    y = linear_gemm(rows, weight, side, square).to(x.dtype).reshape(grad.shape)
    dx = linear_gemm(dy, weight.t(), back, square).to(x.dtype).reshape(x.shape)
    return y, dx, linear_gemm(dy.t(), rows.t(), back, side).to(weight.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o, dq, dk, dv) in high precision, computed in fp64 and rounded once."""
    p, factor = probabilities(q, k, causal)
    return (*(t.to(q.dtype) for t in (p @ v.double(), *backward(q, k, v, grad, p, factor))),)


def probabilities(q: Tensor, k: Tensor, causal: bool) -> tuple[Tensor, float]:
    """Softmax of the scaled scores, fp64, and the factor."""
    factor = 1 / math.sqrt(q.shape[-1])
    scores = q.double() @ k.double().transpose(-1, -2) * factor
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1), factor


def backward(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, p: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), fp64."""
    dp = grad.double() @ v.double().transpose(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * factor
    return ds @ k.double(), ds.transpose(-1, -2) @ q.double(), p.transpose(-1, -2) @ grad.double()


def adamw(
    parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8, weight_decay: float = 1e-2,
) -> None:
    """A right step in fp32, in the order of torch.optim.AdamW."""
    wide, (beta1, beta2) = grad.to(torch.float32), betas
    if not state:
        state.update(mean=torch.zeros_like(wide), square=torch.zeros_like(wide))
    weight = parameter.to(torch.float32) * (1 - lr * weight_decay)
    state["mean"].lerp_(wide, 1 - beta1)
    state["square"].mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
    root = state["square"].sqrt() / math.sqrt(1 - beta2**step)
    weight.addcdiv_(state["mean"], root + eps, value=-lr / (1 - beta1**step))
    parameter.copy_(weight)
