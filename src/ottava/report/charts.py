"""Charts as SVG text: inline in a report, with the colours of its CSS, or as a separate file.

A chart is data: `Chart` (lines and bands), `Forest` (estimates with their intervals, one row a name), `Bars` (made of
parts). `render`, `forest` and `bars` turn it into one <svg> with nice ticks, a legend, a title and a description for
screen readers. Tooltips read its numbers as JSON. Colour-blind readers can tell Okabe and Ito's colours
apart. Lines also differ by dash and marker, so a black-and-white print works.

Python draws the charts: a report must open offline, in ten years, in any browser, and its picture in a README.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib import resources
from types import MappingProxyType

from ottava.base.text import to_json

Point = tuple[float, float]

# Okabe and Ito, "Color Universal Design" (2008); without yellow (unreadable on white). The first is for BF16.
LIGHT_PALETTE = ("#1f2328", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9")
DARK_PALETTE = ("#e6edf3", "#4aa8e0", "#f08a4b", "#2fc79b", "#e3a3c6", "#e6b84d", "#8fd0f5")
LIGHT: Mapping[str, str] = MappingProxyType(
    {f"s{i}": color for i, color in enumerate(LIGHT_PALETTE)}
    | {"ink": "#1f2328", "muted": "#59636e", "grid": "#e4e7eb", "paper": "#ffffff", "raised": "#f6f8fa"}
    | {"line": "#d1d9e0", "good": "#1a7f37", "warn": "#9a6700", "bad": "#cf222e", "heat": "213, 94, 0"}
)
"""Every colour that pages share; curves have s0, s1, ..."""
DARK: Mapping[str, str] = MappingProxyType(
    {f"s{i}": color for i, color in enumerate(DARK_PALETTE)}
    | {"ink": "#e6edf3", "muted": "#9198a1", "grid": "#262c36", "paper": "#0d1117", "raised": "#151b23"}
    | {"line": "#3d444d", "good": "#3fb950", "warn": "#d29922", "bad": "#f85149", "heat": "240, 138, 75"}
)
_DASHES = ("", "", "7 3", "2 3", "9 3 2 3", "12 4", "4 4")
_CAPS, _HOLES = ("round", "square"), (0, 0, 3.2, 3.2)  # markers: discs, squares, and both with a hole
_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _MARGIN_BOTTOM = 52, 14, 30, 40
_MAX_POINTS = 240  # more than the pixels can show; more points would only make the report larger


@dataclass(frozen=True, kw_only=True)
class Line:
    """A named series. `style` is the number of its colour, dash and marker; it is the same in every chart."""

    name: str
    points: Sequence[Point]
    style: int
    markers: bool = False
    """Draw a marker at every point (measured values) instead of a plain line (a smoothed curve)."""
    faint: bool = False
    """A thin line in the background, without a legend entry."""
    joined: bool = True
    """Draw a line from point to point."""
    dashed: bool | None = None
    """True or False replaces the dashes of `style`: one run solid, another run dashed."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """A named area between two curves."""

    name: str
    points: Sequence[tuple[float, float, float]]
    """x, lower, upper."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The data of a chart. A range of None is computed from the data; any other range clips points outside."""

    title: str
    description: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    bands: Sequence[Band] = field(default=())
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    log: bool = False
    """The y axis is logarithmic; numbers that are not positive leave a gap."""
    signed: bool = False
    """Write + before positive ticks: the y axis is a difference."""
    marks: Sequence[tuple[float, str]] = ()
    """Vertical lines with their names, from left to right."""
    names: Sequence[tuple[float, str]] = ()
    """What a tooltip says instead of an x."""
    width: int = 560
    height: int = 340


