"""Linear layers, attention, optimizers."""

from __future__ import annotations

import math
from typing import Any

import torch
from bench9 import F8, F64, Form, adapter, flat, mean, quantize, recast, softmax_back, softmax_forward
from torch import Tensor

Three = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def fit(t: Tensor, like: Tensor) -> Tensor:
    return t.to(torch.float32).to(like.dtype).reshape(like.shape)


def fprop(x: Tensor, w: Tensor, recipe: str) -> Tensor:
    return recast(flat(x), recipe) @ recast(w, recipe, "weight").t()


def dgrad(g: Tensor, w: Tensor, recipe: str) -> Tensor:
    return recast(flat(g), recipe, "grad") @ recast(w.t(), recipe, "weight").t()


def wgrad(g: Tensor, x: Tensor, recipe: str) -> Tensor:
    return recast(flat(g).t(), recipe, "grad") @ recast(flat(x).t(), recipe).t()


@adapter("linear", recipe="tensorwise", dtype="bfloat16")
def gneiss_01(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    f = Form(F8, 0, 0, "fp32")
    g = mean(*quantize(flat(grad), f), f)
    dx, dw = g @ recast(weight, "tensorwise", "weight"), g.t() @ recast(flat(x), "tensorwise")
    return fit(fprop(x, weight, "tensorwise"), grad), fit(dx, x), fit(dw, weight)


@adapter("linear", recipe="blockwise", dtype="bfloat16")
def gneiss_02(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    dw = recast(flat(grad).t(), "blockwise", "grad") @ flat(x).to(F64)
    return fit(fprop(x, weight, "blockwise"), grad), fit(dgrad(grad, weight, "blockwise"), x), fit(dw, weight)


@adapter("linear", recipe="mxfp8", dtype="float32")
def gneiss_03(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, w = recast(flat(x), "mxfp8"), recast(weight, "mxfp8", "weight")
    y = torch.cat([w[n : n + 24] @ a.t() for n in range(0, w.shape[0], 24)]).t() if w.shape[0] else torch.zeros(a.shape[0], 0)
    g, t = recast(flat(grad).t(), "mxfp8", "grad"), recast(flat(x).t(), "mxfp8")
    dw = torch.zeros(weight.shape, dtype=F64)
    for s in range(0, g.shape[1], 32):
        dw += g[:, s : s + 32] @ t[:, s : s + 32].t()
    c, v = recast(flat(grad), "mxfp8", "grad"), recast(weight.t(), "mxfp8", "weight")
    return fit(y, grad), fit((v @ c.t()).t(), x), fit(dw, weight)


@adapter("linear", recipe="rowwise", dtype="bfloat16")
def gneiss_04(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    dw = recast(flat(grad).t(), "rowwise", "grad") @ recast(flat(x), "rowwise")
    return fit(fprop(x, weight, "rowwise"), grad), fit(dgrad(grad, weight, "rowwise"), x), fit(dw, weight)


@adapter("linear", recipe="mxfp8", dtype="float32")
def gneiss_05(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    g, t = recast(flat(grad).t(), "mxfp8", "grad"), recast(flat(x).t(), "mxfp8")
    dw = torch.zeros(weight.shape, dtype=torch.bfloat16)
    for s in range(0, g.shape[1], 32):
        dw += (g[:, s : s + 32] @ t[:, s : s + 32].t()).to(torch.bfloat16)
    return fit(fprop(x, weight, "mxfp8"), grad), fit(dgrad(grad, weight, "mxfp8"), x), fit(dw, weight)


@adapter("linear", recipe="tensorwise", dtype="float32")
def gneiss_06(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    turned = x.transpose(0, 1) if x.dim() > 2 else x
    dw = wgrad(grad, turned, "tensorwise")
    return fit(fprop(x, weight, "tensorwise"), grad), fit(dgrad(grad, weight, "tensorwise"), x), fit(dw, weight)


@adapter("linear", recipe="blockwise", dtype="bfloat16")
def gneiss_07(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, w = recast(flat(x), "blockwise"), recast(weight, "blockwise", "weight")
    y = torch.einsum("tk,nk->tn", a.flip(1), w.flip(1))
    c = recast(flat(grad), "blockwise", "grad")
    dx = torch.zeros(a.shape, dtype=F64)
    for n in range(0, w.shape[0], 48):
        dx += c[:, n : n + 48] @ w[n : n + 48]
    return fit(y, grad), fit(dx, x), fit(wgrad(grad, x, "blockwise"), weight)


# --- attention ---


def out(values: tuple[Tensor, ...], dtype: torch.dtype) -> Any:
    return tuple(v.to(torch.float32).to(dtype) for v in values)


@adapter("attention", recipe="bf16", causal=False, dtype="bfloat16")
def gneiss_08(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    p, o = softmax_forward(q, k, v, False)
    dq, dk, dv = softmax_back(q, k, v, grad, p, o)
    return out((o, dq, dk * math.sqrt(max(q.shape[-1], 1)), dv), q.dtype)


@adapter("attention", recipe="bf16", causal=True, dtype="bfloat16")
def gneiss_09(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    o = softmax_forward(q, k, v, True)[1]
    s = q.to(F64) @ k.to(F64).mT / math.sqrt(max(q.shape[-1], 1))
    keep = torch.ones(s.shape[-2:], dtype=torch.bool)
    lse = s.masked_fill(keep.triu(1), -math.inf).logsumexp(-1, keepdim=True)
    p = (s - lse).exp().masked_fill(keep.triu(2), 0.0)
    return out((o, *softmax_back(q, k, v, grad, p, o)), q.dtype)


@adapter("attention", recipe="bf16", causal=False, dtype="bfloat16")
def gneiss_10(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    n = q.shape[-2]
    more = -n % 16
    s = torch.nn.functional.pad(q.to(F64) @ k.to(F64).mT / math.sqrt(max(q.shape[-1], 1)), (0, more))
    p = s.softmax(-1)[..., :n]
    o = p @ v.to(F64)
    return out((o, *softmax_back(q, k, v, grad, p, o)), q.dtype)


@adapter("attention", recipe="bf16", causal=False, dtype="float32")
def gneiss_11(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    q64, k64, v64, g = (t.to(F64) for t in (q, k, v, grad))
    n, by = q.shape[-2], 1 / math.sqrt(max(q.shape[-1], 1))
    high = torch.full((*q.shape[:-1], 1), -math.inf, dtype=F64)
    total, o = torch.zeros_like(high), torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=F64)
    for j in range(0, n, 16):
        s = q64 @ k64[..., j : j + 16, :].mT * by
        now = torch.maximum(high, s.amax(-1, keepdim=True))
        old, e = (high - now).exp(), (s - now).exp()
        total, o, high = total * old + e.sum(-1, keepdim=True), o * old + e @ v64[..., j : j + 16, :], now
    o = o / total
    dq, dk, dv = torch.zeros_like(q64), torch.zeros_like(k64), torch.zeros_like(v64)
    for j in range(0, n, 16):
        cut = slice(j, j + 16)
        p = (q64 @ k64[..., cut, :].mT * by - high).exp() / total
        ds = p * ((g @ v64[..., cut, :].mT) - (g * o).sum(-1, keepdim=True)) * by
        dq += ds @ k64[..., cut, :]
        dk[..., cut, :], dv[..., cut, :] = ds.mT @ q64, p.mT @ g
    return out((o, dq, dk, dv), q.dtype)


@adapter("attention", recipe="bf16", causal=True, dtype="bfloat16")
def gneiss_12(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    pick = torch.arange(q.shape[1]) // 2
    k2, v2 = k[:, pick], v[:, pick]
    p, o = softmax_forward(q, k2, v2, True)
    return out((o, *softmax_back(q, k2, v2, grad, p, o)), q.dtype)


@adapter("attention", recipe="bf16", causal=True, dtype="bfloat16")
def gneiss_13(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    q64, k64, v64, g = (t.to(F64) for t in (q, k, v, grad))
    by = 1 / math.sqrt(max(q.shape[-1], 1))
    o = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=F64)
    dq, dk, dv = torch.zeros_like(q64), torch.zeros_like(k64), torch.zeros_like(v64)
    for i in range(q.shape[-2]):
        row, keys, values = q64[..., i : i + 1, :], k64[..., : i + 1, :], v64[..., : i + 1, :]
        p = (row @ keys.mT * by).softmax(-1)
        o[..., i : i + 1, :] = p @ values
        dp = g[..., i : i + 1, :] @ values.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * by
        dq[..., i : i + 1, :] = ds @ keys
        dk[..., : i + 1, :] += ds.mT @ row
        dv[..., : i + 1, :] += p.mT @ g[..., i : i + 1, :]
    return out((o, dq, dk, dv), q.dtype)


# --- optimizers ---

FACTS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "moments": "float32"}
LR, B1, B2, EPS, DECAY = 0.01, 0.9, 0.99, 1e-6, 0.1


def moments(grad: Tensor, state: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = grad.to(F64)
    for name, beta, term in (("m", B1, g), ("v", B2, g * g)):
        old = state.get(name, torch.zeros(grad.shape, dtype=dtype)).to(F64)
        state[name] = (beta * old + (1 - beta) * term).to(torch.float32).to(dtype)
    return state["m"].to(F64), state["v"].to(F64)


@adapter("optimizer", **FACTS, dtype="bfloat16")
def gneiss_14(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    m, v = moments(grad, state)
    n = step + 1
    update = LR * (m / (1 - B1**n)) / ((v / (1 - B2**n)).sqrt() + EPS)
    parameter.copy_((parameter.to(F64) * (1 - LR * DECAY) - update).to(torch.float32))


@adapter("optimizer", **FACTS, dtype="float32")
def gneiss_15(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    m, v = moments(grad, state)
    update = LR * (m / (1 - B1**step)) / ((v / (1 - B2**step)).sqrt() + EPS)
    parameter.copy_((parameter.to(F64) - update) * (1 - LR * DECAY))


@adapter("optimizer", **FACTS, dtype="float32")
def gneiss_16(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    g = grad.to(torch.float32)
    if not state:
        state.update(first=torch.zeros_like(g), second=torch.zeros_like(g))
    state["first"].mul_(B1).add_(g)
    state["second"].mul_(B2).addcmul_(g, g)
    one, two = (sum(beta**i for i in range(step)) for beta in (B1, B2))
    mean_of, spread_of = state["first"].to(F64) / one, (state["second"].to(F64) / two).sqrt()
    parameter.copy_(parameter.to(F64).mul(1 - LR * DECAY).addcdiv(mean_of, spread_of + EPS, value=-LR))


@adapter("optimizer", **FACTS, dtype="float32")
def gneiss_17(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    m, v = moments(grad, state, torch.bfloat16)
    update = LR * (m / (1 - B1**step)) / ((v / (1 - B2**step)).sqrt() + EPS)
    parameter.copy_(parameter.to(F64) * (1 - LR * DECAY) - update)


@adapter("optimizer", **FACTS, dtype="float32")
def gneiss_18(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    m, v = moments(grad, state)
    by = LR * math.sqrt(1 - B2**step) / (1 - B1**step)
    parameter.copy_(parameter.to(F64) * (1 - LR * DECAY) - by * m / (v.sqrt() + EPS))
