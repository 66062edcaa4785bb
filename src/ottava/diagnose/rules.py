"""The rule book of `diagnose`: symptoms, causes and remedies as data, read from YAML and checked before use.

Every name in a condition, every remedy, question and explained rule must exist; the error names the file, the rule and
the nearest known name. A file of your own (`--rules FILE`) has the same sections and adds to the shipped one; its rule
replaces a shipped rule with the same id.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from ottava.base.errors import unknown_name
from ottava.base.settings import ConfigError, Section
from ottava.base.untrusted import MAX_YAML_BYTES, UntrustedError, parse_yaml, read_text
from ottava.diagnose.conditions import Condition, ConditionError
from ottava.diagnose.facts import RUN_FACTS, VOCABULARY

FRAMEWORKS = ("ottava", "megatron", "te", "torchao")
_SECTIONS = ("version", "config", "questions", "remedies", "triage", "rules")
_VERSION = 1


def _word(value: Any) -> Any:
    """A choice as a word: YAML reads yes and no as booleans."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def _words(values: Any) -> Any:
    return [_word(value) for value in (values if isinstance(values, (list, tuple)) else [values])]


def _condition(text: Any) -> Condition:
    return text if isinstance(text, Condition) else Condition.parse(str(text))


def _one_of(*names: str) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            raise ValueError(unknown_name("value", value, names))
        return value

    return AfterValidator(check)


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
When = Annotated[Any, BeforeValidator(_condition)]
"""A `Condition`, or its text."""


class RulesError(ValueError):
    """A rule book has a mistake; the message names the file and the place."""

    exit_code = 2


class Question(Section):
    """A fact that the run folder does not have, but its owner may know."""

    name: str
    ask: str
    choices: Words = ("yes", "no")


class _Setting(Section):
    """The keys of a setting in the frameworks."""

    keys: Words


class Note(Section):
    """A constraint of a remedy."""

    when: When
    say: str


class Remedy(Section):
    """A thing to try. Patches are templates, see `patches`."""

    name: str
    rung: int
    """Place on the ladder; 1 is cheapest."""
    cost: str
    text: str
    patch: Mapping[Annotated[str, _one_of(*FRAMEWORKS)], str]
    notes: tuple[Note, ...] = ()
    change: Mapping[str, Any] = Field(default_factory=dict)
    """What the patch for ottava does to a recipe, see `patches.changed`; empty: nothing."""
    layers: Annotated[str, _one_of("finding", "ends")] = "finding"
    """The layers to change: the finding's, or those of the first and the last block."""


class Rule(Section):
    """One symptom with its cause and remedies."""

    id: str
    title: str
    stage: Annotated[str, _one_of("bug", "data", "config", "numeric", "training")]
    when: When
    cause: str
    refute_by: str
    over: Annotated[str, _one_of(*VOCABULARY)] = "casts"
    where: Mapping[str, Words] = Field(default_factory=dict)
    """Column -> words; the rule tests only rows with one of these words."""
    least: int = 1
    """Rows of one series for which the condition must hold: a cast that is noisy in one look is no finding."""
    severity: Annotated[str, _one_of("critical", "warning")] = "warning"
    critical: When = None
    support: tuple[When, ...] = ()
    """A condition that holds raises the confidence; one that does not lowers it a little."""
    refuted_when: When = None
    """If this holds, it lowers the confidence a lot."""
    confidence: float = 0.6
    explains: tuple[str, ...] = ()
    """Rules whose findings are consequences of this one."""
    reach: Annotated[str, _one_of("slot", "tensor", "layer", "run", "everywhere")] = "slot"
    """Reach of these consequences: the same tensor, layer or run, from this finding's first step on; or everywhere."""
    remedies: tuple[str, ...] = ()
    source: tuple[str, ...] = ()

    @property
    def conditions(self) -> Iterable[Condition]:
        """All of them."""
        return [c for c in (self.when, self.critical, self.refuted_when, *self.support) if c is not None]


