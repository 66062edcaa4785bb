"""The tensors of a checkpoint, and the casts that a trained forward used."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ottava
from ottava.base.untrusted import UntrustedError
from ottava.numerics.formats import E4M3
from ottava.numerics.scaling import BLOCK_128X128, PER_ROW, PER_TENSOR
from ottava.serving.export import export
from ottava.serving.source import Unread, of_folder
from ottava.serving.trained import cast_of, input_scale_of, of_model


def test_the_cast_is_that_of_the_last_forward() -> None:
    """The witness multiplies its codes by hand; delayed scaling gives the scale of the history."""
    torch.manual_seed(0)
    for recipe in ("tensorwise", "rowwise", "mxfp8", "delayed"):
        model = nn.Sequential(nn.Linear(64, 96, bias=False)).bfloat16()
        ottava.convert(model, recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            model(torch.randn(32, 64).bfloat16()).float().square().mean().backward()
            optimizer.step()
        layer = model[0]
        cast = cast_of(layer)
        assert cast is not None
        x = torch.eye(64).bfloat16()  # its cast is exact, so y holds the decoded weight, rounded once
        with (
            torch.no_grad(),
            ottava.autocast(layer.resolved.override("*", cells={"fprop.lhs": layer.resolved.fprop.lhs})),
        ):
            y = model.eval()(x)
        assert torch.equal(y.t().float(), cast.dequantize().bfloat16().float()) or recipe == "delayed"
        assert (input_scale_of(layer) is None) == (recipe != "delayed")


def test_rows_of_a_cast_are_the_cast_of_the_rows() -> None:
    x = torch.randn(384, 64)
    for size, rows, there in (
        (PER_TENSOR, slice(3, 7), True),
        (PER_ROW, slice(3, 7), True),
        (BLOCK_128X128, slice(128, 384), True),
        (BLOCK_128X128, slice(0, 64), False),
    ):
        whole = ottava.quantize(x, ottava.QuantizationSpec(E4M3, size))
        part = whole.part(0, rows.start, rows.stop)
        assert (part is not None) == there
        if part is not None:
            assert torch.equal(part.dequantize(), whole.dequantize()[rows])


def test_a_model_without_a_config_and_a_damaged_folder_end_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no config of Hugging Face's"):
        of_model(nn.Linear(4, 4))
    with pytest.raises(TypeError, match="export"):
        of_model("model")  # type: ignore[arg-type]
    for text, message in (
        (None, "no config.json"),
        ("{", "config.json"),
        ("[]", "no object"),
        ('{"quantization_config": {"quant_method": "awq"}}', "quant_method 'awq'"),
        ('{"quantization_config": 8}', "needs an object"),
        ("{}", "cannot be read"),
    ):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(UntrustedError, match=message):
            of_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(UntrustedError, match="cannot be read"):
        of_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    with pytest.raises(UntrustedError, match="no weight_map from tensors to files"):
        of_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(UntrustedError, match="no file of this folder"):
        of_folder(tmp_path)
    codes = {"up.weight": torch.zeros(1, 4, 8, dtype=torch.float8_e4m3fn), "up.weight_scale": torch.ones(1)}
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(codes, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UntrustedError, match=r"codes of shape \(1, 4, 8\); needs a matrix"):
        of_folder(tmp_path)


def test_a_folder_tells_linears_from_the_rest(tmp_path: Path) -> None:
    names = {
        "model.embed_tokens.weight": "",
        "model.layers.0.self_attn.q_proj.weight": "linear",
        "model.layers.0.mlp.gate.weight": "router",
        "model.layers.0.input_layernorm.weight": "",
        "lm_head.weight": "head",
    }
    tensors = {n: torch.randn(64) if "norm" in n else torch.randn(64, 64) for n in names}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    source = of_folder(tmp_path)
    assert [path.name for path in source.files] == ["tokenizer.json"]
    for weight in source.weights:
        kind = names[weight.name]
        assert weight.linear == bool(kind), weight.name
        assert (kind in weight.stays) if kind in ("router", "head") else not weight.stays


def test_a_folder_is_exported_with_few_tensors_in_memory(tmp_path: Path) -> None:
    """At each look the tensors that were read before and are still alive are those of a shard and of one group."""
    names = [f"model.layers.{i}.mlp.{n}_proj.weight" for i in range(8) for n in ("up", "gate", "down")]
    state = {name: torch.randn(128, 256).bfloat16() for name in names}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    one = 2 * 128 * 256
    for layout, most in (("fp8-block", 3 * one), ("bf16", 3 * one)):
        source, alive, peak = of_folder(tmp_path), [], [0]

        def watched(unread: Unread, alive: list = alive, peak: list = peak) -> Unread:  # type: ignore[type-arg]
            def read() -> torch.Tensor:
                tensor = unread.read()
                alive.append(weakref.ref(tensor))
                peak[0] = max(peak[0], sum(ref() is not None for ref in alive) * one)
                return tensor

            return Unread(unread.shape, read)

        weights = tuple(replace(weight, values=watched(weight.values)) for weight in source.weights)  # type: ignore[arg-type]
        export(replace(source, weights=weights), tmp_path / layout, layout=layout, shard_bytes=2 * one)
        assert len(alive) >= len(state)
        assert peak[0] <= most, (layout, peak)
        again = of_folder(tmp_path / layout)
        assert len(list((tmp_path / layout).glob("model-*.safetensors"))) > 5
        for weight in again.weights:
            wanted = state[weight.name]
            if weight.cast is not None:
                wanted = ottava.quantize(wanted, weight.cast.spec).dequantize(torch.float32)
            assert torch.equal(weight.tensor, wanted)
