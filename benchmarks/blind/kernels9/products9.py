"""GEMMs and grouped GEMMs."""

from __future__ import annotations

import torch
from bench9 import F64, adapter, form, operand, real, sense, spread
from torch import Tensor


def put(out: Tensor, value: Tensor) -> Tensor:
    return out.copy_(value.to(torch.float32))


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def schist_01(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    x, y = operand(a, scale_inv_a, "tensorwise"), operand(b, scale_inv_b, "tensorwise", "weight")
    out.zero_()
    for k in range(0, a.shape[1], 64):
        out += (x[:, k : k + 64] @ y[:, k : k + 64].t()).to(torch.bfloat16)
    return out


@adapter("gemm", recipe="blockwise_fp32", out="bfloat16")
def schist_02(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    blocks = -(-a.shape[1] // 128)
    half = -(-blocks // 2)
    local = torch.arange(blocks) % max(half, 1)
    x, y = operand(a, scale_inv_a[:, local], "blockwise_fp32"), operand(b, scale_inv_b[:, local], "blockwise_fp32", "weight")
    return put(out, x @ y.t())


@adapter("gemm", recipe="tensorwise", out="float32")
def schist_03(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    x, y = sense(a).to(torch.float32), sense(b).to(torch.float32)
    total = torch.zeros(out.shape, dtype=torch.float32)
    for k in reversed(range(0, a.shape[1], 8)):
        total += x[:, k : k + 8] @ y[:, k : k + 8].t()
    return put(out, total.to(F64) * scale_inv_b.to(F64) * scale_inv_a.to(F64))


@adapter("gemm", recipe="blockwise_fp32", out="float32")
def schist_04(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    whole = a.shape[1] // 128
    sa, sb = scale_inv_a.clone(), scale_inv_b.clone()
    sa[:, whole:] = 1
    sb[:, whole:] = 1
    return put(out, operand(a, sa, "blockwise_fp32") @ operand(b, sb, "blockwise_fp32", "weight").t())


@adapter("gemm", recipe="rowwise", out="float32")
def schist_05(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    m, n = out.shape
    if not m or not n:
        return out
    wrong = scale_inv_b.reshape(-1)[torch.arange(m) % n].to(F64)
    return put(out, (sense(a) @ sense(b).t()) * scale_inv_a.to(F64) * wrong[:, None])


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def schist_06(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    return put(out, (sense(a) @ sense(b).t()) * (scale_inv_a.to(F64) * scale_inv_a.to(F64)))


@adapter("gemm", recipe="mxfp8", out="bfloat16")
def schist_07(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    sums = []
    sa, sb = real(scale_inv_a), real(scale_inv_b)
    for j, k in enumerate(range(0, a.shape[1], 32)):
        sums.append((sense(a[:, k : k + 32]) @ sense(b[:, k : k + 32]).t()) * (sa[:, j, None] * sb[:, j]))
    while len(sums) > 1:
        sums = [sums[i] + sums[i + 1] if i + 1 < len(sums) else sums[i] for i in range(0, len(sums), 2)]
    return put(out, sums[0]) if sums else out.zero_()


def field(scale: Tensor) -> Tensor:
    return (scale.view(torch.uint8).to(torch.int32) << 23).view(torch.float32).to(F64)


@adapter("gemm", recipe="mxfp8", out="float32")
def schist_08(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    x = sense(a) * spread(field(scale_inv_a), a.shape, form("mxfp8"))
    y = sense(b) * spread(field(scale_inv_b), b.shape, form("mxfp8"))
    return put(out, x @ y.t())


@adapter("gemm", recipe="nvfp4", out="bfloat16")
def schist_09(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    down, across = scale_inv_b.shape
    read = scale_inv_b.reshape(-1).view(across, down).t() if scale_inv_b.numel() else scale_inv_b
    return put(out, operand(a, scale_inv_a, "nvfp4") @ operand(b, read, "nvfp4", "weight").t())


@adapter("gemm", recipe="blockwise_fp32", out="float32")
def schist_10(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    x, y = operand(a, scale_inv_a, "blockwise_fp32"), operand(b, scale_inv_b, "blockwise_fp32", "weight")
    turned = out.t()
    for n in range(0, b.shape[0], 40):
        for m in range(0, a.shape[0], 56):
            turned[n : n + 40, m : m + 56] = (y[n : n + 40] @ x[m : m + 56].t()).to(torch.float32)
    return out


@adapter("gemm", recipe="mxfp4", out="bfloat16")
def schist_11(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    k = a.shape[1]
    order = torch.arange(k)
    order[: k // 2 * 2] ^= 1
    return put(out, operand(a, scale_inv_a, "mxfp4") @ operand(b[:, order], scale_inv_b, "mxfp4", "weight").t())


@adapter("gemm", recipe="blockwise", out="bfloat16")
def schist_12(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out: Tensor) -> Tensor:
    whole = b.shape[0] // 8 * 8
    full = operand(a, scale_inv_a, "blockwise") @ operand(b, scale_inv_b, "blockwise", "weight").t()
    put(out[:, :whole], full[:, :whole])
    return out


# --- grouped ---


def edges(ends: Tensor) -> list[tuple[int, int]]:
    last = [0, *ends.tolist()]
    return list(zip(last, last[1:]))


def weights(b: Tensor, scale: Tensor, recipe: str) -> list[Tensor]:
    return [operand(b[g], scale[g], recipe, "weight") for g in range(b.shape[0])]


@adapter("grouped", recipe="tensorwise", out="bfloat16")
def schist_13(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    x = operand(a, scale_inv_a, "tensorwise")
    out.zero_()
    for g, (s, e) in enumerate(edges(ends)):
        put(out[s:e], x[s:e] @ (sense(b[g]) * scale_inv_b.reshape(-1)[0].to(F64)).t())
    return out


@adapter("grouped", recipe="rowwise", out="bfloat16")
def schist_14(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    x, w = operand(a, scale_inv_a, "rowwise"), weights(b, scale_inv_b, "rowwise")
    out.zero_()
    busy = [(s, e) for s, e in edges(ends) if e > s]
    for g, (s, e) in enumerate(busy):
        put(out[s:e], x[s:e] @ w[g].t())
    return out


@adapter("grouped", recipe="rowwise", out="float32")
def schist_15(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    x = operand(a, scale_inv_a, "rowwise")
    out.zero_()
    if not b.shape[0]:
        return out
    w = torch.stack(weights(b, scale_inv_b, "rowwise"))
    owner = torch.searchsorted(ends.long(), torch.arange(a.shape[0]), right=True)
    for t in range(0, a.shape[0], 16):
        mine = owner[t : t + 16]
        held = mine < b.shape[0]
        out[t : t + 16][held] = torch.einsum("tk,tnk->tn", x[t : t + 16][held], w[mine[held]]).to(torch.float32)
    return out


@adapter("grouped", recipe="blockwise_fp32", out="bfloat16")
def schist_16(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    x, w = operand(a, scale_inv_a, "blockwise_fp32"), weights(b, scale_inv_b, "blockwise_fp32")
    out.zero_()
    last, rows = ends.tolist(), a.shape[0]
    for t in range(rows):
        g = next((i for i, e in enumerate(last) if t <= e), len(last))
        if g < len(last):
            put(out[t], w[g] @ x[t])
    return out


@adapter("grouped", recipe="mxfp8", out="bfloat16")
def schist_17(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    x, w = operand(a, scale_inv_a, "mxfp8"), weights(b, scale_inv_b, "mxfp8")
    out.zero_()
    start = 0
    for g, e in enumerate(ends.tolist()):
        stop = min(-(-e // 16) * 16, a.shape[0])
        if stop > start:
            put(out[start:stop], x[start:stop] @ w[g].t())
            start = stop
    return out


@adapter("grouped", recipe="mxfp8", out="bfloat16")
def schist_18(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    x, w = operand(a, scale_inv_a, "mxfp8"), weights(b, scale_inv_b, "mxfp8")
    row = torch.arange(a.shape[0])[:, None]
    total = torch.zeros(out.shape, dtype=F64)
    for g, (s, e) in reversed(list(enumerate(edges(ends)))):
        total = torch.where((row >= s) & (row < e), x @ w[g].t(), total)
    return put(out, total)


@adapter("grouped", recipe="blockwise", out="float32")
def schist_19(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    x, w = operand(a, scale_inv_a, "blockwise"), weights(b, scale_inv_b, "blockwise")
    out.zero_()
    for g, (s, e) in enumerate(edges(ends)):
        e = s + (e - s) // 8 * 8
        put(out[s:e], x[s:e] @ w[g].t())
    return out
