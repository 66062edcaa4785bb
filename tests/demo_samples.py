"""A made-up demo for the tests of its views: curves that fall like real ones, rows as the engine gives them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from ottava.train.verdict import DemoResult, Machinery, RunResult

LAYERS = tuple(
    f"layers.{i}.{name}" for i in range(5) for name in ("attention.qkv_proj", "attention.o_proj", "mlp.down_proj")
)


def made_run(
    recipe: str, seed: int = 0, *, final: float = 1.7, steps: int = 200, broken_at: int | None = None
) -> RunResult:
    """Falls from ln(256) to exactly `final`; from step `broken_at` on its loss is NaN."""
    noise = random.Random(f"{recipe} {seed}")
    done = min(steps, broken_at or steps)

    def loss(step: int) -> float:
        return math.nan if broken_at and step >= broken_at else final + (5.545 - final) * math.exp(-step / 30)

    evaluated = [*range(25, done, 25), done]
    end = final if broken_at is None else math.nan
    return RunResult(
        recipe=recipe,
        seed=seed,
        losses=[loss(step) + noise.gauss(0, 0.05) for step in range(1, done + 1)],
        validation=[(step, loss(step) + noise.gauss(0, 0.006) if step < done else end) for step in evaluated],
        high_precision_loss=final - 0.001,
        seconds_per_step=0.05 if recipe == "bf16" else 0.1,
        tokens_per_step=2048,
        diverged_at=broken_at,
    )


def _receipt() -> list[dict[str, object]]:
    """Five equal layers and a head that was not converted."""
    row: dict[str, object] = {
        "operands": "E4M3[tensor] x E4M3[tensor]",
        "kernel": "reference",
        "shape": "2048 x 128 x 384",
        "padding": "",
        "fp8": True,
        "native": False,
        "saved_bytes": 0,
        "high_precision_bytes": 0,
        "note": "",
        "weight": 49152,
    }
    rows = [{"layer": layer, "gemm": gemm} | row for layer in LAYERS for gemm in ("fprop", "dgrad", "wgrad")]
    head = {"operands": "high precision", "kernel": "torch", "fp8": False, "note": "not converted"}
    return [*rows, {"layer": "lm_head", "gemm": "all"} | row | head]


def _numbers() -> list[dict[str, object]]:
    """Two directions for each tensor of each layer; the columns of the last gradient underflow."""
    rows = []
    for layer in LAYERS:
        for tensor in ("input", "weight", "grad_output"):
            for direction in ("row", "col"):
                underflows = (layer, tensor, direction) == (LAYERS[-1], "grad_output", "col")
                rows.append(
                    {
                        "layer": layer,
                        "tensor": tensor,
                        "direction": direction,
                        "format": "E4M3",
                        "granularity": "1x128",
                        "amax": 3.5,
                        "underflow_pct": 40.0 if underflows else 0.02,
                        "sqnr_db": math.inf if tensor == "weight" else 31.5,
                    }
                )
    return rows


def made_demo(runs: Sequence[RunResult]) -> DemoResult:
    """A demo of these runs, with machinery for each FP8 recipe."""
    machinery = Machinery(
        receipt=_receipt(), fp8_fraction=0.97, skipped={"lm_head": "output head: sensitive"}, numbers=_numbers()
    )
    return DemoResult(
        runs=runs,
        machinery={run.recipe: machinery for run in runs if run.recipe != "bf16"},
        command="ottava demo --recipes tensorwise,blockwise",
        config="recipe: bf16\nsteps: 200\n",
        text="sources of Python's standard library: 812 files",
        parameters=1_049_984,
        facts={"started": "2025-11-21", "torch": "2.13.0+cpu", "platform": "Linux <x86_64>"},
        training_seconds=93.0,
    )


def usual_runs() -> list[RunResult]:
    """Three BF16 seeds that spread over 0.021, one recipe inside that and one 0.2 above BF16."""
    seeds = [made_run("bf16", seed, final=final) for seed, final in enumerate((1.700, 1.721, 1.712))]
    return [*seeds, made_run("tensorwise", final=1.704), made_run("blockwise", final=1.9)]
