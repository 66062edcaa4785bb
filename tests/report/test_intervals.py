"""Forests and bars: what is drawn lies where the axis says."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from ottava.report.charts import color
from ottava.report.intervals import Bars, Estimate, Forest, bars, forest


def estimate(mean: float, half: float, style: int = 1) -> Estimate:
    return Estimate(mean=mean, low=mean - half, high=mean + half, style=style, values=(mean - half, mean + half))


def ends(picture: str) -> list[tuple[float, float]]:
    """The whiskers' ends in pixels."""
    return [(float(a), float(b)) for a, b in re.findall(r"M([\d.]+) [\d.]+H([\d.]+)M", picture)]


def test_whiskers_are_proportional_and_numbers_that_fit_no_axis_are_left_out() -> None:
    """Twice the interval is twice as long, with 0 marked; NaN, and 0 on a logarithmic axis, are not drawn."""
    rows = [("a", [estimate(1.0, 0.1), estimate(1.0, 0.2)]), ("b & <c>", [estimate(math.nan, 0.1)])]
    chart = Forest(title="t", description="d", x_label="x", rows=rows, signed=True, band=(-0.1, 0.1), legend=[("n", 1)])
    picture = forest(chart, chart_id="f")
    ElementTree.fromstring(picture)
    first, second = ends(picture)
    assert math.isclose(second[1] - second[0], 2 * (first[1] - first[0]), abs_tol=0.3)
    assert 'class="zero"' in picture
    assert 'class="band"' in picture
    assert "b &amp; &lt;c&gt;" in picture
    log = forest(
        Forest(
            title="t",
            description="d",
            x_label="x",
            rows=[("a", [estimate(0.0, 0.1), estimate(0.1, 0.2)]), ("c", [estimate(10, 1)])],
            log=True,
        ),
        chart_id="g",
    )
    ElementTree.fromstring(log)
    assert len(ends(log)) == 2
    assert ends(log)[0][0] > 0
    ElementTree.fromstring(forest(Forest(title="t", description="d", x_label="x", rows=[]), chart_id="e"))


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
