"""Adapters that encode and decode."""

from __future__ import annotations

import math

import torch
from blocks import E2M1, E4M3, E4M3FNUZ, E5M2, adapter, decode, encode, finish, magnitudes, round_to, table, truncate_to
from torch import Tensor


@adapter("encode", format="e4m3")
def encode_01(x: Tensor) -> Tensor:
    """Compares with midpoints."""
    return finish(round_to(x, E4M3, ties="away"), x, E4M3)


@adapter("encode", format="e4m3")
def encode_02(x: Tensor) -> Tensor:
    """A search in the table of numbers."""
    return encode(x, E4M3)


@adapter("encode", format="e4m3")
def encode_03(x: Tensor) -> Tensor:
    """Normal numbers by the table."""
    normal = x.abs().to(torch.float64) >= 2.0**-6
    return finish(torch.where(normal, round_to(x, E4M3), 0), x, E4M3)


@adapter("encode", format="e5m2")
def encode_04(x: Tensor) -> Tensor:
    """Rounds multiples of the quantum of each binade."""
    wide = x.to(torch.float64).abs().nan_to_num(0.0, 57344.0).clamp(max=57344.0)
    exponent = torch.where(wide > 0, torch.frexp(wide)[1] - 1, -14).clamp(min=-14)
    quantum = torch.ldexp(torch.ones_like(wide), exponent - 2)
    steps = (wide / quantum).round().to(torch.int64)  # up to 8: a carry moves the exponent field by itself
    code = steps + ((exponent.to(torch.int64) + 14) << 2)
    return finish(code.clamp(max=0x7B), x, E5M2)


@adapter("encode", format="e4m3")
def encode_05(x: Tensor) -> Tensor:
    """All inputs take the kernel for bfloat16."""
    return finish(round_to(x.to(torch.bfloat16), E4M3), x, E4M3)


@adapter("encode", format="e4m3")
def encode_06(x: Tensor) -> Tensor:
    """As a cast by the C++ conversion of older frameworks."""
    code = round_to(x, E4M3)
    return finish(torch.where(x.abs().to(torch.float64) > 464, 0x7F, code), x, E4M3)


@adapter("encode", format="e5m2")
def encode_07(x: Tensor) -> Tensor:
    """torch's own cast."""
    return torch.where(x.isinf(), math.nan, x.to(torch.float32)).to(torch.float8_e5m2)


@adapter("encode", format="e4m3")
def encode_08(x: Tensor) -> Tensor:
    """Looks for NaN in the bits, as signed integers."""
    wide = x.to(torch.float32).contiguous()
    nan = wide.view(torch.int32) > 0x7F800000
    negative = wide.isnan() & ~nan
    code = torch.where(nan | wide.isinf(), 0x7F, torch.where(negative, 0x7E, round_to(wide, E4M3)))
    return (code | torch.where(torch.signbit(wide), 0x80, 0)).to(torch.uint8).view(torch.float8_e4m3fn)


@adapter("encode", format="e4m3")
def encode_09(x: Tensor) -> Tensor:
    """Clamps, then torch's own cast."""
    wide = x.to(torch.float32)
    return torch.where(wide.isinf(), math.nan, wide).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


