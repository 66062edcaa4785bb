"""What the adapters of this folder stand on: formats, casts by padded cells, scales by frexp, and what codes mean by tables.

    tensorwise        one scale in fp32: 448 / amax (gradients: E5M2, 57344 / amax); its inverse is stored
    rowwise           a power of two for each row
    blockwise         1x128 (weights 128x128), a power of two;  blockwise_fp32: the same in fp32
    mxfp8, mxfp4      1x32, a power of two in a byte, rounded up
    nvfp4             1x16 (weights 16x16): an E4M3 number for the block times one number of the tensor; their product is stored in fp32

Infinities saturate. An amax of 0, NaN or infinity gives the scale 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from ottava.prove import adapter
from torch import Tensor

__all__ = ["E2M1", "E4M3", "E5M2", "FP32_MAX", "Format", "Plan", "adapter", "amax_of", "back", "cells", "deliver", "exponent", "factors", "forward", "grid", "multiplier", "nearest",
           "pack", "plan", "pow2", "quantize", "real", "recast", "rows_of", "spans", "spread", "store", "unpack", "usable", "value"]

FP32_MAX = torch.finfo(torch.float32).max


class Format(NamedTuple):
    """Bits of the mantissa, exponent of the smallest normal number, largest number, dtype of the codes."""

    mantissa: int
    low: int
    top: float
    dtype: torch.dtype


E4M3 = Format(3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = Format(2, -14, 57344.0, torch.float8_e5m2)
E2M1 = Format(1, 0, 6.0, torch.uint8)
LADDER = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
ALL = torch.arange(256, dtype=torch.int32).to(torch.uint8)
MEANING = {torch.uint8: torch.cat([LADDER, -LADDER]).repeat(16), **{t: ALL.view(t).to(torch.float32).to(torch.float64) for t in (E4M3.dtype, E5M2.dtype)}}


def pow2(e: Tensor) -> Tensor:
    """2**e in fp64, by its bits."""
    return ((e.to(torch.int64) + 1023) << 52).view(torch.float64)


def nearest(x: Tensor, form: Format) -> Tensor:
    """The nearest number of the format in fp64: ties to even, saturating, NaN stays."""
    x = x.to(torch.float64)
    size = x.abs().clamp(max=form.top)
    e = torch.frexp(size.nan_to_num(0.0))[1] - 1
    step = pow2(e.clamp(min=form.low) - form.mantissa)
    return (torch.round(size / step) * step).copysign(x)


def pack(values: Tensor, form: Format) -> Tensor:
    """Codes of numbers that the format has."""
    if form is not E2M1:
        return values.to(torch.float32).to(form.dtype)
    rung = torch.bucketize(values.abs().nan_to_num(0.0).contiguous(), LADDER)
    return rung.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def unpack(data: Tensor) -> Tensor:
    """What codes mean, fp64."""
    return MEANING[data.dtype][data.view(torch.uint8).long()]


# --- blocks and scales ---


class Plan(NamedTuple):
    """Format, rows and columns of a block (0: all of them), kind of the scales: fp32, pow2, byte, nv."""

    form: Format
    rows: int
    columns: int
    scale: str


def plan(recipe: str, role: str = "x") -> Plan:
    """How a recipe casts x, a weight or a gradient."""
    square = role == "weight"
    return {
        "tensorwise": Plan(E5M2 if role == "grad" else E4M3, 0, 0, "fp32"),
        "rowwise": Plan(E4M3, 1, 0, "pow2"),
        "blockwise": Plan(E4M3, 128 if square else 1, 128, "pow2"),
        "blockwise_fp32": Plan(E4M3, 128 if square else 1, 128, "fp32"),
        "mxfp8": Plan(E4M3, 1, 32, "byte"),
        "mxfp4": Plan(E2M1, 1, 32, "byte"),
        "nvfp4": Plan(E2M1, 16 if square else 1, 16, "nv"),
    }[recipe]


def grid(shape: tuple[int, ...], p: Plan) -> tuple[int, int]:
    """Blocks down and across."""
    return (-(-shape[0] // p.rows) if p.rows else 1, -(-shape[1] // p.columns) if p.columns else 1)


def cells(x: Tensor, p: Plan) -> Tensor:
    """x in fp64 as (down, rows, across, columns), zeros behind its ends."""
    (m, k), (down, across) = x.shape, grid(x.shape, p)
    rows, columns = p.rows or m, p.columns or k
    padded = torch.zeros(down * rows, across * columns, dtype=torch.float64)
    padded[:m, :k] = x.detach().to(torch.float64)
    return padded.view(down, rows, across, columns)


def amax_of(x: Tensor, p: Plan) -> Tensor:
    """The amax of each block; NaN shows."""
    blocks = cells(x, p).abs()
    return blocks.amax((1, 3)) if blocks.numel() else torch.zeros(grid(x.shape, p), dtype=torch.float64)


def spread(each: Tensor, shape: tuple[int, ...], p: Plan) -> Tensor:
    """The entry of its block for each element."""
    m, k = shape
    tall = each.repeat_interleave(p.rows or m, 0)[:m]
    return tall.repeat_interleave(p.columns or k, 1)[:, :k]


def usable(amax: Tensor) -> Tensor:
    """Where an amax gives a scale."""
    return (amax > 0) & (amax < math.inf)


def exponent(amax: Tensor, top: float) -> Tensor:
    """The smallest e from -127 on with amax <= top * 2**e; 0 where there is no scale."""
    part, e = torch.frexp(torch.where(usable(amax), amax, torch.ones_like(amax)))
    top_part, top_e = math.frexp(top)
    return torch.where(usable(amax), (e - top_e + (part > top_part)).clamp(-127, 127), torch.zeros_like(e))


def multiplier(amax: Tensor, top: float) -> Tensor:
    """top / amax in fp32; 1 where there is no scale."""
    size = torch.where(usable(amax), amax, torch.full_like(amax, top)).to(torch.float32)
    return (torch.full_like(size, top) / size).clamp(max=FP32_MAX)  # top / size would be size.reciprocal() * top


def block_scale(amax: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4: (E4M3 numbers of the blocks, the tensor's number), fp64."""
    finite = torch.where(amax.isfinite(), amax, torch.zeros_like(amax))
    top = finite.max() if finite.numel() else finite.sum()
    top = torch.where(top > 0, top, torch.ones_like(top))
    return nearest(amax * 448 / top, E4M3), top / 2688


