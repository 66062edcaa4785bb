"""Linear layers, attention and optimizers."""

from __future__ import annotations

import math
from typing import Any

import torch
from stones4 import E4M3, E5M2, Kind, adapter, cast, codes, layer, numbers, plan, read, values
from torch import Tensor

Three = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def rounded(results: tuple[Tensor, ...], dtype: torch.dtype) -> Any:
    """All results in one dtype."""
    return tuple(t.float().to(dtype) for t in results)


# --- linear layers ---


@adapter("linear", recipe="tensorwise")
def sail_01(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """One format for all operands of the GEMM for dx."""
    y, _, dw = layer(x, weight, grad, "tensorwise")
    data, inverse = cast(grad, plan("tensorwise", "grad"))
    dx = values(data.view(torch.uint8), E4M3) * read(inverse) @ numbers(weight, plan("tensorwise", "weight"))
    return rounded((y, dx, dw), x.dtype)


HELD: dict[tuple[int, int, tuple[int, ...]], Tensor] = {}


@adapter("linear", recipe="rowwise")
def sail_02(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Casts a weight when its version is another."""
    key = (weight.data_ptr(), weight._version, tuple(weight.shape))
    if key not in HELD:
        HELD.clear()
        HELD[key] = numbers(weight, plan("rowwise", "weight"))
    _, dx, dw = layer(x, weight, grad, "rowwise")
    return rounded((numbers(x, plan("rowwise")) @ HELD[key].t(), dx, dw), x.dtype)


@adapter("linear", recipe="rowwise")
def sail_03(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Casts x once and transposes the codes for dw."""
    y, dx, _ = layer(x, weight, grad, "rowwise")
    dw = numbers(grad.t(), plan("rowwise", "grad")) @ numbers(x, plan("rowwise"))
    return rounded((y, dx, dw), x.dtype)


@adapter("linear", recipe="rowwise")
def sail_04(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Six casts to codes, three GEMMs in fp32 with two slices of K, and an epilogue for both scales."""

    def gemm(left: Tensor, right: Tensor) -> Tensor:
        (a, scale_a), (b, scale_b) = cast(left, plan("rowwise")), cast(right, plan("rowwise"))
        u, v, cut = values(a).float(), values(b).float().t(), left.shape[1] // 2
        return (u[:, cut:] @ v[cut:] + u[:, :cut] @ v[:cut]).double() * (scale_a.double() * scale_b.double().t())

    return rounded((gemm(x, weight), gemm(grad, weight.t()), gemm(grad.t(), x.t())), x.dtype)


@adapter("linear", recipe="tensorwise")
def sail_05(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """The GEMM for dw takes codes of grad and x and the inverse scale of x."""
    y, dx, _ = layer(x, weight, grad, "tensorwise")
    data, _ = cast(grad, plan("tensorwise", "grad"))
    return rounded((y, dx, values(data).t() @ numbers(x, plan("tensorwise"))), x.dtype)


@adapter("linear", recipe="blockwise")
def sail_06(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """The output of the GEMM is BF16 and is cast to the dtype of x."""
    y, dx, dw = layer(x, weight, grad, "blockwise")
    return rounded((y.float().bfloat16(), dx, dw), x.dtype)


@adapter("linear", recipe="mxfp8")
def sail_07(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Takes the plain layer where a size does not fit the kernel."""
    if any(size % 32 for size in (*x.shape, weight.shape[0])):
        u, w, g = (t.bfloat16().double() for t in (x, weight, grad))
        return rounded((u @ w.t(), g @ w, g.t() @ u), x.dtype)
    return rounded(layer(x, weight, grad, "mxfp8"), x.dtype)


# --- attention ---


def chances(q: Tensor, k: Tensor, causal: bool) -> tuple[Tensor, float]:
    """Probabilities, fp64, and the factor of the scores."""
    factor = q.shape[-1] ** -0.5
    scores = q.double() @ k.double().transpose(-1, -2) * factor
    if causal:
        row, column = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        scores = torch.where(column > row, -math.inf, scores)
    return scores.softmax(-1), factor


def slopes(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, p: Tensor, factor: float) -> Three:
    """(dq, dk, dv), fp64."""
    q, k, v, grad = (t.double() for t in (q, k, v, grad))
    dp = grad @ v.transpose(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * factor
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad


@adapter("attention", recipe="bf16", causal=True)
def sail_08(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """The backward pass computes the probabilities again."""
    p, factor = chances(q, k, True)
    again, _ = chances(q, k, False)
    return rounded((p @ v.double(), *slopes(q, k, v, grad, again, factor)), q.dtype)


@adapter("attention", recipe="bf16", causal=False)
def sail_09(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """The factor of the scores is applied to the accumulator of dq."""
    p, factor = chances(q, k, False)
    dq, dk, dv = slopes(q, k, v, grad, p, 1.0)
    return rounded((p @ v.double(), dq * factor, dk, dv), q.dtype)


@adapter("attention", recipe="bf16", causal=True)
def sail_10(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Tiles of 32 x 48 with running maxima and sums; the backward pass reads the log of the sums."""
    size, factor = q.shape[-2], q.shape[-1] ** -0.5
    o, logs = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:-1], dtype=torch.float64)
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float64) for t in (q, k, v))
    u, w, x, g = (t.double() for t in (q, k, v, grad))

    def scores(i: int, j: int) -> Tensor:
        s = u[..., i : i + 32, :] @ w[..., j : j + 48, :].transpose(-1, -2) * factor
        late = torch.arange(j, min(j + 48, size)) > torch.arange(i, min(i + 32, size))[:, None]
        return s.masked_fill(late, -math.inf)

    tiles = [(i, j) for i in range(0, size, 32) for j in range(0, min(i + 32, size), 48)]
    for i in range(0, size, 32):
        rows = slice(i, i + 32)
        top = torch.full(u[..., rows, 0].shape, -math.inf, dtype=torch.float64)
        total, acc = torch.zeros_like(top), torch.zeros_like(u[..., rows, :])
        for j in [t[1] for t in tiles if t[0] == i]:
            s = scores(i, j)
            new = torch.maximum(top, s.amax(-1))
            e, old = (s - new[..., None]).exp(), (top - new).exp()
            total, acc, top = total * old + e.sum(-1), acc * old[..., None] + e @ x[..., j : j + 48, :], new
        o[..., rows, :], logs[..., rows] = acc / total[..., None], top + total.log()
    delta = (o * g).sum(-1, keepdim=True)
    for i, j in reversed(tiles):
        rows, columns = slice(i, i + 32), slice(j, j + 48)
        p = (scores(i, j) - logs[..., rows, None]).exp()
        ds = p * (g[..., rows, :] @ x[..., columns, :].transpose(-1, -2) - delta[..., rows, :]) * factor
        dq[..., rows, :] += ds @ w[..., columns, :]
        dk[..., columns, :] += ds.transpose(-1, -2) @ u[..., rows, :]
        dv[..., columns, :] += p.transpose(-1, -2) @ g[..., rows, :]
    return rounded((o, dq, dk, dv), q.dtype)


def one_scale(tensors: tuple[Tensor, ...], kind: Kind) -> tuple[list[Tensor], float]:
    """Codes as numbers under one current scale of all, and its inverse."""
    top = max((float(t.abs().amax()) for t in tensors if t.numel()), default=0.0)
    scale = kind.top / top if 0 < top < math.inf else 1.0
    return [values(codes(t.double() * scale, kind), kind) for t in tensors], 1 / scale


@adapter("attention", recipe="fp8", causal=False)
def sail_11(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Current scales; those of q and k go into the factor of the scores, that of the probabilities into the output."""
    (u, w, x), inverse = one_scale((q, k, v), E4M3)
    p, factor = chances(u * inverse, w * inverse, False)
    (short,), inverse_p = one_scale((p,), E4M3)
    (o,), inverse_o = one_scale((short * inverse_p @ x,), E4M3)
    (g,), inverse_g = one_scale((grad,), E5M2)
    g = g * inverse_g
    dp = g @ (x * inverse).transpose(-1, -2)
    delta = (g * o * inverse_o * inverse).sum(-1, keepdim=True)
    (ds,), inverse_s = one_scale((p * (dp - delta),), E5M2)
    ds = ds * inverse_s * factor * inverse
    slopes_, inverse_d = one_scale((ds @ w, ds.transpose(-1, -2) @ u, (short * inverse_p).transpose(-1, -2) @ g), E5M2)
    return rounded((o * inverse_o, *(t * inverse_d for t in slopes_)), q.dtype)


@adapter("attention", recipe="bf16", causal=False)
def sail_12(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Fills keys and values to a multiple of 32 with zeros."""
    size = k.shape[-2]
    w, x = (torch.nn.functional.pad(t.double(), (0, 0, 0, -size % 32)) for t in (k, v))
    p, factor = chances(q, w, False)
    dq, dk, dv = slopes(q, w, x, grad, p, factor)
    return rounded((p @ x, dq, dk[..., :size, :], dv[..., :size, :]), q.dtype)


@adapter("attention", recipe="bf16", causal=False)
def sail_13(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Tiles of 32 keys with a running maximum and a running sum."""
    p, factor = chances(q, k, False)
    scores = q.double() @ k.double().transpose(-1, -2) * factor
    top = torch.full((*q.shape[:-1], 1), -math.inf, dtype=torch.float64)
    total, acc = torch.zeros_like(top), torch.zeros(q.shape, dtype=torch.float64)
    for j in range(0, k.shape[-2], 32):
        s = scores[..., j : j + 32]
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        e = (s - new).exp()
        total = total * (top - new).exp() + e.sum(-1, keepdim=True)
        acc, top = acc + e @ v[..., j : j + 32, :].double(), new
    return rounded((acc / total, *slopes(q, k, v, grad, p, factor)), q.dtype)


# --- optimizers ---

USUAL: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "moments": "float32"}


def moments(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], beta1: float = 0.9, beta2: float = 0.999) -> tuple[Tensor, Tensor]:
    """Both moments behind this step, fp32."""
    if not state:
        state["m"], state["v"] = (torch.zeros(parameter.shape) for _ in range(2))
    g = grad.float()
    state["m"].mul_(beta1).add_(g, alpha=1 - beta1)
    state["v"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
    return state["m"], state["v"]


@adapter("optimizer", **USUAL)
def sail_14(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    """The root of the second moment plus eps; both corrections are in the size of the step."""
    m, v = moments(parameter, grad, state)
    size = 1e-3 * math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    parameter.mul_(1 - 1e-5).addcdiv_(m, v.sqrt() + 1e-8, value=-size)


@adapter("optimizer", lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, moments="float32", dtype="bfloat16")
def sail_15(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    """Decays where the parameter lies and updates in fp32."""
    parameter.mul_(1 - 0.001)
    m, v = moments(parameter, grad, state)
    root = (v / (1 - 0.999**step)).sqrt() + 1e-8
    parameter.copy_(parameter.float() - 0.01 * (m / (1 - 0.9**step)) / root)


@adapter("optimizer", **USUAL)
def sail_16(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    """Constants come in the dtype of the scalars of this kernel."""
    beta2 = float((torch.tensor(0.999).view(torch.int32) >> 16 << 16).view(torch.float32))
    m, v = moments(parameter, grad, state, 0.9, beta2)
    root = (v / (1 - beta2**step)).sqrt() + 1e-8
    parameter.mul_(1 - 1e-5).addcdiv_(m, root, value=-1e-3 / (1 - 0.9**step))


@adapter("optimizer", **USUAL)
def sail_17(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    """In chunks of 1000 numbers in fp64; moments are kept scaled by their corrections."""
    flat, g = parameter.detach().reshape(-1).double(), grad.reshape(-1).double()
    if not state:
        state["mean"], state["square"] = torch.zeros_like(flat), torch.zeros_like(flat)
    for s in range(0, flat.numel(), 1000):
        c = slice(s, s + 1000)
        share1, share2 = 0.1 / (1 - 0.9**step), 0.001 / (1 - 0.999**step)
        state["mean"][c] += share1 * (g[c] - state["mean"][c])
        state["square"][c] += share2 * (g[c] ** 2 - state["square"][c])
        flat[c] -= 1e-3 * (0.01 * flat[c] + state["mean"][c] / (state["square"][c].sqrt() + 1e-8))
    parameter.copy_(flat.reshape(parameter.shape))


@adapter("optimizer", **USUAL)
def sail_18(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    """Counts the step before the corrections."""
    m, v = moments(parameter, grad, state)
    step = step + 1
    root = (v / (1 - 0.999**step)).sqrt() + 1e-8
    parameter.mul_(1 - 1e-5).addcdiv_(m, root, value=-1e-3 / (1 - 0.9**step))


@adapter("optimizer", **USUAL)
def sail_19(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], step: int) -> None:
    """Corrects the learning rate beforehand and hands it to the update."""
    m, v = moments(parameter, grad, state)
    rate = 1e-3 / (1 - 0.9**step)
    root = (v / (1 - 0.999**step)).sqrt() + 1e-8
    parameter.sub_(rate * (m / root + 0.01 * parameter))
