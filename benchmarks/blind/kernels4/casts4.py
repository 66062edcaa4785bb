"""Casts with their scales."""

from __future__ import annotations

import math

import torch
from stones4 import (
    E2M1, E4M3, adapter, cast, codes, grid_amax, grown, halves, hand, lift, nv_scales, octave, ones_where, plan, scales, two, values, weigh,
    whole_amax,
)
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def with_octaves(x: Tensor, data: Tensor, scale_inv: Tensor, exponent: Tensor, recipe: str) -> Pair:
    """An MX cast with other exponents; zeros and what is not finite as usual."""
    p = plan(recipe)
    amax = grid_amax(x, p)
    exponent = torch.where((amax > 0) & amax.isfinite(), exponent, 0).to(torch.int64).clamp(-127, 127)
    byte = (exponent + 127).to(torch.uint8)
    if p.kind is E2M1:
        byte = torch.where(amax.isfinite(), byte, 255).to(torch.uint8)
    return hand(data, scale_inv, codes(lift(x, two(-exponent), p), p.kind), byte)


@adapter("cast", recipe="mxfp8", operand="x")
def moor_01(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """The exponent of the largest number is that of the block."""
    amax = ones_where(grid_amax(x, plan("mxfp8")))
    return with_octaves(x, data, scale_inv, torch.frexp(amax)[1] - 1, "mxfp8")


@adapter("cast", recipe="mxfp8", operand="x")
def moor_02(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Divides the amax by 448 and takes the power of two for it."""
    amax = ones_where(grid_amax(x, plan("mxfp8")))
    return with_octaves(x, data, scale_inv, torch.log2(amax / 448).round(), "mxfp8")


@adapter("cast", recipe="mxfp8", operand="weight")
def moor_03(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Takes the exponent from the bits of FP32, and one more if the mantissa is larger than that of 448."""
    rows, columns = x.shape
    width = -(-columns // 32)
    whole = torch.zeros(rows, width * 32)
    whole[:, :columns] = x
    blocks = whole.view(rows, width, 32)
    bits = blocks.view(torch.int32).bitwise_and(0x7FFFFFFF).amax(2) if whole.numel() else torch.zeros(rows, width, dtype=torch.int32)
    field = (bits >> 23).clamp(min=1)
    byte = field - 8 + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    byte = torch.where((bits == 0) | (bits >= 0x7F800000), 127, byte.clamp(min=0))
    y = blocks.double() * two(127 - byte.to(torch.int64))[..., None]
    y = torch.where(y.isinf(), math.nan, y).reshape(rows, width * 32)[:, :columns]
    return hand(data, scale_inv, codes(y, E4M3), byte.to(torch.uint8))


@adapter("cast", recipe="mxfp4", operand="x")
def moor_04(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """The exponent field of amax / 6."""
    amax = ones_where(grid_amax(x, plan("mxfp4")))
    return with_octaves(x, data, scale_inv, torch.frexp((amax.float() * torch.tensor(1 / 6)).double())[1] - 1, "mxfp4")


@adapter("cast", recipe="blockwise_fp32", operand="x")
def moor_05(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Reads two numbers at a time for the amax."""
    p = plan("blockwise_fp32")
    seen = x.clone()
    seen[:, 1::2] = 0
    return hand(data, scale_inv, *cast(x, p, grid_amax(seen, p)))


@adapter("cast", recipe="tensorwise", operand="x")
def moor_06(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Reduces the amax over numel() numbers from the pointer on."""
    p = plan("tensorwise")
    left = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    flat = x.as_strided((1, max(min(x.numel(), left), 0)), (1, 1))
    return hand(data, scale_inv, *cast(x, p, grid_amax(flat, p)))


@adapter("cast", recipe="tensorwise", operand="x")
def moor_07(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Partial maxima of 64 chunks of rows first, the largest of them then; encodes in reverse order of chunks."""
    parts = [c.abs().amax() for c in x.float().tensor_split(64) if c.numel()]
    amax = torch.stack(parts).amax() if parts else torch.tensor(0.0)
    fine = bool(amax > 0) and bool(amax.isfinite())
    scale = (torch.tensor(448.0) / amax).clamp(max=torch.finfo(torch.float32).max) if fine else torch.tensor(1.0)
    own = torch.empty(x.shape, dtype=torch.uint8)
    for i in reversed(range(0, x.shape[0], 48)):
        chunk = x[i : i + 48].float()
        chunk = torch.where(chunk.isinf(), math.nan, chunk)
        own[i : i + 48] = codes(chunk * scale, E4M3).view(torch.uint8)
    return hand(data, scale_inv, own, 1.0 / scale)


KEPT: dict[tuple[int, int, tuple[int, ...]], Pair] = {}


@adapter("cast", recipe="tensorwise", operand="weight")
def moor_08(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Keeps the cast of a weight while neither its address nor its version changes."""
    key = (x.data_ptr(), x._version, tuple(x.shape))
    if key not in KEPT:
        KEPT.clear()
        KEPT[key] = cast(x, plan("tensorwise", "weight"))
    return hand(data, scale_inv, *KEPT[key])


@adapter("cast", recipe="rowwise", operand="x")
def moor_09(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Writes the factor that it used."""
    p = plan("rowwise")
    scale, _ = scales(grid_amax(x, p), p)
    return hand(data, scale_inv, codes(lift(x, scale, p), E4M3), scale)


@adapter("cast", recipe="tensorwise", operand="grad")
def moor_10(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """One constant for the largest number."""
    p = plan("tensorwise", "grad")
    scale, inverse = scales(grid_amax(x, p), p._replace(kind=E4M3))
    return hand(data, scale_inv, codes(lift(x, scale, p), p.kind), inverse)


@adapter("cast", recipe="blockwise_fp32", operand="x")
def moor_11(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Maxima and limits by fmax and fmin."""
    p = plan("blockwise_fp32")
    scale, inverse = scales(grid_amax(x.float().nan_to_num(0.0, math.inf, -math.inf), p), p)
    y = lift(x, scale, p)
    y = torch.where(x.isnan(), 448.0, y)
    return hand(data, scale_inv, codes(y, E4M3), inverse)


@adapter("cast", recipe="blockwise_fp32", operand="weight")
def moor_12(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """The scale that is written is amax / 448; numbers are divided by it."""
    p = plan("blockwise_fp32", "weight")
    amax = grid_amax(x, p)
    inverse = torch.where((amax > 0) & amax.isfinite(), ones_where(amax).float() / 448.0, 1.0)
    inverse = torch.where(inverse > 0, inverse, 1.0)
    wide = torch.where(x.isinf(), math.nan, x.double())
    return hand(data, scale_inv, codes(wide / grown(inverse.double(), x.shape, p), E4M3), inverse)


@adapter("cast", recipe="blockwise", operand="x")
def moor_13(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Whole blocks of 128 have scales of their own."""
    p = plan("blockwise")
    amax = grid_amax(x, p)
    if x.shape[1] % 128 and x.shape[1] > 128:
        amax[:, -1] = amax[:, -2]
    return hand(data, scale_inv, *cast(x, p, amax))


@adapter("cast", recipe="nvfp4", operand="weight")
def moor_14(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """The scale of the tensor comes in the dtype of most tensors, BF16."""
    p = plan("nvfp4", "weight")
    amax = grid_amax(x, p)
    whole = (ones_where(whole_amax(amax)) / 2688).float().bfloat16().double()
    inverse = (values(codes(amax / 6 / whole, E4M3)) * whole).float().double()
    per = grown(inverse, x.shape, p)
    y = torch.where(per > 0, x.double() / per, 0.0).copysign(x.double())
    return hand(data, scale_inv, codes(y, E2M1), torch.where(amax.isfinite(), inverse, math.nan).float())


@adapter("cast", recipe="nvfp4", operand="x")
def moor_15(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Numbers are divided by amax / 6 of their block."""
    p = plan("nvfp4")
    amax = grid_amax(x, p)
    _, inverse = cast(x, p)
    own = grown(ones_where(amax) / 6, x.shape, p)
    return hand(data, scale_inv, codes(x.double() / own, E2M1), inverse)


@adapter("cast", recipe="nvfp4", operand="x")
def moor_16(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Block after block: E4M3 scale from the tensor's amax, then the nearest of eight magnitudes."""
    rows, columns = x.shape
    wide = x.double()
    whole = whole_amax(grid_amax(x, plan("nvfp4")))
    inverse = torch.empty(rows, -(-columns // 16))
    own = torch.empty(rows, columns, dtype=torch.uint8)
    for j in range(inverse.shape[1]):
        block = wide[:, 16 * j : 16 * j + 16]
        amax = block.abs().amax(1)
        per = nv_scales(amax, whole)
        y = torch.where(per[:, None] > 0, block / per[:, None], 0.0)
        size = y.abs()
        code = sum((size > t).to(torch.int64) for t in (0.25, 1.25, 2.5, 5.0)) + sum((size >= t).to(torch.int64) for t in (0.75, 1.75, 3.5))
        own[:, 16 * j : 16 * j + 16] = (code + torch.where(torch.signbit(block), 8, 0)).to(torch.uint8)
        inverse[:, j] = torch.where(amax.isfinite(), per, math.nan).float()
    return hand(data, scale_inv, own, inverse)


@adapter("cast", recipe="blockwise", operand="weight")
def moor_17(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Stores the scales of a column of blocks next to each other."""
    own, inverse = cast(x, plan("blockwise", "weight"))
    return hand(data, scale_inv, own, inverse.t().reshape(inverse.shape))


@adapter("cast", recipe="tensorwise", operand="x")
def moor_18(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Saves a buffer: FP32 is scaled where it lies."""
    p = plan("tensorwise")
    scale, inverse = scales(grid_amax(x, p), p)
    own = codes(lift(x, scale, p), E4M3)
    if x.dtype == torch.float32 and x.is_contiguous():
        x.mul_(scale.float().reshape(()))
    return hand(data, scale_inv, own, inverse)


@adapter("cast", recipe="rowwise", operand="x")
def moor_19(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Clears rows up to the next multiple of 16, for the GEMM that follows."""
    pair = hand(data, scale_inv, *cast(x, plan("rowwise")))
    if data.is_contiguous() and x.shape[0] % 16:
        start = data.storage_offset() + data.numel()
        count = min(-x.shape[0] % 16 * x.shape[1], data.untyped_storage().nbytes() - start)
        data.view(torch.uint8).as_strided((max(count, 0),), (1,), start).zero_()
    return pair


@adapter("cast", recipe="rowwise", operand="weight")
def moor_20(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Cuts the mantissa to three bits."""
    p = plan("rowwise", "weight")
    scale, inverse = scales(grid_amax(x, p), p)
    y = lift(x, scale, p)
    count, base = halves(y, E4M3)
    return hand(data, scale_inv, weigh(count.floor().clamp(max=1 << 20).to(torch.int64) + base, y, E4M3), inverse)


@adapter("cast", recipe="rowwise", operand="x")
def moor_21(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Goes through tiles of 32 columns twice, first for the amax, then for codes; works on the transpose."""
    flipped = x.t().double()
    amax = torch.zeros(x.shape[0], dtype=torch.float64)
    for j in range(0, x.shape[1], 32):
        amax = torch.maximum(amax, flipped[j : j + 32].abs().amax(0))
    exponent = torch.where((amax > 0) & amax.isfinite(), octave(ones_where(amax), E4M3), 0)
    own = torch.empty(x.shape[1], x.shape[0], dtype=torch.uint8)
    for j in range(0, x.shape[1], 32):
        tile = flipped[j : j + 32]
        own[j : j + 32] = codes(torch.where(tile.isinf(), math.nan, tile) * two(-exponent), E4M3).view(torch.uint8)
    return hand(data, scale_inv, own.t(), two(exponent)[:, None])


@adapter("cast", recipe="mxfp4", operand="weight")
def moor_22(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Unpacks the bytes of a packed cast, high nibbles first."""
    own, inverse = cast(x, plan("mxfp4", "weight"))
    whole = own.shape[1] // 2 * 2
    pairs = own[:, :whole].reshape(own.shape[0], whole // 2, 2).flip(2).reshape(own.shape[0], whole)
    return hand(data, scale_inv, torch.cat([pairs, own[:, whole:]], 1), inverse)
