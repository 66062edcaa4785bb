"""Reads the fields of many tallies from Parquet when they are needed.

A run of 400 casts and 100 looks has 100 million bins, but a statistic needs one or two fields of some rows. The tallies
of a table are therefore a `LazyTally`: selecting rows costs nothing, and a field becomes an array when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ottava.base.untrusted import MAX_STEP, UntrustedError, regular_size
from ottava.measure.tally import Tally, tally_fields
from ottava.record.schema import _HISTOGRAM_START, IDENTITY, REPORTED, RunError, stats_schema

Array = npt.NDArray[Any]
Index = npt.NDArray[np.int64]

_FIELDS = MappingProxyType({f.name: f for f in tally_fields()})
_BINS = MappingProxyType({f.name: f.metadata["bins"] for f in tally_fields("histogram")})
_MERGE = MappingProxyType({"sum": np.add, "max": np.maximum, "min": np.minimum})


_MOST_ROWS, _MOST_VALUES = 1 << 22, 1 << 27
"""Limits of one part. A writer stores 4,096 rows at a time and merges 64 parts; Parquet compresses zeros well."""


class Part:
    """One part of a run's statistics, as read from disk; its columns are decoded when they are asked for.

    Histograms are nine tenths of a part, and a diagnosis asks for two of twelve. The bytes stay in memory, because a
    running watch merges its parts and deletes them.

    Raises:
        pa.ArrowInvalid, OSError: the part is torn.
        RunError: the part is too large.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._damage():
            regular_size(path)
            self._file = pq.ParquetFile(pa.BufferReader(path.read_bytes()), page_checksum_verification=True)
            about = self._file.metadata
            groups = [about.row_group(i) for i in range(about.num_row_groups)]
            values = sum(group.column(i).num_values for group in groups for i in range(group.num_columns))
            if about.num_rows > _MOST_ROWS or values > _MOST_VALUES:
                raise RunError(f"{path}: has {about.num_rows:,} rows with {values:,} values, too many for one part")

    def read(self, names: Sequence[str]) -> pa.Table:
        """These columns, as far as the part has them, checked.

        Raises:
            RunError: a column is missing or of another type; the message names it.
        """
        with self._damage():
            return _checked(self.path, self._file.read(columns=list(names)), names)

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowInvalid, OSError, RunError):
            raise
        except (pa.ArrowException, UntrustedError, ValueError, TypeError, KeyError, IndexError, MemoryError) as error:
            why = str(error).partition("\n")[0]
            raise RunError(f"{self.path}: is damaged ({why}); move it away to read the rest of the run") from error


def _checked(path: Path, stored: pa.Table, names: Sequence[str]) -> pa.Table:
    stored.validate(full=True)
    columns = {}
    for field in stats_schema():
        name, kind = field.name, field.type
        if name not in names:
            continue
        if stored.column_names.count(name) != 1:
            if name in (*IDENTITY, REPORTED, _HISTOGRAM_START) or name in stored.column_names:
                raise RunError(f"{path}: has {stored.column_names.count(name)} columns {name!r}; needs one")
            continue
        column = stored[name]
        if pa.types.is_dictionary(kind):
            kind = pa.string()
        try:
            columns[name] = column.cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise RunError(f"{path}: column {name!r} holds {column.type}; needs {kind}") from error
        if name in IDENTITY and column.null_count:
            raise RunError(f"{path}: column {name!r} has rows without a value")
    if "step" in columns:
        steps = pc.min_max(columns["step"]).as_py()
        if stored.num_rows and max(abs(steps["min"]), abs(steps["max"])) > MAX_STEP:
            raise RunError(f"{path}: has the step number {max(steps.values(), key=abs)}; needs at most {MAX_STEP}")
    for name in _BINS.keys() & columns.keys():
        firsts = columns[_HISTOGRAM_START].fill_null(0).to_numpy()
        ends = _sizes(columns[name]) + (firsts if name == "exponents" else 0)
        if ends.max(initial=0) > _BINS[name] or firsts.min(initial=0) < 0:
            raise RunError(f"{path}: column {name!r} has bins beyond its {_BINS[name]}")
    return pa.table(columns)