def smooth(losses: Sequence[float], span: int = 10) -> list[float]:
    """Exponential moving average over about `span` steps, without the bias of its first value.

    A value that is not finite passes through and stays out of the average.

    Example:
        >>> smooth([2.0, 2.0, 2.0])
        [2.0, 2.0, 2.0]
    """
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    smoothed = []
    for loss in losses:
        if math.isfinite(loss):
            total, weight = keep * total + loss, keep * weight + 1
        smoothed.append(total / weight if math.isfinite(loss) else loss)
    return smoothed


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high], about `count` of them.

    Raises:
        ValueError: the range is empty or not finite.

    Example:
        >>> nice_ticks(0, 9.3)
        [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"nice_ticks: needs finite low < high, got {low} and {high}")
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    step = next((m * power for m in (1, 2, 5) if (high - low) / (m * power) <= count), 10 * power)
    # multiples, not a running sum: 0.1 + 0.1 + 0.1 prints as 0.30000000000000004
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def css_variables(colors: Mapping[str, str]) -> str:
    """The colours as CSS variables --s0, --ink, ..."""
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


def color(style: int) -> str:
    """The CSS colour of a style. s0 is for BF16; the other colours repeat."""
    return f"var(--s{0 if style == 0 else 1 + (style - 1) % (len(LIGHT_PALETTE) - 1)})"


def render(chart: Chart, *, chart_id: str, tooltips: bool = True, width: int = 0) -> str:
    """One inline <svg>. The page must define the colours of `LIGHT` and include chart.css.

    Args:
        chart: the data. Points that are not finite leave a gap.
        chart_id: unique in the page; begins with a letter.
        tooltips: add the measured points as JSON in `data-chart`, for `charted` in draw.js.
        width: of a second picture without tooltips, which stretches the first's curves; its id is `chart_id`-narrow.
    """
    measured, chart = chart, _logarithmic(chart) if chart.log else chart
    wide, chart = _Frame.of(chart), replace(chart, width=width or chart.width)
    frame = _Frame.of(chart)
    data = f' data-chart="{escape(_chart_data(measured, frame), quote=True)}"' if tooltips > bool(width) else ""
    curves = [*(_band(band, frame) for band in chart.bands), *(_line(line, frame) for line in chart.lines)]
    drawn = _once(curves, chart_id, frame, wide, (frame.bottom - frame.top) / (wide.bottom - wide.top))
    size = frame.left - 5, frame.top, frame.right - frame.left + 10, frame.bottom - frame.top  # 5: half a marker
    place = 'x="{0}" y="{1}" width="{2}" height="{3}" viewBox="{0} {1} {2} {3}"'.format(*size)  # an <svg> clips
    parts = [
        _axes(chart, frame),
        f'<g class="marks">{_marks(chart, frame)}</g>' if chart.marks else "",
        f"<svg {place}>{drawn}</svg>",
        _legend(chart, frame),
    ]
    return _svg(chart_id + "-narrow" * bool(width), chart, chart.height, parts, data)


def _once(parts: Iterable[str], chart_id: str, box: _Frame | _Axis, wide: _Frame | _Axis, tall: float = 1) -> str:
    """What a chart draws of its data, or in a narrow box that of the wide one, stretched: a page has it once."""
    if box == wide:
        return f'<g id="{chart_id}-drawn">{"".join(parts)}</g>'
    across = (box.right - box.left) / (wide.right - wide.left)
    x, y = box.left - across * wide.left, box.top - tall * wide.top
    return f'<use href="#{chart_id}-drawn" transform="matrix({across:.5g} 0 0 {tall:.5g} {x:.5g} {y:.5g})"/>'


def _svg(chart_id: str, chart: Chart | Forest | Bars, height: float, parts: Sequence[str], data: str = "") -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" id="{chart_id}" role="img" '
        f'viewBox="0 0 {chart.width} {height:.0f}" aria-labelledby="{chart_id}-title {chart_id}-desc"{data}>'
        f'<title id="{chart_id}-title">{escape(chart.title)}</title>'
        f'<desc id="{chart_id}-desc">{escape(chart.description)}</desc>{"".join(parts)}</svg>'
    )


