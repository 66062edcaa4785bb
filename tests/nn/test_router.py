"""The router against a plain loop over tokens in Python, its losses against formulas, its bias against its rule."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ottava
from ottava.nn import Router

WAYS: tuple[dict[str, Any], ...] = (
    {"score": "softmax"},
    {"score": "softmax", "normalize": True},
    {"score": "softmax_of_top_k"},
    {"score": "sigmoid", "normalize": True, "scaling": 2.5, "num_groups": 4, "top_groups": 2, "bias_rate": 0.001},
    {"score": "softmax", "num_groups": 4, "top_groups": 3, "group_score": "max", "scaling": 16.0},
    {"score": "sigmoid", "bias_rate": 0.1},
)


def route(logits: list[float], k: int, way: dict[str, Any], bias: list[float]) -> tuple[list[int], list[float]]:
    """One token, by the definitions, in Python's floats."""
    score, groups = way["score"], way.get("num_groups", 1)
    if score == "sigmoid":
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    elif score == "softmax":
        scores = [math.exp(v) / sum(map(math.exp, logits)) for v in logits]
    else:
        scores = logits
    chosen_by = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // groups
    of_group = [sorted(chosen_by[g * size : (g + 1) * size])[::-1] for g in range(groups)]
    best = [sum(own[: 1 if way.get("group_score") == "max" else 2]) for own in of_group]
    used = sorted(range(groups), key=lambda g: -best[g])[: way.get("top_groups", 1)]
    allowed = [e for e in range(len(logits)) if e // size in used]
    index = sorted(allowed, key=lambda e: -chosen_by[e])[:k]
    probs = [scores[e] for e in index]
    if score == "softmax_of_top_k":
        probs = [math.exp(v) / sum(map(math.exp, probs)) for v in probs]
    if way.get("normalize"):
        probs = [v / sum(probs) for v in probs]
    return index, [v * way.get("scaling", 1.0) for v in probs]


def test_routing_is_that_of_a_loop_over_tokens() -> None:
    """Every way of scoring, choosing and weighing; within 16 roundings of fp32."""
    for way in WAYS:
        router = Router(24, 16, 3, **way).double()
        if router.bias is not None:
            router.bias.uniform_(-0.3, 0.3)
        x = torch.randn(50, 24)
        routing = router(x)
        assert routing.probs.dtype == routing.logits.dtype == torch.float32
        bias = [0.0] * 16 if router.bias is None else router.bias.tolist()
        for token in range(50):
            index, probs = route(routing.logits[token].tolist(), 3, way, bias)
            assert routing.experts[token].tolist() == index
            for got, wanted in zip(routing.probs[token].tolist(), probs, strict=True):
                assert abs(got - wanted) <= 16 * 2.0**-24 * max(abs(wanted), 1e-3)


def test_the_gemm_is_fp32_whatever_surrounds_it() -> None:
    """BF16 weights and inputs, torch.autocast, a quantizing autocast."""
    router = Router(64, 8, 2, dtype=torch.bfloat16)
    x = torch.randn(9, 64).bfloat16()
    wanted = x.float() @ router.weight.float().T
    assert torch.equal(router(x).logits, wanted)
    with torch.autocast("cpu", torch.bfloat16), ottava.autocast("tensorwise"):
        assert torch.equal(router(x).logits, wanted)
    assert ottava.convert(torch.nn.Sequential(router), "bf16").outside == {
        "0.weight": "router: a rounding error changes which expert runs"
    }


def test_losses_are_their_formulas_and_reach_the_weights_as_if_added() -> None:
    """Value and gradient against a loss that is written out in fp64; through a checkpoint; a GradScaler's scale."""
    for way in WAYS:
        router = Router(12, 8, 2, **{**way, "num_groups": 1, "top_groups": 1}, aux_loss=0.02, z_loss=0.003)
        x, weights = torch.randn(40, 12), torch.randn(40, 2)

        def written(router: Router = router, x: Tensor = x, weights: Tensor = weights) -> tuple[Tensor, Tensor, Tensor]:
            wide = router.weight.detach().double().requires_grad_()
            logits = x.double() @ wide.T
            quiet = copy.deepcopy(router).double()
            quiet.aux_loss = quiet.z_loss = 0.0
            index = router(x).experts
            scores = {"sigmoid": logits.sigmoid(), "softmax": logits.softmax(-1)}.get(router.score, logits)
            probs = scores.gather(1, index)
            if router.score == "softmax_of_top_k":
                probs = probs.softmax(-1)
            if router.normalize:
                probs = probs / probs.sum(-1, keepdim=True)
            shares = scores / scores.sum(-1, keepdim=True) if router.score == "sigmoid" else logits.softmax(-1)
            f = torch.bincount(index.flatten(), minlength=8) / (40 * 2)
            aux, z = 8 * (f * shares.mean(0)).sum(), logits.exp().sum(-1).log().square().mean()
            loss = (probs * router.scaling * weights).sum() + 0.02 * aux + 0.003 * z
            return aux, z, torch.autograd.grad(loss, wide)[0]

        aux, z, wanted = written()
        for run in (router, lambda t, r=router: torch.utils.checkpoint.checkpoint(r, t, use_reentrant=False)):
            router.zero_grad()
            router.tokens_per_expert.zero_()
            (run(x).probs * weights).sum().backward()
            assert router.last_aux_loss is not None
            assert router.last_z_loss is not None
            assert abs(float(router.last_aux_loss) - float(aux)) < 1e-5
            assert abs(float(router.last_z_loss) - float(z)) < 1e-4
            assert router.weight.grad is not None
            torch.testing.assert_close(router.weight.grad.double(), wanted, rtol=1e-4, atol=1e-5)
            assert float(router.tokens_per_expert.sum()) == 80  # a recomputation is not counted again
        router.zero_grad()
        router.loss_scale = 1024.0
        (1024 * (router(x).probs * weights).sum()).backward()
        torch.testing.assert_close(router.weight.grad.double() / 1024, wanted, rtol=1e-4, atol=1e-5)


def test_perfect_balance_costs_one() -> None:
    router = Router(4, 4, 1, aux_loss=1.0)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4) * 1e-3)
    router(torch.eye(4))
    assert float(router.last_aux_loss) == pytest.approx(1.0, abs=1e-3)


