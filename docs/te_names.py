"""Prints the tables of docs/from_transformer_engine.md: every public name of TransformerEngine, from the code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ottava.compat.transformer_engine.pytorch.refused import ARGUMENTS, ENVIRONMENT, NAMES

_TESTS = "tests/compat/transformer_engine"
OURS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "Linear": ("ottava.nn.Linear", "pytorch/test_module.py"),
        "LayerNormLinear": ("ottava.nn.NormLinear", "pytorch/test_module.py"),
        "LayerNormMLP": ("ottava.nn.NormMLP", "pytorch/test_module.py"),
        "LayerNorm": ("ottava.nn.LayerNorm", "pytorch/test_module.py"),
        "RMSNorm": ("ottava.nn.RMSNorm", "pytorch/test_module.py"),
        "GroupedLinear": ("ottava.nn.GroupedLinear", "pytorch/test_module.py"),
        "DotProductAttention": ("ottava.nn.DotProductAttention", "pytorch/test_attention.py"),
        "MultiheadAttention": ("ottava.nn.MultiheadAttention", "pytorch/test_attention.py"),
        "RotaryPositionEmbedding": ("ottava.nn.RotaryEmbedding", "pytorch/test_attention.py"),
        "InferenceParams": ("ottava.nn.KVCache, a cache for each layer_number", "pytorch/test_attention.py"),
        "TransformerLayer": ("ottava.nn.TransformerLayer", "pytorch/test_transformer.py"),
        "autocast": ("ottava.autocast", "pytorch/test_quantization.py"),
        "fp8_autocast": ("ottava.autocast", "pytorch/test_quantization.py"),
        "quantized_model_init": ("ottava.model_init", "pytorch/test_quantization.py"),
        "fp8_model_init": ("ottava.model_init", "pytorch/test_quantization.py"),
        "optimizers": ("ottava.optim: FusedAdam is AdamW, FusedSGD is SGD", "pytorch/test_optimizers.py"),
        "checkpoint": ("torch.utils.checkpoint", "pytorch/test_distributed.py"),
        "CudaRNGStatesTracker": ("states of torch's generator, by name", "pytorch/test_gradients.py"),
        "parallel_cross_entropy": ("the formulas of ottava.nn.LinearCrossEntropy", "pytorch/test_distributed.py"),
        "moe_permute, moe_permute_with_probs, moe_permute_and_pad_with_probs, moe_unpermute": (
            "ottava.nn.permute and unpermute",
            "pytorch/test_moe.py",
        ),
        "moe_sort_chunks_by_index, moe_sort_chunks_by_index_with_probs": ("torch.split, torch.cat", "pytorch/test_moe.py"),
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
        "recipe.CustomRecipe": ("ottava.Recipe is a table of cells; not by this name", "common/test_recipe.py"),
    }
)
"""Name in TransformerEngine -> what it is here, and the test that shows it."""


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
    for name, advice in NAMES.items():
        by_advice.setdefault(advice, []).append(f"`{name}`")
    return table(("not here", "instead"), ((", ".join(of), advice) for advice, of in by_advice.items()))


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
    print("\n\n".join((names(), refused(), arguments(), environment())))
