"""The damage of one linear: the KL of a decoder in which it alone is the engine's, from the one that was trained.

The decoder is Llama's formula over named tensors (Llama, Mistral, Qwen 2 and 3), in FP32 around the linears, whose
operands are cast as each side casts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ottava.nn.attention import DotProductAttention
from ottava.nn.rope import RotaryEmbedding, RotaryScaling, RotaryTable, rotate
from ottava.ops.quantize import quantize
from ottava.serving.causes import spec_of
from ottava.serving.sides import Model, Side

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SAMPLE = (
    "A trainer and an inference engine that quantize other layers, other values or other layouts compute other things, "
    "in silence. This text is short, and the same for every certificate: it shows which layer hurts, not how much."
)
"""A text for models that read bytes."""
_MOST = 32
"""Linears that are measured; each costs a forward."""


@dataclass(frozen=True, eq=False)
class Text:
    """Tokens for a measurement."""

    ids: Tensor
    """int64 (T,)."""
    said: str
    """What they are, for the certificate."""


def made_up(vocabulary: int, length: int = 128) -> Text:
    """Tokens without a tokenizer: always the same ones, drawn evenly."""
    drawn = torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(0))
    return Text(drawn, f"{length} tokens drawn evenly from the vocabulary (no tokenizer was read)")


def kl_alone(ours: Model, theirs: Model, changed: Sequence[str], text: Text | None) -> tuple[dict[str, float], str]:
    """(linear -> nats per token, what was measured or why not).

    The KL of a token is KL(p of training || p with this linear as the engine has it); the mean over tokens.
    """
    family = str(ours.config.get("model_type", ""))
    if text is None:
        return {}, "not measured"
    if not changed:
        return {}, "0: both sides multiply the same operands"
    if family not in FAMILIES:
        return {}, f"not measured: model_type {family!r} is none of {', '.join(FAMILIES)}"
    if int(text.ids.max()) >= int(ours.config.get("vocab_size", 0)):
        return {}, "not measured: the text has tokens beyond the vocabulary"
    with torch.no_grad():
        base = F.log_softmax(logits(ours, ours.linears, text.ids), -1)
        found = {}
        for name in changed[:_MOST]:
            alone = F.log_softmax(logits(ours, {**ours.linears, name: theirs.linears[name]}, text.ids), -1)
            found[name] = float((base.exp() * (base - alone)).sum(-1).mean())
    left = f"; the first {_MOST} of {len(changed)} linears" if len(changed) > _MOST else ""
    return found, f"nats per token, each linear alone, on {text.said}{left}"


def logits(model: Model, linears: Mapping[str, Side], ids: Tensor) -> Tensor:
    """ids int64 (T,) -> logits fp32 (T, V).

    Raises:
        KeyError: the tensors are not those of such a decoder.
    """
    config, plain = model.config, {name: tensor.float() for name, tensor in model.plain.items()}
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    eps = config["rms_norm_eps"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], plain[f"{name}.weight"], eps)

    def linear(x: Tensor, name: str) -> Tensor:
        y = multiply(x, linears[name])
        return y if (bias := plain.get(f"{name}.bias")) is None else y + bias

    attention = DotProductAttention(mask="causal")
    rotary = _rotary(config, size, ids.shape[0])
    x = plain["model.embed_tokens.weight"].bfloat16().float()[ids]
    for i in range(config["num_hidden_layers"]):
        here = f"model.layers.{i}"
        rows = norm(x, f"{here}.input_layernorm")
        q, k, v = (
            linear(rows, f"{here}.self_attn.{one}_proj").view(1, -1, n, size)
            for one, n in zip("qkv", (heads, groups, groups), strict=True)
        )
        if f"{here}.self_attn.q_norm.weight" in plain:
            q, k = norm(q, f"{here}.self_attn.q_norm"), norm(k, f"{here}.self_attn.k_norm")
        y = attention(rotate(q, rotary), rotate(k, rotary), v)
        x = x + linear(y.flatten(-2)[0], f"{here}.self_attn.o_proj")
        rows = norm(x, f"{here}.post_attention_layernorm")
        gated = F.silu(linear(rows, f"{here}.mlp.gate_proj")) * linear(rows, f"{here}.mlp.up_proj")
        x = x + linear(gated, f"{here}.mlp.down_proj")
    x = norm(x, "model.norm")
    return x @ plain["model.embed_tokens.weight"].bfloat16().float().t() if model.tied else linear(x, "lm_head")


def _rotary(config: Mapping[str, Any], size: int, length: int) -> RotaryTable:
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = float(rope.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0)
    known = {name: value for name, value in rope.items() if name in RotaryScaling.__dataclass_fields__}
    table: RotaryTable = RotaryEmbedding(size, base=base, scaling=RotaryScaling(**known))(torch.arange(length))
    return table


def multiply(x: Tensor, side: Side) -> Tensor:
    """x fp32 (T, K) -> y fp32 (T, N), with operands as the side has them."""
    rows = x.bfloat16().float()
    if side.activations is not None and side.cast is not None:
        cast = side.activations
        scale = torch.tensor(1 / cast.scale_inv) if cast.static and cast.scale_inv else None
        given = x.bfloat16() if cast.rounded else x
        rows = quantize(given, spec_of(cast, side.cast.spec), scale=scale).dequantize(torch.float32)
    weight = side.weight.bfloat16().float() if side.cast is None else side.cast.dequantize(torch.float32)
    return rows @ weight.t()
