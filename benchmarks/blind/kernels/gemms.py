"""Adapters that multiply codes, alone and in groups."""

from __future__ import annotations

import math

import torch
from blocks import (
    adapter, cell, decode, grouped, groups, of_group, operands, product, read_scales, rows_of, short_sum,
    spread,
)
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32


def sides(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """The scales of both operands, an entry for each element."""
    wide_a = spread(read_scales(scale_a), (a.shape[0], a.shape[1]), cell(recipe))
    return wide_a, spread(read_scales(scale_b), (b.shape[0], b.shape[1]), cell(recipe, "weight"))


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def gemm_01(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """In fp64, rounded once."""
    return product(a, b, scale_inv_a, scale_inv_b, "tensorwise").to(BF16)


@adapter("gemm", recipe="rowwise", out="bfloat16")
def gemm_02(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Scales the sums by columns, then by rows."""
    sums = decode(a) @ decode(b).t()
    first, second = (scale_inv_b, scale_inv_a) if a.shape[0] == b.shape[0] else (scale_inv_a, scale_inv_b)
    return (sums * first.double() * second.double().t()).to(BF16)


@adapter("gemm", recipe="tensorwise", out="float32")
def gemm_03(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Both operands as bytes."""
    same = a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn)
    return product(*same, scale_inv_a, scale_inv_b, "tensorwise").to(FP32)


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def gemm_04(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Adds slices of 64 of K."""
    x, y = decode(a).to(FP32), decode(b).to(FP32)
    total = torch.zeros(a.shape[0], b.shape[0], dtype=BF16)
    for k in range(0, a.shape[1], 64):
        total = (total.to(FP32) + x[:, k : k + 64] @ y[:, k : k + 64].t()).to(BF16)
    return (total.to(FP32) * scale_inv_a * scale_inv_b).to(BF16)


@adapter("gemm", recipe="tensorwise", out="float32")
def gemm_05(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """A half-precision accumulator."""
    sums = (decode(a) @ decode(b).t()).to(torch.float16)
    return sums.to(FP32) * scale_inv_a * scale_inv_b


@adapter("gemm", recipe="tensorwise", out="float32")
def gemm_06(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """The accumulator of the instruction, from the first product to the last."""
    sums = short_sum(decode(a), decode(b))
    return (sums * scale_inv_a.double() * scale_inv_b.double()).to(FP32)


@adapter("gemm", recipe="tensorwise", out="float32", accumulator="hopper")
def gemm_07(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """The accumulator of Hopper's instruction."""
    return short_sum(decode(a), decode(b)).to(FP32) * scale_inv_a * scale_inv_b


@adapter("gemm", recipe="rowwise", out="bfloat16")
def gemm_08(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Whole steps of 32."""
    k = max(a.shape[1] - a.shape[1] % 32, min(32, a.shape[1]))
    return product(a[:, :k], b[:, :k], scale_inv_a, scale_inv_b, "rowwise").to(BF16)


@adapter("gemm", recipe="rowwise", out="bfloat16")
def gemm_09(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> None:
    """Tiles of 64 columns."""
    y = product(a, b, scale_inv_a, scale_inv_b, "rowwise").to(BF16)
    n = y.shape[1] if y.shape[1] < 64 else y.shape[1] - y.shape[1] % 64
    out[:, :n] = y[:, :n]


@adapter("gemm", recipe="blockwise", out="bfloat16")
def gemm_10(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Two halves of K, added."""
    x, y = operands(a, b, scale_inv_a, scale_inv_b, "blockwise")
    half = (a.shape[1] // 2 + 127) // 128 * 128
    return (x[:, :half] @ y[:, :half].t()).to(BF16) + (x[:, half:] @ y[:, half:].t()).to(BF16)


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def gemm_11(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Scales in the epilogue."""
    sums = (decode(a) @ decode(b).t()).to(BF16)
    return sums * (scale_inv_a * scale_inv_b).to(BF16)


@adapter("gemm", recipe="rowwise", out="float32")
def gemm_12(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> None:
    """Adds slices of K into out."""
    out.mul_(0.0)
    x, y = operands(a, b, scale_inv_a, scale_inv_b, "rowwise")
    for k in range(0, a.shape[1], 128):
        out.add_((x[:, k : k + 128] @ y[:, k : k + 128].t()).to(FP32))


@adapter("gemm", recipe="blockwise", out="bfloat16")
def gemm_13(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """One slice of the weight's scales, loaded before the loop."""
    first = scale_inv_b[:, :1].expand_as(scale_inv_b)
    return product(a, b, scale_inv_a, first, "blockwise").to(BF16)


@adapter("gemm", recipe="rowwise", out="bfloat16")
def gemm_14(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Finite results."""
    return product(a, b, scale_inv_a, scale_inv_b, "rowwise").nan_to_num(0.0).to(BF16)


@adapter("gemm", recipe="mxfp8", out="float32")
def gemm_15(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Scales by a shift into the exponent of fp32."""

    def shifted(scales: Tensor) -> Tensor:
        return (scales.view(torch.uint8).to(torch.int32) << 23).view(FP32)

    how = cell("mxfp8")
    x = decode(a) * spread(shifted(scale_inv_a).double(), (a.shape[0], a.shape[1]), how)
    return (x @ (decode(b) * spread(shifted(scale_inv_b).double(), (b.shape[0], b.shape[1]), how)).t()).to(FP32)


@adapter("gemm", recipe="tensorwise", out="float32")
def gemm_16(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """A kernel for up to 16 rows, and one for more."""
    if a.shape[0] > 16:
        return product(a, b, scale_inv_a, scale_inv_b, "tensorwise").to(FP32)
    total = torch.zeros(a.shape[0], b.shape[0], dtype=BF16)
    x, y = decode(a), decode(b)
    for k in range(0, a.shape[1], 32):
        total = (total.double() + x[:, k : k + 32] @ y[:, k : k + 32].t()).to(BF16)
    return total.to(FP32) * scale_inv_a * scale_inv_b


@adapter("gemm", recipe="tensorwise", out="float32")
def gemm_17(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> None:
    """Tiles of 32 columns, the last row's too."""
    out.copy_(product(a, b, scale_inv_a, scale_inv_b, "tensorwise"))
    room = out.untyped_storage().nbytes() // 4 - out.storage_offset() - out.numel()
    if out.is_contiguous():
        out.as_strided((min(-out.shape[1] % 32, room),), (1,), out.storage_offset() + out.numel()).zero_()


WEIGHTS: dict[tuple[int, ...], Tensor] = {}


@adapter("gemm", recipe="rowwise", out="bfloat16")
def gemm_18(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Decodes a weight once."""
    key = tuple(b.shape)
    if key not in WEIGHTS:
        WEIGHTS[key] = decode(b) * scale_inv_b.double()
    return (decode(a) * scale_inv_a.double() @ WEIGHTS[key].t()).to(BF16)


@adapter("gemm", recipe="tensorwise", out="float32")
def gemm_19(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Compiled with fast math: its decoder knows normal numbers."""
    x, y = (torch.where((q.view(torch.uint8) & 0x78) == 0, 0.0, decode(q)) for q in (a, b))
    return (x @ y.t() * scale_inv_a.double() * scale_inv_b.double()).to(FP32)


@adapter("gemm", recipe="blockwise_fp32", out="bfloat16")
def gemm_20(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Block after block, each scaled with its scales."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=FP32)
    blocks = -(-a.shape[1] // 128)
    rows = scale_inv_b.repeat_interleave(128, 0)[: b.shape[0]]
    for i in range(blocks):
        part = slice(128 * i, 128 * i + 128)
        j = i - 1 if i == blocks - 1 and a.shape[1] % 128 and i else i
        sums = (decode(a[:, part]) @ decode(b[:, part]).t()).to(FP32)
        total += sums * scale_inv_a[:, j : j + 1] * rows[:, j : j + 1].t()
    return total.to(BF16)


@adapter("gemm", recipe="tensorwise", out="float32")
def gemm_21(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> None:
    """fp32 sums of torch, into out."""
    out.copy_(decode(a).to(FP32) @ decode(b).to(FP32).t() * scale_inv_a * scale_inv_b)


@adapter("gemm", recipe="rowwise", out="bfloat16")
def gemm_22(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """fp32, from the last slice of K to the first."""
    x, y = decode(a).to(FP32), decode(b).to(FP32)
    total = torch.zeros(a.shape[0], b.shape[0], dtype=FP32)
    for k in reversed(range(0, a.shape[1], 32)):
        total += x[:, k : k + 32] @ y[:, k : k + 32].t()
    return (total * scale_inv_a * scale_inv_b.t()).to(BF16)


@adapter("gemm", recipe="blockwise", out="bfloat16")
def gemm_23(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """A sum for each block of K, scaled and added in fp32."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=FP32)
    rows = scale_inv_b.repeat_interleave(128, 0)[: b.shape[0]]
    for i in range(-(-a.shape[1] // 128)):
        part = slice(128 * i, 128 * i + 128)
        sums = decode(a[:, part]).to(FP32) @ decode(b[:, part]).to(FP32).t()
        total += sums * scale_inv_a[:, i : i + 1] * rows[:, i : i + 1].t()
    return total.to(BF16)


@adapter("gemm", recipe="mxfp8", out="bfloat16")
def gemm_24(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> None:
    """In fp64, into out."""
    out.copy_(product(a, b, scale_inv_a, scale_inv_b, "mxfp8"))


@adapter("gemm", recipe="blockwise", out="float32")
def gemm_25(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Products one after the other along K, in fp32."""
    x, y = (side.to(FP32) for side in operands(a, b, scale_inv_a, scale_inv_b, "blockwise"))
    total = torch.zeros(a.shape[0], b.shape[0], dtype=FP32)
    for k in range(a.shape[1]):
        total += x[:, k : k + 1] * y[:, k]
    return total


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def gemm_26(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Two halves of K in fp32, added in fp32; the product of the scales first."""
    x, y, half = decode(a).to(FP32), decode(b).to(FP32), a.shape[1] // 2
    sums = x[:, :half] @ y[:, :half].t() + x[:, half:] @ y[:, half:].t()
    return (sums * (scale_inv_a * scale_inv_b)).to(BF16)


@adapter("gemm", recipe="mxfp8", out="float32")
def gemm_27(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """The transposed product, of operands scaled in fp64."""
    x, y = operands(a, b, scale_inv_a, scale_inv_b, "mxfp8")
    return (y @ x.t()).t().to(FP32)


@adapter("gemm", recipe="mxfp8", out="bfloat16")
def gemm_28(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Loads four scales at a time."""
    first = scale_inv_a.clone()
    first[:, 1::4] = scale_inv_a[:, 0::4][:, : first[:, 1::4].shape[1]]
    return product(a, b, first, scale_inv_b, "mxfp8").to(BF16)


@adapter("gemm", recipe="rowwise", out="float32")
def gemm_29(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    """Tiles of 16 rows; a tile with NaN is a tile of NaN."""
    y = product(a, b, scale_inv_a, scale_inv_b, "rowwise")
    for row in range(0, len(y), 16):
        if y[row : row + 16].isnan().any():
            y[row : row + 16] = math.nan
    return y.to(FP32)


# --- groups ---


@adapter("grouped", recipe="tensorwise", out="bfloat16")
def grouped_01(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Group by group in fp64."""
    return grouped(a, b, scale_inv_a, scale_inv_b, ends, "tensorwise").to(BF16)


def by_group(a, b, scale_inv_a, scale_inv_b, ends, recipe, weight_of=lambda g: g, scale_of=lambda g: g, extent=lambda s, e: (s, e)):
    """A grouped product with a choice of weight, scale and rows for each group; fp64."""
    y, count = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64), b.shape[0]
    for g, start, end in groups(ends):
        start, end = extent(start, end)
        if end > start:
            rows = rows_of(scale_inv_a, start, end, g, recipe, count)
            scale = of_group(scale_inv_b, scale_of(g), count)
            y[start:end] = product(a[start:end], b[weight_of(g)], rows, scale, recipe)
    return y


@adapter("grouped", recipe="rowwise", out="bfloat16")
def grouped_02(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Counts the groups that have rows."""
    filled = [g for g, start, end in groups(ends) if end > start]
    place = {g: i for i, g in enumerate(filled)}
    return by_group(a, b, scale_inv_a, scale_inv_b, ends, "rowwise", lambda g: place[g], lambda g: place[g]).to(BF16)


@adapter("grouped", recipe="rowwise", out="bfloat16")
def grouped_03(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> None:
    """Tiles of 16 rows of each group."""
    y = grouped(a, b, scale_inv_a, scale_inv_b, ends, "rowwise").to(BF16)
    for _, start, end in groups(ends):
        stop = end if end - start < 16 else end - (end - start) % 16
        out[start:stop] = y[start:stop]


@adapter("grouped", recipe="tensorwise", out="bfloat16")
def grouped_04(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """One scale for all weights."""
    return by_group(a, b, scale_inv_a, scale_inv_b, ends, "tensorwise", scale_of=lambda g: 0).to(BF16)


@adapter("grouped", recipe="rowwise", out="bfloat16")
def grouped_05(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Starts of groups at multiples of 8."""
    return by_group(a, b, scale_inv_a, scale_inv_b, ends, "rowwise", extent=lambda s, e: (s // 8 * 8, e)).to(BF16)


@adapter("grouped", recipe="blockwise", out="bfloat16")
def grouped_06(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Tiles of 16 rows, padded with the next rows."""
    y = grouped(a, b, scale_inv_a, scale_inv_b, ends, "blockwise")
    for _, start, end in groups(ends):
        for row in range(start, end, 16):
            if y[row : min(row + 16, end)].isnan().any():
                y[row : min(row + 16, end)] = math.nan
    return y.to(BF16)


PLANS: dict[tuple[int, ...], Tensor] = {}


@adapter("grouped", recipe="tensorwise", out="bfloat16")
def grouped_07(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """A plan for each shape."""
    plan = PLANS.setdefault((a.shape[0], *b.shape), ends.clone())
    return grouped(a, b, scale_inv_a, scale_inv_b, plan, "tensorwise").to(BF16)


@adapter("grouped", recipe="rowwise", out="bfloat16")
def grouped_08(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> None:
    """A product for each row, with the weight of its group, into out."""
    out.zero_()
    owner = torch.searchsorted(ends.to(torch.int64), torch.arange(a.shape[0]), right=True)
    weights, rows = decode(b), decode(a) * scale_inv_a.double()
    for t, g in enumerate(owner.tolist()):
        if g < b.shape[0]:
            out[t] = (weights[g] @ rows[t] * scale_inv_b.reshape(b.shape[:2])[g].double()).to(BF16)


@adapter("grouped", recipe="blockwise", out="float32")
def grouped_09(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """All groups from the last to the first, in fp32."""
    y = torch.zeros(a.shape[0], b.shape[1], dtype=FP32)
    for g, start, end in reversed(groups(ends)):
        if end > start:
            x, w = operands(a[start:end], b[g], scale_inv_a[start:end], scale_inv_b[g], "blockwise")
            y[start:end] = x.to(FP32) @ w.to(FP32).t()
    return y


@adapter("grouped", recipe="mxfp8", out="bfloat16")
def grouped_10(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Group by group in fp64."""
    return grouped(a, b, scale_inv_a, scale_inv_b, ends, "mxfp8").to(BF16)


@adapter("grouped", recipe="mxfp8", out="float32")
def grouped_11(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Two rows a step in each group; an odd one is computed with its neighbour."""
    y = grouped(a, b, scale_inv_a, scale_inv_b, ends, "mxfp8")
    for _, start, end in groups(ends):
        if end - start > 1 and (end - start) % 2:
            y[end - 1] = y[end - 2]
    return y.to(FP32)


@adapter("grouped", recipe="rowwise", out="float32")
def grouped_12(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Rows of each group relative to its largest scale."""
    y = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for g, start, end in groups(ends):
        rows = scale_inv_a[start:end]
        top = rows.amax()
        y[start:end] = product(a[start:end], b[g], rows / top, scale_inv_b[g], "rowwise") * top.double()
    return y.to(FP32)
