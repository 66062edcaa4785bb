"""Do small states and FP8 weights cost accuracy? Trains the demo with each: `python benchmarks/optimizers.py`.

Every row trains the model of `ottava demo` as the demo does, with three seeds, and compares the final validation losses
with those of the same optimizer in FP32, seed by seed; `train/verdict.py` judges the difference by the spread of the
FP32 runs, whose GEMMs run in BF16. --long trains two rows for 2,500 steps instead, with batches of half the size,
because some errors come late. --peak measures the memory of training steps on a CPU, each row in a process of its own.
Finished runs are kept in the JSON file, so a stopped benchmark goes on. `--publish` writes the table into
docs/memory.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

import ottava
from ottava.train.config import load_config
from ottava.train.demo import DEFAULT_STEPS, DemoSettings
from ottava.train.loop import Trainer
from ottava.train.verdict import Noise, judge

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "optimizers.json"
SEEDS = (0, 1, 2)
LONG_STEPS = 2500
LAST_ONLY = ("checkpoint.every=0", "evaluation={every: 0, batches: 32}")
"""A run is evaluated at its end alone, on more batches than the demo takes."""

BF16, FP8 = "optimizer.weights=bf16", "optimizer.weights=fp8"
FP32_MASTER, REMAINDER = "optimizer.master=fp32", "optimizer.master=remainder"
CASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "AdamW": (),
        "AdamW, BF16 weights, FP32 master": (BF16, FP32_MASTER),
        "AdamW, BF16 weights, remainder": (BF16, REMAINDER),
        "AdamW, BF16 weights, stochastic": (BF16, "optimizer.stochastic_rounding=true"),
        "AdamW, BF16 weights, no master": (BF16,),
        "AdamW, BF16 moments": ("optimizer.moments=bf16",),
        "AdamW, FP8 moments": ("optimizer.moments=fp8",),
        "AdamW, int8 moments": ("optimizer.moments=int8",),
        "AdamW, BF16 weights, remainder, FP8 moments": (BF16, REMAINDER, "optimizer.moments=fp8"),
        "AdamW, tensorwise": ("recipe=tensorwise",),
        "AdamW, tensorwise, FP8 weights, FP32 master": ("recipe=tensorwise", FP8, FP32_MASTER),
        "AdamW, tensorwise, FP8 weights, remainder, FP8 moments": (
            "recipe=tensorwise",
            FP8,
            REMAINDER,
            "optimizer.moments=fp8",
        ),
        "AdamW, tensorwise, FP8 weights, FP32 master, amax every 100 steps": (
            "recipe=tensorwise",
            FP8,
            FP32_MASTER,
            "optimizer.amax_every=100",
        ),
        "AdamW, delayed, FP8 weights, remainder, FP8 moments": (
            "recipe=delayed",
            FP8,
            REMAINDER,
            "optimizer.moments=fp8",
        ),
        "AdamW, blockwise, FP8 weights, remainder, int8 moments": (
            "recipe=blockwise",
            FP8,
            REMAINDER,
            "optimizer.moments=int8",
        ),
        "Muon": ("optimizer.name=muon",),
        "Muon, int8 momentum": ("optimizer.name=muon", "optimizer.moments=int8"),
        "Muon, FP8 momentum": ("optimizer.name=muon", "optimizer.moments=fp8"),
        "Lion": ("optimizer.name=lion", "optimizer.learning_rate=3e-4"),
        "Lion, FP8 momentum": ("optimizer.name=lion", "optimizer.learning_rate=3e-4", "optimizer.moments=fp8"),
        "Lion, int8 momentum": ("optimizer.name=lion", "optimizer.learning_rate=3e-4", "optimizer.moments=int8"),
        "SGD": ("optimizer.name=sgd", "optimizer.learning_rate=0.1"),
        "SGD, FP8 momentum": ("optimizer.name=sgd", "optimizer.learning_rate=0.1", "optimizer.moments=fp8"),
        "SGD, int8 momentum": ("optimizer.name=sgd", "optimizer.learning_rate=0.1", "optimizer.moments=int8"),
    }
)
"""Name of a row -> settings over those of a run with recipe bf16. The first word names the row to compare with."""
LARGE = (
    "model={d_model: 512, layers: 8, heads: 8, kv_heads: 4, ffn: 1536}",
    "batch_size=2",
    "sequence_length=64",
    "steps=3",
    "checkpoint.every=0",
    "evaluation={every: 0, batches: 1}",
    "data.max_bytes=2000000",
)
PEAKS = (
    "AdamW",
    "AdamW, BF16 weights, FP32 master",
    "AdamW, BF16 weights, remainder, FP8 moments",
    "AdamW, tensorwise, FP8 weights, remainder, FP8 moments",
)
LONG = ("AdamW", "AdamW, delayed, FP8 weights, remainder, FP8 moments")


def final_loss(settings: tuple[str, ...], seed: int, steps: int) -> float:
    """Validation loss at the end of a run, nats per byte."""
    recipe = next((one.removeprefix("recipe=") for one in settings if one.startswith("recipe=")), "bf16")
    others = [one for one in settings if not one.startswith("recipe=")] + ["batch_size=8"] * (steps == LONG_STEPS)
    config = DemoSettings(steps=steps, overrides=(*LAST_ONLY, *others)).config(recipe, seed)
    with tempfile.TemporaryDirectory() as folder:
        records = Trainer(config, Path(folder)).advance()
    value = records[-1].val_loss
    return float("nan") if value is None else value


def results() -> dict[str, float]:
    """Name of a row, steps and seed -> final loss, of the runs so far."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def measure(names: list[str], steps: int) -> dict[str, dict[int, float]]:
    """Final losses of every row by their seeds; runs that the results hold are not repeated."""
    for seed in SEEDS[: 2 if steps == LONG_STEPS else 3]:
        for name in names:
            key = f"{name} | {steps} steps | seed {seed}"
            if key not in results():
                loss = final_loss(CASES[name], seed, steps)
                RESULTS.write_text(json.dumps(results() | {key: loss}, indent=1) + "\n")
                print(f"{key}: {loss:.4f}", flush=True)
    return finished(names, steps)


