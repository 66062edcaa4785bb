"""The remedies of a finding, in the order of what they would cure.

A remedy that changes a recipe says so as data (`change` in rules.yaml). The recipe of the run is changed alike, and
`what_if` predicts the finding's casts under it from the record. So `diagnose` and `ottava what-if` cannot contradict
each other. A list in `change` gives values to try: the first that cures most is taken. A remedy that changes nothing is
left out; so is one that cures nothing, if another one does. A remedy that keeps FP8 comes before one that puts GEMMs
into BF16, unless that one cures a fifth of the casts more; of equal ones the fewest GEMMs in BF16 come first.

Two checks keep a prediction honest. If the run's own recipe, replayed, does not give the recorded trouble, its history
was not that of the recorded amaxes, and no setting of a history is believed. If the casts clear the floors already, a
remedy must improve them by 3 dB.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ottava.diagnose.patches import render, target_layers
from ottava.diagnose.rows import Context
from ottava.diagnose.rules import Remedy
from ottava.diagnose.what_if import FLOORS, HIGH_PRECISION, Prediction, predict, thinned
from ottava.measure import limits
from ottava.measure.layer_names import symbol
from ottava.numerics.formats import FORMATS, Format, get_format
from ottava.recipe import CELL_OF, GEMMS, RECIPES, TENSORS, GemmRecipe, Recipe, get_recipe
from ottava.record.amaxes import recorded
from ottava.record.reader import Table

_CASTS, _LOOKS, _HISTORY_LOOKS = 12, 2, 32
"""Casts of a finding that are predicted; looks at each beside its worst ones; more of them where a scale is predicted,
because its worst looks may be others than those of the run's own scale."""
_UNKNOWN = 0.5
"""Place of a remedy without a prediction among those with one: after what cures, before what does not."""
_BF16 = 0.2
"""What BF16 has to cure more."""
_BETTER_DB = 3.0
FINER = ("rowwise", "blockwise", "mxfp8")
"""Recipes with finer scales, in the order of their cost."""


@dataclass(frozen=True)
class Rung:
    """A remedy with its prediction."""

    remedy: Remedy
    """With the values that were taken."""
    cure: float | None
    """Share of the finding's casts that would clear the floors of what-if; None: unknown."""
    leaves: str
    """What the prediction says in words; "" if there is none."""
    high_precision: int = 0
    """GEMMs of the finding's layers that it puts into BF16."""

    @property
    def order(self) -> tuple[float, int, int]:
        """Sorts rungs, the best first."""
        worth = (_UNKNOWN if self.cure is None else self.cure) - _BF16 * bool(self.high_precision)
        return -round(worth, 2), self.high_precision, self.remedy.rung


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
    replay = None if actual is None else _Replay(context, casts[:_CASTS], actual)
    layers = {layer for layer, _ in casts} or set(context.table["layer"])
    rungs: list[Rung] = []
    seen: list[Recipe] = []
    for remedy in remedies:
        if not remedy.change or actual is None or replay is None:
            rungs.append(Rung(next(choices(remedy)), None, ""))
            continue
        tried = []
        for choice in choices(remedy, replay.finest):
            new = changed(actual, choice, context, place["layers"], place["tensor"])
            if new is None or new in seen or not _differ(actual, new, layers):
                continue
            tried.append((Rung(choice, *replay.cure(new), _bf16_gemms(actual, new, layers)), new))
        if tried:
            best, new = min(tried, key=lambda t: t[0].order)  # of equals the first
            rungs.append(best)
            seen.append(new)
    if any(rung.cure is None or rung.cure > 0 for rung in rungs):
        rungs = [rung for rung in rungs if rung.cure is None or rung.cure > 0]
    return [
        {
            **render(rung.remedy, context, recipe=recipe, **place),
            "cure": rung.cure,
            "predicted": rung.leaves,
        }
        for rung in sorted(rungs, key=lambda rung: rung.order)
    ]


