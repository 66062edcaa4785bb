"""Linear layers, attentions and optimizers of the tenth set. public.json says which are right."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from yard10 import E4M3, F64, adapter, codes_of, cut_of, inverse32, leading, means, peaks, quantize, settle, step_up, two

Three = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def cast(x: Tensor, recipe: str, role: str = "x") -> Tensor:
    """x as its cast leaves it, FP64."""
    cut = cut_of(recipe, role)
    codes, scales = quantize(x, cut)
    return settle(codes.view(cut.form.dtype), scales, recipe, role)


def shaped(y: Tensor, dx: Tensor, dw: Tensor, x: Tensor, grad: Tensor) -> Three:
    """Results in x's dtype and in their shapes."""
    return y.float().to(x.dtype).reshape(grad.shape), dx.float().to(x.dtype).reshape(x.shape), dw.float().to(x.dtype)


@adapter("linear", recipe="tensorwise", dtype="bfloat16")
def deck_01(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, g = leading(x), leading(grad)
    y = cast(a, "tensorwise") @ cast(weight, "tensorwise", "weight").mT
    dx = cast(g, "tensorwise") @ cast(weight.t(), "tensorwise", "weight").mT
    dw = cast(g.t(), "tensorwise") @ cast(a.t(), "tensorwise").mT
    return shaped(y, dx, dw, x, grad)


@adapter("linear", recipe="mxfp8", dtype="bfloat16")
def deck_02(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, g = leading(x), leading(grad)
    y = cast(a, "mxfp8") @ cast(weight, "mxfp8", "weight").mT
    dx = cast(g, "mxfp8", "grad") @ cast(weight.t(), "mxfp8", "weight").mT
    dw = cast(g.t(), "mxfp8", "grad") @ a.double()
    return shaped(y, dx, dw, x, grad)


@adapter("linear", recipe="rowwise", dtype="float32")
def deck_03(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, g = leading(x), leading(grad)
    aq, wq, gq = cast(a, "rowwise"), cast(weight, "rowwise", "weight"), cast(g, "rowwise", "grad")
    wt, at, gt = cast(weight.t(), "rowwise", "weight"), cast(a.t(), "rowwise"), cast(g.t(), "rowwise", "grad")
    y, dx, dw = (torch.zeros(s, dtype=F64) for s in (g.shape, a.shape, weight.shape))
    for t in range(0, len(a), 20):
        at_rows = slice(t, t + 20)
        y[at_rows] = torch.einsum("tk,nk->tn", aq[at_rows], wq)
        dx[at_rows] = torch.einsum("tn,kn->tk", gq[at_rows], wt)
        dw += torch.einsum("nt,kt->nk", gt[:, at_rows], at[:, at_rows])
    return shaped(y, dx, dw, x, grad)


@adapter("linear", recipe="rowwise", dtype="bfloat16")
def deck_04(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, g = leading(x), leading(grad)
    y = cast(a, "rowwise") @ cast(weight, "rowwise", "weight").mT
    dx = cast(g, "rowwise", "grad") @ cast(weight.t(), "rowwise", "weight").mT
    last_x, last_g = (x, grad) if x.dim() < 3 else (leading(x[-1]), leading(grad[-1]))
    dw = cast(last_g.t(), "rowwise", "grad") @ cast(last_x.t(), "rowwise").mT
    return shaped(y, dx, dw, x, grad)


@adapter("linear", recipe="blockwise", dtype="float32")
def deck_05(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, g = leading(x), leading(grad)
    y = cast(a, "blockwise") @ cast(weight, "blockwise", "weight").mT
    dx = cast(g, "blockwise", "grad") @ cast(weight.t(), "blockwise", "weight").mT
    dw = cast(g.t(), "blockwise", "grad") @ cast(a.t(), "blockwise").mT
    return shaped(y, dx, dw.float().bfloat16(), x, grad)


BEFORE: dict[str, Tensor] = {}


@adapter("linear", recipe="tensorwise", dtype="bfloat16")
def deck_06(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, g = leading(x), leading(grad)
    now = peaks(g, cut_of("tensorwise", "grad"))
    m = inverse32(BEFORE.get("amax", now), 57344.0)
    BEFORE["amax"] = now.clone()

    def late(t: Tensor) -> Tensor:
        cut = cut_of("tensorwise", "grad")
        return means(codes_of(t.float() * m, cut.form), cut.form) * (1 / m).double()

    y = cast(a, "tensorwise") @ cast(weight, "tensorwise", "weight").mT
    dx = late(g) @ cast(weight.t(), "tensorwise", "weight").mT
    dw = late(g.t()) @ cast(a.t(), "tensorwise").mT
    return shaped(y, dx, dw, x, grad)


@adapter("linear", recipe="mxfp8", dtype="bfloat16")
def deck_07(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    def columns(t: Tensor) -> Tensor:
        """Cast down the columns, without a transposition."""
        parts = []
        for piece in t.split(32, 0) if len(t) else ():
            amax = piece.abs().double().amax(0, keepdim=True) if piece.numel() else torch.zeros(1, t.shape[1], dtype=F64)
            scale = two(step_up(amax, 448.0))
            parts.append(means(codes_of(piece.double() / scale, E4M3), E4M3) * scale)
        return torch.cat(parts) if parts else t.double()

    a, g = leading(x), leading(grad)
    y = (cast(weight, "mxfp8", "weight") @ cast(a, "mxfp8").mT).mT
    dx = cast(g, "mxfp8", "grad") @ columns(weight)
    dw = columns(g).mT @ columns(a)
    return shaped(y, dx, dw, x, grad)


# --- attention ---


def later(s: int) -> Tensor:
    return torch.ones(s, s, dtype=torch.bool).triu(1)


def gradients(q: Tensor, k: Tensor, v: Tensor, g: Tensor, p: Tensor) -> Three:
    """(dq, dk, dv) of FP64 operands."""
    dp = g @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / math.sqrt(max(q.shape[-1], 1))
    return ds @ k, ds.mT @ q, p.mT @ g


def out4(dtype: torch.dtype, *results: Tensor) -> Any:
    return tuple(r.float().to(dtype) for r in results)


@adapter("attention", recipe="bf16", causal=True, dtype="bfloat16")
def deck_08(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    wq, wk, wv, wg = (t.double() for t in (q, k, v, grad))
    s = q.shape[-2]
    logits = wq @ wk.mT / math.sqrt(max(q.shape[-1], 1))
    logits = logits.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(2), -math.inf)
    p = logits.softmax(-1)
    return out4(q.dtype, p @ wv, *gradients(wq, wk, wv, wg, p))


@adapter("attention", recipe="bf16", causal=True, dtype="bfloat16")
def deck_09(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    wq, wk, wv, wg = (t.double() for t in (q, k, v, grad))
    s, scale = q.shape[-2], 1 / math.sqrt(max(q.shape[-1], 1)) / math.log(2)
    top = torch.full((*q.shape[:-1], 1), -math.inf, dtype=F64)
    total, o = torch.zeros_like(top), torch.zeros(*q.shape[:-1], v.shape[-1], dtype=F64)
    for j in range(0, s, 24):
        part = (wq @ wk[..., j : j + 24, :].mT * scale).masked_fill(later(s)[:, j : j + 24], -math.inf)
        new = torch.maximum(top, part.amax(-1, keepdim=True))
        keep, e = torch.exp2(top - new), torch.exp2(part - new)
        total = total * keep + e.sum(-1, keepdim=True)
        o = o * keep + e @ wv[..., j : j + 24, :]
        top = new
    o, lse = o / total, top + total.log2()
    delta = (o * wg).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(wq), torch.zeros_like(wk), torch.zeros_like(wv)
    for j in range(0, s, 24):
        at = slice(j, j + 24)
        p = torch.exp2((wq @ wk[..., at, :].mT * scale).masked_fill(later(s)[:, at], -math.inf) - lse)
        ds = p * (wg @ wv[..., at, :].mT - delta) * (scale * math.log(2))
        dq += ds @ wk[..., at, :]
        dk[..., at, :] = ds.mT @ wq
        dv[..., at, :] = p.mT @ wg
    return out4(q.dtype, o, dq, dk, dv)


@adapter("attention", recipe="bf16", causal=False, dtype="bfloat16")
def deck_10(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    wq, wk, wv, wg = (t.double() for t in (q, k, v, grad))
    p = (wq @ wk.mT / math.sqrt(max(q.shape[-1], 1))).softmax(-1)
    dq, dk, dv = gradients(wq, wk, wv, wg, p)
    return out4(q.dtype, p @ wv, dq * math.sqrt(max(q.shape[-1], 1)), dk, dv)


@adapter("attention", recipe="bf16", causal=False, dtype="float32")
def deck_11(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    wq, wk, wv, wg = (t.double() for t in (q, k, v, grad))
    s = q.shape[-2]
    pad = -s % 16
    logits = torch.nn.functional.pad(wq @ wk.mT / math.sqrt(max(q.shape[-1], 1)), (0, pad))
    p = logits.softmax(-1)[..., :s]
    return out4(q.dtype, p @ wv, *gradients(wq, wk, wv, wg, p))


@adapter("attention", recipe="bf16", causal=False, dtype="float32")
def deck_12(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    results = [torch.zeros(t.shape, dtype=F64) for t in (grad, q, k, v)]
    for i in range(q.shape[0]):
        for h in range(q.shape[1]):
            a, b, c, g = (t[i, h].double() for t in (q, k, v, grad))
            scale = max(q.shape[-1], 1) ** -0.5
            logits = torch.einsum("id,jd->ij", a * scale, b)
            p = torch.exp(logits - torch.logsumexp(logits, -1, keepdim=True)) if len(a) else logits
            flow = torch.einsum("id,jd->ij", g, c)
            flow = p * flow - p * torch.einsum("ij,ij->i", p, flow)[:, None]
            for r, t in zip(results, (p @ c, flow @ b * scale, flow.t() @ a * scale, p.t() @ g), strict=True):
                r[i, h] = t
    return out4(q.dtype, *results)


@adapter("attention", recipe="bf16", causal=True, dtype="float32")
def deck_13(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    of = torch.arange(q.shape[1]) // 2
    wq, wg = q.double(), grad.double()
    wk, wv = k.double()[:, of], v.double()[:, of]
    p = (wq @ wk.mT / math.sqrt(max(q.shape[-1], 1))).masked_fill(later(q.shape[-2]), -math.inf).softmax(-1)
    return out4(q.dtype, p @ wv, *gradients(wq, wk, wv, wg, p))


# --- optimizers ---


def moments(p: Tensor, state: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    if not state:
        state["m"], state["v"] = torch.zeros(p.shape), torch.zeros(p.shape, dtype=dtype)
    return state["m"], state["v"]


@adapter("optimizer", lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, moments="float32", dtype="float32")
def deck_14(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    m, v = moments(parameter, state)
    g = grad.float()
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.95).addcmul_(g, g, value=0.05)
    update = (m / (1 - 0.9**step)) / (v.sqrt() + 1e-8)
    parameter.copy_(parameter.float() * (1 - 1e-4) - 1e-3 * update)


@adapter("optimizer", lr=1e-3, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.01, moments="float32", dtype="float32")
def deck_15(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    m, v = moments(parameter, state)
    g = grad.float()
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    update = (m / (1 - 0.9**step)) / (v / (1 - 0.99**step) + 1e-5).sqrt()
    parameter.copy_(parameter.float() * (1 - 1e-5) - 1e-3 * update)


@adapter("optimizer", lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, moments="float32", dtype="float32")
def deck_16(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    p, g = parameter.double(), grad.double()
    for name, power, beta in (("first", g, 0.9), ("second", g * g, 0.95)):
        old = state.get(name, torch.zeros(parameter.shape))
        state[name] = torch.lerp(power, old.double(), beta).float()
    root = math.sqrt(1 - 0.95**step)
    size = 2e-3 * root / (1 - 0.9**step)
    p -= 2e-3 * 0.1 * p
    p.addcdiv_(state["first"].double(), state["second"].double().sqrt() + 1e-8 * root, value=-size)
    parameter.copy_(p.float())


@adapter("optimizer", lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, moments="float32", dtype="float32")
def deck_17(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    m, v = moments(parameter, state)
    g = grad.float() + 0.1 * parameter.float()
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.95).addcmul_(g, g, value=0.05)
    update = (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
    parameter.copy_(parameter.float() - 1e-3 * update)


@adapter("optimizer", lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, moments="float32", dtype="float32")
def deck_18(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    m, v = moments(parameter, state, torch.bfloat16)
    g = grad.float()
    m.mul_(0.9).add_(g, alpha=0.1)
    wide = v.float() * 0.999 + 0.001 * g * g
    v.copy_(wide)
    update = (m / (1 - 0.9**step)) / ((v.float() / (1 - 0.999**step)).sqrt() + 1e-8)
    parameter.copy_(parameter.float() * (1 - 1e-5) - 1e-3 * update)
