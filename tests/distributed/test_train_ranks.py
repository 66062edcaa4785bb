"""`ottava train` in two and in four processes, see the scenarios' own docstrings; and under torchrun, killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from ranks import all_hold
from train_scenarios import ALONE, FOUR, QUICK, TWO, alone

CASES = [
    pytest.param(2, QUICK, id="2 processes, quick"),
    pytest.param(2, TWO, id="2 processes"),
    pytest.param(4, FOUR, id="4 processes"),
]


@pytest.mark.parametrize(("size", "scenarios"), CASES)
def test_every_scenario_holds_on_every_rank(
    size: int, scenarios: Sequence[Callable[..., None]], tmp_path: Path
) -> None:
    names = [f"train_scenarios.{scenario.__name__}" for scenario in scenarios]
    alone(tmp_path, size, ("tensorwise", "delayed") if scenarios is QUICK else ALONE)
    all_hold(size, tmp_path, names)
