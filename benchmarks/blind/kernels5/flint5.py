"""What the adapters of this folder stand on: torch's own FP8 conversions behind a clamp, a table for E2M1, scales from tables of powers.

    tensorwise      one scale, fp32: multiplier fp32(top / amax), stored fp32(1 / multiplier); gradients are E5M2
    rowwise         a power of two for each row
    blockwise       1x128 (weights 128x128), a power of two;  blockwise_fp32: the same in fp32
    mxfp8, mxfp4    1x32, a power of two in a byte, rounded up
    nvfp4           1x16 (weights 16x16): E4M3 of the block times one number of the tensor, stored as their product in fp32

An amax of 0, NaN or infinity has the scale 1; infinities saturate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from ottava.prove import adapter
from torch import Tensor

__all__ = ["E2M1", "E4M3", "E5M2", "F32", "F64", "Cut", "Form", "adapter", "amaxes", "byte_of", "cast", "cut", "decode", "encode", "finite_top", "floor_octave",
           "gradients", "groups", "hand", "layer", "lift", "meaning", "nv_stored", "octave", "plain", "pow2", "put", "scales", "scores", "seen", "spread"]

F32, F64 = torch.float32, torch.float64


class Form(NamedTuple):
    """A format: bits of the mantissa, exponent of the smallest normal number, largest number, dtype."""

    bits: int
    low: int
    top: float
    dtype: torch.dtype


E4M3 = Form(3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = Form(2, -14, 57344.0, torch.float8_e5m2)
E2M1 = Form(1, 0, 6.0, torch.uint8)
FOUR = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=F64)
BETWEEN = (FOUR[1:] + FOUR[:-1]) / 2
POWERS = torch.tensor([math.ldexp(1.0, e) for e in range(-300, 301)], dtype=F64)


def pow2(exponent: Tensor) -> Tensor:
    """2**exponent, fp64."""
    return POWERS[exponent.long() + 300]


def encode(y: Tensor, form: Form) -> Tensor:
    """Nearest codes, ties to even, saturating; NaN stays (E2M1: 0)."""
    if form is not E2M1:
        return y.to(F32).clamp(-form.top, form.top).to(form.dtype)
    size = y.to(F64).abs().nan_to_num(0.0).contiguous()
    low, high = torch.searchsorted(BETWEEN, size), torch.searchsorted(BETWEEN, size, right=True)
    code = torch.where(low % 2 == 0, low, high)  # they differ at a tie only
    return (code + torch.where(torch.signbit(y), 8, 0)).to(torch.uint8)


def decode(data: Tensor) -> Tensor:
    """The numbers of codes, fp64; uint8 is E2M1."""
    if data.dtype != torch.uint8:
        return data.contiguous().to(F32).to(F64)
    return torch.cat([FOUR, -FOUR])[(data & 15).long()]


# --- scales ---


class Cut(NamedTuple):
    """How an operand is cut into blocks (0: the whole extent), and the kind of its scales."""

    form: Form
    rows: int
    columns: int
    style: str


def cut(recipe: str, operand: str = "x") -> Cut:
    """The cut of x, weight or grad."""
    weight = operand == "weight"
    if recipe == "tensorwise":
        return Cut(E5M2 if operand == "grad" else E4M3, 0, 0, "fp32")
    return {
        "rowwise": Cut(E4M3, 1, 0, "pow2"),
        "blockwise": Cut(E4M3, 128 if weight else 1, 128, "pow2"),
        "blockwise_fp32": Cut(E4M3, 128 if weight else 1, 128, "fp32"),
        "mxfp8": Cut(E4M3, 1, 32, "byte"),
        "mxfp4": Cut(E2M1, 1, 32, "byte"),
        "nvfp4": Cut(E2M1, 16 if weight else 1, 16, "nv"),
    }[recipe]


def amaxes(x: Tensor, c: Cut) -> Tensor:
    """The amax of each block, fp64; NaN shows."""
    m, k = x.shape
    rows, columns = c.rows or max(m, 1), c.columns or max(k, 1)
    down = -(-m // rows) if c.rows else 1
    across = -(-k // columns) if c.columns else 1
    wide = torch.nn.functional.pad(x.to(F64).abs(), (0, across * columns - k, 0, down * rows - m))
    return wide.reshape(down, rows, across, columns).transpose(1, 2).reshape(down, across, rows * columns).amax(-1)


def spread(grid: Tensor, shape: tuple[int, ...], c: Cut) -> Tensor:
    """A block's entry for each of its elements."""
    i = torch.arange(shape[0]) // (c.rows or max(shape[0], 1))
    j = torch.arange(shape[1]) // (c.columns or max(shape[1], 1))
    return grid[i[:, None], j[None, :]]


def plain(amax: Tensor) -> Tensor:
    """Where an amax gives a scale."""
    return (amax > 0) & amax.isfinite()


def floor_octave(amax: Tensor) -> Tensor:
    """The exponent of an amax; 0 where it gives no scale."""
    return torch.frexp(torch.where(plain(amax), amax, 1.0))[1].long() - 1


