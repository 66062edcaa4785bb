"""GEMMs and grouped GEMMs of the tenth set. public.json says which are right."""

from __future__ import annotations

import torch
from torch import Tensor
from yard10 import F64, adapter, cut_of, entry, gemm64, groups, means, plain, settle, two


def finish(out: Tensor, y: Tensor) -> Tensor:
    """Rounded once, and stored."""
    out.copy_(y.float() if y.dtype == F64 else y)
    return out


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def sail_01(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    return finish(out, means(a) @ means(b).mT * plain(scale_inv_a))


@adapter("gemm", recipe="rowwise", out="float32")
def sail_02(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    y = means(a) @ means(b).mT
    m, n = y.shape
    if n == 0:
        return out
    return finish(out, y * plain(scale_inv_a) * plain(scale_inv_b).flatten()[torch.arange(m) % n][:, None])


@adapter("gemm", recipe="blockwise", out="float32")
def sail_03(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    m, k = a.shape
    n = b.shape[0]
    total = torch.zeros(m, n, dtype=F64)
    down = torch.arange(n) // 128
    for j in reversed(range(-(-k // 128))):
        at = slice(128 * j, 128 * j + 128)
        product = means(a[:, at]) @ means(b[:, at]).mT
        total = torch.addcmul(total, product, plain(scale_inv_a)[:, j, None] * plain(scale_inv_b)[down, j][None, :])
    return finish(out, total)


@adapter("gemm", recipe="blockwise", out="bfloat16")
def sail_04(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    whole = a.shape[1] // 128 * 128
    x, y = settle(a, scale_inv_a, "blockwise"), settle(b, scale_inv_b, "blockwise", "weight")
    return finish(out, x[:, :whole] @ y[:, :whole].mT)


@adapter("gemm", recipe="blockwise_fp32", out="float32")
def sail_05(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    first = plain(scale_inv_a)[:, :1]
    x = means(a) * first if a.shape[1] else means(a)
    return finish(out, x @ settle(b, scale_inv_b, "blockwise_fp32", "weight").mT)


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def sail_06(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    lanes = [means(a[:, i::4]).float() @ means(b[:, i::4]).float().mT for i in range(4)]
    total = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])
    return finish(out, total.double() * (plain(scale_inv_b) * plain(scale_inv_a)))


@adapter("gemm", recipe="mxfp8", out="float32")
def sail_07(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    def signed(scale: Tensor) -> Tensor:
        raw = scale.view(torch.uint8)
        power = two(raw.view(torch.int8).long() - 127)
        return torch.where(raw == 255, float("nan"), power)

    cut = cut_of("mxfp8")
    x = means(a) * entry(signed(scale_inv_a), tuple(a.shape), cut)
    y = means(b) * entry(signed(scale_inv_b), tuple(b.shape), cut)
    return finish(out, x @ y.mT)


@adapter("gemm", recipe="nvfp4", out="float32")
def sail_08(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    x, y = settle(a, scale_inv_a, "nvfp4"), settle(b, scale_inv_b, "nvfp4", "weight")
    total = torch.zeros(out.shape, dtype=torch.bfloat16)
    for j in range(0, a.shape[1], 64):
        total = (total.float() + (x[:, j : j + 64] @ y[:, j : j + 64].mT).float()).bfloat16()
    return finish(out, total.float())


@adapter("gemm", recipe="tensorwise", out="float32")
def sail_09(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    total = (means(a) @ means(b).mT).float().half()
    return finish(out, total.float() * scale_inv_a * scale_inv_b)


@adapter("gemm", recipe="rowwise", out="bfloat16")
def sail_10(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    y = gemm64(a, b, scale_inv_a, scale_inv_b, "rowwise")
    return finish(out, y + 0.0 * out.double())


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def sail_11(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    n, k = b.shape
    raw = b.view(torch.uint8)
    room = raw.untyped_storage().nbytes() - raw.storage_offset()
    flat = raw.as_strided((max(room, 0),), (1,))
    packed = flat[torch.arange(n * k) % max(room, 1)].view(n, k).view(b.dtype)
    return finish(out, gemm64(a, packed, scale_inv_a, scale_inv_b, "tensorwise"))


@adapter("gemm", recipe="mxfp8", out="bfloat16")
def sail_12(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    m, k = a.shape
    n = b.shape[0]
    x, y = settle(a, scale_inv_a, "mxfp8"), settle(b, scale_inv_b, "mxfp8", "weight")
    for i in range(0, m, 24):
        for j in range(0, n, 40):
            tile = torch.zeros(min(24, m - i), min(40, n - j), dtype=F64)
            for s in range(0, k, 96):
                tile += x[i : i + 24, s : s + 96] @ y[j : j + 40, s : s + 96].mT
            out[i : i + 24, j : j + 40] = tile.float()
    return out


@adapter("grouped", recipe="blockwise", out="bfloat16")
def sail_13(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    out.zero_()
    x = settle(a, scale_inv_a, "blockwise")
    for g, start, end in groups(ends):
        out[start:end] = (x[start:end] @ settle(b[g], scale_inv_b[0], "blockwise", "weight").mT).float()
    return out


@adapter("grouped", recipe="tensorwise", out="bfloat16")
def sail_14(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    owner = torch.searchsorted(ends.contiguous(), torch.arange(len(a), dtype=torch.int32), right=True)
    out.zero_()
    x = settle(a, scale_inv_a, "tensorwise")
    for g in reversed(range(len(b))):
        rows = (owner == g).nonzero().flatten()
        out[rows] = (x[rows] @ settle(b[g], scale_inv_b[g], "tensorwise", "weight").mT).float().to(out.dtype)
    return out


@adapter("grouped", recipe="tensorwise", out="float32")
def sail_15(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    row = torch.arange(len(a), dtype=torch.int32)
    owner = torch.searchsorted(ends.contiguous(), row)
    owner[int(ends[-1]) if len(ends) else 0 :] = len(b)
    out.zero_()
    x = settle(a, scale_inv_a, "tensorwise")
    for g in range(len(b)):
        rows = (owner == g).nonzero().flatten()
        out[rows] = (x[rows] @ settle(b[g], scale_inv_b[g], "tensorwise", "weight").mT).float()
    return out


@adapter("grouped", recipe="rowwise", out="bfloat16")
def sail_16(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    owner = torch.searchsorted(ends.contiguous(), torch.arange(len(a), dtype=torch.int32), right=True)
    out.zero_()
    x = settle(a, scale_inv_a, "rowwise")
    for i in range(0, len(a), 16):
        g = int(owner[i])
        if g < len(b):
            tile = (x[i : i + 16] @ settle(b[g], scale_inv_b[g], "rowwise", "weight").mT).float()
            tile[owner[i : i + 16] == len(b)] = 0.0
            out[i : i + 16] = tile
    return out


@adapter("grouped", recipe="mxfp8", out="bfloat16")
def sail_17(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    out.zero_()
    x = settle(a, scale_inv_a, "mxfp8")
    for g, start, end in groups(ends):
        end = start + (end - start) // 8 * 8
        out[start:end] = (x[start:end] @ settle(b[g], scale_inv_b[g], "mxfp8", "weight").mT).float()
    return out


@adapter("grouped", recipe="blockwise", out="float32")
def sail_18(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    count, n, k = b.shape
    x = settle(a, scale_inv_a, "blockwise")
    y = torch.cat([settle(b[g], scale_inv_b[g], "blockwise", "weight") for g in range(count)]) if count else torch.zeros(0, k, dtype=F64)
    wide = (x @ y.mT).view(len(a), count, n)
    edges = torch.cat([ends.new_zeros(1), ends])
    row = torch.arange(len(a))[:, None]
    mine = (row >= edges[None, :-1]) & (row < edges[None, 1:])
    return finish(out, torch.where(mine[:, :, None], wide, 0.0).sum(1))


@adapter("grouped", recipe="rowwise", out="float32")
def sail_19(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    out.zero_()
    x = settle(a, scale_inv_a, "rowwise")
    start = 0
    for g, size in enumerate(ends.tolist()):
        end = min(start + size, len(a))
        out[start:end] = (x[start:end] @ settle(b[g], scale_inv_b[g], "rowwise", "weight").mT).float()
        start = end
    return out
