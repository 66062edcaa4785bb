"""Which token goes to which expert: rows sorted by expert, and the way back.

It sums over the experts of a token in the order of the experts, in fp32, and rounds once: the same bits on every device
and in every run, unlike scattered additions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Permutation:
    """Rows sorted by expert, for tokens that each go to k experts; see `sort_by_expert`."""

    rows: Tensor
    """int64 (M,): the token of each row."""
    places: Tensor
    """int64 (tokens, k): the places of a token's rows, in the order of its experts; M for a dropped row."""
    slots: Tensor
    """int64 (M,): the place of each row in the routing (tokens, k), flat."""
    counts: Tensor
    """int64 (experts,): rows of each expert."""
    travels: ClassVar[bool] = False
    """Whether rows go to other ranks."""

    def gather(self, x: Tensor) -> Tensor:
        """(tokens, N) -> (M, N), without a gradient."""
        return x.index_select(0, self.rows)

    def combine(self, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """(M, N) -> (tokens, N): the sum of a token's rows, each times its weight (M,); without a gradient."""
        tokens = self.places.shape[0]
        total = y.new_zeros(tokens, y.shape[1], dtype=torch.promote_types(y.dtype, torch.float32))
        if not y.shape[0]:
            return total.to(y.dtype)
        for place in self.places.unbind(1):
            there = place < y.shape[0]
            at = torch.where(there, place, 0)
            row = y.index_select(0, at).to(total.dtype)
            if weights is not None:
                row = row * weights.index_select(0, at).to(total.dtype)[:, None]
            total += torch.where(there[:, None], row, 0)
        return total.to(y.dtype)


def sort_by_expert(
    index: Tensor, num_experts: int, *, capacity: int | None = None, probs: Tensor | None = None
) -> Permutation:
    """Sorts the rows of tokens by expert; rows of one expert stay in the order of their tokens.

    Args:
        index: integers (tokens, k): the experts of each token; num_experts stands for none.
        capacity: the most rows of an expert; None: no limit. It drops the rows with the smallest probs, or without
            probs the last rows.
        probs: (tokens, k).
    Raises:
        ValueError: shapes, or a capacity below 1.

    Example:
        >>> plan = sort_by_expert(torch.tensor([[2, 0], [0, 1]]), 3)
        >>> plan.rows, plan.counts, plan.places
        (tensor([0, 1, 1, 0]), tensor([2, 1, 1]), tensor([[0, 3],
                [1, 2]]))
    """
    if index.dim() != 2 or (probs is not None and probs.shape != index.shape):
        got = f"index {tuple(index.shape)}" + ("" if probs is None else f", probs {tuple(probs.shape)}")
        raise ValueError(f"sort_by_expert: got {got}; needs (tokens, k) for both")
    if capacity is not None and capacity < 1:
        raise ValueError(f"sort_by_expert: capacity is {capacity}; needs 1 or more rows, or None for all")
    index = index.to(torch.int64)
    tokens, k = index.shape
    flat = index.flatten()
    if capacity is not None:
        flat = torch.where(_rank(flat, probs, num_experts) < capacity, flat, num_experts)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    slots = order[: int(counts.sum())] if tokens * k else order
    at = torch.full((tokens * k,), len(slots), dtype=torch.int64, device=index.device)
    at[slots] = torch.arange(len(slots), device=index.device)
    places = at.view(tokens, k).sort(dim=1).values  # rows lie in the order of experts
    return Permutation(slots // max(k, 1), places, slots, counts)


def _rank(flat: Tensor, probs: Tensor | None, num_experts: int) -> Tensor:
    """The rank of each entry within its expert: by falling probs, or in order."""
    first = torch.arange(len(flat), device=flat.device)
    if probs is not None:
        first = probs.detach().flatten().argsort(descending=True, stable=True)
    by_expert = first[flat[first].argsort(stable=True)]
    starts = torch.bincount(flat, minlength=num_experts + 1).cumsum(0)
    own = torch.arange(len(flat), device=flat.device)
    rank = torch.empty_like(own)
    sorted_experts = flat[by_expert]
    before = torch.where(sorted_experts > 0, starts[(sorted_experts - 1).clamp_min(0)], 0)
    rank[by_expert] = own - before
    return rank


def permute(x: Tensor, plan: Permutation) -> Tensor:
    """x (tokens, N) -> (M, N), rows sorted by expert.

    Example:
        >>> plan = sort_by_expert(torch.tensor([[1], [0]]), 2)
        >>> permute(torch.tensor([[10.0], [20.0]]), plan)
        tensor([[20.],
                [10.]])
    """
    return _Permute.apply(plan, x)  # type: ignore[no-any-return]


def unpermute(y: Tensor, plan: Permutation, probs: Tensor | None = None) -> Tensor:
    """y (M, N), rows sorted by expert -> (tokens, N): the sum of a token's rows, each times its probability.

    Args:
        probs: (tokens, k), any float dtype; None: the plain sum. Summed in fp32 and rounded once to the dtype of y.
    Edge cases: a token without rows, all dropped, gets zeros.

    Example:
        >>> plan = sort_by_expert(torch.tensor([[0, 1]]), 2)
        >>> unpermute(torch.tensor([[1.0], [10.0]]), plan, torch.tensor([[0.25, 0.75]]))
        tensor([[7.7500]])
    """
    if probs is None:
        return _Unpermute.apply(plan, y, None)  # type: ignore[no-any-return]
    return _Unpermute.apply(plan, y, probs.flatten().index_select(0, plan.slots))  # type: ignore[no-any-return]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Permutation, x: Tensor) -> Tensor:
        ctx.plan = plan
        return plan.gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.plan.combine(grads[0])


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Permutation, y: Tensor, weights: Tensor | None) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(*(() if weights is None else (y, weights)))
        return plan.combine(y, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows: Tensor = ctx.plan.gather(grads[0])
        saved = ctx.saved_tensors  # once: a checkpoint unpacks them once
        if not saved:
            return None, rows, None
        y, weights = saved
        wide = torch.promote_types(rows.dtype, torch.float32)
        dy = (rows.to(wide) * weights.to(wide)[:, None]).to(y.dtype) if ctx.needs_input_grad[1] else None
        d_weights = (rows.to(wide) * y.to(wide)).sum(1).to(weights.dtype) if ctx.needs_input_grad[2] else None
        return None, dy, d_weights
