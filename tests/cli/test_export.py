"""`ottava export`: a checkpoint in, a checkpoint out, and an exit code that says whether codes changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ottava.base.untrusted import UntrustedError
from ottava.cli.app import app


def run(*arguments: object) -> int:
    return app(["export", *map(str, arguments)], standalone_mode=False)  # type: ignore[no-any-return]


def test_a_folder_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "bf16"
    source.mkdir()
    save_file({"up_proj.weight": torch.randn(128, 256).bfloat16()}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "tokenizer.json").write_text("{}")
    assert run(source, tmp_path / "out", "--layout", "fp8-block", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["layout"], report["linears"][0]["cast"]) == ("fp8-block", "E4M3[128x128]")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert run(source, tmp_path / "text") == 0
    assert "1 of 1 linears in FP8" in capsys.readouterr().out


def test_bad_words_are_named(tmp_path: Path) -> None:
    with pytest.raises(UntrustedError, match=r"no config\.json"):
        run(tmp_path, tmp_path / "out")
    (tmp_path / "config.json").write_text("{}")
    save_file({"up_proj.weight": torch.randn(128, 256).bfloat16()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="layout 'fp8'"):
        run(tmp_path, tmp_path / "out", "-l", "fp8")


def test_another_recipe_and_an_engine_are_asked_for_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MXFP4 weights, in a layout for FP8: refused, then cast anew on request, with exit code 1."""
    (source := tmp_path / "bf16").mkdir()
    save_file({"up_proj.weight": torch.randn(128, 256).bfloat16()}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llama"}')
    assert run(source, tmp_path / "fp4", "-l", "compressed-tensors-mxfp4", "-e", "vllm") == 0
    with pytest.raises(ValueError, match=r"holds E4M3\[row\]. Take layout 'compressed-tensors-mxfp4', or .*--recast"):
        run(tmp_path / "fp4", tmp_path / "out", "-l", "compressed-tensors-channel")
    assert run(tmp_path / "fp4", tmp_path / "out", "-l", "compressed-tensors-channel", "--recast") == 1
    said = capsys.readouterr().out
    assert "E4M3[row], not as trained (trained as E2M1[1x32, e8m0]; the layout holds E4M3[row])" in said
    with pytest.raises(ValueError, match="trtllm does not read quant_method 'mxfp8'"):
        run(source, tmp_path / "no", "-l", "mxfp8", "-e", "trtllm")
