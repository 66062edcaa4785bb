"""Numbers, time, names and progress as people read them, in pages, tables, messages and terminals; values as JSON.

report/draw.js writes numbers in the browser in the same way. Both round the exact value to three digits, halves away
from zero, and `report.page` packs numbers so that both sides round alike.
"""

from __future__ import annotations

import dataclasses
import decimal
import html
import json
import math
import re
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from operator import length_hint
from typing import Any, TypeVar
from unicodedata import east_asian_width

T = TypeVar("T")
K = TypeVar("K")
_COUNTS = frozenset({"elements"})
_WORDLESS = frozenset({"", "of x", "of x squared"})
_MINUS = "\N{MINUS SIGN}"


def number(value: float | None, unit: str = "") -> str:
    """A number in three digits with its unit; counts are exact; a dash for None and NaN.

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


def without_powers(value: Any) -> Any:
    """A text with 1,000 in place of 1e+03; of dicts, lists and dataclasses the texts, but not the code of a patch.

    Example:
        >>> without_powers(["1.2e+03 times", {"patch": "lr=1e+03", "text": "-2.5e+04, 1e-05 and a1e+03"}])
        ['1,200 times', {'patch': 'lr=1e+03', 'text': '-25,000, 1e-05 and a1e+03'}]
    """
    if isinstance(value, str):
        return re.sub(r"(?<![\w.])\d(\.\d+)?e\+(0\d|1[0-4])\b", lambda found: f"{float(found[0]):,.0f}", value)
    if isinstance(value, dict):
        return {key: one if key == "patch" else without_powers(one) for key, one in value.items()}
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **without_powers(vars(value)))  # type: ignore[type-var]  # no class
    return [*map(without_powers, value)] if isinstance(value, list) else value


def _three_digits(size: float) -> str:
    if size == 0:
        return "0"
    rounded = rounded_alike(size)
    if not 1e-3 <= rounded < 1e6:
        mantissa, exponent = f"{rounded:.2e}".split("e")
        return f"{mantissa}e{exponent.lstrip('+0') if exponent[0] == '+' else _MINUS + exponent.lstrip('-0')}"
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(rounded)))}f}"


def rounded_alike(value: float) -> float:
    """A number rounded to three digits like `Number.toPrecision`: from its exact value, halves away from zero.

    Example:
        >>> rounded_alike(2.125), rounded_alike(-112.5), rounded_alike(0.0)  # Python's own format gives 2.12 and 112
        (2.13, -113.0, 0.0)
    """
    three_digits = decimal.Context(prec=3, rounding=decimal.ROUND_HALF_UP)
    return float(three_digits.create_decimal_from_float(value))


def elide(name: str, width: int) -> str:
    """A name of at most `width` characters; an ellipsis replaces the middle of a longer one.

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


def listed(names: Iterable[str], most: int | None = None) -> str:
    """Names in a sentence; beyond `most` it gives their number.

    Example:
        >>> listed(["a", "b", "c"]), listed(["a", "b", "c"], most=2), listed([])
        ('a, b and c', 'a, b and 1 more', '')
    """
    shown = list(names)
    if most is not None and len(shown) > most:
        shown[most:] = [f"{len(shown) - most} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """What belongs together, in the order in which it came: one line, or one sentence, for each key.

    Example:
        >>> grouped([("late", 1), ("early", 2), ("late", 3)])
        {'late': [1, 3], 'early': [2]}
    """
    found: dict[K, list[T]] = {}
    for key, one in pairs:
        found.setdefault(key, []).append(one)
    return found


def duration(seconds: float) -> str:
    """A time span; whole seconds stay whole.

    Example:
        >>> duration(0.25), duration(41), duration(75), duration(7300)
        ('0.250 s', '41 s', '1 min 15 s', '2 h 01 min')
    """
    if seconds < 60:
        return f"{seconds} s" if isinstance(seconds, int) else number(seconds, "s")
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def progress(items: Iterable[T], doing: str, *, total: int = 0, prints: bool = False) -> Generator[T]:
    """Yields the items, and tells a terminal how many are done and how long the rest takes.

    A line of stderr, redrawn in place after the first second and gone at the end: not for short work, pipes and files.

    Args:
        doing: what is done to the items.
        total: their number; 0: that of a sequence, or else unknown.
        prints: the caller prints between two items, so the line is there only while the next one is made.

    Example:
        >>> list(progress([1, 2], "counting"))
        [1, 2]
    """
    stream, began, shown, said = sys.stderr, time.monotonic(), 0.0, ""
    if stream is None or not stream.isatty():
        yield from items
        return
    total = total or length_hint(items)
    try:
        for done, item in enumerate(items, start=1):
            if prints and said:
                stream.write(f"\r{' ' * len(said)}\r")
            yield item
            now = time.monotonic()
            if now - began > 1 and now - shown > 0.2:
                left = duration(round((now - began) / done * (total - done))) + " left"
                line = f"{doing}: " + (f"{done:,} of {total:,}, {left}" if total else f"{done:,} done")
                stream.write("\r" + line.ljust(len(said)))
                stream.flush()
                shown, said = now, line
    finally:
        if said:
            stream.write(f"\r{' ' * len(said)}\r")
            stream.flush()


def fixed(value: float | None) -> str:
    """A loss in three decimals; a dash for None, NaN and infinities.

    Example:
        >>> fixed(1.7), fixed(None), fixed(math.nan)
        ('1.700', '–', '–')
    """
    return f"{value:.3f}" if value is not None and math.isfinite(value) else "\N{EN DASH}"


def signed(value: float) -> str:
    """A difference with three decimals, a sign and a real minus; 0.000 has no sign.

    Example:
        >>> signed(0.0031), signed(-0.0031), signed(-0.0001)
        ('+0.003', '−0.003', '0.000')
    """
    return "0.000" if round(value, 3) == 0 else f"{value:+.3f}".replace("-", _MINUS)


def columns(*rows: Sequence[object]) -> list[str]:
    """Rows as lines of text, their columns two spaces apart.

    Example:
        >>> columns(("recipe", "dB"), ("tensorwise", 31.5), ("mxfp8", ""))
        ['recipe      dB', 'tensorwise  31.5', 'mxfp8']
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def html_table(rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Rows, the header first, as a table for a notebook; every text is data and none is markup.

    Example:
        >>> html_table([("layer", "dB"), ("<b>", 31.5)], "two & more")[:91]
        '<table><caption>two &amp; more</caption><tr><th>layer</th><th>dB</th></tr><tr><td>&lt;b&gt;'
    """
    lines: list[str] = []
    for row in rows:
        tag = "td" if lines else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row) + "</tr>")
    return f"<table><caption>{html.escape(caption)}</caption>{''.join(lines)}</table>"


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as a `pandas.DataFrame`. Pandas is imported here, and nowhere else.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise ImportError("to_pandas: needs pandas, which is not installed; pip install pandas") from error
    return pandas.DataFrame(rows)


def finite(value: Any) -> Any:
    """The same value for JSON, which has no word for infinity and NaN: they are None, at any depth.

    Example:
        >>> finite({"loss": [2.5, math.nan], "steps": (1, 2)})
        {'loss': [2.5, None], 'steps': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(values: Any, *, indent: int | None = None) -> str:
    """Values as JSON; numbers that are not finite become null."""
    return json.dumps(finite(values), allow_nan=False, indent=indent)


def columns_of(text: str) -> int:
    """How many columns of a terminal a text takes: a Chinese letter has two.

    Example:
        >>> columns_of("步 1")
        4
    """
    return sum(1 + (east_asian_width(one) in "WF") for one in text)
