"""FSDP2 with gathers of FP8 codes in two and in three processes, see the scenarios' own docstrings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import failures, scenarios_of, start

import ottava
from ottava.distributed.sharded_weight import Gathering, ShardedWeight
from ottava.quantized_tensor import QuantizationSpec

SCENARIOS = scenarios_of("fsdp_scenarios")


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)], ids=lambda size: f"{size} processes")
def test_every_scenario_holds_on_every_rank(size: int, tmp_path: Path) -> None:
    failed = failures(start(size, tmp_path / "ranks", SCENARIOS), SCENARIOS)
    assert not failed, "\n".join(failed)


def test_arithmetic_sees_the_numbers() -> None:
    """A change in place forgets the agreed amax, for all that share the memory; a copy keeps it; results are plain."""
    spec = QuantizationSpec(ottava.E4M3)
    weight = ShardedWeight(torch.ones(4, 4), (spec, spec), Gathering(lambda: None), [(torch.ones(1, 1),)])
    alias, copy = weight.detach(), weight.clone()
    assert type(weight + weight) is torch.Tensor
    assert weight.known
    torch._foreach_mul_([alias, torch.ones(2)], 3.0)
    assert not weight.known
    assert not alias.known
    assert copy.known
    assert torch.equal(weight.numbers, torch.full((4, 4), 3.0))
    assert isinstance(weight[:2], ShardedWeight)
    assert "gathered as E4M3" in repr(weight)
