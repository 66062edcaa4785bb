"""FSDP2 gathers FP8 codes of a weight that is sharded in BF16 or FP32: `fully_shard`.

Each rank casts its shard with the scale of the whole weight and sends codes, a byte a number. What the layer gets is a
weight stored as codes (`quantized_weight.QuantizedWeight`), whose bits are those of a cast after a gather in BF16.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ottava.agreement import AgreedCast
from ottava.casts import quantize
from ottava.nn.part import Part
from ottava.quantized_layer import QuantizedLayer, quantized_layers
from ottava.quantized_tensor import QuantizationSpec
from ottava.quantized_weight import QuantizedWeight, is_quantized_weight, stored_spec
from ottava.scaling import PER_TENSOR, amax


class ShardedWeight(Tensor):
    """A weight, or this rank's rows of one, in high precision, that FSDP2 gathers as codes.

    Args:
        values: (N, K) or rows of it; its memory is shared.
        spec: how it is cast in front of a gather.

    Every operation runs on the values. Those that FSDP2 shards and moves with give another ShardedWeight.
    """

    numbers: Tensor
    spec: QuantizationSpec
    largest: Tensor | None
    """fp32 (1, 1): the amax of the whole weight, if all ranks have agreed on it since the last change."""

    @staticmethod
    def __new__(cls: type[ShardedWeight], values: Tensor, spec: QuantizationSpec) -> ShardedWeight:
        weight: ShardedWeight = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
            requires_grad=values.requires_grad,
        )
        weight.numbers, weight.spec, weight.largest = values, spec, None
        return weight

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch means it

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch hands the operation first
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weights = list(_weights((args, kwargs or {})))
        made = func(*_unwrapped(args), **_unwrapped(kwargs or {}))
        if func._schema.is_mutable:
            for weight in weights:
                weight.largest = None
            if isinstance(args[0], ShardedWeight):
                return args[0]
        if str(func) not in _KEPT:
            return made
        wrapped = [cls(one, weights[0].spec) for one in (made if isinstance(made, list | tuple) else (made,))]
        return wrapped if isinstance(made, list | tuple) else wrapped[0]

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The codes of this shard, as bytes, filled up to the size that all ranks send; the scale is known to all."""
        dtype = mp_policy.param_dtype or self.dtype
        values = self.numbers.to(dtype)
        if self.largest is None:
            cast = AgreedCast(mesh.get_group(), 0)(values, self.spec, None).row
        else:
            largest = self.largest.to(dtype).to(torch.float32)  # rounding keeps the order: that of the rounded values
            cast = quantize(values, self.spec, scale=self.spec.scale_of(largest).scale)
        assert cast is not None
        codes, rows = cast.data.view(torch.uint8), -(-outer_size[0] // mesh.size())
        if codes.shape[0] < rows:
            codes = nn.functional.pad(codes, (0, 0, 0, rows - codes.shape[0]))
        whole = self.spec.granularity == PER_TENSOR or mesh.size() == 1  # on one rank torch gathers one tensor alone
        sent = (codes,) if whole else (codes, cast.scale_inv.contiguous())
        return sent, (cast.scale_inv if whole else None, tuple(outer_size))

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The whole weight, stored as the codes that were gathered."""
        data, *scales = all_gather_outputs
        scale_inv, (rows, _) = metadata
        if out is not None:
            weight: Any = out.to_local() if isinstance(out, DTensor) else out
            if scale_inv is not None:
                weight.scale_inv.data.copy_(scale_inv)  # saved for backward, and the same numbers there
            return None
        codes = data.view(self.spec.format.storage_dtype)[:rows]
        weight = QuantizedWeight(codes, scales[0] if scales else scale_inv, self.spec, param_dtype)
        return weight, tuple(all_gather_outputs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers"], self.spec

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], spec: Any, size: Any, stride: Any) -> ShardedWeight:
        return ShardedWeight(inner["numbers"], spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.numbers.detach().__reduce_ex__(protocol)  # a checkpoint holds plain numbers

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedWeight({tuple(self.shape)}, {self.dtype}, gathered as {self.spec})"


_KEPT = MappingProxyType(
    dict.fromkeys(
        f"aten.{name}"
        for name in (
            *("detach.default", "alias.default", "view.default", "as_strided.default", "slice.Tensor", "split.Tensor"),
            *("clone.default", "_to_copy.default", "_pin_memory.default", "empty_like.default", "new_zeros.default"),
        )
    )
)


def fully_shard(module: nn.Module, **settings: Any) -> Any:
    """torch.distributed.fsdp.fully_shard; weights of ottava's layers inside are gathered as FP8 codes.

    Args:
        module: converted; call it for blocks first and for the model last, as torch's.
        settings: torch's: mesh, reshard_after_forward, mp_policy, offload_policy, ...
    Returns:
        The module, as torch's.
    Warns: with the layers that FSDP2 gathers in high precision, and why: scales of W and W.T that differ (rows, MX
        blocks), blocks that a shard would cut.
    Edge cases: a weight is cast with the scale of its own amax, under delayed scaling as well. The layer refuses an
        autocast to a recipe with another weight cell; autocast(enabled=False) computes with the gathered codes.
        Weights that are stored as codes already are gathered as they are. Gradients travel in high precision.

    Example:
        >>> import ottava
        >>> from ottava.distributed.sharded_weight import refuse_gather
        >>> layer = ottava.nn.Linear(64, 64, recipe="tensorwise"), ottava.nn.Linear(64, 64, recipe="rowwise")
        >>> [refuse_gather(one, 2) for one in layer]
        ['', 'E4M3[row, pow2]: scales of W are not those of W.T, so codes of one do not make the other']
    """
    mesh = settings.get("mesh")
    ranks = mesh.size(mesh.ndim - 1) if mesh is not None else dist.get_world_size()
    reasons: dict[str, str] = {}
    for layer in quantized_layers(module):
        if isinstance(layer.parameter, DTensor | ShardedWeight) or is_quantized_weight(layer.parameter):
            continue  # sharded by an earlier call, or stored as codes
        if reason := refuse_gather(layer, ranks):
            reasons[layer.name] = reason
        else:
            spec = layer.resolved.fprop.rhs
            assert spec is not None
            weight = ShardedWeight(layer.weight.detach(), stored_spec(spec))
            layer._parameters["weight"] = nn.Parameter(weight, layer.weight.requires_grad)
    if reasons:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
        warnings.warn(f"fully_shard: these weights are gathered in high precision:{lines}", stacklevel=2)
    sharded = fsdp.fully_shard(module, **settings)
    _agree_after_steps(module)
    return sharded


def refuse_gather(layer: QuantizedLayer, ranks: int) -> str:
    """Why a layer's weight is not gathered as codes from that many ranks; "" if it is."""
    row, col = layer.resolved.cells("weight")
    if row is None:
        return "the recipe leaves the weight in high precision"
    if isinstance(layer, Part):
        return "its weight is a piece of a parameter that another module holds"
    if not row.granularity.transposes or (col is not None and stored_spec(col) != stored_spec(row)):
        return f"{row}: scales of W are not those of W.T, so codes of one do not make the other"
    if row.scale_format == "e4m3" or (row.granularity.rows and layer.weight.shape[0] % (row.granularity.rows * ranks)):
        return f"{row}: {layer.weight.shape[0]} rows on {ranks} ranks would cut blocks of {row.granularity.rows}"
    return ""


def _agree_after_steps(module: nn.Module) -> None:
    """After each step of an optimizer that holds these weights, one all-reduce tells the amaxes of all of them."""
    known = weakref.ref(module)
    for inner in module.modules():  # one all-reduce for a model, not one for each of its blocks
        if (handle := vars(inner).pop("_agreeing", None)) is not None:
            handle.remove()

    def after(optimizer: Optimizer, *_: Any) -> None:
        model = known()
        if model is not None:
            _agree(model, {id(p) for group in optimizer.param_groups for p in group["params"]})

    handle = vars(module)["_agreeing"] = register_optimizer_step_post_hook(after)
    weakref.finalize(module, handle.remove)


@torch.no_grad()
def _agree(model: nn.Module, stepped: set[int]) -> None:
    groups: dict[Any, list[ShardedWeight]] = {}
    for parameter in model.parameters():
        if id(parameter) in stepped and isinstance(parameter, DTensor):
            # `to_local` may make another object: an optimizer that writes to it leaves an old amax here
            weight = parameter._local_tensor
            if isinstance(weight, ShardedWeight) and weight.spec.granularity == PER_TENSOR:
                # the other dimension of an HSDP mesh holds replicas
                dim = next(i for i, place in enumerate(parameter.placements) if place.is_shard())
                groups.setdefault(parameter.device_mesh.get_group(dim), []).append(weight)
    for group, weights in groups.items():
        every = torch.cat([amax(weight.numbers) for weight in weights])
        every = torch.where(every.isnan(), torch.inf, every)
        dist.all_reduce(every, dist.ReduceOp.MAX, group=group)
        for weight, largest in zip(weights, every, strict=True):
            weight.largest = largest.reshape(1, 1)


def _weights(given: Any) -> Iterator[ShardedWeight]:
    if isinstance(given, ShardedWeight):
        yield given
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _weights(one)
    elif isinstance(given, dict):
        yield from _weights(list(given.values()))


def _unwrapped(given: Any) -> Any:
    if isinstance(given, ShardedWeight):
        return given.numbers
    if isinstance(given, list | tuple):
        return type(given)(_unwrapped(one) for one in given)
    return {key: _unwrapped(one) for key, one in given.items()} if isinstance(given, dict) else given
