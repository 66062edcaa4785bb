"""The report of a demo: one HTML file without other files, and the picture for a README.

This module turns a `DemoResult` into charts and shaded cells. The template (demo.html.j2) holds all words and the
style. Every number comes from the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from markupsafe import Markup

from ottava.measure.layer_names import starred
from ottava.nn.receipt import ReceiptRow, grouped
from ottava.report.charts import Band, Chart, Line, color, nice_ticks, smooth, standalone
from ottava.report.charts import render as drawn
from ottava.report.frame import render
from ottava.train.verdict import REFERENCE, DemoResult, RunResult

# The three tensors that a Linear casts, with their names in the report.
_TENSORS = MappingProxyType({"input": "Input X", "weight": "Weight W", "grad_output": "Gradient dY"})

# Limits of the three tints. For a normal distribution E4M3 gives about 31 dB and E5M2 about 25.
_SQNR_STEPS = (22.0, 16.0, 10.0)
_UNDERFLOW_STEPS = (0.1, 1.0, 10.0)


def render_report(result: DemoResult) -> str:
    """The whole report as one HTML document, without network, with a short script for the tooltips.

    Raises:
        ValueError: the result has no runs (see `DemoResult`).
    """
    charts = (loss_chart(result), difference_chart(result))
    return render(
        __package__,
        "demo.html.j2",
        result=result,
        styles=styles(result),
        color=color,
        charts=[Markup(drawn(chart, chart_id=f"chart{i}", tooltips=True)) for i, chart in enumerate(charts)],
        strip=Strip.of(result),
        steps=[step for step, _ in result.runs[0].validation],
        receipts={recipe: grouped([ReceiptRow(**row) for row in m.receipt]) for recipe, m in result.machinery.items()},
        heat={recipe: heat_grids(machinery.numbers) for recipe, machinery in result.machinery.items()},
    )


def render_picture(result: DemoResult) -> str:
    """The two charts as one SVG file with its own background."""
    captions = [verdict.sentence for verdict in result.news[:2]]
    return standalone([loss_chart(result), difference_chart(result)], title=result.headline, captions=captions)


def styles(result: DemoResult) -> dict[str, int]:
    """The style number of each recipe (colour, dash and marker): 0 for BF16, then in order."""
    return {REFERENCE: 0} | {run.recipe: i for i, run in enumerate(result.candidates, start=1)}


def loss_chart(result: DemoResult) -> Chart:
    """Validation losses over smoothed training losses, with the BF16 seeds as a band."""
    lines = []
    for run in _compared(result):
        style = styles(result)[run.recipe]
        curve = list(enumerate(smooth(run.losses, span=16), start=1))
        lines.append(Line(name=f"{run.recipe}, training", points=curve, style=style, faint=True))
    for run in _compared(result):
        lines.append(Line(name=run.recipe, points=run.validation, style=styles(result)[run.recipe], markers=True))
    highest = max((run.losses[0] for run in result.references if math.isfinite(run.losses[0])), default=6.0)
    lowest = min((y for line in lines for _, y in line.points if math.isfinite(y)), default=0.0)
    return Chart(
        title="Validation loss",
        description="Loss on held-out text by training step, one line for each recipe; thin: smoothed training loss. "
        + " ".join(verdict.sentence + "." for verdict in result.verdicts),
        x_label="step",
        y_label="nats per byte",
        lines=lines,
        bands=_seed_band(result, relative=False),
        x_range=(0, len(result.runs[0].losses)),
        y_range=(lowest - 0.1, highest + 0.1),
    )


def difference_chart(result: DemoResult) -> Chart:
    """Each recipe minus BF16 of the same seed, over the spread of the BF16 seeds. The axis fits the second half."""
    lines = []
    for run in _compared(result):
        reference = dict(result.reference_of(run).validation)
        points = [(step, loss - reference[step]) for step, loss in run.validation if step in reference]
        lines.append(Line(name=run.recipe, points=points, style=styles(result)[run.recipe], markers=True))
    bands = _seed_band(result, relative=True)
    half = max(step for step, _ in result.runs[0].validation) / 2
    late = [y for line in lines for x, y in line.points if x >= half]
    late += [y for band in bands for x, low, high in band.points if x >= half for y in (low, high)]
    reach = 1.25 * max((abs(y) for y in late if math.isfinite(y)), default=0.0) or 0.01
    return Chart(
        title="Difference to BF16",
        description="Validation loss of each recipe minus that of BF16 with the same seed, by training step. "
        "The band reaches to either side as far as the BF16 seeds lie apart.",
        x_label="step",
        y_label="nats per byte",
        lines=lines,
        bands=bands,
        x_range=(0, len(result.runs[0].losses)),
        y_range=(-reach, reach),
        signed=True,
    )


def _compared(result: DemoResult) -> list[RunResult]:
    """The first BF16 seed and every FP8 run; the other seeds are the band."""
    return [result.reference_of(result.runs[0]), *result.candidates]


def _seed_band(result: DemoResult, *, relative: bool) -> list[Band]:
    """Lowest to highest BF16 seed at each evaluation. Relative: their distance to either side of 0, the verdict's
    "inside". Empty for one seed."""
    if len(result.references) < 2:
        return []
    points = []
    curves = [dict(run.validation) for run in result.references]
    for step in curves[0]:
        losses = [curve[step] for curve in curves if step in curve]
        spread = max(losses) - min(losses)
        points.append((float(step), -spread, spread) if relative else (float(step), min(losses), max(losses)))
    return [Band(name=f"{'spread' if relative else 'range'} of {len(curves)} bf16 seeds", points=points)]


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Final losses on one axis; positions in percent of its width."""

    ticks: list[tuple[float, str]]
    band: tuple[float, float]
    """Left edge and width of the verdict's "inside": the BF16 run of the comparison, plus and minus the spread."""
    rows: list[tuple[str, list[float]]]
    """Recipe and the positions of its runs; a diverged run has none."""

    @classmethod
    def of(cls, result: DemoResult) -> Strip | None:
        """None if there is nothing to compare: BF16 diverged, or all losses are equal."""
        reference = result.reference_of(result.runs[0])
        losses = [run.final_loss for run in result.runs if not run.diverged]
        if reference.diverged or len(losses) < 2 or min(losses) == max(losses):
            return None
        spread = result.noise.spread or 0.0
        inside = (reference.final_loss - spread, reference.final_loss + spread)
        low, high = min(*losses, *inside), max(*losses, *inside)
        low, high = low - 0.06 * (high - low), high + 0.06 * (high - low)

        def position(loss: float) -> float:
            return round(100 * (loss - low) / (high - low), 2)

        ticks = nice_ticks(low, high)
        decimals = max(3, -math.floor(math.log10(high - low)) + 1)
        left, right = map(position, inside)
        rows: dict[str, list[float]] = {run.recipe: [] for run in result.runs}
        for run in result.runs:
            rows[run.recipe] += [] if run.diverged else [position(run.final_loss)]
        return cls(
            ticks=[(position(tick), f"{tick:.{decimals}f}") for tick in ticks],
            band=(left, round(right - left, 2)),
            rows=list(rows.items()),
        )


