"""Tokens, classes and experts of several ranks put in order; whole layers run in processes (tests/distributed)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ottava
from ottava.nn import sharding
from ottava.nn.cross_entropy import CrossEntropy, Vocabulary
from ottava.nn.grouped import Permutation, sort_by_expert
from ottava.nn.sharding import RankPermutation, SharedVocabulary, Tokens, refuse_split
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


def test_three_numbers_a_token_make_the_loss_of_all_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rank has only logits of -inf, and where targets do not count."""
    logits = torch.randn(7, 9 * RANKS, generator=torch.Generator().manual_seed(0))
    logits[0, :9] = -torch.inf
    target = torch.tensor([26, 0, 9, 17, -100, 18, 8])
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: RANKS)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
    parts = logits.chunk(RANKS, 1)
    rank, told = 0, []

    def tell(out: Tensor, own: Tensor, group: Any) -> None:
        told.append(own)
        out.copy_(torch.cat((told * RANKS)[:RANKS] if len(told) < RANKS else told[:RANKS]))

    monkeypatch.setattr(sharding, "all_gather", tell)
    settings = CrossEntropy(label_smoothing=0.0, z_loss=0.1, softcap=None)
    wanted, lse = settings.of(logits.clone(), target, Vocabulary())
    for _ in range(2):  # first every rank tells its numbers, then each reads those of all
        for rank in range(RANKS):
            shared = SharedVocabulary(dist.group.WORLD, 9 * rank, 9 * RANKS, split=False)  # type: ignore[arg-type]
            got, own_lse = settings.of(parts[rank].clone(), target, shared)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(own_lse, lse)
    whole = settings.gradient(logits.clone(), lse, target, None, Vocabulary())
    torch.testing.assert_close(settings.gradient(parts[2].clone(), lse, target, None, shared), whole.chunk(RANKS, 1)[2])


EXPERT_RANKS, EXPERTS = 3, 6


def test_rows_of_all_ranks_are_sorted_as_one_process_sorts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks in one process, one of them without a token: each tells what it sends, then each reads."""
    tokens = [4, 0, 7]
    index = torch.randint(EXPERTS, (sum(tokens), 2), generator=torch.Generator().manual_seed(0))
    x = torch.arange(sum(tokens) * 2.0).view(-1, 2).bfloat16()
    own = [sort_by_expert(part, EXPERTS) for part in index.split(tokens)]
    told: dict[str, dict[int, tuple[Tensor, list[int]]]] = {"counts": {}, "rows": {}}
    rank = 0

    def send(rows: Tensor, to: list[int], come: list[int], group: object) -> Tensor:
        kind = "counts" if to == [1] * EXPERT_RANKS and rows.dtype == torch.int64 else "rows"
        told[kind][rank] = rows, to
        parts = [r.split(t)[rank] for r, t in told[kind].values()] if len(told[kind]) == EXPERT_RANKS else []
        return (
            torch.cat(parts)
            if parts and sum(map(len, parts)) == sum(come)
            else rows.new_zeros(sum(come), *rows.shape[1:])
        )

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: EXPERT_RANKS)
    monkeypatch.setattr(sharding, "all_to_all", send)
    plans: list[RankPermutation] = []
    for _ in range(2):
        plans = []
        for rank, plan in enumerate(own):  # noqa: B007  # `send` reads it
            plans.append(RankPermutation(plan, dist.group.WORLD))  # type: ignore[arg-type]
    for _ in range(2):
        gathered = []
        for rank, plan in enumerate(plans):
            gathered.append(plan.gather(x.split(tokens)[rank]))
    whole: Permutation = sort_by_expert(index, EXPERTS)
    assert torch.equal(torch.cat(gathered), whole.gather(x))
    assert torch.equal(torch.cat([plan.counts for plan in plans]), whole.counts)
    for plan in plans:
        rows = torch.arange(len(plan.rows))
        assert torch.equal(rows.index_select(0, plan.rows).index_select(0, plan.back), rows)
