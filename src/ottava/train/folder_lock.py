"""One process a run folder: a lock that the system takes back when the process ends, however it ends.

The lock is on the hidden file `.lock`, which says who holds it. It is taken before the folder is looked at, for two
processes that look at the same time would both find it free.
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

from ottava.settings import ConfigError

_log = logging.getLogger(__name__)
_NAME = ".lock"
_NO_LOCKS = frozenset(getattr(errno, name) for name in ("ENOLCK", "ENOSYS", "EINVAL", "ENOTSUP", "EOPNOTSUPP"))


class FolderLock:
    """Makes the folder if need be, and holds it until `release`, the end of the process, or until it is collected.

    Raises:
        ConfigError: another process holds it (or another object of this one), or it cannot be a folder.
    Edge cases: where the file system has no locks, a warning says so and nothing is held.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     lock = FolderLock(Path(parent) / "run")
        ...     lock.release()
        ...     list(Path(parent).iterdir())                         # nothing was put into it
        []
    """

    def __init__(self, folder: Path) -> None:
        try:
            made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            file = _take(folder)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}, since {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
            file.flush()
        except OSError as error:
            above = [path for path in (folder, *folder.parents) if os.path.isfile(path)]
            why = f"{above[0]} is a file; needed: a folder" if above else error.strerror
            raise ConfigError(f"{folder}: cannot be a run folder: {why}. Give another one with --run-dir") from error
        self.release = weakref.finalize(self, _release, file, made, os.getpid())
        """Gives the folder back; one that was made for the lock and is still empty goes with it."""

    @contextlib.contextmanager
    def kept_if_all_is_well(self) -> Iterator[None]:
        """Releases the lock where the block ends with an exception."""
        try:
            yield
        except BaseException:
            self.release()
            raise


def _take(folder: Path) -> IO[str]:
    path = folder / _NAME
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            _lock(file)
        except (BlockingIOError, PermissionError) as error:
            with file:
                file.seek(0)
                who = file.read().strip() or "another process"
            raise ConfigError(
                f"{folder}: is in use by {who}. Two processes would spoil the run: wait for that one, or give another "
                "run folder"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning("%s: this file system has no locks (%s); let no second process use the folder", folder, error)
            return file
        # The one who held it before may have removed the file that was just opened.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


def _lock(file: IO[str]) -> None:
    if sys.platform == "win32":
        import msvcrt

        file.seek(1 << 30)  # far from the text, which others read
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _release(file: IO[str], made: list[Path], owner: int) -> None:
    if os.getpid() == owner:  # a forked child has the file, not the folder
        with contextlib.suppress(OSError):  # Windows removes no open file; a folder that was used is not empty
            Path(file.name).unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()
    file.close()
