"""The rules that hold, each with the rows for which it does; and the rules that could not be asked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ottava.diagnose.conditions import Condition, Values
from ottava.diagnose.rows import AnyRows, CastRows, Context, EventRows, RunRows, StepRows
from ottava.diagnose.rules import Rule
from ottava.diagnose.training import AmaxRows, LayerRows, ParameterRows, WouldRows

_KINDS = (CastRows, AmaxRows, WouldRows, StepRows, EventRows, ParameterRows, LayerRows, RunRows)


@dataclass
class Fired:
    """A rule and the rows for which it holds."""

    rule: Rule
    rows: AnyRows
    index: Values
    """Row numbers."""
    also: list[str] = field(default_factory=list)

    def places(self) -> list[tuple[str, str]]:
        """(layer, tensor) of every row; "" if it has none."""
        if isinstance(self.rows, CastRows):
            return [(self.rows.slots[i].layer, self.rows.slots[i].tensor) for i in self.index]
        if isinstance(self.rows, EventRows):
            layers, tensors = self.rows.words("layer"), self.rows.words("tensor")
            return [(layers[i], tensors[i]) for i in self.index]
        if isinstance(self.rows, ParameterRows):
            return [(self.rows.layers()[i], "weight") for i in self.index]
        if isinstance(self.rows, LayerRows):
            return [(str(self.rows.rows[i]["name"]), "") for i in self.index]
        return [("", "")] * len(self.index)

    def steps(self) -> list[int]:
        """The step of every row."""
        if isinstance(self.rows, (RunRows, LayerRows)):
            return []
        steps = self.rows.value("step")[self.index]
        return [int(s) for s in steps] if np.isfinite(steps).all() else []  # a parameter without a gradient has no step

    @property
    def first(self) -> float:
        """Its first step; that of the loss's trouble for a finding about the run."""
        return min(self.steps(), default=math.inf)


def asks_for_findings(rule: Rule) -> bool:
    """Whether a rule can be asked only when the numeric findings are known."""
    return any({"run.findings", "run.loss_first"} & condition.names for condition in rule.conditions)


def ask_rules(
    context: Context, rules: Iterable[Rule], tables: dict[str, AnyRows]
) -> tuple[list[Fired], list[dict[str, str]]]:
    """Asks every rule.

    Args:
        tables: rows by kind that are already there; new ones are added.
    Returns:
        The rules that hold, and those that lack data: {id, title, needs}.
    """
    kinds = {kind.kind: kind for kind in _KINDS}
    fired, untested = [], []
    for rule in rules:
        rows = tables.setdefault(rule.over, kinds[rule.over](context)) if rule.over not in tables else tables[rule.over]
        eligible = np.ones(rows.count, dtype=bool)
        for column, words in rule.where.items():
            eligible &= rows.among(column, words)
        if not eligible.any() and rule.over == "casts":
            where = ", ".join(f"{column} {' or '.join(words)}" for column, words in rule.where.items())
            untested.append({"id": rule.id, "title": rule.title, "needs": f"casts of {where or 'any tensor'}"})
            continue
        if rule.over == "events" and not _was_checked(rule, context):
            untested.append({"id": rule.id, "title": rule.title, "needs": "checks at the doors of ottava layers"})
            continue
        answer, missing = rule.when.ask(rows)
        index = np.flatnonzero((answer == 1) & eligible)
        index = _repeated(rows, index, rule.least)
        if len(index):
            fired.append(Fired(rule, rows, index))
        elif missing and (np.isnan(answer[eligible]).any() or not rows.count):
            untested.append({"id": rule.id, "title": rule.title, "needs": "; ".join(sorted(missing))})
    return fired, untested


def _was_checked(rule: Rule, context: Context) -> bool:
    """Whether the run could have such an event: checks run only at the doors of ottava layers."""
    if "check" not in rule.where:
        return "mode" not in rule.where.get("kind", ()) or any(e.get("kind") == "mode" for e in context.run.training)
    if any(event.get("kind") == "check" for event in context.run.events):
        return True
    return "door" in set(context.table["source"])


def _repeated(rows: AnyRows, index: Values, least: int) -> Values:
    """The rows of series in which at least `least` rows hold; in a shorter series all rows must hold."""
    if least <= 1 or isinstance(rows, (RunRows, EventRows, LayerRows)) or not len(index):
        return index
    series = [hits for s in rows.series() if len(hits := np.intersect1d(s, index)) >= min(least, len(s)) > 0]
    return np.sort(np.concatenate(series)) if series else np.array([], dtype=int)


def holds(condition: Condition | None, hit: Fired) -> bool | None:
    """Whether a condition holds for any row of a finding; None if unknown."""
    if condition is None:
        return None
    answer, _ = condition.ask(hit.rows)
    answers = answer[hit.index]
    return True if (answers == 1).any() else None if np.isnan(answers).all() else False
