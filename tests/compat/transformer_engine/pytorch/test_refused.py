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
from ottava.compat.transformer_engine.pytorch.state import INTERNALS

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
    pages = {"from_transformer_engine.md": "What is missing", "from_transformer_engine.zh-CN.md": "还缺什么"}
    for page, head in pages.items():
        text = (Path(__file__).parents[4] / "docs" / page).read_text("utf-8").partition(f"## {head}\n")[2]
        assert [word for word in refusals if word not in text.partition("\n## ")[0]] == [], page
    for word, use in refusals.items():
        with pytest.raises(NotImplementedError):
            assert use() is None, word


def test_attributes_are_theirs_or_say_what_to_use() -> None:
    """Of a deep copy, too: arguments of the constructor, what follows from them, and advice about all others."""
    made: list[Any] = [te.Linear(8, 16), te.LayerNormLinear(8, 16), te.LayerNormMLP(8, 16), te.GroupedLinear(2, 8, 16)]
    made += [te.DotProductAttention(2, 8, 1), te.MultiheadAttention(16, 2), te.TransformerLayer(16, 24, 2)]
    for module in (*made, *copy.deepcopy(made)):
        defaults = {name: one.default for name, one in inspect.signature(type(module)).parameters.items()}
        for name in {"eps", "normalization", "return_bias", "self_attn_mask_type", "softmax_type"} & defaults.keys():
            assert getattr(module, name) == defaults[name]
        lacks = [name for name in INTERNALS if not hasattr(module, name)]
        assert len(lacks) > 60
        for name in lacks:
            with pytest.raises(AttributeError, match=rf"^{type(module).__name__}\.{name} is not in ottava: \w"):
                getattr(module, name)
        with pytest.raises(AttributeError, match="no attribute 'nobody_has_this'"):
            module.nobody_has_this  # noqa: B018
    layer = te.TransformerLayer(16, 24, 2, self_attn_mask_type="padding", params_dtype=torch.bfloat16)
    assert (layer.self_attn_mask_type, layer.window_size, layer.params_dtype) == ("padding", (-1, -1), torch.bfloat16)
    assert (made[-1].hidden_size, made[-1].window_size, made[-1].kv_channels, made[-1].tp_size) == (16, (-1, 0), 8, 1)
    assert (made[4].num_gqa_groups, made[0].use_bias, made[3].apply_bias) == (1, True, True)


def test_variables_of_theirs_are_named_where_they_change_numbers() -> None:
    program = "import warnings\nwarnings.simplefilter('error')\nimport ottava.compat.transformer_engine.pytorch"
    theirs = {"NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_FP8_UPDATE": "1", "NVTE_FWD_LAYERNORM_SM_MARGIN": "2"}
    last = warm.run(["-c", program], env={**os.environ, **theirs}).stderr.splitlines()[-1]
    assert last.startswith("UserWarning: ottava does not read NVTE_FLASH_ATTN: torch.nn.attention.sdpa_kernel chooses")
    assert "NVTE_UNFUSED_FP8_UPDATE: histories have one rule" in last
    assert "MARGIN" not in last
    assert unread_variables({}) == ""
