"""FP8 weights and optimizers in two processes: DDP and FSDP2, see the scenarios' own docstrings."""

from __future__ import annotations

from pathlib import Path

from ranks import failures, scenarios_of, start

SCENARIOS = scenarios_of("weight_scenarios", "optimizer_scenarios")


def test_every_scenario_holds_on_every_rank(tmp_path: Path) -> None:
    failed = failures(start(2, tmp_path / "ranks", SCENARIOS), SCENARIOS)
    assert not failed, "\n".join(failed)
