"""`ottava plan` on models and on a recorded run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ottava
from command import run
from ottava.record.amaxes import AmaxLog, RecordingError

# --- plan ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """40 steps of two tensors; the input grows by an octave at step 20."""
    spec = ottava.RECIPES["delayed"].fprop.lhs
    log = AmaxLog(tmp_path)
    for step in range(1, 41):
        log.append(step, [("fc1", "input", spec, 1.0 if step < 20 else 2.0), ("fc1", "weight", spec, 0.5)])
    return tmp_path


def test_prints_the_ranking_and_the_advice(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's own L=16, max, margin 0 clips once, at the jump; with a margin of 1 79 casts lose a bit instead."""
    assert run("plan", "--history", recorded) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{recorded}: 40 steps, 2 tensors of 1 layers"
    assert sum("margin" in line for line in lines[3:-3]) == 24
    assert next(line for line in lines if "<- the run's own" in line).startswith("* L=16, max, margin 0")
    assert lines[-1] == (
        "most_recent, margin 1 would have clipped 0 of 80 casts (40 steps) and lost 1.0 bits on average; the run's own "
        "L=16, max, margin 0 clipped 1 and lost 0.0 bits; guarded, it would take the current scale in 1."
    )


def test_run_without_a_recording_is_a_bad_input_file(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="does not exist") as caught:
        run("plan", "--history", tmp_path)
    assert caught.value.exit_code == 4


def test_one_of_the_two_is_asked_for(tmp_path: Path) -> None:
    for arguments in ((), ("llama-8b", "--history", tmp_path)):
        with pytest.raises(ValueError, match="give either a MODEL to predict its layers, or --history"):
            run("plan", *arguments)


def test_a_model_is_predicted_layer_by_layer(capsys: pytest.CaptureFixture[str]) -> None:
    """With the device, the fact that nothing was measured, and a reason a layer."""
    assert run("plan", "llama-8b", "--tokens", "16384", "--recipe", "delayed") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "recipe 'delayed', 16,384 tokens, H200 (assumed): predicted, not measured"
    assert lines[1].startswith("4 of 4 linear layers gain")
    assert "mlp.gate_up" in lines[4]
    assert "gains: the GEMMs save" in lines[4]


def test_a_model_of_ones_own_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """MODULE:FUNCTION, built on the meta device; small layers are refused."""
    assert run("plan", f"{__name__}:own_model", "--tokens", "512", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["schema_version"], values["tokens"], values["recipe"]) == (1, 512, "tensorwise")
    assert [(layer["name"], layer["shape"], layer["taken"]) for layer in values["layers"]] == [
        ("", [512, 64, 32], False)
    ]


def own_model() -> torch.nn.Module:
    """The model of MODULE:FUNCTION in the test above."""
    return torch.nn.Linear(64, 32)


@pytest.mark.parametrize(
    "model, message",
    [("llama", "unknown model 'llama'"), ("builtins:dict", "returned dict"), ("json:x", "no function 'x'")],
)
def test_wrong_models_are_refused(model: str, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        run("plan", model)


def test_memory_of_a_whole_model_beside_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers are those of docs/memory.md. Options that exclude each other are refused."""
    stored = [f"--optimizer={setting}" for setting in ("weights=fp8", "master=remainder", "moments=fp8")]
    assert run("plan", "llama-1b", "--memory", "--recipe=delayed", *stored, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    memory = values["memory"]
    assert memory["parameters"] == values["bf16"]["parameters"] > 1.2e9
    assert values["bf16"]["state"] // memory["parameters"] == 16
    assert values["share_of_bf16"] == pytest.approx(memory["state"] / values["bf16"]["state"])
    assert values["share_of_bf16"] < 0.47
    assert run("plan", "llama-1b", "--memory") == 0
    assert capsys.readouterr().out.endswith(
        "1.00 of the 19,777,978,884 bytes of BF16 with AdamW's masters and moments in FP32\n"
    )
    for arguments, words in (
        (["llama-1b", "--memory", "--optimizer=moments=int9"], "moments: got 'int9'"),
        (["llama-1b", "--optimizer=moments=fp8"], "--optimizer is for --memory; give both"),
        (["--history=x", "--memory"], "--memory is for a MODEL"),
    ):
        with pytest.raises(ValueError, match=words):
            run("plan", *arguments)


def test_many_processes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama-1b", "--world", "1024", "--mesh", "dp=128,tp=8", "--device", "h200")
    assert run("plan", *words) == 0
    assert "1,024 processes, H200 (assumed)" in capsys.readouterr().out
    assert run("plan", *words, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["world"] == 1024
    assert values["wires"]["dp"]["summed"] == pytest.approx(2 * values["parameters"])
    with pytest.raises(ValueError, match="has 8 processes; --world is 16"):
        run("plan", "llama-1b", "--world", "16", "--mesh", "tp=8")
    with pytest.raises(ValueError, match="go together"):
        run("plan", "llama-1b", "--world", "16")
