"""FSDP2 with gathers of FP8 codes in two and in three processes, see the scenarios' own docstrings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import failures, scenarios_of, start

import ottava
from ottava.distributed.sharded_weight import ShardedWeight
from ottava.quantized_tensor import QuantizationSpec

SCENARIOS = scenarios_of("fsdp_scenarios")


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)], ids=lambda size: f"{size} processes")
def test_every_scenario_holds_on_every_rank(size: int, tmp_path: Path) -> None:
    failed = failures(start(size, tmp_path / "ranks", SCENARIOS), SCENARIOS)
    assert not failed, "\n".join(failed)


def test_arithmetic_sees_the_numbers() -> None:
    """A change in place forgets the agreed amax; results are plain, and shards stay what they are."""
    weight = ShardedWeight(torch.ones(4, 4), QuantizationSpec(ottava.E4M3))
    weight.largest = torch.ones(1, 1)
    assert type(weight + weight) is torch.Tensor
    assert weight.largest is not None
    torch._foreach_mul_([weight, torch.ones(2)], 3.0)
    assert weight.largest is None
    assert torch.equal(weight.numbers, torch.full((4, 4), 3.0))
    assert isinstance(weight[:2], ShardedWeight)
    assert "gathered as E4M3" in repr(weight)
