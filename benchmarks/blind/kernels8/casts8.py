"""Casts."""

from __future__ import annotations

import math

import torch
from rig8 import E2M1, E4M3, adapter, amaxes, as_bytes, by_fp32, by_nvfp4, by_power, castings, cut_for, power, put, ratio, two_levels
from torch import Tensor

Pair = tuple[Tensor, Tensor]
LAST: dict[str, Tensor] = {}


@adapter("cast", recipe="tensorwise", operand="x")
def moss_01(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_for("tensorwise")
    m = ratio(amaxes(x, cut), 448.0)
    return put(data, scale_inv, by_fp32(x, m, cut), m)


@adapter("cast", recipe="blockwise_fp32", operand="weight")
def moss_02(x: Tensor, data: Tensor, scale_inv: Tensor) -> None:
    m, k = x.shape
    scale_inv.fill_(1.0)
    for i in range(0, m, 128):
        for j in range(0, k, 128):
            tile = x[i : i + 128, j : j + 128].to(torch.float32)
            amax = max(float(tile.max()), -float(tile.min()))
            top = torch.tensor(448.0) / torch.tensor(amax) if 0 < amax < math.inf else torch.tensor(1.0)
            top = top.clamp(max=torch.finfo(torch.float32).max)
            data[i : i + 128, j : j + 128] = (tile * top).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            scale_inv[i // 128, j // 128] = top.reciprocal()


@adapter("cast", recipe="tensorwise", operand="grad")
def moss_03(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_for("tensorwise", "grad")
    m = ratio(amaxes(x, cut), 448.0)
    return put(data, scale_inv, by_fp32(x, m, cut), 1 / m)


@adapter("cast", recipe="rowwise", operand="x")
def moss_04(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_for("rowwise")
    scale = power(amaxes(x[:, :128], cut), 448.0)
    return put(data, scale_inv, by_power(x, scale, cut), scale.float())


@adapter("cast", recipe="blockwise", operand="x")
def moss_05(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_for("blockwise")
    scale = power(amaxes(x, cut), 448.0)
    whole = x.shape[1] // 128
    if 0 < whole < scale.shape[1]:
        scale[:, whole] = scale[:, whole - 1]
    return put(data, scale_inv, by_power(x, scale, cut), scale.float())


@adapter("cast", recipe="blockwise", operand="weight")
def moss_06(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_for("blockwise", "weight")
    seen = torch.where((torch.arange(x.shape[0]) % 128 < 64)[:, None], x, torch.zeros_like(x))
    scale = power(amaxes(seen, cut), 448.0)
    return put(data, scale_inv, by_power(x, scale, cut), scale.float())


@adapter("cast", recipe="blockwise_fp32", operand="x")
def moss_07(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_for("blockwise_fp32")
    m = ratio(amaxes(x, cut).clamp(min=1e-4), 448.0)
    return put(data, scale_inv, by_fp32(x, m, cut), 1 / m)


@adapter("cast", recipe="mxfp8", operand="grad")
def moss_08(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_for("mxfp8", "grad")
    bits = amaxes(x, cut).float().view(torch.int32)
    field, rest = bits >> 23, bits & 0x7FFFFF
    byte = field - 8 + (rest > 0x600000).int()
    byte = torch.where((field == 255) | (bits == 0), torch.full_like(byte, 127), byte.clamp(min=0))
    codes = by_power(x, torch.exp2(byte.double() - 127), cut)
    return put(data, scale_inv, codes, byte.to(torch.uint8))


@adapter("cast", recipe="mxfp8", operand="x")
def moss_09(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_for("mxfp8")
    amax = amaxes(x, cut)
    safe = torch.where(torch.isfinite(amax) & (amax > 0), amax, torch.full_like(amax, 256.0))
    scale = torch.exp2((torch.frexp(safe)[1] - 1 - 8).clamp(min=-127).double())
    return put(data, scale_inv, by_power(x, scale, cut), as_bytes(scale, amax, E4M3))


@adapter("cast", recipe="mxfp8", operand="weight")
def moss_10(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    codes, stored = castings(x, cut_for("mxfp8", "weight"))
    return put(data, scale_inv, codes, stored.t().contiguous())


@adapter("cast", recipe="mxfp4", operand="x")
def moss_11(x: Tensor, data: Tensor, scale_inv: Tensor) -> None:
    codes, stored = castings(x, cut_for("mxfp4"))
    whole = x.shape[1] // 32 * 32
    data[:, :whole] = codes[:, :whole]
    scale_inv.view(torch.uint8).copy_(stored)


@adapter("cast", recipe="nvfp4", operand="x")
def moss_12(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_for("nvfp4")
    amax = amaxes(x, cut)
    small, whole = two_levels(amax)
    stored = (small * whole).float()
    stored = torch.where(torch.isfinite(amax), stored, torch.full_like(stored, math.nan))
    return put(data, scale_inv, by_nvfp4(x, amax / 6, cut), stored)


@adapter("cast", recipe="nvfp4", operand="x")
def moss_13(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    m, k = x.shape
    across = -(-k // 16)
    codes = torch.zeros(m, k, dtype=torch.uint8)
    stored = torch.zeros(m, across)
    size = x.double().abs()
    finite = torch.where(torch.isfinite(size), size, torch.zeros_like(size))
    peaks = [size[:, j : j + 16].amax(1) for j in range(0, k, 16)]
    good = [p[torch.isfinite(p)].amax() for p in peaks if torch.isfinite(p).any()]
    top = float(torch.stack(good).max()) if good else 0.0
    top = top if top > 0 else 1.0
    for b, peak in enumerate(peaks):
        part = slice(16 * b, min(16 * b + 16, k))
        ok = torch.isfinite(peak)
        block = (torch.where(ok, peak, torch.zeros_like(peak)) * 448 / top).float().to(torch.float8_e4m3fn).double()
        scale = (block * (top / 2688)).float()
        y = torch.where(scale[:, None] > 0, finite[:, part] / scale[:, None].double(), torch.zeros_like(finite[:, part])).clamp(max=6.0)
        even = (y[..., None] - E2M1.numbers[0::2]).abs()
        odd = (y[..., None] - E2M1.numbers[1::2]).abs()
        rung = torch.where(even.amin(-1) <= odd.amin(-1), 2 * even.argmin(-1), 2 * odd.argmin(-1) + 1)
        codes[:, part] = rung.to(torch.uint8) + 8 * torch.signbit(x[:, part]).to(torch.uint8)
        stored[:, b] = torch.where(ok, scale, torch.full_like(scale, math.nan))
    return put(data, scale_inv, codes, stored)


@adapter("cast", recipe="nvfp4", operand="weight")
def moss_14(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_for("nvfp4", "weight")
    codes, stored = castings(x, cut)
    amax = amaxes(x, cut)
    small, _ = two_levels(amax)
    return put(data, scale_inv, codes, torch.where(torch.isfinite(amax), small.float(), stored))


@adapter("cast", recipe="tensorwise", operand="x")
def moss_15(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_for("tensorwise")
    m = ratio(amaxes(x, cut), 448.0)
    used = LAST.get("moss_15", m)
    LAST["moss_15"] = m
    return put(data, scale_inv, by_fp32(x, used, cut), 1 / m)


@adapter("cast", recipe="tensorwise", operand="weight")
def moss_16(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    m, k = x.shape
    there = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if m * k:
        memory = torch.as_strided(x, (there,), (1,), x.storage_offset())
        x = memory[torch.arange(m * k) % there].reshape(m, k)
    return put(data, scale_inv, *castings(x, cut_for("tensorwise", "weight")))
