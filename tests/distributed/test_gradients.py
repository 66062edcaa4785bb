"""Gradients that travel as FP8 codes, in two and in three processes; see the scenarios' own docstrings."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import all_hold, scenarios_of


@pytest.mark.parametrize("size", [2, 3], ids=lambda size: f"{size} processes")
def test_every_scenario_holds_on_every_rank(size: int, tmp_path: Path) -> None:
    all_hold(size, tmp_path, scenarios_of("gradient_scenarios"))
