"""Prints the tables of docs/from_transformer_engine.md: every public name of TransformerEngine, from the code."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ottava.compat.transformer_engine.pytorch.refused import ARGUMENTS, BELOW, ENVIRONMENT, NAMES

_TESTS = "tests/compat/transformer_engine"
OURS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "Linear": ("ottava.nn.Linear", "pytorch/test_module.py"),
        "LayerNormLinear": ("ottava.nn.NormLinear", "pytorch/test_module.py"),
        "LayerNormMLP": ("ottava.nn.NormMLP", "pytorch/test_module.py"),
        "LayerNorm": ("ottava.nn.LayerNorm", "pytorch/test_module.py"),
        "RMSNorm": ("ottava.nn.RMSNorm", "pytorch/test_module.py"),
        "GroupedLinear": ("an ottava.nn.Linear for each group", "pytorch/test_module.py"),
        "DotProductAttention": ("ottava.nn.DotProductAttention", "pytorch/test_attention.py"),
        "MultiheadAttention": ("ottava.nn.MultiheadAttention", "pytorch/test_attention.py"),
        "RotaryPositionEmbedding": ("ottava.nn.RotaryEmbedding", "pytorch/test_attention.py"),
        "InferenceParams": ("ottava.nn.KVCache, a cache for each layer_number", "pytorch/test_attention.py"),
        "TransformerLayer": ("ottava.nn.TransformerLayer", "pytorch/test_transformer.py"),
        "autocast": ("ottava.autocast", "pytorch/test_quantization.py"),
        "fp8_autocast": ("ottava.autocast", "pytorch/test_quantization.py"),
        "quantized_model_init": ("ottava.model_init", "pytorch/test_quantization.py"),
        "fp8_model_init": ("ottava.model_init", "pytorch/test_quantization.py"),
        "optimizers": (
            "ottava.optim: FusedAdam is AdamW, also of `decoupled_grad`, FusedSGD is SGD",
            "pytorch/test_optimizers.py",
        ),
        "checkpoint": ("torch.utils.checkpoint", "pytorch/test_distributed.py"),
        "CudaRNGStatesTracker": ("states of torch's generator, by name", "pytorch/test_gradients.py"),
        "pad_thd_sequences_for_cp, generate_positional_ids_for_cp, get_batch_on_this_cp_rank": (
            "torch's operations",
            "pytorch/test_distributed.py",
        ),
        "parallel_cross_entropy": ("the formulas of ottava.nn.LinearCrossEntropy", "pytorch/test_distributed.py"),
        "moe_permute, moe_permute_with_probs, moe_permute_and_pad_with_probs, moe_unpermute": (
            "ottava.nn.permute and unpermute",
            "pytorch/test_moe.py",
        ),
        "Fp8Padding, Fp8Unpadding": ("zero rows; GroupedLinear needs none", "pytorch/test_moe.py"),
        "moe_sort_chunks_by_index, moe_sort_chunks_by_index_with_probs": (
            "torch.split, torch.cat",
            "pytorch/test_moe.py",
        ),
        "fused_topk_with_score_function, fused_compute_score_for_moe_aux_loss, fused_moe_aux_loss": (
            "torch's operations, in FP32",
            "pytorch/test_moe.py",
        ),
        "make_graphed_callables": ("eager on a CPU, and it says so; torch's graphs", "pytorch/test_execution.py"),
        "get_cpu_offload_context, mark_not_offload": ("hooks on saved tensors", "pytorch/test_execution.py"),
        "get_default_recipe": ("DelayedScaling; MXFP8BlockScaling on Blackwell", "pytorch/test_quantization.py"),
        "FP8GlobalStateManager": ("nothing is global; reset() says so", "pytorch/test_quantization.py"),
        "is_fp8_available, is_mxfp8_available, is_fp8_block_scaling_available, is_nvfp4_available, is_bf16_available": (
            "True: emulated where there are no tensor cores for it",
            "pytorch/test_quantization.py",
        ),
        "get_device_compute_capability, get_cudnn_version": ("torch's", "pytorch/test_quantization.py"),
        "recipe.DelayedScaling": ('"delayed"', "common/test_recipe.py"),
        "recipe.Float8CurrentScaling": ('"tensorwise"', "common/test_recipe.py"),
        "recipe.Float8BlockScaling": ('"blockwise", "blockwise_fp32"', "common/test_recipe.py"),
        "recipe.MXFP8BlockScaling": ('"mxfp8"', "common/test_recipe.py"),
        "recipe.NVFP4BlockScaling": (
            '"nvfp4_rht"; with disable_rht=True "nvfp4", and with nvfp4_4over6="all", too, "four_over_six_te"',
            "common/test_recipe.py",
        ),
        "recipe.Format, MMParams, QParams": ("ottava.E4M3, E5M2, E2M1; GemmRecipe.fast_accum", "common/test_recipe.py"),
        "recipe.CustomRecipe, QuantizerRole": (
            "ottava.Recipe is a table of cells; the factory fills it, by a layer's name where it has one",
            "pytorch/test_quantizers.py",
        ),
        "DType": ("torch's dtypes, and ottava.E4M3, E5M2, E2M1", "pytorch/test_quantizers.py"),
        "Quantizer, Float8Quantizer, Float8CurrentScalingQuantizer, Float8BlockQuantizer, MXFP8Quantizer, "
        "NVFP4Quantizer, IdentityQuantizer, HybridQuantizer, QuantizerRequest, DelayedScalingRequest": (
            "ottava.QuantizationSpec: the cells of x and of x.T",
            "pytorch/test_quantizers.py",
        ),
        "QuantizedTensor, Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor, NVFP4Tensor, IdentityTensor, "
        "HybridQuantizedTensor": (
            "what ottava.quantize gives, as a tensor that decodes; buffers such as `_rowwise_data` are copies in their "
            "layout",
            "pytorch/test_quantizers.py",
        ),
        "apply_rotary_pos_emb, apply_fused_qkv_rotary_pos_emb": ("ottava.nn.rope.rotate", "pytorch/test_rope.py"),
        "general_gemm, general_grouped_gemm": (
            "ottava's GEMM, of the two casts that the layout needs",
            "pytorch/test_quantizers.py",
        ),
        "ops": ("fusible operations as modules", "pytorch/test_ops.py"),
        "fp8": ("its contexts under their old path", "pytorch/test_quantization.py"),
    }
)
"""Name in TransformerEngine -> what it is here, and the test that shows it."""


_RECIPES, _STATE = f"{_TESTS}/common/test_recipe.py", f"{_TESTS}/pytorch/test_state.py"
COMPARED: tuple[tuple[str, str, str, str], ...] = (
    ("an unknown field of a recipe", "accepted, and ignored", "TypeError with the nearest field", _RECIPES),
    (
        "`Float8CurrentScaling(fp8_quant_fwd_inp=...)`",
        "accepted; the default stays",
        "honoured, and checked; it can be assigned",
        _RECIPES,
    ),
    (
        "`Float8CurrentScaling(use_power_2_scales=True)`",
        "the three QParams keep the value of the environment variable",
        "sets all three",
        _RECIPES,
    ),
    (
        "`amax_compute_algo` and `scaling_factor_compute_algo` as functions",
        "honoured; two recipes that differ in it alone share one state",
        "honoured, on their layout of the history",
        _RECIPES,
    ),
    (
        "`CustomRecipe`, `HybridQuantizer`",
        "yes",
        "yes, as cells; of the weights of linear layers `quantized_model_init` stores both directions",
        f"{_TESTS}/pytorch/test_hybrid.py",
    ),
    (
        "`backward_override`",
        "high_precision, dequantized",
        "both; dequantized keeps decoded operands, and no memory is saved",
        _RECIPES,
    ),
    (
        "NVFP4 with a scale for each row",
        "yes",
        "yes, row by row, which takes time",
        f"{_TESTS}/pytorch/test_quantizers.py",
    ),
    ("NVFP4's four over six, by MAE and MSE", "yes", "yes, the same codes", _RECIPES),
    (
        "FP8 attention",
        "by cuDNN, under three recipes",
        "emulated, under the same three",
        f"{_TESTS}/pytorch/test_fp8_attention.py",
    ),
    (
        "histories in a checkpoint",
        "a pickle, executed behind an environment variable",
        "read without executing it; written with every field",
        _STATE,
    ),
    ("parameters by their names and in their order", "yes", "yes; q, k and v of one layer are views", _STATE),
    ("a machine without CUDA", "cannot be imported", "the same casts", "tests/compat/test_on_cpu.py"),
    (
        "the `ops` interface",
        "yes, fused",
        "one module after the other; collectives and scaled activations are refused",
        f"{_TESTS}/pytorch/test_ops.py",
    ),
    (
        "configuration of the debug tool",
        "an unknown feature ends the run",
        "read and acted upon; an unknown name is a note",
        "tests/interop/test_te_config.py",
    ),
)
"""A point, what it is in each, and the test that shows ours."""


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def names() -> str:
    """What is here."""
    rows = ((f"`{name}`", what, f"`{_TESTS}/{test}`") for name, (what, test) in OURS.items())
    return table(("TransformerEngine", "ottava", "shown by"), rows)


def refused() -> str:
    """What can be imported and is refused when used."""
    by_advice: dict[str, list[str]] = {}
    for name, advice in (*NAMES.items(), *BELOW.items()):
        by_advice.setdefault(advice, []).append(f"`{name}`")
    return table(("not here", "instead"), ((", ".join(of), advice) for advice, of in by_advice.items()))


def _title(one: Mapping[str, Any]) -> str:
    carried = len(one.get("carried", ()))
    name: str = one["title"].partition(":")[0]
    name = f"{name}, {one['sample'][0]} tests a file"
    return f"{name} ({carried} of {len(one['files'])} files not run again: counts as before)" if carried else name


def counted() -> str:
    """TransformerEngine's own tests through our names: the tables of benchmarks/te_tests.py."""
    tables = json.loads((Path(__file__).parents[1] / "benchmarks" / "results" / "te_tests.json").read_text())
    rows = []
    for one in tables:
        counts = tuple(
            str(one[name]) for name in ("ran", "skipped", "cuda", "limit", "passed", "refused", "internal", "ours")
        )
        rows.append((_title(one), *counts, f"{100 * one['share']:.0f} %"))
    head = (
        "table",
        "ran",
        "skipped",
        "CUDA's",
        "limit",
        "passed",
        "refused",
        "internal",
        "ours",
        "passed of the last four",
    )
    return table(head, rows)


def compared() -> str:
    """Where the two differ, TransformerEngine 2.20.0.dev0 as of 2026-08-22."""
    rows = ((point, theirs, ours, f"`{test}`") for point, theirs, ours, test in COMPARED)
    return table(("point", "TransformerEngine 2.20", "ottava", "shown by"), rows)


def arguments() -> str:
    """Arguments that are taken where they change nothing."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for name, (harmless, reason) in ARGUMENTS.items():
        taken = "any" if harmless == ("any",) else ", ".join(map(repr, harmless))
        by_reason.setdefault((taken, reason), []).append(f"`{name}`")
    rows = ((", ".join(of), taken, reason) for (taken, reason), of in by_reason.items())
    return table(("argument", "taken", "why others are refused"), rows)


def environment() -> str:
    """Variables that ottava does not read."""
    by_advice: dict[str, list[str]] = {}
    for name, advice in ENVIRONMENT.items():
        by_advice.setdefault(advice, []).append(f"`{name}`")
    return table(("variable", "instead"), ((", ".join(of), advice) for advice, of in by_advice.items()))


if __name__ == "__main__":
    print("\n\n".join((counted(), compared(), names(), refused(), arguments(), environment())))
