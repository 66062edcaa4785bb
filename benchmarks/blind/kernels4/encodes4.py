"""Encoders and decoders."""

from __future__ import annotations

import math

import torch
from stones4 import E4M3, E5M2, adapter, codes, halves, two, weigh
from torch import Tensor


@adapter("encode", format="e4m3")
def ring_01(x: Tensor) -> Tensor:
    """One test for overflow on the exponent field, as in a header for another accelerator."""
    byte = codes(x.float(), E4M3).view(torch.uint8)
    over = x.float().abs() >= 256.0
    return torch.where(over, (byte & 128) | 0x7E, byte).view(torch.float8_e4m3fn)


@adapter("encode", format="e4m3")
def ring_02(x: Tensor) -> Tensor:
    """Rounds by adding half a unit to the bits of FP32."""
    bits = x.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    sign, size = (bits >> 24) & 128, bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (size.to(torch.int32).view(torch.float32) + 16384.0).view(torch.int32).to(torch.int64) - 0x46800000
    code = torch.where(size < (121 << 23), small, normal).clamp(max=0x7E)
    code = torch.where(size >= 0x7F800000, 0x7F, code)
    return (code | sign).to(torch.uint8).view(torch.float8_e4m3fn)


@adapter("encode", format="e4m3")
def ring_03(x: Tensor) -> Tensor:
    """Keeps three bits of the mantissa, then shifts what lies below the smallest normal number."""
    wide = x.to(torch.float64)
    step = two(torch.frexp(wide.nan_to_num(0.0, 0.0, 0.0))[1].to(torch.int64).clamp(min=-900) - 4)
    kept = torch.where(wide.abs() < 2.0**-6, torch.round(wide / step) * step, wide)
    return codes(kept, E4M3)


@adapter("encode", format="e5m2")
def ring_04(x: Tensor) -> Tensor:
    """Rounds without a limit and looks for overflow behind it."""
    wide = x.float()
    count, base = halves(wide, E5M2)
    code = (torch.round(count).to(torch.int64) + base).clamp(max=0x7C)
    code = torch.where(wide.isnan(), 0x7F, torch.where(wide.isinf(), 0x7C, code))
    return (code | torch.where(torch.signbit(wide), 128, 0)).to(torch.uint8).view(torch.float8_e5m2)


@adapter("encode", format="e5m2", overflow="inf")
def ring_05(x: Tensor) -> Tensor:
    """Rounds by adding and subtracting a large number in fp64."""
    wide = x.to(torch.float64)
    size = wide.abs().nan_to_num(0.0, 1e6).clamp(max=1e6)
    large = two((torch.frexp(size)[1].to(torch.int64) - 1).clamp(min=-14) - 2 + 52)
    size = (size + large) - large
    field = torch.where(size > 0, torch.frexp(size)[1].to(torch.int64) - 1, -14).clamp(min=-14)
    code = ((field + 14) << 2) + (size * two(2 - field)).to(torch.int64)
    code = torch.where(wide.isnan(), 0x7E, code.clamp(max=0x7C))
    return (code + torch.where(torch.signbit(wide), 128, 0)).to(torch.uint8).view(torch.float8_e5m2)


@adapter("encode", format="e2m1")
def ring_06(x: Tensor) -> Tensor:
    """Counts the thresholds that |x| reaches."""
    size = x.float().abs()
    code = sum((size >= t).to(torch.int64) for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
    return (code + torch.where(torch.signbit(x.float()), 8, 0)).to(torch.uint8)


@adapter("encode", format="e2m1")
def ring_07(x: Tensor) -> Tensor:
    """Counts the thresholds, the odd ones with their own value and the even ones without it."""
    size = x.float().abs()
    code = sum((size > t).to(torch.int64) for t in (0.25, 1.25, 2.5, 5.0))
    code = code + sum((size >= t).to(torch.int64) for t in (0.75, 1.75, 3.5))
    return (code + torch.where(torch.signbit(x.float()), 8, 0)).to(torch.uint8)


@adapter("encode", format="e4m3", rounding="stochastic")
def ring_08(x: Tensor) -> Tensor:
    """Adds 20 random bits to the mantissa of FP32 and cuts."""
    wide = x.float()
    bits = wide.contiguous().view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    noise = torch.randint(0, 1 << 20, bits.shape)
    mantissa = ((bits & 0x7FFFFF) + noise) & 0x7FFFFF
    normal = (((bits & 0x7F800000) | mantissa) >> 20) - (120 << 3)
    count, _ = halves(wide.clamp(-0.015625, 0.015625), E4M3)
    small = (count + torch.rand(count.shape, dtype=torch.float64)).floor().to(torch.int64)
    code = torch.where(bits < (121 << 23), small, normal).clamp(max=0x7E)
    return weigh(torch.where(wide.isinf(), 0x7E, code), wide, E4M3)


@adapter("encode", format="e4m3", rounding="stochastic")
def ring_09(x: Tensor) -> Tensor:
    """Draws a threshold for each number and compares the part that is cut off with it."""
    wide = x.to(torch.float64)
    count, base = halves(wide, E4M3)
    down = count.floor()
    up = torch.rand(count.shape, dtype=torch.float64) < count - down
    return weigh((down.clamp(max=1 << 20).to(torch.int64) + up + base).clamp(max=0x7E), wide, E4M3)


@adapter("encode", format="e5m2", rounding="stochastic")
def ring_10(x: Tensor) -> Tensor:
    """Adds random bits below the last one that stays."""
    wide = x.to(torch.float64)
    count, base = halves(wide, E5M2)
    noise = torch.randint(0, 1 << 16, count.shape).to(torch.float64) / (1 << 20)
    return weigh(((count + noise).floor().clamp(max=1 << 20).to(torch.int64) + base).clamp(max=0x7B), wide, E5M2)


@adapter("decode", format="e2m1")
def ring_11(codes_: Tensor) -> Tensor:
    """Moves both fields into BF16 and adds the difference of the biases."""
    byte = codes_.view(torch.uint8).to(torch.int32)
    bits = ((byte & 8) << 12) | ((((byte >> 1) & 3) + 126) << 7) | ((byte & 1) << 6)
    return bits.to(torch.int16).view(torch.bfloat16)


@adapter("decode", format="e5m2")
def ring_12(codes_: Tensor) -> Tensor:
    """By the formula of fields and bias; the last field is for NaN and infinity."""
    byte = codes_.contiguous().view(torch.uint8).to(torch.int64)
    field, mantissa = (byte >> 2) & 31, byte & 3
    size = torch.where(field > 0, (4 + mantissa).double() * two(field - 18), mantissa.double() * two(torch.full_like(field, -17)))
    size = torch.where(field == 31, torch.where(mantissa == 0, math.inf, math.nan), size)
    return torch.where(byte > 127, -size, size).float()


@adapter("decode", format="e4m3")
def ring_13(codes_: Tensor) -> Tensor:
    """Puts the fields into FP16 and multiplies by 2**8."""
    byte = codes_.contiguous().view(torch.uint8).to(torch.int32)
    half = (((byte & 128) << 8) | ((byte & 127) << 7)).to(torch.int16).view(torch.float16)
    return torch.where((byte & 127) == 127, math.nan, half.float() * 256.0)


