"""Writes a run folder so that kill -9 at any moment loses at most what was not flushed yet.

Statistics go into small Parquet files, each written beside its place and renamed; lines of steps and events are single
writes to files opened for appending. Every rank writes its own parts and waits for nobody: ranks are merged when the
folder is read. Only rank 0 writes steps and the manifest.

What a full disk refuses waits in memory, and is written with what comes later.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ottava.debug.layer_names import layer_kind
from ottava.debug.run.schema import (
    _HISTOGRAM_START,
    DUMPS,
    EVENTS,
    IDENTITY,
    MANIFEST,
    REPORTED,
    SCHEMA_VERSION,
    STATS,
    STEPS,
    RunError,
    SlotKey,
    read_manifest,
    stats_schema,
)
from ottava.debug.tally import Tallies, Tally, tally_fields
from ottava.files import append, replacing
from ottava.untrusted import parse_json

_LOG = logging.getLogger(__name__)
_PARTS_MERGED = 64
"""A look is a part, so that a kill loses little; so many become one, or a long run would have thousands."""
_WAITING_BYTES, _WAITING_LINES = 64 * 2**20, 2**16
"""Of statistics, and of steps or events, that a full disk keeps in memory; beyond that the oldest are lost."""
_WRITE_ERRORS = (OSError, pa.ArrowException)


class RunWriter:
    """Appends to a run folder, making it.

    Args:
        path: the folder. One that holds a run already is refused, unless `append`.
        rank: of this process.
        append: go on with a run, after a resumption.
        step: the optimizer step from which a resumed run goes on: what is on record of later ones is taken away.
        flush_rows: write a Parquet part whenever so many rows wait.
        patient: once the folder is made, an error of the disk is said once and raises nothing, see `attempt`.
    Raises:
        RunError: the folder holds a run, or a run of another schema version; or it cannot be written.
        OSError: the disk refuses what is written later, and `patient` is False.

    Example:
        >>> import tempfile
        >>> from ottava.debug.run.reader import Run
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
        self.manifest: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        self.lost: Counter[str] = Counter()
        """How many "rows", "lines" and "dumps" a patient writer has given up."""
        self._patient = self._failed = False
        self._now = step or 0
        self._rows: list[dict[str, Any]] = []
        self._looks: list[tuple[int, Tallies[SlotKey]]] = []
        self._tables: list[pa.Table] = []
        self._lines: dict[str, deque[bytes]] = {STEPS: deque(), EVENTS: deque()}
        self._small: list[Path] = []
        self._flush_at = flush_rows
        if (self.path / MANIFEST).exists() and rank == 0:
            if not append:
                raise RunError(
                    f"{self.path} holds a watched run already; give another folder, or go on in it with append=True, "
                    "--append on the command line"
                )
            self.manifest = read_manifest(self.path / MANIFEST)
        try:
            (self.path / STATS).mkdir(parents=True, exist_ok=True)
            if append and step is not None:
                self._cut_back(step)
            numbers = [int(part.stem.split("-")[2]) for part in (self.path / STATS).glob(f"part-{rank}-*.parquet")]
            self._part = max(numbers, default=-1) + 1
            for name in (STEPS, EVENTS) if append and rank == 0 else ():
                _end_line(self.path / name)
            self.describe()
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error}); give another folder, or make room") from error
        self._patient = patient

    @contextmanager
    def attempt(self, step: int | None = None, loses: str = "") -> Iterator[None]:
        """What is written inside may fail. A patient writer then says so, the first time, and nothing is raised: who
        trains must not end because nobody can look on.

        Args:
            step: whose data it is; None: that of the last line.
            loses: what is lost by a failure, a name of `lost`; "": nothing, it is tried again.
        """
        try:
            yield
        except _WRITE_ERRORS as error:
            if not self._patient:
                raise
            self.lost.update([loses] if loses else [])
            if self._failed:
                return
            self._failed = True
            text = (
                f"{self.path}: cannot be written ({error}). The training goes on. Statistics, steps and events wait in "
                f"memory, {_WAITING_BYTES >> 20} MiB of them at most, and are written when that is possible again; "
                "dumps do not wait"
            )
            _LOG.warning("watch: %s", text)
            self.event(self._now if step is None else step, "warning", text=text)

    def describe(self, **facts: Any) -> None:
        """Adds facts to the manifest: plain JSON values."""
        self.manifest |= facts | ({"lost": dict(+self.lost)} if +self.lost else {})
        if self.rank == 0:
            with self.attempt(), replacing(self.path / MANIFEST) as scratch:
                scratch.write_bytes(json.dumps(_jsonable(self.manifest), indent=1).encode())

    def step(self, step: int, **numbers: float | None) -> None:
        """A line in steps.jsonl: loss, grad_norm, lr, tokens, seconds; what is None or missing is not known."""
        if self.rank == 0:
            self._line(STEPS, {"step": step, **{k: v for k, v in numbers.items() if v is not None}})

    def event(self, step: int, kind: str, **facts: Any) -> None:
        """A line in events.jsonl."""
        self._line(EVENTS, {"step": step, "rank": self.rank, "kind": kind, **facts})

    def tally(
        self,
        step: int,
        key: SlotKey,
        tally: Tally,
        *,
        phase: str = "full",
        reported: Mapping[str, float] | None = None,
    ) -> None:
        """A row of statistics.

        Args:
            phase: "light" rows store numbers only, no histograms.
            reported: finished statistics by name, where their sums are not known.
        """
        row: dict[str, Any] = {"step": step, "rank": self.rank, "phase": phase, "kind": layer_kind(key.layer)}
        row |= key._asdict()
        for f in tally_fields("number"):
            value = float(getattr(tally, f.name))
            row[f.name] = int(value) if f.name.startswith("n_") or f.name == "n" else value
        if phase == "full":
            found = {f.name: getattr(tally, f.name) for f in tally_fields("histogram")}
            row |= {name: bins for name, bins in found.items() if bins.any()}  # empty ones say that nobody counted
        if "exponents" in row:
            filled = np.flatnonzero(tally.exponents)
            first, last = int(filled[0]), int(filled[-1])
            row |= {"exponents": tally.exponents[first : last + 1], _HISTOGRAM_START: first}
        row[REPORTED] = list(reported.items()) if reported else None
        self._rows.append(row)
        self._flush_many()

    def tallies(self, step: int, tallies: Tallies[SlotKey]) -> None:
        """A row of statistics for each, with phase "full"; quicker than one by one."""
        if not tallies:
            return
        if self._rows:  # they keep their order
            self._tabulate()
        self._looks.append((step, tallies))  # a table of all that wait costs as much as one of a single look
        self._flush_many()

    def rewind(self, step: int) -> None:
        """Takes away what this rank wrote of steps after `step`; events stay, for they happened."""
        self.flush()
        self._tables = [table.filter(pc.field("step") <= step) for table in self._tables]
        self._lines[STEPS] = deque(line for line in self._lines[STEPS] if _step_of(line) <= step)
        with self.attempt():
            self._cut_back(step)

    def flush(self) -> None:
        """Puts what waits on disk."""
        for name in self._lines:
            self._write_lines(name)
        self._tabulate()
        if self._tables:
            with self.attempt():
                self._write_part()
        while sum(table.nbytes for table in self._tables) > _WAITING_BYTES:
            self.lost["rows"] += self._tables.pop(0).num_rows
        self._flush_at = self._waiting + self.flush_rows

    @property
    def _waiting(self) -> int:
        """Rows that are not on disk."""
        looked = sum(len(tallies) for _, tallies in self._looks)
        tabulated: int = sum(table.num_rows for table in self._tables)
        return len(self._rows) + looked + tabulated

    def _flush_many(self) -> None:
        if self._waiting >= self._flush_at:
            self.flush()

    def _write_part(self) -> None:
        target = self.path / STATS / f"part-{self.rank}-{self._part:06d}.parquet"
        _store(pa.concat_tables(self._tables), target)
        self._small.append(target)
        self._part += 1
        self._tables = []
        if len(self._small) >= _PARTS_MERGED:
            self._merge_parts()

    def _tabulate(self) -> None:
        """Waiting looks become a table, and the rows after them."""
        rows, self._rows = self._rows, []
        looks, self._looks = self._looks, []
        if looks:
            self._tables.append(_table_of(looks, self.rank))
        if not rows:
            return
        schema = stats_schema()
        columns = []
        for field in schema:
            values = [row.get(field.name) for row in rows]
            if pa.types.is_list(field.type):
                kind = field.type.value_type.to_pandas_dtype()
                values = [None if value is None else np.asarray(value).astype(kind) for value in values]
            columns.append(pa.array(values, type=field.type))
        self._tables.append(pa.Table.from_arrays(columns, schema=schema))

    @property
    def dumps(self) -> Path:
        """The folder of dumped tensors."""
        return self.path / DUMPS

    def close(self) -> None:
        """Flushes; what even now cannot be written is lost."""
        self.flush()
        self.lost["rows"] += self._waiting
        self.lost["lines"] += sum(map(len, self._lines.values()))
        if lost := ", ".join(f"{count:,} {what}" for what, count in (+self.lost).items()):
            _LOG.warning("watch: %s: lost %s, which could not be written", self.path, lost)
            self.describe()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _cut_back(self, step: int) -> None:
        """Takes away what this rank wrote of steps after `step`."""
        for part in (self.path / STATS).glob(f"part-{self.rank}-*.parquet"):
            try:
                table = pq.read_table(part)
            except (pa.ArrowInvalid, OSError):
                continue  # torn; readers pass over it, too
            kept = table.filter(pc.field("step") <= step)
            if kept.num_rows < table.num_rows:
                _store(kept, part)
        lines = self.path / STEPS
        if self.rank == 0 and lines.exists():
            kept_lines = [line for line in lines.read_bytes().splitlines(keepends=True) if _step_of(line) <= step]
            with replacing(lines) as scratch:
                scratch.write_bytes(b"".join(kept_lines))

    def _merge_parts(self) -> None:
        """Many small parts as one. A process killed between the last two lines leaves rows twice: readers take one."""
        small, self._small = self._small, []
        target = self.path / STATS / f"part-{self.rank}-{self._part:06d}.parquet"
        _store(pa.concat_tables([pq.read_table(part) for part in small]), target)
        self._part += 1
        for part in small:
            part.unlink()

    def _line(self, name: str, values: Mapping[str, Any]) -> None:
        self._now = values["step"]
        lines = self._lines[name]
        lines.append((json.dumps(_jsonable(values)) + "\n").encode())
        if len(lines) == 1:  # others wait only where they could not be written: for the next flush
            self._write_lines(name)
        elif len(lines) > _WAITING_LINES:
            lines.popleft()
            self.lost["lines"] += 1

    def _write_lines(self, name: str) -> None:
        if self._lines[name]:
            with self.attempt(), (self.path / name).open("ab", buffering=0) as stream:
                append(stream, b"".join(self._lines[name]))
                self._lines[name].clear()


