"""First looks at blind sets: `python benchmarks/blind.py SET [--only NAME]`; `--count` adds up all judged ones.

`--retrain` diagnoses the runs of a look again and trains each fault once more with the first remedy, where a watch can
make that change (`ottava.remedy.cure`); losses, or why not, go to results/cures.json. That is no first look. Cured:
four fifths of the gap to the good run are gone. `--laws` counts how often each law was an answer over all sets.

A set is a folder of benchmarks/blind with training scripts and truth.yaml. Its author read neither laws nor other sets,
and the set was committed before its first run. Each script runs under `ottava watch` as its users would run it,
`SCRIPT good` and `SCRIPT bad`; a clean case runs `SCRIPT good` alone, and a finding or no answer is an alarm. What
`ottava diagnose --json` said is stored beside the truth in benchmarks/results/blind-SET.json, and what it says of the
good run of a fault, alone. A judge who did not write the debugger adds "right" or "wrong". What is said of FP8 is
judged here: guilty where the truth says so, and nowhere else.

    truth.yaml    - name: lr_too_high          the script, without .py
                    fp8: false                 whether the casts do it
                    truth: the learning rate is 300 times too high
                    place: ""                  a layer or parameter, where there is one
                    ranks: 1                   processes, by torchrun
                    clean: false
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from ottava.base.text import finite
from ottava.diagnose.laws import LAWS
from ottava.record.reader import Run
from ottava.remedy.cure import retrain

HERE = Path(__file__).resolve().parent
RUNS = HERE.parent / "runs" / "blind"


def ran(script: Path, word: str, ranks: int, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs a script under the watch."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "ottava", "watch", "--out", str(folder)]
    command += [*options, "--", str(script), word]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=script.parent, env=env, capture_output=True, text=True, timeout=900)


def watched(script: Path, word: str, ranks: int, folder: Path) -> tuple[Path, str]:
    """Runs a script under the watch once; returns its run folder and the end of its error, if it failed."""
    if not (folder / "watch.json").is_file():
        done = ran(script, word, ranks, folder)
        if done.returncode and not (folder / "watch.json").is_file():
            return folder, done.stderr[-400:]
    return folder, ""


def answered(run: Path, good: Path | None) -> dict[str, Any]:
    """What `ottava diagnose` says of a run, and how long it took in CPU seconds."""
    command = [sys.executable, "-m", "ottava", "diagnose", str(run), "--json", "--fail-on", "never"]
    command += ["--baseline", str(good)] if good is not None else []
    before = time.process_time(), os.times().children_user
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    seconds = os.times().children_user - before[1]
    if done.returncode:
        return {"error": done.stderr[-400:].replace(f"{RUNS}/", ""), "seconds": seconds}
    values = json.loads(done.stdout)
    keys = ("verdict", "sentence", "fp8", "event", "tried")
    found = [{k: f[k] for k in ("id", "title", "stage", "severity", "cause", "layers")} for f in values["findings"][:3]]
    remedies = [
        {k: r[k] for k in ("name", "text", "patch", "trial")} for f in values["findings"][:1] for r in f["remedies"][:2]
    ]
    return {**{k: values[k] for k in keys}, "findings": found, "remedies": remedies, "seconds": round(seconds, 2)}


def look(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """One case: what is said of it with the good run beside it, and alone."""
    script, ranks = folder / f"{case['name']}.py", int(case.get("ranks") or 1)
    at = RUNS / folder.name
    good, broken = watched(script, "good", ranks, at / f"{case['name']}-good")
    result: dict[str, Any] = {**case}
    if case.get("clean"):
        result["alone"] = answered(good, None) if not broken else {"error": broken}
        result["alarm"] = bool(result["alone"].get("findings")) or "error" in result["alone"]
        return result
    bad, failed = watched(script, "bad", ranks, at / f"{case['name']}-bad")
    if broken or failed:
        return {**result, "error": broken or failed}
    result["beside"], result["alone"], result["good"] = answered(bad, good), answered(bad, None), answered(good, None)
    for how in ("beside", "alone"):
        accused = any(f["stage"] in ("fp8", "software") for f in result[how].get("findings", []))
        result[f"fp8_{how}"] = "right" if accused == bool(case.get("fp8")) else "accused" if accused else "missed"
    return result


def retrained(folder: Path, case: dict[str, Any]) -> dict[str, Any] | None:
    """What the first remedy of the answer of now, beside the good run, reached; None where nothing was offered."""
    at = RUNS / folder.name
    bad, good = (at / f"{case['name']}-{word}" for word in ("bad", "good"))
    if case.get("clean") or not all((run / "watch.json").is_file() for run in (bad, good)):
        return None
    said = answered(bad, good)
    if not (offered := said.get("remedies")):
        return None
    about = {"name": case["name"], "answer": said["findings"][0]["title"], "remedy": offered[0]["name"]}
    try:
        came = retrain(Run.open(bad), offered[0], at / f"{case['name']}-cure", Run.open(good))
    except ValueError as error:
        return {**about, "why": str(error)}
    about = {**about, "trial": offered[0]["trial"], **asdict(came), "cured": came.cured}
    if came.cured is None:  # the complaint is what the script prints in its last line
        cure = ["--config", str(at / f"{case['name']}-cure.yaml")]
        script, ranks = folder / f"{case['name']}.py", int(case.get("ranks", 1))
        about["printed"] = {w: printed(script, w, ranks) for w in ("bad", "good")} | {
            "cure": printed(script, "bad", ranks, *cure)
        }
        came = replace(came, **about["printed"])
    return {**about, "cured": bool(came.cured)}


def printed(script: Path, word: str, ranks: int, *options: str) -> float:
    """The number that a script prints last, under a watch with options; the watch takes no part in it."""
    with tempfile.TemporaryDirectory() as folder:
        done = ran(script, word, ranks, Path(folder, "run"), *options)
    return float(next(line for line in reversed(done.stdout.splitlines()) if "final" in line).split()[-1])


def laws() -> dict[str, str]:
    """Finding -> how often it was a first answer to a fault, how often one in a clean run, and how often it came later,
    over all sets as they were last looked at."""
    found: dict[str, Counter[str]] = {}
    for path in sorted((HERE / "results").glob("blind-*.json")):
        for case in json.loads(path.read_text(encoding="utf-8")):
            for how in ("beside", "alone"):
                for i, one in enumerate((case.get(how) or {}).get("findings") or ()):
                    judged = case.get("judged", {}).get(how, "not judged")
                    word = "later" if i else "alarm" if case.get("clean") else f"first, {judged}"
                    found.setdefault(one["id"], Counter())[word] += 1
    names = sorted({law.id for law in LAWS} | {*found})
    return {name: ", ".join(f"{word} {n}" for word, n in sorted(found.get(name, {}).items())) or "0" for name in names}


def counted() -> dict[str, tuple[int, int]]:
    """Stage of a first answer -> (right, asked) over all judged first looks: `diagnose.CONFIDENCE`. A finding in a
    clean run is a wrong answer."""
    right, asked = Counter[str](), Counter[str]()
    for path in sorted((HERE / "results").glob("blind-*.json")):
        for case in json.loads(path.read_text(encoding="utf-8")):
            for how in ("beside", "alone"):
                found, judged = (
                    (case.get(how) or {}).get("findings"),
                    case.get("judged", {} if case.get("clean") else None),
                )
                if found and judged is not None:
                    asked[found[0]["stage"]] += 1
                    right[found[0]["stage"]] += judged.get(how) == "right"
    return {stage: (right[stage], asked[stage]) for stage in sorted(asked)}


def main() -> int:
    """Looks at every case of a set and writes what was said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", nargs="?", choices=sorted(p.name for p in (HERE / "blind").iterdir() if p.is_dir()))
    parser.add_argument("--count", action="store_true", help="print (right, asked) by stage, and look at nothing")
    parser.add_argument("--laws", action="store_true", help="print the answers of each law over all sets")
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--retrain", action="store_true", help="train with the first remedies, after a first look")
    options = parser.parse_args()
    if options.laws:
        print(*(f"{name:6} {said}" for name, said in laws().items()), sep="\n")
        return 0
    if options.count or options.set is None:
        print(counted())
        return 0
    folder = HERE / "blind" / options.set
    out = HERE / "results" / f"blind-{options.set}.json"
    results = []
    if options.retrain:
        cases = [case for case in yaml.safe_load((folder / "truth.yaml").read_text()) if options.only in case["name"]]
        tried = [one for case in cases if (one := retrained(folder, case)) is not None]
        ended = [one["cured"] for one in tried if "cure" in one]
        print(*tried, sep="\n")
        print(f"{sum(map(bool, ended))} of {len(ended)} cured, {len(tried) - len(ended)} cannot be tried from outside")
        path = HERE / "results" / "cures.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        path.write_text(json.dumps(finite({**known, options.set: tried}), indent=1) + "\n", encoding="utf-8")
        return 0
    for case in yaml.safe_load((folder / "truth.yaml").read_text(encoding="utf-8")):
        if options.only not in case["name"]:
            continue
        results.append(look(folder, case))
        said = results[-1].get("beside") or results[-1].get("alone") or {}
        mark = results[-1].get("fp8_beside") or ("ALARM" if results[-1].get("alarm") else "quiet")
        print(
            f"{mark:8} {case['name']:28} {case.get('truth', 'clean')}\n{'':9}{said.get('sentence') or results[-1]}",
            flush=True,
        )
    counts = Counter(r.get("fp8_beside") or ("alarm" if r.get("alarm") else "quiet") for r in results)
    print(json.dumps(counts))
    if not options.only:
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