def choices(remedy: Remedy, finest: Callable[[], Mapping[str, str | None]] = dict) -> Iterator[Remedy]:
    """The remedy once for each choice of the values that it tries.

    Args:
        finest: for "gemms: finest": GEMM -> recipe with the coarsest scales that clear, or None for BF16.

    Example:
        >>> from ottava.diagnose.rules import load_rules
        >>> [choice.change for choice in choices(load_rules().remedies["shorter_history"])][:2]
        [{'amax_history_len': 16}, {'amax_history_len': 4}]
    """
    lists = [v if isinstance(v, list) and name != "gemms" else [v] for name, v in remedy.change.items()]
    for values in itertools.product(*lists):
        change = dict(zip(remedy.change, values, strict=True))
        if change.get("gemms") == "finest":
            found = dict(finest())
            change = {"gemms": found} if found else {"layers": FINER[1]}
        yield remedy.model_copy(update={"change": change})


def changed(actual: Recipe, remedy: Remedy, context: Context, layers: Sequence[str], tensor: str) -> Recipe | None:
    """The recipe after a remedy; None if the remedy does not fit it.

    Example: see the tests; `change` in rules.yaml has one key of:
        recipe: NAME, for all layers      layers: NAME, for the finding's layers    gemms: operand, names of GEMMs, or
                                                                                    GEMM -> NAME, or None for BF16
        margin, amax_history_len: of predicted scales; "+1" adds                    gradients: format of dY's cells
    """
    change = dict(remedy.change)
    globs = target_layers(remedy, context, layers)[1]
    if "recipe" in change:
        return RECIPES[change["recipe"]]
    if "margin" in change or "amax_history_len" in change:
        predicted = [s for t in TENSORS for s in actual.cells(t) if s is not None and s.predicted]
        if not predicted:
            return None
        if str(change.get("margin", "")).startswith("+"):
            change["margin"] = predicted[0].margin + int(change["margin"])
        return get_recipe(actual, **change)
    for pattern in globs:
        if "layers" in change:
            actual = actual.override(pattern, change["layers"])
        elif isinstance(change.get("gemms"), Mapping):
            gemms: dict[str, Any] = {gemm: _gemm(name, gemm) for gemm, name in change["gemms"].items()}
            actual = actual.override(pattern, **gemms)
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


def _gemm(recipe: str | None, gemm: str) -> GemmRecipe | None:
    return None if recipe is None else getattr(RECIPES[recipe], gemm)


def _bf16_gemms(actual: Recipe, new: Recipe, layers: set[str]) -> int:
    """GEMMs of these layers that are in high precision only in the new recipe."""

    def count(recipe: Recipe) -> int:
        return sum(getattr(recipe.for_layer(layer), gemm) == GemmRecipe() for layer in layers for gemm in GEMMS)

    return max(count(new) - count(actual), 0)


def _differ(one: Recipe, other: Recipe, layers: Iterable[str]) -> bool:
    """Whether a layer runs another GEMM. No, if the other recipe does not fit one of them: E5M2 where dY stays BF16."""
    try:
        pairs = [(one.for_layer(layer), other.for_layer(layer)) for layer in layers]
    except ValueError:
        return False
    return any(getattr(a, gemm) != getattr(b, gemm) for a, b in pairs for gemm in GEMMS)


