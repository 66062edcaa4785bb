"""Rows sorted by expert and back, against plain loops over tokens."""

from __future__ import annotations

import pytest
import torch

from ottava.nn import permute, sort_by_expert, unpermute

SIZES = ((0, 3, 2), (1, 1, 1), (7, 4, 2), (64, 8, 3), (33, 5, 5))


def test_rows_are_sorted_by_expert_and_in_the_order_of_tokens() -> None:
    """For index tensors with and without a sentinel, against sorting pairs in Python."""
    for tokens, experts, k in SIZES:
        for sentinel in (0, 1):
            index = torch.stack([torch.randperm(experts + sentinel)[:k] for _ in range(tokens)] or [torch.empty(0, k)])
            index = index.reshape(tokens, k).long()
            plan = sort_by_expert(index, experts)
            pairs = sorted((e, t, j) for t, own in enumerate(index.tolist()) for j, e in enumerate(own) if e < experts)
            assert plan.rows.tolist() == [t for _, t, _ in pairs]
            assert plan.slots.tolist() == [t * k + j for _, t, j in pairs]
            assert plan.counts.tolist() == [sum(e == expert for e, _, _ in pairs) for expert in range(experts)]
            wanted = [sorted(i for i, (_, t, _) in enumerate(pairs) if t == token) for token in range(tokens)]
            assert [[p for p in own if p < len(pairs)] for own in plan.places.tolist()] == wanted


def test_a_full_expert_drops_its_least_likely_rows() -> None:
    """With probabilities by them, without by order; the sum of a token leaves out what was dropped."""
    for tokens, experts, k in SIZES[1:]:
        index = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)])
        probs = torch.rand(tokens, k)
        for capacity in (1, 3):
            for given in (None, probs):
                plan = sort_by_expert(index, experts, capacity=capacity, probs=given)
                kept = set(plan.slots.tolist())
                for expert in range(experts):
                    own = [
                        (t * k + j, float(probs[t, j]))
                        for t in range(tokens)
                        for j in range(k)
                        if index[t, j] == expert
                    ]
                    own = own if given is None else sorted(own, key=lambda item: -item[1])
                    assert {slot for slot, _ in own[:capacity]} == kept & {slot for slot, _ in own}
                x = torch.randn(tokens, 6)
                y = unpermute(permute(x, plan), plan, probs)
                mask = torch.tensor([[t * k + j in kept for j in range(k)] for t in range(tokens)])
                torch.testing.assert_close(y, x * (probs * mask).sum(1, keepdim=True))


def test_gradients_are_those_of_plain_torch() -> None:
    """x, y and probs, in fp64 by numbers and in BF16 bit for bit against a sum in the order of experts."""
    index = torch.tensor([[2, 0, 3], [1, 2, 0], [3, 1, 2], [0, 3, 1]])
    plan = sort_by_expert(index, 4, capacity=2, probs=torch.rand(4, 3))
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, p: unpermute(permute(a, plan).sin(), plan, p), (x, probs))
    assert torch.autograd.gradcheck(lambda a: unpermute(permute(a, plan).sin(), plan), (x,))
    plan = sort_by_expert(index, 4)
    y, p = torch.randn(12, 5).bfloat16(), torch.rand(4, 3)
    weights = p.flatten()[plan.slots]
    loop = torch.zeros(4, 5)
    for row, token in enumerate(plan.rows.tolist()):  # rows lie in the order of experts
        loop[token] = loop[token] + y[row].float() * weights[row]
    assert torch.equal(unpermute(y, plan, p), loop.bfloat16())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got index \(3,\); needs \(tokens, k\)"):
        sort_by_expert(torch.zeros(3, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match=r"probs \(3, 2\)"):
        sort_by_expert(torch.zeros(3, 1, dtype=torch.int64), 2, probs=torch.ones(3, 2))
    with pytest.raises(ValueError, match="capacity is 0"):
        sort_by_expert(torch.zeros(3, 1, dtype=torch.int64), 2, capacity=0)
