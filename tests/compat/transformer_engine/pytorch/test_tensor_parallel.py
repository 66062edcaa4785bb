"""Shards of TransformerEngine's modules in one process: their sizes, and what is refused. Ranks: tests/distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ottava.compat.transformer_engine.pytorch as te

HEADS: dict[str, Any] = {"num_gqa_groups": 4, "set_parallel_mode": True, "tp_size": 2}


def sizes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in module.state_dict().items() if not name.endswith("_extra_state")}


def test_a_rank_makes_its_shard_only() -> None:
    """Shapes of state dicts, by TransformerEngine's names, are those of its ranks."""
    assert sizes(te.Linear(16, 8, tp_size=2, parallel_mode="column")) == {"weight": (4, 16), "bias": (4,)}
    assert sizes(te.Linear(16, 8, tp_size=2, parallel_mode="row")) == {"weight": (8, 8), "bias": (8,)}
    assert sizes(te.Linear(16, 8, tp_size=2)) == {"weight": (8, 16), "bias": (8,)}  # as there: nothing is split
    mlp = te.LayerNormMLP(16, 32, activation="swiglu", set_parallel_mode=True, tp_size=2, bias=False)
    expected = {"fc1_weight": (32, 16), "fc2_weight": (16, 16)}
    assert sizes(mlp) == {"layer_norm_weight": (16,), "layer_norm_bias": (16,), **expected}
    attention = te.MultiheadAttention(64, 8, bias=False, fuse_qkv_params=True, **HEADS)
    assert sizes(attention) == {"qkv.weight": (64, 64), "proj.weight": (64, 32)}
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (4, 2, 8)
    layer = te.TransformerLayer(64, 128, 8, layer_type="decoder", softmax_type="learnable", **HEADS)
    found = sizes(layer)
    assert found["inter_attention.key_value.key_weight"] == (16, 64)
    assert found["self_attention.core_attention.softmax_offset"] == (4,)
    assert found["layernorm_mlp.fc2_weight"] == (64, 64)


def test_what_ranks_cannot_share_is_refused() -> None:
    for make, words in (
        (lambda: te.Linear(8, 9, tp_size=2, parallel_mode="column"), "out_features=9 for 2 ranks; needs a multiple"),
        (lambda: te.Linear(9, 8, tp_size=2, parallel_mode="row"), "in_features=9 for 2 ranks"),
        (lambda: te.MultiheadAttention(64, 8, **{**HEADS, "tp_size": 8}), "num_gqa_groups=4 for 8 ranks"),
        (lambda: te.TransformerLayer(64, 129, 8, **HEADS), "ffn_hidden_size=129 for 2 ranks"),
        (lambda: te.Linear(8, 8, parallel_mode="colwise"), "parallel_mode is 'colwise'; needs None, 'column' or 'row'"),
        (lambda: te.Linear(8, 8, parallel_mode="row", tp_size=0), "got tp_size=0; needs the number of ranks"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    with pytest.raises(TypeError, match="tp_group='tp' is no process group"):
        te.Linear(8, 8, tp_group="tp", parallel_mode="row")
    with pytest.raises(NotImplementedError, match="use set_parallel_mode=True"):
        te.TransformerLayer(64, 128, 8, tp_size=2)
    with pytest.raises(NotImplementedError, match="a rank cannot norm a part of the features alone"):
        te.LayerNormLinear(8, 8, parallel_mode="row")
    with pytest.raises(NotImplementedError, match="GroupedLinear: tp_size=2 is not in ottava"):
        te.GroupedLinear(2, 8, 8, tp_size=2)
    layer = te.TransformerLayer(64, 128, 8, **HEADS)
    with pytest.raises(RuntimeError, match="tp_size is 2, but the module has no group; give tp_group, or call"):
        layer(torch.ones(2, 1, 64))
    with pytest.raises(NotImplementedError, match="ALiBi with heads split over ranks"):
        layer(torch.ones(2, 1, 64), core_attention_bias_type="alibi")
    layer.set_tensor_parallel_group(None)  # changes nothing, as there
    te.TransformerLayer(64, 128, 8, set_parallel_mode=True, sequence_parallel=True)(torch.ones(2, 1, 64))


def test_parameters_say_what_trainers_have_to_sum() -> None:
    assert te.LayerNorm(8, sequence_parallel=True).bias.sequence_parallel
    assert not te.RMSNorm(8).weight.sequence_parallel