class Branch(Section):
    """The meaning of an answer in the triage tree."""

    say: str
    next: str | None = None


class TriageNode(Section):
    """A question of the triage tree. The run answers it if it can."""

    id: str
    question: str
    known: When
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
    sections = _shipped().copy()
    if extra is not None:
        try:
            text = read_text(Path(extra), most=MAX_YAML_BYTES)
        except (OSError, UntrustedError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise RulesError(f"{extra}: cannot be read ({why}); give a YAML file of rules") from error
        sections.add(str(extra), text)
    return sections.book()


@functools.cache
def _shipped() -> _Sections:
    shipped = resources.files("ottava.diagnose").joinpath("rules.yaml")
    sections = _Sections()
    sections.add("rules.yaml", shipped.read_text(encoding="utf-8"))
    return sections


_T = TypeVar("_T", bound=Section)


class _Sections:
    """Collects the sections of files, then checks their references to each other."""

    def __init__(self) -> None:
        self.config: dict[str, tuple[str, ...]] = {}
        self.questions: dict[str, Question] = {}
        self.remedies: dict[str, Remedy] = {}
        self.triage: dict[str, TriageNode] = {}
        self.rules: dict[str, Rule] = {}
        self.places: dict[str, str] = {}

    def copy(self) -> _Sections:
        """The same entries, to which a file may add."""
        other = _Sections()
        for name, table in vars(self).items():
            setattr(other, name, dict(table))
        return other

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
        if content.get("version", _VERSION) != _VERSION:
            raise RulesError(f"{file}: has version {content['version']}; this ottava reads {_VERSION}")
        for name, keys in _section(file, content, "config", dict):
            self.config[str(name)] = _made(_Setting, f"{file}: config {name}", keys=keys).keys
        for name, entry in _section(file, content, "questions", dict):
            self.questions[str(name)] = _made(Question, f"{file}: question {name}", entry, name=str(name))
        for name, entry in _section(file, content, "remedies", dict):
            self.remedies[str(name)] = _made(Remedy, f"{file}: remedy {name}", entry, name=str(name))
        for _, entry in _section(file, content, "triage", list):
            node = _made(TriageNode, place := f"{file}: triage {_id(entry)}", entry)
            self.triage[node.id] = node
            self.places[f"triage {node.id}"] = place
        for _, entry in _section(file, content, "rules", list):
            rule = _made(Rule, place := f"{file}: rule {_id(entry)}", entry)
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


def _section(file: str, content: Mapping[Any, Any], name: str, kind: type) -> Iterable[tuple[Any, Any]]:
    """(key, entry) of a section."""
    entries: Any = content.get(name) or kind()
    if kind is dict and isinstance(entries, dict):
        return entries.items()
    if kind is list and isinstance(entries, list):
        return enumerate(entries)
    raise RulesError(f"{file}: {name}: got {type(entries).__name__}; needs a {kind.__name__}")


def _id(entry: Any) -> Any:
    return entry.get("id", "?") if isinstance(entry, Mapping) else entry


def _made(kind: type[_T], place: str, entry: Any = MappingProxyType({}), **fields: Any) -> _T:
    if not isinstance(entry, Mapping):
        raise RulesError(f"{place}: got {type(entry).__name__}; needs fields: {', '.join(kind.model_fields)}")
    try:
        return kind(**{str(_word(key)): value for key, value in entry.items()}, **fields)
    except (ConfigError, TypeError) as error:
        raise RulesError(f"{place}: {error}") from error


def _known(place: str, kind: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise RulesError(f"{place}: {unknown_name(kind, name, known)}")


def _check(place: str, condition: Condition, names: Sequence[str], functions: Sequence[str]) -> None:
    try:
        condition.check(names, functions)
    except ConditionError as error:
        raise RulesError(f"{place}: {error}") from error
