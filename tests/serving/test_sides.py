"""What an engine multiplies: scales under either name, joined linears, settings; and the KL of one linear alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from ottava.base.untrusted import UntrustedError
from ottava.numerics.scaling import PER_ROW
from ottava.serving.sides import (
    FAMILIES,
    Model,
    Side,
    Text,
    digest,
    kl_alone,
    logits,
    made_up,
    multiply,
    served,
    trained,
)
from ottava.train.config import ModelConfig
from ottava.train.llama import as_llama
from ottava.train.model import ByteTransformer
from ottava.weights.layouts import InputCast, read_config


def test_a_digest_is_of_bits_dtype_and_shape() -> None:
    x = torch.arange(4.0)
    assert digest(x) == digest(x.clone())
    others = (x.view(2, 2), x.bfloat16(), x + 1, x.double())
    assert len({digest(x), *(digest(other) for other in others)}) == 5


def test_joined_linears_are_rounded_again_to_the_largest_scale(pair: Callable[..., Any]) -> None:
    """A witness: decoded by the own scale, divided by the largest, rounded once."""
    one = pair("llama", "delayed", "modelopt")
    q = "model.layers.0.self_attn.q_proj"
    stored = one.tensors
    old = stored[f"{q}.weight_scale"]
    one.change({f"{q}.weight_scale": old / 3})
    side = served(one.folder, "vllm").linears[q]
    assert side.cast is not None
    assert float(side.cast.scale_inv) == float(old)
    numbers = stored[f"{q}.weight"].float() * (old / 3)
    assert torch.equal(side.cast.data.float(), (numbers * old.reciprocal()).to(torch.float8_e4m3fn).float())
    apart = served(one.folder, "vllm", {"kv_cache_dtype": "auto"})
    assert not apart.kv_cache
    with pytest.raises(ValueError, match="unknown engine 'vlm'; did you mean 'vllm'"):
        served(one.folder, "vlm")


def test_damaged_folders_end_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UntrustedError, match=r"parity: .* cannot be read: .*no config\.json"):
        served(tmp_path, "vllm")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert read_config(tmp_path)["quantization_config"] == {"quant_method": "modelopt", "quant_algo": "FP8"}
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}})
    )
    codes = torch.zeros(128, 128).to(torch.float8_e4m3fn)
    save_file({"up.weight": codes, "up.weight_scale_inv": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    with pytest.raises(UntrustedError, match="needs two numbers"):
        served(tmp_path, "vllm")


def test_logits_are_those_of_our_llama() -> None:
    """In fp32, with weights that BF16 represents and inputs of linears that it does not: to BF16's rounding of them."""
    config = ModelConfig(d_model=64, layers=2, heads=4, kv_heads=2, ffn=128)
    torch.manual_seed(0)
    model = ByteTransformer(config, 64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    side = trained(as_llama(model, config, 64))
    ids = made_up(256, 48).ids
    with torch.no_grad():
        wanted, got = model(ids[None])[0], logits(side, side.linears, ids)
    assert (got - wanted).norm() / wanted.norm() < 2 * 15 * 2.0**-9  # fifteen linears deep, each rounds its input once
    assert set(FAMILIES) >= {"llama"}


def test_a_linear_multiplies_what_its_side_has() -> None:
    x, weight = torch.randn(5, 64), torch.randn(32, 64)
    plain = multiply(x, Side(weight))
    assert torch.equal(plain, x.bfloat16().float() @ weight.bfloat16().float().t())
    from ottava import E4M3, QuantizationSpec, quantize

    spec = QuantizationSpec(E4M3, PER_ROW)
    cast = quantize(weight, spec)
    for rounded in (True, False):
        side = Side(weight, cast, InputCast(PER_ROW, False, False, rounded=rounded))
        rows = quantize(x.bfloat16() if rounded else x, spec).dequantize(torch.float32)
        assert torch.equal(multiply(x, side), rows @ cast.dequantize(torch.float32).t())


def test_kl_of_one_linear(pair: Callable[..., Any]) -> None:
    one = pair("qwen3", "blockwise_fp32", "compressed-tensors-block")
    name = "model.layers.1.mlp.down_proj"
    one.change({f"{name}.weight_scale": one.tensors[f"{name}.weight_scale"] * 2})
    ours, theirs = trained(one.source), served(one.folder, "vllm")
    text = made_up(256, 24)
    kls, said = kl_alone(ours, theirs, [name], text)
    with torch.no_grad():
        p = F.softmax(logits(ours, ours.linears, text.ids), -1)
        q = F.softmax(logits(ours, {**ours.linears, name: theirs.linears[name]}, text.ids), -1)
    assert abs(kls[name] - float(F.kl_div(q.log(), p, reduction="batchmean"))) < 1e-5
    assert "24 tokens" in said
    other: Model = replace(ours, config={**ours.config, "model_type": "mamba"})
    assert "'mamba' is none of" in kl_alone(other, theirs, [name], text)[1]
    assert "beyond the vocabulary" in kl_alone(ours, theirs, [name], Text(torch.tensor([999]), ""))[1]
    assert kl_alone(ours, theirs, [name], None) == ({}, "not measured")
    assert torch.equal(made_up(50).ids, made_up(50).ids)