NUMBERS = tuple(f.name for f in stats_schema() if f.name not in _BINS)
"""The columns of a part without histograms."""


class Columns(Protocol):
    """A source of fields."""

    def rows(self, name: str, index: Index) -> Array:
        """A field of these rows: (rows,) or (rows, bins)."""

    def filled(self, name: str, index: Index) -> Array:
        """bool (rows,): whether these rows have a histogram."""


class LazyTally(Tally):
    """A tally whose fields become arrays, one entry per row, when they are read.

    Example:
        >>> columns = DenseColumns(Tally(n=np.array([1.0, 2.0, 3.0]), exponents=np.ones((3, 1024))))
        >>> some = LazyTally(columns, np.array([2, 0]))
        >>> some.n, some.exponents.shape
        (array([3., 1.]), (2, 1024))
    """

    def __init__(self, columns: Columns, index: Index) -> None:
        object.__setattr__(self, "_columns", columns)
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_made", {})

    def __getattribute__(self, name: str) -> Any:
        if name not in _FIELDS:
            return object.__getattribute__(self, name)
        made: dict[str, Array] = object.__getattribute__(self, "_made")
        if name not in made:
            made[name] = object.__getattribute__(self, "_columns").rows(name, object.__getattribute__(self, "_index"))
        return made[name]

    def take(self, index: Index) -> LazyTally:
        """A selection of the rows."""
        columns, rows = object.__getattribute__(self, "_columns"), object.__getattribute__(self, "_index")
        return LazyTally(columns, rows[index])

    def filled(self, name: str) -> npt.NDArray[np.bool_]:
        """bool (rows,): whether a row has a histogram. It does not make the array, which may take gigabytes."""
        columns, rows = object.__getattribute__(self, "_columns"), object.__getattribute__(self, "_index")
        return np.asarray(columns.filled(name, rows), dtype=bool)

    def __reduce__(self) -> Any:
        return Tally, tuple(getattr(self, name) for name in _FIELDS)


