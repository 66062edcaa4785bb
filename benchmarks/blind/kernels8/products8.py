"""GEMMs and grouped GEMMs."""

from __future__ import annotations

import torch
from rig8 import adapter, cut_for, down, edges, grid_of, meaning, operand, scale_of, stretch
from torch import Tensor


def sides(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """Both operands in FP64."""
    return operand(a, scale_a, cut_for(recipe)), operand(b, scale_b, cut_for(recipe, "weight"))


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def flint_01(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    total = meaning(a) @ meaning(b).T
    return out.copy_(down(total * scale_inv_a.double() * scale_inv_a.double(), out.dtype))


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def flint_02(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> None:
    x, y = meaning(a), meaning(b) * scale_inv_b.double()
    even = y[:, 0::2] @ x[:, 0::2].T
    odd = y[:, 1::2] @ x[:, 1::2].T
    out.copy_(down((even + odd).T * scale_inv_a.double(), out.dtype))


@adapter("gemm", recipe="rowwise", out="bfloat16")
def flint_03(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    (m, n), total = out.shape, meaning(a) @ meaning(b).T
    if m * n == 0:
        return out
    for_rows = scale_inv_b.reshape(-1).double()[torch.arange(m) % n]
    for_columns = scale_inv_a.reshape(-1).double()[torch.arange(n) % m]
    return out.copy_(down(total * for_rows[:, None] * for_columns, out.dtype))


@adapter("gemm", recipe="mxfp8", out="float32")
def flint_04(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    whole = a.shape[1] // 32 * 32
    x, y = sides(a, b, scale_inv_a, scale_inv_b, "mxfp8")
    return out.copy_(down(x[:, :whole] @ y[:, :whole].T, out.dtype))


@adapter("gemm", recipe="blockwise", out="float32")
def flint_05(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    blocks = torch.arange(scale_inv_a.shape[1])
    x, y = sides(a, b, scale_inv_a[:, blocks // 4 * 4], scale_inv_b, "blockwise")
    return out.copy_(down(x @ y.T, out.dtype))


@adapter("gemm", recipe="mxfp8", out="bfloat16")
def flint_06(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> None:
    (m, k), n = a.shape, b.shape[0]
    x, y = meaning(a).float(), meaning(b).float()
    s, t = scale_of(scale_inv_a), scale_of(scale_inv_b)
    parts = []
    for j in range(0, k, 32):
        part = (x[:, j : j + 32] @ y[:, j : j + 32].T).double()
        parts.append((part * s[:, j // 32 : j // 32 + 1] * t[:, j // 32]).float())
    while len(parts) > 1:
        parts = [sum(parts[i + 1 : i + 2], parts[i]) for i in range(0, len(parts), 2)]
    out.copy_(parts[0].to(out.dtype) if parts else torch.zeros(m, n))


@adapter("gemm", recipe="blockwise_fp32", out="bfloat16")
def flint_07(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    x, y = sides(a, b, scale_inv_a, scale_inv_b, "blockwise_fp32")
    total = torch.zeros(out.shape, dtype=torch.bfloat16)
    for j in range(0, x.shape[1], 128):
        total = down(total.double() + x[:, j : j + 128] @ y[:, j : j + 128].T, torch.bfloat16)
    return out.copy_(total)


@adapter("gemm", recipe="mxfp4", out="bfloat16")
def flint_08(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    order = torch.arange(a.shape[1])
    paired = a.shape[1] // 2 * 2
    order[:paired] = order[:paired] ^ 1
    x, y = sides(a[:, order], b, scale_inv_a, scale_inv_b, "mxfp4")
    return out.copy_(down(x @ y.T, out.dtype))


@adapter("gemm", recipe="nvfp4", out="float32")
def flint_09(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    k, half = a.shape[1], a.shape[1] // 2
    at = torch.cat([torch.arange(half) // 16, half // 16 + torch.arange(k - half) // 16])
    x = meaning(a) * scale_inv_a.double()[:, at]
    tall = scale_inv_b.double()[torch.arange(b.shape[0]) // 16]
    y = meaning(b) * tall[:, at]
    return out.copy_(down(x[:, :half] @ y[:, :half].T + x[:, half:] @ y[:, half:].T, out.dtype))


@adapter("gemm", recipe="tensorwise", out="float32")
def flint_10(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    x, y = sides(a, b, scale_inv_a, scale_inv_b, "tensorwise")
    half = (a.shape[1] + 1) // 2
    out += down(x[:, :half] @ y[:, :half].T, out.dtype)
    out += down(x[:, half:] @ y[:, half:].T, out.dtype)
    return out


@adapter("gemm", recipe="rowwise", out="float32")
def flint_11(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> None:
    x, y = sides(a, b, scale_inv_a, scale_inv_b, "rowwise")
    whole = b.shape[0] // 8 * 8
    out[:, :whole] = down(x @ y[:whole].T, out.dtype)


@adapter("gemm", recipe="blockwise", out="bfloat16")
def flint_12(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> None:
    n, k = b.shape
    x, y = meaning(a).float(), meaning(b).float()
    sums = [torch.zeros(out.shape), torch.zeros(out.shape)]
    for block in reversed(range(-(-k // 128))):
        part = slice(128 * block, 128 * block + 128)
        factor = scale_inv_b[torch.arange(n) // 128, block]
        sums[block % 2] += (x[:, part] * scale_inv_a[:, block : block + 1]) @ (y[:, part] * factor[:, None]).T
    out.copy_(sums[0] + sums[1])


# --- grouped ---


@adapter("grouped", recipe="mxfp8", out="bfloat16")
def flint_13(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    out.zero_()
    for g, first, last in edges(ends.cumsum(0)):
        first, last = min(first, a.shape[0]), min(last, a.shape[0])
        if last > first:
            x, y = sides(a[first:last], b[g], scale_inv_a[first:last], scale_inv_b[g], "mxfp8")
            out[first:last] = down(x @ y.T, out.dtype)
    return out


@adapter("grouped", recipe="blockwise", out="bfloat16")
def flint_14(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    out.zero_()
    group = torch.searchsorted(ends, torch.arange(a.shape[0], dtype=ends.dtype), right=True)
    for row in range(0, a.shape[0], 16):
        g, last = int(group[row]), min(row + 16, int(ends[-1]) if len(ends) else 0)
        if g < len(ends) and last > row:
            x, y = sides(a[row:last], b[g], scale_inv_a[row:last], scale_inv_b[g], "blockwise")
            out[row:last] = down(x @ y.T, out.dtype)
    return out


@adapter("grouped", recipe="nvfp4", out="bfloat16")
def flint_15(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> None:
    x = operand(a, scale_inv_a, cut_for("nvfp4"))
    total = torch.zeros(out.shape, dtype=torch.float64)
    row, last = torch.arange(a.shape[0]), 0
    for g in range(len(ends)):
        mine = ((row >= last) & (row < ends[g]))[:, None]
        product = x @ operand(b[g], scale_inv_b[g], cut_for("nvfp4", "weight")).T
        total = torch.where(mine, product, total)
        last = ends[g]
    out.copy_(down(total, out.dtype))


@adapter("grouped", recipe="tensorwise", out="bfloat16")
def flint_16(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    out.zero_()
    for g, first, last in edges(ends):
        x, y = sides(a[first:last], b[g], scale_inv_a, scale_inv_b[0], "tensorwise")
        out[first:last] = down(x @ y.T, out.dtype)
    return out


@adapter("grouped", recipe="mxfp4", out="float32")
def flint_17(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    out.zero_()
    for g, first, last in reversed(edges(ends)):
        if last > first:
            last = min(last + 1, int(ends[-1]))
            x, y = sides(a[first:last], b[g], scale_inv_a[first:last], scale_inv_b[g], "mxfp4")
            out[first:last] = down(x @ y.T, out.dtype)
    return out


@adapter("grouped", recipe="rowwise", out="float32")
def flint_18(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    out.zero_()
    for g, first, last in edges(ends):
        x, y = sides(a[first:last], b[g], scale_inv_a[: last - first], scale_inv_b[g], "rowwise")
        out[first:last] = down(x @ y.T, out.dtype)
    return out


@adapter("grouped", recipe="blockwise_fp32", out="bfloat16")
def flint_19(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> None:
    groups, n, k = b.shape
    out.zero_()
    group = torch.searchsorted(ends.long(), torch.arange(a.shape[0]), right=True)
    x = operand(a, scale_inv_a, cut_for("blockwise_fp32"))
    flat_b, flat_s = b.view(torch.uint8).reshape(groups * n, k).view(b.dtype), scale_inv_b.double()
    for g in torch.unique(group).tolist():
        if g == groups:
            continue
        y = meaning(flat_b[g * n : g * n + n]) * stretch(flat_s[g].reshape(grid_of((n, k), cut_for("blockwise_fp32", "weight"))), (n, k), cut_for("blockwise_fp32", "weight"))
        rows = torch.nonzero(group == g)[:, 0]
        out.index_copy_(0, rows, down(x.index_select(0, rows) @ y.T, out.dtype))
