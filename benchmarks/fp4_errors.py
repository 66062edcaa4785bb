"""The mean squared error of FP4 casts, of one million numbers N(0, 1): python benchmarks/fp4_errors.py"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.quantize import quantize
from ottava.recipe import RECIPES


def cell(recipe: str, tensor: str) -> QuantizationSpec:
    """How a recipe casts a tensor for the first of its GEMMs."""
    spec = RECIPES[recipe].cells(tensor)[0]
    assert spec is not None
    return spec


CASTS: Mapping[str, QuantizationSpec] = MappingProxyType(
    {
        "nearest, 1x16": cell("nvfp4", "input"),
        "nearest, 16x16": cell("nvfp4", "weight"),
        "four over six, 1x16": cell("four_over_six", "input"),
        "four over six of TE, 1x16": cell("four_over_six_te", "input"),
        "stochastic, NVIDIA's scales": cell("nvfp4", "grad_output"),
        "stochastic, unclipped": replace(cell("nvfp4", "grad_output"), block_scale="unclipped"),
        "MS-EDEN": cell("ms_eden", "grad_output"),
        "MXFP4, nearest, 1x32": cell("mxfp4", "input"),
    }
)


def squared_error(spec: QuantizationSpec, x: torch.Tensor) -> float:
    """Of the cast of what the transform made of x; a rotation keeps squared errors."""
    x_q = quantize(x, spec)
    return float((x_q.dequantize(torch.float32) - x_q.transformed(x)).double().square().mean())


def main() -> None:
    """Prints the table."""
    torch.manual_seed(0)
    x = torch.randn(1000, 1024)
    for name, spec in CASTS.items():
        print(f"{name:28} {1000 * squared_error(spec, x):6.2f}e-3   {spec}")


if __name__ == "__main__":
    main()
