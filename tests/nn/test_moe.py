"""The router against a plain loop over tokens; experts against plain torch in fp64, and Hugging Face's."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.nn import Linear, MoE, Router, sort_by_expert, unpermute
from ottava.nn.activations import ACTIVATIONS
from ottava.recipe import Recipe

WAYS: tuple[dict[str, Any], ...] = (
    {"score": "softmax"},
    {"score": "softmax", "normalize": True},
    {"score": "softmax_of_top_k"},
    {"score": "sigmoid", "normalize": True, "scaling": 2.5, "num_groups": 4, "top_groups": 2, "bias_rate": 0.001},
    {"score": "softmax", "num_groups": 4, "top_groups": 3, "scaling": 16.0},
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
    best = [sum(own[:2]) for own in of_group]
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


H, F, E, TOP = 48, 40, 5, 2


def test_every_gradient_is_that_of_plain_torch_in_fp64() -> None:
    """With each kind of activation, shared experts, biases: y, dx and the gradient of every parameter."""
    for name, shared, bias in (("swiglu", 0, False), ("gelu", 2, True), ("clamped_swiglu", 1, True)):
        moe = MoE(H, F, E, TOP, activation=name, shared_experts=shared, bias=bias, recipe="bf16")
        x = torch.randn(3, 7, H, requires_grad=True)
        y = moe(x)
        dy = torch.randn(3, 7, H)
        y.backward(dy)
        wide = {n: p.detach().double().requires_grad_() for n, p in moe.named_parameters()}
        t = x.detach().double().requires_grad_()
        act, tokens = ACTIVATIONS[name].forward, t.flatten(0, 1)
        probs = (tokens @ wide["router.weight"].T).softmax(-1)
        index = probs.topk(TOP, -1).indices
        assert torch.equal(index, moe.router(x.flatten(0, 1)).experts)
        none = torch.zeros(E, 1, dtype=torch.float64)
        up_bias, down_bias = (wide.get(f"{n}.bias", none) for n in ("up", "down"))
        out = torch.zeros_like(tokens)
        for place in index.T:
            h = act(torch.einsum("tk,tnk->tn", tokens, wide["up.weight"][place]) + up_bias[place])
            h = torch.einsum("tk,tnk->tn", h, wide["down.weight"][place]) + down_bias[place]
            out = out + h * probs.gather(1, place[:, None])
        if shared:
            h = act(nn.functional.linear(tokens, wide["shared.fc1.weight"], wide.get("shared.fc1.bias")))
            out = out + nn.functional.linear(h, wide["shared.fc2.weight"], wide.get("shared.fc2.bias"))
        out.view_as(x).backward(dy.double())

        def near(own: Tensor | None, theirs: Tensor | None) -> None:
            assert own is not None
            assert theirs is not None
            # sums of at most 80 products in fp32, through two GEMMs and an activation
            assert float((own - theirs).abs().max()) <= 400 * 2.0**-24 * float(theirs.abs().max())

        near(y.detach(), out.view_as(y).detach())
        near(x.grad, t.grad)
        for n, p in moe.named_parameters():
            near(p.grad, wide[n].grad)


def test_two_casts_of_activations_and_the_bits_of_one_linear_per_expert(recipe: Recipe) -> None:
    """The forward's bits are those of Linears under every recipe; the receipt counts the casts, and says why where it
    takes more than one for a layer."""
    moe = MoE(H, F, E, TOP, recipe=recipe, dtype=torch.float32 if recipe.name == "bf16" else torch.bfloat16)
    x = torch.randn(70, H, dtype=moe.up.weight.dtype)
    y = moe(x)
    routing = moe.router(x)
    plan = sort_by_expert(routing.experts, E)
    made = []
    for expert, rows in enumerate(x[plan.rows].split(plan.counts.tolist())):
        if len(rows):
            up, down = (
                Linear(w.shape[2], w.shape[1], False, dtype=x.dtype, recipe=recipe)
                for w in (moe.up.weight, moe.down.weight)
            )
            with torch.no_grad():
                up.weight.copy_(moe.up.weight[expert])
                down.weight.copy_(moe.down.weight[expert])
            made.append(down(ACTIVATIONS["swiglu"].forward(up(rows))))
    assert torch.equal(y, unpermute(torch.cat(made), plan, routing.probs))
    y.float().square().sum().backward()
    rows = [row for row in ottava.receipt(moe).rows if row.gemm == "fprop"]
    casts = {expert: sum(r.casts for r in rows if r.layer.endswith(f".{expert}")) for expert in range(E)}
    refused = recipe.name == "blockwise_fp32" or "[1x16, e4m3" in str(recipe.fprop)
    assert set(casts.values()) == ({4} if refused else {0} if recipe.name == "bf16" else {2})
    assert all(("no powers of two" in row.note) == refused for row in rows)


def test_compiled_code_gives_the_same_bits() -> None:
    """With a graph break where the splits are read; the experts themselves are compiled."""
    for name in ("tensorwise", "bf16"):
        torch.manual_seed(0)
        moe = MoE(H, F, 3, 2, cast_once=False, recipe=name, dtype=torch.bfloat16 if name != "bf16" else torch.float32)
        x = torch.randn(24, H, dtype=moe.up.weight.dtype)
        results = []
        for forward in (moe, torch.compile(moe, backend="aot_eager")):
            moe.zero_grad()
            y = forward(x)
            y.square().sum().backward()
            results.append([y, *(p.grad.clone() for p in moe.parameters() if p.grad is not None)])
        assert len(results[0]) == 4
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _hugging_face(kind: str, dtype: torch.dtype) -> tuple[nn.Module, MoE]:
    """A block of transformers, and ours with its weights."""
    transformers = pytest.importorskip("transformers")
    shape: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    if kind == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block

        config = transformers.MixtralConfig(**shape, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2)
    else:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

        config = transformers.Qwen3MoeConfig(
            **shape, moe_intermediate_size=96, num_experts=8, num_experts_per_tok=4, norm_topk_prob=True
        )
    config._experts_implementation = "eager"
    block = Block(config).to(dtype)
    if not hasattr(block.experts, "gate_up_proj"):
        pytest.skip("a transformers that keeps experts as a list of layers")
    experts, top_k = (4, 2) if kind == "mixtral" else (8, 4)
    moe = MoE(64, 96, experts, top_k, router={"normalize": True}, recipe="bf16", dtype=dtype)
    with torch.no_grad():
        for own, theirs in (
            (moe.router.weight, block.gate.weight),
            (moe.up.weight, block.experts.gate_up_proj),
            (moe.down.weight, block.experts.down_proj),
        ):
            theirs.normal_(std=0.2)
            own.copy_(theirs)
    return block, moe


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_hugging_faces_blocks(kind: str) -> None:
    """fp32: y and every gradient, y bit for bit. BF16, for its routing: within the roundings that the sum over experts
    makes there and not here."""
    block, moe = _hugging_face(kind, torch.float32)
    x = torch.randn(2, 19, 64)
    own, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, wanted = moe(own), block(theirs)
    assert torch.equal(y, wanted)
    dy = torch.randn_like(y)
    y.backward(dy)
    wanted.backward(dy)
    for a, b in (
        (own.grad, theirs.grad),
        (moe.router.weight.grad, block.gate.weight.grad),
        (moe.up.weight.grad, block.experts.gate_up_proj.grad),
        (moe.down.weight.grad, block.experts.down_proj.grad),
    ):
        assert a is not None
        assert b is not None
        assert float((a - b).abs().max()) <= 200 * 2.0**-24 * float(b.abs().max())  # summed in other orders
    block, moe = _hugging_face(kind, torch.bfloat16)
    tokens = x.bfloat16().flatten(0, 1)
    with torch.no_grad():
        _, probs, index = block.gate(tokens)
        plan = sort_by_expert(index, len(moe.up.groups))
        rows = moe.down(ACTIVATIONS["swiglu"].forward(moe.up(tokens, plan.counts, plan)), plan.counts)
        mine, wanted = unpermute(rows, plan, probs), block.experts(tokens, index, probs)
        total = unpermute(rows.float().abs(), plan, probs.float())
        roundings = 2 * probs.shape[1] + 1  # a product and a sum for each expert there, one at the end here
        assert bool(((mine.float() - wanted.float()).abs() <= roundings * 2.0**-8 * total).all())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'swiglu'"):
        MoE(H, F, E, TOP, activation="swiglo")
    with pytest.raises(ValueError, match="capacity_factor is 0"):
        MoE(H, F, E, TOP, capacity_factor=0)
    with pytest.raises(ValueError, match="give no 6 experts"):
        MoE(H, F, E, 6)
