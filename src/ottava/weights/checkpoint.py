"""State dicts of modules with weights in FP8: plain tensors, NAME and NAME_scale_inv.

Hugging Face's FP8 checkpoints have the same keys, so safetensors files hold them unchanged; scales of MX blocks are
E8M0's bytes, as there. A model with FP8 weights also loads numbers in high precision, and casts them; for a model
without codes use `dequantize_state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ottava.numerics.formats import E2M1, E4M3, E5M2
from ottava.numerics.scaling import BLOCK_16X16, BLOCK_128X128, PER_ROW, PER_TENSOR, Granularity
from ottava.numerics.tensor import QuantizationSpec
from ottava.weights.parameter import QuantizedWeight, adopt_scales, is_quantized_weight, powers_only, quantized_weight

SCALE_SUFFIX = "_scale_inv"
"""NAME_scale_inv holds the scales of NAME."""
_SIZES = (PER_TENSOR, PER_ROW, BLOCK_128X128, *(Granularity(1, size) for size in (128, 64, 32, 16, 256)), BLOCK_16X16)
"""Where two fit a grid of scales, the first is taken: they decode alike, or the tensor is smaller than a block."""
_BYTES = (torch.uint8, torch.float8_e8m0fnu)
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)


def poisoned(model: nn.Module, state: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Names of the model's parameters, and of states kept for them, whose numbers are not all finite in this process.

    Args:
        model: its buffers are not judged: a mask may hold infinities.
        state: NAME of a parameter, NAME_scale_inv or `prefix`NAME.ENTRY -> tensor, or this process's part of one.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.bias.data[0] = float("inf")
        >>> poisoned(layer, layer.state_dict())
        ['bias']
    """
    own = {name for name, _ in model.named_parameters()}
    found = []
    for name, value in state.items():
        plain = name.removesuffix(SCALE_SUFFIX)
        if isinstance(value, Tensor) and (plain in own or (prefix and name.startswith(prefix))):
            part = _local(value).detach()
            if part.is_floating_point() and not bool(part.float().isfinite().all()):
                found.append(name)
    return found


def keep_in_state_dict(module: nn.Module, name: str) -> None:
    """Makes a module save a weight in FP8 as two plain tensors, and load these or the weight in high precision."""
    names: set[str] | None = vars(module).get("stored_weights")
    if names is None:
        names = module.stored_weights = set()  # type: ignore[assignment]
        module._register_state_dict_hook(_saved)
        module._register_load_state_dict_pre_hook(_loaded, with_module=True)
    names.add(name)
    vars(module).setdefault(
        name + SCALE_SUFFIX, None
    )  # torch.distributed.checkpoint looks for an attribute of each key


