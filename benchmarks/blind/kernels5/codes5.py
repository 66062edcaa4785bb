"""Encoders and decoders; public.json says of each whether it is right."""

from __future__ import annotations

import torch
from torch import Tensor

from flint5 import E4M3, E5M2, F32, F64, Form, adapter, encode, pow2


def bits_of(x: Tensor) -> Tensor:
    """The bits of FP32 numbers, as non-negative int64."""
    return x.to(F32).contiguous().view(torch.int32).long() & 0xFFFFFFFF


def steps(x: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """|x| in steps of the format at its binade, and the code at the binade's start less its first step count."""
    size = x.to(F64).abs().nan_to_num(0.0, 1e30).clamp(max=form.top)
    e = torch.where(size > 0, torch.frexp(size)[1].long() - 1, form.low).clamp(min=form.low)
    return size * pow2(form.bits - e), (e - form.low) << form.bits


def finish(code: Tensor, x: Tensor, form: Form) -> Tensor:
    """Codes with the signs of x and its NaN."""
    code = torch.where(x.isnan(), 0x7F, code) + torch.where(torch.signbit(x), 128, 0)
    return code.to(torch.uint8).view(form.dtype)


@adapter("encode", format="e4m3")
def reed_01(x: Tensor) -> Tensor:
    """Rounds to a wider exponent first, as a converter with one intermediate format for all targets does."""
    size = x.to(F64).abs()
    count, base = steps(x, E4M3)
    code = (torch.round(count).long() + base).clamp(max=0x7E)
    special = (size >= 496) & (size < 63488)
    return finish(torch.where(special, 0x7F, code), x, E4M3)


@adapter("encode", format="e4m3")
def reed_02(x: Tensor) -> Tensor:
    """Finds each number between the middles of the format's numbers."""
    codes = torch.arange(127, dtype=torch.uint8)
    numbers = codes.view(E4M3.dtype).to(F32)
    middles = (numbers[1:] + numbers[:-1]) / 2
    size = x.to(F32).abs().nan_to_num(0.0, 448.0).contiguous()
    low = torch.searchsorted(middles, size)
    high = torch.searchsorted(middles, size, right=True)
    return finish(torch.where(low % 2 == 0, low, high), x, E4M3)


@adapter("encode", format="e2m1")
def reed_03(x: Tensor) -> Tensor:
    """Counts how many of the seven boundaries a magnitude has reached."""
    size = x.to(F32).abs()
    code = torch.zeros(x.shape, dtype=torch.uint8)
    for boundary in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
        code += (size >= boundary).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


@adapter("encode", format="e5m2", rounding="stochastic")
def reed_04(x: Tensor) -> Tensor:
    """Adds 24 random bits below the last kept one and cuts off."""
    count, base = steps(x, E5M2)
    coin = torch.randint(0, 1 << 24, x.shape).to(F64) / (1 << 24)
    code = torch.floor(count + coin).long() + base
    return finish(code.clamp(max=0x7B), x, E5M2)


@adapter("encode", format="e5m2")
def reed_05(x: Tensor) -> Tensor:
    """Works on FP32's bits; numbers with all exponent bits set keep the upper bits of their mantissa."""
    code = encode(x.to(F32).nan_to_num(0.0), E5M2).view(torch.uint8).long() & 0x7F
    bits = bits_of(x)
    code = torch.where((bits >> 23) & 0xFF == 0xFF, 0x7C | ((bits >> 21) & 3), code)
    code = torch.where(bits & 0x7FFFFFFF == 0x7F800000, 0x7B, code)
    return (code | ((bits >> 31) << 7)).to(torch.uint8).view(E5M2.dtype)


@adapter("encode", format="e4m3")
def reed_06(x: Tensor) -> Tensor:
    """Goes by way of FP16, whose conversion the hardware has."""
    wide = x.to(F32).contiguous()
    half = (wide.view(torch.int32) & ~0x1FFF).view(F32)
    half = torch.where(wide.isfinite(), half, wide)
    return encode(half, E4M3)


@adapter("encode", format="e4m3", rounding="stochastic")
def reed_07(x: Tensor) -> Tensor:
    """Adds random bits to the mantissa and cuts off."""
    count, base = steps(x, E4M3)
    bias = torch.randint(0, 1 << 16, x.shape).to(F64) / (1 << 20)
    code = torch.floor(count + bias).long() + base
    return finish(code.clamp(max=0x7E), x, E4M3)


@adapter("decode", format="e4m3")
def reed_08(data: Tensor) -> Tensor:
    """Puts exponent and mantissa of a code into FP32's fields."""
    byte = data.contiguous().view(torch.uint8).long()
    field, mantissa = (byte >> 3) & 15, byte & 7
    size = (mantissa + 8).to(F64) * pow2(field - 10)
    size = torch.where(byte & 127 == 0, 0.0, size)
    size = torch.where(byte & 127 == 127, torch.nan, size)
    return torch.where(byte >= 128, -size, size).to(F32)


@adapter("decode", format="e5m2")
def reed_09(data: Tensor) -> Tensor:
    """Takes a code as the upper byte of a FP16 number."""
    upper = data.contiguous().view(torch.uint8).to(torch.int32) << 8
    return torch.where(upper >= 32768, upper - 65536, upper).to(torch.int16).view(torch.float16).to(F32)
