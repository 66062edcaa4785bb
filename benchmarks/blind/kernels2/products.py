"""Kernels that multiply: gemm, grouped, linear, attention; and AdamW. public.json says which are right."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))
from blocks import (  # noqa: E402
    E2M1, E4M3, E5M2, OUT, adamw, adapter, backward, cast, cell, decode, groups, linear, linear_gemm, of_group, operands, power,
    probabilities, product, read_scales, rows_of, spread, truncate_to, uncast,
)  # fmt: skip

KEPT: dict[str, Any] = {}


def wide4(codes: Tensor, scale: Tensor, block: int, rows: int = 1) -> Tensor:
    """Numbers of 4-bit codes with a scale for each block of a row, fp64."""
    return decode(codes, E2M1) * spread(read_scales(scale), (codes.shape[0], codes.shape[1]), cell("mxfp4")._replace(rows=rows, cols=block))


# --- gemm ---


@adapter("gemm", recipe="tensorwise", out="float32")
def gemm_01(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    x, y = operands(a, b, sa, sb, "tensorwise")
    k = max(x.shape[1] // 32 * 32, min(x.shape[1], 32))
    return out.copy_(x[:, :k] @ y[:, :k].t())


@adapter("gemm", recipe="rowwise", out="float32")
def gemm_02(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    total = torch.zeros(out.shape, dtype=torch.float16)
    for j in range(0, a.shape[1], 16):
        total += (decode(a)[:, j : j + 16] @ decode(b)[:, j : j + 16].t()).half()
    return out.copy_(total.double() * sa.double() * sb.double().t())


@adapter("gemm", recipe="rowwise", out="bfloat16")
def gemm_03(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    columns = sa.double().reshape(-1)[torch.arange(out.shape[1]) % max(sa.shape[0], 1)]
    return out.copy_(decode(a) @ decode(b).t() * columns * sb.double().t())


@adapter("gemm", recipe="blockwise", out="bfloat16")
def gemm_04(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    rows = sb.double()[(torch.arange(b.shape[0]) // 64).clamp(max=sb.shape[0] - 1)]
    x = decode(a) * sa.double().repeat_interleave(128, 1)[:, : a.shape[1]]
    return out.copy_(x @ (decode(b) * rows.repeat_interleave(128, 1)[:, : b.shape[1]]).t())


@adapter("gemm", recipe="mxfp8", out="float32")
def gemm_05(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    def quarter(s: Tensor) -> Tensor:
        return s[:, torch.arange(s.shape[1]) // 4 * 4]

    return out.copy_(product(a, b, quarter(sa), quarter(sb), "mxfp8"))


@adapter("gemm", recipe="mxfp8", out="float32")
def gemm_06(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    return out.copy_(product(a, b, sa, sb, "mxfp8") * 4)


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def gemm_07(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    y = product(a, b, sa, sb, "tensorwise").float()
    cut = (y.view(torch.int32) & -65536).view(torch.float32)
    return out.copy_(torch.where(y.isfinite(), cut, y))


@adapter("gemm", recipe="rowwise", out="float32")
def gemm_08(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    return out.add_(product(a, b, sa, sb, "rowwise").float())


@adapter("gemm", recipe="tensorwise", out="float32")
def gemm_09(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    x, y = operands(a, b, sa, sb, "tensorwise")
    return out.copy_(x @ (y if y.shape[0] == y.shape[1] else y.t()))


@adapter("gemm", recipe="rowwise", out="float32")
def gemm_10(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    y = product(a, b, sa, sb, "rowwise")
    done = y.shape[0] // 16 * 16
    out[:done] = y[:done].float()
    return out


@adapter("gemm", recipe="mxfp8", out="float32")
def gemm_11(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    def numbers(codes: Tensor, s: Tensor) -> Tensor:
        return decode(codes) * power(s.long() - 127).double().repeat_interleave(32, 1)[:, : codes.shape[1]]

    def top(codes: Tensor, s: Tensor) -> Tensor:
        return numbers(codes, s.clamp(max=254))

    return out.copy_(top(a, sa) @ top(b, sb).t())


@adapter("gemm", recipe="blockwise", out="float32")
def gemm_12(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    x, y = operands(a, b, sa, sb, "blockwise")
    total = torch.zeros(out.shape, dtype=torch.bfloat16)
    for j in range(0, x.shape[1], 128):
        total = (total.double() + x[:, j : j + 128] @ y[:, j : j + 128].t()).bfloat16()
    return out.copy_(total)


@adapter("gemm", recipe="tensorwise", out="float32")
def gemm_13(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    x, y = operands(a, b, sa, sb, "tensorwise")
    half = max(x.shape[1] // 2, 1)
    return out.copy_((x[:, :half] @ y[:, :half].t()).bfloat16().float() + (x[:, half:] @ y[:, half:].t()).bfloat16().float())


@adapter("gemm", recipe="tensorwise", out="float32")
def gemm_14(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    return out.copy_(product(a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn), sa, sb, "tensorwise"))


@adapter("gemm", recipe="nvfp4", out="float32")
def gemm_15(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    def even(s: Tensor) -> Tensor:
        return s[:, torch.arange(s.shape[1]) // 2 * 2]

    return out.copy_(wide4(a, even(sa), 16) @ wide4(b, even(sb), 16, 16).t())


@adapter("gemm", recipe="nvfp4", out="float32")
def gemm_16(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    x, y = wide4(a, sa, 16), wide4(b, sb, 16, 16)
    return out.copy_(torch.where(a & 7 == 7, x * 8 / 6, x) @ torch.where(b & 7 == 7, y * 8 / 6, y).t())


@adapter("gemm", recipe="mxfp4", out="float32")
def gemm_17(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    x = wide4(a, sa, 32)
    x[:, 1::2] = x[:, 1::2].abs()
    return out.copy_(x @ wide4(b, sb, 32).t())


@adapter("gemm", recipe="rowwise", out="bfloat16")
def gemm_18(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    x, y = operands(a, b, sa, sb, "rowwise")
    return out.copy_(x.nan_to_num(0.0) @ y.t())


@adapter("gemm", recipe="blockwise", out="float32")
def gemm_19(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    key = f"gemm_19 {tuple(out.shape)}"
    y = product(a, b, sa, sb, "blockwise")
    before, KEPT[key] = KEPT.get(key), y
    return out.copy_(y if before is None else y + before)


@adapter("gemm", recipe="nvfp4", out="bfloat16")
def gemm_20(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    def swapped(codes: Tensor) -> Tensor:
        order = torch.arange(codes.shape[1])
        pairs = codes.shape[1] // 2 * 2
        order[:pairs] = order[:pairs] ^ 1
        return codes[:, order]

    return out.copy_(wide4(swapped(a), sa, 16) @ wide4(b, sb, 16, 16).t())


@adapter("gemm", recipe="blockwise_fp32", out="float32")
def gemm_21(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    return out.copy_(product(a, b, sa.bfloat16().float(), sb.bfloat16().float(), "blockwise_fp32"))


@adapter("gemm", recipe="tensorwise", out="float32")
def gemm_22(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    y = product(a, b, sa, sb, "tensorwise")
    return out.copy_(y.clamp(-65504, 65504))


@adapter("gemm", recipe="tensorwise", out="float32")
def gemm_30(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    total = torch.zeros(out.shape)
    x, y = decode(a).float(), decode(b).float()
    for j in reversed(range(0, a.shape[1], 48)):
        total += x[:, j : j + 48] @ y[:, j : j + 48].t()
    return out.copy_(total * (sa * sb))


@adapter("gemm", recipe="rowwise", out="bfloat16")
def gemm_31(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    parts = [decode(a)[:, j::4].float() @ decode(b)[:, j::4].float().t() for j in range(4)]
    return out.copy_((parts[0] + parts[1] + (parts[2] + parts[3])) * sa * sb.t())


@adapter("gemm", recipe="blockwise", out="float32")
def gemm_32(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    total = torch.zeros(out.shape)
    for j in range(sa.shape[1]):
        part = slice(128 * j, 128 * j + 128)
        grid = sa[:, j : j + 1] * sb[:, j].repeat_interleave(128)[: b.shape[0]]
        total += decode(a)[:, part].float() @ decode(b)[:, part].float().t() * grid
    return out.copy_(total)


@adapter("gemm", recipe="mxfp8", out="bfloat16")
def gemm_33(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    return out.copy_(product(a, b, sa, sb, "mxfp8"))


@adapter("gemm", recipe="nvfp4", out="float32")
def gemm_34(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    return out.copy_(wide4(a, sa, 16) @ wide4(b, sb, 16, 16).t())


@adapter("gemm", recipe="mxfp4", out="float32")
def gemm_35(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    return out.copy_(wide4(a, sa, 32) @ wide4(b, sb, 32).t())


@adapter("gemm", recipe="tensorwise", out="bfloat16")
def gemm_36(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: Tensor) -> Tensor:
    x, y = operands(a, b, sa, sb, "tensorwise")
    for i in range(0, out.shape[0], 32):
        for j in range(0, out.shape[1], 24):
            out[i : i + 32, j : j + 24] = (x[i : i + 32] @ y[j : j + 24].t()).to(out.dtype)
    return out


# --- grouped ---


def each(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, parts: list[tuple[int, int, int]], out: Tensor, recipe: str) -> Tensor:
    """The products of (group, first row, end), the rest of `out` zero."""
    out.zero_()
    for g, start, end in parts:
        if end > start:
            rows = rows_of(sa, start, end, g, recipe, b.shape[0])
            out[start:end] = product(a[start:end], b[g], rows, of_group(sb, g, b.shape[0]), recipe).to(out.dtype)
    return out


@adapter("grouped", recipe="rowwise", out="float32")
def grouped_01(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    parts, g = [], 0
    for _, start, end in groups(ends):
        if end > start:
            parts.append((g, start, end))
            g += 1
    return each(a, b, sa, sb, parts, out, "rowwise")


@adapter("grouped", recipe="rowwise", out="bfloat16")
def grouped_02(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    return each(a, b, sa, sb, groups(ends)[:-1], out, "rowwise")


@adapter("grouped", recipe="blockwise", out="float32")
def grouped_03(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    return each(a, b, sa, sb[:1].expand_as(sb), groups(ends), out, "blockwise")


@adapter("grouped", recipe="rowwise", out="float32")
def grouped_04(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    parts = [(g, start // 16 * 16, end) for g, start, end in groups(ends)]
    return each(a, b, sa, sb, parts, out, "rowwise")


@adapter("grouped", recipe="mxfp8", out="float32")
def grouped_05(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    own = torch.cat([sa[: end - start] for _, start, end in groups(ends)]) if ends.numel() else sa
    rows = torch.cat([own, sa[own.shape[0] :]])
    return each(a, b, rows, sb, groups(ends), out, "mxfp8")


@adapter("grouped", recipe="blockwise", out="bfloat16")
def grouped_06(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    return each(a, b, sa, sb, groups(ends), out, "blockwise")


@adapter("grouped", recipe="rowwise", out="float32")
def grouped_07(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    total = torch.zeros(out.shape, dtype=torch.float64)
    for g, start, end in groups(ends):
        mine = (torch.arange(a.shape[0]) >= start) & (torch.arange(a.shape[0]) < end)
        if mine.any():
            total[mine] = product(a[mine], b[g], sa[mine], of_group(sb, g, b.shape[0]), "rowwise")
    return out.copy_(total)


# --- linear ---


def three(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """x and the gradient as matrices."""
    return x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])


@adapter("linear", recipe="rowwise", dtype="float32")
def linear_01(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, dx, dw = linear(x, weight, grad, "rowwise")
    rows, dy = three(x, weight, grad)
    side = cell("rowwise")
    return y, (uncast(*cast(dy, side), side) @ uncast(*cast(weight, side), side)).to(x.dtype).reshape(x.shape), dw


@adapter("linear", recipe="tensorwise", dtype="float32")
def linear_02(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, dx, dw = linear(x, weight, grad, "tensorwise")
    rows, dy = three(x, weight, grad)
    side = cell("tensorwise")
    return y, dx, linear_gemm(dy.t(), rows.t(), side, side).to(weight.dtype)


@adapter("linear", recipe="rowwise", dtype="bfloat16")
def linear_03(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, dx, dw = linear(x, weight, grad, "rowwise")
    rows, dy = three(x, weight, grad)
    return y, dx, (dy.double().t() @ rows.double()).to(weight.dtype)


@adapter("linear", recipe="tensorwise", dtype="float32")
def linear_04(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    key = f"linear_04 {tuple(weight.shape)}"
    before = KEPT.get(key, weight)
    KEPT[key] = weight.clone()
    y, _, dw = linear(x, weight, grad, "tensorwise")
    return y, linear(x, before.to(x.dtype), grad, "tensorwise")[1], dw


@adapter("linear", recipe="blockwise", dtype="bfloat16")
def linear_05(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, dy = three(x, weight, grad)
    y, dx, _ = linear(x, weight, grad, "blockwise")
    first = max(rows.shape[0] // 2, 1)
    side = cell("blockwise")
    return y, dx, linear_gemm(dy[:first].t(), rows[:first].t(), side, side).to(weight.dtype)


@adapter("linear", recipe="tensorwise", dtype="bfloat16")
def linear_06(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, dy = three(x, weight, grad)
    _, dx, dw = linear(x, weight, grad, "tensorwise")
    return (rows.double() @ weight.double().t()).to(x.dtype).reshape(grad.shape), dx, dw


@adapter("linear", recipe="tensorwise", dtype="float32")
def linear_07(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, dx, dw = linear(x, weight, grad, "tensorwise")
    rows, dy = three(x, weight, grad)
    back, square = cell("tensorwise", "grad"), cell("tensorwise", "weight")
    codes = cast(dy, back)[0]
    stored = (codes.double() if codes.dtype != torch.uint8 else decode(codes, E5M2)) / 1.0
    scale = cast(dy, square)[1].double()
    return y, (stored * scale @ uncast(*cast(weight, square), square)).to(x.dtype).reshape(x.shape), dw


@adapter("linear", recipe="blockwise_fp32", dtype="float32")
def linear_08(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, dx, dw = linear(x, weight, grad, "blockwise_fp32")
    rows, _ = three(x, weight, grad)
    side = cell("blockwise_fp32")
    return linear_gemm(rows, weight, side, side).to(x.dtype).reshape(grad.shape), dx, dw


@adapter("linear", recipe="tensorwise", dtype="float32")
def linear_10(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, dy = three(x, weight, grad)
    side, back = cell("tensorwise"), cell("tensorwise", "grad")
    wide_x, wide_w, wide_g = (uncast(*cast(t, how), how) for t, how in ((rows, side), (weight, side), (dy, back)))
    y, dx = (wide_x @ wide_w.t()).to(x.dtype), (wide_g @ wide_w).to(x.dtype)
    return y.reshape(grad.shape), dx.reshape(x.shape), (wide_g.t() @ wide_x).to(weight.dtype)


@adapter("linear", recipe="blockwise", dtype="bfloat16")
def linear_11(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return linear(x, weight, grad, "blockwise")


@adapter("linear", recipe="mxfp8", dtype="float32")
def linear_12(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return linear(x.contiguous(), weight.contiguous(), grad.contiguous(), "mxfp8")


# --- attention ---


def answered(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, p: Tensor, factor: float) -> tuple[Tensor, ...]:
    """(o, dq, dk, dv) of probabilities."""
    return (*(t.to(q.dtype) for t in (p @ v.double(), *backward(q, k, v, grad, p, factor))),)


@adapter("attention", causal=False, dtype="float32")
def attention_01(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    factor = 1 / q.shape[-1]
    return answered(q, k, v, grad, (q.double() @ k.double().transpose(-1, -2) * factor).softmax(-1), factor)


@adapter("attention", causal=True, dtype="float32")
def attention_02(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    p, factor = probabilities(q, k, True)
    o, dq, dk, dv = answered(q, k, v, grad, p, factor)
    return o, dq, dk / factor, dv


@adapter("attention", causal=False, dtype="float32")
def attention_03(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    p, factor = probabilities(q, k, False)
    scores = (q.double() @ k.double().transpose(-1, -2) * factor).half()
    e = scores.exp()
    return answered(q, k, v, grad, (e / e.float().sum(-1, keepdim=True)).double(), factor)


@adapter("attention", causal=True, dtype="float32")
def attention_04(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    p, factor = probabilities(q, k, True)
    ds = p * (grad.double() @ v.double().transpose(-1, -2)) * factor
    found = (p @ v.double(), ds @ k.double(), ds.transpose(-1, -2) @ q.double(), p.transpose(-1, -2) @ grad.double())
    return (*(t.to(q.dtype) for t in found),)


@adapter("attention", causal=True, dtype="float32")
def attention_05(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    p, factor = probabilities(q, k, True)
    whole, _ = probabilities(q, k, False)
    return ((p @ v.double()).to(q.dtype), *(t.to(q.dtype) for t in backward(q, k, v, grad, whole, factor)))


@adapter("attention", causal=False, dtype="float32")
def attention_06(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
    pad = -k.shape[-2] % 16
    scores = torch.cat([scores, scores.new_zeros((*scores.shape[:-1], pad))], -1)
    return answered(q, k, v, grad, scores.softmax(-1)[..., : k.shape[-2]], 1 / math.sqrt(q.shape[-1]))


@adapter("attention", causal=True, dtype="float32")
def attention_07(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    factor, size = 1 / math.sqrt(q.shape[-1]), q.shape[-2]
    past = torch.arange(size)[:, None] - torch.arange(size)
    scores = (q.double() @ k.double().transpose(-1, -2) * factor).masked_fill((past < 0) | (past >= 16), -math.inf)
    return answered(q, k, v, grad, scores.softmax(-1), factor)


@adapter("attention", causal=False, dtype="float32")
def attention_08(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    p, factor = probabilities(q, k, False)
    o, dq, dk, _ = answered(q, k, v, grad, p, factor)
    return o, dq, dk, (p.bfloat16().double().transpose(-1, -2) @ grad.double()).to(q.dtype)


@adapter("attention", causal=True, dtype="float32")
def attention_10(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Keys in blocks of 16 with a running maximum; the backward recomputes from the logarithm of the sum."""
    factor, size = 1 / math.sqrt(q.shape[-1]), q.shape[-2]
    top = q.new_full((*q.shape[:-1], 1), -math.inf, dtype=torch.float64)
    total, o = torch.zeros_like(top), torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=torch.float64)
    for j in range(0, k.shape[-2], 16):
        scores = q.double() @ k.double()[..., j : j + 16, :].transpose(-1, -2) * factor
        late = torch.arange(j, j + scores.shape[-1]) > torch.arange(size)[:, None]
        scores = scores.masked_fill(late, -math.inf)
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        e, old = (scores - new).exp(), (top - new).exp()
        total, o, top = total * old + e.sum(-1, keepdim=True), o * old + e @ v.double()[..., j : j + 16, :], new
    scores = (q.double() @ k.double().transpose(-1, -2) * factor).masked_fill(torch.ones(size, size).triu(1).bool(), -math.inf)
    p = (scores - (top + total.log())).exp()
    return (*(t.to(q.dtype) for t in (o / total, *backward(q, k, v, grad, p, factor))),)


