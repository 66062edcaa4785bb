"""What FP4 costs: `python benchmarks/fp4.py errors`, or `steps`.

errors   mean squared error of casts of one million numbers N(0, 1)
steps    CPU time of one linear layer's step under each FP4 recipe, over that under nvfp4; medians of nine steps

A step is forward and backward with a weight that has changed. The recipes take turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn

import ottava
from ottava.bench.method import interleaved
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.quantize import quantize
from ottava.recipe import RECIPES

MEASURED = ("nvfp4", "nvfp4_rht", "four_over_six", "ms_eden", "averis", "mxfp4", "bf16")
SIZES = ((64, 576, 1536), (512, 512, 512), (256, 1024, 1024))  # tokens, inputs, outputs
STEPS = 9


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


def errors() -> None:
    """Prints a line for each cast."""
    torch.manual_seed(0)
    x = torch.randn(1000, 1024)
    for name, spec in CASTS.items():
        print(f"{name:28} {1000 * squared_error(spec, x):6.2f}e-3   {spec}")


def step_of(recipe: str, tokens: int, inputs: int, outputs: int) -> Callable[[], None]:
    """One step of a layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=False).bfloat16())
    ottava.convert(model, recipe)
    x = torch.randn(tokens, inputs).bfloat16().requires_grad_()
    dy = torch.randn(tokens, outputs).bfloat16()

    def step() -> None:
        with torch.no_grad():
            next(model.parameters()).mul_(1.0)  # its cast is made anew
        model(x).backward(dy)

    return step


def steps() -> None:
    """Prints a line for each size."""
    torch.set_num_threads(1)
    for sizes in SIZES:
        work = {recipe: step_of(recipe, *sizes) for recipe in MEASURED}
        timings = interleaved(work, STEPS, clock=time.process_time)
        print(*sizes, *(f"{one.name} {one.milliseconds:.1f} ms ({one.ratio:.2f})" for one in timings), sep="  ")


if __name__ == "__main__":
    for word in sys.argv[1:] or ("errors", "steps"):
        {"errors": errors, "steps": steps}[word]()
