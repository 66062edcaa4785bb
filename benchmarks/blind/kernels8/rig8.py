"""What the adapters of this folder stand on: codes by counting middles, blocks by padding, scales, and what codes mean by one table a format.

    tensorwise        one scale in FP32: 448 / amax (gradients: E5M2, 57344 / amax); its inverse is stored
    rowwise           a power of two for each row
    blockwise         1x128 (weights 128x128), a power of two;  blockwise_fp32: the same in FP32
    mxfp8, mxfp4      1x32, a power of two in a byte, rounded up
    nvfp4             1x16 (weights 16x16): an E4M3 number for the block times one number of the tensor; their product is stored in FP32

Infinities saturate. An amax of 0, NaN or infinity gives the scale 1.
"""

from __future__ import annotations

import math

import torch
from ottava.prove import adapter
from torch import Tensor

__all__ = ["Form", "E2M1", "E4M3", "E5M2", "Cut", "adapter", "amaxes", "as_bytes", "attend", "by_fp32", "by_nvfp4", "by_power", "castings", "cut_for", "down", "edges", "encode", "finish", "flat",
           "grid_of", "meaning", "operand", "power", "put", "ratio", "recast", "scale_of", "softmaxed", "stretch", "two_levels", "update"]


class Form:
    """A format: its numbers without sign in the order of their codes, the middles between them, and what each byte means."""

    def __init__(self, mantissa: int, bias: int, codes: int, dtype: torch.dtype, sign: int, behind: tuple[float, ...] = ()) -> None:
        code = torch.arange(codes, dtype=torch.float64)
        field, rest = torch.div(code, 2**mantissa, rounding_mode="floor"), code % 2**mantissa
        self.numbers = (rest + (field > 0) * 2**mantissa) * torch.exp2(field.clamp(min=1) - bias - mantissa)
        self.middles = (self.numbers[1:] + self.numbers[:-1]) / 2
        self.top, self.dtype, self.sign = float(self.numbers[-1]), dtype, sign
        half = torch.cat([self.numbers, torch.tensor(behind, dtype=torch.float64)])
        self.table = torch.cat([half, -half]).repeat(256 // (2 * len(half)))


E4M3 = Form(3, 7, 127, torch.float8_e4m3fn, 7, (math.nan,))
E5M2 = Form(2, 15, 124, torch.float8_e5m2, 7, (math.inf, math.nan, math.nan, math.nan))
E2M1 = Form(1, 1, 8, torch.uint8, 3)


def down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """FP64 to FP32 to the dtype."""
    return x.to(torch.float32).to(dtype)


def finish(place: Tensor, x: Tensor, form: Form) -> Tensor:
    """Places in the list of a format, with signs and NaN, as bytes."""
    code = place.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << form.sign)
    return torch.where(torch.isnan(x), torch.full_like(code, 0 if form is E2M1 else 127), code)


def encode(x: Tensor, form: Form) -> Tensor:
    """Bytes of the nearest numbers: ties to even, saturating."""
    size = x.to(torch.float64).abs().nan_to_num(0.0, posinf=form.top)
    place = torch.bucketize(size.contiguous(), form.middles)  # middles below it
    tie = size == form.middles[place.clamp(max=len(form.middles) - 1)]
    return finish(place + (tie & (place % 2 == 1)), x, form)


def meaning(data: Tensor, form: Form | None = None) -> Tensor:
    """What codes mean, FP64."""
    form = form or {torch.uint8: E2M1, torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}[data.dtype]
    return form.table[data.view(torch.uint8).long()]


# --- blocks and scales ---


class Cut:
    """How a recipe cuts and scales an operand. rows, columns: of a block, 0 for all; kind: fp32, power, byte, nv."""

    def __init__(self, form: Form, rows: int, columns: int, kind: str) -> None:
        self.form, self.rows, self.columns, self.kind = form, rows, columns, kind


def cut_for(recipe: str, role: str = "x") -> Cut:
    tall = role == "weight"
    if recipe == "tensorwise":
        return Cut(E5M2 if role == "grad" else E4M3, 0, 0, "fp32")
    if recipe == "rowwise":
        return Cut(E4M3, 1, 0, "power")
    if recipe in ("blockwise", "blockwise_fp32"):
        return Cut(E4M3, 128 if tall else 1, 128, "power" if recipe == "blockwise" else "fp32")
    if recipe == "nvfp4":
        return Cut(E2M1, 16 if tall else 1, 16, "nv")
    return Cut({"mxfp8": E4M3, "mxfp4": E2M1}[recipe], 1, 32, "byte")


