"""Numbers and names as people read them: three digits, a unit, names short enough for a table.

chart.js does the same for what is drawn in the browser, and says the same: both round the very number that they hold to
three digits, halves away from zero, and `payload` packs numbers so that they round alike on both sides.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_COUNTS = frozenset({"elements"})
_WORDLESS = frozenset({"", "of x", "of x squared"})
_MINUS = "\N{MINUS SIGN}"
_THREE = 3
_NEAR_A_HALF = 1e-6  # of the third digit: far more than the vectorized division below is off


def number(value: float | None, unit: str = "") -> str:
    """A number in three digits with its unit; counts are exact; a dash where nothing is known.

    Example:
        >>> [number(v) for v in (0.0312, 2.5, 99.96, 12345.6, 3e-7, math.inf, math.nan, 0.0)]
        ['0.0312', '2.50', '100', '12,300', '3.00e−7', '∞', '–', '0']
        >>> number(12.34, "%"), number(12345.0, "elements"), number(500.0, "of x")
        ('12.3 %', '12,345', '500')
    """
    if value is None or math.isnan(value):
        return "\N{EN DASH}"
    tail = "" if unit in _WORDLESS or unit in _COUNTS else f" {unit}"
    sign, size = (_MINUS if value < 0 else ""), abs(value)
    if math.isinf(size):
        return f"{sign}\N{INFINITY}{tail}"
    if unit in _COUNTS:
        return f"{sign}{size:,.0f}"
    return sign + _three_digits(size) + tail


def _three_digits(size: float) -> str:
    if size == 0:
        return "0"
    rounded = rounded_alike(size)
    if not 1e-3 <= rounded < 1e6:
        mantissa, exponent = f"{rounded:.2e}".split("e")
        return f"{mantissa}e{exponent.lstrip('+0') if exponent[0] == '+' else _MINUS + exponent.lstrip('-0')}"
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(rounded)))}f}"


def rounded_alike(value: float) -> float:
    """A number rounded to three digits as `Number.toPrecision` does it: from its exact value, halves away from zero.

    Example:
        >>> rounded_alike(2.125), rounded_alike(-112.5), rounded_alike(0.0)  # Python's own format gives 2.12 and 112
        (2.13, -113.0, 0.0)
    """
    context = decimal.Context(prec=_THREE, rounding=decimal.ROUND_HALF_UP)
    return float(context.create_decimal_from_float(value))


def all_rounded(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """`rounded_alike` of every number that is finite, but for their last bits; the others stay.

    Example:
        >>> all_rounded(np.array([2.125, 99960.0, np.inf])).tolist()
        [2.13, 100000.0, inf]
    """
    known = np.isfinite(values) & (values != 0)
    size = np.abs(np.where(known, values, 1.0))
    unit = 10.0 ** (np.floor(np.log10(size)) - (_THREE - 1))
    digits = size / unit
    rounded = np.where(known, np.copysign(np.floor(digits + 0.5) * unit, values), values)
    for i in np.flatnonzero(known & (np.abs(digits - np.floor(digits) - 0.5) < _NEAR_A_HALF)):
        rounded.flat[i] = rounded_alike(float(values.flat[i]))
    return rounded


def elide(name: str, width: int) -> str:
    """A name with its middle left out where it is longer than `width` characters.

    Example:
        >>> elide("model.layers.31.mlp.down_proj", 20), elide("lm_head", 20)
        ('model.lay….down_proj', 'lm_head')
    """
    if len(name) <= width:
        return name
    tail = width // 2
    return f"{name[: width - 1 - tail]}\N{HORIZONTAL ELLIPSIS}{name[-tail:]}"


def steps_text(first: int, last: int) -> str:
    """A range of steps.

    Example:
        >>> steps_text(3, 3), steps_text(1200, 9800)
        ('step 3', 'steps 1,200 to 9,800')
    """
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def listed(names: Iterable[str], most: int = 4) -> str:
    """Names with commas; those beyond `most` are counted.

    Example:
        >>> listed(["a", "b", "c"], most=2), listed([])
        ('a, b and 1 more', '')
    """
    names = list(names)
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def duration(seconds: float) -> str:
    """A time span.

    Example:
        >>> duration(0.25), duration(12.0), duration(75), duration(7300)
        ('0.250 s', '12.0 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return number(seconds, "s")
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
