"""Does `diagnose` name faults that its rules were not made for? `python benchmarks/second_faults.py --half A`.

Other models than benchmarks/faults.py (GPT, Llama, ViT, Mixer, encoder-decoder, MoE) and other mechanisms. Rules may be
tuned on half A. Half B only reports: each look at it is counted in docs/LOG.md. A verdict is right if the headline (the
first finding; without findings the first note) names a right family of causes, the right place, and rightly blames FP8
or not. Runs are kept in --cache, so that another diagnosis trains nothing.

`--cure` executes the patch of the first remedy of each right FP8 finding and trains again with that recipe. A cure is
one of numbers: see `cured`.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import eighth_injections  # noqa: F401  # adds its cases
import fifth_injections  # noqa: F401  # adds its cases
import fifth_lab
import fourth_injections  # noqa: F401  # adds its cases
import numpy as np
import seventh_injections  # noqa: F401  # adds its cases
import sixth_injections  # noqa: F401  # adds its cases
import third_injections  # noqa: F401  # adds its cases
import torch
from second_injections import CASES, Case
from second_lab import run

import ottava
from ottava.diagnose.diagnose import Diagnosis, diagnose
from ottava.measure import limits
from ottava.numerics.formats import get_format
from ottava.record.reader import Run

FAMILIES: Mapping[str, str] = {
    "N1": "token row outlier", "N3": "token row outlier", "N19": "channel", "N8": "boundary", "G1": "noisy",
    "N4": "gradient", "N16": "gradient", "N5": "clip jump", "N6": "old_spike", "N7": "start", "N2": "growth",
    "N10": "growth", "N14": "growth", "N9": "logits", "M1": "margin_low", "M2": "margin_high", "M3": "frozen",
    "M4": "two_sites", "D1": "nonfinite_data", "D2": "absurd_data", "D3": "labels", "D4": "labels nonfinite_data",
    "F1": "nonfinite_compute", "TW": "twin", "L1": "lr", "L2": "lr", "O1": "loss_first", "L3": "vanish",
    "L4": "adam_eps", "L5": "clip_grad", "L6": "vanish lr_zero", "L7": "double_step", "L8": "no_zero_grad",
    "L9": "dead_units", "L10": "dead_experts", "L11": "router_fp8", "L12": "no_optimizer", "L13": "unconverted",
    "L14": "tied", "L15": "constant_loss", "L16": "eval_mode", "L17": "eval_mode", "L18": "eval_recipe",
    "L19": "same_batch", "L20": "labels", "L21": "start", "L22": "dtype", "D5": "absurd_data", "D6": "blank",
    "L23": "unconverted", "L24": "leak", "L25": "labels", "L26": "weight_decay", "L27": "no_gradient",
    "L28": "dead_units constant_loss", "L29": "lr", "L30": "frozen_parameters", "L31": "absurd_data",
    "L32": "lr", "L33": "absurd_data",
    "L34": "double_softmax", "N20": "token row outlier", "M5": "format noisy", "D7": "absurd_data nonfinite_data",
    "L35": "loss_scale leak", "L36": "sign", "L37": "optimizer_state", "L38": "double_step",
    "L39": "no_gradient vanish", "L40": "overwritten", "L41": "start symmetric", "L42": "dead_units", "L43": "vanish",
    "L44": "growth", "L45": "betas", "L46": "sign lr", "L47": "start", "L48": "nonfinite_compute", "L49": "dropout",
    "L50": "same_batch blank", "L51": "blank", "L52": "blank", "L53": "lr_zero frozen_parameters", "L54": "start",
    "L55": "frozen_parameters", "L56": "nonfinite_compute", "L57": "no_learning labels constant_loss",
    "L58": "labels", "L59": "lr", "L60": "frozen_parameters no_gradient",
}  # fmt: skip
"""Rule -> families of causes that its text names."""


@dataclass(frozen=True)
class Verdict:
    """What was said of a case."""

    case: str
    half: str
    says: str
    """right, place, wrong, silent, false alarm or quiet."""
    rule: str
    layer: str
    sentence: str


def made(case: Case, cache: Path) -> tuple[Path, Path | None]:
    """The folders of a case's run and twin; trains what the cache lacks."""
    return _trained(case, cache), _trained(case, cache, twin=True) if case.with_twin else None


def _trained(case: Case, cache: Path, *, twin: bool = False, patch: str = "") -> Path:
    """The folder of a case's run, of its BF16 twin, or of the run after a patch."""

    def remedy(lab: Any) -> Any:
        names: dict[str, Any] = {"ottava": ottava, "model": lab.model, "recipe": lab.recipe}
        exec(patch, names)
        return names["recipe"]

    source = "" if case.inject is None else inspect.getsource(case.inject)
    key = hashlib.sha256(repr((case.name, source, sorted(case.options.items()), str(case.recipe))).encode()).hexdigest()
    end = "-twin" if twin else f"-cured-{hashlib.sha256(patch.encode()).hexdigest()[:10]}" if patch else ""
    folder = cache / f"{case.name.replace(' ', '-').replace(',', '')}-{key[:10]}{end}"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        options: dict[str, Any] = {**case.options, **({"remedy": remedy} if patch else {})}
        run(folder, case.kind, case.recipe, case.inject, twin=twin, **options)
        (folder / "done").touch()
    return folder


