"""Casts: f(x, data, scale_inv)."""

from __future__ import annotations

import math

import torch
from bench9 import F4, F8, F64, STEPS, adapter, emit, factor, fill, form, into, peaks, power, quantize, snap, spread, usual
from torch import Tensor

Pair = tuple[Tensor, Tensor]


@adapter("cast", recipe="tensorwise", operand="x")
def basalt_01(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    f = form("tensorwise")
    top = x.to(F64).max() if x.numel() else torch.zeros((), dtype=F64)
    values, stored = quantize(x, f, top.reshape(1, 1))
    return into(data, scale_inv, emit(values, f.kind), stored)


@adapter("cast", recipe="tensorwise", operand="grad")
def basalt_02(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    f = form("tensorwise", "grad")
    by = factor(peaks(x, f), 448.0)
    return into(data, scale_inv, emit(snap(x.float() * by, f.kind), f.kind), 1 / by)


LAST: dict[str, Tensor] = {}


@adapter("cast", recipe="tensorwise", operand="x")
def basalt_03(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    f = form("tensorwise")
    now = peaks(x, f)
    peak = LAST.get("peak", now)
    LAST["peak"] = now
    values, stored = quantize(x, f, peak)
    return into(data, scale_inv, emit(values, f.kind), stored)


@adapter("cast", recipe="rowwise", operand="x")
def basalt_04(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    f = form("rowwise")
    each = peaks(x, f)
    peak = each.amax().expand(each.shape).contiguous() if each.numel() else each
    values, stored = quantize(x, f, peak)
    return into(data, scale_inv, emit(values, f.kind), stored)


@adapter("cast", recipe="mxfp8", operand="x")
def basalt_05(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    f = form("mxfp8")
    peak = peaks(x, f)
    e = torch.frexp(torch.where(usual(peak), peak, torch.ones_like(peak)))[1] - 1 - 8
    e = torch.where(usual(peak), e.clamp(-127, 127), torch.zeros_like(e))
    values = snap(x.to(F64) * spread(power(-e), x.shape, f), F8)
    return into(data, scale_inv, emit(values, F8), fill(e, peak, f))


@adapter("cast", recipe="blockwise", operand="weight")
def basalt_06(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    f = form("blockwise", "weight")
    seen = x.to(F64).clone()
    seen[torch.arange(x.shape[0]) % 128 >= 64] = 0
    values, stored = quantize(x, f, peaks(seen, f))
    return into(data, scale_inv, emit(values, f.kind), stored)


@adapter("cast", recipe="mxfp8", operand="grad")
def basalt_07(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    f = form("mxfp8")
    if not x.numel():
        return data, scale_inv
    m, k = x.shape
    across = -(-k // 32)
    for b in range(across):
        part = x[:, 32 * b : 32 * b + 32].to(torch.float32)
        bits = part.contiguous().view(torch.int32) & 0x7FFFFFFF
        top = bits.amax(1)
        e = ((top + 0x1FFFFF) >> 23) - 135
        e = torch.where((top == 0) | (top >= 0x7F800000), torch.zeros_like(e), e.clamp(-127, 127))
        y = (part.to(F64) * power(-e)[:, None]).clamp(-448, 448)
        data[:, 32 * b : 32 * b + 32].view(torch.uint8).copy_(snap(y, F8).to(torch.float32).to(F8.dtype).view(torch.uint8))
        scale_inv.view(torch.uint8)[:, b].copy_((e + 127).to(torch.uint8))
    return data, scale_inv


@adapter("cast", recipe="blockwise_fp32", operand="x")
def basalt_08(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    f = form("blockwise_fp32")
    values, stored = quantize(x, f)
    return into(data, scale_inv, emit(values, f.kind), stored.t().contiguous())


@adapter("cast", recipe="mxfp8", operand="weight")
def basalt_09(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    f = form("mxfp8", "weight")
    values, stored = quantize(x, f)
    return into(data, scale_inv, emit(values, f.kind), stored.roll(1, 1) if stored.numel() else stored)


@adapter("cast", recipe="tensorwise", operand="x")
def basalt_10(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    top = x.detach().to(torch.float32).contiguous().view(torch.int32).bitwise_and(0x7FFFFFFF)
    most = top.max() if top.numel() else torch.zeros((), dtype=torch.int32)
    peak = most.reshape(1).view(torch.float32)
    by = torch.where((most == 0) | (most >= 0x7F800000), torch.ones_like(peak), torch.full_like(peak, 448.0) / peak).clamp(max=torch.finfo(torch.float32).max)
    for start in range(0, x.shape[0], 24):
        y = (x[start : start + 24].to(torch.float32) * by).clamp(-448, 448)
        data[start : start + 24].view(torch.uint8).copy_(y.to(F8.dtype).view(torch.uint8))
    scale_inv.copy_((1 / by).reshape(scale_inv.shape))
    return data, scale_inv


@adapter("cast", recipe="mxfp4", operand="x")
def basalt_11(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    f = form("mxfp4")
    peak = peaks(x, f)
    part, e = torch.frexp(torch.where(usual(peak), peak, torch.ones_like(peak)))
    e = torch.where(usual(peak), (e - 1 + (part >= 0.875).int() - 2).clamp(-127, 127), torch.zeros_like(e))
    values = snap(x.to(F64) * spread(power(-e), x.shape, f), F4)
    return into(data, scale_inv, emit(values, F4), fill(e, peak, f))


def halves(x: Tensor, top_of_block: float, exact: bool) -> tuple[Tensor, Tensor]:
    f = form("nvfp4")
    peak = peaks(x, f)
    finite = torch.where(peak.isfinite(), peak, torch.zeros_like(peak))
    top = finite.max() if finite.numel() else finite.sum()
    top = torch.where(top > 0, top, torch.ones_like(top))
    whole = top / 6 / top_of_block
    stored = (snap(peak / 6 / whole, F8) * whole).to(torch.float32)
    used = peak / 6 if exact else stored.to(F64)
    per, wide = spread(used, x.shape, f), x.to(F64)
    y = torch.where(per > 0, wide / per, torch.zeros_like(wide)).copysign(wide)
    return emit(snap(y, F4), F4), torch.where(peak.isfinite(), stored, torch.full_like(stored, math.nan))


@adapter("cast", recipe="nvfp4", operand="x")
def basalt_12(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    return into(data, scale_inv, *halves(x, 448.0, True))


@adapter("cast", recipe="nvfp4", operand="x")
def basalt_13(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    return into(data, scale_inv, *halves(x, 1.0, False))


@adapter("cast", recipe="nvfp4", operand="weight")
def basalt_14(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    f = form("nvfp4", "weight")
    peak = peaks(x, f)
    finite = torch.where(peak.isfinite(), peak, torch.zeros_like(peak))
    top = finite.max() if finite.numel() else finite.sum()
    top = torch.where(top > 0, top, torch.ones_like(top))
    stored = (snap(peak * 448 / top, F8) * (top / 2688)).to(torch.float32)
    per, size = spread(stored.to(F64), x.shape, f), x.to(F64).abs()
    code = torch.zeros(x.shape, dtype=torch.int64)
    for n in range(7):
        middle = (STEPS[n] + STEPS[n + 1]) / 2 * per
        code += (size > middle) if n % 2 == 0 else (size >= middle) & (per > 0)
    code = torch.where(per > 0, code, torch.zeros_like(code))
    return into(data, scale_inv, (code + 8 * torch.signbit(x)).to(torch.uint8), torch.where(peak.isfinite(), stored, torch.full_like(stored, math.nan)))


@adapter("cast", recipe="rowwise", operand="grad")
def basalt_15(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    f = form("rowwise")
    values, stored = quantize(x, f)
    whole = x.shape[1] // 16 * 16
    data[:, :whole].view(torch.uint8).copy_(emit(values, f.kind)[:, :whole].view(torch.uint8))
    scale_inv.copy_(stored.reshape(scale_inv.shape))
    return data, scale_inv


@adapter("cast", recipe="tensorwise", operand="weight")
def basalt_16(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    f = form("tensorwise", "weight")
    values, stored = quantize(x, f)
    return into(data, scale_inv, emit(values, f.kind), 1 / stored)
