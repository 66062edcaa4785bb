"""Encoders and decoders of the tenth set. public.json says which are right."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from yard10 import E2M1, E4M3, F64, adapter, codes_of, exponents, means, two


@adapter("encode", format="e4m3")
def hull_01(x: Tensor) -> Tensor:
    size = x.to(F64).abs().nan_to_num(0.0).clamp(max=240.0)
    e = exponents(size).clamp(min=-7)
    code = ((e + 7) << 3) + torch.round(size * two(3 - e)).long()
    code = torch.where(x.isnan(), 127, code.clamp(max=126)) + (torch.signbit(x).long() << 7)
    return code.to(torch.uint8)


@adapter("encode", format="e4m3")
def hull_02(x: Tensor) -> Tensor:
    return codes_of(x, E4M3, lambda t: torch.floor(t + 0.5))


@adapter("encode", format="e4m3")
def hull_03(x: Tensor) -> Tensor:
    full = x.to(F64)
    grid = means(torch.arange(127, dtype=torch.uint8), E4M3)
    edge = (grid[1:] + grid[:-1]) / 2
    size = full.abs().nan_to_num(0.0).contiguous()
    code = torch.bucketize(size, edge)  # a tie stays below
    at = edge[code.clamp(max=len(edge) - 1)]
    code = code + ((size == at) & (code % 2 == 1)).long()
    code = torch.where(full.isnan(), 127, code)
    return (code | torch.where(torch.signbit(full), 128, 0)).to(torch.uint8)


@adapter("encode", format="e5m2")
def hull_04(x: Tensor) -> Tensor:
    half = x.float().clamp(-57344.0, 57344.0).half().contiguous()
    code = (half.view(torch.int16).int() >> 8) & 255
    code = torch.where(x.isnan(), 127, code)
    return code.to(torch.uint8)


@adapter("encode", format="e4m3")
def hull_05(x: Tensor) -> Tensor:
    y = x.float()
    y = torch.where(y.abs() < 2.0**-6, torch.zeros_like(y).copysign(y), y)
    return codes_of(y, E4M3)


@adapter("encode", format="e5m2")
def hull_06(x: Tensor) -> Tensor:
    y = x.float().contiguous()
    bits = y.view(torch.int32).long() & 0xFFFFFFFF
    size = bits & 0x7FFFFFFF
    up = (size + 0xFFFFF + ((size >> 21) & 1)) >> 21
    normal = (up - ((127 - 15) << 2)).clamp(max=123)
    small = torch.round(y.abs().double().nan_to_num(0.0).clamp(max=1.0) * 65536).long()
    code = torch.where(size < ((127 - 14) << 23), small, normal)
    code = torch.where(size > 0x7F800000, 127, code)
    return (code | ((bits >> 31) << 7)).to(torch.uint8)


@adapter("encode", format="e2m1")
def hull_07(x: Tensor) -> Tensor:
    size = x.to(F64).abs().nan_to_num(0.0)
    code = sum((size > edge).long() for edge in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
    return (code | (torch.signbit(x).long() << 3)).to(torch.uint8)


@adapter("encode", format="e4m3")
def hull_08(x: Tensor) -> Tensor:
    top = torch.full_like(x, 448.0)
    return codes_of(torch.fmax(torch.fmin(x, top), -top), E4M3)


@adapter("encode", format="e4m3", rounding="stochastic")
def hull_09(x: Tensor) -> Tensor:
    return codes_of(x, E4M3, lambda t: torch.round(t + torch.rand_like(t)))


@adapter("decode", format="e4m3")
def hull_10(codes: Tensor) -> Tensor:
    c = codes.view(torch.uint8).long()
    field, rest = (c >> 3) & 15, (c & 7).double()
    size = (1 + rest / 8) * two(field - 7)
    size = torch.where((c & 127) == 0, 0.0, size)
    size = torch.where((c & 127) == 127, math.nan, size)
    return torch.where(c > 127, -size, size).float()


@adapter("decode", format="e2m1")
def hull_11(codes: Tensor) -> Tensor:
    c = codes.view(torch.uint8).long()
    size = means((c & 7).to(torch.uint8), E2M1)
    return torch.where(c > 127, -size, size).float()


@adapter("decode", format="e4m3")
def hull_12(codes: Tensor) -> Tensor:
    c = codes.contiguous().view(torch.uint8).to(torch.int32)
    half = ((c & 127) << 7) | ((c & 128) << 8)
    y = half.to(torch.int16).view(torch.float16).float() * 256
    return torch.where((c & 127) == 127, math.nan, y)


@adapter("decode", format="e5m2")
def hull_13(codes: Tensor) -> Tensor:
    c = codes.view(torch.uint8).long()
    field, rest = (c >> 2) & 31, (c & 3).double()
    size = torch.where(field > 0, (1 + rest / 4) * two(field - 15), rest * 2.0**-16)
    return torch.where(c > 127, -size, size).float()


