"""Thinning keeps peaks, marks are ordered and told, the strip in words is the strip."""

import re

import numpy as np
import pytest

from ottava.record.reader import Run
from ottava.report.grid import Grid
from ottava.report.sections import SENTENCES, event_text, not_finite_from, thin, worst_runs
from ottava.watching.schedule import Trigger


@pytest.mark.parametrize("length", [1, 5, 100, 5000])
def test_thinning_keeps_ends_and_extremes(length: int) -> None:
    random = np.random.default_rng(0)
    steps, values = np.arange(length) * 3, random.normal(size=length)
    values[length // 2] = 99.0
    kept_steps, kept = thin(steps, values, most=200)
    assert len(kept) <= max(202, 0)
    assert (kept_steps[0], kept_steps[-1]) == (steps[0], steps[-1])
    assert {max(kept), min(kept)} == {values.max(), values.min()}
    assert kept_steps == sorted(set(kept_steps))


def test_loss_that_ends_in_nan_is_dated() -> None:
    steps = np.array([10, 20, 30, 40])
    assert not_finite_from(steps, np.array([1.0, np.nan, 2.0, 3.0])) is None
    assert not_finite_from(steps, np.array([1.0, 2.0, np.nan, np.inf])) == 30
    assert not_finite_from(steps, np.full(4, np.nan)) is None


def test_strip_in_words_says_what_the_strip_shows(small_run: Run) -> None:
    grid = Grid.of(small_run.table(), 100)
    worst = grid.worst_of_looks()
    runs = worst_runs(grid, worst)
    for look, found in enumerate(worst):
        assert found is not None
        first, last = grid.looks[look]
        (run,) = [run for run in runs if run["first"] <= first and last <= run["last"]]
        assert (run["layer"], run["metric"]) == (grid.slots[found.slot].layer, found.metric)
        assert run["level"] >= found.level


def test_every_trigger_is_told_with_its_place_and_numbers() -> None:
    """As the schedule makes them; a loss has no place."""
    for trigger, text in (
        (Trigger("clipping", 0.281, 1e-3, "fc2", "input"), "the cast clipped 28.1 % of X of fc2; the limit is 0.100 %"),
        (
            Trigger("row_sqnr", 5.45, 12.0, "fc2", "grad_output"),
            "the median row of dY of fc2 has 5.45 dB; the limit is 12.0 dB",
        ),
        (
            Trigger("loss_z", 9.5, 6.0),
            "the loss lies 9.50 deviations above the median of the last 32; the limit is 6.00",
        ),
        (Trigger("nonfinite", float("inf"), 0.0, "fc1", "weight"), "W of fc1 has an infinity or NaN"),
        (Trigger("nonfinite", float("nan"), 0.0), "the loss is not finite"),
    ):
        assert event_text({"step": 3, "rank": 0, "kind": "trigger", **trigger.facts()}) == text


@pytest.mark.parametrize("kind", SENTENCES)
def test_a_sentence_is_whole_with_the_facts_it_names(kind: str) -> None:
    """No brace is left."""
    names = [name.removesuffix("_pct").removesuffix("_symbol") for name in re.findall(r"{(\w+)}", SENTENCES[kind])]
    first, _, reason = kind.removesuffix(", no tensor").partition(" ")
    event = {"step": 1, "kind": first, **dict.fromkeys(names, 0.5)} | ({"reason": reason} if reason else {})
    told = event_text(event)
    assert all(words in told for words in re.split(r"{\w+}", SENTENCES[kind]))
    assert "{" not in told
