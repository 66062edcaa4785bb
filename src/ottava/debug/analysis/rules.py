"""The rule book of `diagnose`: symptoms, causes and remedies as data, read from YAML and checked before use.

Every name in a condition, every remedy, question and explained rule must exist; the error names the file, the rule and
the nearest known name. A file of your own (`--rules FILE`) has the same sections and adds to the shipped one; its rule
replaces a shipped rule with the same id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args

from ottava.debug.analysis.conditions import Condition, ConditionError
from ottava.debug.analysis.facts import RUN_FACTS, VOCABULARY
from ottava.errors import unknown_name
from ottava.untrusted import MAX_YAML_BYTES, UntrustedError, misfit, parse_yaml, read_text

Stage = Literal["bug", "config", "numeric"]
Severity = Literal["critical", "warning"]
Reach = Literal["slot", "tensor", "layer", "run", "everywhere"]
FRAMEWORKS = ("ottava", "megatron", "te", "torchao")
_SECTIONS = ("version", "config", "questions", "remedies", "triage", "rules")
_VERSION = 1
_BRANCH = MappingProxyType({"say": str, "next": str})
_BOOK_SHAPE: Mapping[str, Any] = MappingProxyType(
    {
        "config": {"*": [str]},
        "questions": {"*": {"ask": str, "choices": list}},
        "remedies": {
            "*": {"rung": int, "cost": str, "text": str, "patch": {"*": str}, "notes": [{"when": str, "say": str}]}
        },
        "triage": [
            {"id": str, "question": str, "known": str, "answer": str}
            | dict.fromkeys(("yes", "no", True, False), _BRANCH)
        ],
        "rules": list,
    }
)
_RULE_SHAPE: Mapping[str, Any] = MappingProxyType(
    dict.fromkeys(("id", "title", "stage", "when", "cause", "refute_by", "over", "severity", "critical"), str)
    | {"refuted_when": str, "reach": str, "where": dict, "least": int, "confidence": float}
    | {name: [str] for name in ("support", "explains", "remedies", "source")}
)
"""The types in the file, see `untrusted.misfit`."""


class RulesError(ValueError):
    """A rule book has a mistake; the message names the file and the place."""

    exit_code = 2


@dataclass(frozen=True)
class Question:
    """A fact that the run folder does not have, but its owner may know."""

    name: str
    ask: str
    choices: tuple[str, ...] = ("yes", "no")


@dataclass(frozen=True)
class Note:
    """A constraint of a remedy."""

    when: Condition
    say: str


@dataclass(frozen=True)
class Remedy:
    """A thing to try. Patches are templates, see `patches`."""

    name: str
    rung: int
    """Place on the ladder; 1 is cheapest."""
    cost: str
    text: str
    patch: Mapping[str, str]
    notes: tuple[Note, ...] = ()
    layers: Literal["finding", "ends"] = "finding"
    """The layers to change: the finding's, or those of the first and the last block."""


@dataclass(frozen=True)
class Rule:
    """One symptom with its cause and remedies."""

    id: str
    title: str
    stage: Stage
    when: Condition
    cause: str
    refute_by: str
    over: str = "casts"
    where: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Column -> words; the rule tests only rows with one of these words."""
    least: int = 1
    """Rows of one series for which the condition must hold: a cast that is noisy in one look is no finding."""
    severity: Severity = "warning"
    critical: Condition | None = None
    support: tuple[Condition, ...] = ()
    """A condition that holds raises the confidence; one that does not lowers it a little."""
    refuted_when: Condition | None = None
    """If this holds, it lowers the confidence a lot."""
    confidence: float = 0.6
    explains: tuple[str, ...] = ()
    """Rules whose findings are consequences of this one."""
    reach: Reach = "slot"
    """Reach of these consequences: the same tensor, layer or run, from this finding's first step on; or everywhere."""
    remedies: tuple[str, ...] = ()
    source: tuple[str, ...] = ()

    @property
    def conditions(self) -> Iterable[Condition]:
        """All of them."""
        return [c for c in (self.when, self.critical, self.refuted_when, *self.support) if c is not None]


@dataclass(frozen=True)
class Branch:
    """The meaning of an answer in the triage tree."""

    say: str
    next: str | None = None


@dataclass(frozen=True)
class TriageNode:
    """A question of the triage tree. The run answers it if it can."""

    id: str
    question: str
    known: Condition
    """The answer is yes if it holds."""
    yes: Branch
    no: Branch
    answer: str | None = None
    """The question to ask if the run cannot answer."""


