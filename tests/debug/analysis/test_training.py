"""Facts about the training: experts, call sites, frozen scales, updates, and what went wrong first."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ottava.debug.analysis.diagnose import diagnose
from ottava.debug.analysis.facts import context_of
from ottava.debug.analysis.rows import CastRows
from ottava.debug.analysis.training import AmaxRows, LayerRows, ParameterRows, Progress, stuck
from ottava.debug.run.reader import Run
from ottava.debug.run.schema import SlotKey
from ottava.debug.run.writer import RunWriter
from ottava.debug.tally import Tally


def key(layer: str, tensor: str = "input", scaling: str = "delayed") -> SlotKey:
    return SlotKey(layer, tensor, "row", "delayed", "E4M3", "tensor", "fp32", scaling, "door")


def test_the_tokens_of_an_expert_are_compared_with_those_beside_it(tmp_path: Path) -> None:
    names = [f"mlp.experts.{i}.fc1" for i in range(4)]
    with RunWriter(tmp_path) as writer:
        writer.describe(layers=[{"name": name} for name in names])
        for name, n in zip(names, (30, 10, 0, 0), strict=True):
            for step in (1, 2) if n else ():
                writer.tally(step, key(name), Tally(n=n, n_total=n, n_casts=1, n_nonzero=n, amax=1.0))
    rows = LayerRows(context_of(Run.open(tmp_path)))
    assert rows.expert_share_pct().tolist() == [300.0, 100.0, 0.0, 0.0]
    assert "L10" in [note.id for note in diagnose(Run.open(tmp_path)).notes]


def test_a_scale_that_stays_though_the_cast_clips_is_stuck(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for step in range(1, 6):
            live = {"scale_max": 448 / 2.0**step, "scale_min": 448 / 2.0**step, "scale_error_max": 1.0}
            frozen = {"scale_max": 448.0, "scale_min": 448.0, "scale_error_max": float(step - 1)}
            for layer, scales in (("live", live), ("frozen", frozen)):
                writer.tally(step, key(layer), Tally(n=8, n_nonzero=8, n_predicted=1, amax=2.0 ** (step - 1), **scales))
    rows = CastRows(context_of(Run.open(tmp_path)))
    values = stuck(rows)
    assert values[rows.table["layer"] == "live"].tolist() == [0.0] * 5
    assert values[rows.table["layer"] == "frozen"].tolist() == [0.0, 0.0, 1.0, 2.0, 3.0]


def test_the_first_tensor_that_is_not_finite_is_that_of_the_first_step(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.tally(7, key("late"), Tally(amax=1.0, n_nonfinite=5, n=1))
        writer.tally(6, key("a"), Tally(amax=1.0), phase="light")
        writer.tally(6, key("b"), Tally(amax=1.0, n_nonfinite=1), phase="light")
    rows = AmaxRows(context_of(Run.open(tmp_path)))
    assert rows.table["layer"][np.flatnonzero(rows.order_nonfinite() == 0)[0]] == "b"
    assert diagnose(Run.open(tmp_path)).findings[0].layers == ["b"]


def test_updates_are_of_looks_and_follow_the_learning_rate_between(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.describe(parameters=[{"name": "fc.weight", "shape": [4, 4], "dtype": "float32", "trains": True}])
        for step, lr in ((1, 0.1), (2, 0.1), (3, 0.4)):
            writer.step(step, loss=1.0 if step < 3 else 90.0, lr=lr)
        facts: dict[str, Any] = {"ratio": [0.25], "still": [0.0], "gradient": [1.0], "weight": [1.0]}
        writer.training(1, "updates", parameters=["fc.weight"], **facts)
    context = context_of(Run.open(tmp_path))
    assert Progress(context).update_ratio.tolist() == [0.25, 0.25, 1.0]
    assert context.loss.onset == 3
    assert ParameterRows(context).held().tolist() == ["no"]
    assert diagnose(Run.open(tmp_path)).notes[0].id == "L1"
    assert math.isinf(Progress(context).clip_norm) if "grad_norm" in context.run.steps else True
