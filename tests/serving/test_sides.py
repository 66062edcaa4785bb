"""What an engine multiplies: scales under either name, joined linears, settings in the engine's words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ottava.base.untrusted import UntrustedError
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW, PER_TENSOR
from ottava.serving.sides import digest, served, trained
from ottava.weights.layouts import read_config, read_quantization


def test_a_digest_is_of_bits_dtype_and_shape() -> None:
    x = torch.arange(4.0)
    assert digest(x) == digest(x.clone())
    others = (x.view(2, 2), x.bfloat16(), x + 1, x.double())
    assert len({digest(x), *(digest(other) for other in others)}) == 5


def test_both_sides_of_a_pair_are_one(pair: Callable[..., Any]) -> None:
    for recipe, layout, size, activations in (
        ("blockwise_fp32", "fp8-block", BLOCK_128X128, BLOCK_1X128),
        ("mxfp8", "mxfp8", BLOCK_1X32, BLOCK_1X32),
        ("mxfp8", "compressed-tensors-mxfp8", BLOCK_1X32, BLOCK_1X32),
        ("rowwise_fp32", "compressed-tensors-channel", PER_ROW, PER_ROW),
        ("delayed", "modelopt", PER_TENSOR, PER_TENSOR),
    ):
        one = pair("llama", recipe, layout)
        ours, theirs = trained(one.source), served(one.folder, "vllm")
        assert read_quantization(theirs.config["quantization_config"]).blocks == (size,)
        assert {n: s.digest for n, s in ours.linears.items()} == {n: s.digest for n, s in theirs.linears.items()}
        casts = [side.activations for side in theirs.linears.values() if side.cast is not None]
        assert {cast.granularity for cast in casts if cast} == {activations}
        assert ours.tied is theirs.tied is False
        assert set(theirs.files) >= {"config.json", "model.safetensors"}


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


def test_damaged_folders_end_in_a_sentence(tmp_path: Path, pair: Callable[..., Any]) -> None:
    for text, message in (
        (None, "no config.json"),
        ("{", "config.json"),
        ("[]", "no object"),
        ("{}", "cannot be read"),
    ):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(UntrustedError, match=message):
            served(tmp_path, "vllm")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert read_config(tmp_path)["quantization_config"] == {"quant_method": "modelopt", "quant_algo": "FP8"}
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}})
    )
    codes = torch.zeros(128, 128).to(torch.float8_e4m3fn)
    save_file({"up.weight": codes, "up.weight_scale_inv": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    with pytest.raises(UntrustedError, match="needs two numbers"):
        served(tmp_path, "vllm")
