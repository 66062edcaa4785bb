"""FSDP2 that gathers FP8 codes; run in several processes by test_sharded_weight.

The witness is torch's own fully_shard around the same converted model, which gathers in high precision: the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from state_scenarios import World
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import ottava
from ottava.distributed import fully_shard
from ottava.distributed.sharded_weight import ShardedWeight

SHARED = ("tensorwise", "tensorwise_e4m3", "blockwise", "blockwise_fp32")
"""Recipes whose W and W.T have the same scales, so that codes of W serve both."""


def network(recipe: str, hidden: int = 512, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, hidden), nn.GELU(), nn.Linear(hidden, 128)).to(dtype)
    ottava.convert(model, recipe)
    return model


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


def same_bits_as_a_gather_in_bf16(world: World) -> None:
    """Even and uneven shards, both ways of resharding, mixed precision, offload, gradients accumulated."""
    mesh = init_device_mesh("cpu", (world.size,))
    offload = {"offload_policy": fsdp.CPUOffloadPolicy(False)}
    cases: list[tuple[str, int, dict[str, Any]]] = [
        *((recipe, 384 * world.size, {}) for recipe in SHARED),
        ("tensorwise", 333, {}),
        ("tensorwise", 1 + 32 * world.size, {"reshard_after_forward": False}),
        ("blockwise", 384 * world.size, offload),
        ("tensorwise", 333, offload),
    ]
    for recipe, hidden, settings in cases:
        ways = fsdp.fully_shard, fully_shard
        models = [shard(way, network(recipe, hidden), mesh=mesh, **settings) for way in ways]
        assert isinstance(models[1][0].weight.to_local(), ShardedWeight)
        for one, other in zip(*(losses(world, model) for model in models), strict=True):
            assert torch.equal(one, other), (recipe, hidden, settings)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [
        shard(way, network("tensorwise", dtype=torch.float32), mesh=mesh, mp_policy=policy)
        for way in (fsdp.fully_shard, fully_shard)
    ]
    for one, other in zip(*(losses(world, model) for model in models), strict=True):
        assert torch.equal(one, other)


def replicas_of_shards(world: World) -> None:
    """HSDP: the ranks that share a weight's amax are those of its shards, not those of its replicas."""
    mesh = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("replicas", "shards"))
    models = [shard(way, network("tensorwise", 333), mesh=mesh) for way in (fsdp.fully_shard, fully_shard)]
    for one, other in zip(*(losses(world, model) for model in models), strict=True):
        assert torch.equal(one, other)


def other_recipes_are_gathered_in_bf16_and_named(world: World) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    for recipe, hidden, said in (
        ("rowwise", 512, "not those of W.T"),
        ("mxfp8", 512, "not those of W.T"),
        ("blockwise", 160, "cut blocks of 128"),
        ("bf16", 512, "leaves the weight in high precision"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = shard(fully_shard, network(recipe, hidden), mesh=mesh)
        assert any(said in str(warning.message) for warning in caught), (recipe, [str(w.message) for w in caught])
        witness = shard(fsdp.fully_shard, network(recipe, hidden), mesh=mesh)
        assert all(map(torch.equal, losses(world, model), losses(world, witness))), recipe


def delayed_scaling_gathers_with_current_scales(world: World) -> None:
    """Inputs and gradients keep their histories; a weight is cast with its own amax."""
    mesh = init_device_mesh("cpu", (world.size,))
    model = shard(fully_shard, network("delayed"), mesh=mesh)
    first, *_, last = losses(world, model, steps=6)
    assert last < first
    assert model[0].quantizers.input.amax_history.count_nonzero() == 6


def bytes_on_the_wire(world: World) -> None:
    """All-gathers of a step: codes, at most 0.52 of BF16's bytes; one small all-reduce a step for all amaxes."""
    mesh = init_device_mesh("cpu", (world.size,))
    counts: dict[str, dict[str, int]] = {}
    for name, way in (("bf16", fsdp.fully_shard), ("fp8", fully_shard)):
        model = shard(way, network("tensorwise"), mesh=mesh)
        losses(world, model, steps=1)  # what is made once
        with _Counted() as sent:
            losses(world, model, steps=1)
        counts[name] = sent.bytes
    gathered = [counts[name]["gather"] for name in ("bf16", "fp8")]
    biases = 2 * 2 * (512 + 128) // world.size  # gathered in BF16, forward and backward
    assert gathered[1] - biases <= 0.52 * (gathered[0] - biases), counts
    assert counts["fp8"].get("agree", 0) <= 2 * 4, counts  # after the step; none in front of the four gathers


class _Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes that this rank puts into collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            kind = "gather" if "gather" in name else "agree" if "allreduce" in name else "other"
            tensors = args[1] if kind == "gather" else args[0]
            tensors = tensors if isinstance(tensors, list | tuple) else [tensors]
            if kind != "agree" or all(t.numel() <= 8 and t.dtype == torch.float32 for t in tensors):
                self.bytes[kind] = self.bytes.get(kind, 0) + sum(t.nbytes for t in tensors)
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
