"""The fields of many tallies, read from Parquet when they are asked for.

A run of 400 casts and 100 looks has 100 million bins; a statistic wants one or two fields of some rows. So a table's
tallies are a `LazyTally`: choosing rows costs nothing, and a field becomes an array when something reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ottava.debug.run.schema import _HISTOGRAM_START
from ottava.debug.tally import Tally, tally_fields

Array = npt.NDArray[Any]
Index = npt.NDArray[np.int64]

_FIELDS = MappingProxyType({f.name: f for f in tally_fields()})
_MERGE = MappingProxyType({"sum": np.add, "max": np.maximum, "min": np.minimum})


class Columns(Protocol):
    """Where fields come from."""

    def rows(self, name: str, index: Index) -> Array:
        """A field of these rows: (rows,), or (rows, bins)."""


class LazyTally(Tally):
    """A tally whose fields are arrays, one entry a row, made when they are read.

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
        """Some of the rows."""
        columns, own = object.__getattribute__(self, "_columns"), object.__getattribute__(self, "_index")
        return LazyTally(columns, own[index])

    def __reduce__(self) -> Any:
        return Tally, tuple(getattr(self, name) for name in _FIELDS)


class DenseColumns:
    """A tally of arrays."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    def rows(self, name: str, index: Index) -> Array:
        values: Array = np.asarray(getattr(self.tally, name))[index]
        return values


class StoredColumns:
    """A table of stats/*.parquet; what it lacks is that of an empty tally."""

    def __init__(self, stored: pa.Table | None) -> None:
        self.stored = stored
        self._lists: dict[str, tuple[Array, Array]] = {}

    def rows(self, name: str, index: Index) -> Array:
        bins = _FIELDS[name].metadata["bins"]
        there = self.stored is not None and name in self.stored.column_names
        if bins:
            return self._histograms(name, bins, index) if there else np.zeros((len(index), bins))
        if not there or self.stored is None:
            return np.full(len(index), float(_FIELDS[name].default))  # type: ignore[arg-type]
        values: Array = self.stored[name].to_numpy().astype(np.float64)[index]
        return values

    def _histograms(self, name: str, bins: int, index: Index) -> Array:
        if name not in self._lists:
            self._lists[name] = _flat(self.stored, name)
        values, edges = self._lists[name]
        starts, sizes = edges[index], edges[index + 1] - edges[index]
        shift = self._firsts[index] if name == "exponents" else np.zeros(len(index), dtype=np.int64)
        row = np.repeat(np.arange(len(index)), sizes)
        within = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        filled = np.zeros((len(index), bins))
        filled[row, shift[row] + within] = values[starts[row] + within]
        return filled

    @property
    def _firsts(self) -> Array:
        assert self.stored is not None
        firsts: Array = self.stored[_HISTOGRAM_START].fill_null(0).to_numpy().astype(np.int64)
        return firsts


def _flat(stored: Any, name: str) -> tuple[Array, Array]:
    """Entries of a column of lists one after another, and where each list begins; an absent list is an empty one."""
    column = stored[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # what combining an empty one gives
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], type=column.type)
    sizes = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    edges = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return column.flatten().to_numpy(zero_copy_only=False).astype(np.float64), edges


class MergedColumns:
    """Rows of other columns, merged where they are of one group."""

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


def merged(tally: Tally, count: int) -> Tally:
    """All rows of a tally of arrays as one; an empty tally where there are none.

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
