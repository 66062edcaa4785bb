"""The language of rules: precedence, three answers, and errors that name the place."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from ottava.diagnose.conditions import Condition, ConditionError, Missing, Node, Values, evaluate


class Sample:
    """Three rows; "gone" is missing, f doubles."""

    count = 3
    known: Mapping[str, object] = {"a": [1.0, 2.0, 3.0], "b": [3.0, np.nan, 1.0], "word": ["x", "y", "x"]}

    def value(self, name: str) -> Values:
        if name == "gone":
            raise Missing("the gone column")
        values = self.known[name]
        return np.array(values, dtype=object if name == "word" else float)

    def call(self, name: str, argument: Node) -> Values:
        values = evaluate(argument, self, set())
        if values is None:
            raise Missing("what f needs")
        return np.asarray(2 * values)


def ask(text: str) -> list[float]:
    return Condition.parse(text).ask(Sample())[0].tolist()


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a > 1", [0, 1, 1]),
        ("a >= 1 and a < 3", [1, 1, 0]),
        ("a == 1 or a == 2 and b > 100", [1, 0, 0]),  # and binds closer
        ("(a == 1 or a == 2) and a > 1", [0, 1, 0]),
        ("not a > 1", [1, 0, 0]),
        ("not a > 1 or a > 2", [1, 0, 1]),
        ("a + 2 * 3 > 8", [0, 0, 1]),
        ("(a + 2) * 3 > 12", [0, 0, 1]),
        ("-a < -1.5", [0, 1, 1]),
        ("10 - a - 1 == 7", [0, 1, 0]),  # from the left
        ("f(a) > 4", [0, 0, 1]),
        ("f(a + 1) == 6", [0, 1, 0]),
        ("word == 'x'", [1, 0, 1]),
        ('word in ("y", "z")', [0, 1, 0]),
        ("a in (1, 3)", [1, 0, 1]),
        ("a > 1e0", [0, 1, 1]),
        ("b > 0", [1, 0, 1]),  # NaN compares false
        ("b != 7", [1, 0, 1]),  # also here
        ("a in (3)", [0, 0, 1]),  # one choice is no tuple
        ("word > 1 or word + 1 < 9", [0, 0, 0]),  # a word is no number
        ("a > 1\n  and a < 3", [0, 1, 0]),
    ],
)
def test_answers(text: str, expected: list[int]) -> None:
    assert ask(text) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("gone > 1", ["?", "?", "?"]),
        ("gone > 1 or a > 1", ["?", 1, 1]),
        ("gone > 1 and a > 1", [0, "?", "?"]),
        ("not gone > 1", ["?", "?", "?"]),
        ("f(gone) > 1 or a > 2", ["?", "?", 1]),
        ("gone in (1, 2) and a > 2", [0, 0, "?"]),
        ("gone + a > 1", ["?", "?", "?"]),
    ],
)
def test_what_is_missing_is_unknown_unless_the_rest_decides(text: str, expected: list[object]) -> None:
    answer, missing = Condition.parse(text).ask(Sample())
    assert ["?" if np.isnan(value) else value for value in answer] == expected
    assert missing == {"what f needs" if "f(" in text else "the gone column"}


@pytest.mark.parametrize(
    "text, says",
    [
        ("a >", "invalid syntax at the end; needs a condition such as"),
        ("a > 1 b", "invalid syntax at character 7"),
        ("(a > 1", "'(' was never closed at character 1"),
        ("a > 1) or (a < 2", "unmatched ')' at character 6"),
        ("a > and", "at character 5"),
        ("a ? 1", "at character 3"),
        ("a", "compares nothing"),
        ("a in [3]", "got '[3]' at character 6; a condition is made of names"),
        ("(1, 2) in a", "got '(1, 2)' at character 1"),
        ("1 < a < 3", "one comparison at a time"),
        ("a is b", "got 'a is b'"),
        ("lambda: a > 1", "got 'lambda: a > 1'"),
        ("import os; a > 1", "at character 1"),
        ("__import__('os').system('x') > 1", "got \"__import__('os').system('x')\" at character 1"),
        ("f(a).b > 1", "got 'f(a).b'"),
        ("a > True", "got 'True'"),
        ("a > 1e400", "at character 5"),
        ("a > 1" + "0" * 400, "at character 5"),
        ("a > '\0'", "null bytes"),
        ("a" * 5000, "at most 4000"),
        ("-" * 3000 + "a > 1", "cannot be read"),
        ("not " * 150 + "a > 1", "nested more than 100 deep"),
        ("", "at the end"),
    ],
)
def test_mistakes_say_where(text: str, says: str) -> None:
    with pytest.raises(ConditionError) as error:
        Condition.parse(text)
    assert says in str(error.value)


def test_unknown_names_and_functions_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConditionError, match="did you mean 'underflow_pct'"):
        Condition.parse("underflw_pct > 1").check(["underflow_pct", "kind"], [])
    with pytest.raises(ConditionError, match="did you mean 'early'"):
        Condition.parse("erly(a) > 1").check(["a"], ["early"])


def test_text_of_parts_reads_as_it_was_written() -> None:
    condition = Condition.parse("f(a) > 2 * b and not (word in ('x', 'y')) or a < 1")
    assert [str(c) for c in condition.comparisons] == ["f(a) > 2 * b", "a < 1"]
    assert condition.names == {"a", "b", "word"}
    assert condition.functions == {"f"}