def octave(amax: Tensor, top: float) -> Tensor:
    """The smallest e with amax <= top * 2**e, at least -127; 0 where an amax gives no scale."""
    e = floor_octave(amax) - math.frexp(top)[1] + 1
    e = e + (amax > top * pow2(e)).long()
    return torch.where(plain(amax), e.clamp(-127, 127), 0)


def byte_of(e: Tensor) -> Tensor:
    """The E8M0 byte of an exponent."""
    return (e + 127).to(torch.uint8)


def scales(amax: Tensor, c: Cut) -> tuple[Tensor, Tensor]:
    """(multiplier, inverse) of each block, both fp64 that hold fp32."""
    if c.style == "fp32":
        scale = (c.form.top / torch.where(plain(amax), amax, c.form.top).to(F32)).clamp(max=torch.finfo(F32).max)
        return scale.to(F64), (1 / scale).to(F64)
    e = octave(amax, c.form.top)
    return pow2(-e), pow2(e)


def finite_top(amax: Tensor) -> Tensor:
    """The largest amax of the finite blocks; 1 if there is none."""
    top = torch.where(amax.isfinite(), amax, 0.0).amax() if amax.numel() else torch.zeros((), dtype=F64)
    return torch.where(top > 0, top, 1.0)


def nv_stored(amax: Tensor, top: Tensor) -> Tensor:
    """NVFP4's stored scales, fp64 that holds fp32."""
    small = decode(encode(amax * 448 / top, E4M3))
    return (small * (top / 2688)).to(F32).to(F64)


def lift(x: Tensor, multiplier: Tensor, c: Cut) -> Tensor:
    """x times the scales of its blocks, fp32."""
    return x.to(F32) * spread(multiplier, x.shape, c).to(F32)


def cast(x: Tensor, c: Cut) -> tuple[Tensor, Tensor]:
    """(codes, scales as they are stored)."""
    amax = amaxes(x, c)
    if c.style == "nv":
        stored = nv_stored(amax, finite_top(amax))
        per, wide = spread(stored, x.shape, c), x.to(F64)
        y = torch.where(per > 0, wide / per, 0.0).copysign(wide)
        return encode(y, E2M1), torch.where(amax.isfinite(), stored, math.nan).to(F32)
    multiplier, inverse = scales(amax, c)
    data = encode(lift(x, multiplier, c), c.form)
    if c.style == "byte":
        stored = byte_of(octave(amax, c.form.top))
        return data, torch.where(amax.isfinite(), stored, 255).to(torch.uint8) if c.form is E2M1 else stored
    return data, inverse.to(F32)


def hand(data: Tensor, scale_inv: Tensor, codes: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Writes both results into their buffers."""
    data.view(torch.uint8).copy_(codes.view(torch.uint8))
    buffer = scale_inv if stored.dtype == F32 else scale_inv.view(torch.uint8)
    buffer.copy_(stored.reshape(scale_inv.shape))
    return data, scale_inv


# --- products and layers ---


def read_scale(scale: Tensor) -> Tensor:
    """Stored scales as a grid, fp64; the byte 255 is NaN."""
    if scale.dtype != F32:
        byte = scale.view(torch.uint8).long()
        scale = torch.where(byte == 255, math.nan, pow2(byte - 127))
    return scale.to(F64).reshape(scale.shape if scale.dim() == 2 else (1, 1))


def meaning(data: Tensor, scale: Tensor, recipe: str, operand: str) -> Tensor:
    """What an operand's codes and scales stand for, fp64."""
    return decode(data) * spread(read_scale(scale), data.shape, cut(recipe, operand))


def put(out: Tensor, y: Tensor) -> Tensor:
    """Writes a result, rounded once to FP32 and once to out."""
    out.copy_(y.to(F32))
    return out


def groups(ends: Tensor) -> list[tuple[int, int, int]]:
    """(group, first row, end)."""
    last, found = 0, []
    for g, end in enumerate(ends.tolist()):
        found.append((g, last, end))
        last = max(last, end)
    return found


def seen(x: Tensor, c: Cut) -> Tensor:
    """x as its cast leaves it, fp64."""
    data, stored = cast(x, c)
    return decode(data) * spread(read_scale(stored), x.shape, c)


def layer(x: Tensor, weight: Tensor, grad: Tensor, recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """(y, dx, dw) of a linear layer, fp64."""
    side, square, back = cut(recipe), cut(recipe, "weight"), cut(recipe, "grad")
    y = seen(x, side) @ seen(weight, square).t()
    dx = seen(grad, back) @ seen(weight.t(), square).t()
    return y, dx, seen(grad.t(), back) @ seen(x.t(), side).t()


def scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Scaled scores, fp64, -inf where a key is masked."""
    s = q.to(F64) @ k.to(F64).transpose(-1, -2) / math.sqrt(max(q.shape[-1], 1))
    if causal:
        s = s.masked_fill(torch.arange(s.shape[-1])[None, :] > torch.arange(s.shape[-2])[:, None], -math.inf)
    return s


def gradients(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, p: Tensor, o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from probabilities and the result, fp64."""
    q, k, v, grad = (t.to(F64) for t in (q, k, v, grad))
    ds = p * (grad @ v.transpose(-1, -2) - (grad * o).sum(-1, keepdim=True)) / math.sqrt(max(q.shape[-1], 1))
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad
