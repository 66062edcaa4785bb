"""False alarms: `python benchmarks/clean.py [NAME ...]` trains small clean trainings and diagnoses each alone.

Every training works and is meant as it is: nothing here is a fault. So each finding is a false alarm, and each answer
that blames FP8 an accusation of the innocent. Every training runs in BF16 by torch.autocast and under recipes of FP8. A
debugger without a false alarm in n runs has a rate below 3 / n with 95 % confidence. Written to results/clean.json.
`--recipes nvfp4` has one alarm that is true: `remembers_keys` ends far above its loss in BF16.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import clean_kinds
import clean_losses
import torch
from clean_trainings import CLEAN, Low

import ottava
from ottava.diagnose.diagnose import diagnose

assert clean_losses  # adds its trainings
assert clean_kinds
HERE = Path(__file__).resolve().parent
RECIPES = ("bf16", "tensorwise", "rowwise", "blockwise", "delayed")


def trained(name: str, recipe: str, folder: Path, seed: int = 0) -> Any:
    """The diagnosis of one training of `CLEAN` under a recipe."""
    torch.manual_seed(seed)
    with ottava.watch(None, folder):
        CLEAN[name](Low(recipe))
    return diagnose(ottava.debug.Run.open(folder))


def main() -> int:
    """Trains and diagnoses, and writes what was said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="trainings; none: all")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=(*RECIPES, "nvfp4"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for name in options.names or CLEAN:
        for recipe in options.recipes:
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                said = trained(name, recipe, Path(folder) / "run", options.seed)
                loss = ottava.debug.Run.open(Path(folder) / "run").steps["loss"]
                end = round(float(loss[-(len(loss) // 5) :].mean()), 4)
            one = {"training": name, "recipe": recipe, "alarm": bool(said.findings), "fp8": said.fp8}
            one |= {"loss": end, "sentence": said.sentence, "seconds": round(time.perf_counter() - began, 1)}
            results.append(one)
            print("ALARM" if one["alarm"] else "quiet", name, recipe, end, said.sentence[:330], flush=True)
    alarms, accused = sum(r["alarm"] for r in results), sum(r["fp8"] == "guilty" for r in results)
    print(f"{len(results)} clean runs: {alarms} alarms, {accused} accusations of FP8")
    if not options.names:
        about = {"runs": len(results), "alarms": alarms, "accusations": accused, "seed": options.seed}
        text = json.dumps({**about, "results": results}, indent=1) + "\n"
        (HERE / "results" / "clean.json").write_text(text, encoding="utf-8")
    return int(alarms + accused > 0)


if __name__ == "__main__":
    sys.exit(main())
