"""Casts of the tenth set. public.json says which are right."""

from __future__ import annotations

import torch
from torch import Tensor
from yard10 import (E2M1, E4M3, F64, Cut, adapter, blocks_of, byte_scale, codes_of, cut_of, entry, inverse32, nv_scales, peaks, put,
                    quantize, round_to, seen, step_up, two)

Pair = tuple[Tensor, Tensor]


@adapter("cast", recipe="tensorwise", operand="x")
def rope_01(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    m = inverse32(peaks(x, cut_of("tensorwise")), 448.0)
    return put(data, scale_inv, codes_of(x.float() * m, E4M3), m)


@adapter("cast", recipe="tensorwise", operand="grad")
def rope_02(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_of("tensorwise", "grad")
    m = inverse32(peaks(x, cut), 448.0)
    return put(data, scale_inv, codes_of(x.float() * m, cut.form), 1 / m)


@adapter("cast", recipe="mxfp8", operand="x")
def rope_03(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    holds = torch.ldexp(torch.tensor(448.0, dtype=F64), torch.arange(-127, 128))
    _, k = x.shape
    raw, bytes_ = data.view(torch.uint8), scale_inv.view(torch.uint8)
    for j in reversed(range(-(-k // 32))):
        part = x[:, 32 * j : 32 * j + 32].to(F64)
        amax = torch.maximum(part.amax(1), -part.amin(1)) if len(part) else part.new_zeros(0)
        byte = torch.where(seen(amax), torch.searchsorted(holds, amax).clamp(max=254), 127)
        raw[:, 32 * j : 32 * j + 32] = codes_of(part / two(byte - 127)[:, None], E4M3)
        bytes_[:, j] = byte.to(torch.uint8)
    return data, scale_inv


@adapter("cast", recipe="rowwise", operand="x")
def rope_04(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    amax = peaks(x, Cut(E4M3, 0, 0, "pow2")).expand(x.shape[0], 1)
    e = step_up(amax.contiguous(), 448.0)
    return put(data, scale_inv, codes_of(x.to(F64) * two(-e), E4M3), two(e).float())


@adapter("cast", recipe="blockwise", operand="x")
def rope_05(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_of("blockwise")
    b = blocks_of(x, cut)
    amax = b.amax((1, 3)).clamp(min=0.0) if b.numel() else peaks(x, cut)
    e = step_up(amax, 448.0)
    return put(data, scale_inv, codes_of(x.to(F64) * entry(two(-e), tuple(x.shape), cut), E4M3), two(e).float())


@adapter("cast", recipe="blockwise", operand="weight")
def rope_06(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    codes, scales = quantize(x, cut_of("blockwise", "weight"))
    return put(data, scale_inv, codes, scales.t().contiguous().reshape(scales.shape))


@adapter("cast", recipe="mxfp8", operand="x")
def rope_07(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_of("mxfp8")
    amax = peaks(x, cut)
    e = step_up(torch.where(seen(amax), two(torch.frexp(torch.where(seen(amax), amax, 1.0))[1] - 1), 256.0), 256.0)
    codes = codes_of(x.to(F64) * entry(two(-e), tuple(x.shape), cut), E4M3)
    return put(data, scale_inv, codes, byte_scale(e, amax, E4M3))


@adapter("cast", recipe="nvfp4", operand="x")
def rope_08(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    k = x.shape[1]
    amax = torch.stack([p.abs().to(F64).amax(1) for p in x.split(16, 1)], 1) if x.numel() else torch.zeros(scale_inv.shape, dtype=F64)
    finite = amax[amax.isfinite()]
    top = float(finite.max()) if finite.numel() and float(finite.max()) > 0 else 1.0
    kept = torch.empty(amax.shape, dtype=torch.float32)
    for c in reversed(range(amax.shape[1])):
        kept[:, c] = (round_to(amax[:, c] / 6 / (top / 2688), E4M3) * (top / 2688)).float()
        part = x[:, 16 * c : min(16 * c + 16, k)].to(F64)
        by = kept[:, c : c + 1].double()
        data[:, 16 * c : 16 * c + 16] = codes_of(torch.where(by == 0, 0.0, part / by).copysign(part), E2M1)
    scale_inv.copy_(torch.where(amax.isfinite(), kept, float("nan")))
    return data, scale_inv


@adapter("cast", recipe="mxfp8", operand="weight")
def rope_09(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_of("mxfp8", "weight")
    amax = peaks(x, cut)
    e = torch.round(torch.log2(torch.where(seen(amax), amax, 448.0) / 448.0)).long().clamp(-127, 127)
    codes = codes_of(x.to(F64) * entry(two(-e), tuple(x.shape), cut), E4M3)
    return put(data, scale_inv, codes, byte_scale(e, amax, E4M3))


@adapter("cast", recipe="mxfp4", operand="x")
def rope_10(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    codes, scales = quantize(x.float().nan_to_num(nan=0.0), cut_of("mxfp4"))
    return put(data, scale_inv, codes, scales)


@adapter("cast", recipe="nvfp4", operand="x")
def rope_11(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_of("nvfp4")
    amax = peaks(x, cut)
    small, whole = nv_scales(amax)
    per = entry(amax / 6, tuple(x.shape), cut)
    y = torch.where(per > 0, x.to(F64) / per, 0.0).copysign(x.to(F64))
    return put(data, scale_inv, codes_of(y, E2M1), torch.where(amax.isfinite(), (small * whole).float(), float("nan")))


@adapter("cast", recipe="blockwise_fp32", operand="weight")
def rope_12(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    m, k = x.shape
    out = torch.zeros(m, k, dtype=torch.uint8)
    for i in range(0, m, 128):
        for j in range(0, k, 128):
            tile = x[i : i + 128, j : j + 128].float()
            amax = torch.stack([row.abs().max() for row in tile.unbind(0)]).max()
            inverse = amax / 448 if bool(seen(amax)) else torch.tensor(1.0)
            scale_inv[i // 128, j // 128] = inverse
            inverse = inverse.double().clamp(min=2.0**-149)
            out[i : i + 128, j : j + 128] = codes_of(tile.double() / inverse, E4M3)
    data.view(torch.uint8).copy_(out)
    return data, scale_inv


@adapter("cast", recipe="nvfp4", operand="weight")
def rope_13(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    wide = cut_of("nvfp4")
    small, whole = nv_scales(peaks(x, wide))
    kept = (small * whole).float()
    per = entry(kept.double(), tuple(x.shape), wide)
    y = torch.where(per > 0, x.to(F64) / per, 0.0).copysign(x.to(F64))
    return put(data, scale_inv, codes_of(y, E2M1), kept[::16].contiguous())


LAST: dict[str, Tensor] = {}


@adapter("cast", recipe="tensorwise", operand="weight")
def rope_14(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    now = peaks(x, cut_of("tensorwise"))
    m = inverse32(LAST.get("amax", now), 448.0)
    LAST["amax"] = now.clone()
    return put(data, scale_inv, codes_of(x.float() * m, E4M3), 1 / m)


@adapter("cast", recipe="rowwise", operand="weight")
def rope_15(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    codes, scales = quantize(x, cut_of("rowwise"))
    whole = x.shape[1] // 16 * 16
    data.view(torch.uint8)[:, :whole] = codes[:, :whole]
    scale_inv.copy_(scales)
    return data, scale_inv


@adapter("cast", recipe="blockwise", operand="grad")
def rope_16(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    cut = cut_of("blockwise", "grad")
    amax = peaks(x, cut)
    e = step_up(amax.clamp(min=1e-4), 448.0)
    return put(data, scale_inv, codes_of(x.to(F64) * entry(two(-e), tuple(x.shape), cut), E4M3), two(e).float())
