"""TransformerEngine's contexts under their old module path."""

from ottava.compat.transformer_engine.pytorch.quantization import FP8GlobalStateManager as FP8GlobalStateManager
from ottava.compat.transformer_engine.pytorch.quantization import autocast as autocast
from ottava.compat.transformer_engine.pytorch.quantization import fp8_autocast as fp8_autocast
from ottava.compat.transformer_engine.pytorch.quantization import fp8_model_init as fp8_model_init
from ottava.compat.transformer_engine.pytorch.quantization import get_default_fp8_recipe as get_default_fp8_recipe

check_fp8_support = check_mxfp8_support = FP8GlobalStateManager.is_fp8_available
check_fp8_block_scaling_support = check_nvfp4_support = check_fp8_support
