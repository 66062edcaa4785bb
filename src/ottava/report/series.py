"""One line per tensor and step, and curves of any statistic of any tensor: `ottava table` and `ottava plot`.

The default columns are those that the debug tool of the field prints: amin, amax, current and delayed scale, cosine,
MSE, underflow and overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from ottava.base.errors import unknown_name
from ottava.measure.layer_names import symbol
from ottava.measure.statistics import STATISTICS
from ottava.record.reader import Run, Table
from ottava.record.schema import RunError
from ottava.report.charts import Chart, Line
from ottava.watching.config import matches, tensor_names, usable

COLUMNS = (
    *("amin", "amax", "scale_current", "scale_delayed"),
    *("cosine", "mse", "underflow_pct", "overflow_pct"),
)
CURVES = ("mse", "underflow_pct")
_MOST_CURVES = 6
_WIDE = 30.0
"""A positive statistic that spans a larger factor gets a logarithmic axis."""


def select(
    run: Run,
    *,
    layers: Iterable[str] = ("*",),
    tensors: Iterable[str] = (),
    steps: str = "",
    merge_ranks: bool = True,
) -> Table:
    """The casts of full looks that fit every filter.

    Args:
        run: the watched run.
        layers: patterns over full layer names, see `matches`; one of them has to match.
        tensors: long names or symbols, "X" or "input"; none: all.
        steps: "100:200", ":200", "100:" or "150".
        merge_ranks: False gives a row for each rank.
    Raises:
        RunError: the run has no such layer, or no look in these steps.
        ValueError: a tensor is unknown, or `steps` is no range.
    """
    table = run.table(merge_ranks=merge_ranks)
    if not len(table):
        raise RunError(f"{run.path}: {table.not_recorded()}")
    names = list(dict.fromkeys(table["layer"].tolist()))
    for pattern in usable(tuple(layers)):
        if not any(matches(name, (pattern,)) for name in names):
            raise RunError(f"{run.path}: {pattern!r} matches no layer; it has {', '.join(names[:8])}, ...")
    table = table.where(layer=[name for name in names if matches(name, layers)])
    if wanted := tensor_names(tensors):
        table = table.where(tensor=wanted)
    first, last = step_range(steps)
    table = table.take(np.flatnonzero((table["step"] >= first) & (table["step"] <= last)))
    if not len(table):
        raise RunError(f"{run.path}: no look at these tensors in steps {steps or 'of the run'}; drop a filter")
    return table


def step_range(text: str) -> tuple[float, float]:
    """First and last step of "100:200", ":200", "100:" or "150".

    Example:
        >>> step_range("100:200"), step_range("150"), step_range("100:")
        ((100, 200), (150, 150), (100, inf))
    """
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else 0
        high = (int(last) if last else math.inf) if colon or not text else low
    except ValueError:
        raise ValueError(f"steps {text!r}: needs a range such as 100:200, :200, 100: or 150") from None
    if low > high:
        raise ValueError(f"steps {text!r}: the first step is behind the last; write {last}:{first}")
    return low, high


def known_statistics(names: Iterable[str]) -> tuple[str, ...]:
    """The names, all known.

    Raises:
        ValueError: a statistic is unknown.
    """
    wanted = tuple(names)
    for name in wanted:
        if name not in STATISTICS:
            raise ValueError(unknown_name("statistic", name, list(STATISTICS)))
    return wanted


def tensor_table(table: Table, statistics: Iterable[str] = COLUMNS, *, ranks: bool = False) -> pa.Table:
    """One row per step and cast, in order of steps: step, layer, tensor (its symbol), recipe, format, the statistics.

    A missing number is NaN. `ranks` adds the column rank, for a table whose ranks were not merged.

    Example:
        >>> from ottava.record.schema import SlotKey
        >>> from ottava.measure.tally import Tally
        >>> key = SlotKey("fc1", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
        >>> tensor_table(Table.of(3, {key: Tally(n=8, n_nonzero=8, n_underflow=2)}), ["underflow_pct"]).to_pylist()
        [{'step': 3, 'layer': 'fc1', 'tensor': 'X', 'recipe': 'tensorwise', 'format': 'E4M3', 'underflow_pct': 25.0}]
    """
    table = table.take(np.argsort(table["step"], kind="stable"))
    columns = {"step": table["step"]} | ({"rank": table["rank"]} if ranks else {})
    columns |= {
        "layer": table["layer"],
        "tensor": _symbols(table),
        "recipe": table["recipe"],
        "format": table["format"],
    }
    return pa.table(columns | {name: table.metric(name) for name in known_statistics(statistics)})


def _symbols(table: Table) -> list[str]:
    return [symbol(t, d) for t, d in zip(table["tensor"], table["direction"], strict=True)]


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
