"""What one boundary of predicted scales costs: `python benchmarks/state.py [layers]`, in microseconds, medians.

A model of N linear layers (3 doors each) under the recipe "delayed"; one `ScalingState.update()` after each training
step. The first update also packs the doors' buffers; it is not counted.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

import ottava


def main(layers: int = 334, rounds: int = 30) -> None:
    """Prints the median and the quartiles."""
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(layers))).bfloat16()
    ottava.convert(model, "delayed")
    state = ottava.ScalingState(model)
    times = []
    for _ in range(rounds):
        model(torch.randn(4, 32).bfloat16()).float().sum().backward()
        start = time.perf_counter()
        state.update()
        times.append(1e6 * (time.perf_counter() - start))
    low, median, high = statistics.quantiles(times[1:], n=4)
    spread = f"{low:.0f} to {high:.0f}"
    print(f"{3 * layers} tensors: {median:.0f} us an update (quartiles {spread}), torch {torch.__version__}")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
