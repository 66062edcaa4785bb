"""The trainer's model as a Llama of Hugging Face's, for engines: the same formula, with projections apart."""

from __future__ import annotations

from typing import Any



from ottava.quantized_layer import QuantizedLayer
from ottava.quantized_tensor import QuantizedTensor
from ottava.serving.source import Source, Weight, cast_of, input_scale_of, numbers, rows_of_cast
from ottava.train.config import ModelConfig
from ottava.train.model import VOCABULARY, ByteTransformer


def as_llama(model: ByteTransformer, config: ModelConfig, sequence_length: int) -> Source:
    """The checkpoint of `LlamaForCausalLM` with the weights of a trained model; bytes are its tokens.

    Example:
        >>> source = as_llama(ByteTransformer(ModelConfig(), sequence_length=64), ModelConfig(), 64)
        >>> [weight.name for weight in source.weights][:3]
        ['model.embed_tokens.weight', 'model.layers.0.input_layernorm.weight', 'model.layers.0.self_attn.q_proj.weight']
    """
    head = config.d_model // config.heads
    sizes = {"q_proj": config.heads * head, "k_proj": config.kv_heads * head, "v_proj": config.kv_heads * head}
    weights = [Weight("model.embed_tokens.weight", model.embedding.weight.detach())]
    for i, block in enumerate(model.layers):
        place, layer = f"model.layers.{i}", block
        qkv, o = layer.attention.qkv_proj, layer.attention.o_proj  # type: ignore[union-attr]
        gate_up, down = layer.mlp.gate_up_proj, layer.mlp.down_proj  # type: ignore[union-attr]
        weights.append(_norm(f"{place}.input_layernorm", qkv))
        weights += _pieces(qkv, {f"{place}.self_attn.{name}": size for name, size in sizes.items()})
        weights += _pieces(o, {f"{place}.self_attn.o_proj": config.d_model})
        weights.append(_norm(f"{place}.post_attention_layernorm", gate_up))
        weights += _pieces(gate_up, {f"{place}.mlp.{name}_proj": config.ffn for name in ("gate", "up")})
        weights += _pieces(down, {f"{place}.mlp.down_proj": config.d_model})
    weights.append(Weight("model.norm.weight", model.norm.weight.detach()))
    head_weight = numbers(model.lm_head.weight).detach()
    weights.append(Weight("lm_head.weight", head_weight, True, "output head: sensitive"))
    return Source(tuple(weights), _config(config, sequence_length))


def _norm(name: str, layer: Any) -> Weight:
    return Weight(f"{name}.weight", layer.norm.weight.detach())


def _pieces(layer: Any, sizes: dict[str, int]) -> list[Weight]:
    """A linear, or the linears that it is made of, row after row."""
    whole = numbers(layer.weight).detach()
    quantized = isinstance(layer, QuantizedLayer)
    cast = cast_of(layer) if quantized else None
    scale = input_scale_of(layer) if quantized else None
    stays = "" if cast is not None else f"recipe {layer.resolved.name!r} does not cast it"
    weights, start = [], 0
    for name, size in sizes.items():
        rows = slice(start, start + size)
        piece: QuantizedTensor | None = None if cast is None else rows_of_cast(cast, rows)
        weights.append(Weight(f"{name}.weight", whole[rows], True, stays, piece, scale))
        start += size
    return weights


def _config(config: ModelConfig, sequence_length: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": config.d_model,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.d_model // config.heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": sequence_length,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "bfloat16",
    }


