"""Context parallelism: each rank holds a part of every sequence, and gathers keys or passes them round a ring.

    in order    rank r of n holds the r-th of n parts
    balanced    parts r and 2n - 1 - r of 2n: under a causal mask all ranks then have as much to do (TransformerEngine,
                Megatron Core; `torch.distributed.tensor.experimental.context_parallel` has the same order)

Masks are made of positions, so causal masks and windows are those of the whole sequence. A ring keeps the keys of two
ranks; gathered keys are those of all. Source of the ring: arXiv 2310.01889; sums of exponents as in arXiv 2205.14135.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ottava.engine.autocast import ambient
from ottava.engine.functional import refuse_second_derivative
from ottava.kernels.gate import no_autocast
from ottava.nn.attention import DotProductAttention, MaskRule
from ottava.nn.sharding import all_gather, reduce_scatter

Part = tuple[Tensor, Tensor, Tensor, MaskRule]
"""Queries, the keys and values that they may see, and their rule."""


def own_parts(whole: Tensor, ranks: int, rank: int, dim: int, *, balanced: bool) -> Tensor:
    """What one rank holds of a whole sequence.

    Example:
        >>> own_parts(torch.arange(8), 2, 0, 0, balanced=True)
        tensor([0, 1, 6, 7])
    """
    if not balanced:
        return whole.chunk(ranks, dim)[rank]
    parts = whole.chunk(2 * ranks, dim)
    return torch.cat((parts[rank], parts[2 * ranks - 1 - rank]), dim)


def positions(each: int, ranks: int, rank: int, device: torch.device, *, balanced: bool) -> Tensor:
    """int64 (each,): where the tokens of a rank stand in the whole sequence."""
    return own_parts(torch.arange(each * ranks, device=device), ranks, rank, 0, balanced=balanced)


class GatheredKeys:
    """Gathers the keys and values of whole sequences.

    Args:
        group: the ranks, in the order of their parts.
        balanced: each rank holds two parts, see the top of this file.
    """

    def __init__(self, group: dist.ProcessGroup, *, balanced: bool = False) -> None:
        self.group, self.balanced = group, balanced

    def attend(
        self, layer: DotProductAttention, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule, *, alone: bool
    ) -> Tensor:
        """q (B, H, S, D), k and v (B, G, S, D) of this rank -> (B, H, S, Dv).

        Args:
            alone: the call has no other mask and no lengths.
        Raises:
            ValueError: a mask that is not made here of whole sequences, or FP8 attention.
        """
        self.check(layer, q, k, rule, alone=alone)
        return torch.cat([layer.attend_here(*part) for part in self._parts(q, k, v, rule)], 2)

    def check(self, layer: DotProductAttention, q: Tensor, k: Tensor, rule: MaskRule, *, alone: bool) -> None:
        """Refuses what ranks cannot do, see `attend`."""
        queries, keys = q.shape[2], k.shape[2]
        if not alone or rule.right not in (0, None) or (rule.right is None and rule.left is not None):
            raise ValueError(
                "attention with gathered keys: needs mask 'causal' (a window before the query is fine) or 'no_mask', "
                "and no attention_mask and no lengths, which are those of a part of the sequence"
            )
        if keys != queries:
            raise ValueError(
                f"attention with gathered keys: got {queries} queries and {keys} keys on this rank; needs as many, so "
                "no cache"
            )
        if self.balanced and queries % 2:
            raise ValueError(f"attention with balanced parts: got {queries} tokens on this rank; needs two equal parts")
        if ambient().recipe_for(layer.name, layer.resolved).attention is not None:
            raise ValueError(
                "attention with gathered keys: the recipe casts for attention, and no rank knows the amax of all "
                "keys; take a recipe without FP8 attention"
            )

    def _parts(self, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule) -> list[Part]:
        """Calls of attention, whose results lie one after another."""
        queries, ranks = q.shape[2], dist.get_world_size(self.group)
        k, v = (_GatherTokens.apply(t, self.group) for t in (k, v))
        pieces, count = [q], ranks
        places = [dist.get_rank(self.group)]
        if self.balanced:
            at = torch.cat([positions(queries, ranks, r, q.device, balanced=True) for r in range(ranks)]).argsort()
            k, v, pieces, count = k.index_select(2, at), v.index_select(2, at), list(q.chunk(2, 2)), 2 * ranks
            places = [places[0], count - 1 - places[0]]
        if rule.right is None:
            return [(piece, k, v, rule) for piece in pieces]
        ends = [(place + 1) * (k.shape[2] // count) for place in places]
        rule = rule._replace(bottom_right=True)
        return [(piece, k[:, :, :end], v[:, :, :end], rule) for piece, end in zip(pieces, ends, strict=True)]

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self


class RingKeys(GatheredKeys):
    """Keys and values travel round the ranks, which never hold more than two ranks' share; see `_Ring`."""

    def attend(
        self, layer: DotProductAttention, q: Tensor, k: Tensor, v: Tensor, rule: MaskRule, *, alone: bool
    ) -> Tensor:
        """As `GatheredKeys.attend`; it refuses dropout and sinks, too."""
        self.check(layer, q, k, rule, alone=alone)
        if layer.keeps_max_logit:
            raise ValueError("attention with keys in a ring: keeps no max_logit; gather the keys instead")
        if layer.sink is not None or (layer.dropout and layer.training):
            raise ValueError("attention with keys in a ring: knows no dropout and no sink; gather the keys instead")
        scale = q.shape[3] ** -0.5 if layer.softmax_scale is None else layer.softmax_scale
        y: Tensor = _Ring.apply(q, k, v, rule, scale, self.group, self.balanced)
        layer._note(q, k, "ring", f"keys of {dist.get_world_size(self.group)} ranks travel")
        return y


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:  # (B, G, S, D) -> (B, G, ranks * S, D)
        ctx.group, part = group, part.movedim(2, 0).contiguous()
        whole = part.new_empty(dist.get_world_size(group) * part.shape[0], *part.shape[1:])
        all_gather(whole, part, group)
        return whole.movedim(0, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = grads[0].movedim(2, 0).contiguous()
        part = whole.new_empty(whole.shape[0] // dist.get_world_size(ctx.group), *whole.shape[1:])
        reduce_scatter(part, whole, ctx.group)
        return part.movedim(0, 2), None


class _Ring(torch.autograd.Function):
    """softmax(q k.T scale + mask) v, for keys that travel from rank to rank while each rank multiplies.

    q is (B, H, S, D), k and v are (B, G, S, D) and (B, G, S, Dv), H a multiple of G; the result has q's dtype. Plain
    torch in FP32, on every device: it holds the scores of one rank's queries and one rank's keys. Each rank:
    o = sum over blocks of exp(s - lse) v, dq likewise; dk and dv travel with their keys.

    s = q k.T scale      lse = log sum exp s      p = exp(s - lse)      o = p v
    dp = do v.T      ds = p (dp - rowsum(do o)) scale      dq = ds k      dk = ds.T q      dv = p.T do
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        ctx.rest, group = rest, rest[2]  # (rule, scale, group, balanced)
        ranks = dist.get_world_size(group)
        with no_autocast(q.device):
            total = q.new_zeros(*q.shape[:3], v.shape[3], dtype=torch.float32)
            lse = q.new_full((*q.shape[:3], 1), -torch.inf, dtype=torch.float32)
            travelling = torch.cat((k, v), -1)
            for turn in range(ranks):
                coming = _PassOn(travelling, group) if turn < ranks - 1 else None
                s, (_, v_block) = _scores(ctx.rest, q, travelling.split((k.shape[3], v.shape[3]), -1), turn)
                both = torch.logaddexp(lse, s.logsumexp(-1, keepdim=True))
                top = both.masked_fill(both == -torch.inf, 0.0)
                total = total * (lse - top).exp() + (s - top).exp() @ v_block
                lse = both
                travelling = travelling if coming is None else coming.wait()
            y = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, lse)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative("ring attention", "run that forward on one rank")
        q, k, v, y, lse = ctx.saved_tensors
        _, scale, group, _ = ctx.rest
        ranks, (groups, dim), wide = dist.get_world_size(group), k.shape[1::2], v.shape[3]
        with no_autocast(q.device):
            do = grads[0].float()
            along = (do * y.float()).sum(-1, keepdim=True)
            top = lse.masked_fill(lse == -torch.inf, 0.0)
            dq = torch.zeros_like(q, dtype=torch.float32)
            travelling = torch.cat((k, v), -1)
            d_travelling = torch.zeros_like(travelling, dtype=torch.float32)
            for turn in range(ranks):
                coming = _PassOn(travelling, group) if turn < ranks - 1 else None
                s, (k_block, v_block) = _scores(ctx.rest, q, travelling.split((dim, wide), -1), turn)
                p = (s - top).exp()
                ds = p * (do @ v_block.mT - along) * scale
                dq += ds @ k_block
                dkv = torch.cat((ds.mT @ q.float(), p.mT @ do), -1)
                d_travelling += dkv.unflatten(1, (groups, -1)).sum(2)
                d_travelling = _PassOn(d_travelling, group).wait()  # after the last turn they are home
                travelling = travelling if coming is None else coming.wait()
            dk, dv = d_travelling.split((dim, wide), -1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _scores(rest: Any, q: Tensor, kv: Sequence[Tensor], turn: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """fp32 (B, H, S, S) of this rank's queries and keys that `turn` ranks have passed on; these and their values."""
    rule, scale, group, balanced = rest
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    wide = tuple(t.float().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in kv)
    s = (q.float() @ wide[0].mT) * scale
    if rule.right is None:
        return s, wide
    own, theirs = (positions(q.shape[2], ranks, r, q.device, balanced=balanced) for r in (rank, (rank - turn) % ranks))
    gap = theirs - own[:, None]
    seen = gap <= 0 if rule.left is None else (gap <= 0) & (gap >= -rule.left)
    return s.masked_fill(~seen, -torch.inf), wide


class _PassOn:
    """Sends a tensor to the next rank, and receives that of the rank before."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        there, back = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
        self.sent, self.came = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        sends = dist.P2POp(dist.isend, self.sent, there, group), dist.P2POp(dist.irecv, self.came, back, group)
        self.works = dist.batch_isend_irecv(list(sends)) if ranks > 1 else []
        if ranks == 1:
            self.came = self.sent

    def wait(self) -> Tensor:
        """The tensor that came."""
        for work in self.works:
            work.wait()
        return self.came
