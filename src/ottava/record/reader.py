"""Reads a run folder: `Run`, its steps and events, and its statistics as a `Table` of tallies.

Reading merges ranks: it adds sums and takes the larger extreme. It ignores a torn last line or part, as kill -9 leaves
it.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from ottava.base.errors import need_known
from ottava.base.text import data_frame, html_table, progress
from ottava.base.untrusted import MAX_BYTES, MAX_LINE, MAX_STEP, LimitError, UntrustedError, parse_json, read_lines
from ottava.measure.layer_names import layer_kind, matches, symbol, tensor_names, usable
from ottava.measure.statistics import STATISTICS
from ottava.measure.tally import Tallies, Tally, row_of
from ottava.record.schema import (
    EVENTS,
    EXPERIMENTS,
    IDENTITY,
    MANIFEST,
    NUMBERS,
    RANKS,
    REPORTED,
    STATS,
    STEPS,
    TRACE,
    TRAINER_MANIFEST,
    TRAINER_STEPS,
    TRAINING,
    DenseColumns,
    LazyTally,
    MergedColumns,
    Part,
    RunError,
    SlotKey,
    StoredColumns,
    merged,
    read_manifest,
    trainer_manifest,
)

_LOG = logging.getLogger(__name__)
COLUMNS = (
    *("amin", "amax", "scale_current", "scale_delayed"),
    *("cosine", "mse", "underflow_pct", "overflow_pct"),
)
"""The default columns of `ottava table`: those that the debug tool of the field prints."""
_KNOWN_WITHOUT_SUMS = (
    *("amax", "nonfinite", "scale_max", "scale_min", "scale_error_max", "scale_error_min"),
    *("scale_current", "scale_delayed"),
)
"""Statistics that light rows have too."""
_SINCE_1 = MappingProxyType({"input_hash": "", "label_hash": "", "grad_norm": "grad_norm_used"})
"""Columns of schema version 1 -> their present names; "" for those that cannot be compared with present ones."""
_PART = re.compile(r"part-(?P<rank>\d{1,9})-(?P<number>\d{1,9})\.parquet", re.ASCII)
_MOST_NUMBERS = 1000
_LARGEST_KEY = 1 << 62
_GROUP = ("step", "phase", "kind", *SlotKey._fields)
Steps = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of statistics, column by column.

    Example: see `RunWriter`.
    """

    columns: Mapping[str, Any]
    """Name -> array (rows,) for the names of `schema.IDENTITY`; no rank if ranks are merged."""
    tallies: Tally
    """Every field is an array (rows,), a histogram (rows, bins)."""
    reported: Sequence[Mapping[str, float]]
    """For each row, statistics that another tool computed."""

    @classmethod
    def of(cls, step: int, tallies: Mapping[SlotKey, Tally], *, phase: str = "full") -> Table:
        """A table of one step's tallies, one row each.

        Example:
            >>> key = SlotKey("fc1", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
            >>> Table.of(3, {key: Tally(n=8, n_nonzero=8, n_underflow=2)}).metric("underflow_pct").tolist()
            [25.0]
        """
        count = len(tallies)
        columns: dict[str, Any] = {"step": np.full(count, step), "rank": np.zeros(count, dtype=np.int64)}
        named = {"phase": [phase] * count, "kind": [layer_kind(key.layer) for key in tallies]}
        named |= {name: [getattr(key, name) for key in tallies] for name in SlotKey._fields}
        columns |= {name: np.array(values, dtype=object) for name, values in named.items()}
        return cls(columns, Tallies.of(tallies).rows, [{}] * count)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, column: str) -> Any:
        need_known("", "column", column, self.columns, RunError)
        return self.columns[column]

    def metric(self, name: str) -> Any:
        """A statistic of every row, float64 (rows,); NaN if unknown.

        Raises:
            RunError: the statistic is unknown.
        """
        need_known("", "statistic", name, STATISTICS, RunError)
        values = np.array(np.broadcast_to(STATISTICS[name].finish(self.tallies), (len(self),)), dtype=np.float64)
        if name not in _KNOWN_WITHOUT_SUMS:
            values[self.tallies.n == 0] = math.nan
        for i in self._with_reported:
            # an amax that another tool does not give is unknown; 0 would be a tensor of zeros
            unknown = math.nan if name == "amax" and not self.tallies.n[i] else values[i]
            values[i] = self.reported[i].get(name, unknown)
        return values

    @cached_property
    def _with_reported(self) -> list[int]:
        return [i for i, numbers in enumerate(self.reported) if numbers]

    def where(self, **wanted: Any) -> Table:
        """The rows whose columns have these values; a list, tuple or set means any of them.

        Raises:
            RunError: the column is unknown.
        """
        keep = np.ones(len(self), dtype=bool)
        for name, value in wanted.items():
            several = isinstance(value, (list, tuple, set, frozenset))
            keep &= np.isin(self[name], list(value)) if several else self[name] == value
        return self.take(np.flatnonzero(keep))

    def take(self, index: Any) -> Table:
        """The rows with these numbers, in this order."""
        index = np.asarray(index, dtype=np.int64)
        whole = self.tallies
        if not isinstance(whole, LazyTally):
            whole = LazyTally(DenseColumns(whole), np.arange(len(self)))
        columns = {name: values[index] for name, values in self.columns.items()}
        reported = [self.reported[i] for i in index] if self._with_reported else [{}] * len(index)
        return Table(columns, whole.take(index), reported)

    def has_histograms(self, name: str = "exponents") -> Any:
        """bool (rows,): whether a row has this histogram. Light rows and imported numbers have none; a watch's
        `detail` decides which histograms full rows have."""
        whole = self.tallies
        return whole.filled(name) if isinstance(whole, LazyTally) else np.asarray(getattr(whole, name)).any(axis=1)

    def not_recorded(self) -> str:
        """The reason why no row has a histogram of elements; "" if a row has one.

        Example:
            >>> Table.of(1, {}).not_recorded()
            'no step had a full look; run until the watch takes one'
        """
        if self.has_histograms().any():
            return ""
        looked = (self["phase"] == "full") & (np.asarray(self.tallies.n_nonzero) > 0)
        if looked.any():
            return 'this run was watched with detail="numbers"; watch with detail="blocks"'
        return "no step had a full look; run until the watch takes one"

    def slots(self) -> list[SlotKey]:
        """Every cast with a row, in the order of first rows: forward, then backward."""
        return self.casts[1]

    def groups(self) -> Iterator[tuple[SlotKey, Table]]:
        """Each cast with its rows, in the order of steps."""
        for key, rows in self.series().items():
            yield key, self.take(rows)

    def series(self) -> dict[SlotKey, Any]:
        """The row numbers of each cast in the order of steps; casts in the order of first rows."""
        casts, keys = self.casts
        order = np.lexsort((self["step"], casts))  # stable
        ends = np.cumsum(np.bincount(casts, minlength=len(keys)))[:-1]
        return dict(zip(keys, np.split(order, ends), strict=True)) if keys else {}

    @cached_property
    def casts(self) -> tuple[Any, list[SlotKey]]:
        """The cast of every row as a number, int64 (rows,), and the casts of these numbers, in the order of first
        rows."""
        numbers, first = self.grouped(SlotKey._fields)
        columns = [self[name][first].tolist() for name in SlotKey._fields]
        return numbers, [SlotKey(*values) for values in zip(*columns, strict=True)]

    def grouped(self, names: Sequence[str]) -> tuple[Any, Any]:
        """Groups rows that are equal in these columns, in the order of first rows.

        Returns:
            The group number of every row, int64 (rows,), and the first row of each group, int64 (groups,).
        """
        key, size = np.zeros(len(self), dtype=np.int64), 1
        for name in names:
            values = self[name]
            if values.dtype == object:  # words
                codes = pa.array(values, pa.string()).dictionary_encode().indices.to_numpy(zero_copy_only=False)
            else:
                codes = np.unique(values, return_inverse=True)[1]
            count = int(codes.max(initial=0)) + 1
            if size > _LARGEST_KEY // count:
                key = np.unique(key, return_inverse=True)[1]
                size = int(key.max(initial=0)) + 1
            key, size = key * count + codes, size * count
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty(len(first), dtype=np.int64)
        rank[order] = np.arange(len(first))
        return rank[group], first[order]

    def tally(self, row: int) -> Tally:
        """The tally of one row."""
        return row_of(self.tallies, row)

    def merged(self) -> Tally:
        """All rows as one tally."""
        return merged(self.tallies, len(self))

    def dicts(self, *metrics: str) -> list[dict[str, Any]]:
        """Rows as plain values: the identity and these statistics (by default all)."""
        names = metrics or tuple(STATISTICS)
        columns = {name: values.tolist() for name, values in self.columns.items()}
        columns |= {name: self.metric(name).tolist() for name in names}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def keys(self) -> list[SlotKey]:
        """The cast of every row."""
        casts, keys = self.casts
        return [keys[cast] for cast in casts.tolist()]


