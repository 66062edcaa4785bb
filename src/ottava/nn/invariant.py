"""Batch invariant forms of what layers compute around their GEMMs; see `batch_invariance`.

Norms compute each row alone already. Activations run in tiles of one size. Attention multiplies by the batch invariant
GEMM and sums softmax's denominator with it, so that a query's bits depend on its keys alone: on neither other queries,
nor padding, nor on whether keys came from a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ottava.engine.autocast import LANES, in_tiles
from ottava.engine.functional import Producer, refuse_second_derivative
from ottava.kernels.native.gemm import multiply_bf16, supports_dense

BACKEND = "batch_invariant"
"""The name of this attention in `last_backend`."""
_WIDE = 2 * LANES


def invariant_producer(produce: Producer | None) -> Producer | None:
    """The Producer with rows that depend on no other row."""
    made = getattr(produce, "batch_invariant", None)
    return produce if made is None else made()


def invariant_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(q k.T scale + mask) v with bits that depend on a query, its keys and their values alone.

    Args:
        q: (B, H, Sq, D); k, v: (B, G, Sk, D), (B, G, Sk, Dv), H a multiple of G; bf16, on a CPU.
        mask: bool (True: seen) or float (added), broadcast to (B, H, Sq, Sk); None: all keys are seen.
    Returns:
        (B, H, Sq, Dv).
    Raises:
        ValueError: another dtype or device, or no compiler.

    Example:
        >>> q, k = torch.randn(1, 2, 5, 16).bfloat16(), torch.randn(1, 1, 7, 16).bfloat16()
        >>> whole = invariant_attention(q, k, k, None, 0.25)
        >>> torch.equal(invariant_attention(q[:, :, 3:], k, k, None, 0.25), whole[:, :, 3:])
        True
    """
    if 0 in (*q.shape, *k.shape, *v.shape):
        return q.new_zeros(*q.shape[:3], v.shape[3])
    for one in (k, v):
        if reason := supports_dense(q[0, 0], one[0, 0]):
            raise ValueError(f"DotProductAttention: batch_invariant was asked for, but {reason}")
    y: Tensor = _Attention.apply(q, k, v, mask, scale)
    return y


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        y = q.new_empty(*q.shape[:3], v.shape[3])
        for b, g, heads, seen in _groups(q, k, mask):
            p, total = _exponents(_rows(q[b, heads]), k[b, g], seen, scale)
            y[b, heads] = (multiply_bf16(p, v[b, g].t()) / total).to(q.dtype).view_as(y[b, heads])
        ctx.save_for_backward(q, k, v, y, mask)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative("batch invariant attention", "run that forward without batch_invariant")
        (dy,), (q, k, v, y, mask) = grads, ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        for b, g, heads, seen in _groups(q, k, mask):
            rows, d_rows = _rows(q[b, heads]), _rows(dy[b, heads])
            codes, total = _exponents(rows, k[b, g], seen, ctx.scale)
            p = codes.float() / total
            aligned = (d_rows.float() * _rows(y[b, heads]).float()).sum(-1, keepdim=True)
            ds = (p * (multiply_bf16(d_rows, v[b, g]) - aligned) * ctx.scale).to(q.dtype)
            dq[b, heads] = multiply_bf16(ds, k[b, g].t()).to(q.dtype).view_as(dq[b, heads])
            dk[b, g] = multiply_bf16(ds.t(), rows.t()).to(k.dtype)
            dv[b, g] = multiply_bf16(p.to(q.dtype).t(), d_rows.t()).to(v.dtype)
        return dq, dk, dv, None, None


def _groups(q: Tensor, k: Tensor, mask: Tensor | None) -> Iterator[tuple[int, int, slice, Tensor | None]]:
    """(sequence, key head, the query heads that share it, their mask (rows, Sk)), one after the other."""
    (batch, heads, queries, _), (groups, keys) = q.shape, k.shape[1:3]
    shared = heads // groups
    whole = None if mask is None else mask.expand(batch, heads, queries, keys)
    for b in range(batch):
        for g in range(groups):
            own = slice(g * shared, (g + 1) * shared)
            yield b, g, own, None if whole is None else whole[b, own].reshape(-1, keys)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _exponents(rows: Tensor, keys: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """(exp(scores - the largest) (rows, Sk) in bf16, their sum (rows, 1) in fp32, 1 where no key is seen).

    Keys behind the last one that a row sees add zeros at the end of each sum, which change no bit.
    """
    scores = multiply_bf16(rows, keys) * scale
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
    top = scores.amax(-1, keepdim=True)
    scores = F.pad(scores - torch.where(top == -torch.inf, 0.0, top), (0, -keys.shape[0] % _WIDE), value=-torch.inf)
    p = in_tiles(torch.exp, scores.view(-1, _WIDE)).view_as(scores).to(rows.dtype)[:, : keys.shape[0]]
    total = multiply_bf16(p, p.new_ones(1, keys.shape[0]))
    return p, torch.where(total == 0, 1.0, total)
