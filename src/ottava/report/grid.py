"""Arranges a table of statistics as a grid: casts down, looks across. Every cell is one real row of the table.

Thousands of looks do not fit on a page. Neighbouring looks then share a column, and the cell shows the worst of them,
never a mean, so that no spike is lost.

`SCALES` says what is worse: the colours of each statistic, from calm (level 0) to alarming (level 1). The scales decide
nothing; the rules of `diagnose` do. They put statistics of different units onto one axis, so that heat maps of all runs
look alike and each has a worst tensor. SQNR is measured from that of a bell-shaped tensor in the format
(`limits.healthy_db`). `curves` shows one statistic of every tensor by step (`ottava plot`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ottava.measure.layer_names import KINDS, SYMBOLS, layer_kind, starred, symbol
from ottava.measure.limits import healthy_db
from ottava.measure.statistics import STATISTICS
from ottava.numerics.formats import FORMATS
from ottava.record.reader import Table, known_statistics
from ottava.record.schema import SlotKey
from ottava.report.charts import Chart, Line

Index = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ColorScale:
    """The two ends of a statistic's colours."""

    calm: float
    """Value at level 0; with `below_format`, dB below the SQNR of a bell-shaped tensor in the format."""
    alarm: float
    """Value at level 1."""
    log: bool = False
    """Whether levels follow the logarithm."""
    below_format: bool = False
    """Whether values are dB below the SQNR of a bell-shaped tensor in the format."""
    health: bool = False
    """Whether the statistic helps to find the worst tensor of a look."""

    def levels(self, values: Any, floor: Any) -> Values:
        """Levels, which may be below 0 or above 1; NaN stays NaN.

        Args:
            values: values of the statistic.
            floor: SQNR of a bell-shaped tensor in the format of each value, dB.

        Example:
            >>> SCALES["row_sqnr_p50_db"].levels([31.5, 15.5], 31.5).tolist()
            [0.0, 1.0]
        """
        values = np.asarray(values, dtype=np.float64)
        if self.below_format:
            values = floor - values
        calm, alarm = self.calm, self.alarm
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.log10(values)
            calm, alarm = math.log10(calm), math.log10(alarm)
        return np.asarray((values - calm) / (alarm - calm))


_SQNR = ColorScale(0, 16, below_format=True)
SCALES: Mapping[str, ColorScale] = MappingProxyType(
    {
        "row_sqnr_p50_db": ColorScale(0, 16, below_format=True, health=True),
        "row_sqnr_p10_db": _SQNR,
        "row_sqnr_p1_db": _SQNR,
        "sqnr_db": ColorScale(0, 16, below_format=True, health=True),
        "underflow_pct": ColorScale(0.01, 30, log=True, health=True),
        "underflow_pct_numel": ColorScale(0.01, 30, log=True, health=True),
        "subnormal_pct": ColorScale(1, 90, log=True),
        "overflow_pct": ColorScale(1e-4, 1, log=True, health=True),
        "error_dead_pct": ColorScale(10, 90),
        "error_clipped_pct": ColorScale(1, 90, log=True),
        "error_scale_pct": ColorScale(20, 90),
        "blocks_dead_pct": ColorScale(10, 90),
        "blocks_clipped_pct": ColorScale(1, 90, log=True),
        "blocks_scale_pct": ColorScale(20, 90),
        "rows_below_15db_pct": ColorScale(0.1, 50, log=True),
        "mean_relative_error": ColorScale(0.05, 0.7, log=True),
        "cosine": ColorScale(0.999, 0.95),
        "kurtosis": ColorScale(30, 1e4, log=True),
        "outlier_ratio": ColorScale(10, 1e3, log=True),
        "block_spread_p50": ColorScale(3, 14),
        "block_spread_p99": ColorScale(6, 20),
        "scale_error_max": ColorScale(0, 4, health=True),
        "scale_error_min": ColorScale(-6, -16, health=True),
        "nonfinite": ColorScale(0.1, 10, log=True, health=True),
    }
)
"""A statistic without an entry has the unit of its tensor (amax, mse). Its colours run from its smallest to its largest
value and do not warn."""


