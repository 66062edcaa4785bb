"""Writes a run folder so that kill -9 loses at most the numbers that were not flushed.

Statistics go into small Parquet files, each written under another name and renamed. Each line of steps and events is
one write to a file opened for appending. Every rank writes its own parts and waits for no other; the reader merges
ranks. The steps and the manifest of a rank above 0 lie in a folder of its own.

While the disk is full, numbers wait in memory; they are written with later ones.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ottava.base.files import append, replacing
from ottava.base.untrusted import parse_json
from ottava.measure.layer_names import layer_kind
from ottava.measure.tally import Tallies, Tally, tally_fields
from ottava.record.schema import (
    _HISTOGRAM_START,
    DUMPS,
    EVENTS,
    EXPERIMENTS,
    MANIFEST,
    RANKS,
    REPORTED,
    SCHEMA_VERSION,
    STATS,
    STEPS,
    TRACE,
    TRAINER_MANIFEST,
    TRAINER_NUMBERS,
    TRAINING,
    RunError,
    SlotKey,
    read_manifest,
    stats_schema,
    store,
)

_LOG = logging.getLogger(__name__)
_PARTS_MERGED = 64
"""Each look is a part, so that a kill loses little. So many parts are merged, or a long run would have thousands."""
_RECENT = 256
_TABULATED = 256
"""So many rows become a table, which leaves out the empty ends of histograms."""
_WAITING_BYTES, _WAITING_LINES = 64 * 2**20, 2**16
"""Limits of statistics, and of steps or events, that wait for a full disk; beyond them the oldest are lost."""


_WAIT = 2.0
"""Seconds that the line of a step may wait in memory."""


class RunWriter:
    """Makes a run folder, or appends to one.

    Args:
        path: the folder. A folder with a run is refused, unless `append`.
        rank: rank of this process.
        append: go on with a run that is resumed.
        step: the optimizer step from which the resumed run goes on. The record of later steps is deleted.
        flush_rows: write a Parquet part whenever so many rows wait.
        patient: warn once about a disk error and raise nothing, once the folder is made; see `attempt`.
    Raises:
        RunError: the folder has a run, one of another schema version, or a torn part; or it cannot be written.
        OSError: a later write fails, and `patient` is False.

    Example:
        >>> import tempfile
        >>> from ottava.record.reader import Run
        >>> key = SlotKey("fc1", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with RunWriter(Path(folder) / "run") as writer:
        ...         writer.step(1, loss=2.5)
        ...         writer.tally(1, key, Tally(n=8, n_nonzero=8, n_underflow=2, amax=3.0))
        ...     table = Run.open(Path(folder) / "run").table()
        >>> table["layer"][0], float(table.metric("underflow_pct")[0])
        ('fc1', 25.0)
    """

    def __init__(
        self,
        path: Path | str,
        *,
        rank: int = 0,
        append: bool = False,
        step: int | None = None,
        flush_rows: int = 4096,
        patient: bool = False,
    ) -> None:
        self.path, self.rank, self.flush_rows = Path(path), rank, flush_rows
        self._own = self.path / RANKS / str(rank) if rank else self.path
        self.manifest: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        self.recent: Mapping[str, deque[Mapping[str, Any]]] = {
            name: deque(maxlen=_RECENT) for name in (STEPS, EVENTS, TRAINING, EXPERIMENTS)
        } | {TRACE: deque(maxlen=0)}
        """The last 256 lines of each file, as this rank has written them."""
        self.lost: Counter[str] = Counter()
        """Numbers of "rows", "lines" and "dumps" that a patient writer lost."""
        self._patient = self._failed = False
        self._wrote = time.monotonic()
        self._trained = (self._own / TRAINER_MANIFEST).is_file()
        self._now = step or 0
        self._rows: list[_Rows] = []
        self._untabulated = 0
        self._no_histograms = {f.name: np.zeros(f.metadata["bins"]) for f in tally_fields("histogram")}
        self._tables: list[pa.Table] = []
        self._lines: dict[str, deque[bytes]] = {name: deque() for name in self.recent}
        self._small: list[Path] = []
        self._flush_at = flush_rows
        if (self._own / MANIFEST).exists():
            if not append:
                raise RunError(
                    f"{self.path} already has a watched run; give another folder, or go on in this one with "
                    "append=True (--append on the command line)"
                )
            self.manifest = read_manifest(self._own / MANIFEST)
        try:
            (self.path / STATS).mkdir(parents=True, exist_ok=True)
            self._own.mkdir(parents=True, exist_ok=True)
            if append and step is not None and (torn := self._cut_back(step)):
                raise RunError(f"{torn[0]} is torn, so its rows are missing; move it away to go on without them")
            numbers = [int(part.stem.split("-")[2]) for part in (self.path / STATS).glob(f"part-{rank}-*.parquet")]
            self._part = max(numbers, default=-1) + 1
            for name in self._lines if append else ():
                if name != EVENTS or rank == 0:  # the others may be writing to it
                    path = self._file(name)
                    if path.exists() and path.stat().st_size and path.read_bytes()[-1:] != b"\n":
                        with path.open("ab", buffering=0) as stream:
                            stream.write(b"\n")
            self.describe()
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error}); give another folder, or make room") from error
        self._patient = patient

    @contextmanager
    def attempt(self, step: int | None = None, loses: str = "") -> Iterator[None]:
        """A context for writes that may fail. A patient writer warns about the first failure and raises nothing: a
        training must not end because its watch cannot write.

        Args:
            step: step of the data; None: the step of the last line.
            loses: name in `lost` of the data that a failure loses; "" if the write will be tried again.
        """
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            if not self._patient:
                raise
            self.lost.update([loses] if loses else [])
            if self._failed:
                return
            self._failed = True
            text = (
                f"{self.path}: cannot be written ({error}). The training goes on. Up to {_WAITING_BYTES >> 20} MiB of "
                "statistics, steps and events wait in memory until the disk has room again; dumps are lost"
            )
            _LOG.warning("watch: %s", text)
            self.event(self._now if step is None else step, "warning", text=text)

    def describe(self, **facts: Any) -> None:
        """Adds facts to the manifest: plain JSON values."""
        self.manifest |= facts | ({"lost": dict(+self.lost)} if +self.lost else {})
        with self.attempt(), replacing(self._own / MANIFEST) as scratch:
            # a part a line: Python's own encoder, which indents, takes ten times as long
            parts = (f"{json.dumps(name)}: {json.dumps(_jsonable(part))}" for name, part in self.manifest.items())
            scratch.write_bytes(("{\n" + ",\n".join(parts) + "\n}\n").encode())

    def step(self, step: int, waits: bool = False, /, **numbers: float | None) -> None:
        """Writes a line of steps.jsonl: loss, grad_norm, lr, tokens, seconds. None means unknown.

        waits: the line may wait in memory: for the next one that does not, for `flush`, or two seconds.
        """
        elsewhere = TRAINER_NUMBERS if self._trained else frozenset[str]()
        known = {k: v for k, v in numbers.items() if v is not None}
        known = {k: v for k, v in known.items() if k not in elsewhere or not math.isfinite(v)}
        self._line(STEPS, {"step": step, **known}, waits=waits)

    def event(self, step: int, kind: str, **facts: Any) -> None:
        """Writes a line of events.jsonl."""
        self._line(EVENTS, {"step": step, "rank": self.rank, "kind": kind, **facts})

    def training(self, step: int, kind: str, **facts: Any) -> None:
        """Adds a line about the training around the casts."""
        self._line(TRAINING, {"step": step, "kind": kind, **facts})

    def experiment(self, step: int, kind: str, **facts: Any) -> None:
        """Writes a line of experiments.jsonl."""
        self._line(EXPERIMENTS, {"step": step, "kind": kind, **facts})

    def trace(self, step: int, facts: Mapping[str, Any]) -> None:
        """Writes a line of trace.jsonl."""
        self._line(TRACE, {"step": step, **facts})

    def tally(
        self, step: int, key: SlotKey, tally: Tally, *, phase: str = "full", reported: Mapping[str, float] | None = None
    ) -> None:
        """Adds a row of statistics.

        Args:
            phase: "light" rows store numbers only, no histograms.
            reported: statistics by name, if their sums are unknown.
        """
        if phase != "full":
            tally = replace(tally, **self._no_histograms)
        self._add(_Rows(step, phase, [key], tally, reported))

    def tallies(self, step: int, tallies: Tallies[SlotKey]) -> None:
        """Adds a row of statistics with phase "full" for each tally; quicker than one by one."""
        if tallies:
            self._add(_Rows(step, "full", list(tallies), tallies.rows, None))

    def rewind(self, step: int) -> None:
        """Deletes this rank's record of the steps after `step`, except for events, which did happen."""
        self.flush()
        self._tables = [table.filter(pc.field("step") <= step) for table in self._tables]
        self._lines[STEPS] = deque(line for line in self._lines[STEPS] if _step_of(line) <= step)
        kept = [line for line in self.recent[STEPS] if line["step"] <= step]
        self.recent[STEPS].clear()
        self.recent[STEPS].extend(kept)
        with self.attempt():
            self._cut_back(step)

    def flush(self) -> None:
        """Writes all waiting rows and lines."""
        for name in self._lines:
            self._write_lines(name)
        self._tabulate()
        if self._tables:
            with self.attempt():
                self._write_part()
            pa.default_memory_pool().release_unused()  # it would keep what tables and their encoding took
        while sum(table.nbytes for table in self._tables) > _WAITING_BYTES:
            self.lost["rows"] += self._tables.pop(0).num_rows
        self._flush_at = self._waiting + self.flush_rows

    @property
    def _waiting(self) -> int:
        """Rows that are not on disk."""
        tabulated: int = sum(table.num_rows for table in self._tables)
        return self._untabulated + tabulated

    def _add(self, rows: _Rows) -> None:
        self._rows.append(rows)
        self._untabulated += len(rows.keys)
        if self._untabulated >= _TABULATED:
            self._tabulate()
        if self._waiting >= self._flush_at:
            self.flush()

    def _tabulate(self) -> None:
        if self._rows:
            self._tables.append(_table_of(self._rows, self.rank))
            self._rows, self._untabulated = [], 0

    def _write_part(self) -> None:
        target = self.path / STATS / f"part-{self.rank}-{self._part:06d}.parquet"
        _store(pa.concat_tables(self._tables), target)
        self._small.append(target)
        self._part += 1
        self._tables = []
        if len(self._small) >= _PARTS_MERGED:
            self._merge_parts()

    @property
    def dumps(self) -> Path:
        """The folder of dumped tensors."""
        return self.path / DUMPS

    def close(self) -> None:
        """Flushes, and warns about data that cannot be written even now."""
        self.flush()
        self.lost["rows"] += self._waiting
        self.lost["lines"] += sum(map(len, self._lines.values()))
        if lost := ", ".join(f"{count:,} {what}" for what, count in (+self.lost).items()):
            _LOG.warning("watch: %s: lost %s, because the disk refused them", self.path, lost)
            self.describe()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _cut_back(self, step: int) -> list[Path]:
        """Deletes this rank's rows and lines of the steps after `step`. Returns torn parts, which stay."""
        torn = []
        for part in (self.path / STATS).glob(f"part-{self.rank}-*.parquet"):
            try:
                table = pq.read_table(part, page_checksum_verification=True)
            except (pa.ArrowInvalid, OSError):
                torn.append(part)
                continue
            earlier = table.filter(pc.field("step") <= step)
            if earlier.num_rows < table.num_rows:
                _store(earlier, part)
        lines = self._own / STEPS
        if lines.exists():
            kept_lines = [line for line in lines.read_bytes().splitlines(keepends=True) if _step_of(line) <= step]
            with replacing(lines) as scratch:
                scratch.write_bytes(b"".join(kept_lines))
        return torn

    def _merge_parts(self) -> None:
        """Merges small parts. A kill between the last two lines leaves rows twice; readers take one of them."""
        small, self._small = self._small, []
        target = self.path / STATS / f"part-{self.rank}-{self._part:06d}.parquet"
        _store(pa.concat_tables([pq.read_table(part, page_checksum_verification=True) for part in small]), target)
        self._part += 1
        for part in small:
            part.unlink()

    def _line(self, name: str, values: Mapping[str, Any], *, waits: bool = False) -> None:
        self._now = values["step"]
        self.recent[name].append(values)
        lines = self._lines[name]
        lines.append((json.dumps(_jsonable(values)) + "\n").encode())
        waits = waits and time.monotonic() - self._wrote < _WAIT  # somebody may read along
        if not waits and (len(lines) == 1 or not self._failed):  # after a failed write all wait for the next flush
            self._write_lines(name)
        elif len(lines) > _WAITING_LINES:
            lines.popleft()
            self.lost["lines"] += 1

    def _file(self, name: str) -> Path:
        return (self.path if name == EVENTS else self._own) / name

    def _write_lines(self, name: str) -> None:
        if self._lines[name]:
            with self.attempt(), self._file(name).open("ab", buffering=0) as stream:
                append(stream, b"".join(self._lines[name]))
                self._lines[name].clear()
            self._wrote = time.monotonic()


def _store(table: pa.Table, target: Path) -> None:
    """Writes a part under another name and renames it."""
    with replacing(target) as scratch:
        store(table, scratch)


class _Rows(NamedTuple):
    """Rows of one step."""

    step: int
    phase: str
    keys: Sequence[SlotKey]
    tally: Tally
    """Of one row, or every field an array (keys,)."""
    reported: Mapping[str, float] | None


def _table_of(looks: Sequence[_Rows], rank: int) -> pa.Table:
    keys = [key for look in looks for key in look.keys]
    schema, count = stats_schema(), len(keys)
    bins = {f.name: (f.metadata["bins"],) if f.metadata["bins"] else () for f in tally_fields()}
    named: dict[str, Any] = {
        name: [getattr(look, name) for look in looks for _ in look.keys] for name in ("step", "phase", REPORTED)
    }
    named |= {"rank": [rank] * count, "kind": [layer_kind(key.layer) for key in keys]}
    named |= dict(zip(SlotKey._fields, zip(*keys, strict=True), strict=True))
    named[REPORTED] = [list(numbers.items()) if numbers else None for numbers in named[REPORTED]]

    def column(name: str) -> Any:
        return np.concatenate([np.reshape(getattr(look.tally, name), (len(look.keys), *bins[name])) for look in looks])

    nonzero = column("exponents") != 0
    some = nonzero.any(1)
    first = np.where(some, nonzero.argmax(1), 0)
    last = np.where(some, nonzero.shape[1] - nonzero[:, ::-1].argmax(1), 0)
    named[_HISTOGRAM_START] = pa.array(first, mask=~some, type=pa.int32())
    columns = []
    for field in schema:
        if field.name in named:
            columns.append(pa.array(named[field.name], type=field.type))
            continue
        values = column(field.name)
        if not pa.types.is_list(field.type):
            columns.append(pa.array(values).cast(field.type, safe=False))
            continue
        filled = some if field.name == "exponents" else values.any(1)  # an empty histogram was not counted
        if field.name == "exponents":
            within, lengths = np.arange(values.shape[1]), last - first
            entries = values[(within >= first[:, None]) & (within < last[:, None])]
        else:
            lengths = np.where(filled, values.shape[1], 0)
            entries = (values if filled.all() else values[filled]).reshape(-1)
        edges = np.concatenate([[0], np.cumsum(lengths)])
        offsets = pa.array(edges, mask=np.append(~filled, False), type=pa.int32())
        counts = pa.array(entries).cast(field.type.value_type, safe=False)
        columns.append(pa.ListArray.from_arrays(offsets, counts, type=field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _step_of(line: bytes) -> float:
    """The step of a line; infinity for a torn line."""
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _jsonable(value: Any) -> Any:
    """A value for JSON, which has no words for NaN and infinities: they become "nan", "inf" and "-inf"."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, np.generic):
        return _jsonable(value.item())
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
