"""`ottava what-if`: predicts underflow and error of every recipe from the record of one run."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ottava.base.text import to_json

if TYPE_CHECKING:
    from ottava.diagnose.what_if import Prediction

SCHEMA_VERSION = 1


def what_if(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a watched run.")],
    recipes: Annotated[
        str | None, typer.Option("--recipes", metavar="A,B", help="Recipes by name; default: every FP8 recipe.")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers", metavar="PATTERN", help="Only these layers, with numbers of every tensor: *.down_proj"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Predict the error of every recipe in every tensor of a run, without another run.

    what-if computes underflow, SQNR and element SQNR (every element has the same weight) from the recorded histograms.
    A recipe clears a layer if no tensor misses a floor in a recorded step: at most 1 % underflow, SQNR of 25 dB in E4M3
    and 20 in E5M2, element SQNR 5 dB below that. The last table names the cheapest recipe that clears each layer.
    Recipes with transforms or rules for block scales are cast for real, on tensors that the watch has dumped whole
    (dump: {steps: [100, 500], rows: 0}).

    Exit code 0; 1 if no recipe clears some layer; 2 for an unknown recipe or a pattern that matches no layer; 4 if the
    folder has no histograms.
    """
    from ottava.diagnose.recast import recast
    from ottava.diagnose.what_if import cheapest, default_recipes, predict, summary
    from ottava.recipe import get_recipe
    from ottava.record.amaxes import recorded
    from ottava.record.reader import Run
    from ottava.record.schema import RunError

    candidates = [get_recipe(name.strip()) for name in recipes.split(",")] if recipes else list(default_recipes())
    opened = Run.open(run)
    table = opened.table(phase=None)
    if layers is not None:
        names = {name for name in table["layer"] if fnmatchcase(name, layers)}
        if not names:
            examples = ", ".join(list(dict.fromkeys(table["layer"]))[:8])
            raise ValueError(f"--layers {layers!r} matches no layer of {run}; it has {examples}, ...")
        table = table.where(layer=names)
    predictions = recast(run, predict(table, candidates, recording=recorded(run)), candidates)
    if not predictions:
        raise RunError(f"{run}: holds no histograms to predict from ({table.not_recorded() or 'of other layers only'})")
    best = cheapest(predictions)
    values = {
        "schema_version": SCHEMA_VERSION,
        "run_dir": str(run),
        "recipes": summary(predictions),
        "cheapest": best,
        "predictions": [prediction.to_dict() for prediction in predictions],
    }
    typer.echo(to_json(values) if as_json else _text(run, predictions, best, detailed=layers is not None))
    return 1 if None in best.values() else 0


def _text(run: Path, predictions: list[Prediction], best: dict[str, str | None], *, detailed: bool) -> str:
    from ottava.diagnose.what_if import HIGH_PRECISION, summary
    from ottava.measure.layer_names import symbol

    steps = max(prediction.steps for prediction in predictions)
    lines = [f"{run}: {steps:,} recorded steps, {len(best)} layers; predicted from histograms", ""]
    head = f"{'underflow':>9}  {'SQNR':>7}  {'element':>7}"
    lines.append(f"{'recipe':18}  {'clears':>7}  {'worst tensor':22}  {head}")
    for row in summary(predictions):
        share = f"{row['clears']}/{row['layers']}"
        numbers = _numbers(row["underflow_pct"], row["sqnr_db"], row["element_sqnr_db"])
        lines.append(f"{row['recipe']:18}  {share:>7}  {_short(row['worst'] or '-', 22):22}  {numbers}")
    lines += ["(clears: of all layers; SQNR in dB; element: every element weighted alike)"]
    lines += ["", "cheapest recipe that clears the floors in every recorded step:"]
    groups: dict[str, list[str]] = {}
    for layer, name in best.items():
        groups.setdefault(name or "none: keep in BF16", []).append(layer)
    for name, members in groups.items():
        shown = ", ".join(members[:6]) + (f", ... ({len(members)} layers)" if len(members) > 6 else "")
        lines.append(f"  {name}: {shown}")
    if detailed:
        lines += ["", f"{'layer':32}  {'tensor':6}  {'recipe':20}  {head}"]
        lines += [_row(prediction) for prediction in predictions if prediction.spec != HIGH_PRECISION]
    elif any(not prediction.clears for prediction in predictions):
        lines += ["", "floors missed (worst first):"]
        misses = sorted((p for p in predictions if not p.clears and p.steps), key=lambda p: p.element_sqnr_db)
        lines += [f"  {p.layer} {symbol(p.tensor, p.direction)}  {p.recipe}: {p.why}" for p in misses[:8]]
        lines += [f"  ... {len(misses) - 8} more; see --layers PATTERN or --json"] if len(misses) > 8 else []
    return "\n".join(lines)


def _row(p: Prediction) -> str:
    from ottava.measure.layer_names import symbol

    mark = "ok" if p.clears else p.why
    numbers = _numbers(p.underflow_pct, p.sqnr_db, p.element_sqnr_db)
    return f"{_short(p.layer, 32):32}  {symbol(p.tensor, p.direction):6}  {p.recipe:20}  {numbers}  {mark}"


def _numbers(underflow: float | None, *decibels: float | None) -> str:
    cells = [f"{underflow:7.2f} %" if underflow is not None and not math.isnan(underflow) else f"{'-':>9}"]
    cells += [f"{value:7.1f}" if value is not None and not math.isnan(value) else f"{'-':>7}" for value in decibels]
    return "  ".join(cells)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[3 - width :]
