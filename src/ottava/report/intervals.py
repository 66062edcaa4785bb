"""Charts of categories: estimates with their intervals, one row a name, and bars that are made of parts.

The page must define the colours of `charts.LIGHT` and include chart.css, as for `charts.render`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

from ottava.report.charts import color, marker, nice_ticks

Key = TypeVar("Key")
_LANE, _GAP, _TOP, _BOTTOM, _RIGHT = 15, 12, 26, 42, 16
_LETTER = 6.6  # pixels, an estimate: no font is measured here


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean with its interval, and the values behind it."""

    mean: float
    low: float
    high: float
    style: int
    """Number of its colour and marker, as in `charts.Line`."""
    values: Sequence[float] = ()
    """Drawn as faint dots."""


@dataclass(frozen=True, kw_only=True)
class Forest:
    """Rows of estimates on one axis. It leaves out what it cannot show: NaN, and 0 on a logarithmic axis."""

    title: str
    description: str
    x_label: str
    rows: Sequence[tuple[str, Sequence[Estimate]]]
    legend: Sequence[tuple[str, int]] = ()
    """Names of styles."""
    log: bool = False
    signed: bool = False
    """Write + before positive ticks, and mark 0: the axis is a difference."""
    band: tuple[float, float] | None = None
    """A shaded range, such as the noise."""
    width: int = 560


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Stacked bars. Negative parts grow to the left of 0."""

    title: str
    description: str
    x_label: str
    parts: Sequence[tuple[str, str]]
    """Name and CSS colour of each part."""
    bars: Sequence[tuple[str, Sequence[float], str]]
    """Name, parts in their order, and a note behind the bar."""
    width: int = 560


def forest(chart: Forest, *, chart_id: str) -> str:
    """One inline <svg>; chart_id is unique in the page and begins with a letter.

    Example:
        >>> one = Estimate(mean=0.2, low=0.1, high=0.3, style=1)
        >>> picture = Forest(title="t", description="d", x_label="loss", rows=[("mxfp8", [one])])
        >>> forest(picture, chart_id="a").count("<path")
        2
    """
    across = math.log10 if chart.log else float
    shown = [e for _, row in chart.rows for e in row if _drawable(e, chart.log)]
    ends = [
        across(v)
        for e in shown
        for v in (*_whisker(e, chart.log), *e.values)
        if math.isfinite(v) and _fits(v, chart.log)
    ]
    ends += [across(v) for v in chart.band or ()] + ([0.0] if chart.signed else [])
    axis = _Axis.of(ends, [name for name, _ in chart.rows], chart.width, bottom_of_legend(chart.legend, chart.width))
    parts, y = [], axis.top
    for name, row in chart.rows:
        height = _LANE * max(1, len(row))
        parts.append(_row_name(axis, name, y + height / 2))
        for lane, estimate in enumerate(row):
            if _drawable(estimate, chart.log):
                parts.append(_estimate(axis, estimate, y + _LANE * (lane + 0.5), chart.log))
        y += height + _GAP
    band = "" if chart.band is None else _band(axis, chart.band, y - _GAP / 2, chart.log)
    ticks = _log_ticks(axis) if chart.log else [(tick, f"{tick:g}") for tick in nice_ticks(axis.low, axis.high, 6)]
    if chart.signed:
        ticks = [(tick, f"+{text}" if tick > 0 else text) for tick, text in ticks]
    grid = _grid(axis, ticks, y - _GAP / 2, chart.x_label, zero=chart.signed)
    head = _head(chart.title, chart.legend, chart.width)
    return _svg(chart_id, chart.title, chart.description, chart.width, y + _BOTTOM, [head, band, grid, *parts])


def bars(chart: Bars, *, chart_id: str) -> str:
    """One inline <svg>, as `forest`.

    Example:
        >>> parts = [("grid", "var(--s1)")]
        >>> picture = Bars(title="t", description="d", x_label="%", parts=parts, bars=[("fp8", [100.0], "31 dB")])
        >>> bars(picture, chart_id="b").count("<rect")
        2
    """
    left = [sum(part for part in parts if part < 0) for _, parts, _ in chart.bars]
    right = [sum(part for part in parts if part > 0) for _, parts, _ in chart.bars]
    names = [name for name, _, _ in chart.bars]
    note = _LETTER * max((len(text) for _, _, text in chart.bars), default=0) + 10
    top = bottom_of_legend(chart.parts, chart.width)
    axis = _Axis.of([0.0, *left, *right], names, chart.width - note, top, padding=0)
    drawn, y = [], axis.top
    for name, parts, text in chart.bars:
        drawn.append(_row_name(axis, name, y + _LANE / 2))
        ends = {True: 0.0, False: 0.0}
        for (part_name, fill), part in zip(chart.parts, parts, strict=True):
            if not part:
                continue
            start, ends[part > 0] = ends[part > 0], ends[part > 0] + part
            a, b = sorted((axis.x(start), axis.x(ends[part > 0])))
            drawn.append(
                f'<rect x="{a}" y="{y}" width="{b - a:.1f}" height="{_LANE}" fill="{fill}">'
                f"<title>{escape(name)}, {escape(part_name)}: {part:.1f} %</title></rect>"
            )
        drawn.append(f'<text x="{chart.width}" y="{y + 11.5}" text-anchor="end">{escape(text)}</text>')
        y += _LANE + _GAP - 4
    ticks = [(tick, f"{tick:g}") for tick in nice_ticks(axis.low, axis.high, 6)]
    grid = _grid(axis, ticks, y, chart.x_label, zero=min(left, default=0) < 0)
    head = _head(chart.title, chart.parts, chart.width)
    return _svg(chart_id, chart.title, chart.description, chart.width, y + _BOTTOM, [head, grid, *drawn])


@dataclass(frozen=True)
class _Axis:
    left: float
    right: float
    top: float
    low: float
    high: float

    @classmethod
    def of(
        cls, values: Iterable[float], names: Sequence[str], width: float, top: float, padding: float = 0.05
    ) -> _Axis:
        numbers = list(values) or [0.0, 1.0]
        low, high = min(numbers), max(numbers)
        room = padding * (high - low) if high > low else 0.5 if padding else 1.0
        left = _LETTER * max(map(len, names), default=0) + 14
        return cls(
            left,
            max(width - _RIGHT, left + 60),
            top,
            low - room * bool(padding),
            high + (room if padding or high == low else 0),
        )

    def x(self, value: float) -> float:
        return round(self.left + (value - self.low) / (self.high - self.low) * (self.right - self.left), 1)


def bottom_of_legend(legend: Sequence[tuple[str, object]], width: float) -> float:
    """Where the plot begins."""
    return _TOP + 18 * (max((row for _, _, _, row in _legend_places(legend, width)), default=-1) + 1)


def _legend_places(legend: Sequence[tuple[str, Key]], width: float) -> list[tuple[str, Key, float, int]]:
    places: list[tuple[str, Key, float, int]] = []
    x, row = 0.0, 0
    for name, style in legend:
        size = 30 + _LETTER * len(name)
        if x and x + size > width:
            x, row = 0.0, row + 1
        places.append((name, style, x, row))
        x += size
    return places


def _head(title: str, legend: Sequence[tuple[str, int | str]], width: float) -> str:
    """The title, and a marker for each style or a block for each colour."""
    parts = [f'<text x="0" y="12" class="heading">{escape(title)}</text>']
    for name, key, x, row in _legend_places(legend, width):
        y = 30 + 18 * row
        block = f'<rect x="{x}" y="{y - 5}" width="10" height="10" rx="2" fill="{key}"/>'
        parts.append(marker(x + 5, y, key) if isinstance(key, int) else block)
        parts.append(f'<text class="name" x="{x + 16}" y="{y + 4}">{escape(name)}</text>')
    return "".join(parts)


def _row_name(axis: _Axis, name: str, y: float) -> str:
    return f'<text class="name" x="{axis.left - 10}" y="{y + 4}" text-anchor="end">{escape(name)}</text>'


def _fits(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _drawable(estimate: Estimate, log: bool) -> bool:
    return _fits(estimate.mean, log)


def _whisker(estimate: Estimate, log: bool) -> tuple[float, float]:
    """The ends of an interval; one that an axis cannot show lies at the mean."""
    low, high = (end if _fits(end, log) else estimate.mean for end in (estimate.low, estimate.high))
    return low, high


def _estimate(axis: _Axis, estimate: Estimate, y: float, log: bool) -> str:
    across = math.log10 if log else float
    low, high = (axis.x(across(end)) for end in _whisker(estimate, log))
    stroke = f'stroke="{color(estimate.style)}" stroke-width="1.6" fill="none"'
    dots = "".join(
        f'<circle cx="{axis.x(across(v))}" cy="{y}" r="1.8" fill="{color(estimate.style)}" opacity="0.4"/>'
        for v in estimate.values
        if _fits(v, log)
    )
    ends = f"M{low} {y - 4}v8M{low} {y}H{high}M{high} {y - 4}v8"
    return f'{dots}<path d="{ends}" {stroke}/>{marker(axis.x(across(estimate.mean)), y, estimate.style)}'


def _band(axis: _Axis, band: tuple[float, float], bottom: float, log: bool) -> str:
    low, high = (axis.x(math.log10(end) if log else end) for end in band)
    height = bottom - axis.top + 4
    return f'<rect class="band" x="{low}" y="{axis.top - 4}" width="{high - low:.1f}" height="{height:.1f}"/>'


def _log_ticks(axis: _Axis) -> list[tuple[float, str]]:
    """Powers of ten, with 2 and 5 between them where the axis is short."""
    steps = (1, 2, 5) if axis.high - axis.low < 2.2 else (1,)
    decades = range(math.floor(axis.low), math.ceil(axis.high) + 1)
    values = [step * 10.0**decade for decade in decades for step in steps]
    return [(math.log10(v), f"{v:.3g}") for v in values if axis.low <= math.log10(v) <= axis.high]


def _grid(axis: _Axis, ticks: Sequence[tuple[float, str]], bottom: float, label: str, *, zero: bool) -> str:
    parts = []
    for tick, text in ticks:
        css = "zero" if zero and tick == 0 else "grid"
        x = axis.x(tick)
        parts.append(f'<line class="{css}" x1="{x}" x2="{x}" y1="{axis.top - 4}" y2="{bottom}"/>')
        shown = text.replace("-", "\N{MINUS SIGN}")
        parts.append(f'<text x="{x}" y="{bottom + 15}" text-anchor="middle">{shown}</text>')
    middle = (axis.left + axis.right) / 2
    parts.append(f'<text x="{middle}" y="{bottom + 33}" text-anchor="middle">{escape(label)}</text>')
    return "".join(parts)


def _svg(chart_id: str, title: str, description: str, width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" id="{chart_id}" role="img" '
        f'viewBox="0 0 {width} {height:.0f}" aria-labelledby="{chart_id}-title {chart_id}-desc">'
        f'<title id="{chart_id}-title">{escape(title)}</title><desc id="{chart_id}-desc">{escape(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )
