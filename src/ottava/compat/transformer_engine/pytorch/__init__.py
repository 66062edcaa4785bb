"""TransformerEngine's PyTorch names. A name that ottava lacks can be imported; using it raises an error with advice."""

import os
import warnings
from typing import Any

from ottava.compat.transformer_engine.pytorch import optimizers
from ottava.compat.transformer_engine.pytorch.attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
)
from ottava.compat.transformer_engine.pytorch.distributed import checkpoint
from ottava.compat.transformer_engine.pytorch.module import (
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
)
from ottava.compat.transformer_engine.pytorch.quantization import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_cudnn_version,
    get_default_recipe,
    get_device_compute_capability,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from ottava.compat.transformer_engine.pytorch.refused import NAMES, absent, unread_variables
from ottava.compat.transformer_engine.pytorch.transformer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "autocast",
    "checkpoint",
    "fp8_autocast",
    "fp8_model_init",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "optimizers",
    "quantized_model_init",
]


if unread := unread_variables(os.environ):
    warnings.warn(unread, stacklevel=2)


def __getattr__(name: str) -> Any:
    if name in NAMES:
        return absent(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
