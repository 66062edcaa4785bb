"""Reads from a layer what it casts: from ottava's, from torchao's configuration, from TransformerEngine's recipe."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch import nn

from ottava.engine.layer import QuantizedLayer
from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.scaling import PER_ROW, PER_TENSOR, ScaleFormat
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import ATTENTION_TENSORS, CELL_OF, GEMMS, RECIPES, TENSORS, GemmRecipe, Recipe, get_recipe

_PACKAGES = ("ottava", "torchao", "transformer_engine")
_TE_RECIPES = MappingProxyType(
    {
        "DelayedScaling": "delayed",
        "Float8CurrentScaling": "tensorwise",
        "Float8BlockScaling": "blockwise",
        "MXFP8BlockScaling": "mxfp8",
        "NVFP4BlockScaling": "nvfp4",
    }
)
"""Class of TransformerEngine's recipe -> ours with the same casts, for its format HYBRID or its only one."""


def recipe_of(layer: nn.Module) -> Recipe | None:
    """The recipe that a layer of another package casts by, read from its own configuration; None if it casts nothing.

    Example:
        >>> recipe_of(nn.Linear(2, 2)) is None
        True
    """
    for kind in type(layer).__mro__:
        package = kind.__module__.partition(".")[0]
        if package == "torchao" and kind.__name__ == "Float8Linear":
            return _of_torchao(getattr(layer, "config", None))
        if package == "transformer_engine" and getattr(layer, "fp8", False) is True:
            return _of_te(getattr(layer, "fp8_meta", {}).get("recipe"))
    return None


def casting(layer: nn.Module | None, recipe: Recipe | None) -> dict[str, Any]:
    """Facts of a layer for the manifest: its package, its recipe, and the cast of each tensor.

    Example:
        >>> facts = casting(nn.Linear(2, 2), get_recipe("rowwise_with_gw_hp"))
        >>> facts["casts"]["input"]
        {'format': 'E4M3', 'granularity': 'row', 'scale_format': 'pow2', 'scaling': 'current', 'gemms': ['fprop']}
    """
    packages = [kind.__module__.partition(".")[0] for kind in type(layer).__mro__]
    package = next((name for name in packages if name in _PACKAGES), "torch")
    casts = {}
    if recipe is not None and package == "ottava" and not isinstance(layer, QuantizedLayer):  # attention
        specs = {tensor: getattr(recipe.attention, tensor, None) for tensor in ATTENTION_TENSORS}
        casts = {tensor: _facts(spec) for tensor, spec in specs.items() if spec is not None}
    elif recipe is not None:
        casts = {tensor: cast for tensor in TENSORS if (cast := _cast(recipe, tensor))}
    name = recipe.name if recipe is not None and (casts or package == "ottava") else ""
    return {"package": package, "recipe": name, "casts": casts}


def _cast(recipe: Recipe, tensor: str) -> dict[str, Any]:
    cells = {CELL_OF[tensor, d][0]: spec for d, spec in zip(("row", "col"), recipe.cells(tensor), strict=True)}
    spec = next((spec for spec in cells.values() if spec is not None), None)
    if spec is None:
        return {}
    return {**_facts(spec), "gemms": [gemm for gemm in GEMMS if cells.get(gemm) is not None]}


def _facts(spec: QuantizationSpec) -> dict[str, Any]:
    how = {"scale_format": str(spec.scale_format), "scaling": str(spec.scaling)}
    return {"format": spec.format.name, "granularity": str(spec.granularity), **how}


def _of_torchao(config: Any) -> Recipe | None:
    """The recipe of a Float8LinearConfig: one of ours if the casts are the same, else one with a name of its own."""
    if config is None:
        return None
    scale: ScaleFormat = "pow2" if config.round_scales_to_power_of_2 else "fp32"

    def spec(name: str) -> QuantizationSpec | None:
        cast = getattr(config, f"cast_config_{name}")
        if cast.scaling_type.name == "DISABLED":
            return None
        rows = PER_ROW if cast.scaling_granularity.name == "AXISWISE" else PER_TENSOR
        return QuantizationSpec(E5M2 if "e5m2" in str(cast.target_dtype) else E4M3, rows, scale_format=scale)

    cells = {
        "fprop": (spec("input"), spec("weight")),
        "dgrad": (spec("grad_output"), spec("weight_for_grad_input")),
        "wgrad": (spec("grad_output_for_grad_weight"), spec("input_for_grad_weight")),
    }
    for known in RECIPES.values():
        if all((getattr(known, gemm).lhs, getattr(known, gemm).rhs) == pair for gemm, pair in cells.items()):
            return known if known.casts else None
    fprop, dgrad, wgrad = (GemmRecipe(*cells[gemm]) for gemm in GEMMS)
    return Recipe("torchao", fprop, dgrad, wgrad)


def _of_te(recipe: Any) -> Recipe | None:
    name = _TE_RECIPES.get(type(recipe).__name__)
    if name is None:
        return None
    if name == "delayed":
        how = {"amax_history_len": recipe.amax_history_len, "margin": recipe.margin}
        return get_recipe(name, **how)
    return get_recipe("tensorwise_e4m3" if name == "tensorwise" and "HYBRID" not in str(recipe.fp8_format) else name)
