"""Thinning keeps peaks, marks are ordered, the strip in words is the strip."""

import numpy as np
import pytest

from ottava.record.reader import Run
from ottava.report.grid import Grid
from ottava.report.timeline import marks, not_finite_from, thin, worst_runs


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


def test_events_are_ordered() -> None:
    told = marks(
        [
            {"step": 9, "rank": 0, "kind": "fallback", "layer": "fc2", "applied": False, "to": "bf16"},
            {"step": 3, "rank": 0, "kind": "dump", "nbytes": 65536, "file": "a.safetensors"},
            {"step": 5, "rank": 0, "kind": "of a later version", "where": ["a", 1]},
        ]
    )
    assert [(e["step"], e["letter"], e["quiet"]) for e in told] == [(3, "D", True), (5, "O", False), (9, "F", False)]
    assert [e["text"] for e in told] == [
        "nbytes 65,536, file a.safetensors",
        'where ["a", 1]',
        "layer fc2, applied no, to bf16",
    ]


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
