"""TransformerEngine's contexts under their old module path."""

from ottava.compat.transformer_engine.pytorch.quantization import (
    FP8GlobalStateManager,
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_fp8_recipe,
)

__all__ = ["FP8GlobalStateManager", "autocast", "fp8_autocast", "fp8_model_init", "get_default_fp8_recipe"]

check_fp8_support = check_mxfp8_support = FP8GlobalStateManager.is_fp8_available
check_fp8_block_scaling_support = check_nvfp4_support = check_fp8_support
