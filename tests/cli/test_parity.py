"""`ottava parity`: a run and its checkpoint in, a certificate and an exit code for CI out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ottava.base.untrusted import UntrustedError
from ottava.cli.app import app


def run(*arguments: object) -> int:
    return app(list(map(str, arguments)), standalone_mode=False)  # type: ignore[no-any-return]


def test_a_run_and_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"d_model": 128, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 128}
    words = ["steps=2", "recipe=blockwise_fp32", "sequence_length=32", "batch_size=2"]
    sets = [word for one in (*words, *(f"model.{k}={v}" for k, v in sizes.items())) for word in ("--set", one)]
    assert run("train", "--run-dir", tmp_path / "run", *sets) in (0, None)
    out, certificate = tmp_path / "out", tmp_path / "certificate.json"
    assert run("export", tmp_path / "run", out, "-l", "compressed-tensors-block") == 0
    assert run("parity", tmp_path / "run", out, "-o", certificate) == 0
    assert "equal: vllm multiplies what training multiplied, 7 of 8 linears in FP8" in capsys.readouterr().out
    first = certificate.read_bytes()
    assert run("parity", tmp_path / "run", out, "-o", certificate, "--json") == 0
    assert certificate.read_bytes() == first
    assert json.loads(capsys.readouterr().out) == json.loads(first)
    assert str(tmp_path) not in first.decode()

    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale"] *= 2
    save_file(tensors, out / "model.safetensors")
    assert run("parity", tmp_path / "run", out) == 1
    text = capsys.readouterr().out
    assert "different, first at model.layers.0.mlp.up_proj" in text
    assert "bytes of a sentence of ottava's" in text
    (tmp_path / "engine.json").write_text('{"kv_cache_dtype": "fp8"}')
    (tmp_path / "text.txt").write_text("abc " * 10)
    assert run("parity", tmp_path / "run", out, "--engine-config", tmp_path / "engine.json", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert {one["cause"] for one in found["findings"]} == {"scales", "kv-cache"}
    assert run("parity", tmp_path / "run", out, "--text", tmp_path / "text.txt") == 1
    assert "40 bytes of text.txt" in capsys.readouterr().out
    assert run("parity", tmp_path / "run", out, "--no-kl") == 1
    assert "KL: not measured" in capsys.readouterr().out


def test_a_checkpoint_in_bf16_under_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "bf16"
    source.mkdir()
    save_file({"up_proj.weight": torch.randn(128, 256).bfloat16()}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "other", "vocab_size": 512}')
    assert run("export", source, tmp_path / "out", "-l", "fp8-block") == 0
    assert run("parity", source, tmp_path / "out", "--recipe", "blockwise_fp32") == 0
    assert run("parity", source, tmp_path / "out") == 1
    assert "the train side casts nothing: give the recipe" in capsys.readouterr().out
    with pytest.raises(ValueError, match="unknown engine"):
        run("parity", source, tmp_path / "out", "-e", "tensorrt")
    with pytest.raises(UntrustedError, match=r"no config\.json"):
        run("parity", source, tmp_path)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UntrustedError, match="needs one JSON object"):
        run("parity", source, tmp_path / "out", "--engine-config", tmp_path / "list.json")
