"""Commands about checkpoints: `ottava inspect`, `consolidate`, `export` and `parity`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import ottava
from command import run
from ottava.base.untrusted import UntrustedError
from ottava.interop.contents import StateFileError, read_contents
from serving_samples import TEXT, exported

# --- inspect ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A layer after one step: input 1, so the scale is 448."""
    layer = ottava.nn.Linear(64, 64, recipe="delayed").bfloat16()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    torch.save({"fc": layer.state_dict()}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_shows_a_row_per_tensor(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the checkpoint, and of the scaling state in it."""
    assert run("inspect", checkpoint) == 0
    shown = capsys.readouterr().out
    assert re.match(rf"{checkpoint}: 17 tensors, [\d,]+ bytes: \d+ float32, \d+ int64, 2 bfloat16\n", shown)
    (row,) = [line for line in shown.splitlines() if line.startswith("fc.weight ")]
    assert row.split()[1:3] == ["bfloat16", "64x64"]
    assert row.split()[3] == f"{torch.load(checkpoint)['fc']['weight'].abs().max():.4g}"
    assert f"{checkpoint}: scaling state of ottava, 3 tensors\n" in shown
    (row,) = [line for line in shown.splitlines() if line.startswith("fc     input")]
    assert row.split() == ["fc", "input", "1/16", "1", "1", "448", "0", "0", "E4M3,", "max,", "margin", "0"]


def test_json_is_one_object(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", checkpoint, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["schema_version"], values["source"], values["file"]) == (1, "ottava", str(checkpoint))
    tensor, first = next(one for one in values["tensors"] if one["name"] == "fc.weight"), values["rows"][0]
    assert (tensor["dtype"], tensor["shape"], tensor["nbytes"]) == ("bfloat16", [64, 64], 8192)
    assert (first["layer"], first["tensor"], first["filled"], first["scale"]) == ("fc", "input", 1, 448.0)


def test_contradiction_is_exit_code_1(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = torch.load(checkpoint)
    contents["fc"]["quantizers.input.scale"].fill_(3.0)
    torch.save(contents, checkpoint)
    assert run("inspect", checkpoint) == 1
    assert "problem: fc input: the scale does not follow from the history" in capsys.readouterr().out


class RunsACommand:
    """What an attacker's pickle does when loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize("contents", [{"step": 3}, {"fc.weight": RunsACommand()}])
def test_file_without_tensors_or_with_code_in_it_is_a_bad_input_file(contents: Any, tmp_path: Path) -> None:
    torch.save(contents, tmp_path / "file.pt")
    with pytest.raises(StateFileError) as caught:
        run("inspect", tmp_path / "file.pt")
    assert caught.value.exit_code == 4


# --- consolidate -----------------------------------------------------------------------------------------------------


def test_a_folder_becomes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = ottava.nn.Linear(64, 64, recipe="delayed").bfloat16()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    writer = HuggingFaceStorageWriter(str(tmp_path / "shards"), save_distributed=True)
    dcp.save({f"fc.{name}": value for name, value in layer.state_dict().items()}, storage_writer=writer, no_dist=True)
    assert run("consolidate", tmp_path / "shards", tmp_path / "whole", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == len(layer.state_dict())
    found = load_file(tmp_path / "whole" / "model.safetensors")
    assert torch.equal(found["fc.weight"], layer.weight)
    shown = [str(read_contents(tmp_path / name).state).split("\n", 1)[1] for name in ("shards", "whole")]
    assert "fc" in shown[0]
    assert shown[0] == shown[1]


# --- export ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "bf16"
    source.mkdir()
    save_file({"up_proj.weight": torch.randn(128, 256).bfloat16()}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "tokenizer.json").write_text("{}")
    assert run("export", source, tmp_path / "out", "--layout", "fp8-block", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["layout"], report["linears"][0]["cast"]) == ("fp8-block", "E4M3[128x128]")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert run("export", source, tmp_path / "text") == 0
    assert "1 of 1 linears in FP8" in capsys.readouterr().out


def test_bad_words_are_named(tmp_path: Path) -> None:
    with pytest.raises(UntrustedError, match=r"no config\.json"):
        run("export", tmp_path, tmp_path / "out")
    (tmp_path / "config.json").write_text("{}")
    save_file({"up_proj.weight": torch.randn(128, 256).bfloat16()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="layout 'fp8'"):
        run("export", tmp_path, tmp_path / "out", "-l", "fp8")


def test_another_recipe_and_an_engine_are_asked_for_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MXFP4 weights, in a layout for FP8: refused, then cast anew on request, with exit code 1."""
    (source := tmp_path / "bf16").mkdir()
    save_file({"up_proj.weight": torch.randn(128, 256).bfloat16()}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llama"}')
    assert run("export", source, tmp_path / "fp4", "-l", "compressed-tensors-mxfp4", "-e", "vllm") == 0
    with pytest.raises(ValueError, match=r"holds E4M3\[row\]. Take layout 'compressed-tensors-mxfp4', or .*--recast"):
        run("export", tmp_path / "fp4", tmp_path / "out", "-l", "compressed-tensors-channel")
    assert run("export", tmp_path / "fp4", tmp_path / "out", "-l", "compressed-tensors-channel", "--recast") == 1
    said = capsys.readouterr().out
    assert "E4M3[row], not as trained (trained as E2M1[1x32, e8m0]; the layout holds E4M3[row])" in said
    with pytest.raises(ValueError, match="trtllm does not read quant_method 'mxfp8'"):
        run("export", source, tmp_path / "no", "-l", "mxfp8", "-e", "trtllm")


# --- parity ----------------------------------------------------------------------------------------------------------


def test_a_run_and_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"d_model": 128, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 128}
    words = ["steps=2", "recipe=blockwise", "sequence_length=32", "batch_size=2"]
    sets = [word for one in (*words, *(f"model.{k}={v}" for k, v in sizes.items())) for word in ("--set", one)]
    assert run("train", "--run-dir", tmp_path / "run", *sets) in (0, None)
    out, certificate = tmp_path / "out", tmp_path / "certificate.json"
    assert run("export", tmp_path / "run", out, "-l", "compressed-tensors-block") == 0
    assert run("parity", tmp_path / "run", out, "-o", certificate) == 0
    assert "equal: vllm on cuda multiplies what training multiplied, 7 of 8 linears in FP8" in capsys.readouterr().out
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
    twin = importlib.util.find_spec("transformers") is not None
    assert ("bytes of a sentence of ottava's" if twin else "needs transformers: pip install transformers") in text
    (tmp_path / "engine.json").write_text('{"kv_cache_dtype": "fp8"}')
    (tmp_path / "text.txt").write_text("abc " * 10)
    assert run("parity", tmp_path / "run", out, "--engine-config", tmp_path / "engine.json", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert {one["cause"] for one in found["findings"]} == {"scales", "kv-cache"}
    assert run("parity", tmp_path / "run", out, "--text", tmp_path / "text.txt") == 1
    assert not twin or "40 bytes of text.txt" in capsys.readouterr().out
    assert run("parity", tmp_path / "run", out, "--no-kl") == 1
    assert "KL: not measured" in capsys.readouterr().out


def test_a_checkpoint_in_bf16_under_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "bf16"
    source.mkdir()
    save_file({"up_proj.weight": torch.randn(128, 256).bfloat16()}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "other", "vocab_size": 512}')
    assert run("export", source, tmp_path / "out", "-l", "fp8-block") == 0
    assert run("parity", source, tmp_path / "out", "--recipe", "blockwise_fp32", "-e", "sglang") == 0
    assert run("parity", source, tmp_path / "out") == 1
    assert "the train side casts nothing: give the recipe" in capsys.readouterr().out
    with pytest.raises(ValueError, match="unknown engine"):
        run("parity", source, tmp_path / "out", "-e", "tensorrt")
    with pytest.raises(UntrustedError, match=r"no config\.json"):
        run("parity", source, tmp_path)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UntrustedError, match="needs one JSON object"):
        run("parity", source, tmp_path / "out", "--engine-config", tmp_path / "list.json")


# --- answers ---------------------------------------------------------------------------------------------------------


def test_the_exit_code_is_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, text = exported("bf16"), exported("compressed-tensors-tensor"), tmp_path / "sums.txt"
    text.write_text(TEXT)
    few = ("--text", text, "--chunks", 6, "--generate", 3)
    assert run("eval", good, bad, *few, "-o", tmp_path / "page.html", "-o", tmp_path / "all.json") == 0
    said = capsys.readouterr().out
    assert "A and B answer alike" in said
    assert "equal" not in said.partition("Answers")[0]
    assert said.rstrip().endswith("all.json")
    assert "A and B answer alike" in (tmp_path / "page.html").read_text()
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight_scale"] *= 4
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    assert run("parity", good, f"{bad}@engine", *few, "--json") == 1
    values = json.loads(capsys.readouterr().out)
    assert values.keys() == json.loads((tmp_path / "all.json").read_text()).keys()
    assert (values["schema_version"], values["verdict"]["kind"]) == (1, "wrong-values")
    assert values["answers"]["perplexity_b"] > 1
    assert values["b"].endswith("under engine")
    assert [one["name"] for one in values["weights"]["tensors"] if one["wrong"]] == [
        "model.layers.0.self_attn.o_proj.weight"
    ]


def test_certificate_and_answers_share_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, served, text = exported("bf16"), tmp_path / "served", tmp_path / "sums.txt"
    text.write_text(TEXT)
    assert run("export", good, served, "-l", "fp8-block-ue8m0") == 0
    capsys.readouterr()
    few = ("--answers", "--text", text, "--chunks", 6, "--generate", 0)
    words = (f"{good}@blockwise", served, *few, "-o", tmp_path / "page.html")
    assert run("parity", *words, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["verdict"], values["answers"]["verdict"]["kind"]) == ("equal", "same")
    page = (tmp_path / "page.html").read_text()
    assert "Equal: vllm on cuda multiplies what training multiplied" in page
    assert values["answers"]["verdict"]["sentence"] in page
    tensors = load_file(served / "model.safetensors")
    scale = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    tensors[scale] = (8 * tensors[scale].float()).to(tensors[scale].dtype)
    save_file(tensors, served / "model.safetensors", metadata={"format": "pt"})
    assert run("parity", *words) == 1
    said = capsys.readouterr().out
    assert said.startswith("different, first at model.layers.0.self_attn.o_proj")
    assert "Wrong scales or weights are read in 1 of" in said
    page = (tmp_path / "page.html").read_text()
    assert ('id="linear"' in page) is (find_spec("transformers") is not None)  # the KL of a linear runs there
    assert "no" in page.partition("Linear by linear")[2]
    of_masters = exported("fp8-block-ue8m0", "blockwise")  # cast from FP32; `good` holds their BF16
    assert run("parity", words[0], of_masters, "--no-kl", "--no-run") == 1
    assert "one side casts the FP32 master, the other its rounding to BF16" in capsys.readouterr().out.splitlines()[0]
    assert run("parity", *words[:2], "--no-kl", "-o", tmp_path / "page.html") == 1
    assert "Greedy" not in (tmp_path / "page.html").read_text()
    assert "Answers" not in (tmp_path / "page.html").read_text()
