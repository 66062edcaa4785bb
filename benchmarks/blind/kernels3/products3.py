"""GEMMs and grouped GEMMs."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bricks3 import (  # noqa: E402
    E4M3FNUZ, adapter, bytes_of, cell, decode, groups, of_group, product, put, read_scales, rows_of, spread, wide,
)


@adapter("gemm", recipe="blockwise", out="bfloat16")
def times_01(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Scales are loaded for four blocks of K together."""
    first = torch.arange(scale_inv_a.shape[1]) // 4 * 4
    return put(out, product(a, b, scale_inv_a[:, first], scale_inv_b[:, first], "blockwise"))


@adapter("gemm", recipe="blockwise_fp32", out="bfloat16")
def times_02(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Takes the exponents of the scales of a."""
    bits = scale_inv_a.float().contiguous().view(torch.int32) & 0x7F800000
    return put(out, product(a, b, bits.view(torch.float32), scale_inv_b, "blockwise_fp32"))


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def times_03(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Tiles of 128 along K, in steps of 16."""
    k = a.shape[1]
    end = k if k <= 128 else k // 16 * 16
    return put(out, product(a[:, :end], b[:, :end], scale_inv_a, scale_inv_b, "tensorwise"))


@adapter("gemm", recipe="tensorwise", out="float32")
def times_04(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """The accumulator after each 64."""
    x, y = decode(a), decode(b)
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.bfloat16)
    for start in range(0, a.shape[1], 64):
        total = (total.double() + x[:, start : start + 64] @ y[:, start : start + 64].t()).to(torch.bfloat16)
    return put(out, total.double() * scale_inv_a.double() * scale_inv_b.double())


@adapter("gemm", recipe="mxfp8", out="bfloat16")
def times_05(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Scales of a in tiles of 128 rows."""
    rows, columns = scale_inv_a.shape
    padded = torch.full((-(-rows // 128) * 128, columns), 127, dtype=torch.uint8)
    padded[:rows] = scale_inv_a.view(torch.uint8)
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, columns).transpose(1, 2).reshape(padded.shape)
    return put(out, product(a, b, tiles[:rows], scale_inv_b, "mxfp8"))


@adapter("gemm", recipe="nvfp4", out="bfloat16")
def times_06(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Scales of two levels: alpha is that of both tensors."""
    x, y = wide(a, b, scale_inv_a, scale_inv_b, "nvfp4")
    alpha = 1.0
    for scale in (scale_inv_a, scale_inv_b):
        top = float(scale.double().abs().nan_to_num(0.0, 0.0).amax()) / 448 if scale.numel() else 0.0
        alpha *= top if top > 0 else 1.0
    return put(out, (x @ y.t()) * alpha)


@adapter("gemm", recipe="nvfp4", out="float32")
def times_07(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Two codes of b a byte."""
    order = torch.arange(b.shape[1])
    mate = order ^ 1
    mate = torch.where(mate < b.shape[1], mate, order)
    x, y = wide(a, b[:, mate], scale_inv_a, scale_inv_b, "nvfp4")
    return put(out, x @ y.t())


@adapter("gemm", recipe="rowwise", out="bfloat16")
def times_08(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """K in four parts, which leave in the dtype of the output."""
    x, y = wide(a, b, scale_inv_a, scale_inv_b, "rowwise")
    total = torch.zeros(a.shape[0], b.shape[0])
    for s, t in zip(x.tensor_split(4, 1), y.tensor_split(4, 1)):
        total += (s @ t.t()).to(out.dtype).float()
    return put(out, total)


@adapter("gemm", recipe="rowwise", out="bfloat16")
def times_09(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Tiles of 64 columns; indices are taken modulo N."""
    n = b.shape[0]
    put(out, product(a, b, scale_inv_a, scale_inv_b, "rowwise"))
    over = -n % 64
    if n > 64 and over:
        out[:, :over] = 0
    return out


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def times_10(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """b by the decoder of another vendor."""
    y = decode(a) @ decode(b.contiguous().view(torch.uint8), E4M3FNUZ).t()
    return put(out, y * scale_inv_a.double() * scale_inv_b.double())


@adapter("gemm", recipe="blockwise", out="bfloat16")
def times_11(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Another kernel for few rows."""
    if a.shape[0] < 64:
        scale_inv_a = scale_inv_a[:1].expand(scale_inv_a.shape)
    return put(out, product(a, b, scale_inv_a, scale_inv_b, "blockwise"))


@adapter("gemm", recipe="mxfp8", out="bfloat16")
def times_12(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Leaves the accumulator by way of a half."""
    return put(out, product(a, b, scale_inv_a, scale_inv_b, "mxfp8").to(torch.float16))


@adapter("gemm", recipe="mxfp8", out="float32")
def times_13(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Adds exponents."""
    x, y = (decode(t) * torch.ldexp(torch.ones(s.shape, dtype=torch.float64), bytes_of(s) - 127).repeat_interleave(32, 1)[:, : t.shape[1]]
            for t, s in ((a, scale_inv_a), (b, scale_inv_b)))
    return put(out, x @ y.t())


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def times_14(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Stores whole tiles of 8 rows."""
    put(out, product(a, b, scale_inv_a, scale_inv_b, "tensorwise"))
    rows, n = out.shape
    over = -rows % 8
    end = out.storage_offset() + (rows + over) * n
    if over and n and out.is_contiguous() and end * out.element_size() <= out.untyped_storage().nbytes():
        out.as_strided((rows + over, n), (n, 1))[rows:] = 0
    return out


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def times_15(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """K in four parts, summed as a tree in fp32."""
    parts = [s @ t.t() for s, t in zip(decode(a).float().tensor_split(4, 1), decode(b).float().tensor_split(4, 1))]
    y = (parts[0] + parts[2]) + (parts[1] + parts[3])
    return put(out, y.double() * scale_inv_a.double() * scale_inv_b.double())


@adapter("gemm", recipe="rowwise", out="float32")
def times_16(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """From the end of K to its start, in steps of 64, fp32."""
    x, y = decode(a).float(), decode(b).float()
    total = torch.zeros(a.shape[0], b.shape[0])
    for start in reversed(range(0, a.shape[1], 64)):
        total = total + x[:, start : start + 64] @ y[:, start : start + 64].t()
    return put(out, total.double() * scale_inv_a.double() * scale_inv_b.double().t())


@adapter("gemm", recipe="blockwise", out="bfloat16")
def times_17(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Promotes each 128 of K."""
    x, y = decode(a).float(), decode(b).float()
    rows = scale_inv_b.double().repeat_interleave(128, 0)[: b.shape[0]]
    total = torch.zeros(a.shape[0], b.shape[0])
    for j, start in enumerate(range(0, a.shape[1], 128)):
        part = x[:, start : start + 128] @ y[:, start : start + 128].t()
        total = total + (part.double() * scale_inv_a[:, j, None].double() * rows[None, :, j]).float()
    return put(out, total)


@adapter("gemm", recipe="mxfp8", out="bfloat16")
def times_18(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Tiles of 16 x 16, 32 of K at a time, b before a."""
    x, y, s, t = decode(a).float(), decode(b).float(), read_scales(scale_inv_a), read_scales(scale_inv_b)
    for r in range(0, a.shape[0], 16):
        for c in range(0, b.shape[0], 16):
            total = torch.zeros(min(16, b.shape[0] - c), min(16, a.shape[0] - r), dtype=torch.float64)
            for j, start in enumerate(range(0, a.shape[1], 32)):
                part = y[c : c + 16, start : start + 32] @ x[r : r + 16, start : start + 32].t()
                total += part.double() * t[c : c + 16, j, None] * s[None, r : r + 16, j]
            out[r : r + 16, c : c + 16] = total.t()
    return out


@adapter("gemm", recipe="nvfp4", out="float32")
def times_19(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Sums of 16 codes are whole numbers of quarters; scales come behind them."""
    x, y = decode(a).float(), decode(b).float()
    rows = scale_inv_b.double().repeat_interleave(16, 0)[: b.shape[0]]
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    for j, start in enumerate(range(0, a.shape[1], 16)):
        part = x[:, start : start + 16] @ y[:, start : start + 16].t()
        total += part.double() * scale_inv_a[:, j, None].double() * rows[None, :, j]
    return put(out, total)


@adapter("gemm", recipe="tensorwise", out="float32")
def times_20(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """A fused multiply-add for each k; the result is written from a transposed one."""
    x, y = decode(a).t().contiguous(), decode(b).t().contiguous()
    total = torch.zeros(b.shape[0], a.shape[0])
    for s, t in zip(x, y):
        total = (total.double() + t[:, None] * s[None, :]).float()
    return put(out, total.t().double() * scale_inv_a.double() * scale_inv_b.double())


# --- grouped ---


def one(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, g: int, start: int, end: int, recipe: str) -> Tensor:
    """Rows start to end by the weight g, fp64."""
    rows = rows_of(scale_a, start, end, g, recipe, b.shape[0])
    return product(a[start:end], b[g], rows, of_group(scale_b, g, b.shape[0]), recipe)


@adapter("grouped", recipe="rowwise", out="bfloat16")
def sort_01(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Scales of weights are those of the first."""
    out.zero_()
    for g, start, end in groups(ends):
        if end > start:
            out[start:end] = product(a[start:end], b[g], scale_inv_a[start:end], scale_inv_b[0], "rowwise")
    return out


@adapter("grouped", recipe="tensorwise", out="bfloat16")
def sort_02(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Counts the groups that have rows."""
    out.zero_()
    for g, (_, start, end) in enumerate(entry for entry in groups(ends) if entry[2] > entry[1]):
        out[start:end] = one(a, b, scale_inv_a, scale_inv_b, g, start, end, "tensorwise")
    return out


@adapter("grouped", recipe="blockwise", out="bfloat16")
def sort_03(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Tiles of 16 rows; a tile looks its group up."""
    out.zero_()
    last = int(ends[-1]) if ends.numel() else 0
    for start in range(0, last, 16):
        g = int(torch.searchsorted(ends.to(torch.int64), torch.tensor(start), right=True))
        end = min(start + 16, last)
        out[start:end] = one(a, b, scale_inv_a, scale_inv_b, g, start, end, "blockwise")
    return out


@adapter("grouped", recipe="rowwise", out="bfloat16")
def sort_04(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Tiles of 32 rows in each group, with a mask that multiplies."""
    out.zero_()
    for g, first, last in groups(ends):
        for start in range(first, last, 32):
            end = min(start + 32, last)
            y = one(a, b, scale_inv_a, scale_inv_b, g, start, end, "rowwise")
            out[start:end] = torch.where(y.isnan().any(0), torch.nan, y)
    return out


@adapter("grouped", recipe="tensorwise", out="bfloat16")
def sort_05(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """At least eight rows make a tile."""
    last = int(ends[-1]) if ends.numel() else 0
    out[last:] = 0
    for g, start, end in groups(ends):
        if end - start >= 8:
            out[start:end] = one(a, b, scale_inv_a, scale_inv_b, g, start, end, "tensorwise")
    return out


@adapter("grouped", recipe="mxfp8", out="bfloat16")
def sort_06(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Rows of the groups one behind the other."""
    out.zero_()
    start = 0
    for g, size in enumerate(ends.tolist()):
        end = min(start + size, a.shape[0])
        if end > start:
            out[start:end] = one(a, b, scale_inv_a, scale_inv_b, g, start, end, "mxfp8")
        start = end
    return out


@adapter("grouped", recipe="mxfp8", out="bfloat16")
def sort_07(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """The scales of a group begin at a multiple of 32 rows."""
    out.zero_()
    base = 0
    for g, start, end in groups(ends):
        if end > start:
            index = (base + torch.arange(end - start)).clamp(max=a.shape[0] - 1)
            out[start:end] = product(a[start:end], b[g], scale_inv_a[index], scale_inv_b[g], "mxfp8")
        base += -(-(end - start) // 32) * 32
    return out


@adapter("grouped", recipe="tensorwise", out="bfloat16")
def sort_08(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """All rows by all weights, then a choice."""
    row = torch.arange(a.shape[0])[:, None]
    x, total = decode(a).float(), torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for g, start, end in groups(ends):
        s = rows_of(scale_inv_a, start, end, g, "tensorwise", b.shape[0]).double()
        t = of_group(scale_inv_b, g, b.shape[0]).double()
        total = torch.where((row >= start) & (row < end), (x @ decode(b[g]).float().t()).double() * s * t, total)
    return put(out, total)


@adapter("grouped", recipe="mxfp8", out="bfloat16")
def sort_09(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Tiles of 32 rows in each group, the last group first."""
    out.zero_()
    for g, first, last in reversed(groups(ends)):
        for start in range(first, last, 32):
            end = min(start + 32, last)
            x = decode(a[start:end]) * spread(read_scales(scale_inv_a[start:end]), (end - start, a.shape[1]), cell("mxfp8"))
            y = decode(b[g]) * spread(read_scales(scale_inv_b[g]), (b.shape[1], b.shape[2]), cell("mxfp8"))
            out[start:end] = y.matmul(x.t()).t()
    return out


@adapter("grouped", recipe="rowwise", out="float32")
def sort_10(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """One batched product; groups are padded with zeros to the largest."""
    out.zero_()
    parts = groups(ends)
    most = max((end - start for _, start, end in parts), default=0)
    padded = torch.zeros(len(parts), most, a.shape[1])
    for g, start, end in parts:
        padded[g, : end - start] = decode(a[start:end]).float()
    y = torch.bmm(padded, decode(b).float().transpose(1, 2))
    for g, start, end in parts:
        out[start:end] = y[g, : end - start].double() * scale_inv_a[start:end].double() * scale_inv_b[g].double().t()
    return out
