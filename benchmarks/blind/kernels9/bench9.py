"""Helpers of this folder: number formats, amaxes by scatter, scales, casts, and what operands mean. Nothing of ottava but the decorator.

tensorwise: one FP32 scale (gradients: E5M2). rowwise: a power of two a row. blockwise: 1 x 128, weights 128 x 128, a power of two;
blockwise_fp32: the same in FP32. mxfp8, mxfp4: 1 x 32, a power of two in a byte. nvfp4: 1 x 16, weights 16 x 16, the block's E4M3 number
times the tensor's. Infinities saturate; an amax that is 0 or not finite gives the scale 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from ottava.prove import adapter
from torch import Tensor

__all__ = ["B8", "F4", "F8", "Form", "Kind", "adapter", "emit", "fill", "flat", "form", "into", "mean", "operand", "peaks", "power", "quantize", "real", "recast", "sense", "shift", "snap", "softmax_back",
           "softmax_forward", "spread", "tiles", "usual"]

F64 = torch.float64


class Kind(NamedTuple):
    """Mantissa bits, exponent of the smallest normal number, largest number, dtype of codes."""

    bits: int
    low: int
    top: float
    dtype: torch.dtype


F8 = Kind(3, -6, 448.0, torch.float8_e4m3fn)
B8 = Kind(2, -14, 57344.0, torch.float8_e5m2)
F4 = Kind(1, 0, 6.0, torch.uint8)
STEPS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=F64)
TABLES = {torch.uint8: torch.cat([STEPS, -STEPS]).repeat(16)}
for _kind in (F8, B8):
    TABLES[_kind.dtype] = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(_kind.dtype).to(torch.float32).to(F64)


def power(e: Tensor) -> Tensor:
    """2**e, fp64."""
    return ((e.to(torch.int64) + 1023) << 52).view(F64)


def snap(x: Tensor, kind: Kind) -> Tensor:
    """The nearest number of the format, ties to even, saturating."""
    x = x.to(F64)
    size = x.abs().clamp(max=kind.top)
    step = power((torch.frexp(size.nan_to_num(0.0))[1] - 1).clamp(min=kind.low) - kind.bits)
    return ((size / step).round() * step).copysign(x)


def emit(values: Tensor, kind: Kind) -> Tensor:
    """Codes of numbers that the format has."""
    if kind.dtype != torch.uint8:
        return values.to(torch.float32).to(kind.dtype)
    place = torch.searchsorted(STEPS, values.abs().nan_to_num(0.0).contiguous())
    return (place + 8 * torch.signbit(values)).to(torch.uint8)


def sense(codes: Tensor) -> Tensor:
    """What codes mean, fp64."""
    return TABLES[codes.dtype][codes.view(torch.uint8).long()]


class Form(NamedTuple):
    """Format, rows and columns of a block (0: all), kind of scale: fp32, pow2, byte, two."""

    kind: Kind
    rows: int
    columns: int
    scale: str


def form(recipe: str, role: str = "x") -> Form:
    square = role == "weight"
    if recipe == "tensorwise":
        return Form(B8 if role == "grad" else F8, 0, 0, "fp32")
    if recipe == "rowwise":
        return Form(F8, 1, 0, "pow2")
    if recipe in ("blockwise", "blockwise_fp32"):
        return Form(F8, 128 if square else 1, 128, "pow2" if recipe == "blockwise" else "fp32")
    if recipe == "nvfp4":
        return Form(F4, 16 if square else 1, 16, "two")
    return Form(F8 if recipe == "mxfp8" else F4, 1, 32, "byte")


def tiles(shape: tuple[int, ...], f: Form) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """The block of each row and of each column, and how many there are."""
    m, k = shape
    rows, columns = f.rows or max(m, 1), f.columns or max(k, 1)
    grid = (-(-m // rows) if f.rows else 1, -(-k // columns) if f.columns else 1)
    return torch.arange(m) // rows, torch.arange(k) // columns, grid


def peaks(x: Tensor, f: Form) -> Tensor:
    """The amax of each block, fp64; NaN shows."""
    i, j, grid = tiles(x.shape, f)
    where = (i[:, None] * grid[1] + j).reshape(-1)
    sizes = x.detach().abs().to(F64).reshape(-1)
    return torch.zeros(math.prod(grid), dtype=F64).scatter_reduce(0, where, sizes, "amax").view(grid)


def spread(each: Tensor, shape: tuple[int, ...], f: Form) -> Tensor:
    """The entry of its block for each element."""
    i, j, grid = tiles(shape, f)
    return each.reshape(grid)[i][:, j] if math.prod(shape) else torch.zeros(shape, dtype=each.dtype)


def usual(peak: Tensor) -> Tensor:
    return (peak > 0) & (peak < math.inf)


def shift(peak: Tensor, top: float) -> Tensor:
    """The smallest e from -127 on with peak <= top * 2**e; 0 where there is no scale."""
    part, e = torch.frexp(torch.where(usual(peak), peak, torch.ones_like(peak)))
    own, place = math.frexp(top)
    return torch.where(usual(peak), (e - place + (part > own)).clamp(-127, 127), torch.zeros_like(e))


def factor(peak: Tensor, top: float) -> Tensor:
    """top / peak in FP32."""
    size = torch.where(usual(peak), peak, torch.full_like(peak, top)).to(torch.float32)
    return (torch.full_like(size, top) / size).clamp(max=torch.finfo(torch.float32).max)


def fill(e: Tensor, peak: Tensor, f: Form) -> Tensor:
    """Exponents as they are stored."""
    if f.scale == "pow2":
        return power(e).to(torch.float32)
    byte = (e + 127).to(torch.uint8)
    return torch.where(peak.isfinite(), byte, torch.full_like(byte, 255)) if f.kind is F4 else byte


def quantize(x: Tensor, f: Form, peak: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(numbers of the format, fp64; scales as they are stored, one a block)."""
    x = x.detach()
    peak = peaks(x, f) if peak is None else peak
    if f.scale == "two":
        finite = torch.where(peak.isfinite(), peak, torch.zeros_like(peak))
        top = finite.max() if finite.numel() else finite.sum()
        top = torch.where(top > 0, top, torch.ones_like(top))
        stored = (snap(peak * 448 / top, F8) * (top / 2688)).to(torch.float32)
        per, wide = spread(stored.to(F64), x.shape, f), x.to(F64)
        y = torch.where(per > 0, wide / per, torch.zeros_like(wide)).copysign(wide)
        return snap(y, f.kind), torch.where(peak.isfinite(), stored, torch.full_like(stored, math.nan))
    if f.scale == "fp32":
        by = factor(peak, f.kind.top)
        return snap(x.to(torch.float32) * spread(by, x.shape, f), f.kind), 1 / by
    e = shift(peak, f.kind.top)
    return snap(x.to(F64) * spread(power(-e), x.shape, f), f.kind), fill(e, peak, f)