def test_the_bias_moves_by_its_rule_and_brings_balance() -> None:
    """bias += rate * sign(mean - count), counts over micro-batches; evaluation counts nothing; weights never see it."""
    router = Router(16, 8, 2, score="sigmoid", bias_rate=0.01)
    with torch.no_grad():
        router.weight[0] += 0.6  # a favourite
    x = torch.rand(512, 16)
    first = None
    for _ in range(200):
        routing = router(x[:256]), router(x[256:])
        index = torch.cat([r.experts for r in routing])
        counts = torch.bincount(index.flatten(), minlength=8).float()
        assert torch.equal(router.tokens_per_expert, counts)
        router.eval()
        router(x)
        router.train()
        bias = router.bias.clone()
        router.update_bias()
        assert torch.equal(router.bias, bias + 0.01 * torch.sign(counts.mean() - counts))
        assert not router.tokens_per_expert.any()
        first = counts if first is None else first
    assert counts.max() < 1.5 * counts.mean() < first.max()
    assert torch.equal(router(x).probs, router(x).logits.sigmoid().gather(1, router(x).experts))
    assert list(router.state_dict()) == ["weight", "bias"]
    moved = copy.deepcopy(router).bfloat16()
    assert (moved.weight.dtype, moved.bias.dtype, moved.tokens_per_expert.dtype) == (
        torch.bfloat16,
        *[torch.float32] * 2,
    )
    assert torch.equal(moved.bias, router.bias)


def test_what_does_not_go_together_is_refused() -> None:
    for sizes, options, said in (
        ((8, 4, 5), {}, "give no 5 experts"),
        ((8, 6, 2), {"num_groups": 4}, "groups of equal size"),
        ((8, 4, 2), {"score": "sigmod"}, "did you mean 'sigmoid'"),
        ((8, 4, 0), {}, "top_k is 0"),
    ):
        with pytest.raises(ValueError, match=said):
            Router(*sizes, **options)
    with pytest.raises(ValueError, match=r"needs \(tokens, 8\)"):
        Router(8, 4, 2)(torch.ones(2, 3, 8))
    with pytest.raises(ValueError, match="has no bias"):
        Router(8, 4, 2).update_bias()
