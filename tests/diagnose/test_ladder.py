"""Remedies are replayed on the record: what changes or cures nothing is not printed; what cures is first."""

from __future__ import annotations

from pathlib import Path

import torch

import ottava
from ottava.diagnose.diagnose import diagnose
from ottava.measure.walk import measure
from ottava.record.reader import Run
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter


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
    cures = [remedy["cure"] for remedy in finding.remedies]
    assert 0.0 not in cures


def recorded_under(folder: Path, scaling: str, scale: float, x: torch.Tensor, **manifest: object) -> Run:
    """A run of four looks at one input, cast with a scale of its own."""
    spec = ottava.QuantizationSpec(ottava.E4M3, scaling=scaling)  # type: ignore[arg-type]
    recipe = "tensorwise" if scaling == "current" else "delayed"
    key = SlotKey("blocks.1.fc1", "input", "row", recipe, "E4M3", "tensor", "fp32", scaling, "door")
    with RunWriter(folder) as writer:
        writer.describe(**manifest)
        for step in range(1, 5):
            q = ottava.quantize(x, spec, scale=torch.tensor(scale) if scale else None)
            writer.tally(step, key, measure(x, q))
    return Run.open(folder)


def test_a_history_that_was_not_that_of_the_recorded_amaxes_is_not_believed(tmp_path: Path) -> None:
    """The amaxes are steady and the scale is 16 octaves too low: no window of these amaxes gives that scale."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    finding = diagnose(recorded_under(tmp_path, "delayed", 448 / float(x.abs().max()) * 2.0**-16, x)).findings[0]
    assert finding.id in ("N6", "M3", "N7")
    first = finding.remedies[0]
    assert "current scaling" in first["text"]
    assert first["cure"] == 1.0
    assert not any(remedy["cure"] and "history" in remedy["text"] for remedy in finding.remedies)


def test_fp8_comes_before_bf16_where_it_cures_as_well(tmp_path: Path) -> None:
    """Tokens of very different size: scales per row cure fprop; x.T has every token in a row, so wgrad needs BF16."""
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    x[::32] *= 1e5
    finding = diagnose(recorded_under(tmp_path, "current", 0.0, x)).findings[0]
    assert finding.id == "N3"
    patches = [remedy["patch"]["ottava"].splitlines()[-1] for remedy in finding.remedies]
    fine = 'recipe = recipe.override("blocks.1.fc1", fprop=ottava.get_recipe("rowwise").fprop, wgrad=None)'
    assert patches[:2] == [fine, 'recipe = recipe.override("blocks.1.fc1", fprop=None, wgrad=None)']
    assert finding.remedies[0]["cure"] == finding.remedies[1]["cure"] == 1.0


def test_a_remedy_that_does_not_fit_the_recipe_is_left_out(tmp_path: Path) -> None:
    """dY of this layer is in BF16 already; E5M2 for it would leave one operand of a GEMM quantized."""
    recipe = ottava.get_recipe("tensorwise_e4m3").override("fc", dgrad=None)
    key = SlotKey("fc", "grad_output", "col", recipe.name, "E4M3", "tensor", "fp32", "current", "door")
    generator = torch.Generator().manual_seed(0)
    with RunWriter(tmp_path) as writer:
        writer.describe(recipes={recipe.name: recipe.to_dict()})
        for step in (1, 2):
            x = torch.randn(128, 128, generator=generator) * torch.exp2(40 * torch.rand(128, 128, generator=generator))
            writer.tally(step, key, measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))))
    finding = diagnose(Run.open(tmp_path)).findings[0]
    assert finding.id == "N4"
    assert finding.remedies
    assert not any("E5M2" in remedy["text"] for remedy in finding.remedies)