class Worst(NamedTuple):
    """The most alarming cell of a look, or of a run."""

    slot: int
    look: int
    metric: str
    value: float
    level: float


@dataclass(frozen=True, eq=False)
class Grid:
    """Casts x looks.

    Example:
        >>> from ottava.measure.tally import Tally
        >>> key = SlotKey("fc1", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
        >>> columns = {"step": np.array([5]), **{f: np.array([v], dtype=object) for f, v in key._asdict().items()}}
        >>> table = Table(columns, Tally(n=np.ones(1)), [{"underflow_pct": 12.0}])
        >>> grid = Grid.of(table, most=100)
        >>> grid.worst()
        Worst(slot=0, look=0, metric='underflow_pct', value=12.0, level=0.885...)
    """

    slots: list[SlotKey]
    """Casts in the order of the page: by tensor, kind of layer, layer."""
    looks: list[tuple[int, int]]
    """First and last step of each column."""
    row: Index
    """(slots, looks): number of the table's row behind each cell; -1 for an empty cell."""
    step: Index
    """(slots, looks): step of that row."""
    values: Mapping[str, Values]
    """Statistic -> (slots, looks), for statistics with a known value."""
    floor: Values
    """(slots,): SQNR of a bell-shaped tensor in the cast's format, dB; NaN for an unknown format."""

    @classmethod
    def of(
        cls,
        table: Table,
        most: int,
        metrics: tuple[str, ...] = tuple(STATISTICS),
        by: str = "",
        columns: Mapping[str, Values] | None = None,
    ) -> Grid:
        """The grid of a table.

        Args:
            most: largest number of columns.
            metrics: statistics to include.
            by: if rows share a cell, it shows the row with the largest value of this statistic; by default the most
                alarming row.
            columns: these statistics of every row, if they are at hand.
        """
        slots = _ordered(table.slots())
        steps = np.unique(table["step"]) if len(table) else np.array([], dtype=np.int64)
        chunks = [chunk for chunk in np.array_split(steps, max(1, min(most, len(steps)))) if len(chunk)]
        edges = np.array([chunk[0] for chunk in chunks], dtype=np.int64)
        casts, keys = table.casts
        number = {slot: i for i, slot in enumerate(slots)}
        down = np.array([number[key] for key in keys], dtype=np.int64)[casts]
        across = np.searchsorted(edges, table["step"], side="right") - 1
        floor = np.array([healthy_db(FORMATS[s.format]) if s.format in FORMATS else math.nan for s in slots])
        if columns is None:
            columns = {name: table.metric(name) for name in metrics}
        alarm = columns[by] if by else _alarm(columns, floor[down])[0] if len(table) else np.array([])
        order = np.argsort(np.nan_to_num(alarm, nan=-1e9), kind="stable")  # the last row written to a cell wins
        row = np.full((len(slots), len(chunks)), -1, dtype=np.int64)
        row[down[order], across[order]] = order
        values = {}
        for name, column in columns.items():
            if np.isfinite(column).any() or np.isinf(column).any():
                values[name] = np.where(row >= 0, column[row], np.nan)
        step = np.where(row >= 0, table["step"][row], -1) if len(table) else row
        looks = [(int(chunk[0]), int(chunk[-1])) for chunk in chunks]
        return cls(slots, looks, row, step, values, floor)

    def alarm(self) -> tuple[Values, npt.NDArray[np.object_]]:
        """(slots, looks): the highest level among the health statistics, and the name of that statistic."""
        return _alarm(self.values, self.floor[:, None], self.row.shape)

    def worst(self) -> Worst | None:
        """The most alarming cell; None without health statistics."""
        cells = (worst for worst in self.worst_of_looks() if worst is not None)
        return max(cells, key=lambda worst: worst.level, default=None)

    def worst_of_looks(self) -> list[Worst | None]:
        """The most alarming cell of each column; None without health statistics, or if nothing was lost."""
        if not self.slots:
            return []
        level, metric = self.alarm()
        slots = np.argmax(np.nan_to_num(level, nan=-np.inf, posinf=1e9), axis=0)
        cells: list[Worst | None] = []
        for look, slot in enumerate(slots.tolist()):
            name = metric[slot, look]
            if name is None or level[slot, look] == -np.inf:
                cells.append(None)
                continue
            value = float(self.values[name][slot, look])
            cells.append(Worst(slot, look, name, value, float(level[slot, look])))
        return cells

    def alarming(self) -> list[float]:
        """For each look the share of casts, 0 to 1, that have a health statistic at its alarm."""
        seen = self.row >= 0
        alarms = (np.nan_to_num(self.alarm()[0], nan=-np.inf) >= 1) & seen
        shares: list[float] = (alarms.sum(0) / np.maximum(seen.sum(0), 1)).tolist()
        return shares

    def groups(self) -> list[dict[str, object]]:
        """Groups of casts that a picture shows together: one tensor, and layers whose names differ only in a number.

        Returns:
            title, kind, tensor, and members: pairs (number of the cast, label within the group).
        """
        patterns = [starred(slot.layer) for slot in self.slots]
        layers: dict[tuple[str, str], set[str]] = {}
        for slot, (pattern, _) in zip(self.slots, patterns, strict=True):
            layers.setdefault((slot.tensor, pattern), set()).add(slot.layer)
        groups: dict[tuple[str, ...], list[tuple[int, str]]] = {}
        for i, (slot, (pattern, block)) in enumerate(zip(self.slots, patterns, strict=True)):
            kind = layer_kind(slot.layer)
            alone = len(layers[slot.tensor, pattern]) == 1
            key = (slot.tensor, kind, "" if alone else pattern)
            groups.setdefault(key, []).append((i, slot.layer if alone else str(block)))
        return [
            {"tensor": tensor, "kind": kind, "title": pattern, "members": members}
            for (tensor, kind, pattern), members in groups.items()
        ]