class _Replay:
    """The recorded casts of a finding under other recipes."""

    def __init__(self, context: Context, casts: Sequence[tuple[str, str]], actual: Recipe) -> None:
        wanted = set(casts)
        pairs = zip(context.table["layer"], context.table["tensor"], strict=True)
        rows = context.table.take(np.flatnonzero([pair in wanted for pair in pairs]))
        self._context = context
        seen = len(rows) > 0 and bool(rows.has_histograms().any())
        self._table, self._history = (thinned(rows, n) if seen else None for n in (_LOOKS, _HISTORY_LOOKS))
        self._own = self.under(actual)
        self._bad = {_place(p) for p in self._own if not p.clears}
        self._recorded_bad = set() if self._table is None else _bad_places(self._table)
        self._unexplained = len(self._recorded_bad - self._bad) > len(self._recorded_bad) / 2

    def under(self, recipe: Recipe) -> list[Prediction]:
        """The predictions that have numbers."""
        if self._table is None or self._history is None:
            return []
        table = self._history if recipe.predicted else self._table
        amaxes, amax_log = self._context.run.table(phase=None), recorded(self._context.run.path)
        with np.errstate(all="ignore"):
            found = predict(table, [recipe], recording=amax_log, amaxes=amaxes)
        return [p for p in found if p.spec == HIGH_PRECISION or p.steps]

    def cure(self, recipe: Recipe) -> tuple[float | None, str]:
        """The share of casts that clear, and the worst that is left."""
        known = self.under(recipe)
        if not known:
            return None, ""
        if self._unexplained and any(recipe.for_layer(p.layer).predicted for p in known):
            return 0.0, "the recorded scales are not those of the recorded amaxes, so no history cures them"
        if self._own and not self._recorded_bad | self._bad:
            return self._gain(known)
        cleared = sum(p.clears for p in known)
        if cleared == len(known):
            worst = min(known, key=_badness)
            number = "" if worst.spec == HIGH_PRECISION else f"; the worst underflows {worst.underflow_pct:.2g} %"
            return 1.0, f"all {len(known)} casts clear the floors{number}"
        worst = min((p for p in known if not p.clears), key=_badness)
        left = f"leaves {len(known) - cleared} of {len(known)} casts below the floors: {_name(worst)} {worst.why}"
        return cleared / len(known), left

    def _gain(self, known: list[Prediction]) -> tuple[float, str]:
        """Of casts that clear the floors already: the share that gets better in FP8, and the smallest gain."""
        before = {_place(p): p for p in self._own}
        gains = [(_badness(p) - _badness(before[_place(p)]), p) for p in known if _place(p) in before]
        said = "these casts clear the floors already"
        if finite := [(gain, p) for gain, p in gains if math.isfinite(gain)]:
            least, worst = min(finite, key=lambda gain: gain[0])
            said += f"; {_name(worst)} changes by {least:+.1f} dB"
        return sum(p.spec != HIGH_PRECISION and gain >= _BETTER_DB for gain, p in gains) / max(len(gains), 1), said

    def finest(self) -> dict[str, str | None]:
        """GEMM -> the first of FINER under which all casts of the finding in it clear, or None for BF16; only GEMMs
        with a cast that does not clear, and {} if that is none, or all would be BF16."""
        bad = self._bad | self._recorded_bad
        gemms = {CELL_OF[tensor, direction][0] for _, tensor, direction in bad}
        predictions = {name: self.under(RECIPES[name]) for name in FINER} if gemms else {}

        def clears(name: str, gemm: str) -> bool:
            own = [p for p in predictions[name] if CELL_OF[p.tensor, p.direction][0] == gemm]
            return bool(own) and all(p.clears for p in own)

        found = {g: next((n for n in FINER if clears(n, g)), None) for g in GEMMS if g in gemms}
        return found if any(found.values()) else {}


def _bad_places(table: Table) -> set[tuple[str, str, str]]:
    """(layer, tensor, direction) of recorded casts that are below a floor, or clip."""
    formats = table["format"]

    def limit(of: Callable[[Format], float]) -> Any:
        known = {name: of(FORMATS[name]) for name in set(formats) if name in FORMATS}
        return np.array([known.get(name, math.nan) for name in formats])

    with np.errstate(invalid="ignore"):
        bad = (table.metric("underflow_pct") > limit(FLOORS[0].limit)) | (
            table.metric("sqnr_db") < limit(limits.warn_db)
        )
        bad |= table.metric("row_sqnr_p50_db") < limit(limits.warn_db)
        bad |= table.metric("overflow_pct") > limits.PERCENT["overflow_pct"][1]
    rows = zip(bad, table["layer"], table["tensor"], table["direction"], strict=True)
    return {(layer, tensor, direction) for wrong, layer, tensor, direction in rows if wrong}


def _place(prediction: Prediction) -> tuple[str, str, str]:
    return prediction.layer, prediction.tensor, prediction.direction


def _name(prediction: Prediction) -> str:
    return f"{prediction.layer}.{symbol(prediction.tensor, prediction.direction)}"


def _badness(prediction: Prediction) -> float:
    return prediction.element_sqnr_db if math.isfinite(prediction.element_sqnr_db) else math.inf