def standalone(charts: Sequence[Chart], *, title: str, captions: Sequence[str]) -> str:
    """Charts in one SVG file, three in a row. It has its own background, for READMEs on light and dark pages."""
    column, line = max(chart.width for chart in charts) + 24, max(chart.height for chart in charts) + 6
    width = 24 + column * min(len(charts), 3)
    bottom = 56 + line * -(-len(charts) // 3)
    height = bottom + 22 * len(captions) + 14
    panels = []
    for i, chart in enumerate(charts):
        inner = render(chart, chart_id=f"panel{i}", tooltips=False)
        x, y = 24 + column * (i % 3), 56 + line * (i // 3)
        panels.append(f'<svg x="{x}" y="{y}" width="{chart.width}" height="{chart.height}">{inner}</svg>')
    lines = [
        f'<text x="24" y="{bottom + 18 + 22 * i}" class="figure-caption">{escape(caption)}</text>'
        for i, caption in enumerate(captions)
    ]
    css = resources.files(__package__).joinpath("chart.css").read_text(encoding="utf-8")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title, quote=True)}"><style>svg {{ {css_variables(LIGHT)} }} {css}</style>'
        f'<rect width="{width}" height="{height}" rx="10" fill="var(--paper)" stroke="var(--grid)"/>'
        f'<text x="24" y="36" class="figure-title">{escape(title)}</text>'
        f"{''.join(panels)}"
        f"{''.join(lines)}</svg>\n"
    )


def _logarithmic(chart: Chart) -> Chart:
    """The chart with log10(y) for y; the labels of the axis show y."""

    def log10(y: float) -> float:
        return math.log10(y) if y > 0 and math.isfinite(y) else math.nan

    lines = [replace(line, points=[(x, log10(y)) for x, y in line.points]) for line in chart.lines]
    bands = [replace(b, points=[(x, log10(low), log10(high)) for x, low, high in b.points]) for b in chart.bands]
    y_range = chart.y_range and (log10(chart.y_range[0]), log10(chart.y_range[1]))
    return replace(chart, lines=lines, bands=bands, y_range=y_range)


def to_png(picture: str) -> bytes:
    """Converts a picture of `standalone` to PNG, with twice its pixels.

    Raises:
        ImportError: the package resvg-py is not installed.
    """
    try:
        import resvg_py
    except ImportError as error:
        raise ImportError("a PNG needs the package resvg-py; pip install 'ottava[png]', or write a .svg") from error
    for name, value in sorted(LIGHT.items(), reverse=True):  # resvg does not support CSS variables
        picture = picture.replace(f"var(--{name})", value)
    return bytes(resvg_py.svg_to_bytes(svg_string=picture, zoom=2, font_family="DejaVu Sans"))


@dataclass(frozen=True)
class _Frame:
    """The plot's box in pixels and the data range that fills it."""

    left: float
    right: float
    top: float
    bottom: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    @classmethod
    def of(cls, chart: Chart) -> _Frame:
        points = [point for line in chart.lines for point in line.points]
        areas = [area for band in chart.bands for area in band.points]
        xs = [x for x, _ in points] + [x for x, _, _ in areas]
        ys = [y for _, y in points] + [y for _, low, high in areas for y in (low, high)]
        return cls(
            left=_MARGIN_LEFT,
            right=chart.width - _MARGIN_RIGHT,
            top=_MARGIN_TOP + 18 * max((row + 1 for _, _, row in _legend_layout(chart)), default=0),
            bottom=chart.height - _MARGIN_BOTTOM,
            x_range=chart.x_range or _extent(xs, padding=0),
            y_range=chart.y_range or _extent(ys, padding=0.04),
        )

    def x(self, value: float) -> float:
        low, high = self.x_range
        return round(self.left + (value - low) / (high - low) * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        low, high = self.y_range
        # the chart clips huge values; renderers cannot parse their coordinates
        return round(max(-1e4, min(1e4, self.bottom - (value - low) / (high - low) * (self.bottom - self.top))), 1)


def _extent(values: Iterable[float], *, padding: float) -> tuple[float, float]:
    numbers = [value for value in values if math.isfinite(value)]
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
    if low == high:
        return low - 0.5, high + 0.5
    return low - padding * (high - low), high + padding * (high - low)


def _axes(chart: Chart, frame: _Frame) -> str:
    parts = [f'<text x="0" y="12" class="heading">{escape(chart.title)}</text><g class="ticks">']
    ticks = nice_ticks(*frame.y_range, count=6)
    decimals = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9)) if len(ticks) > 1 else 2
    sign = "+" if chart.signed else ""
    labels = [(tick, f"{sign if tick > 0 else ''}{tick:.{decimals}f}") for tick in ticks]
    for tick, label in log_ticks(*frame.y_range) if chart.log else labels:
        y, label = frame.y(tick), label.replace("-", "\N{MINUS SIGN}")
        css = "zero" if chart.signed and tick == 0 else "grid"
        parts.append(f'<line class="{css}" x1="{frame.left}" x2="{frame.right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{frame.left - 8}" y="{y + 4}" text-anchor="end">{label}</text>')
    whole = all(float(x).is_integer() for line in chart.lines for x, _ in line.points)
    for tick in (tick for tick in nice_ticks(*frame.x_range, count=6) if tick.is_integer() or not whole):
        parts.append(f'<text x="{frame.x(tick)}" y="{frame.bottom + 18}" text-anchor="middle">{tick:g}</text>')
    middle = (frame.left + frame.right) / 2
    parts.append(f'</g><text x="{middle}" y="{chart.height - 6}" text-anchor="middle">{escape(chart.x_label)}</text>')
    parts.append(f'<text x="{frame.right}" y="12" text-anchor="end">{escape(chart.y_label)}</text>')
    return "".join(parts)