class Run:
    """A run folder.

    Example: see `RunWriter`.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest

    @classmethod
    def open(cls, path: Path | str) -> Run:
        """Reads the manifest; the rest is read when it is needed. A run of `ottava train` without --watch has its
        losses and its settings, and no statistics.

        Raises:
            RunError: the folder is missing, has no run, or has one of another schema version.
        """
        path = Path(path)
        manifest = path / MANIFEST
        if not manifest.is_file() and (path / TRAINER_MANIFEST).is_file():
            return cls(path, trainer_manifest(path))
        if not manifest.is_file():
            why = "is a file" if path.exists() else "does not exist"
            why = "has neither watch.json nor manifest.json: no run is there" if path.is_dir() else why
            raise RunError(f"{path} {why}; needs a folder of `ottava watch` or `ottava train`")
        return cls(path, read_manifest(manifest))

    @classmethod
    def of(
        cls,
        path: Path,
        manifest: dict[str, Any],
        lines: Mapping[str, Iterable[Mapping[str, Any]]],
        table: Table,
    ) -> Run:
        """A part of a run, from memory.

        Args:
            lines: of each of its files.
            table: statistics.

        Example:
            >>> run = Run.of(Path("run"), {}, {STEPS: [{"step": 7, "loss": 2.5}]}, Table.of(7, {}))
            >>> run.steps["loss"].tolist(), run.events, len(run.table())
            ([2.5], [], 0)
        """
        run = cls(path, manifest)
        run._lines_of_steps, run._raw, run.ranks = tuple(lines.get(STEPS, ())), table, [0]
        run.events, run.training, run.experiments, run.trace = (
            [dict(line) for line in lines.get(name, ())] for name in (EVENTS, TRAINING, EXPERIMENTS, TRACE)
        )
        return run

    def not_recorded(self) -> str:
        """The reason why no cast has a histogram; "" if one has."""
        if (self.path / TRAINER_MANIFEST).is_file() and not (self.path / MANIFEST).is_file():
            return "nobody watched this run, so it has no statistics; train again with `ottava train --watch`"
        return self.table().not_recorded()

    def __repr__(self) -> str:
        recipes = ", ".join(self.manifest.get("settings", {}).get("recipes", ()))
        return f"<Run {self.path}: {len(self.manifest.get('layers', ()))} layers under {recipes or 'no recipe'}>"

    def _repr_html_(self) -> str:
        facts = {"layers": len(self.manifest.get("layers", ())), "steps": len(self.steps["step"])}
        facts |= {"ranks": len(self.ranks), "events": len(self.events)}
        return html_table([tuple(facts), tuple(facts.values())], repr(self)[1:-1])

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with one row per step and cast: its identity and every statistic."""
        return data_frame(self.table().dicts())

    def plot(self, statistic: str = "underflow_pct", *, beside: Run | None = None, most: int = 24) -> Any:
        """The loss by step, and below it a statistic of every cast at every look (`pip install 'ottava[plot]'`).

        Args:
            statistic: a name of `ottava.debug.STATISTICS`.
            beside: another run, whose loss is drawn, too.
            most: largest number of casts; the worst are kept, in the order of the forward.
        Returns:
            A matplotlib Figure; a run without statistics has the loss alone.
        Raises:
            ValueError: the statistic is unknown.
        """
        from ottava.base import plot

        table, one = self.table(), STATISTICS[known_statistics([statistic])[0]]
        column, series, known = table.metric(statistic), table.series(), np.unique(table["step"]).astype(int)
        values = np.full((len(series), len(known)), np.nan)
        for row, places in enumerate(series.values()):
            values[row, np.searchsorted(known, table["step"][places])] = column[places]
        kept = sorted(plot.worst_first(values, one.worse)[:most])
        names = [f"{key.layer} {symbol(key.tensor, key.direction)}" for key in series]
        drawn, axes = plot.figure(
            8.0, 2.2 + (0.5 + 0.2 * len(kept) if kept else 0), (2.0, 0.2 * len(kept))[: 1 + bool(kept)]
        )
        runs = {self.path.name: self} | ({beside.path.name: beside} if beside else {})
        losses = {name: (run.steps["step"], run.steps["loss"]) for name, run in runs.items() if "loss" in run.steps}
        plot.curves(axes[0], losses, "loss")
        if kept:
            label = f"{statistic}, {one.unit}" if one.unit else statistic
            edges = plot.edges_of([float(step) for step in known])
            plot.map_of(
                axes[1], values[kept], [names[row] for row in kept], edges, bad=one.worse, unit=one.unit, label=label
            )
            if len(kept) < len(names):
                axes[1].set_title(f"the {len(kept)} worst of {len(names)} casts", color=plot.INK, fontsize=9)
        axes[-1].set_xlabel("step", color=plot.INK, fontsize=9)
        return drawn

    @cached_property
    def steps(self) -> dict[str, Any]:
        """Columns of steps.jsonl as float64 arrays of one length, "step" as int64; NaN for a missing number. If a step
        has two lines, because the run was resumed, the later line counts. In a folder of `ottava train`, with the
        numbers of its metrics.jsonl. Of an older run without hashes of batches, which other runs do not share."""
        lines = self._lines_of_steps
        if len(names := {key for line in lines for key in line}) > _MOST_NUMBERS:
            raise RunError(f"{self.path}: has {len(names):,} different names of numbers; needs at most {_MOST_NUMBERS}")
        return _columns(lines)

    @cached_property
    def _lines_of_steps(self) -> Sequence[Mapping[str, Any]]:
        of_watch = {line["step"]: line for line in _lines(self.path / STEPS)}
        of_trainer = {line["step"]: line for line in _lines(self.path / TRAINER_STEPS)}
        return joined(of_watch, of_trainer, self.manifest)

    def broken(self, name: str) -> Any:
        """Whether a number of each step was written and is not finite: in `steps` a missing one is NaN, too."""
        written = [line.get(name) for line in self._lines_of_steps]
        return np.array([one is not None and not math.isfinite(number_of(one)) for one in written], dtype=bool)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Lines of events.jsonl."""
        return list(_lines(self.path / EVENTS))

    @cached_property
    def training(self) -> list[dict[str, Any]]:
        """Lines of training.jsonl."""
        return list(_lines(self.path / TRAINING))

    @cached_property
    def experiments(self) -> list[dict[str, Any]]:
        """Lines of experiments.jsonl: what the watch tried while the training ran."""
        return list(_lines(self.path / EXPERIMENTS))

    @cached_property
    def trace(self) -> list[dict[str, Any]]:
        """Lines of trace.jsonl: the calls of torch in some steps."""
        return list(_lines(self.path / TRACE, longest=MAX_BYTES))

    @cached_property
    def of_ranks(self) -> dict[int, Run]:
        """Rank -> its own steps, parameters and updates, for the ranks above 0."""
        folder = self.path / RANKS
        nested = self.path.parent.name == RANKS  # ranks have none: a link back would never end
        found = [p for p in folder.iterdir() if p.name.isdecimal()] if folder.is_dir() and not nested else []
        return {int(p.name): Run.open(p) for p in sorted(found, key=lambda p: int(p.name)) if (p / MANIFEST).is_file()}

    @cached_property
    def ranks(self) -> list[int]:
        """Ranks that wrote statistics."""
        return sorted({rank for _, rank, _ in part_files(self.path)})

    def table(self, *, phase: str | None = "full", merge_ranks: bool = True) -> Table:
        """The statistics, in the order in which they were written.

        Args:
            phase: "full", "light", or None for both.
            merge_ranks: True: one row per step and cast. False: one per rank, with a column "rank".
        """
        table = self._raw
        if phase is not None:
            table = table.where(phase=phase)
        if not merge_ranks or len(self.ranks) < 2:
            return table
        group, first = table.grouped(_GROUP)
        assert isinstance(table.tallies, LazyTally)
        tallies = LazyTally(MergedColumns(table.tallies, group), np.arange(len(first)))
        return Table({name: table[name][first] for name in _GROUP}, tallies, _worst(table.reported, group, len(first)))

    @cached_property
    def _raw(self) -> Table:
        parts = []
        for _, _, path in part_files(self.path):
            try:
                parts.append(Part(path))
            except (pa.ArrowInvalid, OSError) as error:
                _LOG.warning("%s is torn, so its rows are missing (%s)", path, str(error).partition("\n")[0])
        return table_of(parts)


def part_files(folder: Path) -> list[tuple[int, int, Path]]:
    """(number, rank, file) of every part of a run, in the order in which they were written.

    Raises:
        RunError: a file has no name of a part.
    """
    parts = []
    for path in (folder / STATS).glob("part-*.parquet"):
        if (match := _PART.fullmatch(path.name)) is None:
            raise RunError(f"{path}: is no part of a watch (part-RANK-NUMBER.parquet); move it away")
        parts.append((int(match["number"]), int(match["rank"]), path))
    return sorted(parts)


def joined(of_watch: Steps, of_trainer: Steps, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The line of each step, in order; where both know a number, the trainer's counts."""
    lines = []
    for step in sorted(of_watch.keys() | of_trainer.keys()):
        trained = {name: value for name, value in of_trainer.get(step, {}).items() if value is not None}
        lines.append({**of_watch.get(step, {}), **trained})
    if manifest.get("schema_version") == 1:
        return [{_SINCE_1.get(k, k): v for k, v in line.items() if _SINCE_1.get(k, k)} for line in lines]
    return lines


