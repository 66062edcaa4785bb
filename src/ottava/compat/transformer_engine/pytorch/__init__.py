"""TransformerEngine's PyTorch names. A name that ottava lacks can be imported; using it raises an error with advice."""

import os
import warnings
from collections.abc import Mapping
from types import MappingProxyType
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
            *(
                "Fp8Padding",
                "Fp8Unpadding",
                "moe_permute",
                "moe_permute_and_pad_with_probs",
                "moe_permute_with_probs",
                "moe_sort_chunks_by_index",
            ),
            *("moe_sort_chunks_by_index_with_probs", "moe_unpermute"),
        ),
        "quantization": (
            *("autocast", "fp8_autocast", "fp8_model_init", "get_cudnn_version", "get_default_recipe"),
            *("get_device_compute_capability", "is_bf16_available", "is_fp8_available", "is_mxfp8_available"),
            *("is_fp8_block_scaling_available", "is_nvfp4_available", "quantized_model_init"),
        ),
        "quantizers": (
            *("DelayedScalingRequest", "Float8BlockQuantizer", "Float8CurrentScalingQuantizer", "Float8Quantizer"),
            *("HybridQuantizer", "IdentityQuantizer", "MXFP8Quantizer", "NVFP4Quantizer", "Quantizer"),
            "QuantizerRequest",
        ),
        "tensors": (
            *("DType", "Float8BlockwiseQTensor", "Float8Tensor", "HybridQuantizedTensor", "IdentityTensor"),
            *("MXFP8Tensor", "NVFP4Tensor", "QuantizedTensor", "prepare_for_saving", "restore_from_saved"),
        ),
        "transformer": ("TransformerLayer",),
    }
)
"""Module of ours -> names of TransformerEngine's public interface."""

__all__ = sorted(["QuantizerRole", "fp8", "optimizers", *(name for names in PUBLIC.values() for name in names)])


if unread := unread_variables(os.environ):
    warnings.warn(unread, stacklevel=2)


BELOW: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "distributed": (
            *("generate_positional_ids_for_cp", "get_batch_on_this_cp_rank", "pad_thd_sequences_for_cp"),
            *("in_fp8_activation_recompute_phase", "is_fp8_activation_recompute_enabled"),
        ),
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
            *("_default_sf_compute", "should_load_extra_state_pickle"),
        ),
        "quantizers": (
            *("CustomRecipeState", "DelayedScalingRecipeState", "Float8BlockScalingRecipeState"),
            *("Float8CurrentScalingRecipeState", "MXFP8BlockScalingRecipeState", "NVFP4BlockScalingRecipeState"),
            *("RecipeState", "current_scaling_factory", "delayed_scaling_factory"),
            *("float8_block_scaling_factory", "high_precision_factory", "mxfp8_factory", "nvfp4_factory"),
        ),
        "rope": ("apply_fused_qkv_rotary_pos_emb", "apply_rotary_pos_emb"),
        "tensors": (
            *("Float8BlockwiseQTensorStorage", "Float8TensorStorage", "HybridQuantizedTensorStorage"),
            *("IdentityTensorStorage", "MXFP8TensorStorage", "NVFP4TensorStorage", "QuantizedTensorStorage"),
            *("TE_DType", "TE_DType_To_Torch", "general_gemm", "general_grouped_gemm", "get_fp8_te_dtype"),
            "get_fp8_torch_dtype",
        ),
    }
)
"""Module of ours -> names that TransformerEngine has below its public interface, in modules of its own."""


_PLACES = MappingProxyType(
    {f"{__name__}.{home}": PUBLIC.get(home, ()) + BELOW.get(home, ()) for home in {**PUBLIC, **BELOW}}
    | {"ottava.compat.transformer_engine.common.recipe": ("QuantizerRole",)}
)


def __getattr__(name: str) -> Any:
    return absent(name) if name in NAMES or name in refused.BELOW else first_use(__name__, _PLACES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
