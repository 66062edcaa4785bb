"""Causes are made of facts: the layer, what made its input, its first step, its growth."""

from __future__ import annotations

from pathlib import Path

import torch

import ottava
from ottava.debug.analysis.diagnose import diagnose
from ottava.debug.measure import measure
from ottava.debug.run.reader import Run
from ottava.debug.run.schema import SlotKey
from ottava.debug.run.writer import RunWriter


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
