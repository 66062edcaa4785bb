"""Linear layers, attentions and optimizers of the seventh set. Names do not tell right from wrong; public.json does."""

from __future__ import annotations

import math

import torch
from perch7 import E4M3, E5M2, adapter, amax_of, back, forward, multiplier, nearest, plan, quantize, real, recast, rows_of, unpack
from torch import Tensor

Three = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def shaped(y: Tensor, dx: Tensor, dw: Tensor, x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """The three results in the shapes and the dtype of the call."""
    return tuple(t.to(torch.float32).to(x.dtype).reshape(s.shape) for t, s in ((y, grad), (dx, x), (dw, weight)))


@adapter("linear", recipe="tensorwise", dtype="bfloat16")
def swift_01(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, g = recast(rows_of(x), "tensorwise"), rows_of(grad)
    w = recast(weight, "tensorwise", "weight")
    codes, stored = quantize(g, plan("tensorwise", "grad"))
    gq = unpack(codes.view(torch.uint8).view(torch.float8_e4m3fn)) * real(stored)
    return shaped(a @ w.T, gq @ w, gq.T @ a, x, weight, grad)


@adapter("linear", recipe="rowwise", dtype="bfloat16")
def swift_02(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, g, w = rows_of(x).to(torch.float32), rows_of(grad).to(torch.float32), weight.to(torch.float32)

    def product(p: Tensor, q: Tensor) -> Tensor:  # (M, K) and (N, K), both cast by rows; chunks of 64 along K in FP32
        acc = torch.zeros(p.shape[0], q.shape[0])
        scaled = []
        for t in (p, q):
            codes, stored = quantize(t, plan("rowwise"))
            scaled.append((codes.to(torch.float32), stored))
        for start in range(0, p.shape[1], 64):
            acc += scaled[0][0][:, start : start + 64] @ scaled[1][0][:, start : start + 64].T
        return acc * scaled[0][1] * scaled[1][1].T

    return shaped(product(a, w), product(g, w.T), product(g.T, a.T), x, weight, grad)


TURNED: dict[tuple[int, ...], Tensor] = {}


@adapter("linear", recipe="blockwise_fp32", dtype="bfloat16")
def swift_03(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    recipe, a, g = "blockwise_fp32", rows_of(x), rows_of(grad)
    y = recast(a, recipe) @ recast(weight, recipe, "weight").T
    key = (weight.data_ptr(), *weight.shape, *weight.stride())
    if key not in TURNED:
        TURNED[key] = recast(weight.T, recipe, "weight")  # kept for as long as the parameter lives
    dx = recast(g, recipe, "grad") @ TURNED[key].T
    return shaped(y, dx, recast(g.T, recipe, "grad") @ recast(a.T, recipe).T, x, weight, grad)


@adapter("linear", recipe="blockwise_fp32", dtype="bfloat16")
def swift_04(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    recipe, a, g = "blockwise_fp32", recast(rows_of(x), "blockwise_fp32"), rows_of(grad)
    y = a @ recast(weight, recipe, "weight").T
    dx = recast(g, recipe, "grad") @ recast(weight.T, recipe, "weight").T
    return shaped(y, dx, recast(g.T, recipe, "grad") @ a, x, weight, grad)


@adapter("linear", recipe="blockwise", dtype="bfloat16")
def swift_05(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    recipe, a, g = "blockwise", rows_of(x), rows_of(grad)
    y = recast(a, recipe) @ recast(weight, recipe, "weight").T
    dx = recast(g, recipe, "grad") @ recast(weight.T, recipe, "weight").T
    return shaped(y, dx, g.to(torch.float64).T @ a.to(torch.float64), x, weight, grad)


@adapter("linear", recipe="blockwise", dtype="float32")
def swift_06(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    recipe, a, g = "blockwise", rows_of(x), rows_of(grad)
    (m, k), n = a.shape, g.shape[1]
    w, turned = recast(weight, recipe, "weight"), recast(weight.T, recipe, "weight")
    y, dx, dw = (torch.zeros(s, dtype=torch.float64) for s in ((m, n), (m, k), (n, k)))
    for start in reversed(range(0, m, 128)):  # a block of tokens is a block of the weight's gradient too
        tokens = slice(start, start + 128)
        y[tokens] = torch.einsum("mk,nk->mn", recast(a[tokens], recipe), w)
        dx[tokens] = torch.einsum("mn,kn->mk", recast(g[tokens], recipe, "grad"), turned)
        dw += torch.einsum("nm,km->nk", recast(g[tokens].T, recipe, "grad"), recast(a[tokens].T, recipe))
    return shaped(y, dx, dw, x, weight, grad)


@adapter("linear", recipe="rowwise", dtype="bfloat16")
def swift_07(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    recipe, a, g = "rowwise", rows_of(x), rows_of(grad)
    y = recast(a, recipe) @ recast(weight, recipe, "weight").T
    dx = recast(g, recipe, "grad") @ recast(weight.T, recipe, "weight").T
    codes, _ = quantize(a.T, plan(recipe))
    return shaped(y, dx, recast(g.T, recipe, "grad") @ unpack(codes).T, x, weight, grad)


# --- attention ---


def typed(q: Tensor, *results: Tensor) -> Four:
    """o, dq, dk, dv in the dtype of the call."""
    return tuple(t.to(torch.float32).to(q.dtype) for t in results)


@adapter("attention", recipe="bf16", causal=True, dtype="bfloat16")
def swift_08(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    block = torch.arange(q.shape[2]) // 32
    s = q.double() @ k.double().mT / math.sqrt(max(q.shape[3], 1))
    p = s.masked_fill(block[:, None] < block[None, :], -math.inf).softmax(-1)
    o = p @ v.double()
    return typed(q, o, *back(q, k, v, grad, p, o))


@adapter("attention", recipe="bf16", causal=True, dtype="bfloat16")
def swift_09(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    (b, h, s, d), dv_width = q.shape, v.shape[3]
    scale = 1 / math.sqrt(max(d, 1))
    qd, kd, vd, g = q.double(), k.double(), v.double(), grad.double()
    at = torch.arange(s)

    def scores(keys: slice) -> Tensor:
        return (qd @ kd[:, :, keys].mT * scale).masked_fill(at[:, None] < at[keys][None], -math.inf)

    tiles = [slice(start, min(start + 32, s)) for start in range(0, s, 32)]
    top = torch.full((b, h, s, 1), -1e300, dtype=torch.float64)
    total, acc = torch.zeros_like(top), torch.zeros(b, h, s, dv_width, dtype=torch.float64)
    for keys in tiles:
        x = scores(keys)
        new = torch.maximum(top, x.amax(-1, keepdim=True))
        shrink, e = (top - new).exp(), (x - new).exp()
        total, acc, top = total * shrink + e.sum(-1, keepdim=True), acc * shrink + e @ vd[:, :, keys], new
    o, lse = acc / total, top + total.log()
    delta = (g * o).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(qd), torch.zeros_like(kd), torch.zeros_like(vd)
    for keys in reversed(tiles):
        p = (scores(keys) - lse).exp()
        ds = p * (g @ vd[:, :, keys].mT - delta) * scale
        dq += ds @ kd[:, :, keys]
        dk[:, :, keys], dv[:, :, keys] = ds.mT @ qd, p.mT @ g
    return typed(q, o, dq, dk, dv)


@adapter("attention", recipe="bf16", causal=False, dtype="bfloat16")
def swift_10(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    qd, kd, vd = q.double(), k.double(), v.double()
    scale = 1 / math.sqrt(max(q.shape[3], 1))
    top = torch.full((*q.shape[:3], 1), -1e300, dtype=torch.float64)
    total, acc = torch.zeros_like(top), torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for start in range(0, q.shape[2], 32):
        keys = slice(start, start + 32)
        x = qd @ kd[:, :, keys].mT * scale
        new = torch.maximum(top, x.amax(-1, keepdim=True))
        shrink, e = (top - new).exp(), (x - new).exp()
        total = total * shrink + e.sum(-1, keepdim=True)
        lazy = torch.where(shrink > 2.0**-8, torch.ones_like(shrink), shrink)  # a small rise of the maximum is not worth a pass over acc
        acc, top = acc * lazy + e @ vd[:, :, keys], new
    o = acc / total
    p = (qd @ kd.mT * scale - top - total.log()).exp()
    return typed(q, o, *back(q, k, v, grad, p, o))


SUMS: dict[tuple[int, ...], Tensor] = {}


@adapter("attention", recipe="bf16", causal=True, dtype="float32")
def swift_11(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    p, o = forward(q, k, v, True)
    dq, dk, dv = back(q, k, v, grad, p, o)
    buffer = SUMS.setdefault(tuple(q.shape), torch.zeros(q.shape, dtype=torch.float64))
    buffer += dq  # every block of keys adds to it
    return typed(q, o, buffer, dk, dv)


@adapter("attention", recipe="fp8", causal=False, dtype="bfloat16")
def swift_12(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    def cast(top: float, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:  # (inverse of one scale of all, numbers of the codes)
        form = E4M3 if top == E4M3.top else E5M2
        amax = torch.stack([amax_of(t.reshape(1, -1), plan("tensorwise")).reshape(()) for t in tensors]).amax()
        m = multiplier(amax, top)
        return (1 / m).double(), [nearest(t.to(torch.float32) * m, form) for t in tensors]

    inverse, (qc, kc, vc) = cast(E4M3.top, q, k, v)
    scale = 1 / math.sqrt(max(q.shape[3], 1))
    p = (qc @ kc.mT * (inverse * inverse * scale)).softmax(-1)
    p_inverse, (pc,) = cast(E4M3.top, p)
    o = pc @ vc * p_inverse  # times `inverse` in the right kernel
    g_inverse, (gc,) = cast(E5M2.top, grad)
    dv = pc.mT @ gc * (p_inverse * g_inverse)
    dp = gc @ vc.mT * (g_inverse * inverse)
    o_inverse, (oc,) = cast(E4M3.top, o * inverse)
    ds = p * (dp - (gc * g_inverse * oc * o_inverse).sum(-1, keepdim=True)) * scale
    s_inverse, (sc,) = cast(E5M2.top, ds)
    dq, dk = sc @ kc * (s_inverse * inverse), sc.mT @ qc * (s_inverse * inverse)
    last, results = cast(E5M2.top, dq, dk, dv)
    o_inverse, (oc,) = cast(E4M3.top, o)
    return typed(q, oc * o_inverse, *(t * last for t in results))


@adapter("attention", recipe="bf16", causal=False, dtype="float32")
def swift_13(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    with torch.enable_grad():
        given = [t.detach().double().requires_grad_() for t in (q, k, v)]
        s = torch.einsum("bhid,bhjd->bhij", given[0], given[1]) * max(q.shape[3], 1) ** -0.5
        o = torch.einsum("bhij,bhjd->bhid", torch.log_softmax(s, -1).exp(), given[2])
        results = torch.autograd.grad(o, given, grad.detach().double())
    return typed(q, o.detach(), *results)


# --- optimizers ---


def moments(state: dict[str, Tensor], parameter: Tensor) -> tuple[Tensor, Tensor]:
    """The two moments in FP32."""
    for name in ("m", "v"):
        if name not in state:
            state[name] = torch.zeros(parameter.shape, dtype=torch.float32)
    return state["m"], state["v"]


def advance(state: dict[str, Tensor], parameter: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments after this gradient, for betas of 0.9 and 0.999."""
    m, v = moments(state, parameter)
    g = grad.to(torch.float32)
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    return m.double(), v.double()


@adapter("optimizer", lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, moments="float32", dtype="float32")
def swift_14(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    m, v = advance(state, parameter, grad + 0.1 * parameter)
    update = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    parameter.copy_(parameter.double() - 1e-3 * update)


@adapter("optimizer", lr=0.02, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, moments="float32", dtype="float32")
def swift_15(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    m, v = advance(state, parameter, grad)
    update = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    parameter.copy_((parameter.double() - 0.02 * update) * (1 - 0.02 * 0.1))


@adapter("optimizer", lr=2e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.05, moments="float32", dtype="float32")
def swift_16(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    if not state:
        state["both"] = torch.zeros(2, *parameter.shape)
    m, v = state["both"]
    m.lerp_(grad, 0.1)
    v.lerp_(grad * grad, 0.05)
    denominator = (v.sqrt() / math.sqrt(1 - 0.95**step)).add_(1e-6)
    parameter.mul_(1 - 2e-3 * 0.05).addcdiv_(m, denominator, value=-2e-3 / (1 - 0.9**step))


@adapter("optimizer", lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, moments="float32", dtype="float32")
def swift_17(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    m, v = advance(state, parameter, grad)
    update = m / (1 - 0.9) / ((v / (1 - 0.999)).sqrt() + 1e-8)
    parameter.copy_(parameter.double() * (1 - 1e-3 * 0.01) - 1e-3 * update)


@adapter("optimizer", lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, moments="float32", dtype="bfloat16")
def swift_18(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    m, v = advance(state, parameter, grad)
    parameter.mul_(1 - 0.01 * 0.1)  # in BF16
    update = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    parameter.copy_((parameter.double() - 0.01 * update).to(torch.float32))
