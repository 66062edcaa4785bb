"""TransformerEngine issue #1119's layer: what FP32 inputs cost, in time, memory and dtypes.

    python benchmarks/seed_layer.py [--scale 1] [--rounds 5]

One TransformerLayer (sequence 1024, batch 32, hidden 4096, FFN 16384, 32 heads over 8, no mask), forward, backward and
an AdamW step. On a CPU every size is divided, so that it takes seconds; --scale multiplies the tokens. The rows are
parameters and inputs in FP32, the same under torch.autocast, and all in BF16. Each is built from `ottava.nn` and from
plain torch after `ottava.convert`, under each recipe. Times are medians of ratios to BF16's own row, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ottava
from ottava.bench.method import interleaved

RECIPES = ("bf16", "delayed", "tensorwise", "blockwise", "mxfp8")
DTYPES = ("FP32", "FP32 under autocast", "BF16")


class Plain(nn.Module):
    """The layer of plain torch but for attention, which is the same on both sides."""

    def __init__(self, hidden: int, wide: int, heads: int, groups: int) -> None:
        super().__init__()
        self.sizes = [heads, groups, groups]
        self.attention = ottava.nn.DotProductAttention(mask="no_mask", layout="sbhd")
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, hidden + 2 * groups * (hidden // heads))
        self.out, self.up, self.down = nn.Linear(hidden, hidden), nn.Linear(hidden, wide), nn.Linear(wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(S, B, hidden) -> the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (sum(self.sizes), -1)).split(self.sizes, -2)
        x = x + self.out(self.attention(q, k, v).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def sizes(on_gpu: bool, scale: float) -> tuple[int, int, int, int, int, int]:
    """Sequence, batch, hidden, FFN, heads, heads of keys."""
    if on_gpu:
        return int(1024 * scale), 32, 4096, 16_384, 32, 8
    return int(256 * scale), 8, 256, 1024, 8, 2  # as many tokens for each feature


def build(ours: bool, recipe: str, hidden: int, wide: int, heads: int, groups: int) -> nn.Module:
    """The layer under a recipe, with the same weights for all recipes."""
    torch.manual_seed(0)
    if ours:
        return ottava.nn.TransformerLayer(
            hidden, wide, heads, kv_heads=groups, mask="no_mask", layout="sbhd", recipe=recipe
        )
    model = Plain(hidden, wide, heads, groups)
    if recipe != "bf16":
        ottava.convert(model, recipe)
    return model


class Kept:
    """Bytes that autograd keeps for the backward, each storage once, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        self.own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.storages: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts a saved tensor."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor


def measure(dtypes: str, ours: bool, recipe: str, device: torch.device, scale: float) -> tuple[Callable[[], None], Any]:
    """(one training step, what is known of it: bytes kept and dtypes)."""
    sequence, batch, *shape = sizes(device.type == "cuda", scale)
    dtype = torch.bfloat16 if dtypes == "BF16" else torch.float32
    model = build(ours, recipe, *shape).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(sequence, batch, shape[0], device=device, dtype=dtype, requires_grad=True)
    under = torch.autocast(device.type, torch.bfloat16, enabled=dtypes == "FP32 under autocast")

    def forward() -> Tensor:
        with under:
            return model(x)  # type: ignore[no-any-return]

    def step() -> None:
        optimizer.zero_grad()
        forward().float().square().mean().backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    kept = Kept(model)
    step()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        y = forward()
    parameter = next(iter(model.parameters()))
    state = optimizer.state[parameter]["exp_avg"]
    assert parameter.grad is not None
    facts = {
        "bytes": sum(kept.storages.values()),
        "activations": y.dtype,
        "weights": parameter.dtype,
        "gradients": parameter.grad.dtype,
        "optimizer": state.dtype,
    }
    return step, facts


def main() -> None:
    """Prints one table for each way to build the layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{device.type}, torch {torch.__version__}, {torch.get_num_threads()} threads, {given.rounds} rounds")
    for ours in (True, False):
        cases = {(d, r): measure(d, ours, r, device, given.scale) for d in DTYPES for r in RECIPES}
        steps = {f"{d} {r}": case[0] for (d, r), case in cases.items()}
        first = "BF16 bf16"
        ordered = {first: steps[first], **steps}
        timings = {timing.name: timing for timing in interleaved(ordered, given.rounds)}
        print(f"\n{'ottava.nn' if ours else 'plain torch, converted'}: step / BF16's (ms), bytes kept / BF16's")
        unit = cases["BF16", "bf16"][1]["bytes"]
        for d in DTYPES:
            facts = cases[d, "tensorwise"][1]
            names = ", ".join(f"{what} {str(facts[what]).removeprefix('torch.')}" for what in list(facts)[1:])
            print(f"{d}: {names}")
            for r in RECIPES:
                timing = timings[f"{d} {r}"]
                share = cases[d, r][1]["bytes"] / unit
                print(f"    {r:<12} {timing.ratio:5.2f} ({timing.milliseconds:8.1f} ms)   {share:5.2f}")


if __name__ == "__main__":
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("once")
        main()
    for notice in {str(one.message) for one in notices}:
        print(f"\nnotice: {notice}")
    with contextlib.suppress(BrokenPipeError):
        print(f"\n{time.perf_counter() - started:.0f} s")
