"""Does `diagnose` name the fault? Every fault that fits into a small model is put there: `python benchmarks/faults.py`.

Each fault (fault_injections.py) is injected into a training run that is really watched, at several strengths and two
model sizes; the rule that belongs to it must come first. Clean twins (every recipe, SwiGLU and ReLU) must make no rule
fire. Thresholds were tuned on seed 0; what is published is measured on seeds 1 and 2, which draw other weights, other
data and other faults. `--publish` writes docs/faults.md and benchmarks/results/faults.json. `--cache FOLDER` keeps the
runs; empty it when the watch or the lab has changed.

    recall       faulty runs whose first finding is the right one
    precision    of all runs with a finding (faulty and clean), those whose first finding is right

Some numbers are logged rather than caused, where the cause is outside of a small model (attention logits, gradient
angles, the losses of gaps and spikes): these are marked "logged" and scored apart. What needs an answer of a person or
another framework is not injected, see NOT_INJECTED.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fault_injections import FAULTS, NOT_INJECTED
from fault_lab import SIZES, Fault, run

from ottava.diagnose.diagnose import Diagnosis, diagnose
from ottava.recipe import get_recipe
from ottava.record.reader import Run

ROOT = Path(__file__).resolve().parents[1]
CLEAN_RECIPES = (
    "tensorwise",
    "delayed",
    "guarded",
    "rowwise",
    "blockwise",
    "mxfp8",
    "tensorwise_e4m3",
    "nvfp4",
    "bf16",
)
"""bf16: not converted; the casts of `tensorwise` are simulated beside its GEMMs."""
TUNED_ON, PUBLISHED = (0,), (1, 2)
"""Seeds."""


@dataclass(frozen=True)
class Result:
    """One run and what was said about it."""

    name: str
    expected: str
    """"" for a clean one."""
    first: str
    others: list[str]
    size: str
    strength: float
    seed: int
    recipe: str
    logged: bool
    seconds: float

    @property
    def right(self) -> bool:
        """Whether the first finding is the expected one; for a clean run, whether there is none."""
        return self.first == self.expected


def try_fault(fault: Fault, strength: float, size: str, seed: int, cache: Path) -> Result:
    """Injects, watches, diagnoses; what the cache holds is not trained again."""
    started = time.perf_counter()

    def train(folder: Path) -> None:
        for rank in reversed(range(fault.ranks)):
            if rank:
                _other(folder, fault, strength, size, rank, seed)
            else:
                run(folder, fault, strength, size, seed=seed)

    def train_twin(folder: Path) -> None:
        run(folder, None, 0, size, recipe=fault.recipe, steps=fault.steps, seed=seed)

    facts = (fault.name, inspect.getsource(fault.inject), str(fault.recipe), fault.config, fault.settings, fault.ranks)
    own = _made(cache, train, *facts, strength, fault.steps, size, seed)
    twin = _made(cache, train_twin, "twin", str(fault.recipe), fault.steps, size, seed) if fault.twin else None
    found = diagnose(own, baseline=twin)
    recipe = get_recipe(fault.recipe).name
    return _result(found, started, fault.name, fault.rule, size, strength, seed, recipe, fault.logged)


def _other(folder: Path, fault: Fault, strength: float, size: str, rank: int, seed: int) -> None:
    """A rank that writes no manifest."""
    try:
        run(folder, fault, strength, size, rank=rank, seed=seed)
    except ValueError as error:  # it has no manifest to open
        if "watch.json" not in str(error):
            raise


def _made(cache: Path, train: Callable[[Path], object], *facts: object) -> Run:
    """The run of these facts; `train` makes it where the cache lacks it."""
    folder = cache / hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=cache))
        train(scratch / "run")
        try:
            scratch.rename(folder)
        except OSError:  # another process has made it meanwhile
            shutil.rmtree(scratch)
    return Run.open(folder / "run")


def try_clean(recipe: str, activation: str, size: str, seed: int, cache: Path) -> Result:
    """A run without a fault."""
    started = time.perf_counter()

    def train(folder: Path) -> None:
        run(folder, None, 0, size, recipe=recipe, activation=activation, seed=seed)

    found = diagnose(_made(cache, train, "clean", recipe, activation, size, seed))
    return _result(found, started, f"clean, {activation}", "", size, 0.0, seed, recipe, False)


def _result(
    found: Diagnosis, started: float, name: str, rule: str, size: str, strength: float, seed: int, recipe: str,
    logged: bool,
) -> Result:  # fmt: skip
    ids = [finding.id for finding in found.findings]
    seconds = round(time.perf_counter() - started, 2)
    first, others = (ids[0] if ids else ""), ids[1:]
    return Result(name, rule, first, others, size, strength, seed, recipe, logged, seconds)


def scores(results: Sequence[Result]) -> dict[str, Any]:
    """Precision and recall over all runs, and recall of what was caused rather than logged."""
    faulty, clean = [r for r in results if r.expected], [r for r in results if not r.expected]
    fired, caused = [r for r in results if r.first], [r for r in faulty if not r.logged]
    right = sum(r.right for r in faulty)
    return {
        "faulty_runs": len(faulty),
        "right_rule_first": right,
        "right_rule_anywhere": sum(r.expected in (r.first, *r.others) for r in faulty),
        "runs_with_a_finding": len(fired),
        "recall": round(right / max(len(faulty), 1), 4),
        "precision": round(right / max(len(fired), 1), 4),
        "caused_runs": len(caused),
        "recall_of_caused": round(sum(r.right for r in caused) / max(len(caused), 1), 4),
        "clean_runs": len(clean),
        "clean_runs_with_a_finding": sum(bool(r.first) for r in clean),
        "rules_injected": len({r.expected for r in faulty}),
        "rules_not_injected": sorted(NOT_INJECTED),
    }


def table(results: Sequence[Result]) -> str:
    """Markdown: one row a fault, and one for clean runs of each recipe."""
    lines = [
        "| fault | recipe | expected rule | found first | strengths | sizes | seeds | said instead |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.name, result.recipe, result.expected), []).append(result)
    for (name, recipe, rule), own in groups.items():
        strengths = _few(f"{r.strength:g}" for r in own) if rule else ""
        wrong = _few(
            f"{r.first or 'nothing'}" + (f" ({r.strength:g}, {r.size}, seed {r.seed})" if rule else f" ({r.size})")
            for r in own
            if not r.right
        )
        mark = " (logged)" if own[0].logged else ""
        sizes, seeds = _few(r.size for r in own), _few(str(r.seed) for r in own)
        count = f"{sum(r.right for r in own)} of {len(own)}"
        lines.append(
            f"| {name}{mark} | {recipe} | {rule or 'none'} | {count} | {strengths} | {sizes} | {seeds} | {wrong} |"
        )
    return "\n".join(lines)


def _few(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


@dataclass(frozen=True)
class Trial:
    """One run to make: a fault by its place in FAULTS (faults hold functions, which no process can send), or clean."""

    fault: int | None
    size: str
    seed: int
    strength: float = 0.0
    recipe: str = ""
    activation: str = ""

    def result(self, cache: Path) -> Result:
        """Makes it."""
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        if self.fault is None:
            return try_clean(self.recipe, self.activation, self.size, self.seed, cache)
        return try_fault(FAULTS[self.fault], self.strength, self.size, self.seed, cache)


def trials(options: argparse.Namespace) -> list[Trial]:
    """What is to be run. The second size, for the strongest fault only, shows whether thresholds depend on it."""
    sizes = (options.size,) if options.size else ("small",) if options.quick else tuple(SIZES)
    wanted = [
        i for i, f in enumerate(FAULTS) if not options.clean and any(o in f.name or o == f.rule for o in options.only)
    ]
    faulty = [
        Trial(i, size, seed, strength)
        for i in wanted
        for size in sizes
        for strength in (FAULTS[i].strengths if size == "small" and not options.quick else FAULTS[i].strengths[-1:])
        for seed in options.seed
    ]
    clean = [
        Trial(None, size, seed, recipe=recipe, activation=activation)
        for recipe in (CLEAN_RECIPES[:2] if options.quick else CLEAN_RECIPES)
        for size in sizes
        for activation in (("swiglu", "relu") if size == "small" else ("swiglu",))
        for seed in options.seed
    ]
    return faulty + (clean if options.clean or options.only == [""] else [])


def main() -> int:
    """Runs the suite; exit code 1 where a rule was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="+", default=list(TUNED_ON), help="seeds; tune on 0, publish 1 and 2")
    parser.add_argument("--publish", action="store_true", help="seeds 1 and 2, and write the page and the results")
    parser.add_argument("--quick", action="store_true", help="one strength, one size, two clean recipes")
    parser.add_argument("--only", default=[""], nargs="+", help="rules, or parts of faults' names")
    parser.add_argument("--size", default="", choices=("", *SIZES), help="this size only")
    parser.add_argument("--clean", action="store_true", help="clean runs only")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--cache", type=Path, help="keeps the runs, so that another diagnosis trains nothing")
    options = parser.parse_args()
    if options.publish:
        if options.quick or options.clean or options.size or options.only != [""]:
            parser.error("--publish runs everything; leave --quick, --clean, --size and --only out")
        options.seed = list(PUBLISHED)
    state = _commit()  # as it is now: the run takes minutes
    planned, results = trials(options), []
    with tempfile.TemporaryDirectory() as place, ProcessPoolExecutor(options.jobs) as pool:
        for result in pool.map(partial(Trial.result, cache=options.cache or Path(place)), planned):
            results.append(result)
            print(f"{len(results)}/{len(planned)} {_line(result)}", flush=True)
    print(table(results))
    print(json.dumps(scores(results)))
    if options.publish:
        publish(results, state)
    return 0 if all(r.right for r in results) else 1