def _marks(chart: Chart, frame: _Frame) -> str:
    """Names lie above each other where they would overlap, and to the left of their line at the right edge."""
    parts, ends = [], [0.0] * 4
    for at, name in chart.marks:
        x, size = frame.x(at), _LETTER * len(name) + 8
        late = x + size > frame.right
        parts.append(f'<line class="cross" x1="{x}" x2="{x}" y1="{frame.top}" y2="{frame.bottom}"/>')
        row = next((row for row, end in enumerate(ends) if end <= x - size * late), None)
        if row is None:  # too many: the line stands for itself
            continue
        ends[row] = x + size * (not late)
        side = f'x="{x - 4}" text-anchor="end"' if late else f'x="{x + 4}"'
        parts.append(f'<text {side} y="{frame.top + 12 + 14 * row}">{escape(name)}</text>')
    return "".join(parts)


def _legend_layout(chart: Chart) -> list[tuple[Line | Band, float, int]]:
    """Each legend entry with its x and its row."""
    entries: list[Line | Band] = [*(line for line in chart.lines if not line.faint and line.points), *chart.bands]
    places = _flow([46 + 6.4 * len(entry.name) for entry in entries], chart.width)
    return [(entry, *place) for entry, place in zip(entries, places, strict=True)]


def _flow(sizes: Iterable[float], width: float) -> list[tuple[float, int]]:
    """x and row of pieces that stand side by side. Sizes of texts are estimates: no font is measured here."""
    places, x, row = [], 0.0, 0
    for size in sizes:
        if x and x + size > width:
            x, row = 0.0, row + 1
        places.append((x, row))
        x += size
    return places


def _legend(chart: Chart, frame: _Frame) -> str:
    parts = []
    for entry, x, row in _legend_layout(chart):
        y = 30 + 18 * row
        if isinstance(entry, Band):
            parts.append(f'<rect class="band" x="{x}" y="{y - 5}" width="26" height="10"/>')
        else:
            parts.append(f'<path class="curve" {_stroke(entry)} d="M{x} {y}h26"/>' if entry.joined else "")
            parts.append(markers([(x + 13, y)], entry.style) if entry.markers else "")
        parts.append(f'<text class="name" x="{x + 32}" y="{y + 4}">{escape(entry.name)}</text>')
    return "".join(parts)


def _stroke(line: Line) -> str:
    dash = _DASHES[line.style % len(_DASHES)] if line.dashed is None else "5 4" * line.dashed
    dashes = f' stroke-dasharray="{dash}"' if dash and not line.faint else ""
    width, opacity = (1, 0.45) if line.faint else (2, 1)
    return f'stroke="{color(line.style)}" stroke-width="{width}" opacity="{opacity}"{dashes}'


