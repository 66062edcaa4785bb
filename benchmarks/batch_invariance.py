"""The price of batch invariance on a CPU: `python benchmarks/batch_invariance.py [rounds]`, CPU time, interleaved.

A Llama block of 512 features, forward and backward of 512 tokens and one decoding step beside 128 tokens in a cache,
with `autocast(batch_invariant=True)` and without, one thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch

import ottava
from ottava.bench.method import interleaved
from ottava.nn import KVCache, RotaryEmbedding, TransformerLayer


def block(recipe: str) -> dict[str, Callable[[], object]]:
    """Name -> the work that is timed."""
    torch.manual_seed(0)
    sizes = {"kv_heads": 4, "norm": "rmsnorm", "activation": "swiglu", "bias": False}
    layer = TransformerLayer(512, 1408, 8, recipe=recipe, dtype=torch.bfloat16, **sizes)
    x, one = torch.randn(1, 512, 512).bfloat16().requires_grad_(), torch.randn(1, 1, 512).bfloat16()
    table = RotaryEmbedding(64)(torch.arange(512))
    last = type(table)(table.cos[128:129], table.sin[128:129], table.interleaved)
    cache = KVCache(1, 1, 129, heads=4, head_dim=64, dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x[:, :128].detach(), rotary=type(table)(table.cos[:128], table.sin[:128], False), cache=cache.of(0))
    cache.advance(128)

    def train() -> None:
        layer(x, rotary=table).float().square().mean().backward()

    def decode() -> None:
        with torch.no_grad():
            layer(one, rotary=last, cache=cache.of(0))

    return {"train, 512 tokens": train, "decode, 1 token": decode}


def repeated(work: Callable[[], object], times: int, invariant: bool) -> None:
    """The work, so many times."""
    for _ in range(times):
        with ottava.autocast(batch_invariant=invariant):
            work()


def main(rounds: int = 15) -> None:
    """Prints medians and the quartiles of the ratio of each round."""
    torch.set_num_threads(1)
    for recipe in ("rowwise", "blockwise", "mxfp8"):
        for name, work in block(recipe).items():
            times = 20 if name.startswith("decode") else 1
            both = {str(on): partial(repeated, work, times, on) for on in (False, True)}
            plain, held = interleaved(both, rounds, clock=time.process_time)
            took = f"{plain.milliseconds / times:.2f} -> {held.milliseconds / times:.2f} ms"
            print(f"{recipe}, {name}: {took}, {held.ratio:.2f} times [{held.quartiles[0]:.2f}-{held.quartiles[1]:.2f}]")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
