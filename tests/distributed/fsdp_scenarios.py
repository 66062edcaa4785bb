"""FSDP2 that gathers FP8 codes; run in several processes by test_sharded_weight.

The witness is torch's own fully_shard around the same converted model, which gathers in high precision: the same bits.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from state_scenarios import World
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.distributed import fully_shard
from ottava.distributed.fsdp import ShardedWeight
from ottava.recipe import RECIPES, Recipe
from scaling_samples import state_of, two_linears
from sweep import FIXED


def network(recipe: str | Recipe, hidden: int = 512, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return two_linears(recipe, dtype, width=128, hidden=hidden, filter=lambda name, layer: True)


def shard(way: Callable[..., Any], model: nn.Sequential, **settings: Any) -> nn.Sequential:
    for module in (model[0], model[2], model):
        way(module, **settings)
    return model


def losses(world: World, model: nn.Module, steps: int = 3, lr: float = 1e-2) -> list[Tensor]:
    """Of a run with AdamW and clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    made = []
    for step in range(steps):
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(10 * step + world.rank)).bfloat16()
        loss = model(x.to(next(model.parameters()).dtype)).float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        made.append(loss.detach())
    return made


def agree(world: World, recipe: str, hidden: int, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> nn.Module:
    """Losses and histories of ottava's fully_shard have the bits of torch's; returns ottava's model."""
    models = [shard(way, network(recipe, hidden, dtype), **settings) for way in (fsdp.fully_shard, fully_shard)]
    same(world, *models, case=(recipe, hidden, settings))
    return models[1]


def same(world: World, *models: nn.Module, case: Any, run: Callable[..., list[Tensor]] = losses) -> None:
    said = []
    for model in models:
        torch.manual_seed(1)  # for gradients that are rounded at random
        said.append([*run(world, model), *state_of(model).values()])
    for one, other in zip(*said, strict=True):
        assert torch.equal(one, other), case


def same_bits_as_a_gather_in_bf16(world: World) -> None:
    """Every recipe that casts; even, uneven and empty shards; each way of resharding; offload; mixed precision."""
    mesh = init_device_mesh("cpu", (world.size,))
    casting = [name for name, recipe in RECIPES.items() if recipe.casts and name in FIXED]
    if world.size > 2:  # a third rank makes shards uneven; what each recipe sends, two have shown
        casting = ["tensorwise", "blockwise", "delayed"]
    cases: list[tuple[str, int, dict[str, Any]]] = [
        *((recipe, 128 * world.size, {}) for recipe in casting),
        *((recipe, 128 * world.size - 1, {}) for recipe in ("blockwise", "mxfp8", "nvfp4", "guarded")),
        *((recipe, hidden, {}) for recipe in ("tensorwise", "rowwise") for hidden in (1, 333)),
        *((recipe, 128 * world.size, {"reshard_after_forward": False}) for recipe in ("delayed", "rowwise", "mxfp8")),
        ("mxfp8", 128 * world.size - 1, {"reshard_after_forward": False}),
        *((recipe, 333, {"offload_policy": fsdp.CPUOffloadPolicy(False)}) for recipe in ("tensorwise", "rowwise")),
    ]
    for recipe, hidden, settings in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the narrow layer's blocks are cut in some cases
            model = agree(world, recipe, hidden, mesh=mesh, **settings)
        assert isinstance(model[0].weight.to_local(), ShardedWeight), recipe
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for recipe in ("tensorwise", "rowwise", "mxfp8", "delayed", "nvfp4"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            agree(world, recipe, 128 * world.size, torch.float32, mesh=mesh, mp_policy=policy)


class Checkpointed(nn.Module):
    """Recomputes what is inside."""

    def __init__(self, inside: nn.Module, way: str) -> None:
        super().__init__()
        self.inside, self.way = inside, way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "offloaded":
            with torch.autograd.graph.save_on_cpu():
                return self.inside(x)
        return checkpoint(self.inside, x, use_reentrant=self.way == "reentrant")


def _recomputed(recipe: str, way: Callable[..., Any], kind: str, outside: bool, **settings: Any) -> nn.Module:
    model = network(recipe, 256)
    blocks = []
    for block in (nn.Sequential(model[0], model[1]), nn.Sequential(model[2])):
        if outside:  # the checkpoint is around what is sharded
            way(block, **settings)
            blocks.append(Checkpointed(block, kind))
        else:
            blocks.append(Checkpointed(block, kind))
            way(blocks[-1], **settings)
    model = nn.Sequential(*blocks)
    way(model, **settings)
    return model


def recomputed_forwards(world: World) -> None:
    """Activation checkpointing in and around a block, reentrant or not, and activations that wait on the CPU."""
    mesh = init_device_mesh("cpu", (world.size,))

    def run(world: World, model: nn.Module) -> list[Tensor]:
        for step in range(2):
            x = torch.randn(64, 128, generator=torch.Generator().manual_seed(step + 7 * world.rank)).bfloat16()
            loss = model(x.requires_grad_()).float().square().mean()
            loss.backward()
            with torch.no_grad():
                model(x)  # an evaluation between steps
        return [loss.detach(), x.grad, *(p.grad.to_local() for p in model.parameters())]

    for recipe in ("tensorwise", "rowwise", "mxfp8"):
        for kind, outside in itertools.product(("reentrant", "not reentrant", "offloaded"), (False, True)):
            if recipe == "tensorwise" and outside:
                continue
            models = [_recomputed(recipe, way, kind, outside, mesh=mesh) for way in (fsdp.fully_shard, fully_shard)]
            same(world, *models, case=(recipe, kind, outside), run=run)


def accumulated_and_kept(world: World) -> None:
    """Micro-batches whose weights stay gathered after a backward, gradients that wait, and gathers by hand."""
    mesh = init_device_mesh("cpu", (world.size,))

    def run(world: World, model: Any) -> list[Tensor]:
        made = []
        for step in range(4):
            last = step % 2 == 1
            model.set_reshard_after_backward(last)
            model.set_requires_gradient_sync(last)
            if step == 2:
                model.set_reshard_after_forward(False)
                model[0].unshard()
            x = torch.randn(64, 128, generator=torch.Generator().manual_seed(step + 7 * world.rank)).bfloat16()
            loss = model(x.requires_grad_()).float().square().mean()
            loss.backward()
            made += [loss.detach(), x.grad]
        return [*made, *(p.grad.to_local() for p in model.parameters())]

    for recipe in ("rowwise", "mxfp8", "delayed"):
        models = [shard(way, network(recipe, 256), mesh=mesh) for way in (fsdp.fully_shard, fully_shard)]
        same(world, *models, case=recipe, run=run)
    model = shard(fully_shard, network("rowwise", 256), mesh=mesh)
    model[2].unshard()
    model.set_reshard_after_forward(False)  # too late for that gather
    y = model(torch.ones(64, 128).bfloat16().requires_grad_())
    with pytest.raises(RuntimeError, match="has gathered codes for the forward alone, and this backward runs on them"):
        y.sum().backward()


def replicas_of_shards(world: World) -> None:
    """HSDP: the ranks that share a weight's amax are those of its shards, not those of its replicas."""
    mesh = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("replicas", "shards"))
    for recipe in ("tensorwise", "rowwise"):
        agree(world, recipe, 333, mesh=mesh)


def others_are_gathered_in_bf16_and_named(world: World) -> None:
    """What cannot be gathered as codes is said, with the reason, and has torch's bits."""
    mesh = init_device_mesh("cpu", (world.size,))
    half = ottava.get_recipe("rowwise").override("*", dgrad=None)
    random = ottava.get_recipe("rowwise")
    random = random.override("*", cells={"fprop.rhs": replace(random.fprop.rhs, rounding="stochastic")})
    for recipe, hidden, again, said in (
        ("mxfp8", 48 * world.size, None, "cut blocks of 32"),
        ("blockwise", 160, None, "cut blocks of 128"),
        ("bf16", 512, None, "leaves the weight in high precision"),
        (half, 512, None, "leaves W.T in high precision"),
        (random, 512, None, "random bits of its own"),
        ("ms_eden", 512, None, "each rank would transform rows of its own"),
        ("tensorwise", 512, world.size + 1, "reshards to"),
    ):
        settings = {} if again is None else {"reshard_after_forward": again}
        with warnings.catch_warnings(record=True) as caught, nullcontext() if again is None else suppress(ValueError):
            warnings.simplefilter("always")  # torch wants a factor of the ranks, and there is none between
            model = shard(fully_shard, network(recipe, hidden), mesh=mesh, **settings)
        assert any(said in str(warning.message) for warning in caught), (recipe, [str(w.message) for w in caught])
        if again is None and recipe is not random:
            witness = shard(fsdp.fully_shard, network(recipe, hidden), mesh=mesh)
            same(world, model, witness, case=str(recipe))
    tied = network("tensorwise", 128)
    tied[2].weight = tied[0].weight
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard(tied, mesh=mesh)
    assert any("another module holds its weight" in str(warning.message) for warning in caught)
    assert tied[0].weight is tied[2].weight


def bytes_on_the_wire(world: World) -> None:
    """A pass gathers codes: at most 0.52 of BF16's bytes; one small all-reduce a step for the amaxes of all weights."""
    mesh = init_device_mesh("cpu", (world.size,))
    width, wide = 128 * world.size, 256 * world.size

    def gathered(way: Callable[..., Any], recipe: str, **settings: Any) -> Counted:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, wide, bias=False), nn.Linear(wide, width, bias=False))).bfloat16()
        ottava.convert(model, recipe)
        for module in (*model, model):
            way(module, mesh=mesh, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(2):  # the first makes what is made once
            with Counted() as sent:
                x = torch.randn(64, width, generator=torch.Generator().manual_seed(step)).bfloat16()
                model(x).float().square().mean().backward()
                optimizer.step()
        return sent

    numbers = 2 * width * wide // world.size  # of a rank's shards
    assert gathered(fsdp.fully_shard, "rowwise").bytes["gather"] == 2 * 2 * numbers
    for recipe, share, amaxes in (
        ("tensorwise", 0.5, 2),
        ("delayed", 0.5, None),
        ("blockwise", 0.5 + 2 / 128**2, 0),
        ("rowwise", 0.52, width + wide),
        ("rowwise_with_gw_hp", 0.52, 2),
        ("mxfp8", 0.5 + 1 / 64, 0),
        ("nvfp4", 0.52, 2),
    ):
        sent = gathered(fully_shard, recipe)
        assert sent.bytes["gather"] <= share * 4 * numbers, (recipe, sent.bytes, numbers)
        assert sent.calls["gather"] == 4, recipe  # a forward and a backward of each layer
        if amaxes is not None:  # the histories of delayed scaling have an all-reduce of their own
            assert sent.bytes.get("agree", 0) == 4 * amaxes, (recipe, sent.bytes)
            assert sent.calls.get("agree", 0) == (amaxes > 0), recipe  # after the step; none in front of a gather
    both = gathered(fully_shard, "rowwise", reshard_after_forward=False)
    assert numbers * 2 <= both.bytes["gather"] <= numbers * 2 * 1.02  # one gather for both passes: the bytes of BF16's


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes that this rank puts into collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            words = {"gather": "gather", "allreduce": "agree", "alltoall": "exchange", "reduce_scatter": "scatter"}
            kind = next((kind for word, kind in words.items() if word in name), "other")
            tensors = args[kind in ("gather", "exchange", "scatter")]
            tensors = tensors if isinstance(tensors, list | tuple) else [tensors]
            self.bytes[kind] = self.bytes.get(kind, 0) + sum(t.nbytes for t in tensors)
            self.calls[kind] = self.calls.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


def checkpoints_hold_plain_numbers(world: World) -> None:
    """DCP of shards, and the full state dict: read by a process alone, and back."""
    mesh = init_device_mesh("cpu", (world.size,))
    model = shard(fully_shard, network("tensorwise"), mesh=mesh)
    losses(world, model)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{world.folder}/fsdp")
    alone = network("bf16")
    read = {"model": alone.state_dict()}
    dcp.load(read, checkpoint_id=f"{world.folder}/fsdp", no_dist=True)
    for name, tensor in read["model"].items():
        assert type(tensor) is Tensor, name
        if world.rank == 0:
            assert torch.equal(tensor, whole[name]), name
    other = shard(fully_shard, network("tensorwise"), mesh=mesh)
    set_model_state_dict(other, get_model_state_dict(model))
    state = {"model": get_model_state_dict(shard(fully_shard, network("tensorwise"), mesh=mesh))}
    dcp.load(state, checkpoint_id=f"{world.folder}/fsdp")
    x = torch.ones(4, 128).bfloat16()
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
    for name, tensor in get_model_state_dict(model).items():
        mine, loaded = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, state["model"][name]))
        assert torch.equal(_plain(mine), _plain(loaded)), name
    dist.barrier()


def _plain(x: Tensor) -> Tensor:
    return x.numbers if isinstance(x, ShardedWeight) else x


def made_on_meta(world: World) -> None:
    """Sharded without memory, then materialized and filled."""
    mesh = init_device_mesh("cpu", (world.size,))
    with torch.device("meta"):
        model = network("tensorwise")
    shard(fully_shard, model, mesh=mesh)
    model.to_empty(device="cpu")
    filled = network("tensorwise").state_dict()
    set_model_state_dict(model, filled, options=StateDictOptions(full_state_dict=True))
    witness = shard(fully_shard, network("tensorwise"), mesh=mesh)
    assert all(map(torch.equal, losses(world, model), losses(world, witness)))