def decode_codes(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Decodes codes in a state dict for a module that keeps the weight in high precision."""
    weight = module._parameters.get("weight")
    scale_inv = state.get(key := f"{prefix}weight{SCALE_SUFFIX}")
    if weight is None or scale_inv is None or is_quantized_weight(_local(weight)):
        return
    state[f"{prefix}weight"] = _decoded(state[f"{prefix}weight"], state.pop(key), weight.dtype)


def dequantize_state_dict(state: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Decodes the weights of a state dict, for a model without codes.

    Args:
        state: with NAME and NAME_scale_inv, as from models with FP8 weights and Hugging Face's FP8 checkpoints.
        dtype: of the decoded weights.
    Raises:
        ValueError: scales that fit no codes.

    Example:
        >>> import ottava
        >>> model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
        >>> report = ottava.convert(model, "tensorwise", weights="fp8")
        >>> list(model.state_dict()), list(dequantize_state_dict(model.state_dict()))
        (['0.weight', '0.bias', '0.weight_scale_inv'], ['0.weight', '0.bias'])
    """
    plain = dict(state)
    for key in state:
        name = key.removesuffix(SCALE_SUFFIX)
        if name != key and name in state and state[name].dtype in _CODES:
            plain[name] = _decoded(state[name], plain.pop(key), dtype)
    return plain


def infer_spec(codes: Tensor, scale_inv: Tensor) -> QuantizationSpec:
    """The spec of codes, from the number of scales. If several specs fit, all of them decode alike.

    Codes in uint8 are E2M1, one a byte, as recipe "nvfp4" has them.

    Raises:
        ValueError: no format has such codes, or no granularity so many scales.

    Example:
        >>> str(infer_spec(torch.zeros(256, 300, dtype=torch.float8_e4m3fn), torch.ones(2, 3)))
        'E4M3[128x128, pow2]'
    """
    formats = [E2M1] if codes.dtype == torch.uint8 else [f for f in (E4M3, E5M2) if f.dtype == codes.dtype]
    shape, grid = tuple(codes.shape), tuple(scale_inv.shape)
    if len(formats) != 1 or len(shape) not in (2, 3):
        raise ValueError(
            f"got codes {codes.dtype} {shape}; needs float8_e4m3fn, float8_e5m2 or uint8, (N, K) or (G, N, K)"
        )
    for size in _SIZES:
        if (*shape[:-2], *size.grid_shape((shape[-2], shape[-1]))) == grid:
            if scale_inv.dtype in _BYTES:
                return QuantizationSpec(formats[0], size, "e8m0")
            return QuantizationSpec(formats[0], size, "pow2" if powers_only(scale_inv) else "fp32")
    known = ", ".join(map(str, _SIZES))
    raise ValueError(f"got scales {grid} for codes {shape}; needs one for each of these: {known}")


def _decoded(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    spec = infer_spec(codes, scale_inv)
    return QuantizedWeight(codes, adopt_scales(scale_inv, spec), spec, dtype).dequantize()


def _local(value: Any) -> Any:
    return value._local_tensor if hasattr(value, "device_mesh") else value


def _saved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Splits a weight in FP8 in a state dict into two plain tensors."""
    names: set[str] = module.stored_weights  # type: ignore[assignment]
    for name in names:
        value = state.get(prefix + name)
        weight = _local(value)
        if not is_quantized_weight(weight):
            continue
        codes, scales = weight.codes, weight.scales
        if weight is not value:
            codes, scales = _sharded(value, weight)
        state[prefix + name], state[prefix + name + SCALE_SUFFIX] = codes, scales


def _sharded(value: Any, weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight sharded by FSDP2, as DTensors over the same ranks."""
    from torch.distributed.tensor import DTensor, Replicate

    grid = (*value.shape[:-2], *weight.spec.granularity.grid_shape(tuple(value.shape[-2:])))
    sizes = weight.spec.granularity.rows, weight.spec.granularity.cols
    placements = [  # a stack, and blocks along the dimension that is split, have scales of their own on each rank
        p if p.is_shard() and (len(weight.matrix) == 3 or sizes[p.dim] is not None) else Replicate()
        for p in value.placements
    ]
    split = any(place.is_shard() and value.device_mesh.size(dim) > 1 for dim, place in enumerate(value.placements))
    with torch.no_grad():
        as_bytes = split and weight.codes.is_cpu and weight.codes.dtype != torch.uint8
        own = _CodesAsBytes(weight.codes) if as_bytes else weight.codes
        codes = DTensor.from_local(own, value.device_mesh, value.placements, shape=value.shape, stride=value.stride())
        strides = torch.empty(grid, device="meta").stride()
        scales = DTensor.from_local(
            weight.scales, value.device_mesh, placements, run_check=False, shape=torch.Size(grid), stride=strides
        )
    return codes, scales


class _CodesAsBytes(Tensor):
    """A shard of codes on a CPU, whose collectives know no float8: they get its bytes, and all else the codes."""

    codes: Tensor

    @staticmethod
    def __new__(cls: type[_CodesAsBytes], codes: Tensor) -> _CodesAsBytes:
        made: _CodesAsBytes = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=codes.dtype, device=codes.device)
        made.codes = codes
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls a classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        sent = "c10d" in func.namespace
        dtype = next(one.dtype for one in tree_leaves((args, kwargs)) if isinstance(one, _CodesAsBytes))
        given = args, kwargs or {}
        args, kwargs = tree_map_only(_CodesAsBytes, lambda x: x.codes.view(torch.uint8) if sent else x.codes, given)
        made = func(*args, **kwargs)
        if sent:
            return made.view(dtype)
        return _CodesAsBytes(made) if func in _KEPT else made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.codes.__reduce_ex__(protocol)  # a checkpoint holds plain codes

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.codes.untyped_storage()  # safetensors asks for it

    def data_ptr(self) -> int:
        return self.codes.data_ptr()


_KEPT = frozenset({torch.ops.aten.detach.default, torch.ops.aten.view.default, torch.ops.aten.alias.default})
"""What comes before a collective."""


def _loaded(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *found: Any) -> None:
    """Joins codes and scales of a state dict into one weight; numbers in high precision stay: `copy_` casts them."""
    names: set[str] = module.stored_weights  # type: ignore[assignment]
    for name in names:
        key, own = prefix + name, cast(Any, module._parameters[name])
        value, scale_inv = state.get(key), state.pop(prefix + name + SCALE_SUFFIX, None)
        weight = _local(own)
        if value is None or own is None:
            continue
        try:
            if value.dtype in _CODES:
                state[key] = _joined(value, scale_inv, own, weight)
            elif metadata.get("assign_to_params_buffers") and is_quantized_weight(weight) and weight is own:
                keep = weight.high_precision is not None
                state[key] = quantized_weight(value.to(weight.dtype), weight.spec, keep_high_precision=keep)
        except (TypeError, ValueError) as error:
            found[-1].append(f"{key}: {error}")  # torch's list of errors
            state[key] = own.detach()  # one message is enough


def _joined(value: Any, scale_inv: Any, own: Any, weight: Any) -> Any:
    if scale_inv is None:
        raise ValueError(
            f"got codes ({value.dtype}) without their scales; needs {SCALE_SUFFIX.lstrip('_')} beside them"
        )
    codes, scales = _local(value), _local(scale_inv)
    codes = codes.codes if isinstance(codes, _CodesAsBytes) else codes
    if not is_quantized_weight(weight):
        return _decoded(codes, scales, weight.dtype)
    made = QuantizedWeight(codes, adopt_scales(scales, weight.spec), weight.spec, weight.dtype)
    if weight is own:
        return made
    kind: Any = type(own)
    with torch.no_grad():
        return kind.from_local(made, own.device_mesh, own.placements, shape=own.shape, stride=own.stride())
