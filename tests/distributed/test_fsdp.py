"""A weight that is sharded in high precision; `test_shard` runs it in several processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import all_hold, scenarios_of

import ottava
from ottava.distributed import fully_shard
from ottava.distributed.fsdp import Gathering, ShardedWeight
from ottava.numerics.tensor import QuantizationSpec


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"fully_shard: got a str; needs a torch\.nn\.Module, or a list of such"):
        fully_shard("x")  # type: ignore[arg-type]


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


# --- fully_shard ---


@pytest.mark.parametrize("size", [2, 3], ids=lambda size: f"{size} processes")
def test_every_scenario_holds_on_every_rank(size: int, tmp_path: Path) -> None:
    all_hold(size, tmp_path, scenarios_of("fsdp_scenarios"))
