"""What a layer of experts costs beside a loop over them in plain torch: `python benchmarks/moe.py [rounds]`.

Forward and backward in BF16 on a CPU, all variants in each round: CPU time, medians of the rounds' ratios; and what is
kept for backward, every storage once, parameters and FP8 copies of weights not, in bytes a token and feature.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ottava
from ottava.bench.method import interleaved
from ottava.nn import MoE

HIDDEN, FFN, EXPERTS, TOP_K, TOKENS = 512, 704, 8, 2, 1024


class Loop(nn.Module):
    """Experts one after the other, as Hugging Face's models run them; linears that `convert` takes."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.ModuleList(nn.Linear(HIDDEN, 2 * FFN, bias=False) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(FFN, HIDDEN, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """(T, H) -> (T, H)."""
        probs, chosen = self.router(x).float().softmax(-1).topk(TOP_K)
        y = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = self.up[expert](x[token]).chunk(2, -1)
            rows = self.down[expert](F.silu(gate) * up)
            y = y.index_add(0, token, (rows * probs[token, place, None]).to(x.dtype))
        return y


def kept(model: nn.Module, x: Tensor) -> float:
    """Bytes a token and feature that a forward keeps."""
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    for parameter in model.parameters():
        seen.pop(parameter.untyped_storage().data_ptr(), None)
    for door in (m for m in model.modules() if isinstance(m, ottava.engine.quantizer.WeightQuantizer)):
        for operand in (door.cached or ())[2:]:
            if operand is not None:
                seen.pop(operand.data.untyped_storage().data_ptr(), None)
    del y
    return sum(seen.values()) / x.numel()


def main(rounds: int = 12) -> None:
    """Prints milliseconds, ratios with quartiles, and what is kept."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN).bfloat16().requires_grad_()
    models: dict[str, nn.Module] = {"loop of nn.Linear": Loop().bfloat16()}
    for recipe in ("bf16", "tensorwise", "mxfp8"):
        loop = Loop().bfloat16()
        ottava.convert(loop, recipe)
        models[f"loop, {recipe}"] = loop
        models[f"MoE, {recipe}"] = MoE(HIDDEN, FFN, EXPERTS, TOP_K, recipe=recipe, dtype=torch.bfloat16)

    def step(model: nn.Module) -> Callable[[], None]:
        return lambda: model(x).float().sum().backward()

    work = {name: step(model) for name, model in models.items()}
    for timing in interleaved(work, rounds, clock=time.process_time):
        print(timing)
    for name, model in models.items():
        print(f"{name:20} keeps {kept(model, x):6.2f} bytes a token and feature")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
