"""The numbers that made a rule fire, worst first."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ottava.diagnose.conditions import Comparison, Values, evaluate, numbers
from ottava.diagnose.fired import Fired
from ottava.diagnose.rows import CastRows
from ottava.measure.statistics import STATISTICS

_MOST_EVIDENCE = 8
_OF_PLACE = frozenset({"kind", "check", "format", "granularity", "scale_format", "scaling", "dims", "held", "moved"})
_OF_TIME = frozenset(
    {"looks", "age", "step", "onset", "run.onset", "run.findings", "run.casting", "empty", "late_clip"}
)
_BOOKKEEPING = _OF_PLACE | _OF_TIME
"""Names that only decide whether a rule applies; they are no evidence."""


@dataclass(frozen=True)
class Evidence:
    """One number that made a rule fire."""

    layer: str
    tensor: str
    metric: str
    value: float | str
    threshold: float | str
    unit: str
    step: int | None


def evidence_of(hit: Fired) -> list[Evidence]:
    """The worst row of every (layer, tensor), worst first, with each comparison that holds there."""
    comparisons = [c for c in hit.rule.when.comparisons if isinstance(c.left, (ast.Name, ast.Attribute, ast.Call))]
    comparisons = [c for c in comparisons if ast.unparse(c.left) not in _BOOKKEEPING] or comparisons
    answers = {c: _numbers(c, hit) for c in comparisons}
    excess = np.full(hit.rows.count, -math.inf)
    for comparison, (holds, left, right) in answers.items():
        if holds is not None and comparison.sign in "<=>=":
            excess = np.fmax(excess, np.where(holds == 1, _excess(comparison.sign, left, right), -math.inf))
    places, steps = hit.places(), hit.steps() or [None] * len(hit.index)  # type: ignore[list-item]
    worst: dict[tuple[str, str], int] = {}
    for at, place in enumerate(places):
        if place not in worst or excess[hit.index[at]] > excess[hit.index[worst[place]]]:
            worst[place] = at
    evidence: list[Evidence] = []
    badness = {place: excess[hit.index[at]] for place, at in worst.items()}
    # of places that are about as bad, that comes first in which it began: the others may follow from it
    began = {
        place: min((steps[at] or 0, hit.index[at]) for at, p in enumerate(places) if p == place) for place in worst
    }
    bad = max(badness.values(), default=0.0) / 2

    def order(entry: tuple[tuple[str, str], int]) -> tuple[float, ...]:
        place = entry[0]
        return (badness[place] < bad, *began[place], -badness[place]) if hit.steps() else (-badness[place],)

    for place, at in sorted(worst.items(), key=order):
        row, named = hit.index[at], set()
        for comparison, (holds, left, right) in answers.items():
            if holds is not None and holds[row] == 1:
                metric = ast.unparse(comparison.left)
                if metric in named:
                    continue
                named.add(metric)
                value, threshold = _plain(left[row]), _plain(right[row])
                if isinstance(value, float) or not isinstance(hit.rows, CastRows):
                    evidence.append(Evidence(*place, metric, value, threshold, _unit(metric), steps[at]))
    return evidence[:_MOST_EVIDENCE]


def _numbers(comparison: Comparison, hit: Fired) -> tuple[Values | None, Values, Values]:
    missing: set[str] = set()
    left, right = evaluate(comparison.left, hit.rows, missing), evaluate(comparison.right, hit.rows, missing)
    if left is None or right is None:
        return None, np.array([]), np.array([])
    return evaluate(comparison.node, hit.rows, missing), left, right


def _excess(sign: str, left: Values, right: Values) -> Values:
    """The distance beyond the threshold, in octaves if both are positive."""
    with np.errstate(all="ignore"):
        high = numbers(left), numbers(right)
        more, less = high if sign.startswith(">") else high[::-1]
        ratio = np.log2(np.where((more > 0) & (less > 0), more / less, 1.0))
        return np.where((more > 0) & (less > 0), ratio, more - less)


def _plain(value: Any) -> float | str:
    if isinstance(value, str):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _unit(metric: str) -> str:
    if metric in STATISTICS:
        return STATISTICS[metric].unit
    if metric in ("run.spikes", "run.baseline_spikes", "run.recovery", "run.baseline_recovery"):
        return "per 1,000 steps" if metric.endswith("spikes") else "steps"
    ends = {"_db": "dB", "_pct": "%", "_octaves": "octaves"}
    return next((unit for end, unit in ends.items() if metric.removesuffix(")").endswith(end)), "")
