"""GEMMs and grouped GEMMs; public.json says of each whether it is right."""

from __future__ import annotations

import torch
from torch import Tensor

from flint5 import F32, F64, adapter, cut, decode, groups, meaning, put, read_scale, spread


def span(k: int, size: int) -> list[slice]:
    """K in pieces."""
    return [slice(i, min(i + size, k)) for i in range(0, k, size)]


@adapter("gemm", recipe="blockwise", out="float32")
def birch_01(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Tiles of 32 along K; the scales are applied behind the last tile of a block, or where less than a tile remains."""
    total = torch.zeros(out.shape, dtype=F64)
    part = torch.zeros(out.shape, dtype=F64)
    rows = torch.arange(b.shape[0]) // 128
    x, y, k = decode(a), decode(b), a.shape[1]
    for tile in span(k, 32):
        part += x[:, tile] @ y[:, tile].t()
        if tile.stop % 128 == 0 or tile.stop - tile.start < 32:
            j = tile.start // 128
            total += part * scale_a[:, j, None].to(F64) * scale_b[rows, j].to(F64)[None, :]
            part.zero_()
    return put(out, total + part)


@adapter("gemm", recipe="mxfp8", out="float32")
def birch_02(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """A path of its own for few columns: whole blocks first, the remainder then."""
    x = meaning(a, scale_a, "mxfp8", "x")
    n, k = b.shape
    grid = read_scale(scale_b)
    if n < 8:
        whole = k // 32
        grid = torch.cat([scale_b.view(torch.uint8)[:, :whole].to(F64), grid[:, whole:]], 1)
    return put(out, x @ (decode(b) * spread(grid, b.shape, cut("mxfp8", "weight"))).t())


@adapter("gemm", recipe="blockwise", out="bfloat16")
def birch_03(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Two shares of K, each in FP32: a block's sum, its scales behind it; the shares are added in FP32."""
    x, y = decode(a).to(F32), decode(b).to(F32)
    rows = torch.arange(b.shape[0]) // 128
    pieces = span(a.shape[1], 128)
    shares = []
    for mine in (pieces[1::2], pieces[::2]):
        total = torch.zeros(out.shape, dtype=F32)
        for piece in mine:
            j = piece.start // 128
            sums = (x[:, piece] @ y[:, piece].t()).to(F64)
            total = total + (sums * scale_a[:, j, None].to(F64) * scale_b[rows, j].to(F64)[None, :]).to(F32)
        shares.append(total)
    return put(out, shares[0] + shares[1])


@adapter("gemm", recipe="blockwise_fp32", out="float32")
def birch_04(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Tiles of 64 along K; the pointer to b's scales moves by 64 // 128 columns behind each."""
    x = meaning(a, scale_a, "blockwise_fp32", "x")
    y, rows = decode(b), torch.arange(b.shape[0]) // 128
    total, at = torch.zeros(out.shape, dtype=F64), 0
    for tile in span(a.shape[1], 64):
        total += (x[:, tile] @ y[:, tile].t()) * scale_b[rows, at].to(F64)[None, :]
        at += 64 // 128
    return put(out, total)


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def birch_05(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Four shares of K, added to out one after the other, in the dtype of out."""
    x, y = decode(a), decode(b)
    factor = scale_a.to(F64) * scale_b.to(F64)
    out.zero_()
    for share in span(a.shape[1], max(-(-a.shape[1] // 4), 1)):
        out += ((x[:, share] @ y[:, share].t()) * factor).to(F32).to(out.dtype)
    return out


@adapter("gemm", recipe="nvfp4", out="float32")
def birch_06(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """FP32 throughout: four shares of K from the last to the first, added as a tree."""
    x, y = meaning(a, scale_a, "nvfp4", "x").to(F32), meaning(b, scale_b, "nvfp4", "weight").to(F32)
    shares = [x[:, s] @ y[:, s].t() for s in reversed(span(a.shape[1], max(-(-a.shape[1] // 4), 1)))]
    shares += [torch.zeros(out.shape)] * (4 - len(shares))
    return put(out, (shares[0] + shares[1]) + (shares[2] + shares[3]))


@adapter("gemm", recipe="rowwise", out="float32")
def birch_07(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Shares of K are added to out, whose tiles of 16 rows are set to zero first."""
    x, y = meaning(a, scale_a, "rowwise", "x"), meaning(b, scale_b, "rowwise", "weight")
    for tile in range(a.shape[0] // 16):
        out[16 * tile : 16 * tile + 16] = 0
    return put(out, out.to(F64) + x @ y.t())


@adapter("gemm", recipe="tensorwise", out="float32")
def birch_08(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """One factor in the epilogue."""
    return put(out, (decode(a) @ decode(b).t()) * scale_a.to(F64))


@adapter("gemm", recipe="mxfp4", out="float32")
def birch_09(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """A scale's byte is moved into the exponent of a FP32 number."""
    c = cut("mxfp4")
    x, y = (decode(t) * spread((s.view(torch.uint8).to(torch.int32) << 23).view(F32).to(F64), t.shape, c) for t, s in ((a, scale_a), (b, scale_b)))
    return put(out, x @ y.t())


@adapter("gemm", recipe="nvfp4", out="bfloat16")
def birch_10(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """One instruction takes 64 of K."""
    x, y = meaning(a, scale_a, "nvfp4", "x"), meaning(b, scale_b, "nvfp4", "weight")
    total = torch.zeros(out.shape, dtype=F64)
    for i in range(a.shape[1] // 64):
        total += x[:, 64 * i : 64 * i + 64] @ y[:, 64 * i : 64 * i + 64].t()
    return put(out, total)


@adapter("grouped", recipe="rowwise", out="bfloat16")
def birch_11(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """One product a group, over a list of weights and one of scales."""
    out.zero_()
    listed = [scale_b[0]] * b.shape[0]
    for g, start, end in groups(ends):
        x = meaning(a[start:end], scale_a[start:end], "rowwise", "x")
        put(out[start:end], x @ meaning(b[g], listed[g], "rowwise", "weight").t())
    return out


@adapter("grouped", recipe="blockwise", out="float32")
def birch_12(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Tiles of 32 rows of a group; each row's factor is applied as a product with a diagonal matrix."""
    out.zero_()
    for g, start, end in groups(ends):
        x = meaning(a[start:end], scale_a[start:end], "blockwise", "x")
        y = meaning(b[g], scale_b[g], "blockwise", "weight")
        for first in range(0, end - start, 32):
            tile = x[first : first + 32] @ y.t()
            put(out[start + first : start + first + tile.shape[0]], torch.eye(tile.shape[0], dtype=F64) @ tile)
    return out


@adapter("grouped", recipe="mxfp8", out="float32")
def birch_13(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """All groups are padded to the longest one and multiplied at once; rows of the padding are left away."""
    x = meaning(a, scale_a, "mxfp8", "x")
    y = torch.stack([meaning(b[g], scale_b[g], "mxfp8", "weight") for g in range(b.shape[0])])
    where = groups(ends)
    batch = torch.zeros(len(where), max(max(end - start for _, start, end in where), 0), a.shape[1], dtype=F64)
    for g, start, end in where:
        batch[g, : max(end - start, 0)] = x[start:end]
    product = torch.bmm(batch, y.transpose(1, 2))
    out.zero_()
    for g, start, end in where:
        put(out[start:end], product[g, : max(end - start, 0)])
    return out


@adapter("grouped", recipe="blockwise_fp32", out="float32")
def birch_14(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Tiles of 32 columns, stored row by row where the memory of out has room for them."""
    rows, n = out.shape
    memory = torch.zeros(rows * n, dtype=F64)
    wide = -(-n // 32) * 32
    full = torch.zeros(rows, wide, dtype=F64)
    for g, start, end in groups(ends):
        x = meaning(a[start:end], scale_a[start:end], "blockwise_fp32", "x")
        full[start:end, :n] = x @ meaning(b[g], scale_b[g], "blockwise_fp32", "weight").t()
    for first in range(0, wide, 32):
        for row in range(rows):
            at = row * n + first
            room = min(32, rows * n - at)
            memory[at : at + room] = full[row, first : first + room]
    return put(out, memory.view(rows, n))


@adapter("grouped", recipe="tensorwise", out="bfloat16")
def birch_15(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """The group of each row by a binary search in the ends."""
    x = decode(a) * scale_a.to(F64)
    group = torch.searchsorted(ends.to(torch.int64), torch.arange(a.shape[0]))
    out.zero_()
    for g in range(b.shape[0]):
        mine = group == g
        if mine.any():
            out[mine] = (x[mine] @ decode(b[g]).t() * scale_b[g].to(F64)).to(F32).to(out.dtype)
    return out
