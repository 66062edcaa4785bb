"""Mixture of experts: against plain torch in fp64, one Linear per expert, and Hugging Face's blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.nn import Linear, MoE, sort_by_expert, unpermute
from ottava.nn.activations import ACTIVATIONS
from ottava.recipe import Recipe

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


def test_training_goes_down_with_every_way_of_balancing() -> None:
    """Twenty steps on a fixed batch under mxfp8; dropped tokens, losses and bias at once; recomputed alike."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "score": "sigmoid",
        "normalize": True,
        "aux_loss": 0.01,
        "z_loss": 1e-3,
        "bias_rate": 0.01,
    }
    x, target = torch.randn(64, H).bfloat16(), torch.randn(64, H).bfloat16()
    losses: dict[bool, list[float]] = {}
    for recompute in (False, True):
        torch.manual_seed(1)
        moe = MoE(H, F, 4, 2, capacity_factor=1.25, router=options, recipe="mxfp8", dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(moe.parameters(), lr=2e-2)
        losses[recompute] = []
        for _ in range(20):
            y = checkpoint(moe, x, use_reentrant=False) if recompute else moe(x)
            loss = (y.float() - target.float()).square().mean()
            losses[recompute].append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            moe.router.update_bias()
    assert losses[False] == losses[True]
    assert losses[False][-1] < 0.7 * losses[False][0]


@pytest.mark.slow
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