def into(data: Tensor, scale_inv: Tensor, codes: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Both results into their buffers."""
    data.view(torch.uint8).copy_(codes.view(torch.uint8))
    (scale_inv if stored.dtype == torch.float32 else scale_inv.view(torch.uint8)).copy_(stored.reshape(scale_inv.shape))
    return data, scale_inv


def real(scale: Tensor) -> Tensor:
    """Scales in fp64; the byte 255 is NaN."""
    if scale.dtype == torch.float32:
        return scale.to(F64)
    byte = scale.view(torch.uint8).to(torch.int64)
    return torch.where(byte == 255, torch.full(byte.shape, math.nan, dtype=F64), power(byte - 127))


def operand(data: Tensor, scale: Tensor, recipe: str, role: str = "x") -> Tensor:
    """What an operand means, fp64."""
    return sense(data) * spread(real(scale), data.shape, form(recipe, role))


def mean(values: Tensor, stored: Tensor, f: Form) -> Tensor:
    return values * spread(real(stored), values.shape, f)


def recast(x: Tensor, recipe: str, role: str = "x") -> Tensor:
    """x as its cast leaves it, fp64."""
    f = form(recipe, role)
    return mean(*quantize(x, f), f)


def flat(x: Tensor) -> Tensor:
    """(..., K) as (rows, K)."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def softmax_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(probabilities, o), fp64."""
    s = q.to(F64) @ k.to(F64).mT / math.sqrt(max(q.shape[-1], 1))
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    p = s.softmax(-1)
    return p, p @ v.to(F64)


def softmax_back(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, p: Tensor, o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), fp64."""
    g = grad.to(F64)
    ds = p * (g @ v.to(F64).mT - (g * o).sum(-1, keepdim=True)) / math.sqrt(max(q.shape[-1], 1))
    return ds @ k.to(F64), ds.mT @ q.to(F64), p.mT @ g
