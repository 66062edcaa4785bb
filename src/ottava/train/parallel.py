"""Splits the model of a run over its processes: stages, heads, sequences, FSDP2 or DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ottava.distributed import ColwiseParallel, ContextParallel, ExpertParallel, RowwiseParallel, fully_shard
from ottava.nn import MoE
from ottava.train.config import ModelConfig, ParallelConfig
from ottava.train.model import ByteTransformer
from ottava.train.ranks import Ranks

Orders = Mapping[str, Tensor]
"""Name of a fused weight -> the order in which tensor-parallel processes hold the rows of the whole weight."""


def parts_of(config: ParallelConfig, layers: int, place: int) -> list[tuple[int, range]]:
    """The number and the layers of each stage that the process at `place` of the pipeline runs.

    Example:
        >>> parts_of(ParallelConfig(pp=2, schedule="interleaved"), 6, 1)
        [(1, range(2, 4)), (3, range(5, 6))]
    """
    size, more = divmod(layers, config.stages)
    starts = [stage * size + min(stage, more) for stage in range(config.stages + 1)]
    return [(stage, range(*starts[stage : stage + 2])) for stage in range(place, config.stages, config.pp)]


def split(model: ByteTransformer, sizes: ModelConfig, ranks: Ranks) -> tuple[nn.Module, Orders]:
    """Reduces the model, in place, to the part that this process holds.

    Returns:
        The module to call (the model, or a wrapper around it), and the orders of fused weights.
    """
    config, mesh, orders = ranks.config, ranks.mesh, {}
    if mesh is None:
        return model, {}
    if config.pp > 1:
        model.keep([part for _, part in parts_of(config, sizes.layers, ranks.place("pp"))])
    if config.tp > 1:
        orders = _split_layers(model, sizes, mesh["tp"])
    if ranks.context is not None:
        model.first = ranks.part_of_sequences * (len(model.cos) // config.cp)
        parallelize_module(model, ranks.context, {"": ContextParallel(gather_keys=True)})
    if ranks.experts is not None:
        parallelize_module(model, ranks.experts, dict.fromkeys(_layers_of_experts(model), ExpertParallel()))
    if config.shard > 1:
        data_mesh = mesh["replicas", "shard"] if config.replicas > 1 else mesh["shard"]
        for module in (*model.layers, model):
            fully_shard(module, mesh=data_mesh)
    elif ranks.size == config.replicas and ranks.experts is None:  # DistributedDataParallel refuses split weights
        index = ranks.device.index if ranks.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=None if index is None else [index]), orders
    return model, orders


def _split_layers(model: ByteTransformer, sizes: ModelConfig, mesh: DeviceMesh) -> dict[str, Tensor]:
    tokens, orders = Shard(1), {}
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "norm": _NormOfTokens(),
        "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=Replicate()),
    }
    width = sizes.d_model // sizes.heads
    fused = {
        "attention.qkv_proj": [sizes.heads * width, sizes.kv_heads * width, sizes.kv_heads * width],
        "mlp.gate_up_proj": [sizes.ffn, sizes.ffn],
    }
    layers: Any = model.layers.named_children()
    for name, layer in layers:
        layer.attention.sizes = tuple(size // mesh.size() for size in layer.attention.sizes)
        for inner, rows in fused.items():
            weight = layer.get_submodule(inner).weight
            order = orders[f"layers.{name}.{inner}.weight"] = _shared_out(rows, mesh.size()).to(weight.device)
            weight.data = weight.data[order]
            plan[f"layers.{name}.{inner}"] = ColwiseParallel(input_layouts=tokens)
        for inner in ("attention.o_proj", "mlp.down_proj"):
            plan[f"layers.{name}.{inner}"] = RowwiseParallel(output_layouts=tokens)
    model.token_ranks = mesh.size()
    present = {name for name, _ in model.named_modules()}
    parallelize_module(model, mesh, {name: style for name, style in plan.items() if name in present})
    return orders


def _layers_of_experts(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, MoE)]


def _shared_out(sizes: list[int], ranks: int) -> Tensor:
    """An order of the rows of fused matrices: process 0's share of each matrix, then process 1's, and so on.

    Example:
        >>> _shared_out([4, 2], 2).tolist()
        [0, 1, 4, 2, 3, 5]
    """
    parts = torch.arange(sum(sizes)).split(sizes)
    return torch.cat([part.chunk(ranks)[rank] for rank in range(ranks) for part in parts])


class _NormOfTokens(ParallelStyle):
    """A norm with its input split by tokens: each process sums the weight's gradient over its own tokens only."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        norm: Any = module
        norm.weight = nn.Parameter(distribute_tensor(norm.weight, device_mesh, [Replicate()]))
        norm.producer_parameters = lambda: (norm.weight.to_local(grad_placements=[Partial()]),)
        return module
