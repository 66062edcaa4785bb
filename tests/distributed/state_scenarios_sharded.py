"""Scaling state in several processes, continued: kinds of optimizers, compiled models, FSDP2, its checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from state_scenarios import World, assert_same, ddp, same_everywhere, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint

import ottava
from scaling_samples import (
    WIDTH,
    differences,
    door_of,
    doors,
    lengths,
    loss_of,
    network,
    noise,
    sgd,
    snapshot,
    state_of,
    windows,
)


def two_optimizers(world: World) -> None:
    """Matrices in one, vectors in the other, in another order on every other step: one entry a step."""
    model = ddp(network())
    parameters = list(model.parameters())
    optimizers = [
        torch.optim.SGD([p for p in parameters if p.dim() == 2], lr=0.1),
        torch.optim.AdamW([p for p in parameters if p.dim() == 1], lr=1e-2),
    ]
    for step in range(4):
        loss_of(model, world.data(step)).backward()
        for optimizer in optimizers[:: 1 if step % 2 else -1]:
            optimizer.step()
            optimizer.zero_grad()
    assert lengths(model) == [4] * 6
    same_everywhere(world, model)


def every_rank_steps_other_parameters(world: World) -> None:
    """ZeroRedundancyOptimizer: each rank's own optimizer holds a part. One reduction of one size, one entry a step."""
    plain, sharded = ddp(network(layers=3)), ddp(network(layers=3))
    optimizer = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.SGD, lr=0.05)
    train(world, plain, range(3))
    train(world, sharded, range(3), optimizer)
    assert_same(plain, sharded)
    same_everywhere(world, sharded)


def skipped_steps(world: World) -> None:
    """One rank's gradient overflows: GradScaler skips on all, and no history takes the amaxes."""
    model = ddp(network())
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(3):
        optimizer.zero_grad()
        factor = math.inf if (step, world.rank) == (1, 0) else 1.0
        scaler.scale(loss_of(model, world.data(step)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert windows(model)[0] == [world.largest(2), world.largest(0)]
    same_everywhere(world, model)


def many_closures(world: World) -> None:
    """LBFGS: many forwards and backwards in one step()."""
    model = ddp(network())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, world.data(0))
        loss.backward()
        dist.all_reduce(mean := loss.detach().clone())
        return mean

    for steps in (1, 2):
        optimizer.step(closure)
        assert lengths(model) == [steps] * 6
    same_everywhere(world, model)


def frozen_and_tied(world: World) -> None:
    """A frozen first layer, and two that share a weight, under an optimizer made before the conversion."""
    torch.manual_seed(0)
    bare = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))).bfloat16()
    bare[0].requires_grad_(False)
    bare[2].weight = bare[1].weight
    optimizer = torch.optim.SGD([bare[1].weight], lr=0.05)
    ottava.convert(bare, "delayed")
    model = ddp(bare)
    train(world, model, range(3), optimizer)
    assert lengths(model) == [3, 3, 0] + [3] * 6
    same_everywhere(world, model)


def a_loop_without_an_optimizer(world: World) -> None:
    """`ScalingState(model).update()` in every step, a new one each time: it knows the group that the last one found."""
    model = ddp(network())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            loss_of(model, world.data(step)).backward()
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p -= 0.05 * p.grad
                    p.grad = None
            ottava.ScalingState(model.module).update()
    assert windows(model)[0] == [world.largest(step) for step in (2, 1, 0)]
    same_everywhere(world, model)


def a_group_by_name(world: World) -> None:
    """Data parallel by hand: without a wrapper the group has to be named, and whoever forgets is told."""
    for named in (True, False):
        model = network()
        if named:
            ottava.ScalingState(model, dist.group.WORLD)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            train(world, model, range(2), sgd(model, lr=0.0))
        assert any("Name the group: ottava.ScalingState(model, group=...)" in str(w.message) for w in said) != named
        if named:
            assert windows(model)[0] == [world.largest(1), world.largest(0)]
            same_everywhere(world, model)


def a_group_by_autocast(world: World) -> None:
    """autocast(group=...) names it too, and only for the ranks of that group."""
    group = dist.new_group([0, 1])
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a third rank stands alone, and is told
        for step in range(2):
            with ottava.autocast(group=group if world.rank < 2 else None):
                train(world, model, range(step, step + 1), sgd(model, lr=0.0))
    ranks = (0, 1) if world.rank < 2 else (world.rank,)
    assert windows(model)[0] == [world.largest(1, *ranks), world.largest(0, *ranks)]


