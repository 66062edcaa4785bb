"""Facts about the training: experts, call sites, frozen scales, updates, and what went wrong first."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ottava.diagnose.diagnose import diagnose
from ottava.diagnose.facts import context_of
from ottava.diagnose.progress import Progress
from ottava.diagnose.rows import CastRows
from ottava.diagnose.training import AmaxRows, LayerRows, ParameterRows, hidden, stuck
from ottava.measure.tally import Tally
from ottava.record.reader import Run
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter


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
    found = diagnose(Run.open(tmp_path)).findings[0]
    assert found.layers == ["b", "a"]  # it happens between the two
    assert "a.X before it is finite" in found.cause


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


def test_an_amax_beyond_what_the_sample_can_hold_lies_in_another_row(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        sums = {"n": 100.0, "n_nonzero": 100.0, "sxx": 100.0}
        writer.tally(1, key("inside"), Tally(amax=9.0, sx4=9.0**4 + 100, **sums))
        writer.tally(1, key("outside"), Tally(amax=500.0, sx4=300.0, **sums))
    assert hidden(CastRows(context_of(Run.open(tmp_path)))).tolist() == ["no", "yes"]


def test_parameters_that_are_frozen_between_others_or_never_get_a_gradient(tmp_path: Path) -> None:
    held = {"lr": 0.1, "weight_decay": 0.2, "gradient": "torch.float32"}
    frozen = {"shape": [4, 4], "dtype": "float32", "trains": False, "held": None}
    trains = {**frozen, "trains": True, "held": held}
    with RunWriter(tmp_path) as writer:
        names = {
            "blocks.0.a.weight": frozen,
            "blocks.1.a.weight": trains,
            "blocks.2.a.weight": frozen,
            "base.0.b.weight": frozen,
            "base.1.b.weight": frozen,
            "idle.weight": {**trains, "held": {**held, "gradient": ""}},
        }
        writer.describe(parameters=[{"name": name, **facts} for name, facts in names.items()])
        facts: dict[str, Any] = {"ratio": [0.1], "still": [0.0], "gradient": [1.0], "weight": [1.0]}
        for step in (1, 2):
            writer.training(step, "updates", parameters=["blocks.1.a.weight"], **facts)
    found = {note.id: note.layers for note in diagnose(Run.open(tmp_path)).notes}
    assert found == {"L26": ["blocks.1.a"], "L27": ["idle"], "L30": ["blocks.2.a"]}


def test_parameters_that_stop_training_are_named(tmp_path: Path) -> None:
    """Updates at each look up to one, and at none of the last third; an expert that rests now and then goes on."""
    held = {"lr": 0.1, "weight_decay": 0.0, "gradient": "torch.float32"}
    about = {"shape": [4, 4], "dtype": "float32", "trains": True, "held": held}
    updates = {"lasts": range(1, 10), "ends": range(1, 5), "late": range(1, 9), "rests": (1, 2, 4, 5)}
    with RunWriter(tmp_path) as writer:
        writer.describe(parameters=[{"name": f"{name}.weight", **about} for name in updates])
        for step in range(1, 10):
            there = [f"{name}.weight" for name, steps in updates.items() if step in steps]
            facts = {"ratio": 0.01, "still": 0.0, "gradient": 1.0, "weight": 1.0}
            writer.training(step, "updates", parameters=there, **{k: [v] * len(there) for k, v in facts.items()})
    found = {note.id: note.layers for note in diagnose(Run.open(tmp_path)).notes}
    assert found == {"L60": ["ends"]}


def test_steps_tell_of_few_batches_idle_steps_and_a_start_above_a_guess(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.describe(parameters=[{"name": "fc.weight", "shape": [4, 4], "trains": True}], classes=8)
        for step in range(1, 11):
            lr = 0.1 if step <= 5 else 0.0
            sizes = {"input_amax": 90, "input_rms": 40, "label_rms": 500}
            writer.step(step, loss=30 - step, lr=lr, input_hash=step % 2, label_hash=1, **sizes)
        facts: dict[str, Any] = {"ratio": [0.5], "still": [0.0], "gradient": [1.0], "weight": [1.0]}
        writer.training(1, "updates", parameters=["fc.weight"], **facts)
    progress = Progress(context_of(Run.open(tmp_path)))
    assert (progress.batches, progress.idle_pct) == (2.0, 50.0)
    assert math.isclose(progress.start_ratio, 29 / math.log(8))
    found = diagnose(Run.open(tmp_path))
    assert found.verdict == "none"
    assert {"L6", "L19", "L21", "L31", "L32", "L33"} <= {note.id for note in found.notes}


@pytest.mark.parametrize(
    "dtypes, config, speed, expected",
    [
        (["float32", "float32", "bfloat16"], {}, "yes", "C5"),
        (["float32", "bfloat16"], {}, "yes", ""),  # half of the casts is not more than half
        (["bfloat16", "bfloat16"], {}, "yes", ""),
        (["float32", "float32"], {}, "no", ""),  # nobody complains
        ([None, None], {"params_dtype": "fp32"}, "yes", "C5"),  # an older record; the framework's setting says so
        ([None, None], {}, "yes", "untested"),
    ],
)
def test_c5_reads_the_dtypes_that_casts_read(
    tmp_path: Path, dtypes: list[str | None], config: dict[str, str], speed: str, expected: str
) -> None:
    layers: list[dict[str, object]] = [
        {"name": f"fc{i}", "source": "door", "seen": True, "shape": [16, 16], **({"dtypes": {"input": d}} if d else {})}
        for i, d in enumerate(dtypes)
    ]
    with RunWriter(tmp_path) as writer:
        writer.describe(layers=layers, config=config)
        writer.step(1, loss=1.0)
    found = diagnose(Run.open(tmp_path), answers={"speed_problem": speed})
    assert [f.id for f in found.findings if f.id == "C5"] == (["C5"] if expected == "C5" else [])
    assert ("C5" in [rule["id"] for rule in found.untested]) == (expected == "untested")
    if expected == "C5":
        assert "model = model.bfloat16()" in found.findings[0].remedies[0]["patch"]["ottava"]
    assert ("L22" in [note.id for note in found.notes]) == (dtypes.count("float32") * 2 > len(dtypes))