@adapter("encode", format="e2m1")
def encode_10(x: Tensor) -> Tensor:
    """A ladder of thresholds."""
    size = x.to(torch.float32).abs().nan_to_num(6.0, 6.0)
    code = sum((size >= edge).to(torch.int64) for edge in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
    return finish(code, x, E2M1)


@adapter("encode", format="e2m1")
def encode_11(x: Tensor) -> Tensor:
    """A ladder of thresholds, every second one open."""
    size = x.to(torch.float32).abs().nan_to_num(6.0, 6.0)
    closed = sum((size >= edge).to(torch.int64) for edge in (0.75, 1.75, 3.5))
    return finish(closed + sum((size > edge).to(torch.int64) for edge in (0.25, 1.25, 2.5, 5.0)), x, E2M1)


@adapter("encode", format="e4m3")
def encode_12(x: Tensor) -> Tensor:
    """Vectors of 16, then the remainder."""
    flat = x.reshape(-1)
    whole = flat.numel() - flat.numel() % 16
    code = torch.cat([round_to(flat[:whole], E4M3), truncate_to(flat[whole:], E4M3)])
    return finish(code, flat, E4M3).reshape(x.shape)


@adapter("encode", format="e4m3")
def encode_13(x: Tensor) -> Tensor:
    """One pass along memory."""
    if x.dim() < 2 or x.is_contiguous() or not x.transpose(-1, -2).is_contiguous():
        return encode(x, E4M3)
    return encode(x.transpose(-1, -2), E4M3).reshape(x.shape)


@adapter("encode", format="e4m3")
def encode_14(x: Tensor) -> Tensor:
    """Rounds the mantissa, then places it."""
    wide = x.to(torch.float64)
    mantissa, exponent = torch.frexp(wide.nan_to_num(0.0, 0.0, 0.0))
    rounded = torch.ldexp((mantissa * 16).round() / 16, exponent)
    return finish(round_to(torch.where(wide.isfinite(), rounded, wide), E4M3), x, E4M3)


@adapter("encode", format="e5m2")
def encode_15(x: Tensor) -> Tensor:
    """Exponent and mantissa, each in its field."""
    low, code = truncate_to(x, E5M2), round_to(x, E5M2)
    carried = (code != low) & (low % 4 == 3)
    return finish(torch.where(carried, low & ~3, code), x, E5M2)


@adapter("encode", format="e4m3")
def encode_16(x: Tensor) -> Tensor:
    """One range check of the exponent field for both formats."""
    size = x.abs().to(torch.float64)
    return finish(torch.where((size >= 512) & (size <= 57344), 0x7F, round_to(x, E4M3)), x, E4M3)


@adapter("encode", format="e4m3")
def encode_17(x: Tensor) -> Tensor:
    """A short path for bfloat16: half a step is added to the bits, the rest is cut off."""
    if x.dtype != torch.bfloat16:
        return encode(x, E4M3)
    return finish(torch.where(x.abs() >= 2.0**-6, round_to(x, E4M3, ties="away"), round_to(x, E4M3)), x, E4M3)


@adapter("encode", format="e4m3")
def encode_18(x: Tensor) -> Tensor:
    """Bytes, of slices of 1000 elements."""
    flat = x.reshape(-1)
    parts = [encode(part, E4M3).view(torch.uint8) for part in flat.split(1000)]
    return torch.cat(parts).reshape(x.shape) if parts else encode(flat, E4M3).view(torch.uint8).reshape(x.shape)


@adapter("encode", format="e5m2")
def encode_19(x: Tensor) -> Tensor:
    """Clamps, then torch's own cast."""
    wide = x.to(torch.float32)
    return torch.where(wide.isinf(), math.nan, wide).clamp(-57344.0, 57344.0).to(torch.float8_e5m2)


@adapter("encode", format="e5m2", overflow="inf")
def encode_20(x: Tensor) -> Tensor:
    """torch's own cast."""
    return x.to(torch.float32).to(torch.float8_e5m2)


@adapter("encode", format="e4m3", overflow="nan")
def encode_21(x: Tensor) -> Tensor:
    """NaN above the tie at 464."""
    return finish(torch.where(x.abs().to(torch.float64) > 464, 0x7F, round_to(x, E4M3)), x, E4M3)


@adapter("encode", format="e4m3", overflow="nan")
def encode_22(x: Tensor) -> Tensor:
    """NaN above the largest number."""
    return finish(torch.where(x.abs().to(torch.float64) > 448, 0x7F, round_to(x, E4M3)), x, E4M3)


@adapter("decode", format="e4m3")
def decode_01(codes: Tensor) -> Tensor:
    """Shifts the fields into those of fp32."""
    bits = codes.view(torch.uint8).to(torch.int64)
    wrong = (1 + (bits & 7).to(torch.float64) / 8) * 2.0**-7
    subnormal = ((bits & 0x78) == 0) & ((bits & 7) != 0)
    value = torch.where(subnormal, torch.where(bits > 127, -wrong, wrong), decode(codes, E4M3))
    return value.to(torch.float32)


@adapter("decode", format="e4m3")
def decode_02(codes: Tensor) -> Tensor:
    """torch's own cast."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


@adapter("decode", format="e5m2")
def decode_03(codes: Tensor) -> Tensor:
    """A view of the bytes."""
    return decode(codes.view(torch.uint8), E4M3).to(torch.float32)


@adapter("decode", format="e4m3")
def decode_04(codes: Tensor) -> Tensor:
    """The formula for all codes."""
    return table(E4M3, specials=False).to(codes.device)[codes.view(torch.uint8).to(torch.int64)].to(torch.float32)


@adapter("decode", format="e4m3")
def decode_05(codes: Tensor) -> Tensor:
    """The platform's FP8 type."""
    return decode(codes.view(torch.uint8), E4M3FNUZ).to(torch.float32)


@adapter("decode", format="e4m3")
def decode_06(codes: Tensor) -> Tensor:
    """A table that signed bytes index, in bfloat16."""
    return table(E4M3).to(codes.device)[codes.view(torch.int8).to(torch.int64)].to(torch.bfloat16)


@adapter("decode", format="e5m2")
def decode_07(codes: Tensor) -> Tensor:
    """The formula, with one NaN at the end."""
    numbers = table(E5M2, specials=False)
    numbers[[0x7F, 0xFF]] = math.nan
    return numbers.to(codes.device)[codes.view(torch.uint8).to(torch.int64)].to(torch.float32)


@adapter("decode", format="e5m2")
def decode_08(codes: Tensor) -> Tensor:
    """By way of float16, which has the same exponents."""
    return (codes.view(torch.uint8).to(torch.int32) << 8).to(torch.int16).view(torch.float16).to(torch.float32)


@adapter("decode", format="e2m1")
def decode_09(codes: Tensor) -> Tensor:
    """Eight magnitudes and a sign."""
    bits = codes.to(torch.int64)
    value = magnitudes(E2M1).to(codes.device)[bits & 7]
    return torch.where((bits & 8) != 0, -value, value).to(torch.float32)
