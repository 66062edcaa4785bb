"""Compares a good run with a bad one: `python examples/good_bad_run.py [FOLDER]`.

Trains the byte model twice in FP8, from the same weights and on the same batches, under a watch. The bad run differs in
one number: its learning rate is far too high. `compare` names the setting that differs, the tensor that left the good
run's band first, and the most damaged tensors. `diagnose` names the learning rate, and says what trying the casts
told about FP8. The folders stay for `ottava compare`, `ottava diagnose`, `ottava what-if` and `ottava report`.
A minute on one CPU core.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import ottava
from ottava.diagnose.compare import compare
from ottava.diagnose.diagnose import diagnose
from ottava.measure.layer_names import SYMBOLS
from ottava.record.reader import Run
from ottava.train.config import load_config
from ottava.train.data import ByteCorpus
from ottava.train.model import ByteTransformer, loss

SETTINGS = load_config(None, ["model.layers=3"])
LEARNING_RATES = {"good": 2e-3, "bad": 1e-1}
RECIPE = "tensorwise"
BATCH, LENGTH = 12, 64


def train(folder: Path, learning_rate: float, steps: int) -> Run:
    """One watched run."""
    torch.manual_seed(0)
    corpus = ByteCorpus.load(SETTINGS.data)
    model = ByteTransformer(SETTINGS.model, LENGTH)
    ottava.convert(model, RECIPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), fused=True)
    with ottava.watch(model, folder, every=5) as session:
        session.describe(config={"recipe": RECIPE, "lr": learning_rate, "batch": BATCH, "length": LENGTH, "seed": 0})
        for step in range(1, steps + 1):
            inputs, targets = corpus.batch(seed=0, step=step, batch_size=BATCH, length=LENGTH)
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(model, inputs, targets)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
    return Run.open(folder)


def damage(good: Run, bad: Run) -> list[dict[str, Any]]:
    """The highest underflow and the lowest row SQNR of every cast in both runs; the bad run's underflow sorts."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for name, run in (("good", good), ("bad", bad)):
        for slot, table in run.table().where(direction="row").groups():
            row = rows.setdefault((slot.layer, slot.tensor), {"tensor": f"{slot.layer}.{SYMBOLS[slot.tensor]}"})
            row[f"{name}_underflow"] = float(table.metric("underflow_pct").max())
            row[f"{name}_sqnr"] = float(table.metric("row_sqnr_p50_db").min())
    return sorted(rows.values(), key=lambda row: -row["bad_underflow"])


def main(folder: str | Path = "runs/good-bad", steps: int = 80) -> dict[str, Any]:
    """Trains, compares, diagnoses and prints. Returns damage, comparison and diagnosis."""
    torch.set_num_threads(1)  # the model is small: a second thread would only wait
    good, bad = (train(Path(folder) / name, rate, steps) for name, rate in LEARNING_RATES.items())
    shown = range(0, steps, max(1, steps // 8))
    print(f"{'step':18}" + "".join(f"{step + 1:>8}" for step in shown))
    for name, run in (("good", good), ("bad", bad)):
        rate = f"loss, {name}, lr {LEARNING_RATES[name]:g}"
        print(f"{rate:18}" + "".join(f"{run.steps['loss'][step]:8.2f}" for step in shown))
    rows = damage(good, bad)
    print(f"\n{'worst over the run':30}{'row SQNR p50, dB':>20}{'underflow, %':>20}")
    print(f"{'':30}{'good':>10}{'bad':>10}{'good':>10}{'bad':>10}")
    for row in rows[:6]:
        numbers = (row["good_sqnr"], row["bad_sqnr"], row["good_underflow"], row["bad_underflow"])
        print(f"{row['tensor']:30}" + "".join(f"{number:10.1f}" for number in numbers))
    comparison = compare(good, bad).to_dict()
    diagnosis = diagnose(bad, baseline=good).to_dict()
    print(f"\ncompare: {comparison['verdict']}")
    print(f"\ndiagnose: {diagnosis['sentence']}")
    for finding in diagnosis["findings"][:4]:
        where = ", ".join(finding["layers"][:3]) + (", ..." if len(finding["layers"]) > 3 else "")
        print(f"  {finding['severity']:8}  {finding['id']:5} {finding['title']} ({where})")
    print(f"\nThe runs are in {folder}: ottava report {folder}/bad --baseline {folder}/good")
    return {"damage": rows, "comparison": comparison, "diagnosis": diagnosis}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="runs/good-bad", help="folder of the two runs [runs/good-bad]")
    main(parser.parse_args().folder)