def quantize(x: Tensor, p: Plan) -> tuple[Tensor, Tensor]:
    """(codes, scales as they are stored, one a block)."""
    amax = amax_of(x, p)
    if p.scale == "nv":
        small, whole = block_scale(amax)
        stored = (small * whole).to(torch.float32)
        per = spread(stored.to(torch.float64), x.shape, p)
        wide = x.to(torch.float64)
        y = torch.where(per > 0, wide / per, torch.zeros_like(wide)).copysign(wide)
        return pack(nearest(y, E2M1), E2M1), torch.where(amax.isfinite(), stored, torch.full_like(stored, math.nan))
    if p.scale == "fp32":
        m = multiplier(amax, p.form.top)
        return pack(nearest(x.to(torch.float32) * spread(m, x.shape, p), p.form), p.form), 1 / m
    e = exponent(amax, p.form.top)
    y = x.to(torch.float64) * spread(pow2(-e), x.shape, p)
    return pack(nearest(y, p.form), p.form), store(e, amax, p)


def store(e: Tensor, amax: Tensor, p: Plan) -> Tensor:
    """Exponents as they are stored: powers of two in fp32, or bytes; E2M1 has no NaN, so its byte is 255 then."""
    if p.scale == "pow2":
        return pow2(e).to(torch.float32)
    byte = (e + 127).to(torch.uint8)
    return torch.where(amax.isfinite(), byte, torch.full_like(byte, 255)) if p.form is E2M1 else byte


def deliver(data: Tensor, scale_inv: Tensor, codes: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Both results into their buffers."""
    data.view(torch.uint8).copy_(codes.view(torch.uint8))
    target = scale_inv if stored.dtype == torch.float32 else scale_inv.view(torch.uint8)
    target.copy_(stored.reshape(scale_inv.shape))
    return data, scale_inv


# --- products ---


def real(scale: Tensor) -> Tensor:
    """Stored scales in fp64; a byte of 255 is NaN."""
    if scale.dtype == torch.float32:
        return scale.to(torch.float64)
    byte = scale.view(torch.uint8).to(torch.int64)
    return torch.where(byte == 255, torch.full(byte.shape, math.nan, dtype=torch.float64), pow2(byte - 127))


def factors(scale: Tensor, shape: tuple[int, ...], p: Plan) -> Tensor:
    """The scale of each element, fp64."""
    return spread(real(scale).reshape(grid(shape, p)), shape, p)


def value(data: Tensor, scale: Tensor, recipe: str, role: str = "x") -> Tensor:
    """What an operand means, fp64."""
    return unpack(data) * factors(scale, data.shape, plan(recipe, role))


def spans(ends: Tensor) -> list[tuple[int, int, int]]:
    """(group, first row, end) of each group."""
    edges = [0, *ends.tolist()]
    return [(g, edges[g], edges[g + 1]) for g in range(len(edges) - 1)]


# --- layers ---


def rows_of(x: Tensor) -> Tensor:
    """x (..., K) as (rows, K)."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def recast(x: Tensor, recipe: str, role: str = "x") -> Tensor:
    """x as its cast leaves it, fp64."""
    p = plan(recipe, role)
    codes, stored = quantize(x, p)
    return unpack(codes) * factors(stored, x.shape, p)


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(probabilities, o), fp64."""
    s = q.double() @ k.double().mT / math.sqrt(max(q.shape[-1], 1))
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    p = s.softmax(-1)
    return p, p @ v.double()


def back(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, p: Tensor, o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), fp64."""
    g = grad.double()
    ds = p * (g @ v.double().mT - (g * o).sum(-1, keepdim=True)) / math.sqrt(max(q.shape[-1], 1))
    return ds @ k.double(), ds.mT @ q.double(), p.mT @ g
