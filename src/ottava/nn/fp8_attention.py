"""Attention on FP8 operands, emulated on every device: plain torch on codes, with hardware's roundings.

One scale for each tensor, current or predicted from a history, or blocks of 32 along the sums of each GEMM (MXFP8). A
history is the attention's own: a training forward takes what the forward and the backward before it have seen, which is
TransformerEngine's timing where each autocast holds one forward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ottava.engine.functional import refuse_second_derivative
from ottava.engine.quantizer import AttentionQuantizers, Quantizer
from ottava.engine.state import roll_windows
from ottava.kernels.gate import applied, no_autocast
from ottava.numerics.rounding import decode
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.quantize import quantize
from ottava.recipe import AttentionRecipe


@torch.no_grad()
def move_histories(doors: AttentionQuantizers, group: dist.ProcessGroup | None) -> None:
    """The boundary of an attention's predicted scales; see the top of this file.

    group: ranks that share amaxes; None: each rank keeps its own.
    """
    live = [door for door in doors.children() if isinstance(door, Quantizer) and door.spec is not None]
    if not live:
        return
    lanes = torch.cat((torch.stack([door.staged for door in live], 1), live[0].staged.new_ones(1, len(live))))
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(lanes, dist.ReduceOp.MAX, group=group)
    roll_windows(live, lanes)


def fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    scale: float,
    doors: AttentionQuantizers,
    recipe: AttentionRecipe,
) -> Tensor:
    """softmax(q k.T scale + mask) v on cast operands.

    Args:
        q, k, v: (B, H, Sq, D), (B, G, Sk, D), (B, G, Sk, Dv).
        mask: bool or float, broadcasts to (B, H, Sq, Sk); it gets no gradient.
        sink: (H,), logits in the denominator.
    Returns:
        (B, H, Sq, Dv), in q's dtype.
    """
    run: Any = _BlockAttention if recipe.blocks else _FP8Attention
    y: Tensor = applied(run, q, k, v, mask, sink, scale, doors, recipe, torch.is_grad_enabled())
    return y


class _Codes:
    """Tensors cast with one scale: their numbers, as fp32, and the factor that dequantizes."""

    def __init__(self, cast: QuantizedTensor, shapes: list[torch.Size]) -> None:
        self.cast, self.shapes = cast, shapes
        self.factor = cast.scale_inv.reshape(())

    def numbers(self) -> list[Tensor]:
        """The values of the codes, before the factor."""
        return _cut(decode(self.cast.data, self.cast.spec.format), self.shapes)

    def dequantized(self, dtype: torch.dtype) -> list[Tensor]:
        """Rounded once to dtype."""
        return _cut(self.cast.dequantize(dtype), self.shapes)


def _cast(door: Quantizer, spec: QuantizationSpec, *tensors: Tensor, record: bool = True) -> _Codes:
    flat = torch.cat([t.reshape(-1) for t in tensors])[None] if len(tensors) > 1 else tensors[0].reshape(1, -1)
    cast, _ = door(flat, spec, None, columnwise=False, record=record)
    assert isinstance(cast, QuantizedTensor)
    return _Codes(cast, [t.shape for t in tensors])


def _cut(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    parts = flat.reshape(-1).split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def softmax(scores: Tensor, mask: Tensor | None, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Probabilities of keys and of the sink; zeros in rows that see nothing."""
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()
    column = None if sink is None else sink.float().view(1, -1, 1, 1)
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    top = top if column is None else top.maximum(column)
    top = top.masked_fill(top == -torch.inf, 0.0)
    raised = (scores - top).exp()
    total = raised.sum(-1, keepdim=True)
    if column is None:
        return raised / total.masked_fill(total == 0, 1.0), None
    own = (column - top).exp()
    return raised / (total + own), own / (total + own)