def compiled(world: World) -> None:
    """Compiled code cannot see its wrapper; the state was told of it when it was made. The bits are those of eager."""
    eager, model = ddp(network(layers=1)), ddp(network(layers=1))
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager")
    optimizers = [sgd(eager, lr=0.0), sgd(model, lr=0.0)]
    for step in range(3):
        for f, optimizer in zip((eager, call), optimizers, strict=True):
            loss_of(f, world.data(step)).backward()
            optimizer.step()
    assert differences(state_of(eager), state_of(model)) == []
    same_everywhere(world, model)


def sharded(layers: int = 3, seed: int = 0, way: Callable[..., Tensor] | None = None) -> nn.Sequential:
    """FSDP2, each Linear for itself and the rest in the root."""
    model = network(layers=layers, seed=seed)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    assert isinstance(model[0], FSDPModule)
    assert isinstance(model[0], ottava.nn.Linear)
    return model


def fsdp2(world: World) -> None:
    """The group is the mesh of the parameters, windows hold the largest of all ranks; the first step is that of DDP."""
    model, reference = sharded(), ddp(network(layers=3))
    train(world, model, range(1))
    train(world, reference, range(1))
    assert differences(state_of(model), state_of(reference.module)) == []
    train(world, model, range(1, 4))
    assert windows(model)[0] == [world.largest(step) for step in (3, 2, 1, 0)]
    assert lengths(model) == [4] * 9
    same_everywhere(world, model)


def fsdp2_accumulates_and_recomputes(world: World) -> None:
    """Micro-batches with gradients kept unsharded, and checkpointing: histories are those of a plain run."""
    plain, recomputed = sharded(), sharded()
    for model, forward in ((plain, plain), (recomputed, partial(checkpoint, recomputed, use_reentrant=False))):
        optimizer = sgd(model, lr=0.0)
        for step in range(2):
            for i in range(3):
                model.set_requires_gradient_sync(i == 2)
                loss_of(forward, world.data(3 * step + i).requires_grad_()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert lengths(model) == [2] * 9
        same_everywhere(world, model)
    assert differences(state_of(plain), state_of(recomputed)) == []


def weight_cache(world: World) -> None:
    """DDP and FSDP2, where a weight comes anew from every all-gather: with the cache as without it, bit for bit."""
    for make in (sharded, lambda: ddp(network(layers=3))):
        losses = []
        for watched in (False, True):
            model = make()
            if watched:
                for name, door in doors(model).items():
                    if name.endswith("weight"):
                        door.register_forward_hook(lambda *_: None)
            optimizer, seen = sgd(model, lr=0.5), []
            for step in range(3):
                for i in range(2):
                    loss = loss_of(model, world.data(3 * step + i))
                    loss.backward()
                    seen.append(loss.item())
                    with torch.no_grad():
                        seen.append(loss_of(model, noise(5)).item())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(seen)
        assert losses[0] == losses[1]
        assert len(set(losses[0])) == 9  # six batches and, once a step, the same evaluation


def full(model: nn.Module) -> dict[str, Tensor]:
    """All of a model's state, unsharded."""
    state: dict[str, Tensor] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return state


def distributed_checkpoint(world: World) -> None:
    """torch.distributed.checkpoint: two ranks write, three read, each sharded over its own number of ranks."""
    path = Path(world.folder).parent / "dcp"
    if world.size == 2:
        model = sharded(seed=1)
        train(world, model, range(3))
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path / "checkpoint")
        whole = full(model)
        if world.rank == 0:
            torch.save(whole, path / "expected.pt")
    model = sharded(seed=2)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path / "checkpoint")
    set_model_state_dict(model, state["model"])
    got = full(model)
    if world.rank == 0:
        assert differences(got, torch.load(path / "expected.pt")) == []
    assert lengths(model) == [3] * 9
    same_everywhere(world, model)
    scale = door_of(model).scale.clone()
    train(world, model, range(3, 4))
    assert lengths(model) == [4] * 9
    assert not torch.equal(door_of(model).scale, scale) or world.largest(3) <= max(windows(model)[0][1:])
    assert snapshot(model)["0.quantizers.input.amax_history"][0] == world.largest(3)
