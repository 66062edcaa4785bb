"""The remedies of a finding, in the order of what they would cure.

A remedy that changes a recipe says so as data (`change` in rules.yaml). The recipe of the run is changed alike, and
`what_if` predicts the finding's casts under it from the record. So `diagnose` and `ottava what-if` cannot contradict
each other. A remedy that changes nothing is left out; so is one that cures nothing, if another one does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ottava.debug.analysis.patches import render, target_layers
from ottava.debug.analysis.rows import Context
from ottava.debug.analysis.rules import Remedy
from ottava.debug.analysis.what_if import HIGH_PRECISION, Prediction, predict, thinned
from ottava.debug.recording import recorded
from ottava.debug.run.reader import Table
from ottava.debug.run.schema import symbol
from ottava.formats import get_format
from ottava.recipe import CELL_OF, GEMMS, RECIPES, TENSORS, Recipe, get_recipe

_CASTS, _LOOKS = 6, 2
"""Casts of a finding that are predicted, and looks at each beside its worst ones."""
_UNKNOWN = 0.5
"""Place of a remedy without a prediction among those with one: after what cures, before what does not."""


@dataclass(frozen=True)
class Rung:
    """A remedy with its prediction."""

    remedy: Remedy
    cure: float | None
    """Share of the finding's casts that would clear the floors of what-if; None: unknown."""
    leaves: str
    """What the prediction says in words; "" if there is none."""


def ladder(
    remedies: Sequence[Remedy], context: Context, casts: Sequence[tuple[str, str]], recipe: str, **place: Any
) -> list[dict[str, Any]]:
    """Remedies as plain values, see `patches.render`, with "cure" and "predicted".

    Args:
        casts: (layer, tensor) of the finding, worst first; none for a finding about the run.
        recipe: name of the finding's recipe.
        place: id, layers and tensor, for `render`.
    """
    actual = context.recipes.get(recipe)
    table = _table_of(context, casts[:_CASTS])
    rungs = []
    for remedy in remedies:
        changed_to = None if actual is None else changed(actual, remedy, context, place["layers"], place["tensor"])
        if remedy.change and actual is not None:
            layers = {layer for layer, _ in casts} or set(context.table["layer"])
            if changed_to is None or not any(_differ(actual, changed_to, layer) for layer in layers):
                continue
        cure, leaves = _predicted(context, table, changed_to if remedy.change else None)
        rungs.append(Rung(remedy, cure, leaves))
    if any(rung.cure for rung in rungs):
        rungs = [rung for rung in rungs if rung.cure is None or rung.cure > 0]
    rungs.sort(key=lambda r: (-round(_UNKNOWN if r.cure is None else r.cure, 2), r.remedy.rung))
    return [
        {**render(rung.remedy, context, recipe=recipe, **place), "cure": rung.cure, "predicted": rung.leaves}
        for rung in rungs
    ]


def changed(actual: Recipe, remedy: Remedy, context: Context, layers: Sequence[str], tensor: str) -> Recipe | None:
    """The recipe after a remedy; None if the remedy does not fit it.

    Example: see the tests; `change` in rules.yaml has one key of:
        recipe: NAME, for all layers      layers: NAME, for the finding's layers    gemms: operand, or names of GEMMs
        margin, amax_history_len: of predicted scales; "+1" adds                   gradients: format of dY's cells
    """
    change = dict(remedy.change)
    globs = target_layers(remedy, context, layers)[1]
    if "recipe" in change:
        return RECIPES[change["recipe"]]
    if "margin" in change or "amax_history_len" in change:
        predicted = [s for t in TENSORS for s in actual.cells(t) if s is not None and s.predicted]
        if not predicted:
            return None
        if change.get("margin") == "+1":
            change["margin"] = predicted[0].margin + 1
        return get_recipe(actual, **change)
    for pattern in globs:
        if "layers" in change:
            actual = actual.override(pattern, change["layers"])
        elif "gemms" in change:
            operand = [CELL_OF[tensor, d][0] for d in ("row", "col")] if tensor in TENSORS else list(GEMMS)
            names = operand if change["gemms"] == "operand" else change["gemms"]
            actual = actual.override(pattern, **dict.fromkeys(names))
        elif "gradients" in change:
            cells = {f"{gemm}.lhs": getattr(actual, gemm).lhs for gemm in ("dgrad", "wgrad")}
            wanted = get_format(change["gradients"])
            eight = {name: spec for name, spec in cells.items() if spec is not None and spec.format.bits == wanted.bits}
            cells = {name: replace(spec, format=wanted) for name, spec in eight.items()}
            actual = actual.override(pattern, cells=cells) if cells else actual
    return actual


def _differ(one: Recipe, other: Recipe, layer: str) -> bool:
    a, b = one.for_layer(layer), other.for_layer(layer)
    return any(getattr(a, gemm) != getattr(b, gemm) for gemm in GEMMS)


def _table_of(context: Context, casts: Sequence[tuple[str, str]]) -> Table | None:
    wanted = set(casts)
    pairs = zip(context.table["layer"], context.table["tensor"], strict=True)
    rows = context.table.take(np.flatnonzero([pair in wanted for pair in pairs]))
    return thinned(rows, _LOOKS) if len(rows) and rows.has_histograms().any() else None


def _predicted(context: Context, table: Table | None, recipe: Recipe | None) -> tuple[float | None, str]:
    """The share of casts that clear, and the worst that is left."""
    if table is None or recipe is None:
        return None, ""
    with np.errstate(all="ignore"):
        found = predict(table, [recipe], recording=recorded(context.run.path), amaxes=context.run.table(phase=None))
    known = [p for p in found if p.spec == HIGH_PRECISION or p.steps]
    if not known:
        return None, ""
    cleared = sum(p.clears for p in known)
    if cleared == len(known):
        worst = min(known, key=_badness)
        number = "" if worst.spec == HIGH_PRECISION else f"; the worst underflows {worst.underflow_pct:.2g} %"
        return 1.0, f"all {len(known)} casts clear the floors{number}"
    worst = min((p for p in known if not p.clears), key=_badness)
    where = f"{worst.layer}.{symbol(worst.tensor, worst.direction)}"
    return cleared / len(
        known
    ), f"leaves {len(known) - cleared} of {len(known)} casts below the floors: {where} {worst.why}"


def _badness(prediction: Prediction) -> float:
    return prediction.element_sqnr_db if math.isfinite(prediction.element_sqnr_db) else math.inf
