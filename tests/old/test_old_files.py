"""Files that earlier versions wrote are read for ever: a run folder of each version is kept here and stays as it is.

run-2    `ottava train` of 2026-11-22: checkpoint format 2 (each norm a layer of its own), watch schema 1; delayed
run-3    `ottava train` of 2026-11-23: checkpoint format 3, manifest 1, watch schema 2; BF16 weights that are rounded
         stochastically, int8 moments, recipe delayed, two of four steps
run-3-fp8 the same day: weights in FP8 with remainders, moments in FP8; two of four steps, and the curve of all four
export-1 `ottava export` of that run: a scale a tensor, as compressed-tensors
shards-1 two processes of 2026-11-23: shards/1 from before their hashes, without a watch; BF16 weights with remainders
trace-1  `StepRecorder` of 2026-11-29, which `ottava check` saves; rollout-1 a dump of that day with its certificate
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ottava.nn.fp8_checkpoint import load_fp8
from ottava.prove.recorder import StepRecording
from ottava.record.reader import Run
from ottava.serving.rollout import certify, read_rollout
from ottava.train.checkpoint import find_checkpoint, high_precision_weights, save_checkpoint
from ottava.train.config import load_config
from ottava.train.loop import Trainer

OLD = Path(__file__).parent


@pytest.mark.parametrize(
    "name, step, digest, rows, amax",
    [
        ("run-2", 4, "6c043a7a38162d529b5fd8c4bed9a736a007954f81fc2d4f3055de433db26c23", 60, 5.1875),
        ("run-3", 2, "a2882df960fa18510665921b314c11eaf4a6e4bf21f8bd0b53bd6699409958c1", 15, 2.96875),
        ("shards-1", 2, "f2c1a6b9a51973fffbf50524d5d9bad76f40f3a193fc147598d473adac978de6", 0, None),
    ],
)
def test_an_old_run_is_read_to_the_bit(name: str, step: int, digest: str, rows: int, amax: float | None) -> None:
    checkpoint, problems = find_checkpoint(OLD / name)
    assert problems == []
    assert checkpoint.step == step
    total = hashlib.sha256()
    for key, tensor in sorted(checkpoint.tensors.items()):
        total.update(key.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    assert total.hexdigest() == digest
    weights = high_precision_weights(checkpoint)
    assert weights["embedding.weight"].shape == (256, 16)
    assert "layers.0.mlp.gate_up_proj.norm.weight" in weights  # its name of today
    run = Run.open(OLD / name)
    lines = [json.loads(line) for line in (OLD / name / "metrics.jsonl").read_text().splitlines()]
    assert run.steps["loss"].tolist() == [line["loss"] for line in lines]
    table = run.table()
    assert len(table) == rows
    if amax is not None:
        assert float(table.metric("amax").max()) == amax


def test_an_old_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last two steps are near those that it would have had; another CPU or torch rounds other sums."""
    run = Path(shutil.copytree(OLD / "run-3-fp8", tmp_path / "run"))
    monkeypatch.chdir(run)
    config, old = load_config(run / "config.yaml"), find_checkpoint(run)[0]
    moved = {**old.metadata, "config": config.digest()}  # the text has another path here
    save_checkpoint(run / "checkpoints", old.step, old.tensors, moved, keep=1)
    trainer = Trainer(config, run, resume=True)
    assert trainer.step == 2
    trainer.advance()
    got, whole = ((run / name).read_text().splitlines() for name in ("metrics.jsonl", "uninterrupted.jsonl"))
    for one, other in zip(map(json.loads, got), map(json.loads, whole), strict=True):
        assert (one["step"], one["lr"]) == (other["step"], other["lr"])
        assert one["loss"] == pytest.approx(other["loss"], rel=2.0**-9)


def test_an_old_export_is_loaded_to_the_bit() -> None:
    saved = load_file(OLD / "export-1" / "model.safetensors")
    model = nn.Module()
    for name, tensor in saved.items():
        *path, last = name.split(".")
        place = model
        for part in path if last == "weight" else ():
            if not hasattr(place, part):
                linear = tensor.dim() == 2 and part == path[-1]
                place.add_module(part, nn.Linear(*tensor.shape[::-1], bias=False).bfloat16() if linear else nn.Module())
            place = getattr(place, part)
        if last == "weight" and not isinstance(place, nn.Linear):
            place.weight = nn.Parameter(torch.empty_like(tensor))
    report = load_fp8(model, OLD / "export-1")
    assert (len(report.stored), len(report.plain)) == (7, 5)
    for name, weight in model.named_parameters():
        codes, scale = saved[name], saved.get(f"{name}_scale")
        wanted = codes if scale is None else (codes.float() * scale).bfloat16()
        assert torch.equal(weight.dequantize() if name in report.stored else weight, wanted), name


def test_an_old_trace_and_an_old_dump_are_read_to_the_bit() -> None:
    entries = StepRecording.load(OLD / "trace-1").entries
    assert [str(entry.key) for entry in entries[:3]] == ["input of the model", "input of 0", "output of 0"]
    assert entries[0].value.tolist() == [[1.0] * 4] * 2
    certificate = certify(read_rollout(OLD / "rollout-1" / "dump.jsonl")).to_json()
    assert certificate == (OLD / "rollout-1" / "certificate.json").read_text()
