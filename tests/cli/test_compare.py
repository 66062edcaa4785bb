"""`ottava compare`: exit codes, JSON, the table."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch

import command
import ottava
from ottava.measure.walk import measure
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter

call = partial(command.said, "compare")


def record(folder: Path, seed: int, *, massive: bool = False, **config: object) -> Path:
    generator = torch.Generator().manual_seed(seed)
    key = SlotKey("layers.0.mlp.fc2", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
    with RunWriter(folder) as writer:
        writer.describe(config=config)
        for step in range(1, 7):
            x = torch.randn(64, 128, generator=generator)
            if massive and step > 2:
                x[:4] *= 1e5
            writer.step(step, loss=3.0 + (step if massive and step > 4 else 0))
            writer.tally(step, key, measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))))
    return folder


def test_runs_that_do_not_differ_exit_0(tmp_path: Path) -> None:
    code, text = call(record(tmp_path / "a", 0), record(tmp_path / "b", 1))
    assert code == 0
    assert "Settings" not in text


def test_settings_come_first_and_the_worst_tensor_leads_the_table(tmp_path: Path) -> None:
    code, text = call(record(tmp_path / "a", 0, lr=0.001), record(tmp_path / "b", 1, massive=True, lr=0.1))
    assert code == 1
    lines = text.splitlines()
    assert lines[0].startswith("The configurations differ in lr (0.001 and 0.1). First to leave the good run's band:")
    assert lines.index("Settings that differ") < next(i for i, line in enumerate(lines) if "bits lost" in line)
    first = lines[next(i for i, line in enumerate(lines) if "bits lost" in line) + 1]
    assert first.split()[:2] == ["layers.0.mlp.fc2", "X"]


def test_json_and_top(tmp_path: Path) -> None:
    good, bad = record(tmp_path / "a", 0), record(tmp_path / "b", 1, massive=True)
    code, text = call(good, bad, "--json")
    assert code == 1
    assert json.loads(text)["first"]["step"] == 3
    assert len(call(good, bad, "--top", 1)[1].splitlines()) == len(call(good, bad, "--top", 3)[1].splitlines()) - 2


def test_a_control_run(tmp_path: Path) -> None:
    good, bad = record(tmp_path / "a", 0), record(tmp_path / "b", 1, massive=True)
    code, text = call(good, bad, "--control", record(tmp_path / "c", 2, massive=True))
    assert code == 0, text


def test_mistakes(tmp_path: Path) -> None:
    good = record(tmp_path / "a", 0)
    assert call(good, tmp_path / "none")[0] == 4
    assert call(good, good, "--align", "time")[0] == 2
    assert call(good, good, "--align", "tokens")[0] == 4
