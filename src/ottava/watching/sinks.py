"""Shows the numbers of a watched run in a terminal, a live page, TensorBoard, Weights & Biases or trackio.

The run folder has all numbers. A sink gets fewer, so that it stays readable and fast: aggregates over all tensors, and
the worst tensors by name, at most `MAX_TAGS` names in a run (TensorBoard takes 1.6 minutes to list 12,345). Once a sink
has shown a name, every later look shows it too. A new sink is one class and one entry of `SINKS`.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ottava.base.errors import unknown_name
from ottava.interop.event_file import EventWriter
from ottava.measure import limits
from ottava.measure.layer_names import SYMBOLS, symbol
from ottava.measure.observer import known_or_last
from ottava.measure.statistics import STATISTICS
from ottava.measure.tally import ROW_SQNR_BINS, ROW_SQNR_DB
from ottava.numerics.formats import E4M3, E5M2
from ottava.record.reader import Table
from ottava.record.schema import SlotKey

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table as RichTable

_LOG = logging.getLogger(__name__)
MAX_TAGS = 400
TOP_K = 12
"""Number of worst tensors that a look shows."""
AGGREGATED = (
    "row_sqnr_p50_db",
    "underflow_pct",
    "overflow_pct",
    "mean_relative_error",
    "kurtosis",
    "nonfinite",
    "scale_error_max",
)
"""A sink shows the worst and the median of these statistics, separately for X, W, dY, ..."""
PER_TENSOR = (
    *("row_sqnr_p50_db", "underflow_pct", "overflow_pct", "amax", "amin"),
    *("mse", "cosine", "scale_current", "scale_delayed"),
)
"""Statistics of a single tensor that a sink shows."""
WARN_DB = MappingProxyType({fmt.name: (limits.warn_db(fmt), limits.critical_db(fmt)) for fmt in (E4M3, E5M2)})
"""Format -> row SQNR below which a tensor gets the mark !, and below which it gets !!."""


class SinkError(ValueError):
    """A sink or one of its settings is unknown; the message names the known ones."""

    exit_code = 2


class SinkMissingError(ImportError):
    """The package behind a sink is not installed; the message names the extra."""

    exit_code = 3


class Row(NamedTuple):
    """One tensor of a look."""

    slot: SlotKey
    values: Mapping[str, float]
    """Statistic -> value; NaN if unknown."""
    marks: Mapping[str, int]
    """Statistic -> 1 for !, 2 for !!."""

    @property
    def tag(self) -> str:
        """Name in a logger: the layer and the symbol of the tensor."""
        return f"tensor/{self.slot.layer}/{symbol(self.slot.tensor, self.slot.direction)}"


class Sink(Protocol):
    """Shows looks; what a kind of sink leaves out, it does not show."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the numbers of a look, by tag."""
        return

    def histogram(self, step: int, tag: str, edges: Sequence[float], counts: Sequence[float]) -> None:
        """Shows a histogram of a look; len(edges) == len(counts) + 1."""
        return

    def worst(self, step: int, rows: Sequence[Row], numbers: Mapping[str, float]) -> None:
        """Shows the worst tensors of a look, worst first, with the numbers of the step: loss, grad_norm, ..."""
        return

    def close(self) -> None:
        """Ends the run."""


def make_sinks(config: Sequence[Any], run_dir: Path) -> list[Sink]:
    """Makes the sinks of the settings: names, or {name: settings}.

    Raises:
        SinkError: a name or setting is unknown.  SinkMissingError: the package of a sink is not installed.

    Example:
        >>> [type(sink).__name__ for sink in make_sinks(["terminal", {"terminal": {"top_k": 3}}], Path("."))]
        ['Limited', 'Limited']
    """
    sinks: list[Sink] = []
    for entry in config:
        name, settings = next(iter(entry.items())) if isinstance(entry, Mapping) and len(entry) == 1 else (entry, None)
        if not isinstance(name, str) or name not in SINKS:
            raise SinkError(f"watch: sinks: {unknown_name('sink', name, SINKS)}")
        try:
            sinks.append(Limited(SINKS[name](run_dir, **(settings or {}))))
        except TypeError as error:
            raise SinkError(f"watch: sink {name}: {error}") from error
    return sinks


def publish(sinks: Sequence[Sink], step: int, table: Table, numbers: Mapping[str, float]) -> None:
    """Shows one look in every sink.

    Args:
        table: the casts of the step.
        numbers: the step's line of steps.jsonl: loss, grad_norm, ...
    """
    if not sinks:
        return
    rows = ranked(table)
    per_tensor = {f"{row.tag}/{name}": row.values[name] for row in rows for name in PER_TENSOR}
    shown = {name: value for name, value in numbers.items() if not name.startswith(("input_", "label"))}  # of the batch
    first = {f"train/{name}": float(value) for name, value in shown.items()} | aggregates(table, rows)
    for sink in sinks:
        earlier = sink.tags if isinstance(sink, Limited) else ()
        chosen = {tag: per_tensor[tag] for tag in earlier if tag in per_tensor}
        chosen |= {f"{row.tag}/{name}": row.values[name] for row in rows[:TOP_K] for name in PER_TENSOR}
        sink.scalars(step, first | chosen)
        if len(table):
            edges = [i * ROW_SQNR_DB for i in range(ROW_SQNR_BINS + 1)]
            sink.histogram(step, "rows/sqnr_db", edges, np.asarray(table.tallies.row_sqnr).sum(0).tolist())
        sink.worst(step, rows[:TOP_K], numbers)


