"""What the adapters of this folder stand on: codes by whole numbers, blocks by padding, scales by the bits of FP64. No fault lies here.

    tensorwise        one scale in FP32: 448 / amax (gradients: E5M2, 57344 / amax); its inverse is stored
    rowwise           a power of two for each row
    blockwise         1x128 (weights 128x128), a power of two;  blockwise_fp32: the same in FP32
    mxfp8, mxfp4      1x32, a power of two in a byte, rounded up
    nvfp4             1x16 (weights 16x16): an E4M3 number for the block times one number of the tensor; their product is stored in FP32

Infinities saturate. An amax of 0, NaN or infinity gives the scale 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from ottava.prove import adapter
from torch import Tensor
from torch.nn import functional as F

__all__ = ["E2M1", "E4M3", "E5M2", "F64", "Cut", "Form", "adapter", "blocks_of", "byte_scale", "codes_of", "cut_of", "each", "entry", "exponents", "gemm64", "groups", "inverse32", "leading",
           "means", "nv_scales", "peaks", "put", "quantize", "round_to", "seen", "settle", "step_up", "two"]

F64 = torch.float64


@dataclass(frozen=True)
class Form:
    """Bits of the mantissa, exponent of the smallest normal number, last code of a number, code of NaN, bit of the sign, largest number, dtype."""

    bits: int
    low: int
    last: int
    nan: int
    sign: int
    top: float
    dtype: torch.dtype


E4M3 = Form(3, -6, 126, 127, 7, 448.0, torch.float8_e4m3fn)
E5M2 = Form(2, -14, 123, 127, 7, 57344.0, torch.float8_e5m2)
E2M1 = Form(1, 0, 7, 7, 3, 6.0, torch.uint8)


def two(e: Tensor) -> Tensor:
    """2**e in FP64 for e from -1022 to 1023."""
    return ((e.long() + 1023) << 52).view(F64)


def exponents(x: Tensor) -> Tensor:
    """The exponent of each FP64 number, from its bits."""
    return ((x.contiguous().view(torch.int64) >> 52) & 2047) - 1023


def codes_of(x: Tensor, form: Form, whole: Callable[[Tensor], Tensor] = torch.round) -> Tensor:
    """Codes as bytes: the number is counted in steps of its binade, and `whole` makes the count whole."""
    x = x.detach().to(F64).contiguous()
    size = x.abs().nan_to_num(0.0).clamp(max=form.top)
    e = exponents(size).clamp(min=form.low)
    code = ((e - form.low) << form.bits) + whole(size * two(form.bits - e)).long()
    code = torch.where(x.isnan(), form.nan, code.clamp(max=form.last))
    return (code + (torch.signbit(x).long() << form.sign)).to(torch.uint8)


def _row(form: Form) -> Tensor:
    size = torch.arange(1 << form.sign)
    field, rest = size >> form.bits, size & ((1 << form.bits) - 1)
    number = torch.where(field > 0, rest + (1 << form.bits), rest).double() * two(field.clamp(min=1) - 1 + form.low - form.bits)
    if form is E5M2:
        number = torch.where(size == 124, math.inf, number)
    number = torch.where((size > form.last) & (number < math.inf), math.nan, number)
    row = torch.cat([number, -number])
    return row.repeat(256 // len(row))


ROWS = {form.dtype: _row(form) for form in (E4M3, E5M2, E2M1)}


def means(codes: Tensor, form: Form | None = None) -> Tensor:
    """What codes mean, FP64."""
    return ROWS[form.dtype if form else codes.dtype][codes.view(torch.uint8).long()]


def round_to(x: Tensor, form: Form) -> Tensor:
    """The nearest number of the format, FP64."""
    return means(codes_of(x, form), form)


# --- blocks ---


@dataclass(frozen=True)
class Cut:
    """Format, rows and columns of a block (0: all), and how its scale is made: fp32, pow2, byte, nv."""

    form: Form
    rows: int
    cols: int
    how: str


def cut_of(recipe: str, role: str = "x") -> Cut:
    """How a recipe casts x, a weight or a gradient."""
    tall = role == "weight"
    if recipe == "tensorwise":
        return Cut(E5M2 if role == "grad" else E4M3, 0, 0, "fp32")
    if recipe == "rowwise":
        return Cut(E4M3, 1, 0, "pow2")
    if recipe in ("blockwise", "blockwise_fp32"):
        return Cut(E4M3, 128 if tall else 1, 128, "pow2" if recipe == "blockwise" else "fp32")
    if recipe == "nvfp4":
        return Cut(E2M1, 16 if tall else 1, 16, "nv")
    return Cut(E4M3 if recipe == "mxfp8" else E2M1, 1, 32, "byte")


def lattice(shape: tuple[int, ...], cut: Cut) -> tuple[int, int]:
    """Blocks down and across."""
    return (-(-shape[0] // cut.rows) if cut.rows else 1), (-(-shape[1] // cut.cols) if cut.cols else 1)


def blocks_of(x: Tensor, cut: Cut) -> Tensor:
    """x in FP64 as (down, rows, across, columns), zeros behind its ends."""
    m, k = x.shape
    down, across = lattice((m, k), cut)
    rows, cols = cut.rows or m, cut.cols or k
    return F.pad(x.detach().to(F64), (0, across * cols - k, 0, down * rows - m)).reshape(down, rows, across, cols)


def peaks(x: Tensor, cut: Cut) -> Tensor:
    """The largest magnitude of each block."""
    b = blocks_of(x, cut).abs()
    return b.amax((1, 3)) if b.numel() else torch.zeros(b.shape[0], b.shape[2], dtype=F64)


def entry(grid: Tensor, shape: tuple[int, ...], cut: Cut) -> Tensor:
    """For each element the entry of its block."""
    i, j = torch.arange(shape[0]), torch.arange(shape[1])
    i, j = i // (cut.rows or max(shape[0], 1)), j // (cut.cols or max(shape[1], 1))
    return grid[i[:, None], j[None, :]] if shape[0] and shape[1] else grid.new_zeros(tuple(shape))


# --- scales ---


def seen(amax: Tensor) -> Tensor:
    """Whether an amax gives a scale."""
    return (amax > 0) & (amax < math.inf)


def step_up(amax: Tensor, top: float) -> Tensor:
    """The smallest e from -127 on with amax <= top * 2**e; 0 where there is no scale."""
    size = torch.where(seen(amax), amax, top)
    e = exponents(size) - (math.frexp(top)[1] - 1)
    e = e + (size > top * two(e.clamp(-1000, 1000))).long()
    return torch.where(seen(amax), e.clamp(-127, 127), 0)


def inverse32(amax: Tensor, top: float) -> Tensor:
    """top / amax in FP32; 1 where there is no scale."""
    size = torch.where(seen(amax), amax, top).float()
    return torch.div(torch.full_like(size, top), size).clamp(max=torch.finfo(torch.float32).max)


def byte_scale(e: Tensor, amax: Tensor, form: Form) -> Tensor:
    """Bytes of E8M0. E2M1 has no NaN, so a block that is not finite has the byte 255 there."""
    byte = (e + 127).to(torch.uint8)
    return torch.where(amax.isfinite(), byte, 255).to(torch.uint8) if form is E2M1 else byte


def nv_scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 numbers of the blocks, number of the tensor) in FP64; the tensor's comes from the finite blocks."""
    finite = torch.where(amax.isfinite(), amax, 0.0)
    top = finite.max() if finite.numel() else torch.zeros((), dtype=F64)
    top = torch.where(top > 0, top, 1.0)
    return round_to(amax * 448 / top, E4M3), top / 2688


