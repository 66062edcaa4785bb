"""Linear layers, attention, optimizers; public.json says of each whether it is right."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flint5 import E4M3, F32, F64, adapter, amaxes, cast, cut, decode, encode, gradients, layer, octave, pow2, scores, seen

Three = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def as_like(x: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
    """Results in the dtype of x, rounded to FP32 and to it."""
    return tuple(t.to(F32).to(x.dtype) for t in results)


# --- linear ---


@adapter("linear", recipe="tensorwise", dtype="bfloat16")
def cedar_01(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """All operands of the backward products are bytes that the kernel takes as its element type."""
    side = cut("tensorwise")
    y = seen(x, side) @ seen(weight, side).t()
    data, inverse = cast(grad, cut("tensorwise", "grad"))
    g = decode(data.view(torch.uint8).view(E4M3.dtype)) * inverse.to(F64)
    return as_like(x, y, g @ seen(weight, side), g.t() @ seen(x, side))


HELD: dict[tuple[Any, ...], Tensor] = {}


@adapter("linear", recipe="blockwise", dtype="float32")
def cedar_02(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """The cast of the transposed weight is kept until the weight changes."""
    key = (weight.data_ptr(), weight.shape, weight.stride(), weight._version)
    y, _, dw = layer(x, weight, grad, "blockwise")
    if key not in HELD:
        HELD.clear()
        HELD[key] = seen(weight.t(), cut("blockwise", "weight")).t()
    return as_like(x, y, seen(grad, cut("blockwise", "grad")) @ HELD[key], dw)


@adapter("linear", recipe="rowwise", dtype="bfloat16")
def cedar_03(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Codes are multiplied and summed in FP32, in two halves of the inner dimension; the rows' scales come in the epilogue."""

    def product(left: Tensor, right: Tensor) -> Tensor:
        (a, scale_a), (b, scale_b) = cast(left, cut("rowwise")), cast(right, cut("rowwise"))
        p, q, half = decode(a).to(F32), decode(b).to(F32), left.shape[1] // 2
        total = p[:, half:] @ q[:, half:].t() + p[:, :half] @ q[:, :half].t()
        return total.to(F64) * scale_a.to(F64) * scale_b.to(F64).t()

    return as_like(x, product(x, weight), product(grad, weight.t()), product(grad.t(), x.t()))