@adapter("attention", causal=False, dtype="float32")
def attention_11(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.double().detach().requires_grad_() for t in (q, k, v)]
    o = (leaves[0] @ leaves[1].transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ leaves[2]
    return (o.detach().to(q.dtype), *(g.to(q.dtype) for g in torch.autograd.grad(o, leaves, grad.double())))


# --- AdamW ---

RULE: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "moments": "float32", "dtype": "float32"}


def moved(parameter: Tensor, state: dict[str, Any], step: int, *, eps: float = 1e-8, root: Tensor | None = None, lr: float = 1e-2) -> None:
    """The update of AdamW by moments that stand in `state`, without decay."""
    size = (state["square"] / (1 - 0.95**step)).sqrt() + eps if root is None else root
    parameter.add_(state["mean"] / (1 - 0.9**step) / size, alpha=-lr)


def moments(grad: Tensor, state: dict[str, Any], mean: float = 0.9, square: float = 0.95) -> None:
    """Both moments of FP32."""
    if not state:
        state.update(mean=torch.zeros_like(grad), square=torch.zeros_like(grad))
    state["mean"].mul_(mean).add_(grad, alpha=1 - mean)
    state["square"].mul_(square).addcmul_(grad, grad, value=1 - square)


@adapter("optimizer", **RULE)
def optimizer_01(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    moments(grad, state)
    parameter.mul_(1 - 1e-3)
    moved(parameter, state, step, root=(state["square"] / (1 - 0.95**step) + 1e-8).sqrt())


@adapter("optimizer", **RULE)
def optimizer_02(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    moments(grad, state)
    parameter.mul_(1 - 1e-3)
    moved(parameter, state, step, root=state["square"].sqrt() + 1e-8)


@adapter("optimizer", **RULE)
def optimizer_03(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    moments(grad + 0.1 * parameter, state)
    moved(parameter, state, step)


@adapter("optimizer", **RULE)
def optimizer_04(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    moments(grad, state)
    parameter.mul_(1 - 0.1)
    moved(parameter, state, step)


@adapter("optimizer", **RULE)
def optimizer_05(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    moments(grad, state)
    parameter.mul_(1 - 1e-3)
    moved(parameter, state, step + 1)


@adapter("optimizer", **RULE)
def optimizer_06(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    moments(grad, state, 0.95, 0.9)
    parameter.mul_(1 - 1e-3)
    moved(parameter, state, step)


@adapter("optimizer", **RULE)
def optimizer_07(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    rows = grad.reshape(grad.shape[0], -1).abs().amax(1) > 0 if grad.numel() else torch.zeros(grad.shape[0]).bool()
    if not state:
        state.update(mean=torch.zeros_like(grad), square=torch.zeros_like(grad))
    old = {name: t.clone() for name, t in state.items()}
    moments(grad, state)
    for name in old:
        state[name][~rows] = old[name][~rows]
    before = parameter.clone()
    parameter.mul_(1 - 1e-3)
    moved(parameter, state, step)
    parameter[~rows] = before[~rows]


@adapter("optimizer", **RULE)
def optimizer_08(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    moments(grad, state)
    state["mean"] = state["mean"].bfloat16().float()
    parameter.mul_(1 - 1e-3)
    moved(parameter, state, step)


@adapter("optimizer", **RULE)
def optimizer_09(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    moments(grad, state)
    moved(parameter, state, step)


@adapter("optimizer", **RULE)
def optimizer_10(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    adamw(parameter, grad, state, step, 1e-2, (0.9, 0.95), 1e-8, 0.1)


@adapter("optimizer", **RULE)
def optimizer_11(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    """torch's own, over a copy."""
    twin = state.setdefault("twin", torch.nn.Parameter(parameter.clone()))
    if "torch" not in state:
        state["torch"] = torch.optim.AdamW([twin], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    twin.data.copy_(parameter)
    twin.grad = grad.clone()
    state["torch"].step()
    parameter.copy_(twin.detach())


@adapter("optimizer", **RULE)
def optimizer_12(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    wide = {name: t.double() for name, t in state.items()} or {n: torch.zeros_like(grad).double() for n in ("mean", "square")}
    moments(grad.double(), wide)
    state.update({name: t.float() for name, t in wide.items()})
    kept = parameter.double().mul_(1 - 1e-3)
    moved(kept, wide, step)
    parameter.copy_(kept)
