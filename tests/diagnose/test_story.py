"""Causes are made of facts: the layer, what made its input, its first step, its growth."""

from __future__ import annotations

from pathlib import Path

import torch

import ottava
from ottava.diagnose.diagnose import diagnose
from ottava.measure.walk import measure
from ottava.record.reader import Run
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter


def test_a_cause_names_activation_step_growth_and_channel(tmp_path: Path) -> None:
    key = SlotKey("blocks.2.up", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
    with RunWriter(tmp_path) as writer:
        writer.describe(layers=[{"name": "blocks.2.up", "before": "gelu"}])
        for step in (1, 4, 5):
            x = torch.randn(64, 128, generator=torch.Generator().manual_seed(step))
            x[:, 3] *= 1e6 if step > 1 else 1
            writer.tally(step, key, measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))))
    finding = diagnose(Run.open(tmp_path)).findings[0]
    assert finding.id == "N19"
    for fact in (
        "blocks.2.up.X (block 2)",
        "gelu",
        "at step 4",
        "step 1 was fine",
        "amax went from",
        "one channel has",
    ):
        assert fact in finding.cause
    assert "SwiGLU" not in finding.cause


def test_a_good_run_that_casts_is_not_called_a_bf16_twin(tmp_path: Path) -> None:
    """And the rate of spikes has its unit."""
    for name, source in (("fp8", "door"), ("bf16", "hook"), ("run", "door")):
        key = SlotKey("fc1", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", source)
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
        with RunWriter(tmp_path / name) as writer:
            writer.tally(1, key, measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))))
            for step in range(1, 101):
                spike = 3.0 if name == "run" and step % 30 == 0 else 0.0
                writer.step(step, loss=3.0 - 0.01 * step + 0.01 * (step % 2) + spike)
    for twin, words in (("fp8", "that the good run does not have"), ("bf16", "that BF16 does not have")):
        found = diagnose(Run.open(tmp_path / "run"), baseline=Run.open(tmp_path / twin)).findings[0]
        assert found.id == "T1"
        assert found.title == f"The loss has spikes {words}"
        assert ("a good run of another seed" in found.refute_by) == (twin == "fp8")
        assert {e.unit for e in found.evidence if e.metric == "run.spikes"} == {"per 1,000 steps"}
