"""TransformerEngine's functions for mixtures of experts, beside loops over tokens and torch's own operations."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common.recipe import MXFP8BlockScaling, NVFP4BlockScaling

TOKENS, FEATURES, EXPERTS, CHOICES = 13, 8, 5, 2


def routed(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, the experts of each token, the mask of them, and probabilities; the last expert gets nothing."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, FEATURES, generator=rng).to(dtype)
    experts = torch.rand(TOKENS, EXPERTS - 1, generator=rng).topk(CHOICES, -1).indices.int()
    mask = torch.zeros(TOKENS, EXPERTS, dtype=torch.int32).scatter(1, experts.long(), 1)
    probs = torch.rand(TOKENS, EXPERTS, generator=rng) * mask
    return x, experts, mask, probs


def by_hand(x: Tensor, mask: Tensor) -> list[tuple[int, int]]:
    """(expert, token) of each row, expert after expert."""
    return [(e, t) for e, t in product(range(EXPERTS), range(len(x))) if mask[t, e]]


def test_rows_and_gradients_are_those_of_loops_over_tokens() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, _, mask, probs = routed(dtype)
        order = by_hand(x, mask)
        x.requires_grad_(), probs.requires_grad_()
        rows, own, places = te.moe_permute_with_probs(x, probs, mask, len(order))
        assert torch.equal(rows, torch.stack([x[t] for _, t in order]))
        assert torch.equal(own, torch.stack([probs[t, e] for e, t in order]))
        assert torch.equal(te.moe_permute(x, mask, len(order))[0], rows)
        y = te.moe_unpermute(rows * 2, places, probs, restore_shape=x.shape)
        expected = torch.stack([sum(probs[t, e] * 2 * x[t].float() for e, u in order if u == t) for t in range(TOKENS)])
        bound = 4 * EXPERTS * torch.finfo(dtype).eps
        torch.testing.assert_close(y.float(), expected, rtol=bound, atol=bound)
        d = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
        mine = torch.autograd.grad((y.float() * d).sum() + own.square().sum(), (x, probs))
        wanted = torch.autograd.grad((expected * d).sum() + (probs * mask).square().sum(), (x, probs))
        for one, other in zip(mine, wanted, strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=bound, atol=8 * bound)


def test_codes_go_to_their_experts_as_they_are() -> None:
    x, _, mask, _ = routed()
    order = [t for _, t in by_hand(x, mask)]
    e4m3 = te.DType.kFloat8E4M3
    quantizers = (te.Float8CurrentScalingQuantizer(e4m3), te.Float8BlockQuantizer(e4m3, block_scaling_dim=1))
    for quantizer in (*quantizers, te.MXFP8Quantizer(e4m3)):
        quantizer.set_usage(columnwise=False)
        cast = quantizer(x)
        rows, _ = te.moe_permute(cast, mask, len(order))
        assert torch.equal(rows._rowwise_data, cast._rowwise_data[order])
        assert torch.equal(rows.dequantize(), cast.dequantize()[order])
    squares = te.Float8BlockQuantizer(e4m3)(x)  # 128 rows have one scale: numbers go
    assert torch.equal(te.moe_permute(squares, mask, len(order))[0], squares.dequantize()[order])


def test_padding_dropping_and_index_maps() -> None:
    x, experts, mask, probs = routed()
    counts = mask.sum(0)
    rows, own, places, offsets, padded = te.moe_permute_and_pad_with_probs(x, probs, mask, counts, 4)
    assert padded.tolist() == [-(-int(n) // 4) * 4 for n in counts]
    ends = padded.cumsum(0)
    for e in range(EXPERTS):
        block = rows[ends[e] - padded[e] : ends[e]]
        assert torch.equal(block[: counts[e]], x[mask[:, e].bool()])
        assert not block[counts[e] :].any()
    assert torch.equal(own[own > 0].sort().values, probs[mask.bool()].sort().values)
    assert torch.equal(
        te.moe_unpermute(rows, places, probs, pad_offsets=offsets),
        te.moe_unpermute(*te.moe_permute(x, mask, len(x) * CHOICES), probs),
    )
    assert te.moe_permute_and_pad_with_probs(x, probs, mask, counts, 1)[3] is None
    plain, sizes = te.moe_permute(x, mask)[0], counts.tolist()
    again, more = te.Fp8Padding(EXPERTS, 4)(plain, sizes)
    assert (torch.equal(again, rows), more) == (True, padded.tolist())
    assert torch.equal(te.Fp8Unpadding(EXPERTS, 4)(rows, sizes), plain)
    for recipe, size in ((None, 16), (MXFP8BlockScaling(), 32), (NVFP4BlockScaling(), 128)):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            assert te.Fp8Padding(1)(x, [TOKENS])[1] == [size]

    order = experts.flatten().argsort(stable=True)
    for most in (0, 10):
        rows, places = te.moe_permute(x, experts, most, map_type="index")
        kept = order[: most or None]
        assert torch.equal(rows, x[kept // CHOICES])
        each = te.moe_unpermute(rows, places, map_type="index")  # a row for each choice; 0 for dropped ones
        assert torch.equal(each[kept], rows)
        assert int((each == 0).all(1).sum()) == TOKENS * CHOICES - len(kept)
    merged = te.moe_unpermute(rows, places, torch.full((TOKENS, CHOICES), 0.5), map_type="index")
    torch.testing.assert_close(merged, each.view(TOKENS, CHOICES, -1).sum(1) / 2)
    longer, _ = te.moe_permute(x, mask, 40)
    assert longer.shape == (40, FEATURES)
    assert not longer[TOKENS * CHOICES :].any()
    empty = torch.empty(0, FEATURES)
    assert te.moe_unpermute(*te.moe_permute(empty, mask[:0], 0)).shape == (0, FEATURES)


def test_chunks_and_errors() -> None:
    x, _, mask, _ = routed()
    sizes, order = torch.tensor([3, 4, 6]), torch.tensor([2, 0, 1])
    rows, probs = te.moe_sort_chunks_by_index_with_probs(x, torch.arange(TOKENS), sizes, order)
    assert probs.tolist() == [7, 8, 9, 10, 11, 12, 0, 1, 2, 3, 4, 5, 6]
    assert torch.equal(rows, x[probs])
    bad: list[tuple[Any, str]] = [
        (lambda: te.moe_permute(x, mask, 1, map_type="list"), "unknown map_type 'list'"),
        (lambda: te.moe_permute(x, mask[:3], 1), r"a row for each token"),
        (lambda: te.moe_unpermute(x, mask, map_type="list"), "unknown map_type"),
        (lambda: te.moe_unpermute(x, mask, x, probs=x), "two names of one argument"),
        (lambda: te.moe_unpermute(*te.moe_permute(x, mask), restore_shape=(1, 2)), "the tokens have shape"),
        (lambda: te.moe_permute_and_pad_with_probs(x, x, mask, None, 4), "the number of rows of each expert"),
        (lambda: te.Fp8Padding(2)(x, [TOKENS]), "Fp8Padding: got rows of 1 experts; needs those of 2"),
    ]
    for call, words in bad:
        with pytest.raises(ValueError, match=words):
            call()


def test_the_router_is_torchs_operations_by_hand() -> None:
    logits = torch.randn(7, 12, generator=torch.Generator().manual_seed(3))
    added = torch.linspace(-1, 1, 12)
    for score, pre in product(("softmax", "sigmoid", "sqrtsoftplus"), (True, False)):
        function = {
            "softmax": lambda z, pre=pre: z.softmax(-1) if pre else z,
            "sigmoid": torch.sigmoid,
            "sqrtsoftplus": lambda z: torch.log1p(z.exp()).sqrt(),
        }[score]
        bias = None if score == "softmax" else added
        own, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        probs, there = te.fused_topk_with_score_function(own, 4, pre, 3, 2, 2.5, score, bias)
        expected = torch.zeros(7, 12)
        for row, z in enumerate(other):
            scores = function(z)
            ranked = scores if bias is None else scores + bias
            groups = ranked.detach().view(3, 4)
            best = groups.sort(1, descending=True).values[:, :2].sum(1).argsort(descending=True)[:2]
            open_ = [e for e in range(12) if e // 4 in best]
            chosen = sorted(open_, key=lambda e: -float(ranked[e]))[:4]
            weights = scores[chosen].softmax(0) if score == "softmax" and not pre else scores[chosen]
            weights = weights if score == "softmax" else weights / weights.sum()
            expected = expected.index_put((torch.tensor(row), torch.tensor(chosen)), 2.5 * weights)
        torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(there, expected > 0)
        d = torch.randn(7, 12, generator=torch.Generator().manual_seed(4))
        mine, wanted = (torch.autograd.grad((p * d).sum(), z)[0] for p, z in ((probs, own), (expected, other)))
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
    bits = te.fused_topk_with_score_function(logits, 4, pre, 3, 2, 2.5, score, bias, "bitmap_u8")[1]
    assert bits.shape == (7, 2)
    unpacked = [[bool(int(bits[t, e // 8]) >> (e % 8) & 1) for e in range(12)] for t in range(7)]
    assert unpacked == there.tolist()
    indices = torch.empty(7, 4, dtype=torch.int32)
    returned = te.fused_topk_with_score_function(logits, 4, pre, 3, 2, 2.5, score, bias, topk_indices=indices)[1]
    assert returned is indices
    assert torch.equal(torch.zeros(7, 12, dtype=torch.bool).scatter(1, indices.long(), True), there)
    with pytest.raises(NotImplementedError, match="qb_histogram are not in ottava: balance with expert_bias"):
        te.fused_topk_with_score_function(logits, 4, pre, None, None, None, score, bias, qb_histogram=indices)
    with pytest.raises(ValueError, match="unknown score_function 'tanh'"):
        te.fused_topk_with_score_function(logits, 4, pre, None, None, None, "tanh", None)
    with pytest.raises(ValueError, match="got expert_bias with score_function 'softmax'; needs 'sigmoid' or"):
        te.fused_topk_with_score_function(logits, 4, pre, None, None, None, "softmax", added)


def test_the_balance_loss() -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))
    there, scores = te.fused_compute_score_for_moe_aux_loss(logits, 2, "sigmoid")
    assert torch.equal(there.sum(1), torch.full((6,), 2))
    torch.testing.assert_close(scores.sum(1), torch.ones(6))
    lowest, others = scores.masked_fill(~there, 9.0).min(1).values, scores.masked_fill(there, -9.0).max(1).values
    assert bool((lowest >= others).all())
    loss = te.fused_moe_aux_loss(scores, there.sum(0), 6, 4, 2, 0.1)
    # as in Switch Transformer: experts * sum of (share of choices) * (mean score)
    wanted = 0.1 * 4 * sum(float(there[:, e].sum()) / 12 * float(scores[:, e].mean()) for e in range(4))
    assert abs(float(loss) - wanted) < 1e-6


@pytest.mark.parametrize("shape", [(12,), (12, 3), (4, 2)])
def test_gates_and_ups_lie_in_blocks_in_turn(shape: tuple[int, ...]) -> None:
    rows = torch.arange(float(torch.Size(shape).numel())).view(shape)
    gates, ups = rows.chunk(2)
    turned = te.interleave_glu_tensor(rows, 2)
    blocks = zip(gates.split(2), ups.split(2), strict=True)
    assert torch.equal(turned, torch.cat([block for pair in blocks for block in pair]))
    assert torch.equal(te.deinterleave_glu_tensor(turned, 2), rows)
    with pytest.raises(ValueError, match="needs a multiple of two blocks"):
        te.interleave_glu_tensor(rows, 5)
