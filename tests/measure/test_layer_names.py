"""Names of the models that people train, and which part of a transformer each layer is."""

from __future__ import annotations

import pytest

from ottava.measure.layer_names import KINDS, layer_index, layer_kind

MODELS = {
    "Llama": (
        "model.layers.0.self_attn.q_proj qkv, model.layers.0.self_attn.o_proj proj, model.layers.0.mlp.gate_proj fc1,"
        "model.layers.0.mlp.up_proj fc1, model.layers.31.mlp.down_proj fc2, lm_head lm_head"
    ),
    "GPT-2": (
        "transformer.h.0.attn.c_attn qkv, transformer.h.0.attn.c_proj proj, transformer.h.0.mlp.c_fc fc1,"
        "transformer.h.0.mlp.c_proj fc2"
    ),
    "GPT-NeoX": (
        "gpt_neox.layers.0.attention.query_key_value qkv, gpt_neox.layers.0.attention.dense proj,"
        "gpt_neox.layers.0.mlp.dense_h_to_4h fc1, gpt_neox.layers.0.mlp.dense_4h_to_h fc2, embed_out lm_head"
    ),
    "BERT": (
        "bert.encoder.layer.0.attention.self.query qkv, bert.encoder.layer.0.attention.output.dense proj,"
        "bert.encoder.layer.0.intermediate.dense fc1, bert.encoder.layer.0.output.dense fc2"
    ),
    "Megatron": (
        "decoder.layers.0.self_attention.linear_qkv qkv, decoder.layers.0.self_attention.linear_proj proj,"
        "decoder.layers.0.mlp.linear_fc1 fc1, decoder.layers.0.mlp.linear_fc2 fc2, output_layer lm_head,"
        "decoder.layers.3.mlp.router router, decoder.layers.3.mlp.experts.local_experts.7.linear_fc2 fc2"
    ),
    "TransformerEngine": (
        "encoder.layers.33.self_attention.layernorm_qkv qkv, encoder.layers.33.self_attention.proj proj,"
        "encoder.layers.33.layernorm_mlp.fc1 fc1, encoder.layers.33.layernorm_mlp.fc2 fc2"
    ),
    "Mixtral": (
        "model.layers.0.block_sparse_moe.experts.5.w1 fc1, model.layers.0.block_sparse_moe.experts.5.w2 fc2,"
        "model.layers.0.block_sparse_moe.experts.5.w3 fc1, model.layers.0.mlp.gate router,"
        "model.layers.0.mlp.experts.gate_up_proj.3 fc1, model.layers.0.mlp.experts.down_proj.12 fc2"
    ),
    "T5": (
        "encoder.block.0.layer.0.SelfAttention.q qkv, encoder.block.0.layer.0.SelfAttention.o proj,"
        "encoder.block.0.layer.1.DenseReluDense.wi fc1, encoder.block.0.layer.1.DenseReluDense.wo fc2"
    ),
    "DeepSeek": (
        "model.layers.0.self_attn.q_b_proj qkv, model.layers.0.self_attn.kv_a_proj_with_mqa qkv,"
        "model.layers.3.mlp.shared_experts.down_proj fc2"
    ),
    "BERT's head": "cls.predictions.decoder lm_head, cls.predictions.transform.dense linear",
    "PEFT": "base_model.model.model.layers.0.self_attn.q_proj.base_layer qkv",
    "torchtitan": "layers.0.attention.wq qkv, layers.0.attention.wo proj, layers.0.feed_forward.w2 fc2, output lm_head",
    "nobody": "encoder linear, layers.0.something linear",
}
PAIRS = [pair.strip().split() for text in MODELS.values() for pair in text.split(",")]


@pytest.mark.parametrize("name, kind", PAIRS, ids=[name for name, _ in PAIRS])
def test_kinds_of_well_known_layers(name: str, kind: str) -> None:
    """The kind, also under the prefixes that wrappers add."""
    assert layer_kind(name) == kind
    assert layer_kind(f"module._orig_mod.{name}") == kind


def test_a_part_of_a_word_is_no_word() -> None:
    """`low` ends in w, and is not `w`."""
    assert layer_kind("model.overdown_proj") == "linear"
    assert {layer_kind(word) for words in KINDS.values() for word in words.split()} == set(KINDS)


@pytest.mark.parametrize(
    "name, index", [("layers.12.mlp.experts.3.w1", 12), ("lm_head", None), ("h.0", 0), ("a1", None)]
)
def test_the_index_is_the_first_whole_number(name: str, index: int | None) -> None:
    """Of a dotted part; digits inside a word are none."""
    assert layer_index(name) == index
