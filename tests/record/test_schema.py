"""The words of a run folder, and that any Parquet reader understands it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from ottava.measure.tally import Tally, tally_fields
from ottava.record.schema import IDENTITY, SCHEMA_VERSION, STATS, Part, RunError, SlotKey, _values, stats_schema
from ottava.record.writer import RunWriter

KEY = SlotKey("layers.0.mlp.fc2", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")


@pytest.fixture
def stats(tmp_path: Path) -> Path:
    """A folder of two rows."""
    with RunWriter(tmp_path / "run") as writer:
        for step, flushed in ((10, 1), (20, 600)):
            exponents = np.zeros(1024)
            exponents[500:503] = 1000, 5, 7
            writer.tally(step, KEY, Tally(n=1012, n_nonzero=1012, n_underflow=flushed, amax=3.0, exponents=exponents))
    return tmp_path / "run" / STATS


def test_every_field_of_a_tally_has_a_column() -> None:
    """A field that is added is stored without another line: counts as integers, the rest as floats."""
    schema = stats_schema()
    assert {f.name for f in tally_fields()} <= set(schema.names)
    assert set(IDENTITY) <= set(schema.names)
    assert schema.field("n_underflow").type == pa.int64()
    assert schema.field("sxx").type == pa.float64()
    assert schema.metadata[b"ottava_schema_version"] == str(SCHEMA_VERSION).encode()


def test_an_error_of_a_run_folder_is_an_input_error() -> None:
    """Exit code 4."""
    assert RunError("x").exit_code == 4


def test_plain_pyarrow_reads_the_folder(stats: Path) -> None:
    """One line, no word of ottava's."""
    table = ds.dataset(stats, format="parquet").to_table()
    share = table["n_underflow"].to_numpy() / table["n_nonzero"].to_numpy()
    assert dict(zip(table["step"].to_pylist(), share, strict=True)) == {10: 1 / 1012, 20: 600 / 1012}
    assert table["layer"].to_pylist() == ["layers.0.mlp.fc2"] * 2
    assert table["kind"].to_pylist() == ["fc2"] * 2
    assert table["exponents"][0].as_py() == [1000, 5, 7]
    assert table["exponents_first"].to_pylist() == [500, 500]


def test_pandas_reads_the_folder(stats: Path) -> None:
    """As the schema's docstring says."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(stats)
    assert (frame.n_underflow / frame.n_nonzero).tolist() == [1 / 1012, 600 / 1012]


def test_duckdb_reads_the_folder(stats: Path) -> None:
    """The query of the schema's docstring."""
    duckdb = pytest.importorskip("duckdb")
    query = f"SELECT layer, step, n_underflow / n_nonzero FROM '{stats}/*.parquet' WHERE tensor = 'input' ORDER BY step"
    assert duckdb.sql(query).fetchall() == [(KEY.layer, 10, 1 / 1012), (KEY.layer, 20, 600 / 1012)]


def test_the_version_is_in_every_part(stats: Path) -> None:
    """A part that was copied elsewhere still says what it is."""
    (part,) = stats.glob("*.parquet")
    assert pq.read_schema(part).metadata[b"ottava_schema_version"] == str(SCHEMA_VERSION).encode()


def test_metadata_that_contradict_each_other_are_refused(stats: Path) -> None:
    """pyarrow ends the process where it is asked about such a column; what it says of sound ones is the witness."""
    (path,) = stats.iterdir()
    sound, about = path.read_bytes(), pq.ParquetFile(path).metadata
    group = about.row_group(0)
    footer = sound[-8 - about.serialized_size : -8]
    assert _values(footer) == sum(group.column(i).num_values for i in range(group.num_columns))
    optional, required = b"\x25\x02\x18\x04step", b"\x25\x00\x18\x04step"  # parquet.thrift: repetition_type, name
    assert optional in footer
    path.write_bytes(sound.replace(optional, required))
    with pytest.raises(RunError, match=r"parquet: is damaged \(.*; move it away"):
        Part(path).read(stats_schema().names)


@pytest.mark.parametrize("footer", [b"\x1c" * 40, b"\x19\xfc" + b"\xff" * 20, b"\x15", b"\x49\x1c\x19\x1c\x3b\x00\x00"])
def test_metadata_without_an_end_are_refused(footer: bytes) -> None:
    """Nested without end, a number without end, cut off, and of a kind that Parquet lacks."""
    with pytest.raises((ValueError, IndexError)):
        _values(footer)
