"""FP8 weights in several processes: DDP, FSDP2, its CPU offload and its checkpoints; run by test_weight_ranks.

The witness is one process that runs both batches and averages the gradients: outputs and codes have to be its bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from state_scenarios import World
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ottava
from ottava.weights.parameter import is_quantized_weight

SIZE, STEPS = 2, 3
RECIPES = ("tensorwise", "blockwise", "mxfp8")


def network(recipe: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Linear(128, 256, dtype=torch.bfloat16), nn.ReLU(), nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    model = nn.Sequential(*layers)
    ottava.convert(model, recipe, weights="fp8")
    return model


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(32, 128, generator=generator, dtype=torch.bfloat16)


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "device_mesh") else tensor


@torch.no_grad()
def sgd(model: nn.Module, masters: dict[str, Tensor]) -> None:
    """With a master copy in fp32 of each weight, as an optimizer keeps it."""
    for name, parameter in model.named_parameters():
        own, gradient = local(parameter), local(parameter.grad)
        stored = is_quantized_weight(own)
        master = masters.setdefault(name, own.dequantize(torch.float32) if stored else own.float())
        master -= 0.5 * gradient.float()
        own.requantize_(master) if stored else own.copy_(master)
        parameter.grad = None


def trained(model: nn.Module, wrapped: nn.Module) -> Iterator[Tensor]:
    """The output of each step on this rank's batches."""
    masters: dict[str, Tensor] = {}
    for step in range(STEPS):
        y = wrapped(batch(dist.get_rank(), step))
        y.float().square().mean().backward()
        sgd(model, masters)
        yield y.detach()


def witness(recipe: str) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """One process: the outputs for the batches of both ranks, before each step."""
    model, masters = network(recipe), dict[str, Tensor]()
    for step in range(STEPS):
        outputs, sums = [], [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(SIZE):
            y = model(batch(rank, step))
            y.float().square().mean().backward()
            outputs.append(y.detach())
            for total, parameter in zip(sums, model.parameters(), strict=True):
                total += parameter.grad / SIZE
                parameter.grad = None
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total
        sgd(model, masters)
        yield model, outputs


def agrees(recipe: str, model: nn.Module, wrapped: nn.Module) -> None:
    """The bits of one process, in every step."""
    alone = model
    for (one, outputs), y in zip(witness(recipe), trained(model, wrapped), strict=True):
        assert torch.equal(y, outputs[dist.get_rank()]), recipe
        alone = one
    whole = full(model)
    assert all(torch.equal(as_bytes(whole[key]), as_bytes(tensor)) for key, tensor in alone.state_dict().items())


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def full(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, gathered; gloo knows no float8."""
    gathered = {}
    for key, tensor in model.state_dict().items():
        if hasattr(tensor, "device_mesh"):
            own = tensor.to_local()
            if tensor.placements[0].is_shard():
                parts = [torch.empty_like(as_bytes(own)) for _ in range(SIZE)]
                dist.all_gather(parts, as_bytes(own))
                own = torch.cat(parts).view(own.dtype)
            tensor = own
        gathered[key] = tensor
    return gathered


def ddp(world: World) -> None:
    """Ranks that were made with other numbers get the codes of the first, bit for bit."""
    for recipe in RECIPES[:2]:
        model = network(recipe, seed=dist.get_rank())
        agrees(recipe, model, DistributedDataParallel(model))


def shard(recipe: str, **options: Any) -> nn.Sequential:
    model = network(recipe)
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp2(world: World) -> None:
    """Codes are sharded and gathered as they are; the shards of a weight with one scale agree on it at each step."""
    for recipe in RECIPES:
        model = shard(recipe)
        agrees(recipe, model, model)
        assert {type(local(layer.weight)).__name__ for layer in (model[0], model[2])} == {"QuantizedWeight"}
        ottava.assert_fp8(model, 1.0)
        assert "weight is stored as" in str(ottava.receipt(model))


def fsdp2_offloads_half_the_bytes(world: World) -> None:
    """Under CPUOffloadPolicy shards lie in the CPU's memory as codes: half of what BF16 would move in each gather."""
    model = shard("tensorwise", offload_policy=CPUOffloadPolicy(pin_memory=False))
    agrees("tensorwise", model, model)
    shards = [local(layer.weight) for layer in (model[0], model[2])]
    moved = sum(one.to(torch.device("cpu"), copy=True).nbytes for one in shards)
    assert moved == sum(one.numel() + 4 for one in shards)
    assert moved < 0.501 * sum(one.numel() * one.element_size() for one in shards)


def sharded_state_dicts(world: World) -> None:
    """DTensors of codes and of scales; loaded again, and through torch's own functions for checkpoints."""
    for recipe in ("tensorwise", "blockwise"):
        model, other = shard(recipe), shard(recipe)
        for _ in trained(model, model):
            pass
        state = get_model_state_dict(model)
        assert set(state) == {"0.weight", "0.weight_scale_inv", "0.bias", "2.weight", "2.weight_scale_inv"}
        other.load_state_dict(model.state_dict())
        x = batch(0, 9)
        wanted = model(x)
        assert torch.equal(other(x), wanted)
        third = shard(recipe)
        set_model_state_dict(third, state, options=StateDictOptions(strict=True))
        assert torch.equal(third(x), wanted)


def full_state_dicts(world: World) -> None:
    """Gathered by torch's own functions: plain codes, which one process loads; and from a file, sharded again."""
    for recipe in ("tensorwise", "blockwise"):
        model = shard(recipe)
        for _ in trained(model, model):
            pass
        wanted = full(model)
        for cpu_offload in (False, True):
            options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
            state = get_model_state_dict(model, options=options)
            assert len(state) == (0 if cpu_offload and world.rank else len(wanted))
            for key, tensor in state.items():
                assert type(tensor) is Tensor
                assert tensor.dtype == wanted[key].dtype
                assert torch.equal(as_bytes(tensor), as_bytes(wanted[key])), key
        every = {key: t.full_tensor() if hasattr(t, "full_tensor") else t for key, t in model.state_dict().items()}
        other, third = network(recipe, seed=1), shard(recipe)
        other.load_state_dict(every)
        dcp.save(model.state_dict(), checkpoint_id=f"{world.folder}/full-{recipe}")
        loaded = third.state_dict()
        dcp.load(loaded, checkpoint_id=f"{world.folder}/full-{recipe}")
        third.load_state_dict(loaded)
        for one in (other, third):
            assert all(torch.equal(as_bytes(t), as_bytes(wanted[key])) for key, t in full(one).items()), recipe


def what_cannot_be_sharded(world: World) -> None:
    """FSDP1's flat tensors, and blocks that a shard would cut."""
    raised = ""
    try:
        FullyShardedDataParallel(network("tensorwise"), device_id=torch.device("cpu"))
    except NotImplementedError as error:
        raised = str(error)
    assert "fully_shard, which gathers codes" in raised
    model = nn.Sequential(nn.Linear(64, 192, dtype=torch.bfloat16))
    ottava.convert(model, "blockwise", weights="fp8")
    raised = ""
    try:
        fully_shard(model)
    except NotImplementedError as error:
        raised = str(error)
    assert "by whole blocks of 128 rows; got 0:96" in raised
