"""Writes a file or a folder completely or not at all, whatever stops the process: a full disk, a limit, a signal."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yields a path to write to. If the block succeeds, that file replaces `path`; otherwise it is deleted.

    Args:
        durable: the file is on the disk when the block has ended, even if the machine stops then.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder) / "a.txt") as scratch:
        ...         _ = scratch.write_text("whole")
        ...     [path.name for path in Path(folder).iterdir()]
        ['a.txt']
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a folder; needs the name of a file")
    scratch = path.with_name(f".{path.name}.part")
    try:
        with _of_the_system(path):
            yield scratch
        if durable:
            with scratch.open("r+b") as stream:
                os.fsync(stream.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    if durable and os.name == "posix":  # other systems cannot open a folder, and need not
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder to fill. If the block succeeds it gets the name `folder`; otherwise it is deleted.

    Raises:
        OSError: `folder` is a file, or a folder that is not empty; or the files cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     with replacing_folder(Path(place) / "out") as scratch:
        ...         _ = (scratch / "a.txt").write_text("whole")
        ...     [path.name for path in Path(place).iterdir()]
        ['out']
    """
    scratch = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)  # of a killed process
    scratch.mkdir(parents=True)
    try:
        with _of_the_system(folder):
            yield scratch
        if folder.is_dir():
            folder.rmdir()
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


@contextmanager
def _of_the_system(path: Path) -> Iterator[None]:
    """Raises the OSError behind an error of safetensors, which has it only as a text: "... (os error 28)"."""
    try:
        yield
    except Exception as error:
        code = re.search(r"\(os error (\d+)\)", str(error)) if type(error).__name__ == "SafetensorError" else None
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def append(stream: FileIO, data: bytes) -> None:
    """Adds all of `data` to the end of an unbuffered file, or nothing.

    Raises:
        OSError: the write failed. The file is cut to its old length, so its last record is whole.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(buffering=0) as stream:
        ...     append(stream, b"one line")
    """
    end = stream.seek(0, os.SEEK_END)
    try:
        while data:
            data = data[stream.write(data) :]  # a full disk takes a part, and then raises
    except OSError:
        stream.truncate(end)
        raise
