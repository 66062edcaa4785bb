"""The course of a run: batches that repeat, what it learned, when tensors stopped being finite, its size over depth."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import ottava
from ottava.diagnose.conditions import Missing
from ottava.diagnose.facts import context_of
from ottava.diagnose.progress import Progress, over_depth, start_gain
from ottava.measure.walk import measure
from ottava.record.reader import Run
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter


def test_the_course_of_a_run_is_told_by_its_steps_and_casts(tmp_path: Path) -> None:
    spec = ottava.QuantizationSpec(ottava.E4M3)
    with RunWriter(tmp_path) as writer:
        writer.describe(layers=[{"name": f"blocks.{i}.fc", "shape": [64, 64]} for i in range(3)])
        for step in range(1, 10):
            writer.step(step, loss=4.0 - 0.25 * step, input_hash=float(step // 3))
        for step in (1, 5):
            for block in range(3):
                for tensor in ("input", "weight"):
                    x = torch.full((64, 64), 2.0 ** (3 * block if tensor == "input" else -3))
                    x[0, 0] = math.nan if (tensor, step, block) == ("input", 5, 2) else x[0, 0]
                    key = SlotKey(f"blocks.{block}.fc", tensor, "row", "r", "E4M3", "tensor", "fp32", "current", "door")
                    writer.tally(step, key, measure(x, ottava.quantize(x, spec)))
    context = context_of(Run.open(tmp_path))
    progress = Progress(context)
    assert progress.batches == 4
    assert progress.repeated_pct == pytest.approx(100 * 5 / 8)
    # medians of the first three losses and of the last third: 3.5 and 2
    assert progress.learned_pct == pytest.approx(100 * 1.5 / 3.5)
    assert progress.nonfinite_at == progress.forward_nonfinite_at == 5
    assert over_depth(context, "input") == pytest.approx(6.0, abs=1e-3)
    assert start_gain(context) == pytest.approx(2**-3 * math.sqrt(64))
    with pytest.raises(Missing):
        over_depth(context, "grad_output")


def test_a_twin_that_learned_is_told_from_one_that_fails_alike(tmp_path: Path) -> None:
    """It ends half as high again as the twin, whose loss fell; without a twin nothing is known."""
    twins = {
        "learned": [4.0 - 0.1 * i for i in range(20)],
        "as it": [4.0] * 20,
        "worse": [4.0 + 0.1 * i for i in range(20)],
        "a little better": [4.0 - 0.05 * i for i in range(20)],
    }
    for name, losses in {"run": [4.0] * 20, **twins}.items():
        with RunWriter(tmp_path / name) as writer:
            for step, loss in enumerate(losses, 1):
                writer.step(step, loss=loss)
    run = Run.open(tmp_path / "run")
    said = {name: Progress(context_of(run, baseline=Run.open(tmp_path / name))).twin_recovers for name in twins}
    assert said == {"learned": "yes", "as it": "no", "worse": "no", "a little better": "no"}
    with pytest.raises(Missing):
        _ = Progress(context_of(run)).twin_recovers


def test_losses_of_zero_and_of_nothing_are_no_crash(tmp_path: Path) -> None:
    for name, losses in {"zero": [0.0] * 12, "nan": [math.nan] * 12, "short": [1.0]}.items():
        with RunWriter(tmp_path / name) as writer:
            writer.describe(classes=8)
            for step, loss in enumerate(losses, 1):
                writer.step(step, loss=loss)
    for name in ("zero", "nan", "short"):
        for other in ("zero", "nan", "short"):
            run, twin = Run.open(tmp_path / name), Run.open(tmp_path / other)
            progress = Progress(context_of(run, baseline=twin))
            assert progress.twin_recovers == "no"
            assert progress.end_ratio == pytest.approx(
                {"zero": 0.0, "nan": math.nan}.get(name, 1 / math.log(8)), nan_ok=True
            )
