"""Names that rules may use: each gives a number per row, and means what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ottava
from ottava.diagnose.conditions import Condition, Missing
from ottava.diagnose.facts import VOCABULARY, context_of
from ottava.diagnose.rows import CastRows, EventRows, RunRows, StepRows
from ottava.diagnose.training import AmaxRows, LayerRows, ParameterRows, WouldRows
from ottava.measure.tally import DETAILS, Detail
from ottava.measure.walk import measure, measure_packed
from ottava.record.reader import Run
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter

KINDS = {
    kind.kind: kind for kind in (CastRows, StepRows, EventRows, RunRows, AmaxRows, WouldRows, ParameterRows, LayerRows)
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Four blocks, three looks, two of them noisy."""
    generator = torch.Generator().manual_seed(0)
    with RunWriter(tmp_path / "run") as writer:
        writer.describe(
            config={"params_dtype": "fp32", "fp8_param_gather": True}, layers=[{"name": "a", "shape": [64, 100]}]
        )
        for step in range(1, 31):
            writer.step(step, loss=3 - step / 100, max_logit=10.0 * step)
        writer.event(12, "resumed")
        writer.event(2, "check", check="row_col", layer="layers.0.fc2", tensor="input", value=3.0)
        for step in (1, 2, 4):
            for block in range(4):
                for fmt in (ottava.E4M3, ottava.E5M2):
                    x = torch.randn(64, 128, generator=generator) * step
                    x[0] *= 1e5 if block == 3 else 1
                    key = SlotKey(
                        f"layers.{block}.fc2", "input", "row", fmt.name, fmt.name, "tensor", "fp32", "current", "door"
                    )
                    writer.tally(step, key, measure(x, ottava.quantize(x, ottava.QuantizationSpec(fmt))))
    return Run.open(tmp_path / "run")


@pytest.mark.parametrize("kind", VOCABULARY)
def test_every_fact_gives_one_value_per_row(run: Run, kind: str) -> None:
    rows = KINDS[kind](context_of(run, run))
    names = VOCABULARY[kind][0]
    for name in names:
        asked = f"run.{name}" if kind == "run" else name
        try:
            assert rows.value(asked).shape == (rows.count,)
        except Missing:
            continue  # a test of its own says which are
    assert all(fact.meaning for fact in names.values())


def test_functions_over_the_looks_of_one_cast(run: Run) -> None:
    rows = CastRows(context_of(run))

    def asked(text: str) -> list[bool]:
        return [bool(v == 1) for v in Condition.parse(text).ask(rows)[0]]

    first = rows.table["step"] == 1
    assert asked("looks == 3") == [True] * len(rows.table)
    assert asked("before(step) > 0") == (~first).tolist()
    assert asked("early(step) == 2 and late(step) == 2 and usual(step) == 2") == [True] * len(rows.table)
    assert asked("repeats(step > 1) == 2") == [True] * len(rows.table)
    assert asked("abs(0 - step) == step") == [True] * len(rows.table)


def test_thresholds_follow_the_format(run: Run) -> None:
    rows = CastRows(context_of(run))
    e4m3 = rows.table["format"] == "E4M3"
    assert set(rows.value("warn_db")[e4m3]) == {25.0}
    assert set(rows.value("warn_db")[~e4m3]) == {20.0}
    assert set(rows.value("critical_db")[e4m3]) == {15.0}
    assert set(rows.value("critical_db")[~e4m3]) == {12.0}
    healthy = rows.value("row_sqnr_p50_db")[rows.value("position") == "inner"]
    floor = rows.value("floor_db")[rows.value("position") == "inner"]
    assert np.abs(healthy - floor).max() < 1.0  # what the floor was derived from


def test_blocks_would_save_what_one_scale_flushes(run: Run) -> None:
    rows = CastRows(context_of(run))
    ill = (rows.value("layer") == "layers.3.fc2") & (rows.value("format") == "E4M3")
    assert rows.value("underflow_pct")[ill].min() > 10
    assert rows.value("flushed_in_blocks_pct")[ill].max() < 0.1


@pytest.mark.parametrize("detail", DETAILS)
def test_what_was_not_recorded_is_missing_not_zero(tmp_path: Path, detail: Detail) -> None:
    """Conditions over blocks are unknown, and say what they need; all other facts of casts are there."""
    with RunWriter(tmp_path / "run") as writer:
        x = torch.randn(64, 128)
        x_q = ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))
        key = SlotKey("fc", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
        writer.tally(1, key, measure_packed(x, x_q, detail=detail).tally())
    rows = CastRows(context_of(Run.open(tmp_path / "run")))
    for name in ("flushed_in_blocks_pct", "at_block_amax_pct"):
        answer, missing = Condition.parse(f"{name} >= 0").ask(rows)
        if detail in ("blocks", "anatomy"):
            assert (answer.tolist(), missing) == ([1.0], set())
        else:
            assert np.isnan(answer).all()
            assert 'watch with detail="blocks"' in "".join(missing)
    assert np.isfinite(rows.value("row_sqnr_p50_db")).all()
    assert np.isfinite(rows.value("block_spread_p50")).all()


def test_steps(run: Run) -> None:
    rows = StepRows(context_of(run))
    assert rows.value("max_logit")[4] == 50
    assert np.isnan(rows.value("since_resume")[11])
    assert rows.value("since_resume")[12] == 1
    with pytest.raises(Missing, match=r"watch.log\(update_rms"):
        rows.value("update_rms")


def test_settings_are_found_under_the_names_of_frameworks(run: Run) -> None:
    context = context_of(run, config={"dtype": ("dtype", "params_dtype"), "fp8_params": ("fp8_param_gather",)})
    assert context.scalar("config.dtype") == "fp32"
    assert context.scalar("config.fp8_params") == "yes"
    with pytest.raises(Missing):
        context.scalar("config.cpu_offload")
    assert context.scalar("run.odd_layers") == 1
    assert context.scalar("run.per_tensor") == "yes"
    assert context.scalar("run.delayed") == "no"
