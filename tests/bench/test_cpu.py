"""The benchmark's cases: small ones here, for what they run and not for how fast."""

from __future__ import annotations

import pytest
import torch

from ottava.bench import cpu


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CAST_ELEMENTS", (4096,))
    monkeypatch.setattr(cpu, "LINEAR_SHAPES", ((8, 32, 64),))


def test_every_case_measures_bf16_and_every_recipe() -> None:
    """Casts beside a copy, layers beside BF16 and torchao's emulation; the first is the unit."""
    cases = list(cpu.bench(["cast", "linear"], rounds=2))
    assert [case.suite for case in cases] == ["cast", "linear"]
    assert cases[0].timings[0].name == "copy"
    names = [timing.name for timing in cases[1].timings]
    assert names == ["BF16", *(f"ottava {recipe}" for recipe in cpu.RECIPES), "torchao tensorwise"]
    assert all(timing.milliseconds > 0 for case in cases for timing in case.timings)
    assert all(case.timings[0].ratio == 1.0 for case in cases)
    assert "ratio to BF16" in str(cases[1])
    assert cases[1].to_dict()["timings"][0]["name"] == "BF16"


def test_the_block_is_a_block() -> None:
    """Causal: a token does not see later ones; shapes stay."""
    torch.manual_seed(0)
    block = cpu.Block(32, 4)
    x = torch.randn(2, 6, 32)
    y = block(x)
    later = x.clone()
    later[:, 4] += 1
    changed = block(later)
    assert y.shape == x.shape
    assert torch.equal(y[:, :4], changed[:, :4])
    assert not torch.equal(y[:, 4:], changed[:, 4:])
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in block.parameters())


def test_an_unknown_suite_is_refused() -> None:
    """Before anything is measured."""
    with pytest.raises(ValueError, match="suite: got 'casts'; there are cast, linear, block"):
        next(iter(cpu.bench(["casts"])))


def test_the_machine_is_named() -> None:
    """Versions of what was measured, and threads."""
    said = cpu.machine()
    assert said["threads"] == torch.get_num_threads()
    assert said["versions"]["torch"] == torch.__version__
