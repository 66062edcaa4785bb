"""One process per folder, however the last one ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import warm
from ottava.base.settings import ConfigError
from ottava.train.run_folder import FolderLock

HOLD = """
import sys
import time
from pathlib import Path
from ottava.train.run_folder import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(300)
"""


def test_folder_of_another_process_is_refused_until_that_one_is_gone(tmp_path: Path) -> None:
    """A killed process cleans up nothing, so its lock file stays."""
    run = tmp_path / "run"
    other = warm.Warm(["-c", HOLD, str(run)])
    other.wait_for("held\n")
    with pytest.raises(ConfigError, match=rf"{run}: is in use by process {other.pid} on .*Two processes would spoil"):
        FolderLock(run)
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert (run / ".lock").exists()
    lock = FolderLock(run)
    assert f"process {os.getpid()} on " in (run / ".lock").read_text()
    lock.release()
    assert not (run / ".lock").exists()


def test_what_was_made_for_the_lock_alone_goes_with_it(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "a" / "b")
    with pytest.raises(ConfigError, match="is in use by process"):
        FolderLock(tmp_path / "a" / "b")
    lock.release()
    lock.release()  # again is nothing
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="wrong"), FolderLock(tmp_path / "a").released_on_error():
        raise RuntimeError("wrong")
    assert list(tmp_path.iterdir()) == []
    lock = FolderLock(tmp_path / "a" / "b")
    (tmp_path / "a" / "kept").touch()
    del lock  # collected: released
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept"]


def test_file_that_its_holder_has_removed_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a process's opening and its locking, the holder goes and removes the file; a third makes a new one."""
    import ottava.train.run_folder as module

    lock, real, files = FolderLock(tmp_path), module._lock, []

    def late(file) -> None:  # type: ignore[no-untyped-def]
        files.append(file)
        if len(files) == 1:
            lock.release()
            (tmp_path / ".lock").touch()
        real(file)

    monkeypatch.setattr(module, "_lock", late)
    second = FolderLock(tmp_path)
    assert len(files) == 2
    monkeypatch.setattr(module, "_lock", real)
    with pytest.raises(ConfigError, match="is in use"):
        FolderLock(tmp_path)
    second.release()


def test_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import errno

    import ottava.train.run_folder as module

    def refuse(file: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module, "_lock", refuse)
    FolderLock(tmp_path)
    assert "the file system has no locks" in caplog.text
