"""TransformerEngine's PyTorch names. A name that ottava lacks can be imported; using it raises an error with advice."""

import importlib
import os
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ottava.compat.transformer_engine.common.recipe import QuantizerRole
from ottava.compat.transformer_engine.pytorch import fp8, optimizers, refused
from ottava.compat.transformer_engine.pytorch.attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
)
from ottava.compat.transformer_engine.pytorch.distributed import (
    CudaRNGStatesTracker,
    checkpoint,
    parallel_cross_entropy,
)
from ottava.compat.transformer_engine.pytorch.execution import (
    get_cpu_offload_context,
    make_graphed_callables,
    mark_not_offload,
)
from ottava.compat.transformer_engine.pytorch.module import (
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
)
from ottava.compat.transformer_engine.pytorch.moe import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
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
from ottava.compat.transformer_engine.pytorch.quantizers import (
    DelayedScalingRequest,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    QuantizerRequest,
)
from ottava.compat.transformer_engine.pytorch.refused import NAMES, absent, unread_variables
from ottava.compat.transformer_engine.pytorch.tensors import (
    DType,
    Float8BlockwiseQTensor,
    Float8Tensor,
    HybridQuantizedTensor,
    IdentityTensor,
    MXFP8Tensor,
    NVFP4Tensor,
    QuantizedTensor,
)
from ottava.compat.transformer_engine.pytorch.transformer import TransformerLayer

__all__ = [
    "CudaRNGStatesTracker",
    "DType",
    "DelayedScalingRequest",
    "DotProductAttention",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "GroupedLinear",
    "HybridQuantizedTensor",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MultiheadAttention",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "autocast",
    "checkpoint",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "get_cpu_offload_context",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "mark_not_offload",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "optimizers",
    "parallel_cross_entropy",
    "quantized_model_init",
]


if unread := unread_variables(os.environ):
    warnings.warn(unread, stacklevel=2)


BELOW: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "distributed": ("in_fp8_activation_recompute_phase", "is_fp8_activation_recompute_enabled"),
        "execution": (
            *("is_cpu_offload_enabled", "restore_fp8_tensors", "save_fp8_tensors", "set_capture_end"),
            "set_capture_start",
        ),
        "gradients": ("get_dummy_wgrad",),
        "moe": (
            *("deinterleave_glu_tensor", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss"),
            *("fused_topk_with_score_function", "interleave_glu_tensor"),
        ),
        "state": ("TransformerEngineBaseModule",),
        "module": (*("L2Normalization", "get_default_init_method", "init_method_normal", "scaled_init_method_normal"),),
        "quantization": (
            *("FP8GlobalStateManager", "get_align_size_for_quantization", "get_default_fp8_recipe"),
            *("UNSAFE_PICKLE_EXTRA_STATE_ENV", "is_non_tn_fp8_gemm_supported", "round_up_to_nearest_multiple"),
            "should_load_extra_state_pickle",
        ),
        "quantizers": (
            *("current_scaling_factory", "delayed_scaling_factory"),
            *("float8_block_scaling_factory", "high_precision_factory", "mxfp8_factory", "nvfp4_factory"),
        ),
        "rope": ("apply_fused_qkv_rotary_pos_emb", "apply_rotary_pos_emb"),
        "tensors": ("TE_DType", "TE_DType_To_Torch", "general_gemm", "get_fp8_te_dtype", "get_fp8_torch_dtype"),
    }
)
"""Module of ours -> names that TransformerEngine has below its public interface, in modules of its own."""


def __getattr__(name: str) -> Any:
    if name in NAMES or name in refused.BELOW:
        return absent(name)
    for module, names in BELOW.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
