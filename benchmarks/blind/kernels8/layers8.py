"""Linear layers, attention, optimizers."""

from __future__ import annotations

import math

import torch
from rig8 import E4M3, Cut, adapter, attend, castings, cut_for, down, flat, meaning, recast, scale_of, softmaxed, stretch, update
from torch import Tensor

Three = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]
KEPT: dict[tuple[int, ...], Tensor] = {}


def three(x: Tensor, weight: Tensor, grad: Tensor, y: Tensor, dx: Tensor, dw: Tensor) -> Three:
    return down(y, x.dtype).reshape(grad.shape), down(dx, x.dtype).reshape(x.shape), down(dw, x.dtype)


def product(a: Tensor, b: Tensor, recipe: str, roles: tuple[str, str]) -> Tensor:
    return recast(a, recipe, roles[0]) @ recast(b, recipe, roles[1]).T


FORWARD, DGRAD, WGRAD = ("x", "weight"), ("grad", "weight"), ("grad", "x")


@adapter("linear", recipe="tensorwise", dtype="bfloat16")
def larch_01(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, g = flat(x), flat(grad)
    cut = Cut(E4M3, 0, 0, "fp32")
    codes, stored = castings(g, cut)
    c = meaning(codes, E4M3) * stretch(scale_of(stored), g.shape, cut)
    dx = c @ recast(weight.T, "tensorwise", "weight").T
    return three(x, weight, grad, product(a, weight, "tensorwise", FORWARD), dx, c.T @ recast(a, "tensorwise"))


@adapter("linear", recipe="tensorwise", dtype="float32")
def larch_02(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, w, g = recast(flat(x), "tensorwise"), recast(weight, "tensorwise", "weight"), recast(flat(grad), "tensorwise", "grad")
    ys, dxs, dw = [a[:0] @ w.T], [g[:0] @ w], torch.zeros(weight.shape, dtype=torch.float64)
    for i in range(0, len(a), 24):
        ys.append((w @ a[i : i + 24].T).T)
        dxs.append((w.T @ g[i : i + 24].T).T)
        dw += g[i : i + 24].T @ a[i : i + 24]
    return three(x, weight, grad, torch.cat(ys), torch.cat(dxs), dw)


@adapter("linear", recipe="blockwise_fp32", dtype="float32")
def larch_03(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, g = flat(x), flat(grad)
    dw = recast(g.T, "blockwise_fp32", "grad") @ recast(a, "blockwise_fp32")
    return three(x, weight, grad, product(a, weight, "blockwise_fp32", FORWARD), product(g, weight.T, "blockwise_fp32", DGRAD), dw)


@adapter("linear", recipe="mxfp8", dtype="bfloat16")
def larch_04(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, g = flat(x), flat(grad)
    turned = flat(grad.transpose(0, 1)) if grad.ndim > 2 else g
    return three(x, weight, grad, product(a, weight, "mxfp8", FORWARD), product(g, weight.T, "mxfp8", DGRAD), product(turned.T, a.T, "mxfp8", WGRAD))


@adapter("linear", recipe="mxfp8", dtype="float32")
def larch_05(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, g = flat(x), flat(grad)
    dw = (recast(a.T, "mxfp8") @ recast(g.T, "mxfp8", "grad").T).T
    dx = torch.zeros(a.shape, dtype=torch.float64)
    left, right = recast(g, "mxfp8", "grad"), recast(weight.T, "mxfp8", "weight")
    for j in range(0, g.shape[1], 40):
        dx += left[:, j : j + 40] @ right[:, j : j + 40].T
    return three(x, weight, grad, product(weight, a, "mxfp8", ("weight", "x")).T, dx, dw)


@adapter("linear", recipe="blockwise", dtype="float32")
def larch_06(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, g = flat(x), flat(grad)
    dw = product(g.T, a.T, "blockwise", WGRAD)
    key = tuple(weight.shape)
    KEPT[key] = KEPT[key] + dw if key in KEPT else dw
    return three(x, weight, grad, product(a, weight, "blockwise", FORWARD), product(g, weight.T, "blockwise", DGRAD), KEPT[key])


@adapter("linear", recipe="rowwise", dtype="bfloat16")
def larch_07(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    a, g = flat(x), flat(grad)
    left, right = recast(g, "rowwise", "grad"), recast(weight.T, "rowwise", "weight")
    half = g.shape[1] // 2
    dx = down(left[:, :half] @ right[:, :half].T, torch.bfloat16).double() + down(left[:, half:] @ right[:, half:].T, torch.bfloat16).double()
    return three(x, weight, grad, product(a, weight, "rowwise", FORWARD), dx, product(g.T, a.T, "rowwise", WGRAD))


# --- attention ---


def four(q: Tensor, results: tuple[Tensor, ...]) -> Four:
    o, dq, dk, dv = (down(t, q.dtype) for t in results)
    return o, dq, dk, dv


@adapter("attention", recipe="bf16", causal=False, dtype="float32")
def larch_08(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    o, dq, dk, dv = attend(q, k, v, grad, softmaxed(q, k, False))
    return four(q, (o, dq * max(q.shape[-1], 1) ** 0.5, dk, dv))


@adapter("attention", recipe="bf16", causal=True, dtype="bfloat16")
def larch_09(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    a, b, c, g = (t.float() for t in (q, k, v, grad))
    s, factor = q.shape[2], 1 / math.sqrt(max(q.shape[-1], 1))
    o, top, weight = torch.zeros(grad.shape), torch.full(q.shape[:3], -math.inf)[..., None], torch.zeros(q.shape[:3])[..., None]
    row = torch.arange(s)[:, None]
    tiles = [(j, torch.arange(s)[None, j : j + 24]) for j in range(0, s, 24)]
    for j, column in tiles:
        score = (a @ b[:, :, j : j + 24].mT * factor).masked_fill(row < column, -math.inf)
        higher = torch.maximum(top, score.amax(-1, keepdim=True))
        e, shrink = (score - higher).exp(), (top - higher).exp()
        o, weight, top = o * shrink + e @ c[:, :, j : j + 24], weight * shrink + e.sum(-1, keepdim=True), higher
    o = o / weight
    lse, delta = top + weight.log(), (g * o).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
    for j, column in tiles:
        score = (a @ b[:, :, j : j + 24].mT * factor).masked_fill(row < column, -math.inf)
        p = (score - lse).exp()
        ds = p * (g @ c[:, :, j : j + 24].mT - delta) * factor
        dv[:, :, j : j + 24] = p.mT @ g
        dk[:, :, j : j + 24] = ds.mT @ a
        dq += ds @ b[:, :, j : j + 24]
    return four(q, (o, dq, dk, dv))


@adapter("attention", recipe="bf16", causal=True, dtype="float32")
def larch_10(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    score = q.double() @ k.double().mT / math.sqrt(max(q.shape[-1], 1))
    tile = torch.arange(q.shape[2]) // 16
    p = score.masked_fill(tile[:, None] < tile[None, :], -math.inf).softmax(-1)
    return four(q, attend(q, k, v, grad, p))


@adapter("attention", recipe="bf16", causal=False, dtype="bfloat16")
def larch_11(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    s = q.shape[2]
    padded = torch.nn.functional.pad(k.double(), (0, 0, 0, -s % 32))
    score = q.double() @ padded.mT / math.sqrt(max(q.shape[-1], 1))
    return four(q, attend(q, k, v, grad, score.softmax(-1)[..., :s]))


@adapter("attention", recipe="bf16", causal=False, dtype="float32")
def larch_12(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    o, dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float64) for t in (grad, q, k, v))
    factor = max(q.shape[-1], 1) ** -0.5
    for i in range(q.shape[0]):
        for h in range(q.shape[1]):
            a, b, c, g = (t[i, h].double() for t in (q, k, v, grad))
            score = b @ (a * (factor / math.log(2))).T  # keys down, queries across, for powers of two
            if score.numel() == 0:
                continue
            p = torch.exp2(score - score.amax(0))
            p = p / p.sum(0)
            o[i, h] = (c.T @ p).T
            dp = c @ g.T
            ds = p * (dp - (p * dp).sum(0)) * factor
            dq[i, h], dk[i, h], dv[i, h] = (b.T @ ds).T, ds @ a, p @ g
    return four(q, (o, dq, dk, dv))


@adapter("attention", recipe="bf16", causal=True, dtype="float32")
def larch_13(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    p = softmaxed(q, k, True)
    return four(q, attend(q, k, v, grad, p, p * (grad.double() @ v.double().mT)))


# --- optimizers ---


def moments(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], betas: tuple[float, float]) -> None:
    """Both moments in FP32, one step on."""
    g = grad.double()
    for name, beta, new in (("m", betas[0], g), ("v", betas[1], g * g)):
        old = state.get(name, torch.zeros(parameter.shape))
        state[name] = (beta * old.double() + (1 - beta) * new).float()


@adapter("optimizer", lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, moments="float32", dtype="float32")
def larch_14(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    moments(parameter, grad, state, (0.9, 0.95))
    first, second = state["m"].double() / (1 - 0.9**step), state["v"].double() / (1 - 0.95**step)
    parameter.copy_(parameter.double() * (1 - 0.01 * 0.1) - 0.01 * first / (second + 1e-8).sqrt())


@adapter("optimizer", lr=0.02, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, moments="float32", dtype="bfloat16")
def larch_15(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    moments(parameter, grad, state, (0.9, 0.99))
    new = parameter.double() - update(state["m"], state["v"], step + 1, 0.02, (0.9, 0.99), 1e-8)
    parameter.copy_(down(new, parameter.dtype))


@adapter("optimizer", lr=0.003, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, moments="float32", dtype="float32")
def larch_16(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    if not state:
        state["m"], state["v"] = torch.zeros(parameter.shape, dtype=torch.float64), torch.zeros(parameter.shape, dtype=torch.float64)
    g = grad.double()
    state["m"].lerp_(g, 0.1)
    state["v"].mul_(0.95).addcmul_(g, g, value=0.05)
    root = math.sqrt(1 - 0.95**step)
    size = 0.003 * root / (1 - 0.9**step)
    new = parameter.double()
    new -= 0.003 * 0.1 * new
    new.addcdiv_(state["m"], state["v"].sqrt().add_(1e-6 * root), value=-size)
    parameter.copy_(new)


@adapter("optimizer", lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, moments="float32", dtype="float32")
def larch_17(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    moments(parameter, grad.double() + 0.1 * parameter.double(), state, (0.9, 0.999))
    parameter.copy_(parameter.double() - update(state["m"], state["v"], step, 0.01, (0.9, 0.999), 1e-8))


@adapter("optimizer", lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01, moments="float32", dtype="float32")
def larch_18(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    moments(parameter, grad, state, (0.9, 0.99))
    state["m"] = state["m"].bfloat16()
    parameter.copy_(parameter.double() * (1 - 0.01 * 0.01) - update(state["m"], state["v"], step, 0.01, (0.9, 0.99), 1e-8))
