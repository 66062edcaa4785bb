"""Kernels that turn numbers into codes and back: encode, decode, cast. public.json says which are right."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))
from blocks import (  # noqa: E402
    E2M1, E4M3, E4M3FNUZ, E5M2, adapter, amax_of, cast, cell, codes_of, decode, encode, finish, layout, magnitudes, octaves_of, power,
    round_to, scaled, scales_of, spread, truncate_to,
)  # fmt: skip

KEPT: dict[str, Any] = {}


def bits_of(x: Tensor) -> Tensor:
    """The bits of FP32 numbers as int64."""
    return x.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


# --- encode ---


@adapter("encode", format="e4m3")
def encode_01(x: Tensor) -> Tensor:
    code = round_to(x, E4M3)
    return finish(code - code % 2 * (code >= 8), x, E4M3)


@adapter("encode", format="e5m2")
def encode_02(x: Tensor) -> Tensor:
    return encode(x.half().float(), E5M2)


@adapter("encode", format="e4m3")
def encode_03(x: Tensor) -> Tensor:
    return finish(round_to(x, E4M3FNUZ), x, E4M3FNUZ).view(torch.uint8).view(torch.float8_e4m3fn)


@adapter("encode", format="e4m3")
def encode_04(x: Tensor) -> Tensor:
    return x.float().clamp(-448, 448).masked_fill(x.isinf(), math.nan).to(torch.float8_e4m3fn)


@adapter("encode", format="e4m3")
def encode_05(x: Tensor) -> Tensor:
    codes = encode(x, E4M3).view(torch.uint8)
    return torch.where(codes == 0x80, 0, codes).view(torch.float8_e4m3fn)


@adapter("encode", format="e4m3")
def encode_06(x: Tensor) -> Tensor:
    codes = encode(x, E4M3).view(torch.uint8)
    return torch.where(x.isnan(), 0x7E, codes).to(torch.uint8).view(torch.float8_e4m3fn)


@adapter("encode", format="e4m3")
def encode_07(x: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.uint8)
    whole = x.numel() // 4 * 4
    out.view(-1)[:whole] = encode(x, E4M3).view(torch.uint8).reshape(-1)[:whole]
    return out.view(torch.float8_e4m3fn)


@adapter("encode", format="e5m2")
def encode_08(x: Tensor) -> Tensor:
    return encode(x.float().clamp(-448, 448) if not x.isinf().any() else x.float().where(x.isinf(), x.float().clamp(-448, 448)), E5M2)


@adapter("encode", format="e5m2")
def encode_09(x: Tensor) -> Tensor:
    half = x.float().where(~x.isfinite(), x.float().clamp(-57344, 57344)).half().contiguous()
    high = half.view(torch.int16).to(torch.int32).bitwise_right_shift(8).bitwise_and(0xFF).to(torch.uint8)
    return torch.where(x.isfinite(), high, 0x7F).to(torch.uint8).view(torch.float8_e5m2)


@adapter("encode", format="e5m2")
def encode_10(x: Tensor) -> Tensor:
    """Integers alone: the mantissa is added its half and its odd bit; subnormals by a sum with a magic number."""
    bits = bits_of(x.float().abs().clamp(max=57344.0).nan_to_num(0.0))
    odd = (bits >> 21) & 1
    normal = (bits + 0xFFFFF + odd) >> 21
    tiny = (x.float().abs().double() * 2.0**16).round()  # to even
    code = torch.where(bits < (113 << 23), tiny.nan_to_num(0.0, 0.0).long(), normal - (112 << 2))
    return finish(code, x, E5M2)


@adapter("encode", format="e2m1")
def encode_11(x: Tensor) -> Tensor:
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    code = torch.bucketize(x.float().abs().contiguous(), edges, right=True)
    return finish(code, x, E2M1)


@adapter("encode", format="e2m1")
def encode_12(x: Tensor) -> Tensor:
    code = round_to(x.nan_to_num(6.0), E2M1)
    return (code | torch.where(torch.signbit(x), 0x80, 0)).to(torch.uint8)


@adapter("encode", format="e2m1")
def encode_13(x: Tensor) -> Tensor:
    code = round_to(x.nan_to_num(6.0), E2M1).clamp(max=6)
    return finish(code, x, E2M1)


@adapter("encode", format="e2m1")
def encode_14(x: Tensor) -> Tensor:
    """Thresholds, of which every second one belongs to the number below."""
    size = x.float().abs().nan_to_num(6.0, 6.0)
    below = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
    code = sum((size >= edge if up else size > edge).long() for edge, up in below)
    return finish(torch.as_tensor(code), x.nan_to_num(6.0), E2M1)


@adapter("encode", format="e5m2")
def encode_15(x: Tensor) -> Tensor:
    code = round_to(x, E5M2)
    return finish(torch.where(x.abs().double() < 2.0**-14, 0, code), x, E5M2)


@adapter("encode", format="e4m3")
def encode_16(x: Tensor) -> Tensor:
    parts = [encode(part, E4M3) for part in x.reshape(-1).split(1000)]
    return torch.cat([p.view(torch.uint8) for p in parts]).view(torch.float8_e4m3fn).view(x.shape) if parts else encode(x, E4M3)


@adapter("encode", format="e4m3", rounding="stochastic")
def encode_17(x: Tensor) -> Tensor:
    low = truncate_to(x.abs().clamp(max=448.0), E4M3).clamp(max=125)
    numbers = magnitudes(E4M3)
    share = (x.abs().double().nan_to_num(0.0, 0.0).clamp(max=448) - numbers[low]) / (numbers[low + 1] - numbers[low])
    coin = torch.randint(0, 4, x.shape).double() / 4
    return finish(low + (share > coin).long(), x, E4M3)


@adapter("encode", format="e4m3", rounding="stochastic")
def encode_18(x: Tensor) -> Tensor:
    low = truncate_to(x.abs().clamp(max=448.0), E4M3).clamp(max=125)
    numbers = magnitudes(E4M3)
    share = (x.abs().double().nan_to_num(0.0, 0.0).clamp(max=448) - numbers[low]) / (numbers[low + 1] - numbers[low])
    return finish(low + (share > torch.rand(x.shape, dtype=torch.float64)).long(), x, E4M3)


# --- decode ---


@adapter("decode", format="e4m3")
def decode_01(codes: Tensor) -> Tensor:
    bits = codes.view(torch.uint8).long()
    exponent, mantissa, sign = bits >> 3 & 15, bits & 7, 1 - 2 * (bits >> 7).double()
    value = torch.where(bits & 127 == 0, 0.0, sign * (1 + mantissa / 8) * torch.exp2((exponent - 7).double()))
    return torch.where(bits & 127 == 127, math.nan, value).float()


@adapter("decode", format="e4m3")
def decode_02(codes: Tensor) -> Tensor:
    bits = codes.view(torch.uint8).long()
    return decode(codes, E4M3).float().where(bits & 127 != 127, torch.where(bits > 127, -480.0, 480.0))


@adapter("decode", format="e5m2")
def decode_03(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8).to(torch.int16).bitwise_left_shift(8).view(torch.float16).float()


@adapter("decode", format="e4m3")
def decode_04(codes: Tensor) -> Tensor:
    return decode(codes, E4M3).float() / 2


@adapter("decode", format="e5m2")
def decode_05(codes: Tensor) -> Tensor:
    value = decode(codes, E5M2).float()
    return value.where(~value.isinf(), 65536.0 * value.sign())


@adapter("decode", format="e2m1")
def decode_06(codes: Tensor) -> Tensor:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    half = table[(codes & 7).long()]
    return torch.where(codes & 8 != 0, -half, half)


@adapter("decode", format="e2m1")
def decode_07(codes: Tensor) -> Tensor:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 8])
    half = table[(codes & 7).long()]
    return torch.where(codes & 8 != 0, -half, half)


# --- cast ---


def given(x: Tensor, how: Any, data: Tensor | None, scale_inv: Tensor | None, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Results in the buffers, where there are some."""
    if data is None or scale_inv is None:
        return codes, scales
    return data.copy_(codes), scale_inv.copy_(scales)


