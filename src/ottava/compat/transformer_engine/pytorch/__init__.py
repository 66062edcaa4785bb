"""TransformerEngine's PyTorch names. A name that ottava lacks can be imported; using it raises an error with advice."""

import os
import warnings
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any

from ottava.base import first_use
from ottava.compat.transformer_engine.pytorch import refused
from ottava.compat.transformer_engine.pytorch.refused import NAMES, absent, unread_variables

PUBLIC: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention": ("DotProductAttention", "InferenceParams", "MultiheadAttention", "RotaryPositionEmbedding"),
        "distributed": ("CudaRNGStatesTracker", "checkpoint", "parallel_cross_entropy"),
        "execution": ("get_cpu_offload_context", "make_graphed_callables", "mark_not_offload"),
        "module": ("GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm"),
        "moe": (
            *("Fp8Padding", "Fp8Unpadding", "moe_permute", "moe_permute_and_pad_with_probs"),
            *("moe_permute_with_probs", "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs"),
            "moe_unpermute",
        ),
        "quantization": (
            *("autocast", "fp8_autocast", "fp8_model_init", "get_cudnn_version", "get_default_recipe"),
            *("get_device_compute_capability", "is_bf16_available", "is_fp8_available", "is_mxfp8_available"),
            *("is_fp8_block_scaling_available", "is_nvfp4_available", "quantized_model_init"),
        ),
        "quantizers": (
            *("DelayedScalingRequest", "Float8BlockQuantizer", "Float8CurrentScalingQuantizer", "Float8Quantizer"),
            *("HybridQuantizedTensor", "HybridQuantizer", "IdentityQuantizer", "MXFP8Quantizer", "NVFP4Quantizer"),
            *("Quantizer", "QuantizerRequest"),
        ),
        "tensors": (
            *("DType", "Float8BlockwiseQTensor", "Float8Tensor", "IdentityTensor"),
            *("MXFP8Tensor", "NVFP4Tensor", "QuantizedTensor"),
        ),
        "transformer": ("TransformerLayer",),
    }
)
"""Module of ours -> names of TransformerEngine's public interface."""

__all__ = sorted(["QuantizerRole", "fp8", "ops", "optimizers", *(name for names in PUBLIC.values() for name in names)])


if unread := unread_variables(os.environ):
    warnings.warn(unread, stacklevel=2)


_PLACES = MappingProxyType(
    {f"{__name__}.{home}": names for home, names in PUBLIC.items()}
    | {"ottava.compat.transformer_engine.common.recipe": ("QuantizerRole",)}
)


_MORE = ("gemms", "inference", "megatron", "rope", "state")
"""Modules of ours without public names."""


_HIDDEN = ("_attention_backends", "_default_sf_compute")


def _below(name: str, *homes: str) -> Any:
    """What one of these modules of ours defines under a name that TransformerEngine has below its interface, in modules
    of its own; None: none does."""
    for home in (f"{__name__}.{one}" for one in homes if name in _HIDDEN or not name.startswith("_")):
        value = vars(import_module(home)).get(name)
        if getattr(value, "__module__", home) == home and not isinstance(value, ModuleType | None):
            return value
    return None


def __getattr__(name: str) -> Any:
    if name in NAMES or name in refused.BELOW:
        return absent(name)
    public = name in __all__ or name in ("__path__", *PUBLIC, *_MORE, "refused")
    found = None if public else _below(name, *PUBLIC, *_MORE)
    return first_use(__name__, _PLACES, name) if found is None else found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