def _line(line: Line, frame: _Frame) -> str:
    every = max(1, math.ceil(len(line.points) / _MAX_POINTS))
    points = [p for i, p in enumerate(line.points) if i % every == 0 or i == len(line.points) - 1]
    commands, pen_down = [], False
    for x, y in points:
        if math.isfinite(y):
            commands.append(f"{'L' if pen_down else 'M'}{frame.x(x)} {frame.y(y)}")
        pen_down = math.isfinite(y)
    curve = f'<path class="curve" {_stroke(line)} d="{"".join(commands)}"/>' if commands and line.joined else ""
    at = [(frame.x(x), frame.y(y)) for x, y in points if line.markers and math.isfinite(y)]
    drawn = curve + markers(at, line.style)
    return drawn if line.faint else f"<g>{drawn}</g>"


def markers(places: Iterable[Point], style: int) -> str:
    """The markers of a style as paths without a length: a stretched picture leaves the caps of strokes as they are."""
    path = "".join(f"M{x} {y}h0" for x, y in places)
    strokes = ((color(style), 7), ("var(--paper)", _HOLES[style % len(_HOLES)])) if path else ()
    cap = f'd="{path}" stroke-linecap="{_CAPS[style % len(_CAPS)]}"'
    return "".join(f'<path class="curve" stroke="{ink}" stroke-width="{size}" {cap}/>' for ink, size in strokes if size)


def _band(band: Band, frame: _Frame) -> str:
    points = [p for p in band.points if all(map(math.isfinite, p))]
    if not points:
        return ""
    upper = "L".join(f"{frame.x(x)} {frame.y(high)}" for x, _, high in points)
    lower = "L".join(f"{frame.x(x)} {frame.y(low)}" for x, low, _ in reversed(points))
    return f'<path class="band" d="M{upper}L{lower}z"/>'


def _chart_data(chart: Chart, frame: _Frame) -> str:
    """The measured points of each named line, for `charted` in draw.js; the ranges are those of the axes."""
    named = (line for line in chart.lines if not line.faint)
    return to_json(
        {
            "x_label": chart.x_label,
            "names": chart.names,
            "x_range": frame.x_range,
            "y_range": frame.y_range,
            "log": chart.log,
            "signed": chart.signed,
            "series": [{"name": line.name, "color": color(line.style), "points": line.points} for line in named],
        }
    )


# --- estimates and bars: one row a name -------------------------------------------------------------------------------