def _store(table: pa.Table, target: Path) -> None:
    """Bins are all different numbers: dictionaries and statistics of them only take time."""
    with replacing(target) as scratch:
        pq.write_table(table, scratch, compression="zstd", use_dictionary=list(IDENTITY), write_statistics=["step"])


def _table_of(looks: Sequence[tuple[int, Tallies[SlotKey]]], rank: int) -> pa.Table:
    keys = [key for _, tallies in looks for key in tallies]
    schema, count = stats_schema(), len(keys)
    steps = [step for step, tallies in looks for _ in tallies]
    named: dict[str, Any] = {"step": steps, "rank": [rank] * count, "phase": ["full"] * count}
    named["kind"] = [layer_kind(key.layer) for key in keys]
    named |= dict(zip(SlotKey._fields, zip(*keys, strict=True), strict=True))

    def column(name: str) -> Any:
        return np.concatenate([getattr(tallies.rows, name) for _, tallies in looks])

    filled = column("exponents") != 0
    some = filled.any(1)
    first = np.where(some, filled.argmax(1), 0)
    last = np.where(some, filled.shape[1] - filled[:, ::-1].argmax(1), 0)
    named |= {_HISTOGRAM_START: pa.array(first, mask=~some, type=pa.int32()), REPORTED: pa.nulls(count)}
    columns = []
    for field in schema:
        if field.name in named:
            found = named[field.name]
            columns.append(found.cast(field.type) if isinstance(found, pa.Array) else pa.array(found, type=field.type))
            continue
        values = column(field.name)
        if not pa.types.is_list(field.type):
            columns.append(pa.array(values).cast(field.type))
            continue
        there = some if field.name == "exponents" else values.any(1)
        if field.name == "exponents":
            within, lengths = np.arange(values.shape[1]), last - first
            kept = values[(within >= first[:, None]) & (within < last[:, None])]
        else:
            lengths = np.where(there, values.shape[1], 0)
            kept = (values if there.all() else values[there]).reshape(-1)
        edges = np.concatenate([[0], np.cumsum(lengths)])
        offsets = pa.array(edges, mask=np.append(~there, False), type=pa.int32())
        columns.append(pa.ListArray.from_arrays(offsets, pa.array(kept).cast(field.type.value_type), type=field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _step_of(line: bytes) -> float:
    """Infinity for a torn line."""
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _jsonable(value: Any) -> Any:
    """Numbers that JSON has no word for become the strings "nan", "inf" and "-inf"."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, np.generic):
        return _jsonable(value.item())
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _end_line(path: Path) -> None:
    """Ends a line that a kill tore, so that the next one is not lost with it."""
    if path.exists() and path.stat().st_size and path.read_bytes()[-1:] != b"\n":
        with path.open("ab", buffering=0) as stream:
            stream.write(b"\n")
