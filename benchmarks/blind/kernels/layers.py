"""Adapters of linear layers and of attention: forward and backward."""

from __future__ import annotations

import math

import torch
from blocks import adapter, attention, backward, cast, cell, linear, linear_gemm, probabilities, uncast
from torch import Tensor

Three = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def rows(x: Tensor) -> Tensor:
    """As a matrix."""
    return x.reshape(-1, x.shape[-1])


@adapter("linear", recipe="tensorwise")
def linear_01(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Three GEMMs."""
    return linear(x, weight, grad, "tensorwise")


@adapter("linear", recipe="blockwise_fp32")
def linear_02(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Keeps the codes of x for its backward, and turns them there."""
    y, dx, _ = linear(x, weight, grad, "blockwise_fp32")
    how = cell("blockwise_fp32")
    kept = uncast(*cast(rows(x), how), how).float()
    return y, dx, linear_gemm(rows(grad).t(), kept.t(), how, how).to(weight.dtype)


@adapter("linear", recipe="tensorwise")
def linear_03(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """The gradient's bytes in the dtype of the weight's."""
    y, _, dw = linear(x, weight, grad, "tensorwise")
    back, side = cell("tensorwise", "grad"), cell("tensorwise", "weight")
    codes, inverse = cast(rows(grad), back)
    wide = uncast(codes.view(torch.uint8), inverse, side)
    return y, (wide @ uncast(*cast(weight.t(), side), side).t()).to(x.dtype).reshape(x.shape), dw


CACHE: dict[tuple[int, ...], Tensor] = {}


@adapter("linear", recipe="rowwise")
def linear_04(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Keeps its cast of a weight."""
    kept = CACHE.setdefault(tuple(weight.shape), weight.clone())
    return linear(x, kept, grad, "rowwise")


@adapter("linear", recipe="blockwise")
def linear_05(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """wgrad over the tokens of a sequence."""
    y, dx, dw = linear(x, weight, grad, "blockwise")
    if x.dim() > 2 and x.shape[0] > 1:
        dw = linear(x[:1], weight, grad[:1], "blockwise")[2]
    return y, dx, dw


@adapter("linear", recipe="mxfp8")
def linear_06(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """The kernels of the backend that could be imported."""
    y, dx = rows(x).double() @ weight.double().t(), rows(grad).double() @ weight.double()
    dw = rows(grad).double().t() @ rows(x).double()
    return y.to(x.dtype).reshape(grad.shape), dx.to(x.dtype).reshape(x.shape), dw.to(weight.dtype)


@adapter("linear", recipe="rowwise")
def linear_07(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Tokens in steps of 16."""
    y, dx, _ = linear(x, weight, grad, "rowwise")
    tokens = rows(x).shape[0]
    whole = tokens if tokens < 16 else tokens - tokens % 16
    return y, dx, linear(rows(x)[:whole], weight, rows(grad)[:whole], "rowwise")[2]


@adapter("linear", recipe="rowwise")
def linear_08(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Three GEMMs, in blocks of tokens where they do not add up."""
    y, dx, dw = linear(x, weight, grad, "rowwise")
    parts = [linear_gemm(part, weight, cell("rowwise"), cell("rowwise", "weight")) for part in rows(x).split(5)]
    return torch.cat(parts).to(x.dtype).reshape(grad.shape), dx, dw


@adapter("linear", recipe="blockwise")
def linear_09(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Three GEMMs."""
    return linear(x, weight, grad, "blockwise")


@adapter("linear", recipe="mxfp8")
def linear_10(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Three GEMMs; wgrad transposed."""
    y, dx, _ = linear(x, weight, grad, "mxfp8")
    how = cell("mxfp8")
    return y, dx, linear_gemm(rows(x).t(), rows(grad).t(), how, how).t().to(weight.dtype)


@adapter("linear", recipe="blockwise_fp32")
def linear_11(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """The weight of dgrad by a view of its memory."""
    y, _, dw = linear(x, weight, grad, "blockwise_fp32")
    scrambled = weight.reshape(weight.shape[1], weight.shape[0])
    dx = linear_gemm(rows(grad), scrambled, cell("blockwise_fp32", "grad"), cell("blockwise_fp32", "weight"))
    return y, dx.to(x.dtype).reshape(x.shape), dw


@adapter("linear", recipe="mxfp8")
def linear_12(x: Tensor, weight: Tensor, grad: Tensor) -> Three:
    """Casts the weight once, and turns what it has cast."""
    y, _, dw = linear(x, weight, grad, "mxfp8")
    how = cell("mxfp8")
    turned = uncast(*cast(weight, how), how).t().to(weight.dtype)
    return y, linear_gemm(rows(grad), turned, how, how).to(x.dtype).reshape(x.shape), dw


@adapter("attention", recipe=None, causal=True)
def attention_01(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """In fp64, rounded once."""
    return attention(q, k, v, grad, True)


@adapter("attention", recipe=None, causal=True)
def attention_02(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Keys up to the query."""
    factor = 1 / math.sqrt(q.shape[-1])
    scores = q.double() @ k.double().transpose(-1, -2) * factor
    p = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(2), -math.inf).softmax(-1)
    return tuple(t.to(q.dtype) for t in (p @ v.double(), *backward(q, k, v, grad, p, factor)))


@adapter("attention", recipe=None, causal=False)
def attention_03(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """The size of a head."""
    factor = 1 / math.sqrt(v.shape[-1])
    p = (q.double() @ k.double().transpose(-1, -2) * factor).softmax(-1)
    return tuple(t.to(q.dtype) for t in (p @ v.double(), *backward(q, k, v, grad, p, factor)))


@adapter("attention", recipe=None, causal=False)
def attention_04(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Exponentials of the scores."""
    factor = 1 / math.sqrt(q.shape[-1])
    weights = (q.float() @ k.float().transpose(-1, -2) * factor).exp()
    p = (weights / weights.sum(-1, keepdim=True)).double()
    return tuple(t.to(q.dtype) for t in (p @ v.double(), *backward(q, k, v, grad, p, factor)))


@adapter("attention", recipe=None, causal=False)
def attention_05(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Keys in tiles of 16, padded with zeros."""
    pad = (0, 0, 0, -k.shape[-2] % 16)
    wide_k, wide_v = torch.nn.functional.pad(k, pad), torch.nn.functional.pad(v, pad)
    o, dq, dk, dv = attention(q, wide_k, wide_v, grad, False)
    return o, dq, dk[..., : k.shape[-2], :], dv[..., : k.shape[-2], :]


@adapter("attention", recipe=None, causal=True)
def attention_06(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Computes the probabilities again in its backward."""
    o = attention(q, k, v, grad, True)[0]
    return (o, *attention(q, k, v, grad, False)[1:])


@adapter("attention", recipe=None, causal=False)
def attention_07(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Queries scaled before the product."""
    o, dq, dk, dv = attention(q, k, v, grad, False)
    return o, dq, (dk.double() * math.sqrt(q.shape[-1])).to(k.dtype), dv


@adapter("attention", recipe=None, causal=False)
def attention_08(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """torch's own, with autograd, in fp32."""
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        o = torch.nn.functional.scaled_dot_product_attention(*wide)
        grads = torch.autograd.grad(o, wide, grad.float())
    return tuple(t.detach().to(q.dtype) for t in (o, *grads))


@adapter("attention", recipe=None, causal=True)
def attention_09(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Online softmax over tiles of 32 keys, in fp64; the backward at once."""
    factor, length = 1 / math.sqrt(q.shape[-1]), q.shape[-2]
    top = torch.full((*q.shape[:-1], 1), -math.inf, dtype=torch.float64)
    total, o = torch.zeros_like(top), torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    for start in range(0, k.shape[-2], 32):
        keys = slice(start, start + 32)
        scores = q.double() @ k[..., keys, :].double().transpose(-1, -2) * factor
        later = torch.arange(scores.shape[-1]) + start > torch.arange(length)[:, None]
        scores = scores.masked_fill(later, -math.inf)
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - new).exp(), (top - new).exp()
        o, total, top = o * shrink + weights @ v[..., keys, :].double(), total * shrink + weights.sum(-1, keepdim=True), new
    p, factor = probabilities(q, k, True)
    return tuple(t.to(q.dtype) for t in (o / total, *backward(q, k, v, grad, p, factor)))


@adapter("attention", recipe=None, causal=False)
def attention_10(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Four:
    """Probabilities in E4M3 codes, with the sum of the exact ones."""
    p, factor = probabilities(q, k, False)
    rounded = p.float().to(torch.float8_e4m3fn).double()
    return tuple(t.to(q.dtype) for t in (rounded @ v.double(), *backward(q, k, v, grad, p, factor)))