_LANE, _GAP, _TOP, _BOTTOM, _RIGHT = 15, 12, 26, 42, 16
_LETTER = 6.6  # pixels, an estimate: no font is measured here


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean with its interval, and the values behind it."""

    mean: float
    low: float
    high: float
    style: int
    """Number of its colour and marker, as in `Line`."""
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
    """Name and CSS colour of each part; one without a name is not in the legend."""
    bars: Sequence[tuple[str, Sequence[float], str]]
    """Name, parts in their order, and a note behind the bar."""
    unit: str = " %"
    width: int = 560


def forest(chart: Forest, *, chart_id: str, width: int = 0) -> str:
    """One inline <svg>, with `chart_id` and `width` as in `render`.

    Example:
        >>> one = Estimate(mean=0.2, low=0.1, high=0.3, style=1)
        >>> picture = Forest(title="t", description="d", x_label="loss", rows=[("mxfp8", [one])])
        >>> forest(picture, chart_id="a").count("<path")
        2
    """
    across = math.log10 if chart.log else float
    shown = [e for _, row in chart.rows for e in row if _fits(e.mean, chart.log)]
    ends = [
        across(v)
        for e in shown
        for v in (*_whisker(e, chart.log), *e.values)
        if math.isfinite(v) and _fits(v, chart.log)
    ]
    ends += [across(v) for v in chart.band or ()] + ([0.0] if chart.signed else [])
    axes = _Axis.of(ends, [name for name, _ in chart.rows], chart.legend)
    wide, axis = axes(chart.width), axes(width or chart.width)
    names, parts, y = [], [], axis.top
    for name, row in chart.rows:
        height = _LANE * max(1, len(row))
        names.append(_row_name(axis, name, y + height / 2))
        for lane, estimate in enumerate(row):
            if _fits(estimate.mean, chart.log):
                parts.append(_estimate(axis, estimate, y + _LANE * (lane + 0.5), chart.log))
        y += height + _GAP
    band = "" if chart.band is None else _range(axis, chart.band, y - _GAP / 2, chart.log)
    ticks = log_ticks(axis.low, axis.high) if chart.log else axis.ticks()
    if chart.signed:
        ticks = [(tick, f"+{text}" if tick > 0 else text) for tick, text in ticks]
    grid = _grid(axis, ticks, y - _GAP / 2, chart.x_label, zero=chart.signed)
    drawn = _once(parts, chart_id, axis, wide)
    return _rows(chart, chart_id, width, y, chart.legend, [band, grid, *names, drawn])


def _rows(chart: Forest | Bars, chart_id: str, width: int, y: float, legend: _Legend, parts: list[str]) -> str:
    """The picture, with its head."""
    sized = replace(chart, width=width or chart.width)
    head = _head(chart.title, legend, sized.width)
    return _svg(chart_id + "-narrow" * bool(width), sized, y + _BOTTOM, [head, *parts])


def bars(chart: Bars, *, chart_id: str, width: int = 0) -> str:
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
    legend = [part for part in chart.parts if part[0]]
    axes = _Axis.of([0.0, *left, *right], names, legend, padding=0, note=note)
    wide, axis = axes(chart.width), axes(width or chart.width)
    drawn, texts, y = [], [], axis.top
    for name, parts, text in chart.bars:
        texts.append(_row_name(axis, name, y + _LANE / 2))
        ends = {True: 0.0, False: 0.0}
        for (part_name, fill), part in zip(chart.parts, parts, strict=True):
            if not part:
                continue
            start, ends[part > 0] = ends[part > 0], ends[part > 0] + part
            a, b = sorted((axis.x(start), axis.x(ends[part > 0])))
            drawn.append(
                f'<rect x="{a}" y="{y}" width="{b - a:.1f}" height="{_LANE}" fill="{fill}">'
                f"<title>{escape(part_name)}: {part:.3g}{chart.unit}</title></rect>"
            )
        texts.append(f'<text x="{width or chart.width}" y="{y + 11.5}" text-anchor="end">{escape(text)}</text>')
        y += _LANE + _GAP - 4
    grid = _grid(axis, axis.ticks(), y, chart.x_label, zero=min(left, default=0) < 0)
    return _rows(chart, chart_id, width, y, legend, [grid, *texts, _once(drawn, chart_id, axis, wide)])


@dataclass(frozen=True)
class _Axis:
    left: float
    right: float
    top: float
    low: float
    high: float

    @classmethod
    def of(
        cls, values: Sequence[float], names: Sequence[str], legend: _Legend, padding: float = 0.05, note: float = 0
    ) -> Callable[[float], _Axis]:
        """The axis of a picture that is so wide."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        room = padding * (high - low) if high > low else 0.5 if padding else 1.0
        ends = low - room * bool(padding), high + (room if padding or high == low else 0)
        left = _LETTER * max(map(len, names), default=0) + 14

        def wide(width: float) -> _Axis:
            rows = 1 + max((row for _, row in _legend_places(legend, width)), default=-1)
            return cls(left, max(width - note - _RIGHT, left + 60), _TOP + 18 * rows, *ends)

        return wide

    def x(self, value: float) -> float:
        return round(self.left + (value - self.low) / (self.high - self.low) * (self.right - self.left), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """As many as have room."""
        most = max(2, min(6, int(self.right - self.left) // 50))
        return [(tick, f"{tick:g}") for tick in nice_ticks(self.low, self.high, most)]


_Legend = Sequence[tuple[str, int]] | Sequence[tuple[str, str]]
"""Names with the number of a style, or with a colour."""


def _legend_places(legend: _Legend, width: float) -> list[tuple[float, int]]:
    return _flow((30 + _LETTER * len(name) for name, _ in legend), width)


def _head(title: str, legend: _Legend, width: float) -> str:
    """The title, and a marker for each style or a block for each colour."""
    parts = [f'<text x="0" y="12" class="heading">{escape(title)}</text>']
    for (name, key), (x, row) in zip(legend, _legend_places(legend, width), strict=True):
        y = 30 + 18 * row
        block = f'<rect x="{x}" y="{y - 5}" width="10" height="10" rx="2" fill="{key}"/>'
        parts.append(markers([(x + 5, y)], key) if isinstance(key, int) else block)
        parts.append(f'<text class="name" x="{x + 16}" y="{y + 4}">{escape(name)}</text>')
    return "".join(parts)


def _row_name(axis: _Axis, name: str, y: float) -> str:
    return f'<text class="name" x="{axis.left - 10}" y="{y + 4}" text-anchor="end">{escape(name)}</text>'


def _fits(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _whisker(estimate: Estimate, log: bool) -> tuple[float, float]:
    """The ends of an interval; one that an axis cannot show lies at the mean."""
    low, high = (end if _fits(end, log) else estimate.mean for end in (estimate.low, estimate.high))
    return low, high


def _estimate(axis: _Axis, estimate: Estimate, y: float, log: bool) -> str:
    across = math.log10 if log else float
    low, high = (axis.x(across(end)) for end in _whisker(estimate, log))
    stroke = f'class="curve" stroke="{color(estimate.style)}"'
    dots = "".join(f"M{axis.x(across(v))} {y}h0" for v in estimate.values if _fits(v, log))
    dots = f'<path {stroke} stroke-width="3.6" stroke-linecap="round" opacity="0.4" d="{dots}"/>' if dots else ""
    ends = f"M{low} {y - 4}v8M{low} {y}H{high}M{high} {y - 4}v8"
    middle = markers([(axis.x(across(estimate.mean)), y)], estimate.style)
    return f'{dots}<path d="{ends}" {stroke} stroke-width="1.6"/>{middle}'


def _range(axis: _Axis, band: tuple[float, float], bottom: float, log: bool) -> str:
    low, high = (axis.x(math.log10(end) if log else end) for end in band)
    height = bottom - axis.top + 4
    return f'<rect class="band" x="{low}" y="{axis.top - 4}" width="{high - low:.1f}" height="{height:.1f}"/>'


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Powers of ten between 10**low and 10**high, with 2 and 5 between them where the axis is short: (log10, text).

    Example:
        >>> log_ticks(-6.5, -3.9), log_ticks(0, 0.5)
        ([(-6.0, '10⁻⁶'), (-5.0, '10⁻⁵'), (-4.0, '10⁻⁴')], [(0.0, '1'), (0.3010299956639812, '2')])
    """
    steps, every = (1, 2, 5) if high - low < 2.2 else (1,), max(1, math.ceil((high - low) / 8))
    decades = [n for n in range(math.floor(low), math.ceil(high) + 1) if n % every == 0]
    found = [(math.log10(step) + decade, step, decade) for decade in decades for step in steps]
    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    far = {n: "10" + str(n).translate(raised) for n in decades if not -4 < n < 6}
    texts = [
        (at, f"{step}·{far[n]}".removeprefix("1·") if n in far else f"{step * 10.0**n:.3g}") for at, step, n in found
    ]
    shown = [one for one in texts if low <= one[0] <= high]
    plain = nice_ticks(10**low, 10**high, 4) if len(shown) < 2 else []  # a shorter axis has none of them
    return [(math.log10(tick), f"{tick:g}") for tick in plain] or shown


def _grid(axis: _Axis, ticks: Sequence[tuple[float, str]], bottom: float, label: str, *, zero: bool) -> str:
    parts = []
    for tick, text in ticks:
        css = "zero" if zero and tick == 0 else "grid"
        x = axis.x(tick)
        parts.append(f'<line class="{css}" x1="{x}" x2="{x}" y1="{axis.top - 4}" y2="{bottom}"/>')
        shown = text.replace("-", "\N{MINUS SIGN}")
        parts.append(f'<text x="{x}" y="{bottom + 15}" text-anchor="middle">{shown}</text>')
    half = _LETTER * len(label) / 2
    middle = min((axis.left + axis.right) / 2, axis.right + _RIGHT - half)
    parts.append(f'<text x="{middle}" y="{bottom + 33}" text-anchor="middle">{escape(label)}</text>')
    return "".join(parts)
