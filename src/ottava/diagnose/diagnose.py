"""Explains a run: tests every rule of the rule book, ranks the findings, and lists the rules that it could not test.

Order: software bugs, then data, then configuration, then numerics; within each, severity times confidence. If one
finding explains another, it shows it under "also". What FP8 has no part in (stage "training") are notes, never alarms;
they explain what began later, too: a learning rate that blew the weights up explains the casts of these weights.
Without findings the answer is "no FP8 evidence found" with the share of layers that the watch saw, never "healthy".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ottava.diagnose.conditions import Missing
from ottava.diagnose.evidence import Evidence, evidence_of
from ottava.diagnose.facts import context_of
from ottava.diagnose.fired import Fired, ask_rules, asks_for_findings, holds
from ottava.diagnose.headline import headline
from ottava.diagnose.ladder import ladder
from ottava.diagnose.precedence import STAGES, began, explained
from ottava.diagnose.rows import AnyRows, CastRows, Context, RunRows
from ottava.diagnose.rules import Rulebook, TriageNode, load_rules
from ottava.diagnose.story import of_twin, told
from ottava.diagnose.training import AmaxRows
from ottava.record.reader import Run

_SEVERITY = (("critical", 1.0), ("warning", 0.4), ("note", 0.2))
_SUPPORTED, _UNSUPPORTED, _REFUTED = 0.1, -0.03, -0.4
_REFUTED_BELOW = 0.3


@dataclass(frozen=True)
class Finding:
    """One rule that fired."""

    id: str
    title: str
    stage: str
    severity: str
    layers: list[str]
    tensors: list[str]
    steps: list[int]
    """First and last step."""
    evidence: list[Evidence]
    """Worst first, one per tensor."""
    cause: str
    confidence: float
    refute_by: str
    remedies: list[dict[str, Any]]
    source: list[str]
    also: list[str]
    """Other symptoms that this finding explains."""


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a run."""

    verdict: str
    """critical, warning or none."""
    sentence: str
    coverage_pct: float
    """Share of the linear layers that the watch saw; NaN if unknown."""
    findings: list[Finding]
    notes: list[Finding]
    """What FP8 has no part in, but deserves a look; severity "note"."""
    questions: list[dict[str, Any]]
    """The triage tree: {id, question, answer, say, needs}."""
    untested: list[dict[str, str]]
    """Rules that lack data: {id, title, needs}."""
    tested: int
    """Number of rules that had the data they need."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = asdict(self)
        values["coverage_pct"] = None if math.isnan(self.coverage_pct) else self.coverage_pct
        return values  # evidence has finite numbers only

    def fails(self, on: str) -> bool:
        """Whether the worst finding is at least as severe as `on`.

        Example:
            >>> Diagnosis("warning", "", 100.0, [], [], [], [], 0).fails("critical")
            False
        """
        order = ("none", "warning", "critical")
        return self.verdict != "none" and order.index(self.verdict) >= order.index(on)


def diagnose(
    run: Run,
    *,
    baseline: Run | None = None,
    rules: Path | str | Rulebook | None = None,
    answers: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Tests every rule on a run.

    Args:
        run: the run folder.
        baseline: the same training in BF16, or a good run; some rules need it.
        rules: a file with rules of your own, or a loaded rule book.
        answers: question in rules.yaml -> answer, for facts that the run folder does not have.
    Raises:
        RulesError: the file is wrong, or an answer has no question.

    Example:
        >>> import tempfile, torch, ottava
        >>> from ottava.measure.walk import measure
        >>> from ottava.record.schema import SlotKey
        >>> from ottava.record.writer import RunWriter
        >>> x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
        >>> x[:4] *= 1e5                                                         # massive tokens
        >>> tally = measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3)))
        >>> key = SlotKey("mlp.fc2", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
        >>> with tempfile.TemporaryDirectory() as folder, RunWriter(f"{folder}/run") as writer:
        ...     writer.tally(1, key, tally)
        ...     writer.flush()
        ...     diagnose(Run.open(f"{folder}/run")).findings[0].id
        'N1'
    """
    book = rules if isinstance(rules, Rulebook) else load_rules(rules)
    answers = dict(answers or {})
    book.check_answers(answers)
    context = context_of(run, baseline, answers, book.config)
    tables: dict[str, AnyRows] = {}
    fired, untested = ask_rules(context, [rule for rule in book.rules.values() if not asks_for_findings(rule)], tables)
    numeric = [hit for hit in fired if hit.rule.stage == "numeric"]
    later = replace(context, findings=len(numeric), first_finding=min((hit.first for hit in numeric), default=math.inf))
    more, missing = ask_rules(later, [r for r in book.rules.values() if asks_for_findings(r)], {})
    hits = explained(fired + more)
    found = [_finding(hit, book, context) for hit in sorted(hits, key=began)]
    found.sort(key=_rank)  # stable: of equals that which began first
    findings = [finding for finding in found if finding.stage != "training"]
    notes = [finding for finding in found if finding.stage == "training"]
    coverage = _coverage(context)
    tested = len(book.rules) - len(untested + missing)
    return Diagnosis(
        max((f.severity for f in findings), key=lambda s: dict(_SEVERITY)[s], default="none"),
        headline(findings, notes, coverage, context, f"{tested} of {len(book.rules)} rules tested"),
        coverage,
        findings,
        notes,
        _walk(book.triage, context),
        untested + missing,
        tested,
    )


