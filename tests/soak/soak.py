"""Trains under a watch for as long as it is told, and judges by slopes whether anything grows.

    ./x soak --minutes 60 [--out FILE.json]

A small transformer trains under a watch, and a twin of it without one. `ottava live` serves the run meanwhile. A round
trains both for the same few steps under every recipe in turn, evaluates, loads the live page and its events, and takes
a sample: resident memory, Python objects, file descriptors, threads, CPU time of a step, CPU time of the watched steps
over that of the twin's, and memory, descriptors and threads of the page's server. The run folder grows meanwhile.

The slope of each series is Theil's and Sen's, in units an hour, after a tenth of the rounds as a warm-up. Its interval
comes from means of blocks of rounds: neighbouring samples are not independent. A series is flat if the whole interval
lies below the bound (exit code 0), grows if it lies above (1), and else the run was too short to say (3).
`BOUNDS` was written before the first run; that of the step alone is out since: the machine slows down its twin, too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import ottava
from ottava.report.charts import Chart, Line, standalone

BOUNDS: Mapping[str, tuple[str, float, str]] = MappingProxyType(
    {
        "memory": ("MiB", 0.05, "of its mean"),
        "objects": ("Python objects", 0.05, "of its mean"),
        "descriptors": ("open files", 0.5, "absolute"),
        "threads": ("threads", 0.5, "absolute"),
        "overhead": ("CPU time of watched steps over the twin's", 0.05, "absolute"),
        "page memory": ("MiB", 64.0, "absolute"),  # the statistics that it keeps may fill 48
        "page descriptors": ("open files", 0.5, "absolute"),
        "page threads": ("threads", 0.5, "absolute"),
    }
)
"""Series -> unit, what it may grow an hour, and of what."""
FLAT, GROWS, UNDECIDED = "flat", "grows", "undecided"
_BLOCKS = 8
_STEPS = 4


class Slope(NamedTuple):
    """Growth an hour, with a 95 % interval."""

    low: float
    middle: float
    high: float


def theil_sen(hours: Sequence[float], values: Sequence[float]) -> Slope:
    """The median of the slopes between all pairs, over means of blocks; the interval is Sen's (Kendall's statistic)."""
    parts = max(3, min(_BLOCKS * 4, len(values) // 2))
    x, y = (
        np.array([part.mean() for part in np.array_split(np.asarray(one, float), parts)]) for one in (hours, values)
    )
    first, second = np.triu_indices(len(x), 1)
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first]))
    spread = 1.96 * np.sqrt(len(x) * (len(x) - 1) * (2 * len(x) + 5) / 18)
    low, high = (int(np.clip((len(slopes) + side * spread) / 2, 0, len(slopes) - 1)) for side in (-1, 1))
    return Slope(float(slopes[low]), float(np.median(slopes)), float(slopes[high]))


def judge(samples: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Series -> its mean, slope, bound (both an hour) and verdict.

    Raises:
        ValueError: fewer than ten samples.
    """
    if len(samples) < 10:
        raise ValueError(f"soak: {len(samples)} rounds are too few for a slope; needs 10: give it more minutes")
    kept = samples[len(samples) // 10 :]
    hours = [sample["seconds"] / 3600 for sample in kept]
    verdicts = {}
    for name, (unit, share, of) in BOUNDS.items():
        values = [sample[name] for sample in kept]
        mean, slope = float(np.mean(values)), theil_sen(hours, values)
        bound = share * (mean if of == "of its mean" else 1.0)
        verdict = FLAT if slope.high <= bound else GROWS if slope.low > bound else UNDECIDED
        verdicts[name] = {"unit": unit, "mean": mean, "slope": slope._asdict(), "bound": bound, "verdict": verdict}
    return verdicts


def _network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [ottava.nn.TransformerLayer(64, 128, 4, recipe="delayed", dtype=torch.bfloat16) for _ in range(2)]
    model = nn.Sequential(
        nn.Embedding(256, 64, dtype=torch.bfloat16), *layers, ottava.nn.Linear(64, 256, dtype=torch.bfloat16)
    )
    return model, ottava.optim.AdamW(model.parameters(), lr=1e-3)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: str, seed: int) -> tuple[float, float]:
    """(CPU seconds, the last loss) of some steps on tokens that depend on the seed."""
    began, loss = time.process_time(), torch.zeros(())
    torch.manual_seed(seed)  # of what recipes round at random, too
    generator = torch.Generator().manual_seed(seed)
    for _ in range(_STEPS):
        ids = torch.randint(256, (4, 65), generator=generator).sort().values  # sorted: there is something to learn
        with ottava.autocast(recipe):
            logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.process_time() - began, float(loss.detach())


