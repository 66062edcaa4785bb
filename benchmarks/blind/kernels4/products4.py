"""GEMMs and grouped GEMMs."""

from __future__ import annotations

import math

import torch
from stones4 import adapter, fp8, grown, plan, product, put, read, spans, two, values
from torch import Tensor

# --- GEMMs: a (M, K), b (N, K) ---


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def till_01(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Slices of 64 along K, each added to the output."""
    total = torch.zeros(out.shape, dtype=torch.bfloat16)
    factor = read(scale_a) * read(scale_b)
    x, y = values(a), values(b).t()
    for k in range(0, a.shape[1], 64):
        total += (x[:, k : k + 64] @ y[k : k + 64] * factor).float().bfloat16()
    out.copy_(total)
    return out


@adapter("gemm", recipe="blockwise", out="bfloat16")
def till_02(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """One slice of scales is loaded before the loop over K."""
    first = scale_a[:, :1].expand_as(scale_a)
    return put(out, product(a, b, first, scale_b, "blockwise"))


@adapter("gemm", recipe="blockwise_fp32", out="float32")
def till_03(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Applies scales when 128 of K are done."""
    total = torch.zeros(out.shape, dtype=torch.float64)
    x, y = values(a), values(b)
    for i, k in enumerate(range(0, a.shape[1], 128)):
        part = x[:, k : k + 128] @ y[:, k : k + 128].t()
        if k + 128 <= a.shape[1]:
            part = part * scale_a[:, i : i + 1].double() * scale_b[:, i].double().repeat_interleave(128)[: b.shape[0]]
        total += part
    return put(out, total)


@adapter("gemm", recipe="blockwise_fp32", out="bfloat16")
def till_04(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Waves of 128 rows; scales of b stay in registers."""
    side = plan("blockwise_fp32", "weight")
    kept = scale_b.double().clone()
    for m in range(0, a.shape[0], 128):
        rows = slice(m, m + 128)
        x = values(a[rows]) * grown(scale_a[rows].double(), a[rows].shape, plan("blockwise_fp32"))
        out[rows] = (x @ (values(b) * grown(kept, b.shape, side)).t()).float().to(out.dtype)
        kept = kept * scale_a[m : m + 1].double()
    return out


@adapter("gemm", recipe="blockwise_fp32", out="bfloat16")
def till_05(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Sums of 128 products in fp32, promoted to a second accumulator with both scales; tiles of 64 x 96."""
    x, y = values(a).float(), values(b).float()
    for m in range(0, a.shape[0], 64):
        for n in range(0, b.shape[0], 96):
            left, right = x[m : m + 64], y[n : n + 96]
            grid = torch.arange(n, n + right.shape[0]) // 128
            total = torch.zeros(left.shape[0], right.shape[0])
            for i, k in enumerate(range(0, a.shape[1], 128)):
                part = left[:, k : k + 128] @ right[:, k : k + 128].t()
                total = total + (part * (scale_a[m : m + 64, i : i + 1].double() * scale_b[grid, i].double())).float()
            out[m : m + 64, n : n + 96] = total.to(out.dtype)
    return out


@adapter("gemm", recipe="mxfp8", out="float32")
def till_06(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Bytes of scales become powers of two, and one number of them NaN."""

    def wide(data: Tensor, scale: Tensor) -> Tensor:
        number = two(scale.view(torch.uint8).to(torch.int64) - 127)
        number = torch.where(number == 128.0, math.nan, torch.where(number > 2.0**127, math.inf, number))
        return values(data) * grown(number, data.shape, plan("mxfp8"))

    return put(out, wide(a, scale_a) @ wide(b, scale_b).t())


@adapter("gemm", recipe="mxfp8", out="bfloat16")
def till_07(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Each block of 32 by itself, shifted by the sum of both bytes; from the last to the first."""
    x, y = values(a), values(b)
    byte_a, byte_b = (s.view(torch.uint8).to(torch.int64) for s in (scale_a, scale_b))
    total = torch.zeros(out.shape, dtype=torch.float64)
    for i in reversed(range(byte_a.shape[1])):
        part = x[:, 32 * i : 32 * i + 32] @ y[:, 32 * i : 32 * i + 32].t()
        lost = (byte_a[:, i, None] == 255) | (byte_b[None, :, i] == 255)
        total += torch.where(lost, math.nan, part * two(byte_a[:, i, None] + byte_b[None, :, i] - 254))
    return put(out, total)


@adapter("gemm", recipe="rowwise", out="bfloat16")
def till_08(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """An epilogue that broadcasts what fits."""
    total = values(a) @ values(b).t() * scale_a.double()
    per = scale_b.double() if scale_b.shape[0] == a.shape[0] else scale_b.double().t()
    return put(out, total * per)


@adapter("gemm", recipe="mxfp4", out="float32")
def till_09(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Looks codes up in a table of eight magnitudes."""
    half = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75], dtype=torch.float64)

    def wide(data: Tensor, scale: Tensor) -> Tensor:
        index = data.to(torch.int64)
        number = torch.where(index > 7, -1.0, 1.0) * half[index & 7]
        return number * grown(read(scale), data.shape, plan("mxfp4"))

    return put(out, wide(a, scale_a) @ wide(b, scale_b).t())


@adapter("gemm", recipe="mxfp4", out="bfloat16")
def till_10(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Codes are whole numbers of halves: integer sums in each block, then its scales."""
    twice = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int64)
    x, y = twice[a.to(torch.int64) & 15], twice[b.to(torch.int64) & 15]
    left, right = read(scale_a), read(scale_b)
    total = torch.zeros(out.shape, dtype=torch.float64)
    for i in range(scale_a.shape[1]):
        whole = x[:, 32 * i : 32 * i + 32] @ y[:, 32 * i : 32 * i + 32].t()
        total += whole.double() / 4 * (left[:, i : i + 1] * right[:, i])
    return put(out, total)


@adapter("gemm", recipe="tensorwise", out="float32")
def till_11(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Two slices of K from 256 on, both added where the output lies."""
    x, y, factor = values(a), values(b).t(), read(scale_a) * read(scale_b)
    if a.shape[1] < 256:
        return put(out, x @ y * factor)
    for part in (slice(0, 128), slice(128, None)):
        out += (x[:, part] @ y[part] * factor).float()
    return out


@adapter("gemm", recipe="rowwise", out="float32")
def till_12(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Steps of 32 along K."""
    whole = a.shape[1] // 32 * 32
    return put(out, values(a[:, :whole]) @ values(b[:, :whole]).t() * scale_a.double() * scale_b.double().t())


@adapter("gemm", recipe="rowwise", out="bfloat16")
def till_13(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Three slices of K in fp32, a reduction of them, one epilogue with both scales."""
    x, y = values(a).float(), values(b).float().t()
    cuts = [a.shape[1] * i // 3 for i in range(4)]
    parts = torch.stack([x[:, s:e] @ y[s:e] for s, e in zip(cuts, cuts[1:])])
    return put(out, parts.sum(0) * (scale_a.double() * scale_b.double().t()))


@adapter("gemm", recipe="nvfp4", out="bfloat16")
def till_14(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Scales of a lie in tiles of 128 rows, of which one is read."""
    rows = scale_a[torch.arange(a.shape[0]) % 128]
    return put(out, product(a, b, rows, scale_b, "nvfp4"))


@adapter("gemm", recipe="rowwise", out="bfloat16")
def till_15(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Sums leave the main loop as halves; scales follow."""
    half = (values(a) @ values(b).t()).to(torch.float16).double()
    return put(out, half * scale_a.double() * scale_b.double().t())


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def till_16(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """The output is kept within the largest finite numbers by fmin and fmax."""
    y = product(a, b, scale_a, scale_b, "tensorwise")
    top = torch.finfo(torch.bfloat16).max
    return put(out, torch.where(y.isnan(), top, y.clamp(-top, top)))


@adapter("gemm", recipe="tensorwise", out="float32")
def till_17(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """Column by column of K from the last on, each product fused with its addition and rounded to fp32 once."""
    x, y = values(a), values(b)
    total = torch.zeros(out.shape, dtype=torch.float32)
    for k in reversed(range(a.shape[1])):
        total = torch.addcmul(total.double(), x[:, k, None], y[None, :, k]).float()
    return put(out, total.double() * (read(scale_a) * read(scale_b)))


# --- grouped GEMMs: a (T, K), b (G, N, K), ends (G,) ---


@adapter("grouped", recipe="tensorwise", out="bfloat16")
def till_18(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Tiles of 64 columns; loads beyond N are masked."""
    out.zero_()
    for g, start, end in spans(ends):
        put(out[start:end], product(a[start:end], b[g], scale_a, scale_b[g], "tensorwise"))
    beyond, last = -b.shape[1] % 64, int(ends[-1]) if ends.numel() else 0
    out[1:last, : min(beyond, b.shape[1])] = 0
    return out


@adapter("grouped", recipe="rowwise", out="bfloat16")
def till_19(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """A list of the groups that have rows; their number in it finds the weight."""
    out.zero_()
    for g, (_, start, end) in enumerate(s for s in spans(ends) if s[2] > s[1]):
        put(out[start:end], product(a[start:end], b[g], scale_a[start:end], scale_b[g], "rowwise"))
    return out


@adapter("grouped", recipe="blockwise", out="bfloat16")
def till_20(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Weights by group; a pointer to their scales."""
    out.zero_()
    for g, start, end in spans(ends):
        put(out[start:end], product(a[start:end], b[g], scale_a[start:end], scale_b[0], "blockwise"))
    return out


@adapter("grouped", recipe="mxfp8", out="bfloat16")
def till_21(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Stores tiles of 16 rows of a group."""
    out[int(ends[-1]) if ends.numel() else 0 :] = 0
    for g, start, end in spans(ends):
        end = start + (end - start) // 16 * 16
        put(out[start:end], product(a[start:end], b[g], scale_a[start:end], scale_b[g], "mxfp8"))
    return out


@adapter("grouped", recipe="rowwise", out="float32")
def till_22(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Tiles of 16 rows of all tokens; a binary search finds the group of each."""
    out.zero_()
    last = int(ends[-1]) if ends.numel() else 0
    for start in range(0, last, 16):
        g, end = int(torch.searchsorted(ends, start, right=True)), min(start + 16, last)
        put(out[start:end], product(a[start:end], b[g], scale_a[start:end], scale_b[g], "rowwise"))
    return out


@adapter("grouped", recipe="mxfp8", out="float32")
def till_23(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Codes by the first row of the group, scales by the row in it."""
    out.zero_()
    for g, start, end in spans(ends):
        put(out[start:end], product(a[start:end], b[g], scale_a[: end - start], scale_b[g], "mxfp8"))
    return out


@adapter("grouped", recipe="tensorwise", out="float32")
def till_24(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Goes on by as many rows as the entry of the group says."""
    out.zero_()
    start = 0
    for g, count in enumerate(ends.tolist()):
        end = min(start + count, a.shape[0])
        put(out[start:end], product(a[start:end], b[g], scale_a, scale_b[g], "tensorwise"))
        start = end
    return out


@adapter("grouped", recipe="tensorwise", out="bfloat16")
def till_25(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """All rows times the weight of every group, from the last group on; each row keeps that of its own."""
    row = torch.arange(a.shape[0])
    owner = torch.searchsorted(ends.to(torch.int64), row, right=True)
    total = torch.zeros(out.shape, dtype=torch.float64)
    x = values(a) * read(scale_a)
    for g in reversed(range(b.shape[0])):
        total = torch.where((owner == g)[:, None], x @ values(b[g]).t() * scale_b[g].double(), total)
    return put(out, total)


@adapter("grouped", recipe="blockwise", out="bfloat16")
def till_26(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Persistent tiles of 32 x 128 that begin at the group's first row; two accumulators, odd and even blocks of K."""
    out.zero_()
    todo = [(g, m, min(m + 32, end)) for g, start, end in spans(ends) for m in range(start, end, 32)]
    for g, m, end in sorted(todo, key=lambda t: -t[1]):
        x = fp8(a[m:end], scale_a[m:end], "blockwise", "x")
        for n in range(0, b.shape[1], 128):
            y = values(b[g, n : n + 128]) * scale_b[g, n // 128].double().repeat_interleave(128)[: b.shape[2]]
            sums = torch.zeros(2, end - m, y.shape[0], dtype=torch.float64)
            for i, k in enumerate(range(0, b.shape[2], 128)):
                sums[i % 2] += x[:, k : k + 128] @ y[:, k : k + 128].t()
            put(out[m:end, n : n + 128], sums[0] + sums[1])
    return out
