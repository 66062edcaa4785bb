"""What several processes do with experts, of which each rank has others idle; run in each of them by test_state_ddp."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from state_scenarios import World, ddp, same_everywhere
from torch import nn

import ottava
from ottava.nn import MoE
from scaling_samples import WIDTH, noise


def experts_that_are_idle_on_some_ranks(world: World) -> None:
    """Gradients are the mean of the ranks', histories and biases the same everywhere; all parameters get one."""
    moe = MoE(WIDTH, 32, 4, 1, router={"bias_rate": 0.1, "score": "sigmoid"}, recipe="bf16", dtype=torch.bfloat16)
    model = nn.Sequential(moe)
    ottava.convert(model, "delayed", filter=lambda name, layer: True)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    local, wrapped = copy.deepcopy(model), ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        # this rank's tokens look alike, so that most of its experts get none
        x = (noise(100 * step + world.rank)[:1] + 0.01 * noise(7)).bfloat16()
        local.load_state_dict(model.state_dict())
        for one in (wrapped, local):
            one.zero_grad()
            one(x).float().square().sum().backward()
        counts = moe.router.tokens_per_expert
        assert int((counts > 0).sum()) < 4
        for own, theirs in zip(model.parameters(), local.parameters(), strict=True):
            assert own.grad is not None
            assert theirs.grad is not None
            mean = theirs.grad.float() / world.size
            dist.all_reduce(mean)
            assert (own.grad.float() - mean).abs().max() <= 2.0**-6 * mean.abs().max() + 1e-6  # reduced in BF16
        optimizer.step()
        moe.router.update_bias(dist.group.WORLD)
        biases = [torch.empty_like(moe.router.bias) for _ in range(world.size)]
        dist.all_gather(biases, moe.router.bias)
        assert all(torch.equal(bias, biases[0]) for bias in biases)
        same_everywhere(world, model)
    rows = [row for row in ottava.receipt(model).rows if row.gemm == "wgrad"]
    assert any(row.fp8 for row in rows)
