"""The twin of a model: the formula of its family, switches one at a time, and the KL of one linear alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.sweep import sweep

from ottava.numerics.formats import E4M3, E5M2
from ottava.serving.sides import Model, Text, made_up, served, trained
from ottava.serving.trained import of_model
from ottava.serving.twin import ModelState, Twin, kl_alone

pytest.importorskip("transformers")


def test_kl_of_one_linear(pair: Callable[..., Any]) -> None:
    one = pair("qwen3", "blockwise_fp32", "compressed-tensors-block")
    name = "model.layers.1.mlp.down_proj"
    one.change({f"{name}.weight_scale": one.tensors[f"{name}.weight_scale"] * 2})
    ours, theirs = trained(one.source), served(one.folder, "vllm")
    text = made_up(256, 24)
    kls, said = kl_alone(ours, theirs, [name], text)
    with torch.no_grad():
        state = ModelState.of(ours)
        p = F.softmax(Twin(state).logits(state, text.ids[None])[0], -1)
        state = state.given(name, theirs.linears[name])
        q = F.softmax(Twin(state).logits(state, text.ids[None])[0], -1)
    assert abs(kls[name] - float(F.kl_div(q.log(), p, reduction="batchmean"))) < 1e-5
    assert "24 tokens" in said
    other: Model = replace(ours, config={**ours.config, "model_type": "mamba"})
    assert "transformers makes no such model" in kl_alone(other, theirs, [name], text)[1]
    assert "beyond the vocabulary" in kl_alone(ours, theirs, [name], Text(torch.tensor([999]), ""))[1]
    assert kl_alone(ours, theirs, [name], None) == ({}, "not measured")
    assert torch.equal(made_up(50).ids, made_up(50).ids)


_FAMILIES = {
    "Llama": {},
    "Gemma2": {"head_dim": 16},
    "Phi3": {},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2, "head_dim": 16},
}


@sweep(family=_FAMILIES)
def test_a_twin_computes_what_transformers_computes(family: str) -> None:
    """In fp32, with weights that BF16 represents; each linear rounds its input once, and no family is special."""
    import transformers

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "pad_token_id": 0}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes | _FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    state = ModelState.of(trained(of_model(model)))
    twin, ids = Twin(state), made_up(96, 24).ids.view(2, 12)
    with torch.no_grad():
        wanted = model(ids).logits
    got = twin.logits(state, ids)
    assert (got - wanted).norm() / wanted.norm() < 2 * 15 * 2.0**-9  # fifteen linears deep, each rounds its input once
    near = twin.logits(replace(state, split=True), ids)
    assert 0 < (near - got).norm() / got.norm() < 2 * 30 * 2.0**-9
    coarse = [float((twin.logits(replace(state, cache=fmt), ids) - got).norm()) for fmt in (E4M3, E5M2)]
    assert 0 < coarse[0] < coarse[1]
    assert torch.equal(twin.logits(state, ids), got)  # every switch leaves the twin as it was


def test_a_twin_takes_the_experts_that_it_is_given() -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    config = transformers.Qwen3MoeConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = ModelState.of(trained(of_model(model)))
    twin, ids = Twin(state), made_up(96, 12).ids[None]
    seen: list[torch.Tensor] = []
    handles = [
        module.register_forward_hook(lambda m, a, o: seen.append(o[2]))
        for name, module in twin.model.named_modules()
        if name.endswith("mlp.gate")
    ]
    own = twin.logits(state, ids)
    chosen = torch.stack(seen, 1)[None]
    assert torch.equal(twin.logits(state, ids, chosen), own)
    others = twin.logits(state, ids, (chosen + 1) % 4)
    assert torch.equal(seen[-1], (chosen[0, :, -1] + 1) % 4)
    assert not torch.equal(others, own)
    for handle in handles:
        handle.remove()