def quantize(x: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """(codes as bytes, scales as they are stored, one a block)."""
    amax = peaks(x, cut)
    shape = tuple(x.shape)
    if cut.how == "fp32":
        m = inverse32(amax, cut.form.top)
        return codes_of(x.float() * entry(m, shape, cut), cut.form), 1 / m
    if cut.how == "nv":
        small, whole = nv_scales(amax)
        kept = (small * whole).float()
        return codes_of(divide(x, entry(kept.double(), shape, cut)), cut.form), torch.where(amax.isfinite(), kept, math.nan)
    e = step_up(amax, cut.form.top)
    codes = codes_of(x.to(F64) * entry(two(-e), shape, cut), cut.form)
    return codes, two(e).float() if cut.how == "pow2" else byte_scale(e, amax, cut.form)


def divide(x: Tensor, by: Tensor) -> Tensor:
    """x / by, and zeros with x's sign where a block has the scale 0."""
    x = x.to(F64)
    return torch.where(by > 0, x / by, 0.0).copysign(x)


def put(data: Tensor, scale_inv: Tensor, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Both results into their buffers."""
    data.view(torch.uint8).copy_(codes)
    (scale_inv if scales.dtype == torch.float32 else scale_inv.view(torch.uint8)).copy_(scales.reshape(scale_inv.shape))
    return data, scale_inv


# --- products ---


def plain(scale: Tensor) -> Tensor:
    """Stored scales in FP64; the byte 255 is NaN."""
    if scale.dtype == torch.float32:
        return scale.double()
    byte = scale.view(torch.uint8).long()
    return torch.where(byte == 255, math.nan, two(byte - 127))


def each(scale: Tensor, shape: tuple[int, ...], cut: Cut) -> Tensor:
    """The scale of each element, FP64."""
    return entry(plain(scale).reshape(lattice(tuple(shape), cut)), tuple(shape), cut)


def settle(data: Tensor, scale: Tensor, recipe: str, role: str = "x") -> Tensor:
    """What an operand means, FP64."""
    return means(data) * each(scale, tuple(data.shape), cut_of(recipe, role))


def gemm64(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, recipe: str) -> Tensor:
    """The product of two operands, FP64."""
    return settle(a, sa, recipe) @ settle(b, sb, recipe, "weight").mT


def groups(ends: Tensor) -> list[tuple[int, int, int]]:
    """(group, first row, end)."""
    found, start = [], 0
    for g, end in enumerate(ends.tolist()):
        found.append((g, start, end))
        start = end
    return found


def leading(x: Tensor) -> Tensor:
    """x (..., K) as (rows, K)."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
