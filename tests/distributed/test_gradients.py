"""Gradients that travel as FP8 codes, in two and in three processes; see the scenarios' own docstrings."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import failures, scenarios_of, start

SCENARIOS = scenarios_of("gradient_scenarios")


@pytest.mark.parametrize("size", [2, 3], ids=lambda size: f"{size} processes")
def test_every_scenario_holds_on_every_rank(size: int, tmp_path: Path) -> None:
    failed = failures(start(size, tmp_path / "ranks", SCENARIOS), SCENARIOS)
    assert not failed, "\n".join(failed)
