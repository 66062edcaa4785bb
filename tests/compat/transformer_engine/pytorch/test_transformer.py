"""TransformerEngine's TransformerLayer against torch's own layers in fp64, and its state dict both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common.recipe import MXFP8BlockScaling

QUIET: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def into_torch(layer: te.TransformerLayer, torchs: nn.Module) -> None:
    """Weights by TransformerEngine's names into torch's."""
    state = {name: tensor.double() for name, tensor in layer.state_dict().items()}
    pairs = [("self_attention.layernorm_qkv" if layer.arrangement == "pre" else "self_attention.qkv", "self_attn")]
    if layer.cross is not None:
        pairs.append(("inter_attention", "multihead_attn"))
    own = dict(torchs.named_parameters())
    with torch.no_grad():
        for theirs, name in pairs:
            cross = theirs == "inter_attention"
            for part in ("weight", "bias"):
                q = state[f"{theirs}.layernorm_query.query_{part}" if cross else f"{theirs}.query_{part}"]
                kv = [
                    state[f"{theirs}.key_value.{w}_{part}" if cross else f"{theirs}.{w}_{part}"]
                    for w in ("key", "value")
                ]
                own[f"{name}.in_proj_{part}"].copy_(torch.cat((q, *kv)))
                own[f"{name}.out_proj.{part}"].copy_(state[f"{theirs.split('.')[0]}.proj.{part}"])
                if layer.arrangement == "pre":
                    norm = f"{theirs}.layernorm_query" if cross else theirs
                    own[f"norm{2 if cross else 1}.{part}"].copy_(state[f"{norm}.layer_norm_{part}"])
        last = "norm3" if layer.cross is not None else "norm2"
        for part in ("weight", "bias"):
            own[f"linear1.{part}"].copy_(state[f"layernorm_mlp.fc1_{part}"])
            own[f"linear2.{part}"].copy_(state[f"layernorm_mlp.fc2_{part}"])
            mlp_norm = state[f"layernorm_mlp.layer_norm_{part}"]
            if layer.arrangement == "pre":
                own[f"{last}.{part}"].copy_(mlp_norm)
            else:
                own[f"norm1.{part}"].copy_(mlp_norm)
                own[f"{last}.{part}"].copy_(state[f"layernorm.{part}"])


def scatter(layer: nn.Module) -> None:
    """Gives norms other weights than ones and zeros."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.mark.parametrize("kind", ["pre", "post", "decoder"])
def test_the_layers_of_torch_are_the_witness(kind: str) -> None:
    """Forward and the gradient of x in fp64, causal, sequence first."""
    torch.manual_seed(0)
    changes: dict[str, Any] = {"activation": "relu", **QUIET}
    if kind == "post":
        changes |= {"output_layernorm": True, "apply_residual_connection_post_layernorm": True}
    if kind == "decoder":
        changes |= {"layer_type": "decoder"}
    layer = te.TransformerLayer(32, 64, 4, params_dtype=torch.float64, device="cpu", **changes)
    scatter(layer)
    make = nn.TransformerDecoderLayer if kind == "decoder" else nn.TransformerEncoderLayer
    torchs = make(32, 4, 64, dropout=0.0, norm_first=kind != "post", dtype=torch.float64)
    into_torch(layer, torchs)
    x = torch.randn(6, 2, 32, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(5, 2, 32, dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    results: list[tuple[Tensor, Tensor]] = []
    for run in (
        (lambda: layer(x, encoder_output=memory)) if kind == "decoder" else (lambda: layer(x)),
        (lambda: torchs(x, memory, tgt_mask=causal))
        if kind == "decoder"
        else (lambda: torchs(x, causal, is_causal=True)),
    ):
        y = run()
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        results.append((y, dx))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-11)


def test_a_state_dict_goes_there_and_back_under_fp8() -> None:
    for changes in (
        {"normalization": "RMSNorm", "activation": "swiglu", "num_gqa_groups": 2, "bias": False},
        {"parallel_attention_mlp": True, "attn_input_format": "bshd", "drop_path_rate": 0.0},
        {"fuse_qkv_params": True, "qkv_weight_interleaved": False, "zero_centered_gamma": True},
    ):
        torch.manual_seed(0)
        layer, other = (te.TransformerLayer(32, 64, 4, **QUIET, **changes).bfloat16() for _ in range(2))
        assert other.load_state_dict(layer.state_dict()) == ([], [])
        angles = te.RotaryPositionEmbedding(8)(6)
        x = torch.randn(6, 6, 32).bfloat16()
        with te.autocast(recipe=MXFP8BlockScaling()):
            y = layer(x, rotary_pos_emb=angles)
            assert torch.equal(other(x, rotary_pos_emb=angles), y)
        y.sum().backward()
        assert ottava.receipt(layer).fp8_fraction == 1.0


def test_what_is_not_here_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown layer_type 'Decoder'; did you mean 'decoder'"):
        te.TransformerLayer(32, 64, 4, layer_type="Decoder")
    with pytest.raises(ValueError, match="unknown attention_type 'crossed'; did you mean 'cross'"):
        te.MultiheadAttention(32, 4, attention_type="crossed")
    for changes, words in (
        ({"output_layernorm": True}, "give both"),
        ({"tp_size": 2}, "2 ranks with set_parallel_mode=False are not in ottava"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            te.TransformerLayer(32, 64, 4, **changes)
    both: dict[str, Any] = {"output_layernorm": True, "apply_residual_connection_post_layernorm": True}
    with pytest.raises(ValueError, match="goes with norms in front"):
        te.TransformerLayer(32, 64, 4, parallel_attention_mlp=True, **both)