class Page:
    """`ottava live` on a run: a process of its own, and a reader who comes and goes."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "ottava", "live", str(folder), "--no-open"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.address = self.process.stderr.readline().rpartition(" ")[2].strip()

    def visit(self) -> dict[str, float]:
        """Loads the page, listens until steps arrive, leaves; what the server holds then."""
        for path in ("", "events"):
            with urllib.request.urlopen(self.address + path, timeout=60) as answer:
                while (line := answer.readline()) and not line.startswith(b"event: steps"):
                    pass
        place = Path(f"/proc/{self.process.pid}")
        return {"page " + name: value for name, value in held(place).items()}

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


def held(process: Path) -> dict[str, float]:
    """Resident MiB, file descriptors and threads of a process."""
    pages = int((process / "statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "descriptors": len(os.listdir(process / "fd")),
        "threads": len(os.listdir(process / "task")),
    }


def _round(sides: Sequence[Any], number: int, recipes: Sequence[str]) -> dict[str, float]:
    """Both models under each recipe, the one or the other first, and an evaluation; one sample."""
    spent, losses = [0.0, 0.0], [0.0, 0.0]
    for at, recipe in enumerate(recipes):
        for side in (0, 1) if (at + number) % 2 else (1, 0):
            seconds, losses[side] = _train(*sides[side], recipe, 1000 * number + at)
            spent[side] += seconds
    with torch.no_grad():
        sides[0][0].eval()(torch.zeros(1, 8, dtype=torch.int64))
        sides[0][0].train()
    if losses[0] != losses[1]:
        raise RuntimeError(f"soak: the watch changed the training in round {number}: {losses[0]} against {losses[1]}")
    gc.collect()
    return held(Path("/proc/self")) | {
        "objects": len(gc.get_objects()),
        "step": 1000 * spent[0] / (_STEPS * len(recipes)),
        "overhead": spent[0] / spent[1],
        "loss": losses[0],
    }


def soak(
    minutes: float,
    folder: Path,
    after_round: Callable[[Mapping[str, float]], None] = print,
    recipes: Sequence[str] = tuple(ottava.RECIPES),
) -> dict[str, Any]:
    """Trains for so long, at least twelve rounds; the facts, all samples and verdicts as JSON values."""
    sides = [_network(), _network()]
    samples: list[dict[str, float]] = []
    began = time.monotonic()
    with ottava.watch(sides[0][0], folder / "run"), contextlib.closing(Page(folder / "run")) as page:
        while len(samples) < 12 or time.monotonic() - began < 60 * minutes:
            sample = _round(sides, len(samples), recipes) | page.visit()
            size = sum(path.stat().st_size for path in (folder / "run").rglob("*") if path.is_file())
            samples.append({"seconds": time.monotonic() - began, **sample, "folder": size / 2**20})
            after_round(samples[-1])
    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "minutes": samples[-1]["seconds"] / 60,
        "steps": len(samples) * _STEPS * len(recipes),
        "switches": len(samples) * len(recipes),
        "folder_mib": [samples[0]["folder"], samples[-1]["folder"]],
        "series": judge(samples),
        "samples": [{name: round(value, 4) for name, value in sample.items()} for sample in samples],
    }


def picture(result: Mapping[str, Any]) -> str:
    """An SVG: a chart for each series."""
    charts = []
    for style, name in enumerate(BOUNDS, 1):
        points = [(sample["seconds"] / 60, sample[name]) for sample in result["samples"]]
        top = max(value for _, value in points)
        line = Line(name=f"{name}: {result['series'][name]['verdict']}", points=points, style=style, dashed=False)
        charts.append(
            Chart(
                title=name,
                description=f"{name} over the minutes of the run",
                x_label="minutes",
                y_label=result["series"][name]["unit"],
                lines=[line],
                y_range=(0.0, 1.15 * top),
                width=380,
                height=260,
            )
        )
    return standalone(
        charts, title="Soak", captions=[f"{result['steps']} steps, {result['switches']} switches of recipe"]
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="./x soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--out", type=Path, help="writes JSON here, and a plot beside it (.svg)")
    given = parser.parse_args()
    if not 0 < given.minutes < 1e5:
        parser.error(f"--minutes {given.minutes}: give minutes above 0")
    if not Path("/proc/self/statm").exists():
        parser.error("needs /proc: run it on Linux")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        result = soak(given.minutes, Path(folder), lambda sample: print(json.dumps(sample), file=sys.stderr))
    for name, one in result["series"].items():
        slope = one["slope"]
        print(
            f"{name:12} {one['mean']:10.2f} {one['unit']}; an hour {slope['middle']:+.3f} "
            f"[{slope['low']:+.3f}, {slope['high']:+.3f}], bound {one['bound']:.3f}: {one['verdict']}"
        )
    print(f"{result['minutes']:.1f} minutes, {result['steps']} steps, {result['switches']} switches of recipe")
    if given.out:
        given.out.write_text(json.dumps(result) + "\n", "utf-8")
        given.out.with_suffix(".svg").write_text(picture(result), "utf-8")
    verdicts = {one["verdict"] for one in result["series"].values()}
    return 1 if GROWS in verdicts else 3 if UNDECIDED in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
