"""Limits against the figures of the facts, for every format, and among each other."""

from __future__ import annotations

import pytest

from ottava.measure import limits
from ottava.numerics.formats import E4M3, E5M2, FORMATS


def test_limits_are_the_published_ones() -> None:
    """A bell-shaped tensor measures 31.5 dB in E4M3 and 25.55 in E5M2; one flushed element in a hundred is 20 dB."""
    assert [limits.healthy_db(fmt) for fmt in (E4M3, E5M2)] == pytest.approx([31.5, 25.55], abs=0.1)
    assert [limits.warn_db(fmt) for fmt in (E4M3, E5M2)] == [25.0, 20.0]
    assert [limits.critical_db(fmt) for fmt in (E4M3, E5M2)] == [15.0, limits.NOISE_DB] == [15.0, 12.0]
    assert [limits.element_db(fmt) for fmt in (E4M3, E5M2)] == [20.0, 15.0]


def test_a_healthy_tensor_of_any_format_is_no_warning_and_a_warning_comes_first() -> None:
    for fmt in FORMATS.values():
        assert limits.healthy_db(fmt) > limits.warn_db(fmt) > limits.critical_db(fmt)
    assert all(warn < critical for warn, critical in limits.PERCENT.values())