def judged(case: Case, found: Diagnosis) -> Verdict:
    """Compares a diagnosis with what the case says."""
    notes = getattr(found, "notes", [])
    first: Any = (found.findings or notes or [None])[0]
    rule, layer = (first.id, ", ".join(first.layers[:3])) if first else ("", "")
    if not case.family:
        says = "false alarm" if found.findings else "noted" if notes else "quiet"
    elif first is None:
        says = "silent"
    else:
        blames = first.stage not in ("data", "training")
        right = bool(set(FAMILIES.get(rule, "").split()) & set(case.family)) and blames == case.fp8
        place = not case.place or any(case.place in name for name in (*first.layers[:2], found.sentence))
        says = "right" if right and place else "place" if case.place and place and blames == case.fp8 else "wrong"
    return Verdict(case.name, case.half, says, rule, layer, found.sentence)


def cured(case: Case, found: Diagnosis, cache: Path) -> str:
    """Trains again with the first remedy, and compares numbers with the BF16 twin of the same fault.

    "cured": the rule is silent about these layers, their casts of the finding's tensors clear the floors (a cast that
    is gone does), and the loss is the twin's. "remains": the rule fires again. "casts" or "loss": only these are not
    cured. "advice": the remedy changes no recipe. "fails": the patch does not run.
    """
    first = found.findings[0]
    patch = next((r["patch"].get("ottava", "") for r in first.remedies[:1]), "")
    if "recipe" not in patch:
        return "advice"
    try:
        after = Run.open(_trained(case, cache, patch=patch))
    except Exception as error:  # a patch that does not run is a finding about the patch
        return f"fails: {type(error).__name__}: {error}"
    again = diagnose(after).findings
    if any(f.id == first.id and (not first.layers or set(f.layers) & set(first.layers)) for f in again):
        return "remains"
    before, twin = (Run.open(_trained(case, cache, twin=twin)) for twin in (False, True))
    gaps = [_gap(run, twin) for run in (before, after)]
    said = f"loss {gaps[0]:+.1%} -> {gaps[1]:+.1%} of the BF16 twin's, which changes by {_change(twin):.1%} a step"
    worst = _worst_cast(after, first)
    if worst:
        return f"casts: {worst}; {said}"
    return f"{'cured' if gaps[1] <= max(_LOSS, gaps[0] / 5, _change(twin)) else 'loss'}: {said}"


_LOSS = 0.03
"""Largest gap to the BF16 twin of a cured run: these runs have 16 steps, and clean ones lie up to 2 % apart."""


def _change(run: Run) -> float:
    """How much the loss of a run usually changes from step to step, as a share of it."""
    loss = np.asarray(run.steps["loss"])
    return float(np.median(np.abs(np.diff(loss)))) / abs(float(np.mean(loss)))


def _gap(run: Run, twin: Run) -> float:
    """The mean loss of the last quarter above the twin's, as a share of it."""
    ends = [float(np.mean(r.steps["loss"][-max(len(r.steps["loss"]) // 4, 1) :])) for r in (run, twin)]
    return (ends[0] - ends[1]) / abs(ends[1])


def _worst_cast(run: Run, finding: Any) -> str:
    """The first statistic by which a quarter of a cast's looks are below its floor; "" if there is none."""
    table = run.table()
    table = table.take(np.flatnonzero(table["source"] != "hook"))
    for key, rows in table.groups():
        if key.layer not in finding.layers or key.tensor not in finding.tensors:
            continue
        limit = limits.warn_db(get_format(key.format)) - 1
        for name in ("row_sqnr_p50_db", "channel_sqnr_p50_db", "sqnr_db"):
            if float(np.nanpercentile(rows.metric(name), 25)) < limit:
                return f"{key.layer}.{key.tensor} {name} {np.nanpercentile(rows.metric(name), 25):.1f}"
    return ""


def main() -> int:
    """Prints a line for each case, totals, and the rules that were said in place of others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", default="A", choices=tuple("ABCDEFGHI"))
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--cache", type=Path, default=Path("runs/second-lab"))
    parser.add_argument("--cure", action="store_true", help="train again with the first remedy")
    parser.add_argument("--json", type=Path, help="write verdicts here, too")
    options = parser.parse_args()
    if options.half == "F" and (sentence := fifth_lab.missing()):
        print(sentence)
        return 1
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    verdicts, cures = [], Counter[str]()
    for case in CASES:
        if case.half != options.half or options.only not in case.name:
            continue
        own, twin = made(case, options.cache)
        found = diagnose(Run.open(own), baseline=None if twin is None else Run.open(twin))
        verdict = judged(case, found)
        verdicts.append(verdict)
        print(
            f"{verdict.says:12}{verdict.rule:5}{case.name:38}{' '.join(case.family):22}{verdict.sentence}", flush=True
        )
        if options.cure and verdict.says == "right" and case.fp8:
            cure = cured(case, found, options.cache)
            cures[cure.partition(":")[0]] += 1
            print(f"            {cure}; {found.findings[0].remedies[0]['text'] if found.findings[0].remedies else ''}")
    print(json.dumps(Counter(v.says for v in verdicts)))
    if options.cure:
        print(json.dumps(cures))
    if options.json:
        options.json.write_text(json.dumps([vars(v) for v in verdicts], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
