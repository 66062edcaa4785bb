"""GEMMs and grouped GEMMs of the seventh set. Names do not tell right from wrong; public.json does."""

from __future__ import annotations

import math

import torch
from perch7 import adapter, grid, plan, pow2, real, spans, spread, unpack, value
from torch import Tensor


@adapter("gemm", recipe="blockwise", out="bfloat16")
def crane_01(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    whole = a.shape[1] // 128 * 128
    x, y = value(a, scale_inv_a, "blockwise"), value(b, scale_inv_b, "blockwise", "weight")
    acc = x[:, :whole] @ y[:, :whole].T
    acc += unpack(a)[:, whole:] @ unpack(b)[:, whole:].T  # scales are applied at whole blocks
    return out.copy_(acc.to(torch.float32))


@adapter("gemm", recipe="tensorwise", out="float32")
def crane_02(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    x, y = unpack(a).to(torch.float32), unpack(b).to(torch.float32)
    bounds = [a.shape[1] * i // 3 for i in range(4)]
    parts = torch.stack([x[:, s:e] @ y[:, s:e].T for s, e in zip(bounds, bounds[1:])])
    return out.copy_((parts[0] + (parts[1] + parts[2])) * (scale_inv_a * scale_inv_b))


@adapter("gemm", recipe="blockwise_fp32", out="bfloat16")
def crane_03(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    m, k = a.shape
    sa = scale_inv_a.to(torch.float64).clone()
    for start in range(128, m, 256):  # second wave of a tile of 256 rows: the scales of b were multiplied in place by the first
        rows = sa[start : start + 128]
        rows *= scale_inv_a[start - 128 : start - 128 + rows.shape[0]].to(torch.float64)
    x = unpack(a) * spread(sa, (m, k), plan("blockwise_fp32"))
    return out.copy_((x @ value(b, scale_inv_b, "blockwise_fp32", "weight").T).to(torch.float32))


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def crane_04(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    scale_inv_a *= scale_inv_b  # one factor for the epilogue
    return out.copy_((unpack(a) @ unpack(b).T * scale_inv_a.to(torch.float64)).to(torch.float32))


@adapter("gemm", recipe="rowwise", out="bfloat16")
def crane_05(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    x, y = value(a, scale_inv_a, "rowwise"), value(b, scale_inv_b, "rowwise", "weight")
    slices = 4 if a.shape[1] >= 128 else 1
    bounds = [a.shape[1] * i // slices for i in range(slices + 1)]
    workspace = torch.stack([x[:, s:e] @ y[:, s:e].T for s, e in zip(bounds, bounds[1:])]).to(torch.float32).to(out.dtype)
    return out.copy_(workspace.to(torch.float32).sum(0))


@adapter("gemm", recipe="mxfp8", out="float32")
def crane_06(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    x, y = value(a, scale_inv_a, "mxfp8"), value(b, scale_inv_b, "mxfp8", "weight")
    if a.shape[1] < 256:
        return out.copy_((x @ y.T).to(torch.float32))
    half = a.shape[1] // 2
    for part in (slice(0, half), slice(half, None)):  # split-K: each half is added to the output
        out += (x[:, part] @ y[:, part].T).to(torch.float32)
    return out


@adapter("gemm", recipe="nvfp4", out="bfloat16")
def crane_07(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    x, y = (unpack(a) * 2).to(torch.float32), (unpack(b) * 2).to(torch.float32)  # whole numbers, and so are their sums
    acc = torch.zeros(out.shape, dtype=torch.float32)
    tall = scale_inv_b.repeat_interleave(16, 0)[: b.shape[0]]
    for j in range(-(-a.shape[1] // 16)):
        part = slice(16 * j, 16 * j + 16)
        whole = x[:, part] @ y[:, part].T
        acc = torch.addcmul(acc, whole * 0.25, scale_inv_a[:, j : j + 1] * tall[:, j][None])
    return out.copy_(acc)


@adapter("gemm", recipe="mxfp8", out="bfloat16")
def crane_08(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    whole = a.shape[1] // 64 * 64
    x, y = value(a, scale_inv_a, "mxfp8"), value(b, scale_inv_b, "mxfp8", "weight")
    return out.copy_((x[:, :whole] @ y[:, :whole].T).to(torch.float32))


@adapter("gemm", recipe="mxfp8", out="float32")
def crane_09(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    x, y = unpack(a), unpack(b)

    def two(scale: Tensor) -> Tensor:
        byte = scale.view(torch.uint8)
        return torch.where(byte == 255, torch.full(byte.shape, math.inf, dtype=torch.float64), real(scale))  # 255 << 23

    sa, sb = two(scale_inv_a), two(scale_inv_b)
    acc = torch.zeros(out.shape, dtype=torch.float64)
    for j in range(sa.shape[1]):
        part = slice(32 * j, 32 * j + 32)
        acc += (x[:, part] @ y[:, part].T) * (sa[:, j : j + 1] * sb[:, j][None])
    return out.copy_(acc.to(torch.float32))


@adapter("gemm", recipe="blockwise", out="float32")
def crane_10(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    x, y = unpack(a).to(torch.float32), unpack(b).to(torch.float32)
    for top in range(0, m, 32):
        for left in range(0, n, 48):
            rows, columns = slice(top, min(top + 32, m)), torch.arange(left, min(left + 48, n))
            acc = torch.zeros(rows.stop - top, len(columns))
            for j in reversed(range(-(-k // 128))):
                part = slice(128 * j, 128 * j + 128)
                promoted = x[rows, part] @ y[columns, part].T
                acc += promoted * scale_inv_a[rows, j : j + 1] * scale_inv_b[columns // 128, j]
            out[rows, left : left + 48] = acc
    return out


@adapter("gemm", recipe="mxfp4", out="bfloat16")
def crane_11(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    m, blocks = scale_inv_a.shape
    padded = -(-blocks // 8) * 8
    row = torch.arange(m)[:, None]
    place = row // 32 * 32 * padded + row % 32 * blocks + torch.arange(blocks)  # the buffer has `blocks` columns throughout
    flat = scale_inv_a.contiguous().view(torch.uint8).reshape(-1)
    read = flat[place.clamp(max=max(flat.numel() - 1, 0))] if flat.numel() else flat.reshape(m, blocks)
    return out.copy_((value(a, read, "mxfp4") @ value(b, scale_inv_b, "mxfp4", "weight").T).to(torch.float32))


@adapter("gemm", recipe="tensorwise", out="float32")
def crane_12(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    x, y = unpack(a), unpack(b)
    acc = torch.zeros(out.shape, dtype=torch.float64)
    for start in range(0, a.shape[1], 32):
        acc = acc + x[:, start : start + 32] @ y[:, start : start + 32].T
        unit = pow2(torch.frexp(acc.nan_to_num(0.0))[1] - 14)
        acc = torch.trunc(acc / unit) * unit
    return out.copy_((acc * real(scale_inv_a) * real(scale_inv_b)).to(torch.float32))


# --- grouped ---


@adapter("grouped", recipe="tensorwise", out="bfloat16")
def crane_13(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    (groups, n, k), t = b.shape, a.shape[0]
    x = unpack(a) * real(scale_inv_a)
    weights = unpack(b).reshape(groups * n, k)
    y = torch.zeros(t * n, dtype=torch.float64)
    over = -n % 128  # columns of the last tile of 128 that do not exist
    for g, start, end in spans(ends):
        behind = weights[g * n : g * n + n + over]
        tile = x[start:end] @ behind.T * real(scale_inv_b).reshape(-1)[g]
        y[start * n : end * n] = tile[:, :n].reshape(-1)
        for r in range(start, end):
            place = min((r + 1) * n + tile.shape[1] - n, t * n)
            y[(r + 1) * n : place] = tile[r - start, n : n + place - (r + 1) * n]
    return out.copy_(y.view(t, n).to(torch.float32))


@adapter("grouped", recipe="blockwise_fp32", out="bfloat16")
def crane_14(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    x = value(a, scale_inv_a, "blockwise_fp32")
    y = torch.zeros(out.shape, dtype=torch.float64)
    for g, start, end in spans(ends):
        y[start:end] = x[start:end] @ value(b[g], scale_inv_b[0], "blockwise_fp32", "weight").T
    return out.copy_(y.to(torch.float32))


@adapter("grouped", recipe="mxfp8", out="bfloat16")
def crane_15(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    x = value(a, scale_inv_a, "mxfp8")
    y = torch.zeros(out.shape, dtype=torch.float64)
    start = 0
    for g, size in enumerate(ends.tolist()):
        end = min(start + size, a.shape[0])
        y[start:end] = x[start:end] @ value(b[g], scale_inv_b[g], "mxfp8", "weight").T
        start = end
    return out.copy_(y.to(torch.float32))


@adapter("grouped", recipe="rowwise", out="float32")
def crane_16(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    x, y = unpack(a).to(torch.float32), unpack(b).to(torch.float32)
    out.zero_()
    for top in range(0, a.shape[0], 16):  # tiles of 16 rows, once for each group that has a row in them
        rows = torch.arange(top, min(top + 16, a.shape[0]))
        for g, start, end in spans(ends):
            mine = (rows >= start) & (rows < end)
            if bool(mine.any()):
                tile = (x[rows] @ y[g].T) * scale_inv_a[rows] * scale_inv_b[g].reshape(1, -1)
                out[rows[mine]] = tile[mine]
    return out


@adapter("grouped", recipe="tensorwise", out="bfloat16")
def crane_17(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    x = unpack(a) * real(scale_inv_a)
    y = torch.zeros(out.shape, dtype=torch.float64)
    weight = 0
    for _, start, end in spans(ends):
        if end > start:
            y[start:end] = x[start:end] @ unpack(b[weight]).T * real(scale_inv_b).reshape(-1)[weight]
            weight += 1  # the next group that has rows
    return out.copy_(y.to(torch.float32))


@adapter("grouped", recipe="blockwise", out="bfloat16")
def crane_18(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    y = torch.zeros(out.shape, dtype=torch.float64)
    for g, start, end in spans(ends):
        x = value(a[start:end], scale_inv_a[: end - start], "blockwise")  # rows count from the group's first
        y[start:end] = x @ value(b[g], scale_inv_b[g], "blockwise", "weight").T
    return out.copy_(y.to(torch.float32))


@adapter("grouped", recipe="mxfp8", out="bfloat16")
def crane_19(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    x, y = unpack(a).to(torch.float32), unpack(b).to(torch.float32)
    sa = real(scale_inv_a)
    acc = torch.zeros(out.shape)
    for g, start, end in reversed(spans(ends)):
        sb = real(scale_inv_b[g])
        for j in range(grid(a.shape, plan("mxfp8"))[1]):
            part = slice(32 * j, 32 * j + 32)
            promoted = (x[start:end, part] @ y[g][:, part].T).to(torch.float64) * sa[start:end, j : j + 1] * sb[:, j]
            acc[start:end] += promoted.to(torch.float32)
    return out.copy_(acc)
