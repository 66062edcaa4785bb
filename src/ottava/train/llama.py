"""The trainer's model as a Hugging Face Llama, for inference engines: the same formula, with separate projections."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ottava.engine.layer import QuantizedLayer, quantized_layers
from ottava.nn.convert import default_filter
from ottava.serving.source import Source, Weight, cast_of, input_scale_of, numbers, rows_of_cast
from ottava.train.checkpoint import Checkpoint, CheckpointError, high_precision_weights
from ottava.train.config import ModelConfig, TrainConfig, load_config
from ottava.train.model import VOCABULARY, ByteTransformer
from ottava.train.newest import find_checkpoint
from ottava.train.optimizers import store


def of_run(source: Path) -> Source:
    """Reads a checkpoint of `ottava train`, with the casts of its last step.

    Args:
        source: the folder of a run (its newest checkpoint), or one checkpoint of RUN/checkpoints.

    Raises:
        CheckpointError: the folder holds no run, or its checkpoint does not fit its settings.
    """
    model, config, checkpoint = model_of_run(source)
    return as_llama(model, config.model, config.sequence_length, masters=high_precision_weights(checkpoint))


def model_of_run(source: Path) -> tuple[ByteTransformer, TrainConfig, Checkpoint]:
    """The model of a run, or of one of its checkpoints, with the weights and histories of its last step.

    Raises:
        CheckpointError: the folder holds no run, or its checkpoint does not fit its settings.
    """
    settings = run_of(source) / "config.yaml"
    if not settings.is_file():
        raise CheckpointError(f"{source}: has no config.yaml, so it is no run of `ottava train`")
    config = load_config(settings)
    checkpoint, _ = find_checkpoint(source)
    with torch.random.fork_rng(devices=[]):
        model = ByteTransformer(config.model, config.sequence_length)
    store(model, config.build_recipe(), config.optimizer)
    states = {n.removeprefix("model."): t for n, t in checkpoint.tensors.items() if n.startswith("model.")}
    try:
        model.load_state_dict(states)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path}: does not fit the settings of its run: {error}") from error
    return model, config, checkpoint


def run_of(source: Path) -> Path:
    """The run folder of a checkpoint in RUN/checkpoints; any other path is returned as it is."""
    return source.parent.parent if source.parent.name == "checkpoints" else source


def as_llama(
    model: ByteTransformer, config: ModelConfig, sequence_length: int, masters: Mapping[str, Tensor] | None = None
) -> Source:
    """A checkpoint of `LlamaForCausalLM` with the weights of a trained model. Its tokens are bytes.

    Args:
        masters: name -> parameter in high precision, for parameters that the model stores in fewer bits.

    Example:
        >>> source = as_llama(ByteTransformer(ModelConfig(), sequence_length=64), ModelConfig(), 64)
        >>> [weight.name for weight in source.weights][:3]
        ['model.embed_tokens.weight', 'model.layers.0.input_layernorm.weight', 'model.layers.0.self_attn.q_proj.weight']
    """
    if config.experts:
        raise CheckpointError("this run has experts (model.experts); export writes the layers of a Llama only")
    layers = dict(model.named_modules())
    casts = any(layer.resolved.quantized for layer in quantized_layers(model))
    parameters = dict(model.named_parameters()) | dict(masters or {})

    def plain(name: str, source: str) -> Weight:
        return Weight(f"{name}.weight", numbers(parameters[f"{source}.weight"]).detach())

    weights = []
    for ours, theirs in table(config):
        if ours.rpartition(".")[2] in ("embedding", "norm"):
            weights += [plain(name, ours) for name in theirs]
        elif ours == "lm_head":
            values = numbers(parameters["lm_head.weight"]).detach()
            weights.append(Weight("lm_head.weight", values, True, default_filter("lm_head", model.lm_head) or ""))
        else:
            weights += _pieces(layers[ours], numbers(parameters[f"{ours}.weight"]).detach(), theirs, casts=casts)
    return Source(tuple(weights), _config(config, sequence_length))


def table(config: ModelConfig) -> list[tuple[str, dict[str, int]]]:
    """Each module of the trainer's model -> the Llama modules that hold its rows, in order, with their numbers of rows.

    Example:
        >>> table(ModelConfig())[1]
        ('layers.0.attention.qkv_proj.norm', {'model.layers.0.input_layernorm': 128})
    """
    d, head = config.d_model, config.d_model // config.heads
    rows = [("embedding", {"model.embed_tokens": VOCABULARY})]
    for i in range(config.layers):
        here, there = f"layers.{i}", f"model.layers.{i}"
        q, kv = config.heads * head, config.kv_heads * head
        attn, mlp = f"{there}.self_attn", f"{there}.mlp"
        rows += [
            (f"{here}.attention.qkv_proj.norm", {f"{there}.input_layernorm": d}),
            (f"{here}.attention.qkv_proj", {f"{attn}.q_proj": q, f"{attn}.k_proj": kv, f"{attn}.v_proj": kv}),
            (f"{here}.attention.o_proj", {f"{attn}.o_proj": d}),
            (f"{here}.mlp.gate_up_proj.norm", {f"{there}.post_attention_layernorm": d}),
            (f"{here}.mlp.gate_up_proj", {f"{mlp}.gate_proj": config.ffn, f"{mlp}.up_proj": config.ffn}),
            (f"{here}.mlp.down_proj", {f"{mlp}.down_proj": d}),
        ]
    return [*rows, ("norm", {"model.norm": d}), ("lm_head", {"lm_head": VOCABULARY})]


def _pieces(layer: nn.Module, whole: Tensor, sizes: Mapping[str, int], *, casts: bool) -> list[Weight]:
    """Splits the rows of one fused layer into the linears that it holds."""
    cast = cast_of(layer) if isinstance(layer, QuantizedLayer) else None
    facts: tuple[Any, ...] = ()
    if isinstance(layer, QuantizedLayer):
        facts = input_scale_of(layer), layer.resolved.fprop.lhs, layer.name
    stays = "" if cast is not None or not casts else "its recipe does not cast it"
    weights, start = [], 0
    for name, size in sizes.items():
        rows = slice(start, start + size)
        piece = None if cast is None else rows_of_cast(cast, rows)
        weights.append(Weight(f"{name}.weight", whole[rows], True, stays, piece, *facts))
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