@dataclass(frozen=True)
class Cell:
    """A number of a heat table, its tint (0 to 3), and the words of its tooltip."""

    text: str
    level: int
    hint: str


@dataclass(frozen=True)
class HeatGrid:
    """One tensor: kinds of layer down, layer numbers across."""

    title: str
    columns: list[str]
    rows: list[tuple[str, list[Cell | None]]]


def heat_grids(rows: Sequence[Mapping[str, object]]) -> dict[str, list[HeatGrid]]:
    """The error of each tensor's cast, as small tables: {"SQNR, dB": [...], "underflow, %": [...]}.

    A tensor may be cast twice, along rows and along columns. The cell shows the worse cast, the tooltip both.
    """
    return {
        "Signal to quantization noise, dB": [_grid(rows, tensor, "sqnr_db") for tensor in _TENSORS],
        "Underflow to zero, %": [_grid(rows, tensor, "underflow_pct") for tensor in _TENSORS],
    }


def _grid(rows: Sequence[Mapping[str, object]], tensor: str, metric: str) -> HeatGrid:
    cells: dict[tuple[str, int | None], list[Mapping[str, object]]] = {}
    for row in rows:
        if row["tensor"] == tensor:
            cells.setdefault(starred(str(row["layer"])), []).append(row)
    numbers = sorted({number for _, number in cells}, key=lambda n: -1 if n is None else n)
    # the order of the forward, also for gradients, which arrive in reverse order
    order = dict.fromkeys(starred(str(row["layer"]))[0] for row in rows)
    kinds = [kind for kind in order if any((kind, number) in cells for number in numbers)]
    return HeatGrid(
        title=_TENSORS[tensor],
        columns=["" if number is None else str(number) for number in numbers],
        rows=[
            (kind, [_cell(cells[kind, number], metric) if (kind, number) in cells else None for number in numbers])
            for kind in kinds
        ],
    )


def _cell(rows: Sequence[Mapping[str, object]], metric: str) -> Cell:
    values = [float(str(row[metric])) for row in rows]
    is_sqnr = metric == "sqnr_db"
    worst = min(values) if is_sqnr else max(values)
    if is_sqnr:
        text, level = _sqnr_text(worst), sum(worst < step for step in _SQNR_STEPS)
    else:
        text, level = f"{worst:.2f}" if worst < 10 else f"{worst:.0f}", sum(worst > step for step in _UNDERFLOW_STEPS)
    unit = "dB" if is_sqnr else "%"
    hint = "; ".join(
        f"{row['direction']}: {row['format']} {row['granularity']}, {value:.3g} {unit}, amax {row['amax']:.3g}"
        for row, value in zip(rows, values, strict=True)
    )
    return Cell(text, level, hint)


def _sqnr_text(value: float) -> str:
    if math.isnan(value):
        return "\N{EN DASH}"  # all elements of the tensor are zero
    return "exact" if math.isinf(value) else f"{value:.1f}"
