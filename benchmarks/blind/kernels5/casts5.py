"""Casts; public.json says of each whether it is right."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flint5 import (
    E2M1, E4M3, E5M2, F32, F64, adapter, amaxes, byte_of, cast, cut, encode, finite_top, hand, lift, nv_stored, octave, plain, pow2, scales, spread,
)

Pair = tuple[Tensor, Tensor]


@adapter("cast", recipe="blockwise_fp32", operand="x")
def alder_01(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """The bound of the format is a constant of the build."""
    c = cut("blockwise_fp32")
    amax, bound = amaxes(x, c), 224.0
    scale = (bound / torch.where(plain(amax), amax, bound).to(F32)).clamp(max=torch.finfo(F32).max)
    codes = encode(lift(x, scale.to(F64), c).clamp(-bound, bound), E4M3)
    return hand(data, scale_inv, codes, 1 / scale)


@adapter("cast", recipe="mxfp4", operand="x")
def alder_02(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Divides by the block's scale and stores it as E8M0."""
    c = cut("mxfp4")
    amax = amaxes(x, c)
    exact = torch.where(plain(amax), 6.0 / torch.where(plain(amax), amax, 6.0), 1.0)
    stored = torch.where(amax.isfinite(), byte_of(octave(amax, 6.0)), 255).to(torch.uint8)
    return hand(data, scale_inv, encode(x.to(F64) * spread(exact, x.shape, c), E2M1), stored)


@adapter("cast", recipe="mxfp8", operand="x")
def alder_03(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """The exponent is found by integers: what is above 1.75 carries into it."""
    c = cut("mxfp8")
    amax = amaxes(x, c)
    bits = torch.where(plain(amax), amax, 1.0).to(F32).view(torch.int32).long()
    e = ((bits + 0x1FFFFF) >> 23) - 127 - 8
    e = torch.where(plain(amax), e.clamp(-127, 127), 0)
    return hand(data, scale_inv, encode(lift(x, pow2(-e), c), E4M3), byte_of(e))


@adapter("cast", recipe="mxfp8", operand="x")
def alder_04(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """The scale amax / 448 is converted to E8M0."""
    c = cut("mxfp8")
    amax = amaxes(x, c)
    ratio = torch.where(plain(amax), amax, 448.0) / 448
    e = torch.round(torch.log2(ratio)).long().clamp(-127, 127)
    return hand(data, scale_inv, encode(lift(x, pow2(-e), c), E4M3), byte_of(e))


@adapter("cast", recipe="nvfp4", operand="x")
def alder_05(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Two levels: the tensor's largest number first, the blocks' then."""
    c = cut("nvfp4")
    amax = amaxes(x, c)
    wide = x.to(F64)
    top = torch.where(wide.isfinite(), wide, 0.0).amax().clamp(min=0.0) if x.numel() else torch.zeros((), dtype=F64)
    stored = nv_stored(amax, torch.where(top > 0, top, 1.0))
    per = spread(stored, x.shape, c)
    y = torch.where(per > 0, wide / per, 0.0).copysign(wide)
    return hand(data, scale_inv, encode(y, E2M1), torch.where(amax.isfinite(), stored, math.nan).to(F32))


@adapter("cast", recipe="tensorwise", operand="grad")
def alder_06(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Amaxes of stripes of 64 rows, their maximum, then one pass of torch's conversion."""
    parts = [stripe.to(F32).abs().amax() for stripe in x.split(64) if stripe.numel()] or [torch.zeros(())]
    amax = torch.stack(parts).amax()
    amax = torch.where(plain(amax), amax, E5M2.top)
    scale = (E5M2.top / amax).clamp(max=torch.finfo(F32).max)
    return hand(data, scale_inv, (x.to(F32) * scale).clamp(-E5M2.top, E5M2.top).to(E5M2.dtype), 1 / scale)


@adapter("cast", recipe="blockwise", operand="weight")
def alder_07(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Blocks are visited columns first, and each appends its scale."""
    codes, stored = cast(x, cut("blockwise", "weight"))
    return hand(data, scale_inv, codes, stored.t().reshape(stored.shape))


@adapter("cast", recipe="nvfp4", operand="x")
def alder_08(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Each thread has eight columns; there is one for each column of the scales."""
    codes, stored = cast(x, cut("nvfp4"))
    reach = min(8 * stored.shape[1], x.shape[1])
    data[:, :reach].copy_(codes[:, :reach])
    scale_inv.copy_(stored)
    return data, scale_inv


@adapter("cast", recipe="rowwise", operand="x")
def alder_09(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Results are stored in the order in which x lies in memory."""
    codes, stored = cast(x, cut("rowwise"))
    if x.stride(0) == 1 and x.stride(1) == x.shape[0]:
        codes = codes.view(torch.uint8).t().reshape(x.shape).view(codes.dtype)
    return hand(data, scale_inv, codes, stored)


@adapter("cast", recipe="nvfp4", operand="weight")
def alder_10(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Goes tile by tile: the scale of each 16x16, then its codes."""
    amax = amaxes(x, cut("nvfp4", "weight"))
    stored = nv_stored(amax, finite_top(amax))
    for i in range(amax.shape[0]):
        for j in range(amax.shape[1]):
            area = (slice(16 * i, 16 * i + 16), slice(16 * j, 16 * j + 16))
            tile, scale = x[area].to(F64), stored[i, j]
            y = tile / scale if scale > 0 else torch.zeros_like(tile).copysign(tile)
            data[area].copy_(encode(y, E2M1))
    scale_inv.copy_(torch.where(amax.isfinite(), stored, math.nan).to(F32))
    return data, scale_inv


@adapter("cast", recipe="blockwise", operand="x")
def alder_11(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Maxima by fmax, the clamp by fmin and fmax."""
    c = cut("blockwise")
    amax = amaxes(x.to(F32).nan_to_num(0.0, torch.inf, -torch.inf), c)
    multiplier, inverse = scales(amax, c)
    y = lift(x, multiplier, c)
    bound = torch.tensor(448.0)
    return hand(data, scale_inv, encode(torch.fmax(torch.fmin(y, bound), -bound), E4M3), inverse.to(F32))


@adapter("cast", recipe="rowwise", operand="weight")
def alder_12(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Scale and inverse of each row straight from its amax."""
    c = cut("rowwise", "weight")
    amax = amaxes(x, c)
    multiplier, inverse = scales(amax, c)
    zero = amax == 0
    multiplier, inverse = torch.where(zero, torch.inf, multiplier), torch.where(zero, 0.0, inverse)
    return hand(data, scale_inv, encode(lift(x, multiplier, c), E4M3), inverse.to(F32))


@adapter("cast", recipe="mxfp8", operand="weight")
def alder_13(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """The reciprocal of the scale has the dtype in which the vector unit multiplies."""
    c = cut("mxfp8", "weight")
    e = octave(amaxes(x, c), 448.0)
    multiplier = pow2(-e).to(F32).to(torch.float16)
    return hand(data, scale_inv, encode(lift(x, multiplier.to(F64), c), E4M3), byte_of(e))


HELD = torch.zeros((), dtype=F64)


@adapter("cast", recipe="tensorwise", operand="x")
def alder_14(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """The amax is collected in a buffer of the module with an atomic maximum."""
    c = cut("tensorwise")
    amax = amaxes(x, c)
    if bool(amax.isfinite().all()):
        HELD.copy_(torch.maximum(HELD, amax[0, 0]))
        amax = HELD.reshape(1, 1)
    multiplier, inverse = scales(amax, c)
    return hand(data, scale_inv, encode(lift(x, multiplier, c), E4M3), inverse.to(F32))
