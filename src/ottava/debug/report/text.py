"""Numbers and names as people read them: three digits, a unit, names short enough for a table. report.js does the same
for what is drawn in the browser."""

from __future__ import annotations

import math
from collections.abc import Iterable

_COUNTS = frozenset({"elements"})
_WORDLESS = frozenset({"", "of x", "of x squared"})
_MINUS = "\N{MINUS SIGN}"


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
    rounded = float(f"{size:.3g}")
    if not 1e-3 <= rounded < 1e6:
        mantissa, exponent = f"{rounded:.2e}".split("e")
        return f"{mantissa}e{exponent.lstrip('+0') if exponent[0] == '+' else _MINUS + exponent.lstrip('-0')}"
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(rounded)))}f}"


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
