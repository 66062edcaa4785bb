"""Explains a run: tests every rule of the rule book, ranks the findings, and lists the rules that it could not test.

Order: software bugs, then data, then configuration, then numerics; within each, severity times confidence. If one
finding explains another, it shows it under "also". What FP8 has no part in (stage "training") are notes, never alarms;
they explain what began later, too: a learning rate that blew the weights up explains the casts of these weights.
Without findings the answer is "no FP8 evidence found" with the share of layers that the watch saw, never "healthy".
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ottava.debug.analysis.conditions import Comparison, Condition, Missing, Values, evaluate, numbers
from ottava.debug.analysis.facts import context_of
from ottava.debug.analysis.headline import headline
from ottava.debug.analysis.ladder import ladder
from ottava.debug.analysis.rows import AnyRows, CastRows, Context, EventRows, RunRows, StepRows
from ottava.debug.analysis.rules import Rule, Rulebook, TriageNode, load_rules
from ottava.debug.analysis.story import of_twin, told
from ottava.debug.analysis.training import AmaxRows, LayerRows, ParameterRows, WouldRows
from ottava.debug.run.reader import Run
from ottava.debug.statistics import STATISTICS

_STAGES = ("bug", "data", "config", "numeric", "training")
_SEVERITY = (("critical", 1.0), ("warning", 0.4), ("note", 0.2))
_SUPPORTED, _UNSUPPORTED, _REFUTED = 0.1, -0.03, -0.4
_REFUTED_BELOW = 0.3
_MOST_EVIDENCE = 8
_OF_PLACE = frozenset({"kind", "check", "format", "granularity", "scale_format", "scaling", "dims", "held", "moved"})
_OF_TIME = frozenset(
    {"looks", "age", "step", "onset", "run.onset", "run.findings", "run.casting", "empty", "late_clip"}
)
_BOOKKEEPING = _OF_PLACE | _OF_TIME
"""Names that only decide whether a rule applies; they are no evidence."""
_Rows = AnyRows
_KINDS = (CastRows, AmaxRows, WouldRows, StepRows, EventRows, ParameterRows, LayerRows, RunRows)


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


@dataclass
class _Fired:
    """A rule and the rows for which it holds."""

    rule: Rule
    rows: _Rows
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
        >>> from ottava.debug.measure import measure
        >>> from ottava.debug.run.schema import SlotKey
        >>> from ottava.debug.run.writer import RunWriter
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
    tables: dict[str, _Rows] = {}
    fired, untested = _ask_all(context, [rule for rule in book.rules.values() if not _asks_for_findings(rule)], tables)
    numeric = [hit for hit in fired if hit.rule.stage == "numeric"]
    later = replace(context, findings=len(numeric), first_finding=min((hit.first for hit in numeric), default=math.inf))
    more, missing = _ask_all(later, [r for r in book.rules.values() if _asks_for_findings(r)], {})
    hits = _explained(fired + more)
    found = [_finding(hit, book, context) for hit in sorted(hits, key=_began)]
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


def _asks_for_findings(rule: Rule) -> bool:
    return any({"run.findings", "run.loss_first"} & condition.names for condition in rule.conditions)


def _ask_all(
    context: Context, rules: Iterable[Rule], tables: dict[str, _Rows]
) -> tuple[list[_Fired], list[dict[str, str]]]:
    kinds = {kind.kind: kind for kind in _KINDS}
    fired, untested = [], []
    for rule in rules:
        rows = tables.setdefault(rule.over, kinds[rule.over](context)) if rule.over not in tables else tables[rule.over]
        eligible = np.ones(rows.count, dtype=bool)
        for column, words in rule.where.items():
            eligible &= np.isin(rows.value(column).astype(str), list(words))
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
            fired.append(_Fired(rule, rows, index))
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


def _repeated(rows: _Rows, index: Values, least: int) -> Values:
    """The rows of series in which at least `least` rows hold; in a shorter series all rows must hold."""
    if least <= 1 or isinstance(rows, (RunRows, EventRows, LayerRows)) or not len(index):
        return index
    series = [hits for s in rows.series() if len(hits := np.intersect1d(s, index)) >= min(least, len(s)) > 0]
    return np.sort(np.concatenate(series)) if series else np.array([], dtype=int)


def _explained(fired: list[_Fired]) -> list[_Fired]:
    """Removes rows that other findings explain."""
    by_id = {hit.rule.id: hit for hit in fired}
    # of numerics and training that which came first explains what came later; at one step training is asked first
    order = sorted(fired, key=_precedence)
    for hit in order:
        if not len(hit.index):
            continue
        for name in hit.rule.explains:
            other = by_id.get(name)
            if other is None or not len(other.index) or other is hit:
                continue
            unexplained = [i for i, under in zip(other.index, _under(hit, other), strict=True) if not under]
            if len(unexplained) < len(other.index):
                other.index = np.array(unexplained, dtype=int)
                hit.also.append(f"{other.rule.id} {other.rule.title}")
    return [hit for hit in fired if len(hit.index)]


def _precedence(hit: _Fired) -> tuple[float, ...]:
    # a NaN that a computation makes may itself come from weights that a learning rate blew up
    early = hit.rule.stage in ("bug", "data", "config") or hit.rule.reach == "everywhere"
    early = early and hit.rule.over != "amaxes"
    rank = _STAGES.index(hit.rule.stage)
    if early:
        return 0, rank, 0.0, -len(hit.rule.explains)
    return 1, 0.0 if hit.rule.reach == "slot" else hit.first, -rank, -len(hit.rule.explains)


def _under(cause: _Fired, effect: _Fired) -> list[bool]:
    """Whether the cause reaches each row of the effect."""
    places, steps = effect.places(), effect.steps()
    if cause.rule.reach == "everywhere" or isinstance(effect.rows, (RunRows, StepRows)):
        return [True] * len(places)
    if cause.rule.reach == "run":
        first = min(cause.steps(), default=0)
        earlier = _earlier(cause, effect)
        return [step >= first and place not in earlier for place, step in zip(places, steps, strict=True)]
    since: dict[Any, int] = {}
    for key, step in zip(_keys(cause, cause.rule.reach), cause.steps() or [0] * len(cause.index), strict=True):
        since[key] = min(step, since.get(key, step))
    keys = _keys(effect, cause.rule.reach)
    return [key in since and step >= since[key] for key, step in zip(keys, steps, strict=True)]


def _earlier(cause: _Fired, effect: _Fired) -> set[tuple[str, str]]:
    """The casts that went wrong before those of the cause did, in the order of steps and of execution."""
    if not isinstance(cause.rows, CastRows) or cause.rows is not effect.rows:
        return set()
    began = min(zip(cause.steps(), cause.index, strict=True))
    rows = zip(effect.steps(), effect.index, effect.places(), strict=True)
    own = set(cause.places())
    return {place for step, row, place in rows if (step, row) < began and place not in own}


def _keys(hit: _Fired, reach: str) -> list[Any]:
    if reach == "slot" and isinstance(hit.rows, CastRows):
        # both directions of a tensor have the same values, cast along another dimension
        return [(hit.rows.slots[i].layer, hit.rows.slots[i].tensor) for i in hit.index]
    return [layer if reach == "layer" else (layer, tensor) for layer, tensor in hit.places()]


def _holds(condition: Condition | None, hit: _Fired) -> bool | None:
    """Whether a condition holds for any row of a finding; None if unknown."""
    if condition is None:
        return None
    answer, _ = condition.ask(hit.rows)
    answers = answer[hit.index]
    return True if (answers == 1).any() else None if np.isnan(answers).all() else False


def _finding(hit: _Fired, book: Rulebook, context: Context) -> Finding:
    rule, places, steps = hit.rule, hit.places(), hit.steps()
    confidence = rule.confidence
    for condition in rule.support:
        holds = _holds(condition, hit)
        confidence += 0.0 if holds is None else _SUPPORTED if holds else _UNSUPPORTED
    if _holds(rule.refuted_when, hit):
        confidence += _REFUTED
    layers = [layer for layer in dict.fromkeys(layer for layer, _ in places) if layer]
    if isinstance(hit.rows, AmaxRows) and (last := hit.rows.before(hit.index[0])) is not None:
        layers = list(dict.fromkeys([*layers, hit.rows.slots[last].layer]))  # it happens between the two
    tensors = [tensor for tensor in dict.fromkeys(tensor for _, tensor in places) if tensor]
    recipe = hit.rows.slots[hit.index[0]].recipe if isinstance(hit.rows, CastRows) else _main_recipe(context)
    evidence = _evidence(hit)
    casts = list(dict.fromkeys([*((e.layer, e.tensor) for e in evidence if e.layer), *places]))
    casts = [cast for cast in casts if all(cast)]
    return Finding(
        rule.id,
        of_twin(rule.title, context),
        rule.stage,
        "note"
        if rule.stage == "training"
        else "critical"
        if rule.severity == "critical" or _holds(rule.critical, hit)
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


def _evidence(hit: _Fired) -> list[Evidence]:
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
    for place, at in sorted(worst.items(), key=lambda w: (badness[w[0]] < bad, *began[w[0]], -badness[w[0]])):
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


def _numbers(comparison: Comparison, hit: _Fired) -> tuple[Values | None, Values, Values]:
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


def _began(hit: _Fired) -> tuple[float, float, float]:
    """Where a finding began: its first step, the first of its casts in the order of execution, and its confidence."""
    at = min(hit.index, key=lambda i: (hit.rows.value("step")[i], i)) if isinstance(hit.rows, CastRows) else 0
    return hit.first, float(at), -hit.rule.confidence


def _rank(finding: Finding) -> tuple[int, float, float]:
    """Bugs first; of numerics the worst, of these that which began first, refuted ones last; of notes the surest."""
    weight = dict(_SEVERITY)[finding.severity]
    sure = float(finding.confidence < _REFUTED_BELOW) if finding.stage == "numeric" else -finding.confidence
    return _STAGES.index(finding.stage), -weight, sure


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
