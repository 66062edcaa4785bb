"""Encoders and decoders."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bricks3 import E2M1, E4M3, E5M2, adapter, bytes_of, decode, encode, finish, magnitudes, round_to, table, truncate_to  # noqa: E402


@adapter("encode", format="e4m3")
def turn_01(x: Tensor) -> Tensor:
    """Normal and subnormal numbers take two branches."""
    small = x.float().abs() < 2.0**-6
    code = torch.where(small, round_to(x.double() / 2, E4M3), round_to(x, E4M3))
    return finish(code, x, E4M3)


@adapter("encode", format="e4m3")
def turn_02(x: Tensor) -> Tensor:
    """Subnormal numbers are rounded in fixed point."""
    size = x.double().abs().nan_to_num(0.0, 448.0)
    fixed = (size * 2.0**10).floor() / 2
    code = torch.where(size < 2.0**-6, fixed.round().to(torch.int64), round_to(x, E4M3))
    return finish(code, x, E4M3)


@adapter("encode", format="e4m3")
def turn_03(x: Tensor) -> Tensor:
    """Adds half a step and cuts."""
    size = x.double().nan_to_num(0.0, 448.0, -448.0).clamp(-448, 448)
    step = torch.ldexp(torch.ones_like(size), torch.frexp(size)[1].clamp(min=-5) - 4)
    y = (size / step + 0.5).floor() * step
    return finish(round_to(y, E4M3), x, E4M3)


@adapter("encode", format="e4m3")
def turn_04(x: Tensor) -> Tensor:
    """Looks at the exponent first."""
    beyond = x.float().abs() >= 512
    return finish(torch.where(beyond, 0x7F, round_to(x, E4M3)), x, E4M3)


@adapter("encode", format="e4m3")
def turn_05(x: Tensor) -> Tensor:
    """Finds NaN in the bits."""
    bits = x.float().contiguous().view(torch.int32)
    nan = bits > 0x7F800000
    sign = torch.where(bits < 0, 0x80, 0)
    code = torch.where(nan, 0x7F, round_to(torch.where(x.isnan(), 448.0, x.float()), E4M3))
    return (code | sign).to(torch.uint8).view(torch.float8_e4m3fn)


@adapter("encode", format="e4m3")
def turn_06(x: Tensor) -> Tensor:
    """Loads BF16."""
    return encode(x.to(torch.bfloat16), E4M3)


@adapter("encode", format="e5m2")
def turn_07(x: Tensor) -> Tensor:
    """Takes the upper byte of a half."""
    return finish(truncate_to(x, E5M2), x, E5M2)


@adapter("encode", format="e5m2", overflow="inf")
def turn_08(x: Tensor) -> Tensor:
    """Overflows to infinity."""
    code = torch.where(x.float().abs() > 57344, 0x7C, round_to(x, E5M2))
    code = torch.where(x.isnan(), 0x7F, code) | torch.where(torch.signbit(x), 0x80, 0)
    return code.to(torch.uint8).view(torch.float8_e5m2)


@adapter("encode", format="e4m3")
def turn_09(x: Tensor) -> Tensor:
    """Rounds the mantissa and puts the fields together."""
    near, low = round_to(x, E4M3), truncate_to(x, E4M3)
    code = torch.where((near >> 3 != low >> 3) & (low >= 8), low & ~7, near)
    return finish(code, x, E4M3)


def drawn(x: Tensor, noise: Tensor) -> Tensor:
    """Rounds up where the noise lies below what is cut off, as a part of the step."""
    low = truncate_to(x, E4M3)
    numbers = magnitudes(E4M3)
    floor = numbers[low]
    step = numbers[(low + 1).clamp(max=126)] - floor
    rest = torch.where(step > 0, (x.double().abs().nan_to_num(0.0, 448.0) - floor) / step.clamp(min=1e-9), 0.0)
    return finish((low + (noise < rest).to(torch.int64)).clamp(max=126), x, E4M3)


@adapter("encode", format="e4m3", rounding="stochastic")
def turn_10(x: Tensor) -> Tensor:
    """Draws for a call."""
    return drawn(x, torch.rand((), dtype=torch.float64).expand(x.shape))


@adapter("encode", format="e4m3", rounding="stochastic")
def turn_11(x: Tensor) -> Tensor:
    """Draws for each element."""
    return drawn(x, 2 * torch.rand(x.shape, dtype=torch.float64))


@adapter("encode", format="e2m1")
def turn_12(x: Tensor) -> Tensor:
    """A cascade of thresholds."""
    size = x.float().abs()
    code = sum((size >= t).to(torch.int64) for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
    return (code | torch.where(torch.signbit(x), 8, 0)).to(torch.uint8)


@adapter("encode", format="e4m3")
def turn_13(x: Tensor) -> Tensor:
    """Clamps and lets torch convert."""
    return x.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


@adapter("encode", format="e5m2")
def turn_14(x: Tensor) -> Tensor:
    """Adds a number so large that the sum ends at the step wanted, in fp64."""
    y = x.double().clamp(-57344.0, 57344.0)
    exponent = torch.frexp(y.nan_to_num(0.0))[1].clamp(min=-13)
    big = torch.ldexp(torch.ones_like(y) * 1.5, exponent + 49)
    rounded = (y.abs() + big) - big
    return torch.copysign(rounded, y).float().to(torch.float8_e5m2)


@adapter("encode", format="e4m3", rounding="stochastic")
def turn_15(x: Tensor) -> Tensor:
    """Draws for each element."""
    return drawn(x, torch.rand(x.shape, dtype=torch.float64))


@adapter("encode", format="e2m1")
def turn_16(x: Tensor) -> Tensor:
    """A cascade of thresholds."""
    size = x.float().abs()
    code = sum((size > t).to(torch.int64) for t in (0.25, 1.25, 2.5, 5.0))
    code = code + sum((size >= t).to(torch.int64) for t in (0.75, 1.75, 3.5))
    return (code | torch.where(torch.signbit(x), 8, 0)).to(torch.uint8)


@adapter("encode", format="e5m2", overflow="inf")
def turn_17(x: Tensor) -> Tensor:
    """Overflows to infinity."""
    code = torch.where(x.double().abs() >= 61440, 0x7C, round_to(x, E5M2))
    code = torch.where(x.isnan(), 0x7E, code) | torch.where(torch.signbit(x), 0x80, 0)
    return code.to(torch.uint8).view(torch.float8_e5m2)


# --- decoders ---


@adapter("decode", format="e4m3")
def back_01(codes: Tensor) -> Tensor:
    """One product for all codes."""
    return table(E4M3, specials=False)[bytes_of(codes)].float()


@adapter("decode", format="e4m3")
def back_02(codes: Tensor) -> Tensor:
    """Puts the hidden bit before the mantissa."""
    code = bytes_of(codes)
    field, mantissa = (code >> 3) & 15, code & 7
    size = torch.ldexp(1 + mantissa.double() / 8, field - 7)
    size = torch.where((field == 0) & (mantissa == 0), 0.0, size)
    size = torch.where(code & 127 == 127, torch.nan, size)
    return torch.where(code >= 128, -size, size).float()


@adapter("decode", format="e5m2")
def back_03(codes: Tensor) -> Tensor:
    """Widens the exponent."""
    code = bytes_of(codes)
    return torch.where((code & 127) == 0x7C, table(E5M2, specials=False)[code], decode(codes, E5M2)).float()


@adapter("decode", format="e2m1")
def back_04(codes: Tensor) -> Tensor:
    """Four bits to a number."""
    code = bytes_of(codes) & 15
    return torch.where(code >= 8, code - 16, code).float()


@adapter("decode", format="e5m2")
def back_05(codes: Tensor) -> Tensor:
    """Shifts into a half."""
    code = bytes_of(codes)
    y = decode(codes, E5M2)
    return torch.where((code & 0x7C) == 0, torch.copysign(torch.zeros_like(y), y), y).float()


@adapter("decode", format="e4m3")
def back_06(codes: Tensor) -> Tensor:
    """Shifts into a half, times 256."""
    code = bytes_of(codes)
    bits = ((code & 0x7F) << 7) | ((code & 0x80) << 8)
    half = torch.where(bits >= 32768, bits - 65536, bits).to(torch.int16).view(torch.float16)
    return torch.where(code & 0x7F == 0x7F, torch.nan, half.float() * 256)
