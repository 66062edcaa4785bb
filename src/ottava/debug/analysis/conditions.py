"""The language in which rules ask: a small expression over rows, parsed here and never handed to Python.

    underflow_pct > 1 and (kind == "fc2" or row_sqnr_p50_db < warn_db) and not format in ("E5M2")

    names       statistics and other facts of a row; "config.x", "answer.x" are those of the whole run
    literals    numbers, and words in quotes
    operators   or, and, not, in (...), == != < <= > >=, + - * / %, parentheses
    functions   early(x), before(x), peers(x), baseline(x), ...: what the rows offer

A value is one per row. A number that is not known (NaN) makes its comparison false. A name for which the run has
nothing at all makes it unknown: "unknown or true" is true, "unknown or false" is unknown, and the rule says what it
needs.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ottava.errors import unknown_name

Values = npt.NDArray[Any]
"""One per row: float64 numbers, or words as objects. Of a condition: 1 true, 0 false, NaN unknown."""

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)|(?P<name>[A-Za-z_][\w.]*)|(?P<word>\"[^\"]*\"|'[^']*')"
    r"|(?P<sign><=|>=|==|!=|[-+*/%<>(),]))"
)
_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        "<": np.less,
        "<=": np.less_equal,
        ">": np.greater,
        ">=": np.greater_equal,
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
    }
)
_ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide, "%": np.mod}
)
_KEYWORDS = frozenset({"and", "or", "not", "in"})


class ConditionError(ValueError):
    """A condition cannot be read; the message says where and what is expected."""

    exit_code = 2


class Missing(Exception):
    """The run has nothing under a name; the text says what would give it."""


class Rows(Protocol):
    """What conditions are asked of."""

    @property
    def count(self) -> int:
        """How many rows."""

    def value(self, name: str) -> Values:
        """A fact of every row.

        Raises:
            Missing: the run has none of it.
        """

    def call(self, name: str, argument: Node) -> Values:
        """A function of every row.

        Raises:
            Missing: the run has nothing to compute it from.
        """


class Node(ABC):
    """A part of a condition."""

    @abstractmethod
    def values(self, rows: Rows, missing: set[str]) -> Values | None:
        """One per row; None where a name in it is missing, which is then noted."""

    def parts(self) -> Sequence[Node]:
        """Those it is made of."""
        return ()

    def walk(self) -> Iterator[Node]:
        """Itself and all parts."""
        yield self
        for part in self.parts():
            yield from part.walk()


@dataclass(frozen=True)
class Literal(Node):
    """A number or a word."""

    value: float | str

    def values(self, rows: Rows, missing: set[str]) -> Values | None:
        """See `Node.values`."""
        return np.full(rows.count, self.value, dtype=np.float64 if isinstance(self.value, float) else object)

    def __str__(self) -> str:
        return f"{self.value:g}" if isinstance(self.value, float) else repr(self.value)


@dataclass(frozen=True)
class Name(Node):
    """A fact of a row."""

    name: str

    def values(self, rows: Rows, missing: set[str]) -> Values | None:
        """See `Node.values`."""
        try:
            return rows.value(self.name)
        except Missing as what:
            missing.add(str(what))
            return None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Call(Node):
    """A function of an expression."""

    name: str
    argument: Node

    def values(self, rows: Rows, missing: set[str]) -> Values | None:
        """See `Node.values`."""
        try:
            return rows.call(self.name, self.argument)
        except Missing as what:
            missing.add(str(what))
            return None

    def parts(self) -> Sequence[Node]:
        """See `Node.parts`."""
        return (self.argument,)

    def __str__(self) -> str:
        return f"{self.name}({self.argument})"


@dataclass(frozen=True)
class Arithmetic(Node):
    """left + - * / % right."""

    sign: str
    left: Node
    right: Node

    def values(self, rows: Rows, missing: set[str]) -> Values | None:
        """See `Node.values`."""
        left, right = self.left.values(rows, missing), self.right.values(rows, missing)
        if left is None or right is None:
            return None
        with np.errstate(all="ignore"):
            return np.asarray(_ARITHMETIC[self.sign](left, right), dtype=np.float64)

    def parts(self) -> Sequence[Node]:
        """See `Node.parts`."""
        return self.left, self.right

    def __str__(self) -> str:
        return f"{self.left} {self.sign} {self.right}"


@dataclass(frozen=True)
class Comparison(Node):
    """left < right, and the like; what a finding shows as evidence."""

    sign: str
    left: Node
    right: Node

    def values(self, rows: Rows, missing: set[str]) -> Values | None:
        """See `Node.values`."""
        left, right = self.left.values(rows, missing), self.right.values(rows, missing)
        if left is None or right is None:
            return np.full(rows.count, np.nan)
        with np.errstate(invalid="ignore"):
            found = np.asarray(_COMPARE[self.sign](left, right), dtype=np.float64)
        if left.dtype != object and right.dtype != object:
            found[np.isnan(left) | np.isnan(right)] = 0.0  # also !=
        return found

    def parts(self) -> Sequence[Node]:
        """See `Node.parts`."""
        return self.left, self.right

    def __str__(self) -> str:
        return f"{self.left} {self.sign} {self.right}"


@dataclass(frozen=True)
class Among(Node):
    """left in (a, b, ...)."""

    left: Node
    choices: tuple[Node, ...]

    def values(self, rows: Rows, missing: set[str]) -> Values | None:
        """See `Node.values`."""
        left = self.left.values(rows, missing)
        if left is None:
            return np.full(rows.count, np.nan)
        found = np.zeros(rows.count)
        for choice in self.choices:
            found = np.maximum(found, np.asarray(left == choice.values(rows, missing), dtype=np.float64))
        return found

    def parts(self) -> Sequence[Node]:
        """See `Node.parts`."""
        return (self.left, *self.choices)

    def __str__(self) -> str:
        return f"{self.left} in ({', '.join(map(str, self.choices))})"


@dataclass(frozen=True)
class Logical(Node):
    """and, or, not over conditions, with "unknown" as a third answer."""

    word: str
    operands: tuple[Node, ...]

    def values(self, rows: Rows, missing: set[str]) -> Values | None:
        """See `Node.values`."""
        answers = [part.values(rows, missing) for part in self.operands]
        known = [np.full(rows.count, np.nan) if answer is None else answer for answer in answers]
        if self.word == "not":
            return np.asarray(1.0 - known[0])
        absorbing = 0.0 if self.word == "and" else 1.0
        result = known[0]
        for answer in known[1:]:
            either = (result == absorbing) | (answer == absorbing)
            result = np.where(either, absorbing, np.where(np.isnan(result) | np.isnan(answer), np.nan, 1.0 - absorbing))
        return np.asarray(result)

    def parts(self) -> Sequence[Node]:
        """See `Node.parts`."""
        return self.operands

    def __str__(self) -> str:
        if self.word == "not":
            return f"not ({self.operands[0]})"
        return f" {self.word} ".join(f"({p})" if isinstance(p, Logical) else str(p) for p in self.operands)


@dataclass(frozen=True)
class Condition:
    """A parsed condition.

    Example:
        >>> condition = Condition.parse("underflow_pct > 1 and kind == 'fc2'")
        >>> sorted(condition.names), [str(part) for part in condition.comparisons]
        (['kind', 'underflow_pct'], ['underflow_pct > 1', "kind == 'fc2'"])
    """

    text: str
    root: Node

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Reads a condition.

        Raises:
            ConditionError: it is no condition.
        """
        return cls(text, _Parser(text).whole())

    @property
    def names(self) -> frozenset[str]:
        """Facts it asks for."""
        return frozenset(node.name for node in self.root.walk() if isinstance(node, Name))

    @property
    def functions(self) -> frozenset[str]:
        """Functions it calls."""
        return frozenset(node.name for node in self.root.walk() if isinstance(node, Call))

    @property
    def comparisons(self) -> list[Comparison]:
        """Those it is made of, from left to right."""
        return [node for node in self.root.walk() if isinstance(node, Comparison)]

    def check(self, names: Sequence[str], functions: Sequence[str]) -> None:
        """Refuses what no row will ever have.

        Raises:
            ConditionError: an unknown name or function, with the nearest known one.
        """
        for name in sorted(self.names - set(names)):
            raise ConditionError(f"{self.text!r}: {unknown_name('name', name, names)}")
        for name in sorted(self.functions - set(functions)):
            raise ConditionError(f"{self.text!r}: {unknown_name('function', name, functions)}")

    def ask(self, rows: Rows) -> tuple[Values, set[str]]:
        """The answer of every row (1, 0, NaN for unknown), and what was missing."""
        missing: set[str] = set()
        answer = self.root.values(rows, missing)
        unknown = np.full(rows.count, np.nan)
        return (unknown if answer is None else answer), missing


