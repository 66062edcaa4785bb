"""Charts are well-formed SVG that says what the data says."""

import json
import math
import re
from importlib import resources
from xml.etree import ElementTree

import pytest

from ottava.report.charts import (
    DARK,
    DARK_PALETTE,
    LIGHT,
    LIGHT_PALETTE,
    Band,
    Bars,
    Chart,
    Estimate,
    Forest,
    Line,
    bars,
    color,
    css_variables,
    forest,
    nice_ticks,
    render,
    smooth,
    standalone,
    to_png,
)

SVG = "{http://www.w3.org/2000/svg}"


def chart(*lines: Line, **changes: object) -> Chart:
    """A chart of these lines."""
    fields: dict[str, object] = {"title": "Loss <&>", "description": "d", "x_label": "step", "y_label": "nats"}
    return Chart(**(fields | changes), lines=lines)  # type: ignore[arg-type]


def line(*ys: float, style: int = 0, name: str = "bf16", markers: bool = True) -> Line:
    """Those values at 0, 1, 2, ..."""
    return Line(name=name, points=list(enumerate(ys)), style=style, markers=markers)


@pytest.mark.parametrize("low", [-1.0, 0.0, 1.7, 1e-6])
@pytest.mark.parametrize("extent", [1e-4, 0.03, 1.0, 7.7, 4e5])
def test_ticks_are_few_round_and_inside(low: float, extent: float) -> None:
    ticks = nice_ticks(low, low + extent)
    assert 2 <= len(ticks) <= 6
    assert low - 1e-9 * extent <= ticks[0]
    assert ticks[-1] <= low + extent * (1 + 1e-9)
    step = ticks[1] - ticks[0]
    assert f"{step:.0e}"[0] in "125"
    assert [round(tick / step) for tick in ticks] == list(range(round(ticks[0] / step), round(ticks[-1] / step) + 1))


def test_smooth_starts_without_bias_and_skips_what_is_not_finite() -> None:
    """span 3 keeps 1/2: (2 * 1/2 + 4) / (1/2 + 1) = 10/3."""
    assert smooth([2.0, 4.0], span=3) == pytest.approx([2.0, 10 / 3])
    with_hole = smooth([2.0, math.nan, 4.0], span=3)
    assert math.isnan(with_hole[1])
    assert with_hole[2] == pytest.approx(10 / 3)


def test_ten_recipes_differ_in_colour_dash_or_marker() -> None:
    looks = set()
    for style in range(11):
        root = ElementTree.fromstring(render(chart(line(2.0, 1.0, style=style)), chart_id="c"))
        assert (root.get("role"), root.get("aria-labelledby")) == ("img", "c-title c-desc")
        assert root.find(f"{SVG}title").text == "Loss <&>"  # type: ignore[union-attr]
        curve, *marks = root.findall(f"{SVG}svg/{SVG}g/{SVG}g/{SVG}path")
        assert [marker.get("d", "").count("h0") for marker in marks] in ([2], [2, 2])
        looks.add((curve.get("stroke"), curve.get("stroke-dasharray"), marks[0].get("stroke-linecap"), len(marks)))
    assert len(looks) == 11
    assert {color(style) for style in range(1, 11)} == {f"var(--s{i})" for i in range(1, len(LIGHT_PALETTE))}


def test_a_higher_loss_is_drawn_higher_and_nan_leaves_a_gap() -> None:
    root = ElementTree.fromstring(render(chart(line(1.0, 3.0, math.nan, 1.0, 2.0, markers=False)), chart_id="c"))
    path = root.find(f"{SVG}svg/{SVG}g/{SVG}g/{SVG}path").get("d", "")  # type: ignore[union-attr]
    assert path.count("M") == 2
    heights = [float(command.split()[1]) for command in path.replace("M", "L").split("L")[1:]]
    assert heights[1] < heights[3] < heights[0] == heights[2]


