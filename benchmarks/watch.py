"""What watching costs: the same training step unwatched and watched, in turn, on the demo's model.

    python benchmarks/watch.py [--steps 200] [--rounds 5]

Every round trains a block of steps in each mode, one after the other; quoted are medians over rounds of the ratio to
the unwatched block of the same round, so that a machine that is busy elsewhere slows both.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ottava.debug.watch import watch
from ottava.nn import convert
from ottava.train.config import load_config
from ottava.train.data import ByteCorpus
from ottava.train.model import ByteTransformer, loss

MODES: Mapping[str, dict[str, Any] | None] = MappingProxyType(
    {
        "unwatched": None,
        "default": {},
        "full look every step, 1 row of 16": {"every": 1},
        "full look every step, all elements": {"every": 1, "sample": 1},
    }
)


def main() -> None:
    """Prints a table for a BF16 model, whose casts are simulated, and for an FP8 one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of a block in the default mode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of 128 bytes in a step")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for recipe in ("bf16", "tensorwise"):
        seconds = measure(recipe, arguments.steps, arguments.rounds, arguments.batch_size)
        base = seconds["unwatched"]
        print(f"\n{recipe}: {1e3 * statistics.median(base):.1f} ms a step unwatched")
        for mode, times in seconds.items():
            ratios = [watched / bare - 1 for watched, bare in zip(times, base, strict=True)]
            print(f"  {mode:36} {100 * statistics.median(ratios):+7.1f} %")


def measure(recipe: str, steps: int, rounds: int, batch_size: int) -> dict[str, list[float]]:
    """Seconds per step of every round, by mode."""
    config = load_config(None, [f"batch_size={batch_size}"])
    corpus = ByteCorpus.load(config.data)
    torch.manual_seed(0)
    model = ByteTransformer(config.model, config.sequence_length)
    if recipe != "bf16":
        convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = [
        corpus.batch(seed=0, step=step, batch_size=config.batch_size, length=config.sequence_length)
        for step in range(1, 17)
    ]

    def train(count: int) -> float:
        started = time.perf_counter()
        for step in range(count):
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(model, *batches[step % len(batches)])
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - started) / count

    train(3)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode, settings in MODES.items():
            count = steps if not settings else max(steps // 10, 5)
            if settings is None:
                seconds[mode].append(train(count))
                continue
            with tempfile.TemporaryDirectory() as folder, watch(model, Path(folder) / "run", settings):
                seconds[mode].append(train(count))
    return seconds


if __name__ == "__main__":
    main()