def _finding(hit: Fired, book: Rulebook, context: Context) -> Finding:
    rule, places, steps = hit.rule, hit.places(), hit.steps()
    confidence = rule.confidence
    for condition in rule.support:
        support = holds(condition, hit)
        confidence += 0.0 if support is None else _SUPPORTED if support else _UNSUPPORTED
    if holds(rule.refuted_when, hit):
        confidence += _REFUTED
    layers = [layer for layer in dict.fromkeys(layer for layer, _ in places) if layer]
    if isinstance(hit.rows, AmaxRows) and (last := hit.rows.before(hit.index[0])) is not None:
        layers = list(dict.fromkeys([*layers, hit.rows.slots[last].layer]))  # it happens between the two
    evidence = evidence_of(hit)
    if not steps:  # nothing says where it began: the worst first
        layers = [layer for layer in dict.fromkeys([*(e.layer for e in evidence), *layers]) if layer]
    tensors = [tensor for tensor in dict.fromkeys(tensor for _, tensor in places) if tensor]
    recipe = hit.rows.slots[hit.index[0]].recipe if isinstance(hit.rows, CastRows) else _main_recipe(context)
    casts = list(dict.fromkeys([*((e.layer, e.tensor) for e in evidence if e.layer), *places]))
    casts = [cast for cast in casts if all(cast)]
    return Finding(
        rule.id,
        of_twin(rule.title, context),
        rule.stage,
        "note"
        if rule.stage == "training"
        else "critical"
        if rule.severity == "critical" or holds(rule.critical, hit)
        else "warning",
        layers,
        tensors,
        [min(steps), max(steps)] if steps else [],
        evidence,
        told(of_twin(rule.cause, context), context, hit.rows, hit.index),
        round(min(max(confidence, 0.05), 0.95), 2),
        of_twin(rule.refute_by, context),
        ladder(
            [book.remedies[name] for name in rule.remedies],
            context,
            casts if rule.stage != "training" else [],
            recipe,
            id=rule.id,
            layers=layers,
            tensor=tensors[0] if len(tensors) == 1 else "",
        ),
        list(rule.source),
        hit.also,
    )


def _main_recipe(context: Context) -> str:
    recipes = list(context.table["recipe"])
    return max(set(recipes), key=recipes.count) if recipes else ""


def _rank(finding: Finding) -> tuple[int, float, float]:
    """Bugs first; of numerics the worst, of these that which began first, refuted ones last; of notes the surest."""
    weight = dict(_SEVERITY)[finding.severity]
    sure = float(finding.confidence < _REFUTED_BELOW) if finding.stage == "numeric" else -finding.confidence
    return STAGES.index(finding.stage), -weight, sure


def _coverage(context: Context) -> float:
    try:
        return float(context.scalar("run.coverage_pct"))
    except Missing:
        return math.nan


def _walk(tree: Mapping[str, TriageNode], context: Context) -> list[dict[str, Any]]:
    """The path through the triage tree; an unknown answer goes on as "no"."""
    rows = RunRows(context)
    path: list[dict[str, Any]] = []
    at = next(iter(tree), None)
    while at is not None and at not in [step["id"] for step in path]:
        node = tree[at]
        answer, missing = node.known.ask(rows)
        unknown = bool(np.isnan(answer).all())
        yes = bool((answer == 1).any())
        branch = node.yes if yes else node.no
        word = "unknown" if unknown else "yes" if yes else "no"
        path.append(
            {
                "id": node.id,
                "question": of_twin(node.question, context),
                "answer": word,
                "say": "" if unknown else of_twin(branch.say, context),
                "needs": sorted(missing) if unknown else [],
                "ask": node.answer if unknown else None,
            }
        )
        at = branch.next
    return path
