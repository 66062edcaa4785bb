"""Megatron's parallel linears on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import failures, scenarios_of, start

pytest.importorskip("megatron.core")
SCENARIOS = scenarios_of("megatron_scenarios")


def test_two_ranks(tmp_path: Path) -> None:
    assert failures(start(2, tmp_path / "ranks", SCENARIOS), SCENARIOS) == []
    assert SCENARIOS == ["megatron_scenarios.shards_run_as_the_whole"]