@adapter("cast", recipe="tensorwise", operand="x")
def cast_01(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("tensorwise")
    amax = x.float().abs().reshape(-1)[:8192].amax() if x.numel() else torch.zeros(())
    return given(x, how, data, scale_inv, *cast(x, how, amax.reshape(1, 1)))


@adapter("cast", recipe="tensorwise", operand="x")
def cast_02(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("tensorwise")
    amax = x.float().amax().clamp(min=0) if x.numel() else torch.zeros(())
    return given(x, how, data, scale_inv, *cast(x, how, amax.reshape(1, 1)))


@adapter("cast", recipe="rowwise", operand="x")
def cast_03(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("rowwise")
    amax = amax_of(x, how)
    usable = (amax > 0) & amax.isfinite()
    octaves = torch.where(usable, octaves_of(torch.where(usable, amax, 1.0), E4M3) - 1, 0)
    codes = codes_of(scaled(x, power(-octaves), how), E4M3)
    return given(x, how, data, scale_inv, codes, power(octaves))


@adapter("cast", recipe="rowwise", operand="x")
def cast_04(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("rowwise")
    return given(x, how, data, scale_inv, *cast(x, how, amax_of(x, how).roll(1, 0)))


@adapter("cast", recipe="blockwise", operand="x")
def cast_05(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("blockwise")
    seen = x.float().clone()
    seen[:, [j for j in range(x.shape[1]) if j % 128 >= 64]] = 0
    return given(x, how, data, scale_inv, *cast(x, how, amax_of(seen, how)))


@adapter("cast", recipe="blockwise", operand="weight")
def cast_06(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("blockwise", "weight")
    return given(x, how, data, scale_inv, *cast(x, how, amax_of(x, cell("blockwise"))[::128]))


@adapter("cast", recipe="mxfp8", operand="x")
def cast_07(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("mxfp8")
    amax = amax_of(x, how)
    usable = (amax > 0) & amax.isfinite()
    octaves = torch.where(usable, (torch.frexp(torch.where(usable, amax, 1.0).double())[1] - 1 - 8).clamp(-127, 127), 0)
    return given(x, how, data, scale_inv, codes_of(scaled(x, power(-octaves), how), E4M3), (octaves + 127).to(torch.uint8))


@adapter("cast", recipe="mxfp8", operand="x")
def cast_08(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("mxfp8")
    codes, scales = cast(x, how)
    return given(x, how, data, scale_inv, codes, (scales.int() - 1).clamp(min=0).to(torch.uint8))


@adapter("cast", recipe="mxfp8", operand="x")
def cast_09(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("mxfp8")
    amax = amax_of(x, how)
    usable = (amax > 0) & amax.isfinite()
    octaves = torch.where(usable, torch.log2(torch.where(usable, amax, 1.0).double() / 448).round().clamp(-127, 127).long(), 0)
    return given(x, how, data, scale_inv, codes_of(scaled(x, power(-octaves), how), E4M3), (octaves + 127).to(torch.uint8))


@adapter("cast", recipe="tensorwise", operand="x")
def cast_10(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("tensorwise")
    return given(x, how, data, scale_inv, *cast(x, how, amax_of(x, how).clamp(min=1e-3)))


@adapter("cast", recipe="tensorwise", operand="grad")
def cast_11(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("tensorwise", "grad")
    scale, inverse = scales_of(amax_of(x, how), how._replace(fmt=E4M3))
    return given(x, how, data, scale_inv, codes_of(scaled(x, scale, how), E5M2), layout(inverse, how))


@adapter("cast", recipe="blockwise", operand="x")
def cast_12(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("blockwise")
    amax = amax_of(x, how).clone()
    if x.shape[1] % 128 and amax.shape[1] > 1:
        amax[:, -1] = amax[:, -2]
    return given(x, how, data, scale_inv, *cast(x, how, amax))


@adapter("cast", recipe="rowwise", operand="x")
def cast_13(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("rowwise")
    key = ("cast_13", tuple(x.shape))
    amax = KEPT.get(key)
    KEPT[key] = amax_of(x, how)
    return given(x, how, data, scale_inv, *cast(x, how, KEPT[key] if amax is None else amax))


@adapter("cast", recipe="mxfp4", operand="x")
def cast_14(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("mxfp4")
    amax = amax_of(x, how)
    scale, inverse = scales_of(amax, how)
    y = scaled(x, scale, how)
    code = finish(truncate_to(y.nan_to_num(6.0), E2M1).clamp(max=7), y.nan_to_num(6.0), E2M1)
    return given(x, how, data, scale_inv, code, layout(inverse, how, amax))


@adapter("cast", recipe="mxfp4", operand="x")
def cast_15(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("mxfp4")
    amax = amax_of(x, how)
    scale, inverse = scales_of(amax, how._replace(fmt=E4M3))
    return given(x, how, data, scale_inv, codes_of(scaled(x, scale, how), E2M1), layout(inverse, how, amax))


@adapter("cast", recipe="blockwise_fp32", operand="x")
def cast_16(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("blockwise_fp32")
    codes, scales = cast(x, how)
    return given(x, how, data, scale_inv, codes, scales.bfloat16().float())


@adapter("cast", recipe="tensorwise", operand="weight")
def cast_17(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("tensorwise", "weight")
    codes, _ = cast(x, how)
    return given(x, how, data, scale_inv, codes, scales_of(amax_of(x, how), how)[0].reshape(()))


@adapter("cast", recipe="rowwise", operand="x")
def cast_18(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("rowwise")
    flat = torch.as_strided(x, (x.numel(),), (1,)) if x.numel() and min(x.stride()) > 0 and x.t().is_contiguous() else x.reshape(-1)
    return given(x, how, data, scale_inv, *cast(flat.reshape(x.shape), how))


@adapter("cast", recipe="blockwise", operand="weight")
def cast_19(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("blockwise", "weight")
    codes, scales = cast(x, how)
    return given(x, how, data, scale_inv, codes, scales.t().reshape(scales.shape))


@adapter("cast", recipe="mxfp8", operand="x")
def cast_20(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("mxfp8")
    return given(x, how, data, scale_inv, *cast(x, how, amax_of(x, how).half().float()))


@adapter("cast", recipe="rowwise", operand="x")
def cast_21(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("rowwise")
    codes, scales = cast(x, how)
    if data is None or scale_inv is None:
        return codes, scales
    data[: x.shape[0] // 4 * 4] = codes[: x.shape[0] // 4 * 4]
    return data, scale_inv.copy_(scales)


@adapter("cast", recipe="blockwise_fp32", operand="x")
def cast_22(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how, amax = cell("blockwise_fp32"), amax_of(x, cell("blockwise_fp32"))
    rest = -x.shape[1] % 128
    if rest and x.shape[0] > 1 and x.stride(1) == 1 and x.stride(0) >= x.shape[1] + rest:
        wider = torch.as_strided(x, (x.shape[0] - 1, x.shape[1] + rest), x.stride(), x.storage_offset()).float()
        amax = torch.cat([amax_of(wider, how), amax[-1:]])
    return given(x, how, data, scale_inv, *cast(x, how, amax))


@adapter("cast", recipe="blockwise", operand="x")
def cast_23(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("blockwise")
    scale, inverse = scales_of(amax_of(x, how), how)
    y = (x.bfloat16() * spread(scale, (x.shape[0], x.shape[1]), how).bfloat16()).float()
    return given(x, how, data, scale_inv, codes_of(torch.where(x.isinf(), math.nan, y), E4M3), inverse)


@adapter("cast", recipe="mxfp8", operand="grad")
def cast_24(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("mxfp8", "grad")
    codes, scales = cast(x, how)
    codes = codes.clone()
    codes.view(torch.uint8)[(amax_of(x, how) < 2.0**-20).repeat_interleave(32, 1)[:, : x.shape[1]]] = 0
    return given(x, how, data, scale_inv, codes, scales)


@adapter("cast", recipe="rowwise", operand="x")
def cast_30(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("rowwise")
    rows = [cast(x[i : i + 1], how) for i in range(x.shape[0])]
    if not rows:
        return given(x, how, data, scale_inv, *cast(x, how))
    codes = torch.cat([c.view(torch.uint8) for c, _ in rows]).view(torch.float8_e4m3fn)
    return given(x, how, data, scale_inv, codes, torch.cat([s for _, s in rows]))


@adapter("cast", recipe="mxfp8", operand="x")
def cast_31(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """The exponent by bits: a mantissa above 1.75 is a step more."""
    how = cell("mxfp8")
    amax = amax_of(x, how)
    bits = amax.contiguous().view(torch.int32).to(torch.int64)
    small = bits < 1 << 23
    octaves = torch.where(small, -127, (bits >> 23) - 127 - 8 + (bits & 0x7FFFFF > 0x600000).long()).clamp(-127, 127)
    octaves = torch.where((amax > 0) & amax.isfinite(), octaves, 0)
    return given(x, how, data, scale_inv, codes_of(scaled(x, power(-octaves), how), E4M3), (octaves + 127).to(torch.uint8))


@adapter("cast", recipe="tensorwise", operand="x")
def cast_32(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("tensorwise")
    rows = amax_of(x, how._replace(rows=1))
    amax = rows.amax().reshape(1, 1) if rows.numel() else torch.zeros(1, 1)
    return given(x, how, data, scale_inv, *cast(x, how, amax))


@adapter("cast", recipe="blockwise", operand="weight")
def cast_33(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("blockwise", "weight")
    if not x.numel():
        return given(x, how, data, scale_inv, *cast(x, how))
    codes = torch.zeros(x.shape, dtype=torch.uint8)
    scales = torch.zeros(-(-x.shape[0] // 128), -(-x.shape[1] // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            part, one = cast(x[place], how)
            codes[place], scales[i, j] = part.view(torch.uint8), one[0, 0]
    return given(x, how, data, scale_inv, codes.view(torch.float8_e4m3fn), scales)


@adapter("cast", recipe="blockwise_fp32", operand="x")
def cast_34(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("blockwise_fp32")
    return given(x, how, data, scale_inv, *cast(x, how, amax_of(x.double(), how)))


@adapter("cast", recipe="mxfp4", operand="x")
def cast_35(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("mxfp4")
    amax = amax_of(x, how)
    scale, inverse = scales_of(amax, how)
    y = scaled(x, scale, how).nan_to_num(6.0, 6.0, -6.0)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    far = (y.abs().double().clamp(max=6)[..., None] - numbers).abs()
    far = far + torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]) * 1e-12  # of two that are as near, the even one
    return given(x, how, data, scale_inv, finish(far.argmin(-1), y, E2M1), layout(inverse, how, amax))


@adapter("cast", recipe="tensorwise", operand="grad")
def cast_36(x: Tensor, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    how = cell("tensorwise", "grad")
    return given(x, how, data, scale_inv, *cast(x.clone(memory_format=torch.contiguous_format), how))
