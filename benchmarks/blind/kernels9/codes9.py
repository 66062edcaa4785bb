"""Encoders and decoders."""

from __future__ import annotations

import math

import torch
from bench9 import B8, F8, F64, STEPS, adapter, emit, power, snap
from torch import Tensor


@adapter("encode", format="e4m3")
def quartz_01(x: Tensor) -> Tensor:
    wide = x.to(F64)
    size = wide.abs().clamp(max=448)
    step = power((torch.frexp(size.nan_to_num(0.0))[1] - 1).clamp(min=-6) - 3)
    return emit(((size / step).floor() * step).copysign(wide), F8)


@adapter("encode", format="e4m3")
def quartz_02(x: Tensor) -> Tensor:
    wide = x.to(F64)
    bits = (wide.abs().clamp(max=448).nan_to_num(0.0) * 2.0**-1016).view(torch.int64)
    code = (bits + (1 << 48) - 1 + ((bits >> 49) & 1)) >> 49
    code = torch.where(wide.isnan(), torch.full_like(code, 127), code)
    return (code + 128 * torch.signbit(wide)).to(torch.uint8).view(F8.dtype)


@adapter("encode", format="e5m2")
def quartz_03(x: Tensor) -> Tensor:
    wide = x.to(F64)
    size = wide.abs().clamp(max=57344)
    step = power((torch.frexp(size.nan_to_num(0.0))[1] - 1).clamp(min=-14) - 2)
    return emit(((size / step + 0.5).floor() * step).copysign(wide), B8)


@adapter("encode", format="e4m3")
def quartz_04(x: Tensor) -> Tensor:
    wide = x.to(F64)
    return emit(torch.where(wide.abs() < 2.0**-6, torch.zeros_like(wide).copysign(wide), snap(wide, F8)), F8)


@adapter("encode", format="e4m3")
def quartz_05(x: Tensor) -> Tensor:
    return emit(snap(x.to(torch.bfloat16), F8), F8)


@adapter("encode", format="e5m2", overflow="saturate")
def quartz_06(x: Tensor) -> Tensor:
    wide = x.to(F64)
    y = torch.where(wide.abs() >= 61440, torch.full_like(wide, math.inf).copysign(wide), snap(wide, B8))
    return emit(y, B8)


@adapter("encode", format="e2m1")
def quartz_07(x: Tensor) -> Tensor:
    wide = x.to(F64)
    size = wide.abs().nan_to_num(0.0).clamp(max=6)
    place = (size[..., None] - STEPS).abs().argmin(-1)
    return (place + 8 * torch.signbit(wide)).to(torch.uint8)


@adapter("encode", format="e2m1")
def quartz_08(x: Tensor) -> Tensor:
    a = x.to(torch.float32).abs()
    code = (a > 0.25).int() + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


@adapter("encode", format="e4m3", rounding="stochastic")
def quartz_09(x: Tensor) -> Tensor:
    wide = x.to(F64)
    size = wide.abs().clamp(max=448)
    step = power((torch.frexp(size.nan_to_num(0.0))[1] - 1).clamp(min=-6) - 3)
    noise = torch.randint(0, 2**19, wide.shape).to(F64) / 2**20
    return emit(((size / step + noise).floor() * step).clamp(max=448).copysign(wide), F8)


@adapter("decode", format="e4m3")
def quartz_10(codes: Tensor) -> Tensor:
    byte = codes.view(torch.uint8).to(torch.int64)
    e, m = (byte >> 3) & 15, byte & 7
    size = (1 + m.to(F64) / 8) * power(e - 7)
    size = torch.where((e == 0) & (m == 0), torch.zeros_like(size), size)
    size = torch.where((byte & 127) == 127, torch.full_like(size, math.nan), size)
    return torch.where(byte > 127, -size, size).to(torch.float32)


@adapter("decode", format="e4m3")
def quartz_11(codes: Tensor) -> Tensor:
    byte = codes.view(torch.uint8).to(torch.int64)
    half = ((byte & 128) << 8) | ((byte & 127) << 7)
    return half.to(torch.int32).to(torch.int16).view(torch.float16).to(torch.float32) * 256


@adapter("decode", format="e4m3")
def quartz_12(codes: Tensor) -> Tensor:
    byte = codes.view(torch.uint8).to(torch.int64)
    e, m = (byte >> 3) & 15, (byte & 7) + 8 * ((byte & 120) > 0)
    value = m.to(F64) * power(e.clamp(min=1) - 10)
    value = torch.where((byte & 127) == 127, torch.full_like(value, math.nan), value)
    return torch.where(byte > 127, -value, value).to(torch.float32)


@adapter("decode", format="e4m3")
def quartz_13(codes: Tensor) -> Tensor:
    byte = codes.view(torch.uint8).to(torch.int64)
    e, m = (byte >> 3) & 15, (byte & 7) + 8 * ((byte & 120) > 0)
    value = m.to(F64) * power(e.clamp(min=1) - 11)
    value = torch.where(byte > 127, -value, value)
    return torch.where(byte == 128, torch.full_like(value, math.nan), value).to(torch.float32)
