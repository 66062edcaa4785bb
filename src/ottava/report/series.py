"""Curves of any statistic of any tensor: `ottava plot`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ottava.measure.layer_names import symbol
from ottava.measure.statistics import STATISTICS
from ottava.record.reader import Table, known_statistics
from ottava.report.charts import Chart, Line

CURVES = ("mse", "underflow_pct")
_MOST_CURVES = 6
_WIDE = 30.0
"""A positive statistic that spans a larger factor gets a logarithmic axis."""


def curves(tables: Mapping[str, Table], statistic: str) -> Chart:
    """A statistic of every tensor by step, all runs in one chart.

    Args:
        tables: name of a run -> its selected casts. The first run is solid and the others are dashed; a tensor has one
            colour in all runs. The six worst tensors get a name, the others thin lines.
        statistic: a name of STATISTICS.

    Example:
        >>> from ottava.record.schema import SlotKey
        >>> from ottava.measure.tally import Tally
        >>> key = SlotKey("fc1", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
        >>> chart = curves({"bad": Table.of(3, {key: Tally(n=8, n_nonzero=8, n_underflow=2)})}, "underflow_pct")
        >>> [(line.name, line.points) for line in chart.lines]
        [('fc1 X', [(3.0, 25.0)])]
    """
    (name,) = known_statistics([statistic])
    series = {(run, tensor): points for run, table in tables.items() for tensor, points in _series(table, name).items()}
    worst = _worst_first(series, low=STATISTICS[name].worse == "low")
    lines = []
    for (run, tensor), points in series.items():
        rank = worst.index(tensor)
        label = f"{tensor}, {run}" if len(tables) > 1 else tensor
        dashed = run != next(iter(tables)) if len(tables) > 1 else None
        faint = rank >= _MOST_CURVES
        markers = len(points) <= 40 and not faint
        lines.append(Line(name=label, points=points, style=rank + 1, faint=faint, dashed=dashed, markers=markers))
    values = np.array([value for points in series.values() for _, value in points])
    values = values[np.isfinite(values) & (values != 0)]
    wide = bool(len(values)) and values.min() > 0 and values.max() > _WIDE * values.min()
    meaning, unit = STATISTICS[name].meaning, STATISTICS[name].unit
    return Chart(
        title=name,
        description=f"{meaning}, by step, of {len(series)} series",
        x_label="step",
        y_label=unit or " ",
        lines=sorted(lines, key=lambda line: (not line.faint, line.style, bool(line.dashed))),
        log=wide and unit != "%",
    )


def _series(table: Table, statistic: str) -> dict[str, list[tuple[float, float]]]:
    """Tensor -> its points; the recipe is part of the name if the run has several."""
    several = len(set(table["recipe"].tolist())) > 1
    found: dict[str, list[tuple[float, float]]] = {}
    values = table.metric(statistic)
    for i in np.argsort(table["step"], kind="stable"):
        tensor = f"{table['layer'][i]} {symbol(table['tensor'][i], table['direction'][i])}"
        tensor += f" ({table['recipe'][i]})" if several else ""
        found.setdefault(tensor, []).append((float(table["step"][i]), float(values[i])))
    return found


def _worst_first(series: Mapping[tuple[str, str], Sequence[tuple[float, float]]], *, low: bool) -> list[str]:
    extremes: dict[str, float] = {}
    for (_, tensor), points in series.items():
        finite = [value for _, value in points if math.isfinite(value)]
        badness = max((-v if low else v for v in finite), default=-math.inf)
        extremes[tensor] = max(badness, extremes.get(tensor, -math.inf))
    return sorted(extremes, key=lambda tensor: -extremes[tensor])


def run_names(paths: Sequence[Path]) -> list[str]:
    """A short name for each run, all different.

    Example:
        >>> run_names([Path("runs/good"), Path("runs/bad")]), run_names([Path("a/run"), Path("b/run")])
        (['good', 'bad'], ['a/run', 'b/run'])
    """
    short = [path.resolve().name for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]
