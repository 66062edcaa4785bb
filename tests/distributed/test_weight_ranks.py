"""FP8 weights and optimizers in two processes: DDP and FSDP2, see the scenarios' own docstrings."""

from __future__ import annotations

from pathlib import Path

from ranks import all_hold, scenarios_of


def test_every_scenario_holds_on_every_rank(tmp_path: Path) -> None:
    all_hold(2, tmp_path, scenarios_of("weight_scenarios", "optimizer_scenarios"))
