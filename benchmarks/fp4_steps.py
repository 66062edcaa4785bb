"""CPU time of one linear layer's step under each FP4 recipe, over that under nvfp4: python benchmarks/fp4_steps.py

A step is forward and backward with a weight that has changed. The recipes take turns; the median of nine steps counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import ottava

RECIPES = ("nvfp4", "nvfp4_rht", "four_over_six", "ms_eden", "averis", "mxfp4", "bf16")
SIZES = ((64, 576, 1536), (512, 512, 512), (256, 1024, 1024))  # tokens, inputs, outputs
STEPS = 9


def step_of(recipe: str, tokens: int, inputs: int, outputs: int) -> Callable[[], None]:
    """One step of a layer, which has run twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=False).bfloat16())
    ottava.convert(model, recipe)
    x = torch.randn(tokens, inputs).bfloat16().requires_grad_()
    dy = torch.randn(tokens, outputs).bfloat16()

    def step() -> None:
        with torch.no_grad():
            next(model.parameters()).mul_(1.0)  # its cast is made anew
        model(x).backward(dy)

    step()
    step()
    return step


def main() -> None:
    """Prints a line for each size."""
    torch.set_num_threads(1)
    for sizes in SIZES:
        steps = {recipe: step_of(recipe, *sizes) for recipe in RECIPES}
        times: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
        for _ in range(STEPS):
            for recipe, step in steps.items():
                began = time.process_time()
                step()
                times[recipe].append(1000 * (time.process_time() - began))
        medians = {recipe: statistics.median(taken) for recipe, taken in times.items()}
        print(*sizes, *(f"{r} {ms:.1f} ms ({ms / medians['nvfp4']:.2f})" for r, ms in medians.items()), sep="  ")


if __name__ == "__main__":
    main()