def grid_of(shape: tuple[int, ...], cut: Cut) -> tuple[int, int]:
    m, k = shape
    return -(-m // cut.rows) if cut.rows else 1, -(-k // cut.columns) if cut.columns else 1


def amaxes(x: Tensor, cut: Cut) -> Tensor:
    """The amax of each block, FP64; NaN shows."""
    (m, k), (down_, across) = x.shape, grid_of(x.shape, cut)
    rows, columns = cut.rows or m, cut.columns or k
    if m * k == 0:
        return torch.zeros(down_, across, dtype=torch.float64)
    size = torch.nn.functional.pad(x.to(torch.float64).abs(), (0, across * columns - k, 0, down_ * rows - m))
    return size.reshape(down_, rows, across, columns).amax(3).amax(1)


def stretch(grid: Tensor, shape: tuple[int, ...], cut: Cut) -> Tensor:
    """The entry of its block for each element."""
    m, k = shape
    i = torch.arange(m) // (cut.rows or max(m, 1))
    j = torch.arange(k) // (cut.columns or max(k, 1))
    return grid[i][:, j]


def sane(amax: Tensor) -> Tensor:
    return torch.isfinite(amax) & (amax > 0)


def power(amax: Tensor, top: float) -> Tensor:
    """The smallest power of two s from 2**-127 on with amax <= top * s; 1 where there is no scale."""
    size = torch.where(sane(amax), amax, torch.full_like(amax, top))
    e = torch.ceil(torch.log2(size / top))
    e = e + (size > top * torch.exp2(e)).double()
    e = e - (size <= top * torch.exp2(e - 1)).double()
    return torch.exp2(e.clamp(min=-127))


def ratio(amax: Tensor, top: float) -> Tensor:
    """top / amax in FP32; 1 where there is no scale."""
    size = torch.where(sane(amax), amax, torch.full_like(amax, top)).to(torch.float32)
    return torch.clamp(torch.full_like(size, top) / size, max=torch.finfo(torch.float32).max)


def by_power(x: Tensor, scale: Tensor, cut: Cut) -> Tensor:
    """Codes under scales that are powers of two."""
    return encode(x.to(torch.float64) / stretch(scale, x.shape, cut), cut.form)


def by_fp32(x: Tensor, multiplier: Tensor, cut: Cut) -> Tensor:
    """Codes behind a multiplication in FP32."""
    return encode(x.to(torch.float32) * stretch(multiplier, x.shape, cut), cut.form)


def by_nvfp4(x: Tensor, scale: Tensor, cut: Cut) -> Tensor:
    """Codes under NVFP4's scales; zeros where the scale is zero."""
    per = stretch(scale.to(torch.float64), x.shape, cut)
    wide = x.to(torch.float64)
    return encode(torch.where(per > 0, wide / per, torch.zeros_like(wide)).copysign(wide), cut.form)


def two_levels(amax: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4: what E4M3 makes of the blocks' scales, and the tensor's number."""
    top = torch.where(torch.isfinite(amax), amax, torch.zeros_like(amax)).max() if amax.numel() else torch.zeros((), dtype=torch.float64)
    top = torch.where(top > 0, top, torch.ones_like(top))
    return meaning(encode(amax * (448 / top), E4M3), E4M3), top / 2688


def as_bytes(scale: Tensor, amax: Tensor, form: Form) -> Tensor:
    byte = (torch.log2(scale).round() + 127).to(torch.uint8)
    return torch.where(torch.isfinite(amax), byte, torch.full_like(byte, 255)) if form is E2M1 else byte


def castings(x: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """(codes as bytes, scales as stored)."""
    amax = amaxes(x, cut)
    if cut.kind == "fp32":
        m = ratio(amax, cut.form.top)
        return by_fp32(x, m, cut), 1 / m
    if cut.kind == "nv":
        small, whole = two_levels(amax)
        stored = (small * whole).to(torch.float32)
        return by_nvfp4(x, stored, cut), torch.where(torch.isfinite(amax), stored, torch.full_like(stored, math.nan))
    scale = power(amax, cut.form.top)
    return by_power(x, scale, cut), scale.to(torch.float32) if cut.kind == "power" else as_bytes(scale, amax, cut.form)


def put(data: Tensor, scale_inv: Tensor, codes: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Both results into their buffers."""
    data.view(torch.uint8).copy_(codes)
    goal = scale_inv.view(torch.uint8) if stored.dtype == torch.uint8 else scale_inv
    goal.copy_(stored.reshape(scale_inv.shape))
    return data, scale_inv


def scale_of(stored: Tensor) -> Tensor:
    """Stored scales in FP64; a byte of 255 is NaN."""
    if stored.dtype == torch.float32:
        return stored.to(torch.float64)
    byte = stored.view(torch.uint8)
    return torch.where(byte == 255, torch.full(byte.shape, math.nan, dtype=torch.float64), torch.exp2(byte.to(torch.float64) - 127))


def operand(data: Tensor, stored: Tensor, cut: Cut) -> Tensor:
    """What codes under scales mean, FP64."""
    return meaning(data) * stretch(scale_of(stored).reshape(grid_of(data.shape, cut)), data.shape, cut)


def edges(ends: Tensor) -> list[tuple[int, int, int]]:
    """(group, first row, row behind the last)."""
    last, found = 0, []
    for g, end in enumerate(ends.tolist()):
        found.append((g, last, end))
        last = end
    return found


# --- layers ---


def flat(x: Tensor) -> Tensor:
    """(..., K) as (rows, K)."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def recast(x: Tensor, recipe: str, role: str = "x") -> Tensor:
    """x behind its cast, FP64."""
    cut = cut_for(recipe, role)
    codes, stored = castings(x, cut)
    return meaning(codes, cut.form) * stretch(scale_of(stored), x.shape, cut)


def softmaxed(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Probabilities, FP64."""
    s = torch.einsum("bhid,bhjd->bhij", q.double(), k.double()) * max(q.shape[-1], 1) ** -0.5
    if causal:
        i = torch.arange(q.shape[2])
        s = s.where(i[:, None] >= i[None, :], torch.full_like(s, -math.inf))
    return torch.softmax(s, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, p: Tensor, ds: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o, dq, dk, dv) in FP64 from the probabilities; ds: another gradient of the scores."""
    g, factor = grad.double(), max(q.shape[-1], 1) ** -0.5
    o = p @ v.double()
    if ds is None:
        ds = p * (g @ v.double().mT - (g * o).sum(-1, keepdim=True))
    return o, ds @ k.double() * factor, ds.mT @ q.double() * factor, p.mT @ g


def update(m: Tensor, v: Tensor, step: int, lr: float, betas: tuple[float, float], eps: float) -> Tensor:
    """AdamW's step in FP64: eps behind the correction."""
    first, second = m.double() / (1 - betas[0] ** step), v.double() / (1 - betas[1] ** step)
    return lr * first / (second.sqrt() + eps)
