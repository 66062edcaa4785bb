"""Faults put into watched training: the right rule comes first, and clean twins are left alone.

A part of benchmarks/faults.py, which has all of them, at more strengths and in a second size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from ottava.diagnose.rules import load_rules

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def load_suite() -> ModuleType:
    with importable(BENCHMARKS):
        import faults

    return faults


suite = load_suite()
QUICK = (
    "stale FP8 weight",
    "dY.T cast from another tensor",
    "wide gradient in E4M3",
    "zero rows without a floor under amax",
)
SLOW = (
    "scale of W rounded alone",
    "massive tokens in FC2's input",
    "amax jumps under delayed scales",
    "clustered values, rounded up",
)
"""Each is a training. `./x test` has one fault of each kind: of a weight, a gradient, a format and a rule's floor."""
FAULTS = {fault.name: fault for fault in suite.FAULTS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_right_rule_comes_first(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    result = suite.try_fault(fault, fault.strengths[-1], "small", 0, tmp_path)
    assert result.first == fault.rule


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe, activation", [("delayed", "swiglu"), ("mxfp8", "relu"), ("bf16", "swiglu")])
def test_no_rule_fires_on_a_clean_twin(recipe: str, activation: str, tmp_path: Path) -> None:
    result = suite.try_clean(recipe, activation, "small", 1, tmp_path)
    assert [result.first, *result.others] == [""]


def test_every_rule_is_injected_or_says_why_not() -> None:
    injected = {fault.rule for fault in suite.FAULTS}
    assert injected | set(suite.NOT_INJECTED) == set(load_rules().rules)
    assert not injected & set(suite.NOT_INJECTED)


def test_scores_count_what_they_say() -> None:
    def result(expected: str, first: str) -> object:
        return suite.Result("x", expected, first, [], "small", 1.0, 1, "tensorwise", False, 0.0)

    scores = suite.scores([result("N1", "N1"), result("N1", "N3"), result("N2", ""), result("", ""), result("", "N5")])
    assert scores["recall"] == 0.3333
    assert scores["precision"] == 0.3333
    assert scores["clean_runs_with_a_finding"] == 1
    assert "| x | tensorwise | N1 | 1 of 2 |" in suite.table([result("N1", "N1"), result("N1", "N3")])
