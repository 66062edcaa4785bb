"""What an engine multiplies: scales under either name, joined linears, settings; and the KL of one linear alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ottava.base.untrusted import UntrustedError
from ottava.numerics.scaling import PER_ROW
from ottava.serving.sides import Side, digest, served
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


def test_a_linear_multiplies_what_its_side_has() -> None:
    x, weight = torch.randn(5, 64), torch.randn(32, 64)
    plain = Side(weight).rows(x) @ Side(weight).operand().t()
    assert torch.equal(plain, x.bfloat16().float() @ weight.bfloat16().float().t())
    from ottava import E4M3, QuantizationSpec, quantize

    spec = QuantizationSpec(E4M3, PER_ROW)
    cast = quantize(weight, spec)
    for rounded in (True, False):
        side = Side(weight, cast, InputCast(PER_ROW, False, False, rounded=rounded))
        rows = quantize(x.bfloat16() if rounded else x, spec).dequantize(torch.float32)
        assert torch.equal(side.rows(x) @ side.operand().t(), rows @ cast.dequantize(torch.float32).t())
