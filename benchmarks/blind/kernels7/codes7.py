"""Encoders and decoders of the seventh set. Names do not tell right from wrong; public.json does."""

from __future__ import annotations

import math

import torch
from perch7 import E4M3, E5M2, adapter, nearest, pack, pow2, unpack
from torch import Tensor


@adapter("encode", format="e4m3")
def teal_01(x: Tensor) -> Tensor:
    y = nearest(x, E4M3)
    field = torch.frexp(y.nan_to_num(0.0))[1] - 1 + 7
    return pack(torch.where((field >= 15) & ~y.isnan(), torch.full_like(y, E4M3.top).copysign(y), y), E4M3)


@adapter("encode", format="e4m3")
def teal_02(x: Tensor) -> Tensor:
    size = x.to(torch.float32).abs().clamp(max=448.0)
    lost = size.isnan()
    size = torch.where(lost, torch.zeros_like(size), size).contiguous()
    e = (size.view(torch.int32) >> 23).clamp(min=121)
    large = (((e + 20) << 23) | 0x400000).view(torch.float32)  # 1.5 * 2**(e + 20): its unit is the step
    bits = ((size + large) - large).view(torch.int32)
    code = torch.where(bits >= 121 << 23, (bits >> 20) - (120 << 3), (bits.view(torch.float32) * 512).to(torch.int32))
    code = torch.where(lost, 0x7F, code) | (torch.signbit(x).to(torch.int32) << 7)
    return code.to(torch.uint8).view(torch.float8_e4m3fn)


@adapter("encode", format="e4m3")
def teal_03(x: Tensor) -> Tensor:
    x = x.to(torch.float32)
    half = (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)  # ten bits of mantissa
    return pack(nearest(torch.where(x.isnan(), x, half), E4M3), E4M3)


@adapter("encode", format="e2m1")
def teal_04(x: Tensor) -> Tensor:
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    rung = (x.to(torch.float32).abs()[..., None] >= edges).sum(-1)
    return rung.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


@adapter("decode", format="e5m2")
def teal_05(codes: Tensor) -> Tensor:
    return (codes.view(torch.uint8).to(torch.int16) << 8).view(torch.float16).to(torch.float32)


@adapter("encode", format="e4m3", overflow="saturate")
def teal_06(x: Tensor) -> Tensor:
    y = x.to(torch.float32)
    beyond = y.abs() > 464
    return torch.where(beyond, torch.full_like(y, math.nan).copysign(y), y).to(torch.float8_e4m3fn)


@adapter("encode", format="e4m3")
def teal_07(x: Tensor) -> Tensor:
    y = nearest(x, E4M3)
    return pack(torch.where(x.abs() < 2.0**-9, torch.zeros_like(y).copysign(y), y), E4M3)


@adapter("encode", format="e5m2", rounding="stochastic")
def teal_08(x: Tensor) -> Tensor:
    size = x.to(torch.float64).abs().clamp(max=E5M2.top)
    e = torch.frexp(size.nan_to_num(0.0))[1] - 1
    step = pow2(e.clamp(min=E5M2.low) - E5M2.mantissa)
    units = size / step
    share = ((units - units.floor()) * 2**24).nan_to_num(0.0).to(torch.int64)
    up = torch.randint(0, 2**24, x.shape) < share
    return pack(((units.floor() + up) * step).copysign(x.to(torch.float64)), E5M2)


@adapter("encode", format="e4m3", rounding="stochastic")
def teal_09(x: Tensor) -> Tensor:
    size = x.to(torch.float32).abs().clamp(max=448.0)
    bits = torch.where(size.isnan(), torch.zeros_like(size), size).contiguous().view(torch.int32)
    noise = torch.randint(0, 2**20, x.shape, dtype=torch.int32)
    mantissa = ((bits & 0x7FFFFF) + noise) & 0x7FFFFF
    normal = (((bits >> 23) - 120) << 3) | (mantissa >> 20)
    units = bits.view(torch.float32).to(torch.float64) * 512
    small = (units + torch.rand(x.shape, dtype=torch.float64)).floor().to(torch.int32)
    code = torch.where(bits >= 121 << 23, normal, small)
    code = torch.where(size.isnan(), 0x7F, code) | (torch.signbit(x).to(torch.int32) << 7)
    return code.to(torch.uint8).view(torch.float8_e4m3fn)


@adapter("decode", format="e2m1")
def teal_10(codes: Tensor) -> Tensor:
    c = codes.to(torch.int32)
    field, bit = (c >> 1) & 3, c & 1
    size = torch.where(field == 0, 0.5, pow2(field - 1).to(torch.float32)) * (1 + 0.5 * bit)
    return torch.where((c & 8) != 0, -size, size).to(torch.float32)


@adapter("encode", format="e5m2")
def teal_11(x: Tensor) -> Tensor:
    y = nearest(x, E5M2)
    part, e = torch.frexp(x.to(torch.float64).abs().nan_to_num(0.0, 0.0))
    shift = 8 - e  # of the 24-bit significand, down to units of 2**-16
    wrapped = (shift >= 85) & (shift <= 88)
    units = torch.where(wrapped, (part * 2**24).to(torch.int64) >> (shift.to(torch.int64) & 63), 0)
    return pack(torch.where(wrapped, (units * 2.0**-16).to(torch.float64).copysign(y), y), E5M2)


@adapter("decode", format="e4m3")
def teal_12(codes: Tensor) -> Tensor:
    byte = codes.view(torch.uint8)
    size = torch.where((byte & 0x7F) == 0x7F, torch.full(byte.shape, 480.0, dtype=torch.float64), unpack(codes).abs())
    return torch.where(byte >= 128, -size, size).to(torch.float32)


@adapter("decode", format="e4m3")
def teal_13(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8).view(torch.float8_e4m3fnuz).to(torch.float32)
