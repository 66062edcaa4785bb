"""DistributedDataParallel in each of its ways, and FSDP1; run in several processes by test_state_ddp."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from state_scenarios import World, same_everywhere
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ottava.distributed import ColwiseParallel, fp8_gradient_hook, verify
from scaling_samples import differences, loss_of, network, noise, sgd, snapshot, state_of, windows

RECIPES = ("tensorwise", "rowwise", "blockwise", "delayed")


def train(world: World, model: nn.Module, steps: int, rows: int = 8, call: Any = None) -> list[Tensor]:
    optimizer, losses = sgd(model), []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(loss_of(model if call is None else call, noise(100 * step + world.rank, rows)))
        losses[-1].backward()
        optimizer.step()
    return [loss.detach() for loss in losses]


def a_rank_without_a_batch(world: World) -> None:
    """In `join` rank 0 has none at all, the others two: one model, and the windows of those that ran."""
    for recipe in ("delayed", "tensorwise"):
        for hook in (None, fp8_gradient_hook):
            model = DistributedDataParallel(network(recipe))
            if hook is not None:
                model.register_comm_hook(None, hook)
            with model.join():
                train(world, model, 2 if world.rank else 0)
            expected = [world.largest(step, *range(1, world.size)) for step in (1, 0)]
            assert recipe != "delayed" or windows(model)[0] == expected, (windows(model)[0], expected)
            same_everywhere(world, model)
            train(world, model, 1)  # so that all ranks have run the same kernels
            verify(model)


def batches_of_other_sizes(world: World) -> None:
    """Rank 0 has a batch of no rows: it adds nothing to the mean of the gradients."""
    for recipe in RECIPES:
        model, alone = DistributedDataParallel(network(recipe)), network(recipe)
        x = noise(world.rank, 8 * world.rank)
        model(x).float().square().sum().backward()
        for rank in range(1, world.size):
            alone(noise(rank, 8 * rank)).float().square().sum().backward()
        for (name, one), other in zip(model.module.named_parameters(), alone.parameters(), strict=True):
            # each rank's part and each sum is rounded to BF16
            wanted = other.grad.float() / world.size
            bound = 2.0**-7 * world.size * wanted.abs().max()
            assert bool(((one.grad.float() - wanted).abs() <= bound).all()), (recipe, name)


class Recomputed(nn.Module):
    """The model under activation checkpointing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """As the model."""
        return checkpoint(self.model, x, use_reentrant=True)


def static_graphs(world: World) -> None:
    """static_graph=True, also around a reentrant checkpoint, which it is needed for: the bits without it."""
    for recipe in RECIPES:
        plain = DistributedDataParallel(network(recipe))
        static = DistributedDataParallel(network(recipe), static_graph=True)
        around = DistributedDataParallel(Recomputed(network(recipe)), static_graph=True)
        want = train(world, plain, 3)
        assert all(map(torch.equal, want, train(world, static, 3))), recipe
        got = train(world, around, 3, call=lambda x, model=around: model(x.requires_grad_()))
        assert all(map(torch.equal, want, got)), recipe
        for one in (static.module, around.module.model) if world.size == 2 else ():  # more ranks: sums in other orders
            assert differences(snapshot(plain.module), snapshot(one)) == [], recipe


def compiled_models(world: World) -> None:
    """torch.compile of the wrapper: the bits of eager code; see `state_scenarios_sharded.compiled` for histories."""
    for recipe in RECIPES[:2]:
        torch._dynamo.reset()
        eager = DistributedDataParallel(network(recipe))
        model = DistributedDataParallel(network(recipe))
        want, got = train(world, eager, 2), train(world, model, 2, call=torch.compile(model, backend="aot_eager"))
        assert all(map(torch.equal, want, got)), recipe
        assert differences(snapshot(eager.module), snapshot(model.module)) == [], recipe


def fsdp1(world: World) -> None:
    """FullyShardedDataParallel has the bits of DistributedDataParallel where two ranks add; flat parameters do with
    recipes that predict nothing."""
    cpu = torch.device("cpu")
    for recipe in RECIPES:
        for own in (True, False):
            if recipe == "delayed" and not own:
                continue  # refused, see test_groups
            reference = DistributedDataParallel(network(recipe))
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="delayed scaling")
                model = FullyShardedDataParallel(network(recipe), use_orig_params=own, device_id=cpu)
                losses = [train(world, one, 3) for one in (reference, model)]
            for one, other in zip(*losses, strict=True):
                assert torch.equal(one, other) if world.size == 2 else torch.allclose(one, other, rtol=2.0**-6), recipe
            mine, theirs = (list(state_of(one).values()) for one in (reference, model))
            assert world.size > 2 or all(map(torch.equal, mine, theirs)), recipe


def split_weights_are_refused(world: World) -> None:
    """A model that tensor parallelism has split is no model for DistributedDataParallel."""
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(use_local_output=True)})
    with pytest.raises(TypeError, match=r"0\.weight is a DTensor.*fully_shard\(model, mesh=mesh\['dp'\]\)"):
        DistributedDataParallel(model)