@pytest.mark.parametrize("values", [(), (math.nan, math.inf), (2.0,), (2.0, 2.0)])
def test_degenerate_data_still_make_a_picture(values: tuple[float, ...]) -> None:
    ElementTree.fromstring(render(chart(line(*values)), chart_id="c"))


def test_tooltips_hold_the_measured_values() -> None:
    drawn = chart(line(1.0, math.nan, name="a"), Line(name="b", points=[(1, 2.5)], style=1), line(9.0, name="c"))
    root = ElementTree.fromstring(render(drawn, chart_id="c"))
    data = json.loads(root.get("data-chart", ""))
    assert [series["points"] for series in data["series"]] == [[[0, 1.0], [1, None]], [[1, 2.5]], [[0, 9.0]]]
    assert "data-chart" not in render(drawn, chart_id="c", width=350)
    svg = render(chart(line(1e-3, 1.0), log=True), chart_id="c")
    data = json.loads(ElementTree.fromstring(svg).get("data-chart", ""))
    assert data["log"]
    assert data["series"][0]["points"] == [[0, 0.001], [1, 1.0]]  # the numbers themselves
    assert data["y_range"] == pytest.approx([-3.12, 0.12])


def test_a_narrow_picture_stretches_the_curves_of_the_wide_one() -> None:
    """The ends of the plot lie at its own. Where a drawing is used again, no rule with an ancestor holds."""
    css = resources.files("ottava.report").joinpath("chart.css").read_text(encoding="utf-8")
    assert all(f"\n.{name} {{" in css for name in ("band", "curve"))
    one = rows_of(("a", [estimate(1.0, 0.1)]), ("b", [estimate(2.0, 0.1)]), legend=[("n", 1)])
    for draw, data in ((render, chart(line(2.0, 1.0))), (forest, one)):
        wide, narrow = draw(data, chart_id="c"), draw(data, chart_id="c", width=350)  # type: ignore[operator]
        root = ElementTree.fromstring(narrow)
        assert (root.get("id"), root.get("viewBox", "").split()[2]) == ("c-narrow", "350")
        (use,) = root.iter(f"{SVG}use")
        assert f'id="{use.attrib["href"][1:]}"' in wide
        across, _, _, tall, x, y = map(float, re.findall(r"-?[\d.]+", use.attrib["transform"]))
        plots = [sorted({float(end) for end in re.findall(r' x[12]="([\d.]+)"', text)}) for text in (wide, narrow)]
        assert [across * at + x for at in plots[0]] == pytest.approx(plots[1], abs=0.2)
        assert (tall, y) == (1, 0)
        assert narrow.count("h0") == 1  # of the legend


def test_a_band_runs_along_its_upper_and_back_along_its_lower_edge() -> None:
    band = Band(name="seeds", points=[(0, 1.0, 2.0), (1, 1.0, 3.0)])
    root = ElementTree.fromstring(render(chart(line(0.0, 4.0), bands=[band]), chart_id="c"))
    area = root.find(f"{SVG}svg/{SVG}g/{SVG}path[@class='band']")
    assert area is not None
    corners = [tuple(map(float, c.split())) for c in area.get("d", "")[1:-1].split("L")]
    (x0, top0), (x1, top1), (back1, low1), (back0, low0) = corners
    assert (x0, x1) == (back0, back1)
    assert top1 < top0 < low0 == low1


def test_the_standalone_picture_brings_its_own_background_and_colours() -> None:
    text = standalone(
        [chart(line(2.0, 1.0)), chart(line(1.0, 2.0), signed=True)], title='a "b" & c', captions=["<d>", "e"]
    )
    root = ElementTree.fromstring(text)
    assert root.find(f"{SVG}rect").get("fill") == "var(--paper)"  # type: ignore[union-attr]
    assert css_variables(LIGHT) in text
    assert len(root.findall(f"{SVG}svg")) == 2
    assert text.replace("http://www.w3.org/2000/svg", "").count("http") == 0


def test_palettes_match() -> None:
    assert len(LIGHT_PALETTE) == len(DARK_PALETTE) == len(set(LIGHT_PALETTE)) == len(set(DARK_PALETTE))
    assert LIGHT.keys() == DARK.keys()


