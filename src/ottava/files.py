"""Files that are whole or as they were: what a full disk, a limit on sizes or a kill interrupts leaves no half."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path to write to; when the block ends well, that file takes the place of `path`, else it goes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder) / "a.txt") as scratch:
        ...         _ = scratch.write_text("whole")
        ...     [path.name for path in Path(folder).iterdir()]
        ['a.txt']
    """
    scratch = path.with_name(f".{path.name}.part")
    try:
        yield scratch
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def append(stream: FileIO, data: bytes) -> None:
    """Adds all of `data` to the end of an unbuffered file, or nothing.

    Raises:
        OSError: it cannot be written. What a full disk had room for is taken back, so the file's last record is whole.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(buffering=0) as stream:
        ...     append(stream, b"one line")
    """
    end = stream.seek(0, os.SEEK_END)
    try:
        while data:
            data = data[stream.write(data) :]  # a full disk writes what it has room for, and refuses the rest
    except OSError:
        stream.truncate(end)
        raise