@dataclass(frozen=True)
class Rulebook:
    """A rule book.

    Example:
        >>> book = load_rules()
        >>> book.rules["N1"].stage, len(book.rules) > 25
        ('numeric', True)
    """

    config: Mapping[str, tuple[str, ...]]
    """Name in conditions -> keys of the setting in the frameworks."""
    questions: Mapping[str, Question]
    remedies: Mapping[str, Remedy]
    triage: Mapping[str, TriageNode]
    rules: Mapping[str, Rule]

    def check_answers(self, answers: Mapping[str, str]) -> None:
        """Refuses answers without a question.

        Raises:
            RulesError: the question or the choice is unknown.
        """
        for name, choice in answers.items():
            if name not in self.questions:
                raise RulesError(f"answer: {unknown_name('question', name, self.questions)}")
            choices = self.questions[name].choices
            if choice not in choices:
                raise RulesError(f"answer {name}: {unknown_name('choice', choice, choices)}")


def load_rules(extra: Path | str | None = None) -> Rulebook:
    """Loads the shipped rule book, and adds a file of your own.

    Raises:
        RulesError: the file cannot be read, or has a mistake.
    """
    shipped = resources.files("ottava.debug.analysis").joinpath("rules.yaml")
    sections = _Sections()
    sections.add("rules.yaml", shipped.read_text(encoding="utf-8"))
    if extra is not None:
        try:
            text = read_text(Path(extra), most=MAX_YAML_BYTES)
        except (OSError, UntrustedError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise RulesError(f"{extra}: cannot be read ({why}); give a YAML file of rules") from error
        sections.add(str(extra), text)
    return sections.book()


_T = TypeVar("_T")


class _Sections:
    """Collects the sections of files, then checks their references to each other."""

    def __init__(self) -> None:
        self.config: dict[str, tuple[str, ...]] = {}
        self.questions: dict[str, Question] = {}
        self.remedies: dict[str, Remedy] = {}
        self.triage: dict[str, TriageNode] = {}
        self.rules: dict[str, Rule] = {}
        self.places: dict[str, str] = {}

    def add(self, file: str, text: str) -> None:
        try:
            content = parse_yaml(text)
        except UntrustedError as error:
            raise RulesError(f"{file}: {error}") from error
        if not isinstance(content, Mapping):
            raise RulesError(f"{file}: got {type(content).__name__}; needs sections such as 'rules'")
        for section in content:
            if section not in _SECTIONS:
                raise RulesError(f"{file}: {unknown_name('section', section, _SECTIONS)}")
        _refuse_misfit(file, content, _BOOK_SHAPE)
        if content.get("version", _VERSION) != _VERSION:
            raise RulesError(f"{file}: has version {content['version']}; this ottava reads {_VERSION}")
        for name, keys in (content.get("config") or {}).items():
            self.config[str(name)] = tuple(keys)
        for name, entry in (content.get("questions") or {}).items():
            values = dict(entry) | {"choices": tuple(_word(c) for c in entry.get("choices", ("yes", "no")))}
            self.questions[str(name)] = _make(Question, f"{file}: question {name}", {"name": str(name), **values})
        for name, entry in (content.get("remedies") or {}).items():
            self.remedies[str(name)] = _remedy(f"{file}: remedy {name}", str(name), entry)
        for entry in content.get("triage") or ():
            node = _triage(f"{file}: triage {entry.get('id')}", entry)
            self.triage[node.id] = node
            self.places[f"triage {node.id}"] = f"{file}: triage {node.id}"
        for entry in content.get("rules") or ():
            place = f"{file}: rule {entry.get('id', '?') if isinstance(entry, Mapping) else entry}"
            rule = _rule(place, entry)
            self.rules[rule.id] = rule
            self.places[rule.id] = place

    def book(self) -> Rulebook:
        shared = [f"run.{name}" for name in RUN_FACTS]
        shared += [f"config.{name}" for name in self.config] + [f"answer.{name}" for name in self.questions]
        for rule in self.rules.values():
            place = self.places[rule.id]
            facts, functions = VOCABULARY[rule.over] if rule.over != "run" else ({}, {})
            for column in rule.where:
                _known(place, "column", column, facts)
            for condition in rule.conditions:
                _check(place, condition, [*facts, *shared], list(functions))
            for name in rule.remedies:
                _known(place, "remedy", name, self.remedies)
            for name in rule.explains:
                _known(place, "rule", name, self.rules)
        for remedy in self.remedies.values():
            for note in remedy.notes:
                _check(f"remedy {remedy.name}", note.when, shared, [])
        for node in self.triage.values():
            place = self.places[f"triage {node.id}"]
            _check(place, node.known, shared, [])
            for branch in (node.yes, node.no):
                if branch.next is not None:
                    _known(place, "triage node", branch.next, self.triage)
            if node.answer is not None:
                _known(place, "question", node.answer, self.questions)
        tables = (self.config, self.questions, self.remedies, self.triage, self.rules)
        return Rulebook(*(MappingProxyType(table) for table in tables))  # type: ignore[arg-type]  # one type each


def _refuse_misfit(place: str, value: Any, shape: Any) -> None:
    if wrong := misfit(value, shape, "it"):
        raise RulesError(f"{place}: {wrong.removeprefix('it.')}")


def _known(place: str, kind: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise RulesError(f"{place}: {unknown_name(kind, name, known)}")


def _check(place: str, condition: Condition, names: Sequence[str], functions: Sequence[str]) -> None:
    try:
        condition.check(names, functions)
    except ConditionError as error:
        raise RulesError(f"{place}: {error}") from error


def _word(value: Any) -> str:
    """A choice as a word: YAML reads yes and no as booleans."""
    return "yes" if value is True else "no" if value is False else str(value)


def _make(kind: type[_T], place: str, values: Mapping[str, Any]) -> _T:
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]  # every caller gives a dataclass
    for name in values:
        if name not in known:
            raise RulesError(f"{place}: {unknown_name('field', name, known)}")
    try:
        return kind(**values)
    except TypeError as error:
        missing = str(error).partition("argument")[2].lstrip("s:").strip() or str(error)
        raise RulesError(f"{place}: lacks {missing}") from error


def _condition(place: str, text: Any) -> Condition:
    try:
        return Condition.parse(str(text))
    except ConditionError as error:
        raise RulesError(f"{place}: {error}") from error


def _rule(place: str, entry: Any) -> Rule:
    if not isinstance(entry, Mapping):
        raise RulesError(f"{place}: got {type(entry).__name__}; needs fields such as id, title, when")
    _refuse_misfit(place, entry, _RULE_SHAPE)
    values: dict[str, Any] = dict(entry)
    for name in ("when", "critical", "refuted_when"):
        if name in values:
            values[name] = _condition(place, values[name])
    values["support"] = tuple(_condition(place, text) for text in values.get("support", ()))
    for name in ("explains", "remedies", "source"):
        values[name] = tuple(values.get(name, ()))
    where = values.get("where") or {}
    values["where"] = MappingProxyType(
        {column: tuple(map(_word, w if isinstance(w, list) else [w])) for column, w in where.items()}
    )
    choices = {"stage": get_args(Stage), "severity": get_args(Severity), "reach": get_args(Reach), "over": VOCABULARY}
    for name, allowed in choices.items():
        if name in values:
            _known(place, f"value of {name}", values[name], allowed)
    return _make(Rule, place, values)


def _remedy(place: str, name: str, entry: Mapping[str, Any]) -> Remedy:
    patch = entry.get("patch") or {}
    for framework in patch:
        _known(place, "framework", framework, FRAMEWORKS)
    notes = tuple(
        _make(Note, place, {**note, "when": _condition(place, note.get("when", ""))})
        for note in entry.get("notes") or ()
    )
    if (layers := entry.get("layers", "finding")) not in ("finding", "ends"):
        raise RulesError(f"{place}: {unknown_name('layers', layers, ('finding', 'ends'))}")
    return _make(Remedy, place, {**entry, "name": name, "patch": MappingProxyType(dict(patch)), "notes": notes})


def _triage(place: str, entry: Mapping[str, Any]) -> TriageNode:
    values: dict[Any, Any] = dict(entry)
    for raw, name in ((True, "yes"), (False, "no")):  # YAML 1.1 reads the keys yes and no as booleans
        if raw in values:
            values[name] = values.pop(raw)
    for name in ("yes", "no"):
        if name in values:
            values[name] = _make(Branch, place, values[name])
    if "known" in values:
        values["known"] = _condition(place, values["known"])
    return _make(TriageNode, place, values)