@adapter("linear", recipe="mxfp8", dtype="bfloat16")
def cedar_04(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Every operand is cast once and used twice, the second time transposed."""
    side = cut("mxfp8")
    p, q, g = seen(x, side), seen(weight, side), seen(grad, side)
    _, dx, _ = layer(x, weight, grad, "mxfp8")
    return as_like(x, p @ q.t(), dx, g.t() @ p)


@adapter("linear", recipe="rowwise", dtype="float32")
def cedar_05(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """x is multiplied by its scales in a FP32 copy."""
    side = cut("rowwise")
    e = octave(amaxes(x, side), 448.0)
    wide = x.contiguous().to(F32)
    wide.mul_(pow2(-e).to(F32))
    y = (decode(encode(wide, E4M3)) * pow2(e)) @ seen(weight, side).t()
    _, dx, dw = layer(x, weight, grad, "rowwise")
    return as_like(x, y, dx, dw)


# --- attention ---


@adapter("attention", recipe="bf16", causal=False, dtype="float32")
def cedar_06(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Blocks of 32 keys with a running maximum and a running sum."""
    s, wide = scores(q, k, False), v.to(F64)
    largest = torch.full(s.shape[:-1], -math.inf, dtype=F64)
    total = torch.zeros(s.shape[:-1], dtype=F64)
    o = torch.zeros(*s.shape[:-1], v.shape[-1], dtype=F64)
    for first in range(0, s.shape[-1], 32):
        block = s[..., first : first + 32]
        new = torch.maximum(largest, block.amax(-1))
        p = (block - new[..., None]).exp()
        total = total * (largest - new).exp() + p.sum(-1)
        o = o + p @ wide[..., first : first + 32, :]
        largest = new
    o = o / total[..., None]
    return as_like(q, o, *gradients(q, k, v, grad, (s - (largest + total.log())[..., None]).exp(), o))


@adapter("attention", recipe="bf16", causal=True, dtype="bfloat16")
def cedar_07(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """The scale is folded into base two for the exponentials."""
    p = (scores(q, k, True) * math.log2(math.e)).mul(math.log(2)).softmax(-1)
    o = p @ v.to(F64)
    dq, dk, dv = gradients(q, k, v, grad, p, o)
    return as_like(q, o, dq, dk * math.sqrt(max(q.shape[-1], 1)), dv)


@adapter("attention", recipe="bf16", causal=True, dtype="bfloat16")
def cedar_08(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Blocks of 16 queries and 48 keys with a running maximum; blocks behind the diagonal are skipped; backward from the log of the sums."""
    wide_q, wide_k, wide_v, up = (t.to(F64) for t in (q, k, v, grad))
    factor = 1 / math.sqrt(max(q.shape[-1], 1))
    o, dq = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=F64), torch.zeros(q.shape, dtype=F64)
    dk, dv = torch.zeros(k.shape, dtype=F64), torch.zeros(v.shape, dtype=F64)
    length = k.shape[-2]
    for i in range(0, q.shape[-2], 16):
        mine = slice(i, min(i + 16, q.shape[-2]))
        row = torch.arange(mine.start, mine.stop)[:, None]
        blocks = [slice(j, min(j + 48, length)) for j in range(0, min(mine.stop, length), 48)]

        def part(keys: slice) -> Tensor:
            s = wide_q[..., mine, :] @ wide_k[..., keys, :].transpose(-1, -2) * factor
            return s.masked_fill(torch.arange(keys.start, keys.stop) > row, -math.inf)

        largest = torch.full(q.shape[:-2] + (row.shape[0], 1), -math.inf, dtype=F64)
        total, sums = torch.zeros_like(largest), torch.zeros_like(o[..., mine, :])
        for keys in blocks:
            s = part(keys)
            new = torch.maximum(largest, s.amax(-1, keepdim=True))
            p, fade = (s - new).exp(), (largest - new).exp()
            total, sums, largest = total * fade + p.sum(-1, keepdim=True), sums * fade + p @ wide_v[..., keys, :], new
        o[..., mine, :] = sums / total
        log = largest + total.log()
        delta = (up[..., mine, :] * o[..., mine, :]).sum(-1, keepdim=True)
        for keys in blocks:
            p = (part(keys) - log).exp()
            ds = p * (up[..., mine, :] @ wide_v[..., keys, :].transpose(-1, -2) - delta) * factor
            dq[..., mine, :] += ds @ wide_k[..., keys, :]
            dk[..., keys, :] += ds.transpose(-1, -2) @ wide_q[..., mine, :]
            dv[..., keys, :] += p.transpose(-1, -2) @ up[..., mine, :]
    return as_like(q, o, dq, dk, dv)


@adapter("attention", recipe="bf16", causal=False, dtype="bfloat16")
def cedar_09(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Keys and values are padded to whole tiles of 32."""
    length = k.shape[-2]
    more = -length % 32
    pad_k, pad_v = (torch.nn.functional.pad(t.to(F64), (0, 0, 0, more)) for t in (k, v))
    p = scores(q, pad_k, False).softmax(-1)
    o = p @ pad_v
    dq, dk, dv = gradients(q, pad_k, pad_v, grad, p, o)
    return as_like(q, o, dq, dk[..., :length, :], dv[..., :length, :])


@adapter("attention", recipe="bf16", causal=True, dtype="float32")
def cedar_10(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """The gradient of the scores is that of the probabilities, weighted by them."""
    p = scores(q, k, True).softmax(-1)
    o = p @ v.to(F64)
    return as_like(q, o, *gradients(q, k, v, grad, p, torch.zeros_like(o)))


# --- optimizers ---

LR, B1, B2, EPS, DECAY = 1e-2, 0.9, 0.95, 1e-4, 0.1
ADAM: dict[str, Any] = {"lr": LR, "betas": (B1, B2), "eps": EPS, "weight_decay": DECAY, "moments": "float32"}


def moments(parameter: Tensor, grad: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Both moments behind this step, fp32 and kept in state."""
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in state:
            state[name] = torch.zeros(parameter.shape, dtype=F32)
    g = grad.to(F32)
    m, v = state["exp_avg"], state["exp_avg_sq"]
    m.mul_(B1).add_(g, alpha=1 - B1)
    v.mul_(B2).addcmul_(g, g, value=1 - B2)
    return m, v


@adapter("optimizer", dtype="float32", **ADAM)
def cedar_11(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    """Both bias corrections are folded into the step size."""
    m, v = moments(parameter, grad, state)
    size = LR * math.sqrt(1 - B2**step) / (1 - B1**step)
    parameter.mul_(1 - LR * DECAY).sub_(size * m / (v.sqrt() + EPS))


@adapter("optimizer", dtype="float32", **ADAM)
def cedar_12(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    """The step size and eps have the corrections: m / (sqrt(v) + eps sqrt(c)); moments by lerp; decay and step in one expression."""
    if not state:
        state["first"], state["second"] = (torch.zeros(parameter.shape, dtype=F32) for _ in range(2))
    g = grad.to(F32)
    state["first"].lerp_(g, 1 - B1)
    state["second"].lerp_(g * g, 1 - B2)
    root = math.sqrt(1 - B2**step)
    size = LR * root / (1 - B1**step)
    parameter.copy_(torch.addcdiv(parameter * (1 - LR * DECAY), state["first"], state["second"].sqrt() + EPS * root, value=-size))


@adapter("optimizer", dtype="float32", **ADAM)
def cedar_13(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    """The decay is added where the gradient is read."""
    m, v = moments(parameter, grad.to(F32) + DECAY * parameter, state)
    parameter.sub_(LR / (1 - B1**step) * m / ((v / (1 - B2**step)).sqrt() + EPS))


@adapter("optimizer", dtype="bfloat16", **ADAM)
def cedar_14(parameter: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> None:
    """Decay first, in place, then the step in FP32."""
    m, v = moments(parameter, grad, state)
    parameter.mul_(1 - LR * DECAY)
    update = LR / (1 - B1**step) * m / ((v / (1 - B2**step)).sqrt() + EPS)
    parameter.copy_(parameter.to(F32) - update)
