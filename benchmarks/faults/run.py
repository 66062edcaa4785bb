"""Is FP8 blamed where it is guilty, and only there? `python benchmarks/faults/run.py forecasts`.

Sets of faults and clean trainings in small models. Authors who did not know the debugger wrote the last four. All sets
have been looked at many times, so their counts are no evidence of anything unseen (benchmarks/blind.py is for that):
they show what a change of the diagnosis breaks. A case is right if casts are blamed exactly where its author says so;
the sentence is for a person to read. Runs are kept in --cache, so that another diagnosis trains nothing.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import warnings
from collections import Counter
from importlib import import_module
from pathlib import Path

import torch
from classic import CASES, Case
from models import run

from ottava.diagnose.diagnose import diagnose
from ottava.record.reader import Run

SETS = ("classic", "mixed", "shapes", "hugging_face", "loops", "senses", "forecasts")


def made(case: Case, cache: Path, *, twin: bool = False) -> Path:
    """The folder of a case's run, or of its BF16 twin; trains what the cache lacks."""
    folder = cache / f"{case.half}-{'-'.join(case.name.replace(',', '').replace('/', '-').split())}{'-twin' * twin}"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(folder, case.kind, case.recipe, case.inject, twin=twin, **case.options)
        (folder / "done").touch()
    return folder


def main() -> int:
    """Prints a line for each case, and counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--cache", type=Path, default=Path("runs/faults"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in SETS[: SETS.index(options.set)]:
        import_module(name)  # a set may build on earlier ones
    before = 0 if options.set == "classic" else len(CASES)
    import_module(options.set)
    counts: Counter[str] = Counter()
    for case in CASES[before:]:
        if options.only not in case.name:
            continue
        twin = Run.open(made(case, options.cache, twin=True)) if case.with_twin else None
        found = diagnose(Run.open(made(case, options.cache)), baseline=twin)
        blamed = any(f.stage in ("fp8", "software", "suspect") for f in found.findings)
        says = (
            ("alarm" if found.findings else "quiet")
            if not case.family
            else ("right" if blamed == case.fp8 else "accused" if blamed else "missed")
        )
        counts[says] += 1
        print(f"{says:8}{found.fp8:9}{case.name:40}{' '.join(case.family):26}{found.sentence}", flush=True)
    print(dict(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