def _alarm(
    values: Mapping[str, Values], floor: Values, shape: tuple[int, ...] | None = None
) -> tuple[Values, npt.NDArray[np.object_]]:
    shape = shape or floor.shape
    level = np.full(shape, np.nan)
    metric = np.full(shape, None, dtype=object)
    for name, scale in SCALES.items():
        if not scale.health or name not in values:
            continue
        danger = scale.levels(values[name], floor)
        higher = (danger > level) | (np.isnan(level) & ~np.isnan(danger))
        level, metric = np.where(higher, danger, level), np.where(higher, name, metric)
    return level, metric


def _ordered(slots: list[SlotKey]) -> list[SlotKey]:
    """Casts by tensor, kind and number of the layer; otherwise in the order of the forward, as they came."""
    tensors, kinds = list(SYMBOLS), ["qkv", "proj", "fc1", "fc2", "router", "linear", "lm_head", *KINDS]
    patterns = list(dict.fromkeys(starred(slot.layer)[0] for slot in slots))
    rank = {pattern: i for i, pattern in enumerate(patterns)}

    def place(numbered: tuple[int, SlotKey]) -> tuple[int, int, int, int, int]:
        came, slot = numbered
        tensor = tensors.index(slot.tensor) if slot.tensor in tensors else len(tensors)
        pattern, block = starred(slot.layer)
        return tensor, kinds.index(layer_kind(slot.layer)), rank[pattern], block or 0, came

    return [slot for _, slot in sorted(enumerate(slots), key=place)]


# --- curves of any statistic of any tensor: ottava plot ---------------------------------------------------------------


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
