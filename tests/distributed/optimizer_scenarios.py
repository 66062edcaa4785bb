"""Optimizers in two processes: replicas stay equal, shards are updated as the whole, states are saved and loaded.

Run by test_weight_ranks. The witness is one process with the same gradients.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from state_scenarios import World
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import ottava
from ottava.optim import SGD, AdamW, Lion

STEPS = 3
OPTIONS: tuple[dict[str, Any], ...] = (
    {"master": "fp32", "moments": "fp32"},
    {"master": "remainder", "moments": "fp8"},
    {"master": "remainder", "moments": "int8"},
)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64, bias=False)).bfloat16()


def loss(model: nn.Module, step: int) -> Tensor:
    """The same batch on every rank: a mean of equal gradients is exact."""
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(step)).bfloat16()
    y: Tensor = model(x)
    return y.float().square().mean()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def whole(parameter: Any) -> Tensor:
    full: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach()


def replicas_round_alike(world: World) -> None:
    """Stochastic rounding and FP8 moments under DDP: both ranks keep the same bits, whatever their generators."""
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(network())
    torch.manual_seed(dist.get_rank())
    trained(model, AdamW(model.parameters(), 1e-2, stochastic_rounding=True, moments="fp8"), range(STEPS))
    for parameter in model.parameters():
        other = parameter.detach().float().clone()
        dist.all_reduce(other)
        assert torch.equal(other, 2 * parameter.detach().float())


def shards_are_updated_as_the_whole(world: World) -> None:
    """FSDP2: an update is element by element; groups of 128 and 2048 elements fit into these shards."""
    for options in OPTIONS:
        alone, sharded = network(), network()
        fully_shard(sharded)
        trained(alone, AdamW(alone.parameters(), 1e-2, **options), range(STEPS))
        trained(sharded, AdamW(sharded.parameters(), 1e-2, **options), range(STEPS))
        for one, two in zip(alone.parameters(), sharded.parameters(), strict=True):
            assert torch.equal(one, whole(two)) or options["moments"] != "fp32", options
            assert torch.allclose(one.float(), whole(two).float(), rtol=2.0**-6, atol=2e-3), options


def shards_round_as_one_process(world: World) -> None:
    """Random bits by the place in the whole parameter: shards of 17 and 16 rows, a bias, and shards of columns."""
    for options in ({}, {"shard_placement_fn": lambda parameter: Shard(parameter.dim() - 1)}):
        rows = 64 if options else 33
        torch.manual_seed(0)
        alone = nn.Sequential(nn.Linear(128, rows), nn.ReLU(), nn.Linear(rows, rows)).bfloat16()
        sharded = copy.deepcopy(alone)
        fully_shard(sharded, **options)
        for model in (alone, sharded):
            trained(model, AdamW(model.parameters(), 1e-2, stochastic_rounding=True), range(STEPS))
        for one, two in zip(alone.parameters(), sharded.parameters(), strict=True):
            assert torch.equal(one, whole(two)), options


def writes_to_shards_are_followed(world: World) -> None:
    """Weights that are loaded and zeroed under FSDP2, in BF16 and FP8: the bits of one process."""
    for recipe, master in ((None, "fp32"), (None, "remainder"), ("tensorwise", "fp32")):
        ends = []
        for wrap in (False, True):
            model, other = network(), network()
            if recipe:
                ottava.convert(model, recipe, weights="fp8")
                ottava.convert(other, recipe, weights="fp8")
            if wrap:
                fully_shard(model)
                fully_shard(other)
            optimizer = AdamW(model.parameters(), 1e-2, master=master)  # type: ignore[arg-type]
            trained(model, optimizer, range(STEPS))
            model.load_state_dict(other.state_dict())
            with torch.no_grad():
                model[0].bias.zero_()
            optimizer.param_groups[0]["lr"] = 1e-5
            trained(model, optimizer, range(STEPS, STEPS + 1))
            numbers = (p.to_local() if wrap else p for p in model.parameters())
            ends.append([p.dequantize() if hasattr(p, "codes") else p.detach() for p in numbers])
        loaded = other[2].weight.to_local()
        loaded = loaded.dequantize() if recipe else loaded.detach()
        assert torch.allclose(ends[1][-1].float(), loaded.float(), rtol=2.0**-3, atol=2e-4), "not where it was before"
        for one, two in zip(*ends, strict=True):
            assert torch.equal(one.chunk(world.size)[world.rank], two), (recipe, master)


def sharded_states_are_saved_and_loaded(world: World) -> None:
    """torch.distributed.checkpoint, through torch's own functions: moments as FP32 shards of each parameter."""
    for make in (AdamW, Lion):
        for options in OPTIONS:
            first, second = network(), network()
            fully_shard(first)
            fully_shard(second)
            one, two = make(first.parameters(), 1e-2, **options), make(second.parameters(), 1e-2, **options)
            trained(first, one, range(STEPS))
            folder = f"{world.folder}/{make.__name__}-{options['moments']}"
            dcp.save(get_optimizer_state_dict(first, one), checkpoint_id=folder)
            second.load_state_dict(first.state_dict())
            state = get_optimizer_state_dict(second, two)
            dcp.load(state, checkpoint_id=folder)
            set_optimizer_state_dict(second, two, state)
            trained(first, one, range(STEPS, STEPS + 1))
            trained(second, two, range(STEPS, STEPS + 1))
            for a, b in zip(first.parameters(), second.parameters(), strict=True):
                same = torch.equal(whole(a), whole(b))
                # cast to the groups of these shards anew: a code differs, and of Lion's updates a sign
                step = 2.1e-2 if make is Lion else 5e-3
                near = torch.allclose(whole(a).float(), whole(b).float(), rtol=2.0**-7, atol=step)
                assert same if options["moments"] == "fp32" else near, options


def parts_of_a_gradient_are_summed(world: World) -> None:
    """Ranks with other tokens, as of a norm under tensor parallelism, hold parts of a replicated weight's gradient."""
    mesh = init_device_mesh("cpu", (world.size,))
    weight = nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, [Replicate()]))
    weight.grad = DTensor.from_local(torch.full((4,), 1.0 + world.rank), mesh, [Partial()])  # type: ignore[assignment]
    SGD([weight], lr=1.0).step()
    assert torch.equal(weight.to_local(), torch.full((4,), -3.0))  # type: ignore[attr-defined]


def fp8_weights_keep_one_scale(world: World) -> None:
    """The shards of an FP8 weight with one scale agree on it in each step of the optimizer."""
    model = network()
    ottava.convert(model, "tensorwise", weights="fp8", keep_high_precision=True)
    fully_shard(model)
    trained(model, AdamW(model.parameters(), 1e-2, master="remainder", moments="fp8"), range(STEPS))
    scale = model[0].weight.to_local().scale_inv.clone()
    dist.all_reduce(scale)
    assert torch.equal(scale, 2 * model[0].weight.to_local().scale_inv)
