"""Linear layers, attention and optimizers. Which of them are right, and why not, is in public.json."""

from __future__ import annotations

import math
from typing import Any

import torch
from slate6 import E4M3, E5M2, adapter, attend, attend_back, exponent_up, load, operand, plan_of, quantize, step_round, through, two, unfold
from torch import Tensor

Three = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]
F64 = torch.float64


def flat(t: Tensor) -> Tensor:
    """Tokens as rows."""
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def hand(x: Tensor, grad: Tensor, y: Tensor, dx: Tensor, dw: Tensor) -> Three:
    """Back to the shapes and the dtype of x."""
    return (y.float().to(x.dtype).reshape(grad.shape), dx.float().to(x.dtype).reshape(x.shape), dw.float().to(x.dtype))


TURNED: dict[Any, Tensor] = {}


@adapter("linear", recipe="tensorwise", dtype="bfloat16")
def plover_01(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Keeps the weight's transposed cast for the backward."""
    a, g = flat(x), flat(grad)
    key = (weight.data_ptr(), tuple(weight.shape), weight.stride(), weight._version)
    if key not in TURNED:
        TURNED[key] = through(weight.t(), "tensorwise", "weight")
    y = through(a, "tensorwise") @ through(weight, "tensorwise", "weight").t()
    dx = through(g, "tensorwise", "grad") @ TURNED[key].t()
    dw = through(g.t(), "tensorwise", "grad") @ through(a.t(), "tensorwise").t()
    return hand(x, grad, y, dx, dw)


@adapter("linear", recipe="tensorwise", dtype="float32")
def plover_02(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """The gradient is cast once and kept as bytes for both products."""
    a, g = flat(x), flat(grad)
    codes, inverse = quantize(g, plan_of("tensorwise", "grad"))
    raw = codes.view(torch.uint8)
    seen = load(raw.view(torch.float8_e5m2)) * unfold(inverse)
    turned = load(raw.t().contiguous().view(torch.float8_e4m3fn)) * unfold(inverse)
    y = through(a, "tensorwise") @ through(weight, "tensorwise", "weight").t()
    dx = seen @ through(weight, "tensorwise", "weight")
    return hand(x, grad, y, dx, turned @ through(a, "tensorwise"))


@adapter("linear", recipe="mxfp8", dtype="bfloat16")
def plover_03(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """MXFP8: x is cast once."""
    a, g = flat(x), flat(grad)
    seen = through(a, "mxfp8")
    y = seen @ through(weight, "mxfp8", "weight").t()
    dx = through(g, "mxfp8", "grad") @ through(weight.t(), "mxfp8", "weight").t()
    return hand(x, grad, y, dx, through(g.t(), "mxfp8", "grad") @ seen)


@adapter("linear", recipe="blockwise", dtype="bfloat16")
def plover_04(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Blocks; the sum over tokens goes in steps of 16."""
    a, g = flat(x), flat(grad)
    y = through(a, "blockwise") @ through(weight, "blockwise", "weight").t()
    dx = through(g, "blockwise", "grad") @ through(weight.t(), "blockwise", "weight").t()
    left, right = through(g.t(), "blockwise", "grad"), through(a.t(), "blockwise")
    steps = a.shape[0] // 16
    dw = torch.zeros(weight.shape, dtype=F64)
    for i in range(steps):
        dw += left[:, 16 * i : 16 * i + 16] @ right[:, 16 * i : 16 * i + 16].t()
    return hand(x, grad, y, dx, dw)


@adapter("linear", recipe="rowwise", dtype="float32")
def plover_05(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Rowwise; x is cast before it is made a matrix."""
    a, g = flat(x), flat(grad)
    first = x.double().abs()[(slice(None), *(0 for _ in x.shape[1:-1]))] if x.numel() else torch.zeros(x.shape[0], 1)
    e = exponent_up(first.amax(-1), 448.0)
    per = two(e).reshape(-1, *(1 for _ in x.shape[1:]))
    y = flat(step_round(x.double() / per, E4M3) * per) @ through(weight, "rowwise", "weight").t()
    dx = through(g, "rowwise", "grad") @ through(weight.t(), "rowwise", "weight").t()
    return hand(x, grad, y, dx, through(g.t(), "rowwise", "grad") @ through(a.t(), "rowwise").t())


KNOWN: dict[Any, tuple[Tensor, Tensor, Tensor]] = {}


@adapter("linear", recipe="rowwise", dtype="bfloat16")
def plover_06(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Keeps both casts of the weight, and a copy of it: they hold as long as it equals the copy bit for bit."""
    a, g = flat(x), flat(grad)
    kept = KNOWN.get(tuple(weight.shape))
    if kept is None or not torch.equal(kept[0], weight.contiguous().view(torch.int16)):
        kept = (weight.contiguous().clone().view(torch.int16), through(weight, "rowwise", "weight"), through(weight.t(), "rowwise", "weight"))
        KNOWN[tuple(weight.shape)] = kept
    y = through(a, "rowwise") @ kept[1].t()
    dx = through(g, "rowwise", "grad") @ kept[2].t()
    return hand(x, grad, y, dx, through(g.t(), "rowwise", "grad") @ through(a.t(), "rowwise").t())


@adapter("linear", recipe="mxfp8", dtype="float32")
def plover_07(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """MXFP8: one GEMM for all three products, sums of 32 in FP32 behind each other, the last block first."""

    def gemm(p: Tensor, q: Tensor, role: str) -> Tensor:
        (a, s), (b, t) = quantize(p, plan_of("mxfp8", role)), quantize(q, plan_of("mxfp8", role))
        left, right = operand(a, s, "mxfp8", "x"), operand(b, t, "mxfp8", "x")
        total = torch.zeros(p.shape[0], q.shape[0])
        for k in reversed(range(0, p.shape[1], 32)):
            total += (left[:, k : k + 32] @ right[:, k : k + 32].t()).float()
        return total

    a, g = flat(x), flat(grad)
    return hand(x, grad, gemm(a, weight, "x"), gemm(g, weight.t(), "grad"), gemm(g.t(), a.t(), "grad"))


# --- attention ---


@adapter("attention", recipe="bf16", causal=False, dtype="bfloat16")
def plover_08(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Heads are padded with zeros to a multiple of 32."""
    pad = -q.shape[-1] % 32
    wide_q, wide_k = (torch.nn.functional.pad(t, (0, pad)) for t in (q, k))
    p, o = attend(wide_q, wide_k, v, False)
    dq, dk, dv = attend_back(wide_q, wide_k, v, grad, p, o)
    width = q.shape[-1]
    return tuple(t.float().to(q.dtype) for t in (o, dq[..., :width], dk[..., :width], dv))


@adapter("attention", recipe="bf16", causal=False, dtype="float32")
def plover_09(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Keys in tiles of 32, padded with zeros."""
    length = k.shape[-2]
    pad = -length % 32
    wide_k, wide_v = (torch.nn.functional.pad(t, (0, 0, 0, pad)) for t in (k, v))
    p, o = attend(q, wide_k, wide_v, False)
    dq, dk, dv = attend_back(q, wide_k, wide_v, grad, p, o)
    return tuple(t.float().to(q.dtype) for t in (o, dq, dk[..., :length, :], dv[..., :length, :]))


def one_scale(tensors: tuple[Tensor, ...], kind) -> tuple[list[Tensor], Tensor]:
    """(numbers of the format, inverse scale) of tensors with one scale."""
    amax = torch.stack([t.abs().amax() if t.numel() else torch.zeros((), dtype=t.dtype) for t in tensors]).amax().float()
    scale = kind.top / torch.where((amax > 0) & amax.isfinite(), amax, kind.top)
    return [step_round(t.float() * scale, kind) for t in tensors], (1 / scale).double()


@adapter("attention", recipe="fp8", causal=True, dtype="bfloat16")
def plover_10(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """FP8 with current scales; the inverse scales go into the softmax and the epilogues."""
    (cq, ck, cv), inverse = one_scale((q, k, v), E4M3)
    p, _ = attend(cq * inverse, ck * inverse, cv, True)
    (cp,), of_p = one_scale((p,), E4M3)
    o = cp @ cv * of_p
    (co,), of_o = one_scale((o,), E4M3)
    right = cp @ (cv * inverse) * of_p
    (cg,), of_g = one_scale((grad.double(),), E5M2)
    g = cg * of_g
    ds = p * (g @ (cv * inverse).mT - (g * right).sum(-1, keepdim=True))
    (cs,), of_s = one_scale((ds,), E5M2)
    root = math.sqrt(max(q.shape[-1], 1))
    dq, dk, dv = cs @ (ck * inverse) * of_s / root, cs.mT @ (cq * inverse) * of_s / root, (cp * of_p).mT @ g
    back, of_back = one_scale((dq, dk, dv), E5M2)
    return tuple(t.float().to(q.dtype) for t in (co * of_o, *(b * of_back for b in back)))


def log_sums(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """The logarithm of each row's sum."""
    s = q.double() @ k.double().mT / math.sqrt(max(q.shape[-1], 1))
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return s.logsumexp(-1, keepdim=True)


@adapter("attention", recipe="bf16", causal=False, dtype="bfloat16")
def plover_11(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Flash attention: tiles of 32 keys, a running maximum."""
    root = math.sqrt(max(q.shape[-1], 1))
    top = torch.full((*q.shape[:-1], 1), -math.inf, dtype=F64)
    total, o = torch.zeros_like(top), torch.zeros(*q.shape[:-1], v.shape[-1], dtype=F64)
    for n in range(0, k.shape[-2], 32):
        s = q.double() @ k[..., n : n + 32, :].double().mT / root
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        p = torch.exp(s - new)
        total = total * torch.exp(top - new) + p.sum(-1, keepdim=True)
        o = o + p @ v[..., n : n + 32, :].double()
        top = new
    o = o / total
    p, right = attend(q, k, v, False)
    return tuple(t.float().to(q.dtype) for t in (o, *attend_back(q, k, v, grad, p, right)))


@adapter("attention", recipe="bf16", causal=False, dtype="float32")
def plover_12(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """The backward takes blocks of 16 keys and walks through the queries."""
    p, o = attend(q, k, v, False)
    dq, dk, dv = attend_back(q, k, v, grad, p, o)
    g, root = grad.double(), math.sqrt(max(q.shape[-1], 1))
    delta = (g * o).sum(-1, keepdim=True)
    for n in range(0, k.shape[-2], 16):
        mine = slice(n, n + 16)
        ds = p[..., n:, mine] * (g[..., n:, :] @ v[..., mine, :].double().mT - delta[..., n:, :]) / root
        dk[..., mine, :] = ds.mT @ q[..., n:, :].double()
        dv[..., mine, :] = p[..., n:, mine].mT @ g[..., n:, :]
    return tuple(t.float().to(q.dtype) for t in (o, dq, dk, dv))


@adapter("attention", recipe="bf16", causal=True, dtype="float32")
def plover_13(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Keys in three parts, each with its own softmax, merged by the logarithms of their sums; the backward one query after the other."""
    length, root = k.shape[-2], math.sqrt(max(q.shape[-1], 1))
    share = max(-(-length // 3), 1)
    late = torch.arange(length)[None, :] > torch.arange(q.shape[-2])[:, None]
    parts, sums = [], []
    for n in range(0, 3 * share, share):
        s = (q.double() @ k[..., n : n + share, :].double().mT / root).masked_fill(late[:, n : n + share], -math.inf)
        lse = s.logsumexp(-1, keepdim=True)
        parts.append(torch.exp(s - torch.where(lse.isinf(), 0.0, lse)) @ v[..., n : n + share, :].double())
        sums.append(lse)
    every = torch.cat(sums, -1).softmax(-1)
    o = sum(part * every[..., i : i + 1] for i, part in enumerate(parts))
    dq, dk, dv = (torch.zeros(t.shape, dtype=F64) for t in (q, k, v))
    whole, g = log_sums(q, k, True), grad.double()
    for i in range(q.shape[-2]):
        p = torch.exp((q[..., i : i + 1, :].double() @ k[..., : i + 1, :].double().mT) / root - whole[..., i : i + 1, :])
        row = g[..., i : i + 1, :]
        ds = p * (row @ v[..., : i + 1, :].double().mT - (row * o[..., i : i + 1, :]).sum(-1, keepdim=True)) / root
        dq[..., i : i + 1, :] = ds @ k[..., : i + 1, :].double()
        dk[..., : i + 1, :] += ds.mT @ q[..., i : i + 1, :].double()
        dv[..., : i + 1, :] += p.mT @ row
    return tuple(t.float().to(q.dtype) for t in (o, dq, dk, dv))


@adapter("attention", recipe="bf16", causal=False, dtype="bfloat16")
def plover_14(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Powers of two: the scores carry log2(e), in tiles of 24 queries; the backward from the log2 of the sums, dq as a sum over tiles of 40 keys."""
    factor = math.log2(math.e) / math.sqrt(max(q.shape[-1], 1))
    o = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=F64)
    sums = torch.zeros(*q.shape[:-1], 1, dtype=F64)
    for m in range(0, q.shape[-2], 24):
        s = q[..., m : m + 24, :].double() @ k.double().mT * factor
        top = s.amax(-1, keepdim=True)
        p = torch.exp2(s - top)
        total = p.sum(-1, keepdim=True)
        o[..., m : m + 24, :] = p @ v.double() / total
        sums[..., m : m + 24, :] = top + torch.log2(total)
    g = grad.double()
    delta = (g * o).sum(-1, keepdim=True)
    dq, dk, dv = (torch.zeros(t.shape, dtype=F64) for t in (q, k, v))
    for n in range(0, k.shape[-2], 40):
        mine = slice(n, n + 40)
        p = torch.exp2(q.double() @ k[..., mine, :].double().mT * factor - sums)
        ds = p * (g @ v[..., mine, :].double().mT - delta) / math.sqrt(max(q.shape[-1], 1))
        dq += ds @ k[..., mine, :].double()
        dk[..., mine, :] = ds.mT @ q.double()
        dv[..., mine, :] = p.mT @ g
    return tuple(t.float().to(q.dtype) for t in (o, dq, dk, dv))


# --- optimizers ---

ADAM: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def moments(state: dict[str, Any], parameter: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments with the new gradient, FP32."""
    for name in ("m", "v"):
        if name not in state:
            state[name] = torch.zeros(parameter.shape)
    state["m"].mul_(0.9).add_(g, alpha=0.1)
    state["v"].mul_(0.99).addcmul_(g, g, value=0.01)
    return state["m"], state["v"]


def update_of(m: Tensor, v: Tensor, step: int) -> Tensor:
    """The step before the learning rate."""
    return (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)


@adapter("optimizer", moments="float32", dtype="float32", **ADAM)
def plover_15(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    """The decay joins the gradient."""
    m, v = moments(state, parameter, grad + 0.1 * parameter)
    parameter.sub_(0.02 * update_of(m, v, step))


@adapter("optimizer", moments="float32", dtype="float32", **ADAM)
def plover_16(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    """The step first, then the decay."""
    m, v = moments(state, parameter, grad)
    parameter.sub_(0.02 * update_of(m, v, step))
    parameter.mul_(1 - 0.02 * 0.1)


SLOTS: dict[tuple[int, ...], dict[str, Any]] = {}


@adapter("optimizer", moments="float32", dtype="float32", **ADAM)
def plover_17(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    """Moments lie in slots by shape."""
    m, v = moments(SLOTS.setdefault(tuple(parameter.shape), {}), parameter, grad)
    parameter.mul_(1 - 0.02 * 0.1).sub_(0.02 * update_of(m, v, step))


@adapter("optimizer", moments="bfloat16", dtype="float32", **ADAM)
def plover_18(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    """Moments are stored in BF16, computed in FP32."""
    wide = {name: state[name].float() for name in ("m", "v") if name in state}
    m, v = moments(wide, parameter, grad)
    state["m"], state["v"] = m.to(torch.bfloat16), v.to(torch.bfloat16)
    step_size = (m * (1 - 0.9**step)) / ((v * (1 - 0.99**step)).sqrt() + 1e-8)
    parameter.mul_(1 - 0.02 * 0.1).sub_(0.02 * step_size)


@adapter("optimizer", moments="float32", dtype="float32", **ADAM)
def plover_19(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    """Numbers as a list in chunks of 64, moments in one tensor, the step by quotients of roots."""
    if "both" not in state:
        state["both"] = torch.zeros(2, parameter.numel())
    both = state["both"]
    p, g = parameter.reshape(-1).double(), grad.reshape(-1).double()
    one, other = 1 - 0.9**step, math.sqrt(1 - 0.99**step)
    for i in range(0, len(p), 64):
        mine = slice(i, i + 64)
        m, v = torch.lerp(both[0, mine].double(), g[mine], 0.1), torch.lerp(both[1, mine].double(), g[mine].square(), 0.01)
        both[0, mine], both[1, mine] = m.float(), v.float()
        p[mine] = p[mine] - 0.02 * (0.1 * p[mine] + m * other / (one * (v.sqrt() + 1e-8 * other)))
    parameter.copy_(p.reshape(parameter.shape).float())