def publish(results: Sequence[Result], commit: str) -> None:
    """Writes docs/faults.md and benchmarks/results/faults.json."""
    host = {
        "device": "cpu, one thread a process",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit,
    }
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    page = {
        "command": "python benchmarks/faults.py --publish",
        "host": host,
        "seeds": {"tuned_on": TUNED_ON, "published": PUBLISHED},
        "scores": scores(results),
        "results": [vars(r) for r in results],
        "not_injected": dict(NOT_INJECTED),
    }
    (folder / "faults.json").write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")
    (ROOT / "docs" / "faults.md").write_text(_page(results, host), encoding="utf-8")


def _page(results: Sequence[Result], host: Mapping[str, str]) -> str:
    s = scores(results)
    machine = f"{host['device']}, {host['machine']}, Python {host['python']}, torch {host['torch']}"
    return f"""# Seeded faults

Generated by `python benchmarks/faults.py --publish`; do not edit. The benchmark puts each fault into a small model
and trains it under `ottava.watch`. `ottava diagnose` must name the rule of the fault first. Thresholds were tuned on
seed {_few(map(str, TUNED_ON))}, and for clean runs on seeds 111 to 137, too; this table has seeds
{_few(map(str, PUBLISHED))}.
{machine}, commit {host["commit"]}.

- Faulty runs: {s["faulty_runs"]}, of {s["rules_injected"]} rules. The right rule came first in {s["right_rule_first"]}
  (recall {s["recall"]:.1%}), and somewhere in the list in {s["right_rule_anywhere"]}.
- Faults that change the training (not only the log): {s["caused_runs"]} runs, recall {s["recall_of_caused"]:.1%}.
- Runs with a finding: {s["runs_with_a_finding"]}, right in {s["right_rule_first"]} (precision {s["precision"]:.1%}).
- Clean runs: {s["clean_runs"]}; a rule fired in {s["clean_runs_with_a_finding"]}.

The faults are ours, made to fit the rules, in models of 64 and 128 columns. The table shows that rules do what they
say and stay silent on healthy runs. It does not show how often they are right about your run.

Faults that other people invented come nearer to that. Halves H and I of `benchmarks/second_faults.py`, by authors who
did not know the rules, had 29 of 32 named right (91 %), with alarms in 2 of 18 clean runs; rules were mended between
the two halves. Two later sets by other such authors had 17 of 29 (59 %, a strict judge) and 32 of 38 (84 %, a lenient
judge), with alarms in 3 of 26 clean runs. In three runs the diagnosis called FP8 critical where FP8 was innocent. No
command in this repository repeats these two sets.

{table(results)}

## Not injected

| rule | why |
|---|---|
{chr(10).join(f"| {rule} | {why} |" for rule, why in NOT_INJECTED.items())}
"""


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def _line(result: Result) -> str:
    mark = "ok   " if result.right else "WRONG"
    said = ", ".join([result.first, *result.others]) if result.first else "nothing"
    what = f"{result.name} {result.strength:g} {result.size} {result.recipe} seed {result.seed}"
    return f"{mark} {what}: {result.expected or 'none'} / {said} ({result.seconds} s)"


if __name__ == "__main__":
    sys.exit(main())
