"""When a statistic of a cast is bad, in its format: what rules, floors, marks, triggers and colours compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ottava.formats import Format

DECIBELS_A_BIT = 6.02
"""Of SQNR: the error halves."""
PERCENT: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"underflow_pct": (1.0, 10.0), "overflow_pct": (1e-3, 1e-1)}
)
"""Shares of elements above which a cast is to be looked at, and above which it is broken."""


@dataclass(frozen=True)
class Limit:
    """A statistic of a cast, and where it becomes bad."""

    metric: str
    """Its name."""
    unit: str
    limit: Callable[[Format], float]
    """The worst number that is still well."""
    above: bool
    """Whether numbers must be at least the limit, or at most."""

    def fails(self, values: Any, fmt: Format) -> Any:
        """Whether each of these numbers is bad; one that is not known (NaN) is not."""
        return values < self.limit(fmt) if self.above else values > self.limit(fmt)


def healthy_db(fmt: Format) -> float:
    """SQNR of values spread over the octaves of a format, as a bell-shaped tensor's are: rounding is all they lose.

    Example:
        >>> from ottava.formats import E4M3, E5M2
        >>> round(healthy_db(E4M3), 2), round(healthy_db(E5M2), 2)
        (31.56, 25.54)
    """
    return 13.5 + DECIBELS_A_BIT * fmt.mantissa_bits


def warn_db(fmt: Format) -> float:
    """SQNR below which a cast is to be looked at, 6 below a healthy one: 25 dB in E4M3, 20 in E5M2."""
    return 10.0 + 5 * fmt.mantissa_bits


def critical_db(fmt: Format) -> float:
    """SQNR below which a cast is broken: 15 dB in E4M3, 12 in E5M2."""
    return 6.0 + 3 * fmt.mantissa_bits


def element_db(fmt: Format) -> float:
    """The same as `warn_db` where every element counts alike: one flushed element in a hundred is 20 dB."""
    return warn_db(fmt) - 5


NOISE_DB = 12.0
"""SQNR below which a cast of any format is mostly noise: `critical_db` of E5M2."""
