"""Encoders and decoders. Which of them are right, and why not, is in public.json."""

from __future__ import annotations

import math

import torch
from slate6 import E4M3, E5M2, adapter, numbers, settle, step_round, two
from torch import Tensor


@adapter("encode", format="e4m3")
def wren_01(x: Tensor) -> Tensor:
    """FP32 to E4M3 by fields: exponent, then the upper bits of the mantissa with round to nearest even."""
    x = x.to(torch.float32)
    wide = step_round(x, E4M3)
    fine = wide.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)
    normal = (wide.abs() >= 2.0**-6) & ~wide.isnan()
    return torch.where(normal, fine & 0xFE, fine).view(torch.float8_e4m3fn)


@adapter("encode", format="e4m3")
def wren_02(x: Tensor) -> Tensor:
    """FP32 to E4M3 with integers: half of the last kept place and its parity are added, then the rest is shifted out."""
    x = x.to(torch.float32).contiguous()
    bits = x.view(torch.int32).to(torch.int64)
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    exponent, mantissa = size >> 23, size & 0x7FFFFF
    shift = 20 + (121 - exponent).clamp(0, 30)
    whole = torch.where(exponent > 0, mantissa | 0x800000, mantissa)
    kept = (whole + (torch.ones_like(whole) << (shift - 1)) - 1 + ((whole >> shift) & 1)) >> shift
    code = (kept + ((exponent - 121).clamp(min=0) << 3)).clamp(max=0x7E)
    code = torch.where(size > 0x7F800000, 0x7F, code)
    return (code | sign).to(torch.uint8).view(torch.float8_e4m3fn)


@adapter("encode", format="e4m3")
def wren_03(x: Tensor) -> Tensor:
    """FP32 to E4M3; results below the normal numbers are shifted once more behind the rounding."""
    x = x.to(torch.float32)
    exponent = torch.frexp(x.to(torch.float64).nan_to_num(0.0, 0.0, 0.0))[1] - 1
    step = two(exponent - 3)
    three = torch.round(x.to(torch.float64) / step) * step
    return settle(torch.where(x.abs() < 2.0**-6, three, x.to(torch.float64)), E4M3)


@adapter("encode", format="e4m3")
def wren_04(x: Tensor) -> Tensor:
    """FP32 to E4M3, saturating."""
    x = x.to(torch.float32)
    code = settle(x, E4M3).view(torch.uint8)
    return torch.where(x.isinf(), code & 0x80, code).view(torch.float8_e4m3fn)


@adapter("encode", format="e5m2")
def wren_05(x: Tensor) -> Tensor:
    """FP32 to E5M2: the upper byte of a FP16 number."""
    half = x.to(torch.float32).clamp(-57344.0, 57344.0).to(torch.float16).contiguous()
    byte = ((half.view(torch.int16) >> 8) & 0xFF).to(torch.uint8)
    return torch.where(half.isnan(), byte | 0x7F, byte).view(torch.float8_e5m2)


@adapter("encode", format="e2m1")
def wren_06(x: Tensor) -> Tensor:
    """FP32 to E2M1 by thresholds."""
    size = x.to(torch.float32).abs().nan_to_num(0.0)
    code = 2 * (size >= 0.75).int() + (size > 1.25).int() + (size >= 1.75).int() + (size > 2.5).int() + (size >= 3.5).int() + (size > 5.0).int()
    return (code | (torch.signbit(x).int() << 3)).to(torch.uint8)


@adapter("encode", format="e4m3", rounding="stochastic")
def wren_07(x: Tensor) -> Tensor:
    """FP32 to E4M3 with a draw for each number."""
    x = x.to(torch.float64).clamp(-448.0, 448.0)
    step = two((torch.frexp(x.nan_to_num(0.0))[1] - 1).clamp(min=-6) - 3)
    drawn = (torch.floor(x / step + torch.rand(x.shape, dtype=torch.float64)) * step).clamp(-448.0, 448.0)
    codes = numbers(drawn, E4M3)
    codes = settle(x, E4M3)
    return codes


@adapter("encode", format="e5m2", rounding="stochastic")
def wren_08(x: Tensor) -> Tensor:
    """FP32 to E5M2: a number goes to the upper neighbour if a draw lies below its share of the step."""
    x = x.to(torch.float64).clamp(-57344.0, 57344.0)
    step = two((torch.frexp(x.nan_to_num(0.0))[1] - 1).clamp(min=-14) - 2)
    ratio = x / step
    low = torch.floor(ratio)
    drawn = (low + (torch.rand(x.shape, dtype=torch.float64) < ratio - low)) * step
    return numbers(drawn.copysign(x), E5M2)


@adapter("decode", format="e4m3")
def wren_09(codes: Tensor) -> Tensor:
    """E4M3 to FP32: exponent and mantissa by their formula."""
    byte = codes.contiguous().view(torch.uint8).to(torch.int32)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    size = torch.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * two(exponent - 10))
    size = torch.where(exponent == 15, torch.where(mantissa == 0, math.inf, math.nan), size)
    return torch.where(byte >= 128, -size, size).to(torch.float32)


@adapter("decode", format="e4m3")
def wren_10(codes: Tensor) -> Tensor:
    """E4M3 to FP32 through FP16: seven bits moved below the sign, then times 256."""
    byte = codes.contiguous().view(torch.uint8).to(torch.int32)
    moved = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
    half = torch.where(moved >= 0x8000, moved - 0x10000, moved).to(torch.int16).view(torch.float16)
    return torch.where((byte & 0x7F) == 0x7F, math.nan, half.to(torch.float32) * 256.0)


@adapter("decode", format="e4m3")
def wren_11(codes: Tensor) -> Tensor:
    """E4M3 to FP32 by a table of 256 numbers."""
    return codes.contiguous().view(torch.float8_e4m3fnuz).to(torch.float32)