def ranked(table: Table) -> list[Row]:
    """The casts of a look, worst first: by marks, then by row SQNR."""
    columns = {name: table.metric(name) for name in STATISTICS if name in {*AGGREGATED, *PER_TENSOR, *_SHOWN}}
    rows = []
    for i, slot in enumerate(table.keys()):
        values = {name: float(column[i]) for name, column in columns.items()}
        rows.append(Row(slot, values, _marks(slot, values)))
    rows.sort(key=lambda row: (-max(row.marks.values(), default=0), known_or_last(row.values["row_sqnr_p50_db"])))
    return rows


def aggregates(table: Table, rows: Sequence[Row]) -> dict[str, float]:
    """Worst and median over layers for each kind of tensor, and the numbers of marked tensors."""
    result = {
        f"fp8/marked_{word}": float(sum(max(row.marks.values(), default=0) >= least for row in rows))
        for word, least in (("warning", 1), ("critical", 2))
    }
    for tensor in dict.fromkeys(table["tensor"]):
        some = [row for row in rows if row.slot.tensor == tensor]
        for name in AGGREGATED:
            values = np.array([row.values[name] for row in some])
            values = values[~np.isnan(values)]
            if not len(values):
                continue
            worst = values.min() if STATISTICS[name].worse == "low" else values.max()
            place = f"{SYMBOLS.get(tensor, tensor)}/{name}"
            result |= {f"worst/{place}": float(worst), f"median/{place}": float(np.median(values))}
    return result


def _marks(slot: SlotKey, values: Mapping[str, float]) -> dict[str, int]:
    warn, critical = WARN_DB.get(slot.format, (-math.inf, -math.inf))
    value = values["row_sqnr_p50_db"]
    marks = {"row_sqnr_p50_db": int(value < warn) + int(value < critical)}
    for name, (warn, critical) in limits.PERCENT.items():
        marks[name] = int(values[name] > warn) + int(values[name] > critical)
    marks["nonfinite"] = 2 * int(values["nonfinite"] > 0)
    return {name: mark for name, mark in marks.items() if mark}


