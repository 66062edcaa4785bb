"""Writes and reads TensorBoard's event files without TensorBoard: scalars and histograms.

A file is a row of records: length (8 bytes), its checksum, payload, its checksum (masked CRC-32C, little endian). The
payload is a protobuf `Event`: wall_time = 1, step = 2, file_version = 3, summary = 5; a `Summary.Value` has tag = 1,
simple_value = 2, histo = 5, tensor = 8, metadata = 9. Source: tensorflow/core/util/event.proto, summary.proto,
tensor.proto and lib/io/record_writer.h.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ottava.base.files import append
from ottava.base.untrusted import opened

_MAX_RECORD = 16 << 20
"""Bytes. The reader skips larger records, such as pictures; a record of scalars has some kilobytes."""
_POLYNOMIAL = 0x82F63B78
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOAT, _DOUBLE = 1, 2  # tensor.proto's DataType
_LONGEST_VARINT = 10
"""Bytes: 64 bits, 7 in each byte."""
_DAMAGED = "damaged protobuf message"
_SCALARS = ((_FLOAT, "<f", 5), (_DOUBLE, "<d", 6))  # (type, form, field of the values)


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_REMAINDERS = tuple(_remainder(byte) for byte in range(256))


def masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and shifted, as a record stores it.

    Example:
        >>> hex(masked_crc(b"123456789"))                      # the CRC itself is 0xe3069283, by its definition
        '0xc78ab0e5'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _REMAINDERS[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class Scalar(NamedTuple):
    """One number of an event file."""

    step: int
    wall_time: float
    tag: str
    value: float


class EventWriter:
    """Writes one event file into a folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = EventWriter(Path(folder))
        ...     writer.scalars(7, {"loss": 2.5})
        ...     writer.close()
        ...     [(s.step, s.tag, s.value) for s in read_scalars(writer.path)]
        [(7, 'loss', 2.5)]
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}.ottava"
        self.path = folder / name
        self._stream = self.path.open("xb", buffering=0)
        self._record(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Several numbers at one step."""
        self._event(step, [_bytes(1, tag.encode()) + _float(2, value) for tag, value in values.items()])

    def histogram(self, step: int, tag: str, edges: Sequence[float], counts: Sequence[float]) -> None:
        """A histogram: len(edges) == len(counts) + 1. Its moments are computed from the middles of the bins."""
        middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        weighted = list(zip(counts, middles, strict=True))
        first, second = sum(n * x for n, x in weighted), sum(n * x * x for n, x in weighted)
        numbers = (edges[0], edges[-1], sum(counts), first, second)
        histo = b"".join(_double(i + 1, value) for i, value in enumerate(numbers))
        for field, values in ((6, edges), (7, [0.0, *counts])):  # a bucket ends at its limit: the first one is empty
            histo += _bytes(field, b"".join(struct.pack("<d", value) for value in values))
        self._event(step, [_bytes(1, tag.encode()) + _bytes(5, histo)])

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()

    def _event(self, step: int, values: list[bytes]) -> None:
        if values:
            summary = b"".join(_bytes(1, value) for value in values)
            self._record(_double(1, time.time()) + _number(2, step) + _bytes(5, summary))

    def _record(self, payload: bytes) -> None:
        length = struct.pack("<Q", len(payload))
        head = length + struct.pack("<I", masked_crc(length))
        append(self._stream, head + payload + struct.pack("<I", masked_crc(payload)))


def read_scalars(path: Path) -> Iterator[Scalar]:
    """The scalars of an event file, in the old form (simple_value) and the new one (a tensor of one number).

    Raises:
        ValueError: the file does not begin with a record, or an undamaged record is no event.
        OSError, UntrustedError: as in `untrusted.opened`.
    Edge cases: stops at a torn or damaged record, as a killed writer leaves it. Skips records above 16 MiB.
    """
    for payload in _records(path):
        try:
            scalars = list(_scalars(payload))
        except ValueError as error:
            raise ValueError(f"{path}: {error}; the records before it were read") from error
        yield from scalars


def _scalars(payload: bytes) -> Iterator[Scalar]:
    wall_time, step, values = 0.0, 0, []
    for field, value in _fields(payload):
        if field == 1:
            wall_time = _unpacked("<d", value)
        elif field == 2 and isinstance(value, int):
            step = value - (1 << 64) if value >> 63 else value
        elif field == 5 and isinstance(value, bytes):
            values += [entry for number, entry in _fields(value) if number == 1]
    for entry in values:
        scalar = _scalar(entry) if isinstance(entry, bytes) else None
        if scalar is not None:
            yield Scalar(step, wall_time, *scalar)


def _scalar(entry: bytes) -> tuple[str, float] | None:
    tag, number = "", None
    for field, value in _fields(entry):
        if field == 2:
            number = _unpacked("<f", value)
        elif field == 1 and isinstance(value, bytes):
            tag = value.decode(errors="replace")
        elif field == 8 and isinstance(value, bytes):
            number = _of_tensor(value)
    return None if number is None else (tag, number)


def _unpacked(form: str, value: int | bytes) -> float:
    if not isinstance(value, bytes) or len(value) != struct.calcsize(form):
        raise ValueError(f"{_DAMAGED}: a number of the wrong size")
    return float(struct.unpack(form, value)[0])


def _of_tensor(tensor: bytes) -> float | None:
    fields = dict(_fields(tensor))  # a scalar has every field once
    for kind, form, field in _SCALARS:
        if fields.get(1) != kind:
            continue
        for content in (fields.get(field), fields.get(4)):
            if isinstance(content, bytes) and len(content) == struct.calcsize(form):
                return _unpacked(form, content)
    return None


def _records(path: Path) -> Iterator[bytes]:
    with opened(path) as stream:
        remaining = os.fstat(stream.fileno()).st_size
        while len(head := stream.read(12)) == 12:
            length, check = head[:8], struct.unpack("<I", head[8:])[0]
            if masked_crc(length) != check:
                if stream.tell() == 12:
                    raise ValueError(f"{path}: is no TensorBoard event file")
                return
            (size,) = struct.unpack("<Q", length)
            remaining -= 16 + size
            if remaining < 0:  # a torn record or a false size: allocate nothing for it
                return
            if size > _MAX_RECORD:
                stream.seek(size + 4, os.SEEK_CUR)
                continue
            payload, tail = stream.read(size), stream.read(4)
            if len(tail) < 4 or masked_crc(payload) != struct.unpack("<I", tail)[0]:
                return
            yield payload


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of every field of a protobuf message; a varint's value is an int, any other is bytes."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"{_DAMAGED}: wire type {kind}")
        if at + size > len(message):
            raise ValueError(f"{_DAMAGED}: a field of {size:,} bytes in a message of {len(message):,}")
        yield number, message[at : at + size]
        at += size


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i, byte in enumerate(message[at : at + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * i
        if not byte & 0x80:
            return value & (1 << 64) - 1, at + i + 1
    raise ValueError(f"{_DAMAGED}: a whole number without end")


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | _FIXED64) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # beyond fp32
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _varint(field << 3 | _FIXED32) + packed


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value
