"""Interleaved rounds: who runs when, and what the ratios are."""

from __future__ import annotations

import itertools

import pytest

from ottava.bench.rounds import interleaved


def test_rounds_run_every_variant_in_turn() -> None:
    """Two rounds to warm up, then the counted ones."""
    ran: list[str] = []
    interleaved({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, 3)
    assert ran == ["a", "b"] * 5


def test_ratios_are_within_a_round() -> None:
    """A machine that slows down by ten from round to round: b takes twice a's time in each, and the ratio is 2."""
    now = 0.0
    step = itertools.count()

    def spend(cost: float) -> None:
        nonlocal now
        now += cost * 10.0 ** (next(step) // 2)

    a, b = interleaved({"a": lambda: spend(1), "b": lambda: spend(2)}, 4, clock=lambda: now)
    assert (a.ratio, a.quartiles, b.ratio, b.quartiles) == (1.0, (1.0, 1.0), 2.0, (2.0, 2.0))
    assert a.milliseconds == pytest.approx(1e3 * (1e3 + 1e4) / 2)
    assert b.to_dict() == {"name": "b", "milliseconds": b.milliseconds, "ratio": 2.0, "quartiles": [2.0, 2.0]}


def test_nothing_to_measure_is_refused() -> None:
    """The errors name what is needed."""
    with pytest.raises(ValueError, match="rounds: got 1; needs 2 or more"):
        interleaved({"a": lambda: None}, 1)
    with pytest.raises(ValueError, match="variants: got none"):
        interleaved({}, 5)
