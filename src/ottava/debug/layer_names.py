"""Which part of a transformer a layer is, from its name: the words of Llama, GPT-2, Megatron, TransformerEngine, ..."""

from __future__ import annotations

from types import MappingProxyType

KINDS = MappingProxyType(
    {
        "lm_head": "lm_head output_layer embed_out head output",
        "router": "router mlp.gate gate.wg",
        "qkv": "q_proj k_proj v_proj qkv_proj q k v qkv query key value query_key_value c_attn in_proj Wqkv wq wk wv "
        "to_q to_k to_v linear_qkv linear_q linear_kv layernorm_qkv",
        "proj": "o_proj out_proj linear_proj attn.proj attn.c_proj attention.proj "
        "self_attention.proj attention.dense attention.output.dense wo to_out.0",
        "fc2": "down_proj fc2 linear_fc2 dense_4h_to_h w2 mlp.c_proj down linear2 fc_out ffn.wo wo_ff output.dense",
        "fc1": "gate_proj up_proj gate_up_proj fc1 linear_fc1 dense_h_to_4h w1 w3 c_fc up gate linear1 fc_in "
        "intermediate.dense",
    }
)
"""Kind -> the last words of its layers' names, tried in this order; where nothing fits, the kind is "linear"."""


def layer_kind(name: str) -> str:
    """The kind of a layer.

    Example:
        >>> [layer_kind(f"model.layers.3.{n}") for n in ("mlp.down_proj", "self_attn.q_proj", "mlp.gate_proj", "x")]
        ['fc2', 'qkv', 'fc1', 'linear']
    """
    dotted = f".{name}"
    for kind, words in KINDS.items():
        if dotted.endswith(tuple(f".{word}" for word in words.split())):
            return kind
    return "linear"


def layer_index(name: str) -> int | None:
    """The first whole number in a dotted name: which block the layer is in.

    Example:
        >>> layer_index("model.layers.12.mlp.experts.3.w1"), layer_index("lm_head")
        (12, None)
    """
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)
