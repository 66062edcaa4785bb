"""What several processes do with experts that are divided among them; run by test_styles. The witness: one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_scenarios import close, ends, gathered, mesh_of, nearest
from state_scenarios import World, same_everywhere
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

import ottava
from ottava.distributed import ExpertParallel
from ottava.nn import sharding
from sweep import FIXED

HIDDEN, FFN = 128, 128


def moe(recipe: Any, experts: int, **settings: Any) -> ottava.nn.MoE:
    torch.manual_seed(0)
    return ottava.nn.MoE(HIDDEN, FFN, experts, 2, recipe=recipe, dtype=torch.bfloat16, **settings)


def shares(world: World, kind: str) -> list[int]:
    """Tokens of each rank."""
    uneven = [5 + 40 * rank for rank in range(world.size)]
    return {"even": [64] * world.size, "uneven": uneven, "one has none": [0, *uneven[1:]]}[kind]


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def step(model: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    y, dx = ends(model, x, dy)
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters() if p.numel()}
    return {"y": y, "dx": dx} | {name: gathered(grad) for name, grad in grads.items()}


def experts_have_the_bits_of_one_process(world: World) -> None:
    """Every registered recipe, or four of them in four processes; tokens shared evenly, unevenly, and a rank without
    any; experts that nobody asks."""
    for recipe in FIXED if world.size == 2 else ("bf16", "tensorwise", "blockwise", "mxfp8"):
        whole = moe(nearest(recipe), 2 * world.size, bias=recipe == "bf16", shared_experts=int(recipe == "bf16"))
        model = copy.deepcopy(whole)
        parallelize_module(model, mesh_of(world), ExpertParallel())
        for kind in ("even", "uneven", "one has none"):
            counts = shares(world, kind)
            x, dy = tokens(sum(counts)), tokens(sum(counts), 2)
            got = step(model, x.split(counts)[world.rank], dy.split(counts)[world.rank])
            wanted = world.once(lambda whole=whole, x=x, dy=dy: step(whole, x, dy))
            for name, one in got.items():
                other = wanted[name]
                if name in ("y", "dx"):
                    other = other.split(counts)[world.rank]
                if name.startswith(("router", "shared")):
                    dist.all_reduce(one)
                    assert close(one, other, 4 * world.size), (recipe, kind, name)
                else:
                    assert torch.equal(one, other), (recipe, kind, name, (one - other).abs().max())
        with torch.no_grad(), ottava.autocast(enabled=False):
            wanted = world.once(lambda whole=whole, x=x: {"y": whole(x)})
            assert torch.equal(model(x.split(counts)[world.rank]), wanted["y"].split(counts)[world.rank])


def codes_travel_to_experts(world: World) -> None:
    """Bytes of the forward's way to the experts; what comes back is BF16; the receipt says which."""
    sent: list[int] = []
    real = sharding.all_to_all

    def counting(rows: Tensor, *rest: Any) -> Tensor:
        sent.append(rows.nbytes)
        return real(rows, *rest)

    x = tokens(96, 3 + world.rank)
    bf16 = 2 * x.nbytes  # two experts a token
    for recipe, limit, said in (
        ("blockwise", 0.53, "as codes"),
        ("mxfp8", 0.57, "as codes"),
        ("tensorwise", 0.51, "as codes"),
        ("delayed", 1.0, "uncast"),
        ("bf16", 1.0, ""),
    ):
        model = parallelize_module(moe(recipe, 2 * world.size), mesh_of(world), ExpertParallel())
        sharding.all_to_all = counting
        try:
            sent.clear()
            step(model, x, x)
        finally:
            sharding.all_to_all = real
        counts, *there = sent[: 2 if recipe in ("tensorwise", "delayed", "bf16") else 3]
        assert counts == 8 * 2 * world.size
        assert sum(there) <= limit * bf16, (recipe, there, bf16)
        assert said in str(ottava.receipt(model)), ottava.receipt(model)


def histories_of_experts(world: World) -> None:
    """Delayed scaling: every rank ends a step with the histories of all experts; refusals."""
    model = moe("delayed", 2 * world.size)
    ottava.convert(model, "delayed", filter=lambda name, layer: True)
    whole = copy.deepcopy(model)
    parallelize_module(model, mesh_of(world), ExpertParallel())
    counts = shares(world, "one has none")
    x, dy = tokens(sum(counts)), tokens(sum(counts), 2)
    for _ in range(2):
        step(model, x.split(counts)[world.rank], dy.split(counts)[world.rank])
        step(whole, x, dy)
        for one in (model, whole):
            torch.optim.SGD([*one.up.parameters(), *one.down.parameters()], lr=0.1).step()
    same_everywhere(world, model)
    for (name, one), other in zip(model.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(gathered(one), other), name
    with pytest.raises(ValueError, match="needs as many on each"):
        parallelize_module(moe("bf16", 2 * world.size + 1), mesh_of(world), ExpertParallel())
    with pytest.raises(TypeError, match=r"needs an ottava\.nn\.MoE"):
        parallelize_module(nn.Linear(4, 4), mesh_of(world), ExpertParallel())
    stored = moe("tensorwise", 2 * world.size)
    ottava.convert(stored, "tensorwise", filter=lambda name, layer: True, weights="fp8")
    with pytest.raises(TypeError, match="weights='bf16'"):
        parallelize_module(stored, mesh_of(world), ExpertParallel())
