"""`ottava train` in two and in four processes, see the scenarios' own docstrings; and under torchrun, killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import failures, start
from train_scenarios import SCENARIOS, alone

NAMES = [f"train_scenarios.{scenario.__name__}" for scenario in SCENARIOS]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda size: f"{size} processes")
def test_every_scenario_holds_on_every_rank(size: int, tmp_path: Path) -> None:
    alone(tmp_path, size)
    failed = failures(start(size, tmp_path / "ranks", NAMES), NAMES)
    assert not failed, "\n".join(failed)
