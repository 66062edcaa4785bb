"""Whether all ranks hold the same model: weights, scales, recipes, versions, by hash."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ottava.base import __version__
from ottava.base.errors import need
from ottava.engine.functional import quantized_layers
from ottava.engine.groups import mesh_group
from ottava.weights.parameter import is_quantized_weight


def verify(model: nn.Module, group: dist.ProcessGroup | None = None) -> str:
    """Compares a model over ranks, and names the first thing in which they differ.

    What every rank must hold alike is compared bit for bit: replicated parameters, buffers, predicted scales and their
    histories. Of a sharded parameter the whole shape, dtype and placement are compared. Recipes of all layers, what
    each layer ran last, training mode, and the versions of ottava, torch and Python are compared too.

    Args:
        group: the ranks; None: the largest mesh that parameters are sharded over, or all.
    Returns:
        The hash that all ranks have.
    Raises:
        TypeError: the model is no nn.Module.
        RuntimeError: on all ranks; it names the rank that differs from the first, the thing, and both values.
    Edge cases: without a process group the hash is returned, to compare runs. The cost is one gather of 32 bytes a
        rank and one reading of the weights; call it every few hundred steps.

    Example:
        >>> model = nn.Linear(4, 4)
        >>> verify(model) == verify(model), len(verify(model))
        (True, 64)
    """
    need("verify", model, nn.Module)
    facts = dict(_facts(model))
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    if not (dist.is_available() and dist.is_initialized()):
        return digest.hexdigest()
    group = group or mesh_group(model) or dist.group.WORLD
    device = _device(group)
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(device)
    everybody = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, own, group=group)
    if all(torch.equal(other, everybody[0]) for other in everybody):
        return digest.hexdigest()
    told: list[dict[str, str] | None] = [None] * len(everybody)
    dist.all_gather_object(told, facts, group=group)  # the ranks all know that something differs
    raise RuntimeError(_difference([one or {} for one in told], group))


def _facts(model: nn.Module) -> Iterator[tuple[str, str]]:
    yield "version of ottava", __version__
    yield "version of torch", torch.__version__
    yield "version of Python", platform.python_version()
    for name, module in model.named_modules():
        yield f"mode of {name or 'the model'}", "training" if module.training else "evaluation"
    for layer in quantized_layers(model):
        yield f"recipe of {layer.name or 'the model'}", json.dumps(layer.resolved.to_dict(), sort_keys=True)
        call = layer.last_call
        ran = {gemm: record.kernel for gemm, record in sorted(call.records.items())} if call is not None else {}
        yield f"kernels of {layer.name or 'the model'}", json.dumps(ran)
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            yield f"{kind} {name}", _said(tensor)


def _said(tensor: Tensor) -> str:
    shape = f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")
    if isinstance(tensor, DTensor):
        replicated = all(place.is_replicate() for place in tensor.placements)
        return f"{shape} {_bits(tensor.to_local()) if replicated else ' '.join(map(str, tensor.placements))}"
    if getattr(tensor, "tensor_model_parallel", False):  # a shard of TransformerEngine's modules is a plain parameter
        return f"{shape} split along dimension {tensor.partition_dim}"  # type: ignore[attr-defined]  # set with the other
    return f"{shape} {_bits(tensor)}"


def _bits(tensor: Tensor) -> str:
    if tensor.is_meta:
        return "on meta"
    if is_quantized_weight(tensor):
        return f"{tensor.spec} {_bits(tensor.codes)} {_bits(tensor.scale_inv)}"
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()[:16]


def _device(group: dist.ProcessGroup | None) -> torch.device:
    devices: list[torch.device] = getattr(group, "_device_types", None) or [torch.device("cpu")]
    return next((device for device in devices if device.type == "cpu"), devices[0])


def _difference(told: list[dict[str, str]], group: dist.ProcessGroup | None) -> str:
    first = told[0]
    for rank, other in enumerate(told):
        for name in dict.fromkeys((*first, *other)):
            one, two = first.get(name, "nothing of this name"), other.get(name, "nothing of this name")
            if one != two:
                ranks = [dist.get_global_rank(group, r) if group is not None else r for r in (0, rank)]
                return (
                    f"verify: {name} differs: rank {ranks[0]} has {one}, rank {ranks[1]} has {two}. Give all ranks one "
                    "model, one recipe and one checkpoint; a parameter that drifted apart got gradients that were not "
                    "reduced"
                )
    return "verify: the ranks differ"
