"""The examples run, and show what they say they show."""

from __future__ import annotations

import runpy
import time
from pathlib import Path

import pytest
import torch

from ottava.diagnose.diagnose import diagnose
from ottava.record.reader import Run

ROOT = Path(__file__).resolve().parents[1]


def test_resuming_from_bf16_is_smooth_with_calibration(capsys: pytest.CaptureFixture[str]) -> None:
    """Calibrated, the first FP8 loss is BF16's; from scale 1 most of some layer's first gradient is cast to zero."""
    main = runpy.run_path(str(ROOT / "examples" / "resume_from_bf16.py"))["main"]
    losses, flushed = main(15, 2)
    assert abs(losses["calibrated"][0] - losses["bf16"][0]) < 0.01
    assert flushed["calibrated"] < 5 < 20 < flushed["scale 1 first"]
    assert "calibrated" in capsys.readouterr().out


def test_the_bad_run_is_told_from_the_good_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one setting that differs comes first, FC2's inputs suffer, and FP8 is not blamed.

    BF16 diverges at this learning rate, too. Which tensor suffers most is a matter of the last bits.
    24 of its 80 steps take their share of the minute of CPU time that its page promises.
    """
    example = runpy.run_path(str(ROOT / "examples" / "good_bad_run.py"))
    assert "A minute on one CPU core" in example["__doc__"]
    threads, started = torch.get_num_threads(), time.process_time()
    found = example["main"](tmp_path, 24)
    spent = time.process_time() - started
    torch.set_num_threads(threads)
    assert spent < 2 * 60 * 24 / 80  # twice: work beside makes a second of CPU time do less
    fc2 = [row for row in found["damage"][:8] if row["tensor"].endswith("mlp.down_proj.X")]
    assert len(fc2) >= 2
    assert all(row["bad_underflow"] > 20 > 1 > row["good_underflow"] for row in fc2)
    comparison, diagnosis = found["comparison"], found["diagnosis"]
    assert [(entry["key"], entry["good"], entry["bad"]) for entry in comparison["config"]] == [("lr", 0.002, 0.1)]
    assert comparison["first"]["direction"] == "forward"
    assert comparison["first"]["step"] <= 4
    first = diagnosis["findings"][0]
    assert (first["id"], first["severity"], first["steps"]) == ("DIFF", "critical", [1])
    assert first["title"] == "The learning rate is 50 times that of the good run"
    assert "O12" in [note["id"] for note in diagnosis["notes"]]  # too high by itself, too
    alone = diagnose(Run.open(tmp_path / "bad"))
    assert (alone.findings[0].id, alone.findings[0].steps) == ("O12", [2])
    assert [diagnosis["fp8"], alone.fp8] == ["innocent", "innocent"]
    assert "differ in lr" in capsys.readouterr().out


def test_the_example_config_is_valid() -> None:
    """examples/train.yaml has no unknown key and names a recipe that exists."""
    from ottava.train.config import load_config

    assert load_config(ROOT / "examples" / "train.yaml", []).steps > 0


def test_the_trainer_example_logs_and_loads_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    lines = runpy.run_path(str(ROOT / "examples" / "trainer.py"))["main"](tmp_path, 10)
    assert [line["step"] for line in lines] == [5, 10]
    assert all(0.3 < line["ottava/fp8_share"] < 0.6 for line in lines)  # one of two blocks, and no head
    assert lines[1]["loss"] < lines[0]["loss"]
    assert "complaints: []" in capsys.readouterr().out


def test_the_accelerate_example_goes_on_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    first, again = runpy.run_path(str(ROOT / "examples" / "accelerate_fp8.py"))["main"](tmp_path)
    assert first == again
    assert again[-1] < first[0] + 0.1
