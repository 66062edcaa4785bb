"""`ottava eval`: text, JSON, page and exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ottava.cli.app import app
from serving_samples import TEXT, exported


def run(*arguments: object) -> int:
    return app(["eval", *map(str, arguments)], standalone_mode=False)  # type: ignore[no-any-return]


def test_the_exit_code_is_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, text = exported("bf16"), exported("compressed-tensors-tensor"), tmp_path / "sums.txt"
    text.write_text(TEXT)
    few = ("--text", text, "--chunks", 6, "--generate", 3)
    assert run(good, bad, *few, "-o", tmp_path / "page.html") == 0
    said = capsys.readouterr().out
    assert "A and B answer alike" in said
    assert said.rstrip().endswith("page.html")
    assert (tmp_path / "page.html").is_file()
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight_scale"] *= 4
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    assert run(good, bad, *few, "--json", "--recipe-b", "engine") == 1
    values = json.loads(capsys.readouterr().out)
    assert (values["schema_version"], values["verdict"]["kind"]) == (1, "wrong-values")
    assert values["answers"]["perplexity_b"] > 1
    assert values["b"].endswith("under engine")
    assert [one["name"] for one in values["weights"]["tensors"] if one["wrong"]] == [
        "model.layers.0.self_attn.o_proj.weight"
    ]
