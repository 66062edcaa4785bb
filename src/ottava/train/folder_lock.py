"""One process per run folder: a lock that the system releases when the process ends, however it ends.

The lock is on the hidden file `.lock`, which names the process that holds it. A process takes the lock before it looks
at the folder: two processes that look at the same time would both find the folder free.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import sys
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from ottava.base.settings import ConfigError

_log = logging.getLogger(__name__)
_NAME = ".lock"
_NO_LOCKS = frozenset(getattr(errno, name) for name in ("ENOLCK", "ENOSYS", "EINVAL", "ENOTSUP", "EOPNOTSUPP"))


class FolderLock:
    """Makes the folder if it is missing, and holds it until `release`, the end of the process or garbage collection.

    Raises:
        ConfigError: another process, or another object of this one, holds the folder; or the path cannot be a folder.
    Edge cases: on a file system without locks it logs a warning and holds no lock.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     lock = FolderLock(Path(parent) / "run")
        ...     lock.release()
        ...     list(Path(parent).iterdir())                         # the folder was removed again
        []
    """

    def __init__(self, folder: Path) -> None:
        try:
            new = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            file = _take(folder)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}, since {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
            file.flush()
        except OSError as error:
            files = [path for path in (folder, *folder.parents) if os.path.isfile(path)]
            why = f"{files[0]} is a file; needed: a folder" if files else error.strerror
            raise ConfigError(f"{folder}: cannot be a run folder: {why}. Give another one with --run-dir") from error
        self.release = weakref.finalize(self, _release, file, new, os.getpid())
        """Releases the folder, and removes it if the lock made it and it is still empty."""

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Releases the lock if the block ends with an exception."""
        try:
            yield
        except BaseException:
            self.release()
            raise


class NoLock:
    """Stands in for `FolderLock` where another process of the run holds the lock."""

    def release(self) -> None:
        """Does nothing."""

    def released_on_error(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing."""
        return contextlib.nullcontext()


def _take(folder: Path) -> IO[str]:
    path = folder / _NAME
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            _lock(file)
        except (BlockingIOError, PermissionError) as error:
            with file:
                file.seek(0)
                holder = file.read().strip() or "another process"
            raise ConfigError(
                f"{folder}: is in use by {holder}. Two processes would spoil the run: wait until that process ends, or "
                "give another run folder"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning("%s: the file system has no locks (%s); do not start a second process there", folder, error)
            return file
        # the last holder may have removed the file that we just opened
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


def _lock(file: IO[str]) -> None:
    if sys.platform == "win32":
        import msvcrt

        file.seek(1 << 30)  # far from the text: others read the text
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _release(file: IO[str], new: list[Path], owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits the file, but does not own the folder
        with contextlib.suppress(OSError):  # Windows removes no open file; a used folder is not empty
            Path(file.name).unlink(missing_ok=True)
            for folder in new:
                folder.rmdir()
    file.close()
