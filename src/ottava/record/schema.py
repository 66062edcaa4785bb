"""The files of a watched run, and their names and columns.

    RUN/watch.json            versions, settings, layers, coverage, overhead      (rewritten while the run goes on)
    RUN/stats/part-RANK-K.parquet   a row per step x cast x rank: the fields of `Tally` and of `SlotKey`
    RUN/steps.jsonl           a line per optimizer step: step, and loss, grad_norm, lr, tokens, seconds if known; in the
                              folder of `ottava train`, what its metrics.jsonl does not have
    RUN/events.jsonl          a line per event: triggers, dumps, fallbacks, warnings
    RUN/training.jsonl        a line per look: the update of each parameter; and a line per mode of the forward
    RUN/experiments.jsonl     a line per experiment: what the watch tried, and what came out
    RUN/trace.jsonl           a line per traced step: the calls of torch in it, with fingerprints of their results
    RUN/dumps/*.safetensors   dumped tensors
    RUN/ranks/RANK/           watch.json, steps.jsonl, training.jsonl and trace.jsonl of the other ranks; a run that
                              `Run.open` reads

The files store sums that merge exactly, not statistics. Any tool reads them:

    duckdb:  SELECT layer, step, n_underflow / n_nonzero FROM 'RUN/stats/*.parquet' WHERE tensor = 'input'
    pandas:  pandas.read_parquet("RUN/stats")

A run of 400 casts and 100 looks has 100 million bins, but a statistic needs one or two fields of some rows. The tallies
of a table are therefore a `LazyTally`: selecting rows costs nothing, and a field becomes an array when it is read.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ottava.base.untrusted import MAX_STEP, UntrustedError, misfit, opened, parse_json, read_text
from ottava.measure.tally import Tally, tally_fields

if TYPE_CHECKING:
    from ottava.numerics.tensor import QuantizationSpec

SCHEMA_VERSION = 2
READABLE = (1, SCHEMA_VERSION)
"""Version 1 hashed batches in another way, and read the norm of the gradient after clipping; see `Run.steps`."""
MANIFEST, STEPS, EVENTS, STATS, DUMPS = "watch.json", "steps.jsonl", "events.jsonl", "stats", "dumps"
TRAINING, EXPERIMENTS, TRACE, RANKS = "training.jsonl", "experiments.jsonl", "trace.jsonl", "ranks"
FAILED = "the watch failed: "
"""Begins the `ended` of a manifest whose watch an error of its own has ended."""
TRAINER_MANIFEST, TRAINER_STEPS = "manifest.json", "metrics.jsonl"
"""Files of `ottava train` in the same folder."""
TRAINER_NUMBERS = frozenset({"loss", "grad_norm", "lr", "tokens", "seconds"})
"""Columns of its metrics.jsonl. It writes a number that is not finite as null, so steps.jsonl keeps those."""

MANIFEST_SHAPE: Mapping[str, Any] = MappingProxyType(
    {
        "versions": dict,
        "host": dict,
        "config": dict,
        "settings": {"recipes": [str]},
        "layers": [{"name!": str, "shape": [int], "recipe": str}],
        "coverage": {"linear!": int, "seen!": int, "skipped": [{"name": str, "why": str}]},
        "overhead": {"share": float},
        "recipes": {"*": dict},
        "weights": dict,
        "cast": dict,
        **{key: [str] for key in ("command", "arguments", "framework", "unmoved")},
        **dict.fromkeys(("ended", "started", "cwd"), str),
    }
)
"""The parts of watch.json that readers use, see `untrusted.misfit`. Parts may be missing; other parts are allowed."""


class SlotKey(NamedTuple):
    """One cast of one tensor of one layer: the key of a series of statistics."""

    layer: str
    """Full name of the layer."""
    tensor: str
    """One of SYMBOLS."""
    direction: str
    """"row": x as fprop (for grad_output: dgrad) contracts it; "col": x.T, if it has a cast of its own."""
    recipe: str
    """Name of the recipe."""
    format: str
    """Number format."""
    granularity: str
    """Block with one scale, as str(Granularity)."""
    scale_format: str
    """Format of the scales."""
    scaling: str
    """current, delayed or guarded."""
    source: str
    """"door": the operand of the GEMM itself. "config": cast as the layer's own package casts it, by the configuration
    that the layer carries. "hook": simulated beside a GEMM of any precision. "import:...": measured by another tool."""


def cast_key(layer: str, tensor: str, direction: str, recipe: str, spec: QuantizationSpec, source: str) -> SlotKey:
    """The key of a cast by a spec."""
    how = (spec.format.name, str(spec.granularity), spec.scale_format, spec.scaling)
    return SlotKey(layer, tensor, direction, recipe, *how, source)


IDENTITY = ("step", "rank", "phase", "kind", *SlotKey._fields)
"""Columns beside the fields of the tally. phase: "full" rows have all fields, "light" rows only amax and scale. kind:
part of a transformer, see `layer_names`."""
_HISTOGRAM_START = "exponents_first"
"""Bin of the first entry of `exponents`, which is stored without its empty ends."""
REPORTED = "reported"
"""Statistics that another tool computed, if it gave no sums: a map from names of STATISTICS."""


def stats_schema() -> pa.Schema:
    """Columns of stats/*.parquet."""
    columns = [pa.field("step", pa.int64()), pa.field("rank", pa.int32())]
    columns += [pa.field(name, pa.dictionary(pa.int32(), pa.string())) for name in IDENTITY[2:]]
    for f in tally_fields("number"):
        columns.append(pa.field(f.name, pa.int64() if f.name.startswith("n_") or f.name == "n" else pa.float64()))
    for f in tally_fields("histogram"):
        counts = not f.name.startswith("energy")
        columns.append(pa.field(f.name, pa.list_(pa.int64() if counts else pa.float64())))
    columns.append(pa.field(_HISTOGRAM_START, pa.int32()))
    columns.append(pa.field(REPORTED, pa.map_(pa.string(), pa.float64())))
    return pa.schema(columns, metadata={"ottava_schema_version": str(SCHEMA_VERSION)})


class RunError(ValueError):
    """A run folder cannot be read or written; the message names the file, the reason, and what to do."""

    exit_code = 4


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads watch.json, the manifest of a run.

    Raises:
        RunError: the file is damaged, of another schema version, or does not fit `MANIFEST_SHAPE`.
    """
    try:
        facts = parse_json(read_text(path))
    except UntrustedError as error:
        raise RunError(f"{path}: is damaged: {error}") from error
    if not isinstance(facts, dict):
        raise RunError(f"{path}: is damaged: got {type(facts).__name__}, needs an object")
    version = facts.get("schema_version")
    if version not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise RunError(f"{path}: has schema version {version}; this ottava reads {known}")
    if wrong := misfit(facts, MANIFEST_SHAPE, MANIFEST):
        raise RunError(f"{path}: {wrong}; somebody edited the file, or another program wrote it")
    return facts


def trainer_manifest(folder: Path) -> dict[str, Any]:
    """What watch.json would say of a run of `ottava train` that nobody watched: from its manifest.json and config.yaml.

    Raises:
        RunError: a file is damaged, or not what `ottava train` writes.
    """
    from ottava.base.settings import ConfigError, flatten, read_yaml
    from ottava.recipe import Recipe  # a reader of runs needs no recipe

    path = folder / TRAINER_MANIFEST
    try:
        facts = parse_json(read_text(path))
        config = flatten(read_yaml(folder / "config.yaml"))
        conversion = facts["conversion"]
        recipe = Recipe.from_dict(conversion["recipe"])
        layers = [
            {"name": str(name), "source": "door", "seen": False, "shape": None, "recipe": recipe.for_layer(name).name}
            for name in conversion["converted"]
        ]
        about = {name: facts[name] for name in ("versions", "started")}
        command = shlex.split(facts["command"])
        host = {"device": facts["device"], "platform": facts["platform"]}
    except (UntrustedError, ConfigError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(f"{path}: is no manifest of `ottava train` ({error!r}); somebody edited the file") from error
    return {
        "schema_version": SCHEMA_VERSION,
        **about,
        "command": command,
        "host": host,
        "config": {name: value for name, value in config.items() if not name.startswith("watch")},
        "layers": layers,
        "recipes": {recipe.name: recipe.to_dict()},
        "cast": {"ran": bool(layers) and recipe.casts},
        "framework": ["ottava"],
        "ended": "closed" if (folder / "receipt.json").is_file() else "",
    }


Array = npt.NDArray[Any]
Index = npt.NDArray[np.int64]

_FIELDS = MappingProxyType({f.name: f for f in tally_fields()})
_BINS = MappingProxyType({f.name: f.metadata["bins"] for f in tally_fields("histogram")})
_MERGE = MappingProxyType({"sum": np.add, "max": np.maximum, "min": np.minimum})


_MOST_ROWS, _MOST_VALUES = 1 << 22, 1 << 27
"""Limits of one part. A writer stores 4,096 rows at a time and merges 64 parts; Parquet compresses zeros well."""


def store(table: pa.Table, target: Any) -> None:
    """Writes a part, to a file or a buffer, without dictionaries and statistics of bins, which only take time."""
    pq.write_table(
        table,
        target,
        compression="zstd",
        use_dictionary=list(IDENTITY),
        write_statistics=["step"],
        write_page_checksum=True,
    )


def _values(footer: bytes) -> int:
    """How many values the columns of a Parquet file have, by its metadata (parquet.thrift: FileMetaData.row_groups (4),
    .columns (1), .meta_data (3), .num_values (5)). pyarrow's `metadata.row_group(i).column(j)` says it, too, and ends
    the process where the metadata contradict each other."""
    groups = _thrift(footer, 0, 12)[0].get(4, ())
    return sum(abs(column[3][5]) for group in groups for column in group[1] if 3 in column)


def _thrift(data: bytes, at: int, kind: int, depth: int = 16) -> tuple[Any, int]:
    """A value of Thrift's compact protocol, without texts and doubles, and the place behind it."""

    def number() -> int:
        nonlocal at
        value = shift = 0
        while data[at] > 127:
            value |= (data[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if shift > 63:
                raise ValueError("its metadata have a number of more than 64 bits")
        at += 1
        return value | data[at - 1] << shift

    if kind in (1, 2):
        return kind == 1, at
    if kind in (3, 7):
        return None, at + (1 if kind == 3 else 8)
    if kind in (4, 5, 6):
        value = number()
        return (value >> 1) ^ -(value & 1), at
    if kind == 8:
        length = number()
        return None, at + length
    if kind == 9:
        count, kind = data[at] >> 4, data[at] & 15
        at += 1
        items = []
        for _ in range(number() if count == 15 else count):
            item, at = _thrift(data, at, 3 if kind in (1, 2) else kind, depth - 1)
            items.append(item)
        return items, at
    if kind != 12 or not depth:
        raise ValueError(f"its metadata have a value of kind {kind} in {16 - depth} others")
    fields, field = {}, 0
    while head := data[at]:
        at += 1
        field = field + (head >> 4) if head >> 4 else number() >> 1
        fields[field], at = _thrift(data, at, head & 15, depth - 1)
    return fields, at + 1


class Part:
    """One part of a run's statistics, as read from disk; its columns are decoded when they are asked for.

    Histograms are nine tenths of a part, and a diagnosis asks for two of twelve. The bytes stay in memory, because a
    running watch merges its parts and deletes them.

    Raises:
        pa.ArrowInvalid, OSError: the part is torn.
        RunError: the part is too large.
    """

    def __init__(self, path: Path, data: bytes | None = None) -> None:
        self.path = path
        self._alone = threading.Lock()  # two threads that read one ParquetFile end the process
        with self._damage(pa.ArrowInvalid):
            if data is None:
                with opened(path) as stream:
                    data = stream.read()
            self.nbytes = len(data)
            self._file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
            about = self._file.metadata
            values = _values(data[-8 - about.serialized_size : -8])
            if about.num_rows > _MOST_ROWS or values > _MOST_VALUES:
                raise RunError(
                    f"{self.path}: has {about.num_rows:,} rows with {values:,} values, too many for one part"
                )

    def read(self, names: Sequence[str]) -> pa.Table:
        """These columns, as far as the part has them, checked.

        Raises:
            RunError: a column is missing or of another type; the message names it.
        """
        with self._damage():
            return _checked(self.path, self._numbers(list(names)), names)

    def without(self, steps: Collection[int]) -> Part | None:
        """The part without the rows of these steps, in memory; None if no row is left."""
        with self._damage():
            whole = self._numbers()
            kept = whole.filter(pc.invert(pc.is_in(whole["step"], pa.array(sorted(steps), pa.int64()))))
            if kept.num_rows == whole.num_rows:
                return self
            if not kept.num_rows:
                return None
            store(kept, sink := pa.BufferOutputStream())
            return Part(self.path, sink.getvalue().to_pybytes())

    def _numbers(self, names: list[str] | None = None) -> pa.Table:
        try:
            with self._alone:
                return self._file.read(columns=names)
        except OSError as error:  # a wrong checksum of a page, from bytes that lie in memory: it names no file
            raise ValueError(str(error)) from error

    @contextmanager
    def _damage(self, *torn: type[Exception]) -> Iterator[None]:
        passed: tuple[type[Exception], ...] = (*torn, OSError, RunError)
        try:
            yield
        except passed:
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


class LazyTally(Tally):
    """A tally whose fields become arrays, one entry per row, when they are read.

    Example:
        >>> columns = DenseColumns(Tally(n=np.array([1.0, 2.0, 3.0]), exponents=np.ones((3, 1024))))
        >>> some = LazyTally(columns, np.array([2, 0]))
        >>> some.n, some.exponents.shape
        (array([3., 1.]), (2, 1024))
    """

    _columns: DenseColumns | StoredColumns | MergedColumns
    _index: Index
    _made: dict[str, Array]

    def __init__(self, columns: DenseColumns | StoredColumns | MergedColumns, index: Index) -> None:
        vars(self).update(_columns=columns, _index=index, _made={})

    def __getattribute__(self, name: str) -> Any:
        if name not in _FIELDS:
            return object.__getattribute__(self, name)
        if name not in self._made:
            self._made[name] = self._columns.rows(name, self._index)
        return self._made[name]

    def take(self, index: Index) -> LazyTally:
        """A selection of the rows."""
        return LazyTally(self._columns, self._index[index])

    def filled(self, name: str) -> npt.NDArray[np.bool_]:
        """bool (rows,): whether a row has a histogram. It does not make the array, which may take gigabytes."""
        return np.asarray(self._columns.filled(name, self._index), dtype=bool)

    def __reduce__(self) -> Any:
        return Tally, tuple(getattr(self, name) for name in _FIELDS)


class DenseColumns:
    """The fields of a tally of arrays. `rows` gives a field of some rows, `filled` whether they have a histogram."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    def rows(self, name: str, index: Index) -> Array:
        """A field of these rows."""
        values: Array = np.asarray(getattr(self.tally, name))[index]
        return values

    def filled(self, name: str, index: Index) -> Array:
        """Whether these rows have a histogram."""
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
        """A field of these rows; a histogram has its bins as columns."""
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
        """Whether these rows have a histogram."""
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
        """A field of these groups, merged as its sum is."""
        position = np.full(int(self.group.max(initial=-1)) + 1, -1)
        position[index] = np.arange(len(index))
        members = np.flatnonzero(position[self.group] >= 0)
        values = np.asarray(getattr(self.tallies.take(members), name))
        field = _FIELDS[name]
        merged = np.full((len(index), *values.shape[1:]), 0.0 if field.metadata["bins"] else field.default)
        _MERGE[field.metadata["merge"]].at(merged, position[self.group[members]], values)
        return merged

    def filled(self, name: str, index: Index) -> Array:
        """Whether any row of a group has a histogram."""
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
