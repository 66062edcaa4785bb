"""What the Python of ottava's GPU path costs the host, measured without a GPU: Triton's driver is replaced by a fake.

    python benchmarks/host_cost.py [--recipes tensorwise rowwise delayed] [--rounds 9]

Kernels are compiled for sm_90 and their launches go to the fake, which runs nothing; memory is the CPU's. Casts, doors,
plans and autograd are the real ones. The GEMMs of FP8 give memory that nobody wrote: on a CPU torch's take a third of
such a step. Those of the layer "torch" run, of 16 x 16 x 16. Times are CPU time of a warm forward and backward, the
smallest of the rounds; calls are Python's, of anybody. What the fakes leave out: the C of Triton's launcher and of
cuBLASLt's call, and CUDA's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # kernels are compiled here

try:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
except ImportError as error:
    raise SystemExit(
        f"host_cost.py compiles Triton's kernels, and {error}: pip install triton (no GPU is needed)"
    ) from None

import torch
from torch import Tensor, nn

import ottava
from ottava.engine import quantizer
from ottava.kernels import scaled_mm
from ottava.kernels.triton import quantize as triton_quantize
from ottava.ops import dispatch
from ottava.ops import quantize as casts

SIZE = 16
STEPS = 100


class _Binary:
    """Loads nothing."""

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        """(module, function, registers, spills, threads)."""
        return 1, 1, 32, 0, 1024

    def unload_module(self, _: object) -> None:
        """Nothing to do."""

    def get_device_properties(self, _: object) -> dict[str, int]:
        """An H200's."""
        return {"max_shared_mem": 232_448, "multiprocessor_count": 132, "max_num_regs": 65_536, "warpSize": 32}


class FakeDriver:
    """A driver of sm_90 that notes launches: (grid, kernel, arguments). Its device is torch's CPU, number -1."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.utils, self.device = _Binary(), -1

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """A launcher of a compiled kernel."""

        name = source.hash()

        def launch(*args: Any) -> None:
            self.launched.append((args[:3], name, args[9:]))

        return launch

    def get_current_target(self) -> GPUTarget:
        """What kernels are compiled for."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The number of the current device."""
        return self.device

    def get_current_stream(self, _: int) -> int:
        """The default stream."""
        return 0


def _unwritten(a: Tensor, b: Tensor, *settings: Any) -> Tensor:
    """Memory for torch's scaled GEMM of (M, K) and (K, N); the output's dtype is the tenth of its arguments."""
    return a.new_empty((a.shape[0], b.shape[1]), dtype=settings[7])


def install() -> FakeDriver:
    """Puts the fake in Triton's place, and the kernels of a GPU where a CPU's would run."""
    fake = FakeDriver()
    driver.set_active(fake)
    triton_quantize.supports_quantize = lambda *_: None
    casts._CPU_CASTS = (triton_quantize,)
    dispatch.CPU_KERNELS = (scaled_mm,)
    torch._scaled_mm_v2 = _unwritten
    quantizer._on_accelerator = lambda x: x.device.type != "meta"
    torch.set_num_threads(1)
    return fake


def step_of(recipe: str) -> Callable[[], None]:
    """Forward and backward of a Linear; recipe "torch": torch's."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16}
    layer = nn.Linear(SIZE, SIZE, **settings) if recipe == "torch" else None
    layer = layer or ottava.nn.Linear(SIZE, SIZE, recipe=recipe, **settings)
    x, dy = (torch.randn(SIZE, SIZE).bfloat16() for _ in range(2))
    x.requires_grad_()

    def step() -> None:
        x.grad = layer.weight.grad = None
        y: Tensor = layer(x)
        y.backward(dy)

    return step


def calls_of(step: Callable[[], None]) -> int:
    """Python functions that a step calls."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def main() -> None:
    """Prints one JSON object a line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipes", nargs="*", default=["tensorwise", "rowwise", "delayed"])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    fake = install()
    steps = {name: step_of(name) for name in ("torch", *args.recipes)}
    for step in [*steps.values()]:
        step()  # a plan is made for its second call
    best = dict.fromkeys(steps, float("inf"))
    for turn in range(1 + args.rounds):  # the first warms up; all take turns, so that load on the machine slows all
        for name, step in steps.items():
            fake.launched.clear()
            start = time.process_time()
            for _ in range(STEPS):
                step()
            if turn:
                best[name] = min(best[name], (time.process_time() - start) / STEPS)
    for name in ("torch", *args.recipes):
        calls = calls_of(step := steps[name])
        fake.launched.clear()
        step()
        row = {"layer": name, "cpu_microseconds": round(1e6 * best[name], 1), "times_torch": best[name] / best["torch"]}
        print(json.dumps(row | {"python_calls": calls, "triton_launches": len(fake.launched)}))


if __name__ == "__main__":
    main()
