"""TransformerEngine's parallel arguments in two and in four processes, see the scenarios' own docstrings."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import all_hold, scenarios_of


@pytest.mark.parametrize("size", [2, 4], ids=lambda size: f"{size} processes")
def test_every_scenario_holds_on_every_rank(size: int, tmp_path: Path) -> None:
    all_hold(size, tmp_path, scenarios_of("te_scenarios", "te_context_scenarios"))
