"""Rows for the experts of other ranks, put in order; whole layers are tested in processes (tests/distributed)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ottava.nn import expert_parallel
from ottava.nn.expert_parallel import RankPermutation
from ottava.nn.permutation import Permutation, sort_by_expert

RANKS, EXPERTS = 3, 6


def test_rows_of_all_ranks_are_sorted_as_one_process_sorts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks in one process, one of them without a token: each tells what it sends, then each reads."""
    tokens = [4, 0, 7]
    index = torch.randint(EXPERTS, (sum(tokens), 2), generator=torch.Generator().manual_seed(0))
    x = torch.arange(sum(tokens) * 2.0).view(-1, 2).bfloat16()
    own = [sort_by_expert(part, EXPERTS) for part in index.split(tokens)]
    told: dict[str, dict[int, tuple[Tensor, list[int]]]] = {"counts": {}, "rows": {}}
    rank = 0

    def send(rows: Tensor, to: list[int], come: list[int], group: object) -> Tensor:
        kind = "counts" if to == [1] * RANKS and rows.dtype == torch.int64 else "rows"
        told[kind][rank] = rows, to
        parts = [r.split(t)[rank] for r, t in told[kind].values()] if len(told[kind]) == RANKS else []
        return (
            torch.cat(parts)
            if parts and sum(map(len, parts)) == sum(come)
            else rows.new_zeros(sum(come), *rows.shape[1:])
        )

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: RANKS)
    monkeypatch.setattr(expert_parallel, "all_to_all", send)
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
