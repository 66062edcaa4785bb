"""Names and arguments that ottava does not have: they can be imported, and are refused by name when used."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava.compat.transformer_engine.pytorch as te
import warm
from ottava.compat.transformer_engine.common.recipe import Float8BlockScaling, MXFP8BlockScaling
from ottava.compat.transformer_engine.pytorch.distributed import quantize_master_weights
from ottava.compat.transformer_engine.pytorch.refused import ARGUMENTS, NAMES, refuse, unread_variables

PUBLIC = """
LayerNormLinear Linear LayerNormMLP LayerNorm RMSNorm GroupedLinear Fp8Padding Fp8Unpadding initialize_ub destroy_ub
UserBufferQuantizationMode DotProductAttention FusedMLAQUpProjRopeQuant MultiheadAttention InferenceParams
RotaryPositionEmbedding TransformerLayer moe_permute moe_permute_with_probs moe_permute_and_pad_with_probs
moe_unpermute moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs fp8_autocast fp8_model_init autocast
quantized_model_init is_fp8_available is_mxfp8_available is_fp8_block_scaling_available is_nvfp4_available
get_default_recipe QuantizerRole QuantizerRequest DelayedScalingRequest make_graphed_callables checkpoint
CudaRNGStatesTracker get_cpu_offload_context mark_not_offload ManualOffloadSynchronizer ops optimizers onnx_export
parallel_cross_entropy CusolverMpCtx newton_schulz QuantizedTensorStorage QuantizedTensor Quantizer prepare_for_saving
restore_from_saved restore_from_func_ctx Float8Quantizer Float8CurrentScalingQuantizer MXFP8Quantizer
Float8BlockQuantizer NVFP4Quantizer Float8TensorStorage MXFP8TensorStorage Float8BlockwiseQTensorStorage
NVFP4TensorStorage Float8Tensor MXFP8Tensor Float8BlockwiseQTensor NVFP4Tensor HybridQuantizer
HybridQuantizedTensorStorage IdentityQuantizer IdentityTensorStorage HybridQuantizedTensor IdentityTensor constants
DType deinterleave_glu_tensor interleave_glu_tensor get_cudnn_version get_device_compute_capability is_bf16_available
""".split()  # noqa: SIM905  # the list would be a page long
"""What transformer_engine.pytorch 2.20 imports into its own namespace."""


def test_every_public_name_is_here_or_refused() -> None:
    missing = [name for name in PUBLIC if not hasattr(te, name)]
    assert missing == []
    assert not hasattr(te, "nobody_has_this")
    assert set(NAMES) <= set(PUBLIC)
    assert not set(NAMES) & set(te.__all__)


def test_a_refused_name_refuses_to_be_used() -> None:
    for name in NAMES:
        stand_in: Any = getattr(te, name)
        assert not isinstance(torch.ones(1), stand_in)
        assert not stand_in.is_supported()
        for use in (stand_in, lambda stand_in=stand_in: stand_in.anything):
            with pytest.raises(NotImplementedError, match=f"transformer_engine.pytorch.{name} is not in ottava: "):
                use()


def test_arguments_that_change_nothing_are_taken_and_others_refused() -> None:
    """On the modules themselves; an unknown one is a TypeError with the nearest known name."""
    te.Linear(8, 8, tp_size=1, sequence_parallel=False, ub_overlap_ag=True, layer_number=3, name="fc1")
    for module in (te.Linear, te.LayerNormLinear, te.LayerNormMLP):
        taken = set(inspect.signature(module.__init__).parameters)
        for name, (harmless, reason) in ARGUMENTS.items():
            if name in taken:
                continue
            for value in harmless if harmless != ("any",) else (None, 7):
                refuse(module.__name__, {name: value})
            if harmless != ("any",):
                with pytest.raises(NotImplementedError, match=f"{name}='other' is not in ottava: {reason}"):
                    module(8, 8, **{name: "other"})
        with pytest.raises(TypeError, match="did you mean 'params_dtype'"):
            module(8, 8, param_dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="fp8_output=True"):
        te.Linear(8, 8)(torch.ones(1, 8), fp8_output=True)


def test_the_page_lists_what_is_missing() -> None:
    """Each word stands under "What is missing", in both languages, and what it names is refused."""
    layer, x = te.DotProductAttention(2, 8), torch.ones(4, 1, 2, 8)
    refusals: dict[str, Callable[[], Any]] = {
        "ub_overlap_ag": lambda: te.Linear(8, 8, ub_overlap_rs_dgrad=True),
        "Float8BlockScaling": lambda: Float8BlockScaling(fp8_dpa=True).ottava,
        "use_grouped_tensor": lambda: te.GroupedLinear(2, 8, 8, use_grouped_tensor=True),
        "fp8_output": lambda: te.Linear(8, 8)(torch.ones(1, 8), fp8_output=True),
        "fp8_grad": lambda: te.Linear(8, 8)(torch.ones(1, 8), fp8_grad=True),
        "fp8_mha": lambda: MXFP8BlockScaling(fp8_dpa=True, fp8_mha=True).ottava,
        "a2a": lambda: layer.set_context_parallel_group("a group", cp_comm_type="a2a"),
        "score_mod": lambda: layer(x, x, x, score_mod=lambda graph, score: score),
        'parallel_mode="row"': lambda: te.LayerNormLinear(8, 8, parallel_mode="row"),
        "output_layernorm": lambda: te.TransformerLayer(8, 8, 2, output_layernorm=True),
        "cache manager": lambda: te.InferenceParams(1, 8, 2, 8, torch.float32, custom_cache_manager=layer),
        "adam_w_mode=False": lambda: te.optimizers.FusedAdam(layer.parameters(), adam_w_mode=False),
        "offload_weights": lambda: te.get_cpu_offload_context(True, 1, 2, True, True),
        "FSDP": lambda: quantize_master_weights([], [], [], None, fsdp_shard_model_weights=[x]),
        "onnx_export": lambda: te.onnx_export(True),
    }
    for page, head in (
        ("from_transformer_engine.md", "What is missing"),
        ("from_transformer_engine.zh-CN.md", "还缺什么"),
    ):
        text = (
            (Path(__file__).parents[4] / "docs" / page)
            .read_text("utf-8")
            .partition(f"## {head}")[2]
            .partition("\n## ")[0]
        )
        assert [word for word in refusals if word not in text] == [], page
    for word, use in refusals.items():
        with pytest.raises(NotImplementedError):
            assert use() is None, word


MADE: dict[str, tuple[Callable[[], Any], str]] = {
    "Linear": (lambda: te.Linear(8, 16), "symmetric_ar_type ub_overlap_ag_fprop weight_names onnx_forward"),
    "LayerNormLinear": (lambda: te.LayerNormLinear(8, 16), "return_layernorm_output_gathered fwd_ln_sm_margin"),
    "LayerNormMLP": (lambda: te.LayerNormMLP(8, 16), "gemm_gelu_fusion size_per_partition bias_gelu_nvfusion"),
    "GroupedLinear": (lambda: te.GroupedLinear(2, 8, 16), "make_grouped_weights single_grouped_weight tp_size"),
    "DotProductAttention": (
        lambda: te.DotProductAttention(2, 8, 1),
        "flash_attention bottom_right_diagonal",
    ),
    "MultiheadAttention": (lambda: te.MultiheadAttention(16, 2), "cp_size fast_setattr"),
    "TransformerLayer": (lambda: te.TransformerLayer(16, 24, 2), "enc_dec_window_size bias_dropout_fusion seq_length"),
}
BASE = """
fp8 fp8_initialized fp8_calibration fp8_meta_tensors_initialized param_init_meta primary_weights_in_fp8 fsdp_wrapped
preserve_high_precision_init_val fsdp_group activation_dtype wgrad_store is_fsdp2 module_setattr set_meta_tensor
output_quantizer_role grad_input_quantizer_role adjust_amax_history_length get_quantizer_roles init_fp8_meta_tensors
get_fp8_meta_tensors reset_fp8_meta_tensors set_activation_dtype init_fp8_metadata prepare_forward end_forward
prepare_forward_ctx grad_output_preprocess is_debug_iter no_debug_features_active
""".split()  # noqa: SIM905  # the list would be a page long
"""What TransformerEngine's base class has, and ottava's modules have not."""
VALUES = {
    "Linear": {"return_bias": False, "use_bias": True, "apply_bias": True, "parallel_mode": None, "tp_size": 1},
    "LayerNormLinear": {"normalization": "LayerNorm", "eps": 1e-5, "zero_centered_gamma": False},
    "LayerNormMLP": {"normalization": "LayerNorm", "use_bias": True, "checkpoint": False, "sequence_parallel": False},
    "GroupedLinear": {"apply_bias": True, "params_dtype": torch.float32},
    "DotProductAttention": {
        "num_attention_heads": 2,
        "num_gqa_groups": 1,
        "window_size": (-1, 0),
        "qkv_format": "sbhd",
    },
    "MultiheadAttention": {"num_gqa_groups_per_partition": 2, "hidden_size_q": 16, "hidden_size_per_attention_head": 8},
    "TransformerLayer": {"self_attn_mask_type": "causal", "hidden_size": 16, "kv_channels": 8, "layer_type": "encoder"},
}


def test_attributes_are_theirs_or_say_what_to_use() -> None:
    """Of a deep copy, too. `hasattr` and `getattr` with a default answer as for any missing name."""
    for name, (make, lacks) in MADE.items():
        for module in (made := make(), copy.deepcopy(made)):
            assert {one: getattr(module, one) for one in VALUES[name]} == VALUES[name]
        for lacking in (*lacks.split(), *BASE):
            assert getattr(module, lacking, "none") == "none"
            with pytest.raises(AttributeError, match=rf"^{name}\.{lacking} is not in ottava: \w"):
                getattr(module, lacking)
        with pytest.raises(AttributeError, match="no attribute 'nobody_has_this'"):
            module.nobody_has_this  # noqa: B018
    layer = te.TransformerLayer(16, 24, 2, self_attn_mask_type="padding", params_dtype=torch.bfloat16)
    assert (layer.self_attn_mask_type, layer.window_size, layer.params_dtype) == ("padding", (-1, -1), torch.bfloat16)


def test_variables_of_theirs_are_named_where_they_change_numbers() -> None:
    program = "import warnings\nwarnings.simplefilter('error')\nimport ottava.compat.transformer_engine.pytorch"
    theirs = {"NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_FP8_UPDATE": "1", "NVTE_FWD_LAYERNORM_SM_MARGIN": "2"}
    last = warm.run(["-c", program], env={**os.environ, **theirs}).stderr.splitlines()[-1]
    assert last.startswith("UserWarning: ottava does not read NVTE_FLASH_ATTN: torch.nn.attention.sdpa_kernel chooses")
    assert "NVTE_UNFUSED_FP8_UPDATE: histories have one rule" in last
    assert "MARGIN" not in last
    assert unread_variables({}) == ""
