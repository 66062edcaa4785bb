"""The price of batch invariance on a CPU: `python benchmarks/batch_invariance.py [rounds]`, CPU time, interleaved.

A Llama block of 512 features, forward and backward of 512 tokens and one decoding step beside 128 tokens in a cache,
with `autocast(batch_invariant=True)` and without, one thread.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

import ottava
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


def main(rounds: int = 15) -> None:
    """Prints medians and the quartiles of the ratio of each round."""
    torch.set_num_threads(1)
    for recipe in ("rowwise", "blockwise", "mxfp8"):
        for name, work in block(recipe).items():
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(rounds + 2):
                for invariant in (False, True):
                    start = time.process_time()
                    for _ in range(20 if name.startswith("decode") else 1):
                        with ottava.autocast(batch_invariant=invariant):
                            work()
                    seconds[invariant].append(time.process_time() - start)
            plain, held = (times[2:] for times in seconds.values())
            low, ratio, high = statistics.quantiles([b / a for a, b in zip(plain, held, strict=True)], n=4)
            scale = 1e3 / (20 if name.startswith("decode") else 1)
            times = f"{scale * statistics.median(plain):.2f} -> {scale * statistics.median(held):.2f} ms"
            print(f"{recipe}, {name}: {times}, {ratio:.2f} times [{low:.2f}-{high:.2f}]")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
