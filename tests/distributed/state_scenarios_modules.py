"""Layers with a norm or an activation inside, blocks and experts under DDP and FSDP2; run by test_state_ddp."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from state_scenarios import World, ddp, same_everywhere
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.nn import MoE
from scaling_samples import WIDTH, noise


class Experts(nn.Module):
    """Half of the rows through each of two groups."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.experts = ottava.nn.GroupedLinear(2, WIDTH, WIDTH, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[0] // 2
        return self.experts(x, [half, x.shape[0] - half])


class Recomputed(nn.Module):
    """An MLP under torch.utils.checkpoint, which itself recomputes its activation."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.mlp = ottava.nn.NormMLP(WIDTH, 32, activation="swiglu", norm="rmsnorm", save="recompute", recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.mlp, x, use_reentrant=False)


class Rows(nn.Module):
    """A block reads sequences; here rows are a batch of one."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.block = ottava.nn.TransformerLayer(WIDTH, 32, 2, activation="swiglu", qk_norm="rmsnorm", recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x[None])[0]


def models(recipe: str) -> Iterator[nn.Sequential]:
    """One of each layer (under "delayed", whose scales the ranks share) and all in a row; the same on every rank."""
    own = {"recipe": recipe}
    makers: tuple[Callable[[], nn.Module], ...] = (
        lambda: ottava.nn.NormLinear(WIDTH, WIDTH, **own),  # type: ignore[arg-type]
        lambda: ottava.nn.NormMLP(WIDTH, 32, activation="swiglu", save="fp8", **own),  # type: ignore[arg-type]
        lambda: Recomputed(recipe),
        lambda: Rows(recipe),
        lambda: Experts(recipe),
    )
    alone = tuple((maker,) for maker in makers) if recipe == "delayed" else ()
    for layers in (*alone, makers):
        torch.manual_seed(len(layers))
        yield nn.Sequential(*(maker() for maker in layers))


def modules_under_ddp_and_fsdp2(world: World) -> None:
    """Gradients are the mean of the ranks', after a step FSDP2's weights are DDP's, histories the same everywhere."""
    for recipe in ("delayed", "mxfp8"):
        for model in models(recipe):
            sharded, local, wrapped = copy.deepcopy(model), copy.deepcopy(model), ddp(model)
            for layer in sharded:
                fully_shard(layer)
            fully_shard(sharded)
            optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (wrapped, sharded)]
            for step in range(2):
                x = noise(100 * step + world.rank)
                for one in (local, wrapped, sharded):
                    one.zero_grad()
                    with torch.autocast("cpu", torch.bfloat16):
                        y = one(x)
                    y.float().square().sum().backward()
                if step == 0:
                    for own, theirs in zip(model.parameters(), local.parameters(), strict=True):
                        mean = theirs.grad / world.size
                        dist.all_reduce(mean)
                        assert (own.grad - mean).abs().max() <= 2.0**-20 * mean.abs().max()
                for optimizer in optimizers:
                    optimizer.step()
                for own, shard in zip(model.parameters(), sharded.parameters(), strict=True):
                    whole = shard.full_tensor()  # type: ignore[attr-defined]
                    close = 2.0**-20 if step == 0 else 2.0**-4  # then a cast may fall to the next code
                    assert (own - whole).norm() <= close * own.norm()
                same_everywhere(world, wrapped, sharded)


def a_rotated_block_under_ddp(world: World) -> None:
    """A table of angles goes through the wrapper; after two steps weights and scales are the same everywhere."""
    torch.manual_seed(0)
    heads = {"heads": 4, "kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu"}
    layer = ottava.nn.TransformerLayer(32, 40, **heads, recipe="delayed", dtype=torch.bfloat16)  # type: ignore[arg-type]
    x, table = torch.randn(2 * world.size, 8, 32).bfloat16(), ottava.nn.RotaryEmbedding(8)(torch.arange(8))
    wrapped = ddp(layer)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(x[world.rank :: world.size], rotary=table).float().square().mean().backward()
        optimizer.step()
    assert all(bool(door.scale > 0) for door in ottava.ScalingState(wrapped).doors())
    same_everywhere(world, wrapped)
    weights = torch.cat([parameter.detach().float().flatten() for parameter in layer.parameters()])
    every = [torch.empty_like(weights) for _ in range(world.size)]
    dist.all_gather(every, weights)
    assert all(torch.equal(one, weights) for one in every)


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
