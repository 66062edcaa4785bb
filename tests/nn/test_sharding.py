"""Tokens of several ranks put in order; how layers run on shards is tested in processes (tests/distributed)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ottava
from ottava.nn import sharding
from ottava.nn.sharding import Tokens, refuse_split
from ottava.numerics.scaling import Granularity
from ottava.numerics.tensor import QuantizationSpec

RANKS = 3


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A group of three of which this process answers for all: what the others hold is given by the test."""
    held: dict[str, Any] = {}
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: RANKS)

    def gather(out: Tensor, own: Tensor, group: Any) -> None:
        parts = held["gathered"].pop(0)
        assert any(torch.equal(part.contiguous().view(own.dtype), own) for part in parts)
        out.copy_(torch.cat([part.contiguous().view(own.dtype) for part in parts]))

    def reduce(out: Tensor, parts: Tensor, group: Any) -> None:
        out.copy_(parts.view(RANKS, *out.shape)[held["rank"]] * RANKS)

    monkeypatch.setattr(sharding, "all_gather", gather)
    monkeypatch.setattr(sharding, "reduce_scatter", reduce)
    return held


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x16"])
@pytest.mark.parametrize(("shape", "dim"), [((2, 48), 1), ((48, 2), 0), ((48,), 0), ((2, 16, 3), 1)], ids=str)
def test_tokens_of_all_ranks_stand_in_their_order(
    world: dict[str, Any], granularity: str, shape: tuple[int, ...], dim: int
) -> None:
    """x and x.T; codes, and scales where tokens have their own."""
    spec = QuantizationSpec(ottava.E4M3, Granularity.parse(granularity), scale_format="pow2")
    numbers = [*shape, 32]
    numbers[dim] *= RANKS
    whole = torch.randn(numbers, generator=torch.Generator().manual_seed(0))
    parts = [part.reshape(-1, 32) for part in whole.chunk(RANKS, dim)]
    rows = whole.reshape(-1, 32)
    top = whole.abs().amax()
    for part in parts:
        part[0, 0] = top  # all shards have one scale, as ranks that agree on it have
    scale = spec.scale_of(top.reshape(1, 1)).scale if granularity == "tensor" else None
    tokens = Tokens(dist.group.WORLD, shape, dim)  # type: ignore[arg-type]
    whole = torch.cat([part.reshape(*shape, 32) for part in parts], dim)
    rows = whole.reshape(-1, 32)
    for along, matrix in ((0, rows), (1, rows.t()))[: 1 if granularity == "row" else 2]:  # a row of x.T has all tokens
        shards = [ottava.quantize(part if along == 0 else part.t(), spec, scale=scale) for part in parts]
        wanted = ottava.quantize(matrix, spec, scale=scale)
        turned = along == 1 and shards[0].data.t().is_contiguous()
        gathered = [[s.data.t() if turned else s.data for s in shards]]
        if wanted.scale_inv.shape[along] > 1:
            sideways = along == 1 and shards[0].scale_inv.t().is_contiguous()
            gathered.insert(0, [s.scale_inv.t() if sideways else s.scale_inv for s in shards])
        world["gathered"] = gathered
        operand = tokens.gather(shards[1], along)
        assert not isinstance(operand, Tensor)
        assert torch.equal(operand.data.view(torch.uint8), wanted.data.contiguous().view(torch.uint8)), along
        assert torch.equal(operand.scale_inv, wanted.scale_inv), along


def test_each_rank_gets_the_sum_of_its_own_tokens(world: dict[str, Any]) -> None:
    tokens = Tokens(dist.group.WORLD, (2, 4), 1)  # type: ignore[arg-type]
    partial = torch.randn(2, 4 * RANKS, 5)
    for rank in range(RANKS):
        world["rank"] = rank
        own = tokens.sum(partial.reshape(-1, 5))
        assert torch.equal(own, partial.chunk(RANKS, 1)[rank].reshape(-1, 5) * RANKS)


def test_blocks_that_cross_a_border_are_refused(world: dict[str, Any]) -> None:
    spec = QuantizationSpec(ottava.E4M3, Granularity.parse("1x32"), scale_format="pow2")
    with pytest.raises(ValueError, match="Pad the sequence to a multiple of 96"):
        Tokens(dist.group.WORLD, (2, 48), 1).gather(ottava.quantize(torch.ones(8, 96), spec), 1)  # type: ignore[arg-type]


def test_a_weight_that_is_no_dtensor_is_named() -> None:
    assert "no DTensor" in str(refuse_split(nn.Linear(4, 4).weight))
