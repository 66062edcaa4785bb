"""FSDP2 that gathers FP8 codes: `fully_shard`."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from ottava.base.errors import need
from ottava.distributed.sharded_weight import Gathering, ShardedWeight, agree, refuse_cells
from ottava.engine.layer import QuantizedLayer, quantized_layers
from ottava.engine.state import after_steps
from ottava.nn.layer import LayerView
from ottava.weights.parameter import is_quantized_weight


def fully_shard(module: nn.Module | Sequence[nn.Module], **settings: Any) -> Any:
    """torch.distributed.fsdp.fully_shard; weights of ottava's layers inside are gathered as FP8 codes.

    Args:
        module: converted, or a list of such; call it for blocks first and for the model last, as torch's.
        settings: torch's: mesh, reshard_after_forward, mp_policy, offload_policy, ...
    Returns:
        The module, as torch's.
    Warns: with the layers that FSDP2 gathers in high precision, and why: blocks that a shard would cut, a weight that
        two modules share, a number as reshard_after_forward.
    Edge cases: where W and W.T have scales of their own (rows, MX blocks), a forward gathers codes of W and a backward
        those of W.T. A gather that serves both passes (reshard_after_forward=False, activation checkpointing) brings
        both: the bytes of BF16. The layer refuses an autocast to a recipe with another weight cell;
        autocast(enabled=False) computes with the gathered codes. Weights that are stored as codes already are gathered
        as they are. Gradients travel in high precision.

    Example:
        >>> import ottava
        >>> from ottava.distributed.shard import refuse_gather
        >>> layer = ottava.nn.Linear(64, 64, recipe="tensorwise"), ottava.nn.Linear(64, 64, recipe="blockwise")
        >>> [refuse_gather(one, 2) for one in layer]
        ['', 'E4M3[128x128, pow2]: 64 rows on 2 ranks would cut blocks of 128']
    """
    modules: list[Any] = list(module) if isinstance(module, list | tuple) else [module]
    for one in modules:
        need("fully_shard", one, nn.Module, "a torch.nn.Module, or a list of such")
    mesh, again = settings.get("mesh"), settings.get("reshard_after_forward")
    ranks = mesh.size(mesh.ndim - 1) if mesh is not None else dist.get_world_size()
    holders = _holders(modules)
    ignored = {id(parameter) for parameter in settings.get("ignored_params") or ()}
    reasons: dict[str, str] = {}
    for layer in [layer for one in modules for layer in quantized_layers(one)]:
        parameter: Any = layer.parameter
        if isinstance(parameter, DTensor | ShardedWeight) or is_quantized_weight(parameter) or id(parameter) in ignored:
            continue  # sharded by an earlier call, stored as codes, or not to be sharded
        reason = refuse_gather(layer, ranks)
        if not reason and holders[id(parameter)] > 1:
            reason = "another module holds its weight, too"
        if not reason and type(again) is int and again != ranks:
            reason = f"torch reshards to {again} ranks only what it gathers in high precision"
        if reason:
            reasons[layer.name] = reason
            continue
        row, col = layer.resolved.cells("weight")
        assert row is not None
        assert col is not None
        weight = ShardedWeight(layer.weight.detach(), (row, col), Gathering(weakref.ref(modules[0])))
        layer._parameters["weight"] = nn.Parameter(weight, layer.weight.requires_grad)
    if reasons:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
        warnings.warn(f"fully_shard: these weights are gathered in high precision:{lines}", stacklevel=2)
    sharded = fsdp.fully_shard(module, **settings)  # type: ignore[arg-type]  # its overloads know no union
    for one in modules:
        _agree_after_steps(one)
    return sharded


def refuse_gather(layer: QuantizedLayer, ranks: int) -> str:
    """Why a layer's weight is not gathered as codes from that many ranks; "" if it is."""
    if isinstance(layer, LayerView):
        return "its weight is a piece of a parameter that another module holds"
    return refuse_cells(layer.resolved.cells("weight"), layer.weight.shape[0], ranks)


def _holders(modules: Sequence[nn.Module]) -> dict[int, int]:
    """id of a parameter -> how many modules hold it."""
    counts: dict[int, int] = {}
    for inner in {id(inner): inner for one in modules for inner in one.modules()}.values():
        for parameter in inner._parameters.values():
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts


def _agree_after_steps(module: nn.Module) -> None:
    """After each step of an optimizer that holds these weights, one all-reduce tells the amaxes of all of them."""
    known = weakref.ref(module)
    for inner in module.modules():  # one all-reduce for a model, not one for each of its blocks
        vars(inner).pop("_agreeing", None)

    def after(optimizer: Optimizer) -> None:
        model = known()
        if model is not None:
            _agree(model, {id(p) for group in optimizer.param_groups for p in group["params"]})

    vars(module)["_agreeing"] = after  # it lives as long as the module does
    after_steps(after)


def _agree(model: nn.Module, stepped: set[int]) -> None:
    groups: dict[Any, list[ShardedWeight]] = {}
    for parameter in model.parameters():
        if id(parameter) in stepped and isinstance(parameter, DTensor):
            weight = parameter._local_tensor
            if isinstance(weight, ShardedWeight):
                # the other dimension of an HSDP mesh holds replicas
                dim = next(i for i, place in enumerate(parameter.placements) if place.is_shard())
                mesh = parameter.device_mesh
                groups.setdefault((mesh.get_group(dim), mesh.device_type), []).append(weight)
    for (group, device), weights in groups.items():
        agree(group, weights, device)