def _lines(path: Path, *, longest: int = MAX_LINE) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    try:
        yield from parsed(path, read_lines(path, longest=longest))
    except UntrustedError as error:
        raise RunError(f"{path}: {error}") from error


def parsed(path: Path, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of the lines of a file; torn lines, and those without a step, are left out.

    Raises:
        RunError: a line exceeds the limits of a text, or its step is no whole number.
    """
    for number, line in enumerate(lines, start=1):
        try:
            values = parse_json(line)
        except LimitError as error:
            raise RunError(f"{path}: line {number} {error}") from error
        except UntrustedError:
            continue  # a torn line
        if isinstance(values, dict) and "step" in values:
            step = values["step"]
            if type(step) is not int or abs(step) > MAX_STEP:
                raise RunError(f"{path}: line {number} has step {str(step)[:40]!r}; needs a whole number")
            yield values


def _columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers of steps as columns; NaN for a missing one."""
    names = dict.fromkeys(["step", "loss", *(key for line in lines for key in line)])
    columns = {key: np.array([number_of(line.get(key)) for line in lines], dtype=np.float64) for key in names}
    return columns | {"step": columns["step"].astype(np.int64)}


def number_of(value: Any) -> float:
    """A number, or a text of a number, as a float; NaN for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _table(stored: pa.Table | None, parts: Sequence[Part]) -> Table:
    count = 0 if stored is None else stored.num_rows
    columns: dict[str, Any] = {}
    for name in IDENTITY:
        kind: Any = np.int64 if name in ("step", "rank") else object
        columns[name] = np.array([] if stored is None else stored[name], dtype=kind)
    reported: list[dict[str, float]] = [{}] * count
    if stored is not None and stored[REPORTED].null_count < count:
        reported = [dict(entry or ()) for entry in stored[REPORTED].to_pylist()]
    return Table(columns, LazyTally(StoredColumns(stored, parts), np.arange(count)), reported)


def table_of(parts: Sequence[Part]) -> Table:
    """The rows of parts, in this order; of two rows with one key the later."""
    tables = [part.read(NUMBERS) for part in progress(parts, "reading the run")]
    return _latest(_table(pa.concat_tables(tables, promote_options="permissive") if tables else None, parts))


def _latest(table: Table) -> Table:
    """Keeps the later of two rows with one key, as a resumed or rewound run writes them."""
    group, first = table.grouped(("rank", *_GROUP))
    if len(first) == len(table):
        return table
    last = np.zeros(len(first), dtype=np.int64)
    last[group] = np.arange(len(table))  # the last assignment to a place wins
    return table.take(np.sort(last))


def _worst(reported: Sequence[Mapping[str, float]], group: Any, count: int) -> list[Mapping[str, float]]:
    """Takes the worst of each reported statistic over ranks, which cannot be averaged; the largest if none is bad."""
    result: list[dict[str, float]] = [{} for _ in range(count)]
    for number, values in zip(group, reported, strict=True):
        worst = result[int(number)]
        for name, value in values.items():
            low = (name in STATISTICS and STATISTICS[name].worse == "low") or name.endswith("_min") or name == "amin"
            worse = np.fmin if low else np.fmax  # a number beats NaN
            worst[name] = float(worse(worst[name], value)) if name in worst else value
    return list(result)


# --- a choice of rows and columns, as `ottava table` and `plot` show it -----------------------------------------------


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
        raise RunError(f"{run.path}: {run.not_recorded()}")
    names = list(dict.fromkeys(table["layer"].tolist()))
    for pattern in usable(tuple(layers)):
        if not any(matches(name, (pattern,)) for name in names):
            raise RunError(
                f"{run.path}: {pattern!r} matches no layer; it has {', '.join(names[:8])}{', ...' * (len(names) > 8)}"
            )
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
        need_known("", "statistic", name, STATISTICS)
    return wanted


def tensor_table(table: Table, statistics: Iterable[str] = COLUMNS, *, ranks: bool = False) -> pa.Table:
    """One row per step and cast, in order of steps: step, layer, tensor (its symbol), recipe, format, the statistics.

    A missing number is NaN. `ranks` adds the column rank, for a table whose ranks were not merged.

    Example:
        >>> key = SlotKey("fc1", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
        >>> tensor_table(Table.of(3, {key: Tally(n=8, n_nonzero=8, n_underflow=2)}), ["underflow_pct"]).to_pylist()
        [{'step': 3, 'layer': 'fc1', 'tensor': 'X', 'recipe': 'tensorwise', 'format': 'E4M3', 'underflow_pct': 25.0}]
    """
    table = table.take(np.argsort(table["step"], kind="stable"))
    columns = {"step": table["step"]} | ({"rank": table["rank"]} if ranks else {})
    columns |= {
        "layer": table["layer"],
        "tensor": [symbol(t, d) for t, d in zip(table["tensor"], table["direction"], strict=True)],
        "recipe": table["recipe"],
        "format": table["format"],
    }
    return pa.table(columns | {name: table.metric(name) for name in known_statistics(statistics)})
