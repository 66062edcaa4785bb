"""`ottava bench gpu`: measures speed and checks results on a GPU, beside BF16 and other installed packages.

ceilings    copy, launch, single BF16 and FP8 GEMMs: the constants of `ottava plan --device`
gemm        every way to run a GEMM, with Triton's under each promotion interval; saves the fastest for this device
cast        ottava's casts of x and x.T, in bytes per second
linear      forward and backward of a Linear, eager, compiled and as a graph, beside the prediction
host        host time and launches of a Linear
block       forward and backward of a decoder layer, Llama's 8B and 1B sizes, with memory
seed_layer  a transformer layer with the shapes of TransformerEngine issue #1119, with AdamW
train       tokens per second of whole training steps, eager and as a graph, with the loss
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ottava.base.errors import unknown_name
from ottava.bench.gpu_kernels import cast, ceilings, gemms
from ottava.bench.gpu_models import block, host, linear, seed_layer, train
from ottava.bench.method import Run
from ottava.bench.rivals import missing
from ottava.bench.rounds import versions
from ottava.nn.plan import Device

SUITES: Mapping[str, Callable[[Run], dict[str, Any]]] = MappingProxyType(
    {
        "ceilings": ceilings,
        "gemm": gemms,
        "cast": cast,
        "linear": linear,
        "host": host,
        "block": block,
        "seed_layer": seed_layer,
        "train": train,
    }
)
"""In running order: suites with smaller requirements come first."""
_PACKAGES = ("ottava", "torch", "triton", "torchao", "liger-kernel", "transformer-engine")
_UNITS = MappingProxyType({"flops": "FLOP/s", "bytes_per_second": "B/s"})
_GPU_STATE = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"


def bench(run: Run, suites: Iterable[str] = SUITES) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measures suite after suite. Yields its name, its rows and the state of the GPU before and after.

    Raises:
        ValueError: a suite is unknown. Nothing is measured then.
        WrongResultError: a contender computed a wrong result.
    """
    chosen = list(suites)
    for name in chosen:
        if name not in SUITES:
            raise ValueError(f"bench gpu: {unknown_name('suite', name, tuple(SUITES))}")
    for name in chosen:
        torch.manual_seed(0)
        torch._dynamo.reset()  # graphs of earlier suites count against the limit of recompilations
        state = gpu_state(run)
        result = SUITES[name](run)
        yield name, {**result, "gpu_state": [state, gpu_state(run)]}


def where(run: Run) -> dict[str, Any]:
    """Device, versions and commit, without which the numbers mean nothing."""
    return {
        "device": torch.cuda.get_device_name(run.device) if run.cuda else platform.processor() or "cpu",
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) if run.cuda else "",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if run.cuda else None,
        "python": platform.python_version(),
        "versions": versions(_PACKAGES),
        "commit": _output(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]),
        "smoke": run.smoke,
        "rounds": run.rounds,
        "assumed": asdict(Device()),
        "left_out": missing() if run.rivals else {},
    }


def gpu_state(run: Run) -> dict[str, str]:
    """Clocks, power and temperature; empty without nvidia-smi."""
    line = _output(["nvidia-smi", f"--query-gpu={_GPU_STATE}", "--format=csv,noheader"]) if run.cuda else ""
    values = [value.strip() for value in line.splitlines()[0].split(",")] if line else []
    return dict(zip(_GPU_STATE.split(","), values, strict=False))


def table(rows: list[dict[str, Any]]) -> str:
    """One line per row: its name, its median in microseconds with percentiles, and its rates."""
    lines = []
    for row in rows:
        name = " ".join(str(row[key]) for key in ("recipe", "what", "mode", "shape") if row.get(key) is not None)
        times = f"{1e6 * row['median']:10.1f} us ({1e6 * row['p10']:.1f} to {1e6 * row['p90']:.1f})"
        extra = [f"{row[key] / 1e12:.3g} T{unit}" for key, unit in _UNITS.items() if key in row]
        extra += [f"{row['tokens_per_second']:,.0f} tokens/s"] if "tokens_per_second" in row else []
        extra += [f"{row['speedup']:.2f} x BF16"] if "speedup" in row else []
        extra += [f"(predicted {row['predicted']:.2f})"] if "predicted" in row else []
        extra += [f"{row['launches']} launches"] if row.get("launches") else []
        extra += [f"{row['step_bytes'] / 2**30:.2f} GiB"] if row.get("step_bytes") else []
        lines.append(f"  {name:52} {times} {' '.join(extra)}".rstrip())
    return "\n".join(lines)


def _output(command: list[str]) -> str:
    """The output of a program; empty if it cannot run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