class _Parser:
    """Recursive descent, one function a level of precedence."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.tokens: list[tuple[str, str, int]] = []
        place = 0
        while place < len(text.rstrip()):
            match = _TOKEN.match(text, place)
            if match is None:
                raise ConditionError(f"{text!r}: cannot read {text[place:].strip()[:12]!r} at character {place}")
            kind = str(match.lastgroup)
            self.tokens.append((kind, match.group(kind), match.start(kind)))
            place = match.end()

    def whole(self) -> Node:
        node = self.either()
        if self.at < len(self.tokens):
            self.refuse("an operator, 'and' or 'or'")
        if not any(isinstance(part, (Comparison, Among)) for part in node.walk()):
            raise ConditionError(f"{self.text!r}: compares nothing; needs a condition such as 'underflow_pct > 1'")
        return node

    def either(self) -> Node:
        return self.joined("or", self.both)

    def both(self) -> Node:
        return self.joined("and", self.negated)

    def joined(self, word: str, below: Callable[[], Node]) -> Node:
        parts = [below()]
        while self.took(word):
            parts.append(below())
        return parts[0] if len(parts) == 1 else Logical(word, tuple(parts))

    def negated(self) -> Node:
        return Logical("not", (self.negated(),)) if self.took("not") else self.compared()

    def compared(self) -> Node:
        left = self.sum()
        if self.took("in"):
            self.expect("(")
            choices = [self.sum()]
            while self.took(","):
                choices.append(self.sum())
            self.expect(")")
            return Among(left, tuple(choices))
        for sign in _COMPARE:
            if self.took(sign):
                return Comparison(sign, left, self.sum())
        return left

    def sum(self) -> Node:
        return self.chained(("+", "-"), self.product)

    def product(self) -> Node:
        return self.chained(("*", "/", "%"), self.atom)

    def chained(self, signs: tuple[str, ...], below: Callable[[], Node]) -> Node:
        node = below()
        while (sign := next((s for s in signs if self.took(s)), None)) is not None:
            node = Arithmetic(sign, node, below())
        return node

    def atom(self) -> Node:
        if self.took("("):
            node = self.either()
            self.expect(")")
            return node
        if self.took("-"):
            return Arithmetic("-", Literal(0.0), self.atom())
        if self.at >= len(self.tokens):
            self.refuse("a name, a number or a word in quotes")
        kind, text, _ = self.tokens[self.at]
        if kind == "sign" or text in _KEYWORDS:
            self.refuse("a name, a number or a word in quotes")
        self.at += 1
        if kind == "number":
            return Literal(float(text))
        if kind == "word":
            return Literal(text[1:-1])
        if self.took("("):
            argument = self.either()
            self.expect(")")
            return Call(text, argument)
        return Name(text)

    def took(self, text: str) -> bool:
        if self.at < len(self.tokens) and self.tokens[self.at][0] != "word" and self.tokens[self.at][1] == text:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.took(text):
            self.refuse(repr(text))

    def refuse(self, wanted: str) -> None:
        ends = self.at >= len(self.tokens)
        found = "the end" if ends else f"{self.tokens[self.at][1]!r} at character {self.tokens[self.at][2]}"
        raise ConditionError(f"{self.text!r}: found {found}; needs {wanted}")
