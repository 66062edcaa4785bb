"""Tallies merge exactly, have a zero, and come back from what `measure` packs. Values: tests/debug/test_measure.py."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from ottava.debug.tally import (
    EXTREME_FIELDS,
    SUM_FIELDS,
    SUM_WIDTH,
    Tally,
    tally_fields,
    unpack,
)


def filled(seed: int) -> Tally:
    """Every field a different number, histograms too; whole numbers, so that sums are exact in any order."""
    generator = np.random.default_rng(seed)
    values: dict[str, Any] = {}
    for f in tally_fields():
        bins = f.metadata["bins"]
        values[f.name] = generator.integers(1, 1 << 40, bins).astype(float) if bins else float(generator.integers(1e9))
    return Tally(**values)


def test_fields_are_sorted_into_sums_and_extremes() -> None:
    """None is forgotten, none is both; a histogram adds."""
    assert {f.name for f in SUM_FIELDS} | {f.name for f in EXTREME_FIELDS} == {f.name for f in fields(Tally)}
    assert len(SUM_FIELDS) + len(EXTREME_FIELDS) == len(fields(Tally))
    assert {f.name for f in tally_fields("histogram")} <= {f.name for f in SUM_FIELDS}
    assert {*tally_fields("histogram")} | {*tally_fields("number")} == {*tally_fields()}
    assert sum(f.metadata["bins"] or 1 for f in SUM_FIELDS) == SUM_WIDTH


def test_merging_has_a_zero_and_no_order_and_no_brackets() -> None:
    """Ranks, micro-batches and steps may be merged in any order."""
    a, b, c = filled(1), filled(2), filled(3)
    assert a + Tally() == Tally() + a == a
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + b != a


@pytest.mark.parametrize("f", [*tally_fields()], ids=lambda f: f.name)
def test_every_field_merges_by_its_rule(f: Any) -> None:
    """Sums add, extremes take the larger or the smaller."""
    a, b = filled(1), filled(2)
    rule = {"sum": np.add, "max": np.maximum, "min": np.minimum}[f.metadata["merge"]]
    assert np.array_equal(getattr(a + b, f.name), rule(getattr(a, f.name), getattr(b, f.name)))


def test_tables_merge_row_by_row() -> None:
    """Every field may be an array of rows."""
    a = Tally(n=np.array([1.0, 2.0]), amax=np.array([5.0, 0.0]), exponents=np.ones((2, 1024)))
    b = Tally(n=np.array([10.0, 20.0]), amax=np.array([1.0, 3.0]), exponents=np.ones((2, 1024)))
    both = a + b
    assert both.n.tolist() == [11, 22]
    assert both.amax.tolist() == [5, 3]
    assert both.exponents.shape == (2, 1024)
    assert both.exponents.sum() == 4096


def test_unpacking_reverses_packing() -> None:
    """One tally, and several at once."""
    tally = filled(4)
    sums = np.concatenate([np.ravel(getattr(tally, f.name)) for f in SUM_FIELDS])
    signs = np.array([-1.0 if f.metadata["merge"] == "min" else 1.0 for f in EXTREME_FIELDS])
    extremes = signs * np.array([getattr(tally, f.name) for f in EXTREME_FIELDS])
    assert unpack(sums, extremes) == tally
    both = unpack(np.stack([sums, 2 * sums]), np.stack([extremes, extremes]))
    assert both.n.tolist() == [tally.n, 2 * tally.n]
    assert both.exponents[1].tolist() == (2 * tally.exponents).tolist()
    assert both.amin.tolist() == [tally.amin] * 2


def test_an_empty_tally_says_so() -> None:
    """Nothing seen: counts 0, amin above and scale errors beyond everything."""
    empty = Tally()
    assert (empty.n, empty.amax, empty.amin, empty.scale_error_max) == (0, 0, math.inf, -math.inf)
    assert not any(getattr(empty, f.name).any() for f in tally_fields("histogram"))
    assert empty != 0
    with pytest.raises(TypeError, match="unhashable"):
        hash(empty)


def test_tallies_do_not_share_their_histograms() -> None:
    """A default is made for each."""
    Tally().exponents[0] = 5
    assert Tally().exponents[0] == 0
