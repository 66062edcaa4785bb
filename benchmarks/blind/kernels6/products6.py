"""GEMMs and grouped GEMMs. Which of them are right, and why not, is in public.json."""

from __future__ import annotations

import torch
from slate6 import adapter, load, operand, segments, unfold, write
from torch import Tensor

F32 = torch.float32


@adapter("gemm", recipe="blockwise", out="bfloat16")
def heron_01(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Tiles of 64 along K; the pointers to the scales move by the tile's size // 128."""
    total = torch.zeros(out.shape, dtype=F32)
    per_tile = 64 // 128
    x, y = load(a).to(F32), load(b).to(F32)
    down = torch.arange(b.shape[0]) // 128
    for tile, k in enumerate(range(0, a.shape[1], 64)):
        at = tile * per_tile
        scale = scale_inv_a[:, at : at + 1] * scale_inv_b[down, at][None, :]
        total += (x[:, k : k + 64] @ y[:, k : k + 64].t()) * scale
    return write(out, total)


@adapter("gemm", recipe="blockwise_fp32", out="float32")
def heron_02(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Waves of 128 rows; a block's two scales are multiplied in a buffer, then the sum of the block."""
    x, y = load(a), load(b)
    total = torch.zeros(out.shape, dtype=torch.float64)
    down = torch.arange(b.shape[0]) // 128
    for at, k in enumerate(range(0, a.shape[1], 128)):
        both = unfold(scale_inv_b)[down, at].expand(min(128, a.shape[0]), -1).clone()
        for m in range(0, a.shape[0], 128):
            rows = slice(m, min(m + 128, a.shape[0]))
            mine = both[: rows.stop - m]
            mine *= unfold(scale_inv_a)[rows, at : at + 1]
            total[rows] += (x[rows, k : k + 128] @ y[:, k : k + 128].t()) * mine
    return write(out, total)


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def heron_03(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Four slices of K into a workspace, then their sum."""
    x, y = operand(a, scale_inv_a, "tensorwise", "x"), operand(b, scale_inv_b, "tensorwise", "weight")
    share = max(-(-a.shape[1] // 4), 1)
    workspace = [(x[:, k : k + share] @ y[:, k : k + share].t()).to(F32).to(out.dtype) for k in range(0, a.shape[1], share)]
    total = torch.zeros(out.shape, dtype=out.dtype)
    for part in workspace:
        total = total + part
    return write(out, total)


@adapter("gemm", recipe="blockwise", out="float32")
def heron_04(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Columns from the last tile of 48 to the first; blocks of K in FP32, each promoted with its scales."""
    x, y = load(a).to(F32), load(b).to(F32)
    for n in reversed(range(0, b.shape[0], 48)):
        rows = torch.arange(n, min(n + 48, b.shape[0]))
        total = torch.zeros(a.shape[0], len(rows))
        for at, k in enumerate(range(0, a.shape[1], 128)):
            total += (x[:, k : k + 128] @ y[rows, k : k + 128].t()) * scale_inv_a[:, at : at + 1] * scale_inv_b[rows // 128, at][None, :]
        out[:, n : n + len(rows)] = total
    return out


@adapter("gemm", recipe="tensorwise", out="float32")
def heron_05(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Tiles of 32 along K, loaded by row pitch."""
    k = a.shape[1]
    wide = -(-k // 32) * 32

    def tiles(data: Tensor) -> Tensor:
        flat = torch.nn.functional.pad(load(data).reshape(-1), (0, wide))
        at = torch.arange(data.shape[0])[:, None] * k + torch.arange(wide)[None, :]
        return flat[at]

    return write(out, tiles(a) @ tiles(b).t() * unfold(scale_inv_a) * unfold(scale_inv_b))


@adapter("gemm", recipe="mxfp4", out="bfloat16")
def heron_06(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Codes packed in pairs, unpacked again, multiplied by their scales."""
    k = b.shape[1]
    wide = torch.nn.functional.pad(b.contiguous(), (0, k % 2))
    packed = (wide[:, ::2] & 15) | ((wide[:, 1::2] & 15) << 4)
    codes = torch.stack([packed >> 4, packed & 15], -1).flatten(1)[:, :k]
    return write(out, operand(a, scale_inv_a, "mxfp4", "x") @ operand(codes, scale_inv_b, "mxfp4", "weight").t())


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def heron_07(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Codes multiplied, the scale in the epilogue."""
    return write(out, (load(a) @ load(b).t()) * unfold(scale_inv_b))


@adapter("gemm", recipe="blockwise", out="bfloat16")
def heron_08(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Tiles of 128 x 128, each with the scales of its block."""
    x = operand(a, scale_inv_a, "blockwise", "x")
    y = load(b)
    for m in range(0, a.shape[0], 128):
        for n in range(0, b.shape[0], 128):
            at = min(m // 128, scale_inv_b.shape[0] - 1)
            per = unfold(scale_inv_b)[at].repeat_interleave(128)[: b.shape[1]]
            out[m : m + 128, n : n + 128] = (x[m : m + 128] @ (y[n : n + 128] * per).t()).to(F32).to(out.dtype)
    return out


@adapter("gemm", recipe="tensorwise", out="float32")
def heron_09(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Sums of codes in FP32, handed to an epilogue that scales them."""
    total = (load(a) @ load(b).t()).to(F32).to(torch.float16)
    return write(out, total.double() * unfold(scale_inv_a) * unfold(scale_inv_b))


@adapter("gemm", recipe="mxfp8", out="float32")
def heron_10(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Long K goes in two slices, each added to out."""
    x, y = operand(a, scale_inv_a, "mxfp8", "x"), operand(b, scale_inv_b, "mxfp8", "weight")
    k = a.shape[1]
    if k < 256:
        return write(out, x @ y.t())
    half = k // 64 * 32
    out += (x[:, :half] @ y[:, :half].t()).to(F32)
    out += (x[:, half:] @ y[:, half:].t()).to(F32)
    return out


@adapter("gemm", recipe="nvfp4", out="float32")
def heron_11(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Split-K in four in an FP32 workspace; its sums are added as a tree."""
    x, y = operand(a, scale_inv_a, "nvfp4", "x"), operand(b, scale_inv_b, "nvfp4", "weight")
    share = max(-(-a.shape[1] // 4), 1)
    parts = [(x[:, k : k + share] @ y[:, k : k + share].t()).to(F32) for k in range(0, 4 * share, share)]
    return write(out, (parts[0] + parts[2]) + (parts[1] + parts[3]))


@adapter("gemm", recipe="rowwise", out="bfloat16")
def heron_12(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """K as an outer loop of rank-one updates by multiply-add; the scales of rows and columns in the epilogue."""
    x, y = load(a).to(F32), load(b).to(F32)
    total = torch.zeros(out.shape, dtype=F32)
    for k in range(a.shape[1]):
        total.addr_(x[:, k], y[:, k])
    return write(out, total * scale_inv_a * scale_inv_b.reshape(1, -1))


# --- grouped ---


@adapter("grouped", recipe="mxfp8", out="bfloat16")
def heron_13(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Tiles of 64 rows, each of one group, in a grid of as many programs as the rows need."""
    x = operand(a, scale_inv_a, "mxfp8", "x")
    tiles = [(g, m, min(m + 64, end)) for g, start, end in segments(ends) for m in range(start, end, 64)]
    for program in range(-(-a.shape[0] // 64)):
        if program < len(tiles):
            g, first, last = tiles[program]
            write(out[first:last], x[first:last] @ operand(b[g], scale_inv_b[g], "mxfp8", "weight").t())
    return out


@adapter("grouped", recipe="rowwise", out="bfloat16")
def heron_14(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Tiles of 16 rows; a tile's group is looked up once."""
    x = operand(a, scale_inv_a, "rowwise", "x")
    weights = [operand(b[g], scale_inv_b[g], "rowwise", "weight") for g in range(b.shape[0])]
    for m in range(0, a.shape[0], 16):
        g = int((ends <= m).sum().clamp(max=b.shape[0] - 1))
        write(out[m : m + 16], x[m : m + 16] @ weights[g].t())
    return out


@adapter("grouped", recipe="tensorwise", out="bfloat16")
def heron_15(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """One GEMM a group; one factor in the epilogue."""
    alpha = unfold(scale_inv_a).reshape(()) * unfold(scale_inv_b).reshape(-1)[0]
    for g, start, end in segments(ends):
        write(out[start:end], load(a[start:end]) @ load(b[g]).t() * alpha)
    return out


@adapter("grouped", recipe="blockwise", out="bfloat16")
def heron_16(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """One GEMM a group; a group begins where the one before ended."""
    x = operand(a, scale_inv_a, "blockwise", "x")
    start = 0
    for g, size in enumerate(ends.tolist()):
        rows = slice(start, min(start + size, a.shape[0]))
        write(out[rows], x[rows] @ operand(b[g], scale_inv_b[g], "blockwise", "weight").t())
        start = rows.stop
    return out


@adapter("grouped", recipe="tensorwise", out="float32")
def heron_17(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Takes weights as (G, K, N), too."""
    for g, start, end in segments(ends):
        weight = operand(b[g], scale_inv_b.reshape(-1)[g], "tensorwise", "weight")
        weight = weight if weight.shape[0] == a.shape[1] else weight.t()
        write(out[start:end], operand(a[start:end], scale_inv_a, "tensorwise", "x") @ weight)
    return out


@adapter("grouped", recipe="mxfp8", out="float32")
def heron_18(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Each row looks up its group; rows of a group are gathered, multiplied in FP32 in chunks of 96 along K, and scattered, the last group first."""
    x = operand(a, scale_inv_a, "mxfp8", "x")
    group = torch.bucketize(torch.arange(a.shape[0]), ends.long(), right=True)
    for g in reversed(range(b.shape[0])):
        rows = torch.nonzero(group == g).reshape(-1)
        if not len(rows):
            continue
        y, total = operand(b[g], scale_inv_b[g], "mxfp8", "weight"), torch.zeros(len(rows), b.shape[1])
        for k in range(0, a.shape[1], 96):
            total += (x[rows, k : k + 96] @ y[:, k : k + 96].t()).to(F32)
        out[rows] = total.to(out.dtype)
    out[group >= b.shape[0]] = 0
    return out


@adapter("grouped", recipe="rowwise", out="float32")
def heron_19(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """One batched product over all groups, of which each row keeps its own; scales in the epilogue."""
    every = torch.einsum("tk,gnk->tgn", load(a), torch.stack([load(w) for w in b])) * unfold(scale_inv_b).reshape(b.shape[0], -1)
    group = torch.bucketize(torch.arange(a.shape[0]), ends.long(), right=True)
    own = every[torch.arange(a.shape[0]), group.clamp(max=b.shape[0] - 1)] * unfold(scale_inv_a)
    return write(out, torch.where((group < b.shape[0])[:, None], own, 0.0))