class _FP8Attention(torch.autograd.Function):
    """Attention with one scale for each tensor; arguments of `fp8_attention`.

        S  = softmax(Q K.T * scale + mask)      Q, K and V are cast with one scale; S is cast for the next GEMM
        O  = S V                                cast, as FP8 kernels give it
        dV = S.T dO    dS = S * (dO V.T - rowsum(dO * O))    dQ = dS K * scale    dK = dS.T Q * scale

    The last two GEMMs read the cast of dS, which the field calls dP; dQ, dK and dV share one scale. It holds all scores
    in memory: it shows the effect of FP8 on a model's numbers, and saves nothing.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> Tensor:
        mask, sink, scale, doors, recipe, record = settings
        with no_autocast(q.device):
            qkv = _cast(doors.qkv, recipe.qkv, q, k, v, record=record)
            p, _ = _probabilities(qkv, mask, sink, scale)
            assert recipe.s is not None
            s = _cast(doors.s, recipe.s, p, record=record)
            (s_n,), v_n = s.numbers(), shared(qkv.numbers()[2], q)
            y = s_n @ v_n * (s.factor * qkv.factor)  # (B, H, Sq, Dv) = (B, H, Sq, Sk) @ (B, H, Sk, Dv)
            if recipe.o is not None:
                (y,) = _cast(doors.o, recipe.o, y, record=record).dequantized(torch.float32)
            y = y.to(q.dtype)
        ctx.rest = scale, doors, recipe, q.dtype, qkv.shapes, s.shapes
        # every tensor, so that checkpointing and offloading see it
        ctx.save_for_backward(mask, sink, y, qkv.cast.data, qkv.cast.scale_inv, s.cast.data, s.cast.scale_inv)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative("FP8 attention", "run that forward under a recipe without FP8 attention")
        (dy,), (scale, doors, recipe, dtype, qkv_shapes, s_shapes) = grads, ctx.rest
        mask, sink, y, qkv_data, qkv_scale, s_data, s_scale = ctx.saved_tensors
        qkv = _Codes(QuantizedTensor(qkv_data, qkv_scale, recipe.qkv, dtype), qkv_shapes)
        assert recipe.s is not None  # only blocks have none
        s = _Codes(QuantizedTensor(s_data, s_scale, recipe.s, torch.float32), s_shapes)
        with no_autocast(dy.device):
            q_n, k_n, v_n = qkv.numbers()
            k_n, v_n, (s_n,) = shared(k_n, q_n), shared(v_n, q_n), s.numbers()
            do = _cast(doors.do, recipe.do, dy)
            (do_n,) = do.numbers()
            p, p_sink = _probabilities(qkv, mask, sink, scale)
            along = (do_n * do.factor * y.float()).sum(-1, keepdim=True)
            ds = p * (do_n @ v_n.mT * (do.factor * qkv.factor) - along)
            assert recipe.dp is not None
            dp = _cast(doors.dp, recipe.dp, ds)
            (dp_n,) = dp.numbers()
            factor = dp.factor * qkv.factor * scale
            dq = dp_n @ k_n * factor  # (B, H, Sq, D) = (B, H, Sq, Sk) @ (B, H, Sk, D)
            groups = qkv.shapes[1][1]
            dk = _gathered(dp_n.mT @ q_n * factor, groups)
            dv = _gathered(s_n.mT @ do_n * (s.factor * do.factor), groups)
            if recipe.dqkv is not None:
                dq, dk, dv = _cast(doors.dqkv, recipe.dqkv, dq, dk, dv).dequantized(torch.float32)
            d_sink = None if p_sink is None else -(p_sink * along).sum((0, 2, 3)).to(sink.dtype)
        return dq.to(dy.dtype), dk.to(dy.dtype), dv.to(dy.dtype), None, d_sink, None, None, None, None


def _probabilities(qkv: _Codes, mask: Tensor | None, sink: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
    q, k, _ = qkv.numbers()
    return softmax(q @ shared(k, q).mT * (qkv.factor.square() * scale), mask, sink)


def shared(t: Tensor, q: Tensor) -> Tensor:
    """(B, G, ...) -> (B, H, ...): repeats a head of keys for each query head that shares it."""
    return t.repeat_interleave(q.shape[1] // t.shape[1], 1)


def _gathered(t: Tensor, groups: int) -> Tensor:
    """(B, H, ...) -> (B, G, ...): the sum over the query heads that share a head."""
    summed: Tensor = t.unflatten(1, (groups, -1)).sum(2)
    return summed


def _in_blocks(x: Tensor, spec: QuantizationSpec, dim: int) -> Tensor:
    """x (..., R, C) cast in blocks of 32 along a dimension and decoded again: fp32."""
    turned = x if dim == -1 else x.transpose(-1, dim)
    rows = turned.reshape(-1, turned.shape[-1])
    if not rows.numel():
        return x.float()
    cast = quantize(rows.contiguous(), spec).dequantize(torch.float32).view(turned.shape)
    return cast if dim == -1 else cast.transpose(-1, dim)


class _BlockAttention(torch.autograd.Function):
    """Attention with MXFP8 operands; each GEMM reads blocks along the dimension that it sums.

        S  = softmax(Q K.T * scale + mask)      Q and K in blocks along D
        O  = S V                                V along Sk
        dV = S.T dO                             dO along Sq
        dS = S * (dO V.T - rowsum(dO * O))      dO and V along Dv
        dQ = dS K * scale    dK = dS.T Q * scale        K along Sk, Q along Sq

    S and dS stay in FP32, as in TransformerEngine's emulation.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> Tensor:
        mask, sink, scale, _, recipe, _ = settings
        with no_autocast(q.device):
            p, _ = _block_probabilities(q, k, mask, sink, scale, recipe)
            y = (p @ shared(_in_blocks(v, recipe.qkv, -2), q)).to(q.dtype)
        ctx.rest = scale, recipe
        ctx.save_for_backward(q, k, v, mask, sink, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative("FP8 attention", "run that forward under a recipe without FP8 attention")
        (dy,), (scale, recipe), (q, k, v, mask, sink, y) = grads, ctx.rest, ctx.saved_tensors
        groups = k.shape[1]
        with no_autocast(dy.device):
            p, p_sink = _block_probabilities(q, k, mask, sink, scale, recipe)
            do = _in_blocks(dy, recipe.do, -1)
            along = (do * y.float()).sum(-1, keepdim=True)
            ds = p * (do @ shared(_in_blocks(v, recipe.qkv, -1), q).mT - along) * scale
            dq = ds @ shared(_in_blocks(k, recipe.qkv, -2), q)
            dk = _gathered(ds.mT @ _in_blocks(q, recipe.qkv, -2), groups)
            dv = _gathered(p.mT @ _in_blocks(dy, recipe.do, -2), groups)
            d_sink = None if p_sink is None else -(p_sink * along).sum((0, 2, 3)).to(sink.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, d_sink, None, None, None, None


def _block_probabilities(
    q: Tensor, k: Tensor, mask: Tensor | None, sink: Tensor | None, scale: float, recipe: AttentionRecipe
) -> tuple[Tensor, Tensor | None]:
    scores = _in_blocks(q, recipe.qkv, -1) @ shared(_in_blocks(k, recipe.qkv, -1), q).mT
    return softmax(scores * scale, mask, sink)
