"""The language of rules: conditions over rows, in a small part of Python's grammar.

    underflow_pct > 1 and (kind == "fc2" or row_sqnr_p50_db < warn_db) and not format in ("E5M2")

    names       statistics and other facts of a row; "config.x" and "answer.x" are facts of the whole run
    literals    numbers, and words in quotes
    operators   or, and, not, in (...), == != < <= > >=, + - * / %, parentheses
    functions   early(x), before(x), peers(x), baseline(x), ...: functions of the rows

`ast` parses a condition and `_check` checks every part; Python never runs it. Every part has one value per row. An
unknown number (NaN), or a word in place of a number, makes its comparison false. If the run has nothing for a name, the
comparison is unknown: "unknown or true" is true, "unknown or false" is unknown, and the rule says what it needs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ottava.base.errors import unknown_name
from ottava.record.reader import number_of

Values = npt.NDArray[Any]
"""One value per row: float64 numbers, or words as objects. A condition gives 1 (true), 0 (false) or NaN (unknown)."""
Node = ast.expr
"""A part of a condition."""

_ORDER: Mapping[type[ast.AST], tuple[str, Callable[[Any, Any], Any]]] = MappingProxyType(
    {
        ast.Lt: ("<", np.less),
        ast.LtE: ("<=", np.less_equal),
        ast.Gt: (">", np.greater),
        ast.GtE: (">=", np.greater_equal),
    }
)
_EQUALITY: Mapping[type[ast.AST], tuple[str, Callable[[Any, Any], Any]]] = MappingProxyType(
    {ast.Eq: ("==", lambda a, b: a == b), ast.NotEq: ("!=", lambda a, b: a != b)}
)
_COMPARE = MappingProxyType({**_ORDER, **_EQUALITY})
_ARITHMETIC: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = MappingProxyType(
    {ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.Div: np.divide, ast.Mod: np.mod}
)
_LONGEST, _DEEPEST, _LARGEST = 4000, 100, 1e300
"""Limits: characters of a condition, depth of its parts, size of a number. Python could parse more; nobody needs it."""
_NEEDED = "needs a condition such as 'underflow_pct > 1'"


class ConditionError(ValueError):
    """A condition cannot be parsed; the message says where, and what is allowed."""

    exit_code = 2


class Missing(Exception):
    """The run has no values for a name; the text says what would give them."""


class Rows(Protocol):
    """The rows to which a condition is applied."""

    @property
    def count(self) -> int:
        """Number of rows."""

    def value(self, name: str) -> Values:
        """A fact of every row.

        Raises:
            Missing: the run has no values for it.
        """

    def call(self, name: str, argument: Node) -> Values:
        """The value of a function for every row.

        Raises:
            Missing: the run lacks values to compute it.
        """


def evaluate(node: Node, rows: Rows, missing: set[str]) -> Values | None:
    """The value of a part of a condition for every row, shape (rows,); None if a name is missing, which `missing` gets.

    Example: see `Condition.ask`.
    """
    match node:
        case ast.Constant(value=value):
            return np.full(rows.count, value, dtype=object if isinstance(value, str) else np.float64)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return np.asarray(1.0 - _answer(operand, rows, missing))
        case ast.UnaryOp(operand=operand):
            values = evaluate(operand, rows, missing)
            return None if values is None else np.asarray(0.0 - numbers(values))
        case ast.BoolOp(op=op, values=parts):
            return _joined(0.0 if isinstance(op, ast.And) else 1.0, [_answer(part, rows, missing) for part in parts])
        case ast.BinOp(left=left, op=op, right=right):
            low, high = evaluate(left, rows, missing), evaluate(right, rows, missing)
            if low is None or high is None:
                return None
            with np.errstate(all="ignore"):
                return np.asarray(_ARITHMETIC[type(op)](numbers(low), numbers(high)), dtype=np.float64)
        case ast.Compare(left=left, ops=[ast.In()], comparators=[choices]):
            return _among(evaluate(left, rows, missing), choices, rows, missing)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _compared(type(op), evaluate(left, rows, missing), evaluate(right, rows, missing), rows)
    try:
        if isinstance(node, ast.Call):
            return rows.call(ast.unparse(node.func), node.args[0])
        return rows.value(ast.unparse(node))
    except Missing as what:
        missing.add(str(what))
        return None


def numbers(values: Values | Sequence[Any]) -> Values:
    """Values as numbers; NaN for anything else.

    Example:
        >>> numbers(["8", "fc2", None, 1]).tolist()
        [8.0, nan, nan, 1.0]
    """
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values.astype(np.float64)
    return np.array([number_of(value) for value in values], dtype=np.float64)


def _answer(node: Node, rows: Rows, missing: set[str]) -> Values:
    answer = evaluate(node, rows, missing)
    return np.full(rows.count, np.nan) if answer is None else answer


def _joined(absorbing: float, answers: Sequence[Values]) -> Values:
    """and (absorbing 0) or or (absorbing 1) of several answers, with "unknown" as a third answer."""
    result = answers[0]
    for answer in answers[1:]:
        either = (result == absorbing) | (answer == absorbing)
        result = np.where(either, absorbing, np.where(np.isnan(result) | np.isnan(answer), np.nan, 1.0 - absorbing))
    return np.asarray(result)


def _compared(sign: type[ast.AST], left: Values | None, right: Values | None, rows: Rows) -> Values:
    if left is None or right is None:
        return np.full(rows.count, np.nan)
    if sign in _ORDER:
        left, right = numbers(left), numbers(right)
    with np.errstate(invalid="ignore"):
        result = np.asarray(_COMPARE[sign][1](left, right), dtype=np.float64)
    if left.dtype != object and right.dtype != object:
        result[np.isnan(left) | np.isnan(right)] = 0.0  # also !=
    return result


def _among(left: Values | None, choices: Node, rows: Rows, missing: set[str]) -> Values:
    if left is None:
        return np.full(rows.count, np.nan)
    result = np.zeros(rows.count)
    for choice in choices.elts if isinstance(choices, ast.Tuple) else [choices]:
        result = np.maximum(result, np.asarray(left == evaluate(choice, rows, missing), dtype=np.float64))
    return result


@dataclass(frozen=True)
class Comparison:
    """A comparison such as left < right. Findings show it as evidence."""

    sign: str
    left: Node
    right: Node
    node: Node

    def __str__(self) -> str:
        return ast.unparse(self.node)


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
        """Parses a condition.

        Raises:
            ConditionError: the text is no condition.
        """
        line = " ".join(text.strip().splitlines())
        if len(line) > _LONGEST:
            raise ConditionError(f"{line[:40]!r}...: has {len(line)} characters; needs at most {_LONGEST}")
        try:
            root = ast.parse(line, mode="eval").body
        except SyntaxError as error:
            where = f"character {error.offset}" if 0 < (error.offset or 0) <= len(line) else "the end"
            raise ConditionError(f"{text!r}: {error.msg} at {where}; {_NEEDED}") from error
        except (ValueError, RecursionError, MemoryError) as error:  # a null byte, or too many parentheses
            raise ConditionError(f"{line[:40]!r}: cannot be read ({error})") from error
        _check(root, line)
        if not any(isinstance(part, ast.Compare) for part in _walk(root)):
            raise ConditionError(f"{text!r}: compares nothing; {_NEEDED}")
        return cls(text, root)

    @property
    def names(self) -> frozenset[str]:
        """The facts in it."""
        return frozenset(ast.unparse(node) for node in _walk(self.root) if isinstance(node, (ast.Name, ast.Attribute)))

    @property
    def functions(self) -> frozenset[str]:
        """The functions in it."""
        return frozenset(ast.unparse(node.func) for node in _walk(self.root) if isinstance(node, ast.Call))

    @property
    def comparisons(self) -> list[Comparison]:
        """The comparisons in it, from left to right."""
        nodes = [node for node in _walk(self.root) if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARE]
        return [Comparison(_COMPARE[type(n.ops[0])][0], n.left, n.comparators[0], n) for n in nodes]

    def check(self, names: Sequence[str], functions: Sequence[str]) -> None:
        """Refuses unknown names and functions.

        Raises:
            ConditionError: a name or function is unknown; the message has the nearest known one.
        """
        for name in sorted(self.names - set(names)):
            raise ConditionError(f"{self.text!r}: {unknown_name('name', name, names)}")
        for name in sorted(self.functions - set(functions)):
            raise ConditionError(f"{self.text!r}: {unknown_name('function', name, functions)}")

    def ask(self, rows: Rows) -> tuple[Values, set[str]]:
        """The answer of every row (1, 0, NaN for unknown), and the missing values."""
        missing: set[str] = set()
        return _answer(self.root, rows, missing), missing


def _parts(node: Node) -> list[Node]:
    """The parts of a part, from left to right; a dotted name has none."""
    if isinstance(node, ast.Attribute):
        return []
    if isinstance(node, ast.Call):
        return node.args
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for part in _parts(node):
        yield from _walk(part)


def _check(node: Node, text: str, depth: int = 0, of_in: bool = False) -> None:
    """Refuses everything in Python that is not in the list above."""
    if depth > _DEEPEST:
        raise ConditionError(f"{text[:40]!r}...: is nested more than {_DEEPEST} deep")
    match node:
        case ast.Name() | ast.UnaryOp(op=ast.Not() | ast.USub()) | ast.BoolOp():
            allowed = True
        case ast.Constant(value=value):
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
            allowed = isinstance(value, str) or number
        case ast.Attribute():
            allowed = ast.unparse(node).replace(".", "").isidentifier()
        case ast.BinOp(op=op):
            allowed = type(op) in _ARITHMETIC
        case ast.Compare(ops=ops):
            allowed = len(ops) == 1 and (type(ops[0]) in _COMPARE or isinstance(ops[0], ast.In))
        case ast.Call(func=function, args=arguments, keywords=keywords):
            allowed = isinstance(function, ast.Name) and len(arguments) == 1 and not keywords
        case _:
            allowed = of_in and isinstance(node, ast.Tuple)
    if not allowed:
        raise ConditionError(
            f"{text[:200]!r}: got {ast.unparse(node)[:60]!r} at character {node.col_offset + 1}; a condition "
            "is made of names, numbers, words in quotes, one comparison at a time, in (...), and, or, not, "
            "+ - * / % and f(x)"
        )
    for part in _parts(node):
        chosen = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In) and part is not node.left
        _check(part, text, depth + 1, chosen)