def test_a_logarithmic_axis_has_decades_and_gaps() -> None:
    """Equal factors are equal distances; a zero leaves a gap; labels show the numbers themselves."""
    svg = render(chart(line(1e-2, 1.0, 0.0, 1e2, markers=False), log=True), chart_id="c")
    root = ElementTree.fromstring(svg)
    (path,) = [p.attrib["d"] for p in root.iter(f"{SVG}path") if p.attrib["d"].count("M") == 2]
    heights = [float(part.split()[1]) for part in path.replace("L", "M").split("M") if part]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    labels = {text.text for text in root.iter(f"{SVG}text")}
    assert {"0.01", "1", "100"} <= labels


def test_a_picture_becomes_png() -> None:
    resvg = pytest.importorskip("resvg_py")
    assert resvg
    picture = standalone([chart(line(1.0, 2.0))], title="t", captions=["c"])
    data = to_png(picture)
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") == 2 * int(ElementTree.fromstring(picture).attrib["width"])


def estimate(mean: float, half: float, style: int = 1) -> Estimate:
    return Estimate(mean=mean, low=mean - half, high=mean + half, style=style, values=(mean - half, mean + half))


def rows_of(*rows: tuple[str, list[Estimate]], **changes: object) -> Forest:
    return Forest(title="t", description="d", x_label="x", rows=rows, **changes)  # type: ignore[arg-type]


def ends(picture: str) -> list[tuple[float, float]]:
    """The whiskers' ends in pixels."""
    return [(float(a), float(b)) for a, b in re.findall(r"M([\d.]+) [\d.]+H([\d.]+)M", picture)]


def test_whiskers_are_proportional_and_numbers_that_fit_no_axis_are_left_out() -> None:
    """Twice the interval is twice as long, with 0 marked; NaN, and 0 on a logarithmic axis, are not drawn."""
    rows = [("a", [estimate(1.0, 0.1), estimate(1.0, 0.2)]), ("b & <c>", [estimate(math.nan, 0.1)])]
    picture = forest(rows_of(*rows, signed=True, band=(-0.1, 0.1), legend=[("n", 1)]), chart_id="f")
    ElementTree.fromstring(picture)
    first, second = ends(picture)
    assert math.isclose(second[1] - second[0], 2 * (first[1] - first[0]), abs_tol=0.3)
    assert 'class="zero"' in picture
    assert 'class="band"' in picture
    assert "b &amp; &lt;c&gt;" in picture
    decades = rows_of(("a", [estimate(0.0, 0.1), estimate(0.1, 0.2)]), ("c", [estimate(10, 1)]), log=True)
    log = forest(decades, chart_id="g")
    ElementTree.fromstring(log)
    assert len(ends(log)) == 2
    assert ends(log)[0][0] > 0
    ElementTree.fromstring(forest(rows_of(), chart_id="e"))


def test_bars_stack_and_negative_parts_lie_left_of_zero() -> None:
    parts = [("scale", color(1)), ("grid", color(2))]
    chart = Bars(
        title="t", description="d", x_label="%", parts=parts, bars=[("a", [-20.0, 120.0], "1"), ("b", [40.0, 60.0], "")]
    )
    picture = bars(chart, chart_id="b")
    ElementTree.fromstring(picture)
    found = [
        tuple(map(float, rect))
        for rect in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="15"', picture)
    ]
    (left, short), (zero, long), (start, middle), (next_one, rest) = found
    assert math.isclose(left + short, zero, abs_tol=0.2)
    assert math.isclose(long / short, 6, rel_tol=0.02)
    assert math.isclose(start, zero, abs_tol=0.2)
    assert math.isclose(start + middle, next_one, abs_tol=0.2)
    assert math.isclose((middle + rest) / short, 5, rel_tol=0.02)
    ElementTree.fromstring(bars(Bars(title="t", description="d", x_label="%", parts=parts, bars=[]), chart_id="e"))
