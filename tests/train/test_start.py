"""A run that starts from another run: switches of precision in its middle, and refused switches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ottava.base.settings import ConfigError
from ottava.train.checkpoint import CheckpointError, high_precision_weights, read_checkpoint
from ottava.train.config import TrainConfig, load_config
from ottava.train.loop import Trainer
from ottava.train.run_folder import StepRecord

TINY = (
    "model={d_model: 32, layers: 1, heads: 2, kv_heads: 1, ffn: 48}",
    "data.max_bytes=200000",
    "batch_size=2",
    "sequence_length=32",
    "steps=6",
    "checkpoint.every=2",
    "evaluation={every: 0, batches: 1}",
)
STORED = ("optimizer.weights=fp8", "optimizer.master=remainder", "optimizer.moments=fp8")


def tiny(*overrides: str) -> TrainConfig:
    return load_config(None, [*TINY, *overrides])


def curve(history: list[StepRecord]) -> list[StepRecord]:
    return [replace(record, seconds=0.0) for record in history]


def test_a_run_switches_to_fp8_and_back_in_its_middle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """BF16 -> FP8 weights with predicted scales -> BF16: steps, weights, masters and moments go on; the curve, too."""
    first = Trainer(tiny("recipe=bf16", "steps=4"), tmp_path / "a")
    first.advance()
    there = tiny("recipe=delayed", *STORED, f"init={tmp_path / 'a'}", "carry=optimizer", "rewarm=2", "steps=8")
    with caplog.at_level("INFO", logger="ottava"):
        second = Trainer(there, tmp_path / "b")
    assert "continues from step 4 of" in caplog.text
    assert "calibrated the predicted scales on the first 16 batches" in caplog.text
    assert "the learning rate rises to its schedule in 2 steps" in caplog.text
    assert second.step == 4
    assert curve(second.history) == curve(first.history)
    own = high_precision_weights(read_checkpoint(next((tmp_path / "b" / "checkpoints").glob("*4.safetensors"))))
    for name, parameter in first.model.named_parameters():
        error = (own[name].float() - parameter.detach()).norm() / parameter.detach().norm()
        assert float(error) < 2.0**-8, name
        state = second._optimizer.state[dict(second.model.named_parameters())[name]]
        assert float(state["step"]) == 4
        assert state["exp_avg"].dtype == torch.float8_e4m3fn
    records = second.advance(2)
    second.close()
    schedule = [there.optimizer.learning_rate * there.schedule.factor(step, 8) for step in (5, 6, 7)]
    assert [r.lr for r in records] == [schedule[0] * (1 / 3), schedule[1] * (2 / 3)]
    again = Trainer(there, tmp_path / "b", resume=True)
    assert [r.lr for r in again.advance(1)] == [schedule[2]]
    again.advance()
    back = tiny("recipe=bf16", f"init={tmp_path / 'b'}", "carry=optimizer", "steps=10")
    third = Trainer(back, tmp_path / "c")
    assert third.step == 8
    masters = high_precision_weights(read_checkpoint(tmp_path / "b" / "checkpoints" / "step-000008.safetensors"))
    for name, parameter in third.model.named_parameters():
        assert torch.equal(parameter, masters[name].float())
        assert third._optimizer.state[parameter]["exp_avg"].dtype == torch.float32
    assert [record.step for record in third.advance()] == [9, 10]
    assert third.history[-1].loss < first.history[0].loss
    facts = json.loads((tmp_path / "c" / "manifest.json").read_text())["init"]
    assert facts["carried"] == ["weights", "optimizer", "step"]


def test_switches_that_cannot_be_are_refused(tmp_path: Path) -> None:
    Trainer(tiny("recipe=bf16", "steps=2"), tmp_path / "a").advance()
    source = f"init={tmp_path / 'a'}"
    for options, error, words in (
        (
            (source, "carry=optimizer", "optimizer.name=lion", "steps=4"),
            CheckpointError,
            "Set the same optimizer.name",
        ),
        ((source, "carry=optimizer", "steps=2"), ConfigError, "is of step 2, but this run ends at steps=2; set more"),
        (("carry=optimizer",), ConfigError, "set init=RUN, too"),
        (("init=nowhere",), CheckpointError, "nowhere: does not exist; needed: a run folder"),
        (("rewarm=3",), ConfigError, "set init=RUN, too"),
        (("optimizer.master=fp32",), ConfigError, "set weights=bf16 or weights=fp8, too"),
        (("optimizer.weights=fp8",), ConfigError, "set master=remainder or master=fp32"),
        ((*STORED, "recipe=bf16"), ConfigError, "casts no weight: set optimizer.weights=bf16"),
        ((*STORED, "optimizer.stochastic_rounding=true"), ConfigError, "set master=null, too"),
    ):
        with pytest.raises(error, match=words):
            Trainer(tiny(*options), tmp_path / "b")
        assert not (tmp_path / "b").exists()
