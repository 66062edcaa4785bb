"""Tensor and sequence parallelism in two and in four processes, see the scenarios' own docstrings."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import all_hold, scenarios_of

SCENARIOS = {
    "linears": scenarios_of("parallel_scenarios"),
    "blocks": scenarios_of("parallel_layers_scenarios", "expert_scenarios", "mesh_scenarios"),
}


CASES = [pytest.param(size, kind, id=f"{size} processes-{kind}") for size in (2, 4) for kind in SCENARIOS]


@pytest.mark.parametrize(("size", "kind"), CASES)
def test_every_scenario_holds_on_every_rank(size: int, kind: str, tmp_path: Path) -> None:
    all_hold(size, tmp_path, SCENARIOS[kind])