class LivePage(Sink):
    """The report of the run, live: a process of its own serves it from the run folder and prints its address on stderr.

    It ends by itself when this process has ended, or the watch.
    """

    def __init__(self, run_dir: Path) -> None:
        command = [sys.executable, "-m", "ottava", "live", str(run_dir.resolve()), "--parent", str(os.getpid())]
        self._server = subprocess.Popen(  # not in the terminal's group: Ctrl-C is for the training
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def close(self) -> None:
        """The server sees the end in the folder. It is not waited for."""
        self._server.returncode = self._server.poll() or 0  # no warning that it still runs


class Limited(Sink):
    """Limits a sink to MAX_TAGS names, the first ones, and catches its errors: a full disk or a lost server must not
    end a training."""

    def __init__(self, sink: Sink, limit: int = MAX_TAGS) -> None:
        self.sink, self.limit = sink, limit
        self.tags: dict[str, None] = {}
        self.dropped = 0
        """Numbers left out because the limit was reached."""
        self.failed = 0
        """Calls that failed."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        shown = {}
        for tag, value in values.items():
            if math.isnan(value):
                continue  # unknown, as the delayed scale of a cast that has none
            if tag in self.tags or len(self.tags) < self.limit:
                self.tags[tag] = None
                shown[tag] = value
            else:
                self.dropped += 1
        self._try(self.sink.scalars, step, shown)

    def histogram(self, step: int, tag: str, edges: Sequence[float], counts: Sequence[float]) -> None:
        self._try(self.sink.histogram, step, tag, edges, counts)

    def worst(self, step: int, rows: Sequence[Row], numbers: Mapping[str, float]) -> None:
        self._try(self.sink.worst, step, rows, numbers)

    def close(self) -> None:
        self._try(self.sink.close)
        if self.failed:
            _LOG.warning("watch: %s: %s calls failed", type(self.sink).__name__, f"{self.failed:,}")

    def _try(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # most sinks are other packages: they raise errors of any kind
            if not self.failed:
                name = type(self.sink).__name__
                text = "watch: %s failed (%s: %s). Training and run folder go on; the next look tries the sink again"
                _LOG.warning(text, name, type(error).__name__, error)
            self.failed += 1


_SHOWN = MappingProxyType(
    {
        "row_sqnr_p50_db": ("row SQNR p50", "{:.1f} dB"),
        "underflow_pct": ("underflow", "{:.2f} %"),
        "overflow_pct": ("clipped", "{:.4f} %"),
        "scale_error_max": ("scale error", "{:+.1f} oct"),
        "kurtosis": ("kurtosis", "{:.3g}"),
        "nonfinite": ("inf, nan", "{:.0f}"),
    }
)
"""Columns of the terminal's table: heading and form."""


def _cell(name: str, row: Row) -> str:
    value = row.values[name]
    text = "-" if math.isnan(value) else _SHOWN[name][1].format(value)
    return text + " " + "!" * row.marks[name] if name in row.marks else text


def _headline(step: int, rows: Sequence[Row], numbers: Mapping[str, float]) -> str:
    losses = [f"{name} {numbers[name]:.4g}" for name in ("loss", "grad_norm") if name in numbers]
    counts = [sum(max(row.marks.values(), default=0) == mark for row in rows) for mark in (2, 1)]
    fp8 = f"FP8: {counts[0]} critical, {counts[1]} warning" if any(counts) else "FP8: no marked tensor"
    return "  ".join([f"step {step:,}", *losses, fp8])


class TerminalSink(Sink):
    """A table of the worst tensors that stays in place; one line per look if the output is no terminal."""

    def __init__(self, run_dir: Path, *, top_k: int = 8, console: Console | None = None) -> None:
        from rich.console import (
            Console,  # rich draws from `random` when it is imported, so not by `import ottava.watch`
        )

        self.console, self.top_k = console or Console(stderr=True), top_k
        self._live: Live | None = None

    def worst(self, step: int, rows: Sequence[Row], numbers: Mapping[str, float]) -> None:
        from rich.live import Live
        from rich.text import Text

        if not self.console.is_terminal:
            self.console.print(Text("  ".join([_headline(step, rows, numbers), *map(_line, rows[:1])])), soft_wrap=True)
            return
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        self._live.update(_picture(step, rows[: self.top_k], _headline(step, rows, numbers)), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _line(row: Row) -> str:
    cells = [f"{_SHOWN[name][0]} {_cell(name, row)}" for name in ("row_sqnr_p50_db", "underflow_pct")]
    return f"worst: {row.tag.removeprefix('tensor/')} {row.slot.format}, {', '.join(cells)}"


def _picture(step: int, rows: Sequence[Row], title: str) -> RichTable:
    from rich.table import Table as RichTable
    from rich.text import Text

    picture = RichTable(title=title, title_justify="left", box=None, pad_edge=False)
    picture.add_column("layer", overflow="ellipsis", no_wrap=True)
    picture.add_column("tensor")
    picture.add_column("format")
    for heading, _ in _SHOWN.values():
        picture.add_column(heading, justify="right", no_wrap=True)
    styles = ("", "yellow", "bold red")
    for row in rows:
        cells = [Text(_cell(name, row), style=styles[row.marks.get(name, 0)]) for name in _SHOWN]
        place = row.tag.removeprefix("tensor/").rpartition("/")
        picture.add_row(place[0], place[2], row.slot.format, *cells)
    return picture


class TensorBoardSink(Sink):
    """An event file in the run folder; `tensorboard --logdir RUN` shows it."""

    def __init__(self, run_dir: Path, *, folder: str = "tensorboard") -> None:
        self.writer = EventWriter(run_dir / folder)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.writer.scalars(step, {tag: value for tag, value in values.items() if not math.isnan(value)})

    def histogram(self, step: int, tag: str, edges: Sequence[float], counts: Sequence[float]) -> None:
        self.writer.histogram(step, tag, edges, counts)

    def close(self) -> None:
        self.writer.close()


class LoggerSink(Sink):
    """A module with init, log and finish: wandb, trackio. It uses the script's run if the script has begun one."""

    def __init__(self, module: str, run_dir: Path, *, project: str = "ottava", **settings: Any) -> None:
        try:
            self.module: Any = importlib.import_module(module)
        except ImportError as error:
            raise SinkMissingError(f"sink {module}: not installed; pip install 'ottava[{module}]'") from error
        self._own = getattr(self.module, "run", None) is None
        if self._own:
            self.module.init(project=project, **{"name": run_dir.name, **settings})

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, {tag: value for tag, value in values.items() if not math.isnan(value)})

    def histogram(self, step: int, tag: str, edges: Sequence[float], counts: Sequence[float]) -> None:
        if hasattr(self.module, "Histogram"):
            self._log(step, {tag: self.module.Histogram(np_histogram=(np.asarray(counts), np.asarray(edges)))})

    def close(self) -> None:
        if self._own:
            self.module.finish()

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if self._own:
            self.module.log(dict(values), step=step)
        else:  # the script counts the steps of its run
            self.module.log({**values, "watch/step": step})


SINKS: Mapping[str, Callable[..., Sink]] = MappingProxyType(
    {"terminal": TerminalSink, "live": LivePage, "tensorboard": TensorBoardSink}
    | {name: partial(LoggerSink, name) for name in ("wandb", "trackio")}
)
"""Name in the settings -> sink."""
