"""The page of an evaluation: one HTML file without other files."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from ottava.base.files import replacing
from ottava.report.charts import Chart, Line
from ottava.report.charts import render as drawn
from ottava.report.frame import render
from ottava.serving.evaluate import Evaluation


def render_page(found: Evaluation) -> str:
    """The page as one HTML document."""
    chart = _blocks(found) if found.blocks else None
    return render(
        __package__ or "",
        "evaluation.html.j2",
        found=found,
        chart=None if chart is None else Markup(drawn(chart, chart_id="blocks", tooltips=True)),
        texts=found.texts if len(found.texts) == 1 else (*found.texts, found.answers),
        tensors=sorted(found.weights.tensors, key=lambda one: not one.wrong),
        shown=_shown,
    )


def write_page(found: Evaluation, path: Path) -> Path:
    """Writes the page and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as scratch:
        scratch.write_text(render_page(found), encoding="utf-8")
    return path


def _blocks(found: Evaluation) -> Chart:
    total = [(float(i), one.total) for i, one in enumerate(found.blocks)]
    own = [(float(i), one.own) for i, one in enumerate(found.blocks)]
    return Chart(
        title="Error behind each block",
        description="Relative error of the hidden state behind each block, and of each block alone on A's stream.",
        x_label="block",
        y_label="relative error",
        lines=[
            Line(name="so far", points=total, style=1, markers=True),
            Line(name="of this block alone", points=own, style=2, markers=True),
        ],
        x_range=(0, max(1, len(total) - 1)),
        log=any(y > 0 for _, y in (*total, *own)),
        width=760,
    )


def _shown(values: str) -> str:
    """Generated text on one line, with its blanks."""
    return values.replace("\n", "⏎")
