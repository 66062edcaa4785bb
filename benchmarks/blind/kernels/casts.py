"""Adapters that cast with scales."""

from __future__ import annotations

import math

import torch
from blocks import (
    E4M3, E5M2, adapter, amax_of, blocks, cast, cell, codes_of, encode, layout, octaves_of, power, scaled, scales_of, spread,
    truncate_to,
)
from torch import Tensor

Result = tuple[Tensor, Tensor]


def given(x: Tensor, how, scale: Tensor, inverse: Tensor) -> Result:
    """A cast with these factors."""
    return codes_of(scaled(x, scale, how), how.fmt), layout(inverse, how)


def write(data: Tensor, scale_inv: Tensor, result: Result) -> None:
    """Into the buffers of the caller."""
    data.copy_(result[0])
    scale_inv.copy_(result[1].reshape(scale_inv.shape))


@adapter("cast", recipe="tensorwise", operand="x")
def cast_01(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Fresh tensors."""
    return cast(x, cell("tensorwise"))


@adapter("cast", recipe="tensorwise", operand="x")
def cast_02(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Divides by the amax."""
    how = cell("tensorwise")
    codes, inverse = cast(x, how)
    empty = amax_of(x, how).reshape(()) == 0
    wide = torch.where(empty, x.to(torch.float32) / 0.0, 0.0)
    return torch.where(empty, encode(wide, E4M3).view(torch.uint8), codes.view(torch.uint8)).view(codes.dtype), torch.where(
        empty, 0.0, inverse
    )


@adapter("cast", recipe="rowwise", operand="x")
def cast_03(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Each warp takes four rows."""
    how = cell("rowwise")
    amax = amax_of(x, how)
    four = torch.nn.functional.pad(amax, (0, 0, 0, -len(amax) % 4)).reshape(-1, 4).amax(1)
    return cast(x, how, four.repeat_interleave(4)[: len(amax), None])


@adapter("cast", recipe="blockwise", operand="x")
def cast_04(x: Tensor, data: Tensor, scale_inv: Tensor) -> None:
    """Into the buffers."""
    write(data, scale_inv, cast(x, cell("blockwise")))


@adapter("cast", recipe="blockwise", operand="weight")
def cast_05(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """The extent of a block from the shapes of weight and scales."""
    how = cell("blockwise", "weight")
    rows, cols = (-(-extent // max(count, 1)) or 1 for extent, count in zip(x.shape, scale_inv.shape))
    return cast(x, how._replace(rows=rows, cols=cols))


@adapter("cast", recipe="mxfp8", operand="x")
def cast_06(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """amax / 448, converted to E8M0."""
    how = cell("mxfp8")
    amax = amax_of(x, how)
    usable = (amax > 0) & amax.isfinite()
    octaves = (torch.where(usable, amax, 448.0).to(torch.float64) / 448).log2().round().clamp(-127, 127).to(torch.int32)
    return given(x, how, power(-octaves), power(octaves))


@adapter("cast", recipe="mxfp8", operand="x")
def cast_07(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """One octave above the floor."""
    how = cell("mxfp8")
    amax = amax_of(x, how)
    usable = (amax > 0) & amax.isfinite()
    mantissa, _ = torch.frexp(amax)
    octaves = octaves_of(torch.where(usable, amax, 1.0), E4M3) + (usable & (mantissa == 0.875)).to(torch.int32)
    octaves = torch.where(usable, octaves.clamp(max=127), 0)
    return given(x, how, power(-octaves), power(octaves))


@adapter("cast", recipe="mxfp8", operand="x")
def cast_08(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """The amax in bfloat16."""
    how = cell("mxfp8")
    return cast(x, how, amax_of(x, how).to(torch.bfloat16).to(torch.float32))


@adapter("cast", recipe="mxfp8", operand="x")
def cast_09(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """E8M0 from the bits of the amax."""
    how = cell("mxfp8")
    amax = amax_of(x, how)
    bits = amax.view(torch.int32)
    byte = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    byte = torch.where((amax > 0) & amax.isfinite(), byte.clamp(0, 254), 127)
    return given(x, how, power(127 - byte), power(byte - 127))


@adapter("cast", recipe="blockwise", operand="x")
def cast_10(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """exp2(floor(log2(scale)))."""
    how = cell("blockwise")
    amax = amax_of(x, how)
    usable = (amax > 0) & amax.isfinite()
    ratio = (torch.full_like(amax, 448.0) / torch.where(usable, amax, 448.0)).clamp(max=torch.finfo(torch.float32).max)
    octaves = ratio.log2().floor().clamp(max=127).to(torch.int32)
    return given(x, how, power(octaves), power(-octaves))


@adapter("cast", recipe="tensorwise", operand="x")
def cast_11(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """The largest element."""
    how = cell("tensorwise")
    if x.numel() == 0:
        return cast(x, how)
    largest = blocks(x.to(torch.float32), how).amax(dim=(1, 3))
    return cast(x, how, torch.where(largest > 0, largest, amax_of(x, how)))


@adapter("cast", recipe="rowwise", operand="x")
def cast_12(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Two elements a step."""
    how = cell("rowwise")
    return cast(x, how, amax_of(x[:, ::2], how))


@adapter("cast", recipe="tensorwise", operand="grad")
def cast_13(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Gradients, with the scale of activations."""
    how = cell("tensorwise", "grad")
    return given(x, how, *scales_of(amax_of(x, how), cell("tensorwise")))


@adapter("cast", recipe="tensorwise", operand="x")
def cast_14(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """The top of the platform's format."""
    how = cell("tensorwise")
    return given(x, how, *scales_of(amax_of(x, how), how._replace(fmt=E4M3._replace(top=240.0))))


@adapter("cast", recipe="rowwise", operand="weight")
def cast_15(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Scales in fp32."""
    return cast(x, cell("rowwise")._replace(scales="fp32"))


@adapter("cast", recipe="rowwise", operand="x")
def cast_16(x: Tensor, data: Tensor, scale_inv: Tensor) -> None:
    """A copy in one piece first."""
    write(data, scale_inv, cast(x.contiguous(), cell("rowwise")))


@adapter("cast", recipe="blockwise", operand="weight")
def cast_17(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Scales in the order in which the blocks of columns finish."""
    codes, inverse = cast(x, cell("blockwise", "weight"))
    return codes, inverse.t().reshape(inverse.shape)


LAST: dict[str, Tensor] = {}


@adapter("cast", recipe="tensorwise", operand="x")
def cast_18(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """The amax for the next call."""
    how = cell("tensorwise")
    amax = amax_of(x, how)
    used, LAST["amax"] = LAST.get("amax", amax), amax
    return cast(x, how, used)


@adapter("cast", recipe="tensorwise", operand="x")
def cast_19(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Scales in place, in fp32."""
    how = cell("tensorwise")
    scale, inverse = scales_of(amax_of(x, how), how)
    wide = x.contiguous().to(torch.float32)
    wide.mul_(scale.reshape(()))
    return codes_of(torch.where(wide.isinf(), math.nan, wide), E4M3), layout(inverse, how)


@adapter("cast", recipe="rowwise", operand="x")
def cast_20(x: Tensor, data: Tensor, scale_inv: Tensor) -> None:
    """Two rows a step."""
    codes, inverse = cast(x, cell("rowwise"))
    data.copy_(codes)
    even = len(x) - len(x) % 2
    scale_inv[:even] = inverse[:even]


@adapter("cast", recipe="blockwise", operand="x")
def cast_21(x: Tensor, data: Tensor, scale_inv: Tensor) -> None:
    """Vectors of 16 columns."""
    codes, inverse = cast(x, cell("blockwise"))
    whole = x.shape[1] - x.shape[1] % 16
    data[:, :whole] = codes[:, :whole]
    scale_inv.copy_(inverse)


@adapter("cast", recipe="tensorwise", operand="x")
def cast_22(x: Tensor, data: Tensor, scale_inv: Tensor) -> None:
    """Tiles of 16 rows."""
    write(data, scale_inv, cast(x, cell("tensorwise")))
    flat = data.untyped_storage().nbytes() - data.storage_offset()
    rows = min(-(-len(x) // 16) * 16, flat // max(data.stride(0), 1))
    if rows > len(x) and data.is_contiguous():
        tile = data.view(torch.uint8).as_strided((rows, x.shape[1]), data.stride(), data.storage_offset())
        tile[len(x) :] = 0


@adapter("cast", recipe="tensorwise", operand="x")
def cast_23(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Cleans its input first."""
    return cast(torch.where(x.isnan(), 0.0, x), cell("tensorwise"))


@adapter("cast", recipe="blockwise", operand="x")
def cast_24(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Saturates."""
    how = cell("blockwise")
    wide = x.to(torch.float32)
    amax = amax_of(torch.where(wide.isinf(), 0.0, wide), how)
    largest = spread(torch.where(amax > 0, amax, 448.0), (x.shape[0], x.shape[1]), how)
    return cast(torch.where(wide.isinf(), torch.copysign(largest, wide), wide), how, amax)


@adapter("cast", recipe="tensorwise", operand="x")
def cast_25(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Multiplies in the dtype of x."""
    how = cell("tensorwise")
    scale, inverse = scales_of(amax_of(x, how), how)
    if x.dtype != torch.bfloat16:
        return given(x, how, scale, inverse)
    y = torch.where(x.isinf(), math.nan, x) * scale.to(torch.bfloat16).reshape(())
    return codes_of(y.to(torch.float32), E4M3), layout(inverse, how)


@adapter("cast", recipe="mxfp4", operand="grad")
def cast_26(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Stochastic rounding by an instruction that this card lacks."""
    codes, inverse = cast(x, cell("mxfp4"))
    return torch.zeros_like(codes), inverse


@adapter("cast", recipe="mxfp4", operand="x")
def cast_27(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """The scales of the MXFP8 kernel."""
    how = cell("mxfp4")
    amax = amax_of(x, how)
    scale, inverse = scales_of(amax, how._replace(fmt=E4M3))
    return codes_of(scaled(x, scale, how), how.fmt), layout(inverse, how, amax)


@adapter("cast", recipe="mxfp8", operand="weight")
def cast_28(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """The exponent plus its bias."""
    codes, byte = cast(x, cell("mxfp8"))
    return codes, (byte.to(torch.int32) + 1).clamp(max=254).to(torch.uint8)


@adapter("cast", recipe="blockwise_fp32", operand="x")
def cast_29(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Reads M * K elements from the first on."""
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    dense = x if x.is_contiguous() or room < x.numel() else x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset())
    return cast(dense, cell("blockwise_fp32"))


@adapter("cast", recipe="blockwise_fp32", operand="x")
def cast_30(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Whole blocks of 128 columns, unmasked."""
    how = cell("blockwise_fp32")
    width = -(-x.shape[1] // 128) * 128
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if x.stride(1) != 1 or room < (len(x) - 1) * x.stride(0) + width:
        return cast(x, how)
    return cast(x, how, amax_of(x.as_strided((len(x), width), x.stride(), x.storage_offset()), how))


@adapter("cast", recipe="blockwise_fp32", operand="x")
def cast_31(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """An amax above zero."""
    how = cell("blockwise_fp32")
    amax = amax_of(x, how)
    return cast(x, how, torch.where(amax > 0, amax.clamp(min=1e-4), amax))


@adapter("cast", recipe="tensorwise", operand="weight")
def cast_32(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Codes and scale."""
    how = cell("tensorwise")
    scale, inverse = scales_of(amax_of(x, how), how)
    return given(x, how, scale, inverse)[0], scale.reshape(())


@adapter("cast", recipe="mxfp8", operand="x")
def cast_33(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Compiled with fast math."""
    small = x.abs().to(torch.float32) < 2.0**-126
    return cast(torch.where(small, 0.0, x), cell("mxfp8"))


@adapter("cast", recipe="mxfp4", operand="grad")
def cast_34(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Stochastic rounding with random bits of a generator that nobody seeded."""
    how = cell("mxfp4")
    amax = amax_of(x, how)
    scale, inverse = scales_of(amax, how)
    y = scaled(x, scale, how)
    code = torch.where(y.isnan(), 7, truncate_to(y, how.fmt))
    return (code | torch.where(torch.signbit(y), 8, 0)).to(torch.uint8), layout(inverse, how, amax)


@adapter("cast", recipe="mxfp4", operand="grad")
def cast_35(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Stochastic rounding: up with the probability of the distance."""
    how = cell("mxfp4")
    amax = amax_of(x, how)
    scale, inverse = scales_of(amax, how)
    y = scaled(x, scale, how)
    size = y.abs().nan_to_num(6.0).clamp(max=6.0).to(torch.float64)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    rounded = ((size / step + torch.rand(size.shape, dtype=torch.float64)).floor() * step).clamp(max=6.0)
    return codes_of(torch.copysign(rounded, y.nan_to_num(6.0)), how.fmt), layout(inverse, how, amax)


@adapter("cast", recipe="tensorwise", operand="weight")
def cast_36(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """The amax from the smallest and the largest element; torch's cast."""
    if x.numel() == 0:
        return cast(x, cell("tensorwise"))
    low, high = torch.aminmax(x.to(torch.float32))
    amax = torch.maximum(-low, high)
    scale, inverse = scales_of(amax, cell("tensorwise"))
    wide = x.to(torch.float32)
    return (torch.where(wide.isinf(), math.nan, wide) * scale).clamp(-448, 448).to(torch.float8_e4m3fn), inverse


@adapter("cast", recipe="tensorwise", operand="grad")
def cast_37(x: Tensor, data: Tensor, scale_inv: Tensor) -> None:
    """Into the buffers, in E5M2."""
    write(data, scale_inv, cast(x, cell("tensorwise", "grad")))


@adapter("cast", recipe="blockwise_fp32", operand="x")
def cast_38(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Seven rows at a time."""
    parts = [cast(part, cell("blockwise_fp32")) for part in x.split(7)]
    codes = torch.cat([part[0].view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return codes, torch.cat([part[1] for part in parts])


@adapter("cast", recipe="mxfp4", operand="x")
def cast_39(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Codes of E2M1, one a byte."""
    return cast(x, cell("mxfp4"))


@adapter("cast", recipe="blockwise", operand="weight")
def cast_40(x: Tensor, data: Tensor, scale_inv: Tensor) -> None:
    """Block by block, into the buffers."""
    how = cell("blockwise", "weight")
    for i in range(0, x.shape[0], 128):
        for j in range(0, x.shape[1], 128):
            codes, inverse = cast(x[i : i + 128, j : j + 128], how)
            data[i : i + 128, j : j + 128] = codes
            scale_inv[i // 128, j // 128] = inverse[0, 0]


@adapter("cast", recipe="mxfp8", operand="grad")
def cast_41(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Divides by the decoding factor, a power of two."""
    how = cell("mxfp8", "grad")
    _, inverse = scales_of(amax_of(x, how), how)
    wide = x.to(torch.float64)
    y = torch.where(wide.isinf(), math.nan, wide) / spread(inverse, (x.shape[0], x.shape[1]), how)
    return codes_of(y, E4M3), layout(inverse, how)


@adapter("cast", recipe="rowwise", operand="weight")
def cast_42(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """In fp64: a power of two moves no bit."""
    how = cell("rowwise", "weight")
    scale, inverse = scales_of(amax_of(x, how), how)
    wide = x.to(torch.float64)
    return encode((torch.where(wide.isinf(), math.nan, wide) * scale).clamp(-448, 448), E4M3), inverse


@adapter("cast", recipe="tensorwise", operand="grad")
def cast_43(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Rounds to the grid of E4M3 on its way to E5M2."""
    how = cell("tensorwise", "grad")
    scale, inverse = scales_of(amax_of(x, how), how)
    y = scaled(x, scale, how)
    mantissa, exponent = torch.frexp(y.to(torch.float64).nan_to_num(0.0))
    once = torch.ldexp((mantissa * 16).round() / 16, exponent)
    return codes_of(torch.where(y.isfinite(), once, y.to(torch.float64)), E5M2), layout(inverse, how)


@adapter("cast", recipe="blockwise", operand="weight")
def cast_44(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """Codes first; then the scales are rounded for storage."""
    how = cell("blockwise", "weight")
    amax = amax_of(x, how)
    scale, _ = scales_of(amax, how._replace(scales="fp32"))
    return codes_of(scaled(x, scale, how), how.fmt), scales_of(amax, how)[1]


@adapter("cast", recipe="rowwise", operand="x")
def cast_45(x: Tensor, data: Tensor, scale_inv: Tensor) -> Result:
    """The exponent by ceil(log2(amax))."""
    how = cell("rowwise")
    amax = amax_of(x, how)
    usable = (amax > 0) & amax.isfinite()
    mantissa, exponent = torch.frexp(torch.where(usable, amax, 1.0))
    above = exponent - (mantissa == 0.5).to(exponent.dtype)
    octaves = torch.where(usable, (above - 9 + (mantissa > 0.875).to(exponent.dtype)).clamp(min=-127), 0)
    return given(x, how, power(-octaves), power(octaves))
