"""Late ranks, and collectives that end in another order; run in three processes by test_collectives."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_scenarios import losses, network, shard
from state_scenarios import World
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ottava.distributed import fully_shard
from scaling_samples import state_of

SLOWEST = 0.02  # seconds


@contextmanager
def late(world: World) -> Iterator[list[str]]:
    """Every collective that Python makes begins at a time of the rank's own."""
    rng, made = random.Random(world.rank), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "all_reduce",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_gather_single",
            "reduce_scatter_single",
        ):
            if (real := getattr(dist, name, None)) is None:
                continue

            def delayed(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
                made.append(name)
                time.sleep(rng.uniform(0, SLOWEST))
                return real(*args, **kwargs)

            patch.setattr(dist, name, delayed)
        yield made


def shuffled(world: World, first_come: bool = False) -> Any:
    """A hook of DDP: the bucket in pieces, each gathered on its own, awaited in an order of this rank's own, and added
    by rank; `first_come` adds in the order of arrival instead."""
    rng = random.Random(10 + world.rank)

    def average(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flat = bucket.buffer()
        pieces = list(flat.split(max(1, flat.numel() // 5)))
        held = [[torch.empty_like(piece) for _ in range(world.size)] for piece in pieces]
        works = [dist.all_gather(parts, piece, async_op=True) for parts, piece in zip(held, pieces, strict=True)]
        order = rng.sample(range(len(pieces)), len(pieces))
        for at in order:
            time.sleep(rng.uniform(0, SLOWEST / 5))
            works[at].wait()
        for piece, parts in zip(pieces, held, strict=True):
            arrived = rng.sample(parts, len(parts)) if first_come else parts
            total = arrived[0].clone()
            for part in arrived[1:]:
                total += part
            piece.copy_(total / world.size)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(flat)
        return done

    return lambda state, bucket: average(bucket)  # DDP refuses annotations that are strings


def bits(world: World, model: nn.Module) -> list[Tensor]:
    made = losses(world, model)
    return [
        *made,
        *state_of(model).values(),
        *(p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()),
    ]


def replicas(world: World, **stress: Any) -> list[Tensor]:
    model = DistributedDataParallel(network("delayed", dtype=torch.float32), bucket_cap_mb=0.05)
    model.register_comm_hook(None, shuffled(world, **stress))
    return bits(world, model)


def late_ranks_and_shuffled_completion(world: World) -> None:
    """DDP with many buckets, FSDP2 of ours; predicted scales, whose amaxes ranks share."""
    for recipe in ("delayed", "tensorwise", "rowwise"):
        calm = bits(world, shard(fully_shard, network(recipe)))
        with late(world) as made:
            stressed = bits(world, shard(fully_shard, network(recipe)))
        assert len(made) >= 3, made
        assert all(map(torch.equal, calm, stressed)), recipe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", lambda seconds: None)
        calm = replicas(world)
    with late(world):
        assert all(map(torch.equal, calm, replicas(world)))


def a_sum_in_the_order_of_arrival_is_seen(world: World) -> None:
    """The stress can fail: each rank adds in another order."""
    different = not all(map(torch.equal, replicas(world), replicas(world, first_come=True)))
    seen = [torch.zeros(1) for _ in range(world.size)]
    dist.all_gather(seen, torch.tensor([float(different)]))
    assert sum(float(one) for one in seen) > 0