class DenseColumns:
    """The fields of a tally of arrays."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    def rows(self, name: str, index: Index) -> Array:
        values: Array = np.asarray(getattr(self.tally, name))[index]
        return values

    def filled(self, name: str, index: Index) -> Array:
        return np.asarray(self.rows(name, index).any(axis=1))


class StoredColumns:
    """The fields of stats/*.parquet; a missing field has the value of an empty tally.

    Args:
        stored: columns of all parts, joined.
        parts: these parts, to read histograms from when they are asked for; none: `stored` has them.
    """

    def __init__(self, stored: pa.Table | None, parts: Sequence[Part] = ()) -> None:
        self.stored, self.parts = stored, parts
        self._numbers: dict[str, Array] = {}
        self._lists: dict[str, pa.Array] = {}
        self._filled: dict[str, Array] = {}

    def rows(self, name: str, index: Index) -> Array:
        bins = _FIELDS[name].metadata["bins"]
        if bins:
            return self._histograms(name, bins, index)
        if self.stored is None or name not in self.stored.column_names:
            return np.full(len(index), float(_FIELDS[name].default))  # type: ignore[arg-type]
        if name not in self._numbers:
            self._numbers[name] = self.stored[name].to_numpy().astype(np.float64)
        return self._numbers[name][index]

    def _histograms(self, name: str, bins: int, index: Index) -> Array:
        column = self._list(name)
        # all rows in their order, as rules ask for them, need no copy
        whole = len(index) == len(column) and bool((index == np.arange(len(column))).all())
        lists = column if whole else column.take(pa.array(index))
        sizes = _sizes(lists)
        if whole and name != "exponents" and len(sizes) and (sizes == bins).all():
            return np.asarray(lists.flatten().to_numpy(zero_copy_only=False).reshape(-1, bins))
        if name != "exponents" and np.isin(sizes, (0, bins)).all():  # as all writers of ours store them
            filled = np.zeros((len(index), bins))
            filled[sizes > 0] = lists.flatten().to_numpy(zero_copy_only=False).reshape(-1, bins)
            return filled
        shift = self._firsts[index] if name == "exponents" else np.zeros(len(index), dtype=np.int64)
        row = np.repeat(np.arange(len(index)), sizes)
        within = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        filled = np.zeros((len(index), bins))
        filled[row, shift[row] + within] = lists.flatten().to_numpy(zero_copy_only=False)
        return filled

    def filled(self, name: str, index: Index) -> Array:
        if name not in self._filled:
            self._filled[name] = _sizes(self._list(name)) > 0
        return np.asarray(self._filled[name])[index]

    def _list(self, name: str) -> pa.Array:
        if name not in self._lists:
            kind = stats_schema().field(name).type
            tables = [part.read((name, _HISTOGRAM_START)) for part in self.parts]
            tables = tables if self.parts or self.stored is None else [self.stored]
            pieces: list[pa.Array] = []
            for table in tables:
                pieces += table[name].chunks if name in table.column_names else [pa.nulls(len(table), kind)]
            self._lists[name] = pa.concat_arrays(pieces) if pieces else pa.array([], type=kind)
        return self._lists[name]

    @cached_property
    def _firsts(self) -> Array:
        if self.stored is None or _HISTOGRAM_START not in self.stored.column_names:
            return np.zeros(0 if self.stored is None else len(self.stored), dtype=np.int64)
        firsts: Array = self.stored[_HISTOGRAM_START].fill_null(0).to_numpy().astype(np.int64)
        return firsts


def _sizes(lists: pa.Array | pa.ChunkedArray) -> Index:
    """Length of each list of a column; 0 for a missing list."""
    sizes: Index = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return sizes


class MergedColumns:
    """Merges the rows of each group."""

    def __init__(self, tallies: LazyTally, group: Index) -> None:
        self.tallies, self.group = tallies, group

    def rows(self, name: str, index: Index) -> Array:
        position = np.full(int(self.group.max(initial=-1)) + 1, -1)
        position[index] = np.arange(len(index))
        members = np.flatnonzero(position[self.group] >= 0)
        values = np.asarray(getattr(self.tallies.take(members), name))
        field = _FIELDS[name]
        merged = np.full((len(index), *values.shape[1:]), 0.0 if field.metadata["bins"] else field.default)
        _MERGE[field.metadata["merge"]].at(merged, position[self.group[members]], values)
        return merged

    def filled(self, name: str, index: Index) -> Array:
        any_of_group = np.zeros(int(self.group.max(initial=-1)) + 1, dtype=bool)
        np.logical_or.at(any_of_group, self.group, self.tallies.filled(name))
        return np.asarray(any_of_group[index])


def merged(tally: Tally, count: int) -> Tally:
    """Merges all rows of a tally of arrays; an empty tally without rows.

    Example:
        >>> both = merged(Tally(n=np.array([1.0, 2.0]), exponents=np.ones((2, 1024))), 2)
        >>> both.n, both.exponents.shape
        (3.0, (1024,))
    """
    if not count:
        return Tally()
    values: Mapping[str, Any] = {
        name: _MERGE[f.metadata["merge"]].reduce(np.broadcast_to(getattr(tally, name), _shape(f, count)), axis=0)
        for name, f in _FIELDS.items()
    }
    numbers: dict[str, Any] = {n: v if _FIELDS[n].metadata["bins"] else float(v) for n, v in values.items()}
    return Tally(**numbers)


def _shape(field: Any, count: int) -> tuple[int, ...]:
    return (count, field.metadata["bins"]) if field.metadata["bins"] else (count,)