def finished(names: list[str], steps: int) -> dict[str, dict[int, float]]:
    """The rows that the results hold, whatever is missing."""
    found = {
        name: {seed: results()[key] for seed in SEEDS if (key := f"{name} | {steps} steps | seed {seed}") in results()}
        for name in names
    }
    return {name: losses for name, losses in found.items() if losses}


def table(losses: Mapping[str, Mapping[int, float]]) -> str:
    """A row for each case: mean loss, difference from FP32 and its range, and the verdict of each seed."""
    lines = ["| optimizer | loss | minus FP32, mean (each seed) | verdict |", "|---|---|---|---|"]
    for name, own in losses.items():
        base = losses[name.split(",")[0]]
        noise = Noise(losses=tuple(base.values()))
        mean = statistics.mean(own.values())
        if own is base:
            lines.append(f"| {name} | {mean:.4f} | seed spread {noise.spread or 0.0:.4f} | |")
            continue
        deltas = {seed: loss - base[seed] for seed, loss in own.items() if seed in base}
        said = [judge(name, own[seed], base[seed], noise).outcome for seed in deltas]
        each = ", ".join(f"{delta:+.4f}" for delta in deltas.values())
        lines.append(
            f"| {name} | {mean:.4f} | {statistics.mean(deltas.values()):+.4f} ({each}) | "
            f"{', '.join(dict.fromkeys(said))} |"
        )
    return "\n".join(lines)


def peak_bytes(settings: tuple[str, ...]) -> tuple[int, int]:
    """(predicted, measured) bytes of three steps, above those of a process that has imported everything. Linux only."""
    config = load_config(None, ["recipe=bf16", *LARGE, *settings])
    trained(("model={d_model: 64, layers: 2}", "steps=1"))  # libraries and pools of threads are there then
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, Path(folder))
        trainer.advance()
        found = ottava.memory(trainer.model, trainer._optimizer)
    return found.state, status("VmHWM") - before


def trained(settings: tuple[str, ...]) -> None:
    """A short run, for what the first one of a process leaves behind."""
    with tempfile.TemporaryDirectory() as folder:
        Trainer(load_config(None, ["recipe=tensorwise", *LARGE, *settings]), Path(folder)).advance()


def status(field: str) -> int:
    """Bytes of this process, of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def peaks() -> str:
    """The table of --peak."""
    lines = ["| run | state, predicted MB | peak, measured MB | of the first row |", "|---|---|---|---|"]
    first = 0
    for name in PEAKS:
        done = subprocess.run(
            [sys.executable, __file__, "--peak-of", name], capture_output=True, text=True, check=True, env=os.environ
        )
        state, peak = json.loads(done.stdout.splitlines()[-1])
        first = first or peak
        lines.append(f"| {name} | {state / 1e6:.0f} | {peak / 1e6:.0f} | {peak / first:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="the long run")
    parser.add_argument("--peak", action="store_true", help="memory of a step")
    parser.add_argument("--finished", action="store_true", help="train nothing: the table of what the JSON file holds")
    parser.add_argument("--peak-of", metavar="ROW", help="memory of a step of one row, in this process")
    parser.add_argument("--publish", action="store_true", help="write the tables into docs/memory.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak_of:
        print(json.dumps(peak_bytes(CASES[options.peak_of])))
        return
    steps, names = (LONG_STEPS, list(LONG)) if options.long else (DEFAULT_STEPS, list(CASES))
    rows = finished if options.finished else measure
    text = peaks() if options.peak else table(rows(names, steps))
    print(text)
    if options.publish:
        mark = "peak" if options.peak else "long" if options.long else "short"
        for page in (ROOT / "docs" / "memory.md", ROOT / "docs" / "memory.zh-CN.md"):
            before, _, rest = page.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
            _, end, after = rest.partition(f"<!-- end of {mark} -->")
            page.write_text(f"{before}<!-- {mark} -->\n\n{text}\n\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
