"""Remedies are replayed on the record: what changes or cures nothing is not printed; what cures is first."""

from __future__ import annotations

from pathlib import Path

import torch

import ottava
from ottava.debug.analysis.diagnose import diagnose
from ottava.debug.measure import measure
from ottava.debug.run.reader import Run
from ottava.debug.run.schema import SlotKey
from ottava.debug.run.writer import RunWriter


def test_the_first_remedy_cures_and_none_is_empty(tmp_path: Path) -> None:
    """Gradients whose dY is E5M2 already: nobody proposes E5M2, and blocks that keep the underflow are left out."""
    key = SlotKey("fc", "grad_output", "row", "tensorwise", "E5M2", "tensor", "fp32", "current", "door")
    generator = torch.Generator().manual_seed(0)
    with RunWriter(tmp_path) as writer:
        for step in (1, 2):
            x = torch.randn(128, 128, generator=generator) * torch.exp2(40 * torch.rand(128, 128, generator=generator))
            writer.tally(step, key, measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E5M2))))
    finding = diagnose(Run.open(tmp_path)).findings[0]
    assert finding.id == "N4"
    texts = [remedy["text"] for remedy in finding.remedies]
    assert not any("E5M2" in text or "current scaling" in text for text in texts)
    assert finding.remedies[0]["cure"] == 1.0
    cures = [remedy["cure"] for remedy in finding.remedies if remedy["cure"] is not None]
    assert cures == sorted(cures, reverse=True)
    assert 0.0 not in cures
