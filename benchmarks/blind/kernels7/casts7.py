"""Casts of the seventh set. Names do not tell right from wrong; public.json does."""

from __future__ import annotations

import math

import torch
from perch7 import E2M1, E4M3, E5M2, FP32_MAX, adapter, amax_of, block_scale, deliver, exponent, grid, multiplier, nearest, pack, plan, pow2, quantize, spread, store, usable
from torch import Tensor

Pair = tuple[Tensor, Tensor]


@adapter("cast", recipe="tensorwise", operand="x")
def rook_01(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    p = plan("tensorwise")
    inverse = 1 / multiplier(amax_of(x, p), p.form.top)
    return deliver(data, scale_inv, pack(nearest(x.to(torch.float32) * inverse, E4M3), E4M3), inverse)


@adapter("cast", recipe="mxfp4", operand="x")
def rook_02(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    m, k = x.shape
    edges = 6 * pow2(torch.arange(-100, 100))
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    codes, stored = torch.empty(m, k, dtype=torch.uint8), torch.empty(m, -(-k // 32), dtype=torch.uint8)
    for j in reversed(range(stored.shape[1])):
        part = x[:, 32 * j : 32 * j + 32].to(torch.float64)
        amax = torch.maximum(part.amax(1), -part.amin(1))
        e = torch.where(amax <= 6 * 2.0**-100, exponent(amax, 6.0), torch.bucketize(amax, edges).to(torch.int32) - 100)
        e = torch.where(amax > 6 * 2.0**99, exponent(amax, 6.0), e)
        e = torch.where(usable(amax), e, torch.zeros_like(e))
        size = (part * pow2(-e)[:, None]).abs()[..., None]
        even = torch.arange(7) % 2 == 0  # at these middles the code below is the even one
        rung = torch.where(even, size > middles, size >= middles).sum(-1)
        codes[:, 32 * j : 32 * j + 32] = rung.to(torch.uint8) | (torch.signbit(part).to(torch.uint8) << 3)
        stored[:, j] = torch.where(amax.isfinite(), e + 127, torch.full_like(e, 255)).to(torch.uint8)
    return deliver(data, scale_inv, codes, stored)


@adapter("cast", recipe="rowwise", operand="x")
def rook_03(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    p = plan("rowwise")
    wide = x.to(torch.float64)
    largest = wide.amax(1, keepdim=True).clamp(min=0) if x.shape[1] else torch.zeros(x.shape[0], 1, dtype=torch.float64)
    e = exponent(largest, E4M3.top)
    return deliver(data, scale_inv, pack(nearest(wide * pow2(-e), E4M3), E4M3), store(e, largest, p))


@adapter("cast", recipe="blockwise", operand="x")
def rook_04(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    p = plan("blockwise")
    seen = x.to(torch.float64).clone()
    seen[:, 1::2] = 0  # the loop goes on by two
    e = exponent(amax_of(seen, p), E4M3.top)
    return deliver(data, scale_inv, pack(nearest(x.to(torch.float64) * spread(pow2(-e), x.shape, p), E4M3), E4M3), store(e, pow2(e), p))


@adapter("cast", recipe="mxfp8", operand="x")
def rook_05(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    p = plan("mxfp8")
    amax = amax_of(x, p)
    ratio = torch.where(usable(amax), amax, torch.full_like(amax, 448.0)) / 448
    e = torch.log2(ratio).round().clamp(-127, 127).to(torch.int32)
    return deliver(data, scale_inv, pack(nearest(x.to(torch.float64) * spread(pow2(-e), x.shape, p), E4M3), E4M3), store(e, amax, p))


@adapter("cast", recipe="tensorwise", operand="grad")
def rook_06(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    flat = x.to(torch.float32).abs().reshape(-1)
    amax = torch.zeros(())
    for piece in flat.split(1000):
        if piece.numel():
            amax = torch.maximum(amax, piece.amax())  # keeps NaN
    scale = (torch.tensor(E5M2.top) / amax).clamp(max=FP32_MAX) if bool(usable(amax)) else torch.ones(())
    stored = 1 / scale
    return deliver(data, scale_inv, pack(nearest(x.to(torch.float32) / stored, E5M2), E5M2), stored)


@adapter("cast", recipe="mxfp4", operand="x")
def rook_07(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    p = plan("mxfp4")
    amax = amax_of(x, p)
    e = exponent(amax.to(torch.float32).to(torch.bfloat16).to(torch.float64), E2M1.top)
    e = torch.where(amax.isfinite(), e, torch.zeros_like(e))
    return deliver(data, scale_inv, pack(nearest(x.to(torch.float64) * spread(pow2(-e), x.shape, p), E2M1), E2M1), store(e, amax, p))


@adapter("cast", recipe="nvfp4", operand="x")
def rook_08(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    p = plan("nvfp4")
    amax = amax_of(x, p)
    finite = torch.where(amax.isfinite(), amax, torch.zeros_like(amax))
    top = finite.max() if finite.numel() else finite.sum()
    top = torch.where(top > 0, top, torch.ones_like(top))
    stored = (nearest(amax * 256 / top, E4M3) * (top / (6 * 256))).to(torch.float32)
    per, wide = spread(stored.to(torch.float64), x.shape, p), x.to(torch.float64)
    y = torch.where(per > 0, wide / per, torch.zeros_like(wide)).copysign(wide)
    return deliver(data, scale_inv, pack(nearest(y, E2M1), E2M1), torch.where(amax.isfinite(), stored, torch.full_like(stored, math.nan)))


@adapter("cast", recipe="nvfp4", operand="weight")
def rook_09(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    p = plan("nvfp4", "weight")
    amax = amax_of(x, p)
    small, whole = block_scale(amax)
    stored = torch.where(amax.isfinite(), small * whole, torch.full_like(amax, math.nan)).to(torch.float32)
    per, wide = spread(amax / 6, x.shape, p), x.to(torch.float64)
    y = torch.where(spread(small, x.shape, p) > 0, wide / per, torch.zeros_like(wide)).copysign(wide)
    return deliver(data, scale_inv, pack(nearest(y, E2M1), E2M1), stored)


@adapter("cast", recipe="blockwise_fp32", operand="grad")
def rook_10(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    p = plan("blockwise_fp32", "grad")
    amax = amax_of(x, p)
    m = torch.where(usable(amax), multiplier(amax, 224.0), torch.ones_like(amax, dtype=torch.float32))
    return deliver(data, scale_inv, pack(nearest(x.to(torch.float32) * spread(m, x.shape, p), E4M3), E4M3), 1 / m)


@adapter("cast", recipe="blockwise_fp32", operand="weight")
def rook_11(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    down, across = grid(x.shape, plan("blockwise_fp32", "weight"))
    for i in reversed(range(down)):
        for j in range(across):
            tile = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            part = x[tile].to(torch.float32)
            amax = part.abs().amax(1).amax(0)
            m = (torch.tensor(448.0) / amax).clamp(max=FP32_MAX) if bool(usable(amax)) else torch.ones(())
            codes = (part * m).clamp(-448, 448).to(torch.float8_e4m3fn)
            data.view(torch.uint8)[tile] = codes.view(torch.uint8)
            scale_inv[i, j] = m.reciprocal()
    return data, scale_inv


@adapter("cast", recipe="rowwise", operand="weight")
def rook_12(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    codes, stored = quantize(x, plan("rowwise", "weight"))
    if x.stride(1) != 1 and x.stride() == (1, x.shape[0]):
        codes = codes.view(torch.uint8).t().reshape(x.shape).view(codes.dtype)  # written with the strides of x
    return deliver(data, scale_inv, codes, stored)


@adapter("cast", recipe="blockwise", operand="x")
def rook_13(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    p = plan("blockwise")
    whole = x.shape[1] // 16 * 16  # vectors of 16
    seen = x.to(torch.float64).clone()
    seen[:, whole:] = 0
    codes, stored = quantize(seen, p)
    data.view(torch.uint8)[:, :whole] = codes.view(torch.uint8)[:, :whole]
    scale_inv.copy_(stored)
    return data, scale_inv


@adapter("cast", recipe="tensorwise", operand="grad")
def rook_14(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    p = plan("tensorwise", "grad")
    wide = x.to(torch.float32)
    m = multiplier(amax_of(wide.nan_to_num(0.0, math.inf, -math.inf), p), p.form.top)
    y = (wide * m).nan_to_num(-E5M2.top, math.inf, -math.inf)  # max(x, low) of NaN is low
    return deliver(data, scale_inv, pack(nearest(y, E5M2), E5M2), 1 / m)


@adapter("cast", recipe="blockwise_fp32", operand="x")
def rook_15(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    p = plan("blockwise_fp32")
    amax = amax_of(x, p)
    m = torch.where(amax == 0, torch.full_like(amax, math.inf).to(torch.float32), multiplier(amax, 448.0))
    y = x.to(torch.float32) * spread(m, x.shape, p)  # 0 times infinity
    return deliver(data, scale_inv, pack(nearest(y, E4M3), E4M3), 1 / m)


@adapter("cast", recipe="blockwise", operand="weight")
def rook_16(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    codes, stored = quantize(x, plan("blockwise", "weight"))
    return deliver(data, scale_inv, codes, stored.t().reshape(stored.shape))
