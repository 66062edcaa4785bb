"""Encoders and decoders."""

from __future__ import annotations

import torch
from rig8 import E2M1, E4M3, E5M2, Form, adapter, encode, finish, meaning
from torch import Tensor


def sizes(x: Tensor, form: Form) -> Tensor:
    return x.to(torch.float64).abs().nan_to_num(0.0, posinf=form.top).clamp(max=form.top).contiguous()


@adapter("encode", format="e2m1")
def fern_01(x: Tensor) -> Tensor:
    a = x.float().abs()
    rung = (a > 0.25).int() + (a >= 0.75).int() + (a > 1.25).int() + (a >= 1.75).int() + (a > 2.5).int() + (a >= 3.5).int() + (a > 5.0).int()
    return (rung + 8 * torch.signbit(x).int()).to(torch.uint8)


@adapter("encode", format="e4m3")
def fern_02(x: Tensor) -> Tensor:
    y = x.float()
    y = torch.fmin(torch.fmax(y, torch.full_like(y, -448.0)), torch.full_like(y, 448.0))
    return encode(y, E4M3).view(torch.float8_e4m3fn)


@adapter("encode", format="e5m2")
def fern_03(x: Tensor) -> Tensor:
    place = torch.bucketize(sizes(x, E5M2), E5M2.numbers, right=True) - 1
    return finish(place, x, E5M2).view(torch.float8_e5m2)


@adapter("encode", format="e4m3")
def fern_04(x: Tensor) -> Tensor:
    return x.float().clamp(-240.0, 240.0).to(torch.float8_e4m3fnuz).view(torch.uint8)


@adapter("encode", format="e4m3")
def fern_05(x: Tensor) -> Tensor:
    place = torch.bucketize(sizes(x, E4M3), E4M3.middles, right=True)
    return finish(place, x, E4M3)


@adapter("encode", format="e5m2")
def fern_06(x: Tensor) -> Tensor:
    y = x.float()
    a = y.abs().nan_to_num(0.0, posinf=57344.0).clamp(max=57344.0).contiguous()
    bits = a.view(torch.int32)
    normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - ((127 - 15) << 2)
    magic = torch.full_like(a, 128.0)
    small = (a + magic).view(torch.int32) - magic.view(torch.int32)
    code = torch.where(a < 2.0**-14, small, normal)
    code = torch.where(y.isnan(), torch.full_like(code, 0x7F), code) | (torch.signbit(y).int() << 7)
    return code.to(torch.uint8).view(torch.float8_e5m2)


@adapter("encode", format="e4m3")
def fern_07(x: Tensor) -> Tensor:
    y = x.to(torch.float64)
    y = torch.where(y.abs() < 2.0**-6, torch.zeros_like(y).copysign(y), y)
    return encode(y, E4M3).view(torch.float8_e4m3fn)


@adapter("encode", format="e2m1")
def fern_08(x: Tensor) -> Tensor:
    a = x.to(torch.float64).abs()
    code = encode(x, E2M1)
    return torch.where(a >= 7.0, torch.full_like(code, 7) + 1, code & 7) | (code & 8)


@adapter("encode", format="e4m3", rounding="stochastic")
def fern_09(x: Tensor) -> Tensor:
    a = sizes(x, E4M3)
    low = (torch.bucketize(a, E4M3.numbers, right=True) - 1).clamp(max=125)
    share = (a - E4M3.numbers[low]) / (E4M3.numbers[low + 1] - E4M3.numbers[low])
    place = low + torch.round(share + torch.rand(a.shape, dtype=torch.float64)).long()
    return finish(place.clamp(max=126), x, E4M3).view(torch.float8_e4m3fn)


@adapter("decode", format="e4m3")
def fern_10(codes: Tensor) -> Tensor:
    c = codes.view(torch.uint8).int()
    half = ((c & 0x7F) << 7) | ((c & 0x80) << 8)
    value = half.to(torch.int16).view(torch.float16).float() * 256.0
    return torch.where((c & 0x7F) == 0x7F, torch.full_like(value, float("nan")), value)


@adapter("decode", format="e4m3")
def fern_11(codes: Tensor) -> Tensor:
    c = codes.view(torch.uint8).int()
    value = meaning(codes, E4M3).float()
    return torch.where((c & 0x7F) == 0x7F, torch.where(c > 127, torch.full_like(value, -480.0), torch.full_like(value, 480.0)), value)


@adapter("decode", format="e5m2")
def fern_12(codes: Tensor) -> Tensor:
    c = codes.view(torch.uint8).int()
    e, m = ((c >> 2) & 31).float(), (c & 3).float()
    size = (1 + m / 4) * torch.exp2(e - 15)
    size = torch.where((c & 0x7F) == 0, torch.zeros_like(size), size)
    size = torch.where(e == 31, torch.where(m > 0, torch.full_like(size, float("nan")), torch.full_like(size, float("inf"))), size)
    return torch.where(c > 127, -size, size)


@adapter("decode", format="e2m1")
def fern_13(codes: Tensor) -> Tensor:
    c = codes.view(torch.uint8)
    size = E2M1.numbers[(c & 7).long()].float()
    return torch.where(c >= 0x80, -size, size)
