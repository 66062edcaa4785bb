"""Event files: what is written is read, by us and by TensorBoard; what TensorFlow and torch write is read, too."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest

from fuzz.mutations import record
from ottava.interop.event_file import EventWriter, Scalar, _bytes, _double, _number, read_scalars


def values(path: Path) -> list[tuple[int, str, float]]:
    return [(s.step, s.tag, s.value) for s in read_scalars(path)]


def test_scalars_come_back(tmp_path: Path) -> None:
    """Large and negative steps, tags in any script, numbers that are none."""
    writer = EventWriter(tmp_path)
    writer.scalars(1, {"loss": 0.1, "a/b c": -2.5})
    writer.scalars(2**40, {"größe": math.inf, "n": math.nan, "large": 1e300})
    writer.scalars(-1, {"loss": 3.0})
    writer.scalars(3, {})
    writer.close()
    read = values(writer.path)
    assert read[:2] == [(1, "loss", pytest.approx(0.1, rel=1e-7)), (1, "a/b c", -2.5)]
    assert read[2] == (2**40, "größe", math.inf)
    assert math.isnan(read[3][2])
    assert read[4:] == [(2**40, "large", math.inf), (-1, "loss", 3.0)]


def test_histograms_are_no_scalars(tmp_path: Path) -> None:
    """The reader skips them."""
    writer = EventWriter(tmp_path)
    writer.histogram(1, "h", [0.0, 1.0, 2.0], [3.0, 4.0])
    writer.scalars(1, {"x": 1.0})
    writer.close()
    assert values(writer.path) == [(1, "x", 1.0)]


@pytest.mark.parametrize("kind, form, field", [(1, "<f", 5), (2, "<d", 6), (1, "<f", 4), (2, "<d", 4)])
def test_scalars_in_tensors_are_read(tmp_path: Path, kind: int, form: str, field: int) -> None:
    """As TensorFlow 2 and JAX write them: float_val, double_val, or bytes of content."""
    tensor = _number(1, kind) + _bytes(2, b"") + _bytes(field, struct.pack(form, 2.5))
    value = _bytes(1, b"loss") + _bytes(8, tensor)
    event = _double(1, 123.0) + _number(2, 5) + _bytes(5, _bytes(1, value))
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(record(event))
    assert list(read_scalars(path)) == [Scalar(5, 123.0, "loss", 2.5)]


def test_a_torn_or_damaged_record_ends_the_file(tmp_path: Path) -> None:
    """All records before it are read."""
    writer = EventWriter(tmp_path)
    for step in range(3):
        writer.scalars(step, {"loss": float(step)})
    writer.close()
    whole = writer.path.read_bytes()
    for cut in range(1, 40):
        writer.path.write_bytes(whole[:-cut])
        assert [s[0] for s in values(writer.path)] == [0, 1]
    writer.path.write_bytes(whole[:-10] + bytes([whole[-10] ^ 1]) + whole[-9:])
    assert [s[0] for s in values(writer.path)] == [0, 1]


def test_another_file_is_refused(tmp_path: Path) -> None:
    """Naming it; an empty one holds nothing."""
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(b"this is no event file at all")
    with pytest.raises(ValueError, match=r"tfevents\.1: is no TensorBoard event file"):
        list(read_scalars(path))
    path.write_bytes(b"")
    assert list(read_scalars(path)) == []


def test_tensorboard_reads_what_we_write(tmp_path: Path) -> None:
    """Its own reader is the witness: scalars and histogram."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = EventWriter(tmp_path)
    writer.scalars(7, {"loss": 2.5, "nan": math.nan})
    writer.histogram(7, "rows", [0.0, 1.0, 3.0], [2.0, 5.0])
    writer.close()
    seen = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0})
    seen.Reload()
    assert [(e.step, e.value) for e in seen.Scalars("loss")] == [(7, 2.5)]
    histogram = seen.Histograms("rows")[0].histogram_value
    assert (list(histogram.bucket_limit), list(histogram.bucket)) == ([0, 1, 3], [0, 2, 5])
    assert (histogram.num, histogram.sum) == (7, 0.5 * 2 + 2 * 5)


def test_we_read_what_torch_writes(tmp_path: Path) -> None:
    """torch.utils.tensorboard, in both forms of scalars."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("loss", 2.5, 3)
        writer.add_scalar("loss", 1.5, 4, new_style=True)
    (path,) = tmp_path.glob("events*")
    assert values(path) == [(3, "loss", 2.5), (4, "loss", 1.5)]
