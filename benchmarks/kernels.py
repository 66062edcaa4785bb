"""`ottava certify` on kernels of others: `python benchmarks/kernels.py look SET | sweep | costs`.

    look SET   every kernel of benchmarks/blind/SET, 100 cases each, seed 0; a JSON line each, beside the truth
    sweep      every ready adapter on new shapes, those of Triton interpreted; alarms and different shapes by library
    costs      seconds of CPU and peak memory of each command of the room; the table of docs/certify.md

`sweep` writes benchmarks/results/kernels-sweep.json. It ends when `--shapes` different shapes have been judged, or
behind the adapter that runs when `--minutes` have passed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ottava.prove.certificate import certify
from ottava.prove.ready import load, ready

HERE = Path(__file__).resolve().parent
_CASES = {"linear": 40, "attention": 40, "optimizer": 24}
"""Of each adapter, where a case takes long; others have 60."""


def look(name: str, only: str) -> list[dict[str, Any]]:
    """What certify says of each kernel of a set."""
    folder, rows = HERE / "blind" / name, []
    sys.path.insert(0, str(folder))
    for case in json.loads((folder / "public.json").read_text("utf-8")):
        if only and not case["name"].startswith(tuple(only.split(","))):
            continue
        file, _, function = case["adapter"].rpartition(":")
        found = certify(load(f"{Path(file).stem}:{function}"), count=100)
        said = None if found.explained is None else f"{found.explained['hypothesis']}: {found.explained['sentence']}"
        row = {key: case[key] for key in ("name", "kind", "clean", "cause")}
        rows.append(row | {"verdict": found.verdict, "explained": said, "seconds": round(found.seconds, 1)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def sweep(shapes: int, seed: int, minutes: float) -> dict[str, Any]:
    """How many different shapes each library's kernels met, and which were called wrong."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    importlib.import_module("triton_mode")
    importlib.import_module("kernels.triton.interpreter").install()
    counts: dict[str, dict[str, Any]] = {}
    alarms, everything, began = [], set(), time.perf_counter()
    names = list(ready())
    for turn in itertools.count():
        for place, name in enumerate(names):
            if time.perf_counter() - began > 60 * minutes:
                break
            library = "triton" if ".triton" in name else name.partition(".")[0]
            mine = counts.setdefault(library, {"adapters": set(), "cases": 0, "shapes": set(), "alarms": 0})
            if turn and (name not in mine["adapters"] or library == "triton" or len(everything) >= shapes):
                continue  # an interpreter takes a second a case
            made = load(name)
            told = made.kind, *made.what.items()
            met: set[Any] = set()

            def noted(*tensors: Any, function: Any = made.function, met: set[Any] = met) -> Any:
                result = function(*tensors)
                met.add(tuple(tuple(x.shape) for x in tensors if isinstance(x, torch.Tensor)))
                return result

            count = 12 if library == "triton" else _CASES.get(made.kind, 60)
            found = certify(replace(made, function=noted), count=count, seed=seed + 1000 * turn + place, listed=False)
            judged = found.cases - found.refused
            mine["cases"] += judged
            if judged:
                mine["adapters"].add(name)
            new = {(told[0], one) for one in met}
            mine["shapes"] |= new
            everything |= new
            if not found.good:
                mine["alarms"] += 1
                alarms.append({"adapter": name, "seed": seed + 1000 * turn + place, "said": str(found)})
                print(found, flush=True)
            print(f"{len(everything):6} shapes, {len(alarms)} alarms, {name}", file=sys.stderr, flush=True)
        if len(everything) >= shapes or time.perf_counter() - began > 60 * minutes:
            break
    rows = {
        library: {key: len(value) if isinstance(value, set) else value for key, value in mine.items()}
        for library, mine in counts.items()
    }
    total = {"shapes": len(everything), "cases": sum(row["cases"] for row in rows.values()), "alarms": len(alarms)}
    facts = {"seed": seed, "torch": torch.__version__, "total": total, "libraries": rows, "alarms": alarms}
    return facts | {"minutes": round((time.perf_counter() - began) / 60, 1)}


_SCRIPT = """
import sys, torch, ottava
from torch import nn
torch.manual_seed(0)
blocks = (nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(2))
model = nn.Sequential(nn.Embedding(256, 256), *blocks)
ottava.convert(model.bfloat16(), "rowwise" if "--rowwise" in sys.argv else "tensorwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(10):
    model(torch.randint(256, (4, 64))).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_COMMANDS = (
    ("ottava audit -- train.py", "a training of ten steps, 0.6 million parameters, 256 tokens: every GEMM audited"),
    ("ottava check train.py -- --rowwise", "the first step of that training under two recipes: six runs"),
    ("ottava certify ottava.gemm.tensorwise.bfloat16", "100 cases of a GEMM"),
    ("ottava certify ottava.linear.tensorwise", "100 cases of a linear layer"),
    ("ottava certify torch.encode.e4m3 --all", "all FP32 numbers through torch's cast to E4M3"),
    ("ottava order torch.mm -k 256 --dtype BF16", "the order of 256 additions"),
)


def costs() -> None:
    """Each command in a process of its own, with the start of Python; what it starts counts, too."""
    print("| command | what it does | CPU time | peak memory |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(_SCRIPT, "utf-8")
        for command, what in _COMMANDS:
            words = [sys.executable, "-m", *command.split()]
            child = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL)
            _, status, used = os.wait4(child.pid, 0)
            assert os.waitstatus_to_exitcode(status) in (0, 1), command
            seconds, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
            print(f"| `{command}` | {what} | {seconds:.1f} s | {peak:,.0f} MiB |", flush=True)


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("name", nargs="?", default="kernels")
    parser.add_argument("--only", default="")
    parser.add_argument("--shapes", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.what == "look":
        look(asked.name, asked.only)
    elif asked.what == "costs":
        costs()
    else:
        (HERE / "results" / "kernels-sweep.json").write_text(
            json.dumps(sweep(asked.shapes, asked.seed, asked.minutes), indent=1) + "\n", "utf-8"
        )


if __name__ == "__main__":
    main()
