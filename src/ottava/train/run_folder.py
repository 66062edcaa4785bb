"""The folder of one run: its settings, its machine, and one line per step.

config.yaml       every setting, as resolved
manifest.json     command, versions, machine, size of the model, converted layers; every resumption
metrics.jsonl     a `StepRecord` per line, written at the end of the step
checkpoints/      see checkpoint.py
receipt.json      the kernel of each GEMM, written at the end
.lock             names the process that holds the run (see `FolderLock`)
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import platform
import shlex
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from filelock import BaseFileLock, FileLock, Timeout

from ottava.base import __version__
from ottava.base.settings import ConfigError, flatten
from ottava.base.text import to_json
from ottava.base.untrusted import opened, parse_json, read_text
from ottava.train.checkpoint import CheckpointError, as_checkpoint_error, atomic_write
from ottava.train.config import FREE, TrainConfig, load_config

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRecord:
    """The numbers of one optimizer step. All but `seconds` are the same in every repetition of a run."""

    step: int
    """Counted from 1."""
    loss: float
    """Training loss in nats per byte, before the update. NaN if it was not finite."""
    grad_norm: float
    """Norm of the whole gradient before clipping. NaN if it was not finite."""
    lr: float
    tokens: int
    """Bytes predicted in this step."""
    seconds: float
    """Time of this step, without evaluation and checkpoints."""
    val_loss: float | None
    """Validation loss in nats per byte after the update of this step; None if no evaluation was due."""

    def to_json(self) -> str:
        """One line of metrics.jsonl. It keeps every bit of a float. JSON has no NaN: NaN becomes null."""
        return to_json(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """The inverse of `to_json`."""
        values: dict[str, Any] = parse_json(line)
        if not all(isinstance(value, int | float | None) for value in values.values()):
            raise TypeError("a value is not a number")
        missing = {name: math.nan for name in ("loss", "grad_norm") if values[name] is None}
        return cls(**(values | missing))


class RunFolder:
    """The files of one run. The constructor takes the lock and checks the folder; `begin` writes the first files.

    Args:
        writes: whether this process writes the files. Of several processes the first one does; the others only read.
    Raises:
        ConfigError: another process holds the folder; the folder holds a run and `resume` is False; the folder holds
            other files; or its run had other settings.
    """

    def __init__(self, path: Path, config: TrainConfig, *, resume: bool, writes: bool = True) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._metrics = path / "metrics.jsonl"
        self._config, self._writes = config, writes
        self._curve = hashlib.sha256()
        self._lock = FolderLock(path) if writes else None
        with self.released_on_error():
            if writes:
                self._refuse_misuse(resume=resume)

    def released_on_error(self) -> contextlib.AbstractContextManager[None]:
        """Releases the folder if the block ends with an exception."""
        return contextlib.nullcontext() if self._lock is None else self._lock.released_on_error()

    def release(self) -> None:
        """Lets another process use the folder."""
        if self._lock is not None:
            self._lock.release()

    def _refuse_misuse(self, *, resume: bool) -> None:
        settings = self.path / "config.yaml"
        # a run that was killed in its first moment leaves only hidden files
        used = any(not entry.name.startswith(".") for entry in self.path.iterdir())
        if used and not resume:
            raise ConfigError(f"{self.path}: is not empty; give another run folder, or continue its run with --resume")
        if used and not settings.exists():
            raise ConfigError(
                f"{self.path}: holds no run (it has no config.yaml); give the folder of a run, or an empty folder"
            )
        if used:
            _refuse_other_settings(settings, self._config)

    def write(self, name: str, text: str) -> None:
        """Writes a small file atomically."""
        if not self._writes:
            return
        with atomic_write(self.path / name) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Writes a small JSON file atomically."""
        self.write(name, json.dumps(values, indent=2) + "\n")

    def begin(self, step: int, facts: Mapping[str, Any]) -> None:
        """Writes config.yaml and manifest.json. For a resumed run, adds this process to the manifest.

        Args:
            step: the step at which this process takes the run over.
            facts: further entries for a new manifest. An existing manifest keeps its own.
        Edge cases: a damaged manifest becomes manifest.json.damaged, a new one begins, and the log says so. The run
            does not depend on the manifest.
        """
        if not self._writes:
            return
        self.write("config.yaml", self._config.to_yaml())
        path = self.path / "manifest.json"
        process = _this_process()
        manifest: dict[str, Any] = {"schema_version": 1, **process, **facts, "resumed": []}
        if path.exists():
            try:
                manifest = _like(manifest, parse_json(read_text(path)))
            except (ValueError, TypeError) as error:
                aside = path.with_name("manifest.json.damaged")
                path.replace(aside)
                _log.warning("%s: is damaged (%s); it was renamed to %s, and a new one begins", path, error, aside.name)
            manifest["resumed"].append({"at_step": step, **process})
        self.write_json("manifest.json", manifest)

    def append(self, record: StepRecord) -> None:
        """Adds a step to metrics.jsonl in one write: a killed process leaves at most one torn line."""
        self._curve.update(replace(record, seconds=0.0).to_json().encode())
        if not self._writes:
            return
        # buffered: an unbuffered write to a full disk may write half a line without an error
        with as_checkpoint_error(self._metrics), self._metrics.open("ab") as stream:
            stream.write(f"{record.to_json()}\n".encode())

    def sync(self) -> None:
        """Flushes metrics.jsonl to the disk. Call it before a checkpoint, which must not be ahead of the metrics."""
        if not self._writes:
            return
        with as_checkpoint_error(self._metrics), self._metrics.open("ab") as stream:
            os.fsync(stream.fileno())

    @property
    def curve(self) -> str:
        """Hash of all records so far, without their seconds. A checkpoint keeps it: the lines have no checksum."""
        return self._curve.hexdigest()

    def cut_history(self, step: int, curve: str | None = None) -> list[StepRecord]:
        """Cuts metrics.jsonl back to its first `step` lines and returns them.

        Args:
            curve: the hash that these lines must have; None: any.
        Raises:
            CheckpointError: the file holds fewer steps, or other ones.
        """
        lines: list[bytes] = []
        try:
            if self._metrics.exists():
                with opened(self._metrics) as stream:
                    lines = stream.read().splitlines(keepends=True)[:step]
            records = [StepRecord.from_json(line.decode()) for line in lines]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{self._metrics}: has a line without a step ({error})") from error
        if [record.step for record in records] != list(range(1, step + 1)):
            raise CheckpointError(
                f"{self._metrics}: does not hold steps 1 to {step}, but the checkpoint is of step {step}: "
                "somebody changed the file, or the disk lost lines. Start again in another run folder"
            )
        found = hashlib.sha256(b"".join(replace(record, seconds=0.0).to_json().encode() for record in records))
        if curve not in (None, found.hexdigest()):
            raise CheckpointError(
                f"{self._metrics}: steps 1 to {step} are not those of the checkpoint: a number was edited, or the disk "
                "damaged the file. Restore the file, or start again in another run folder"
            )
        self._curve = found
        if self._writes and self._metrics.exists():
            os.truncate(self._metrics, sum(map(len, lines)))
        return records


def _refuse_other_settings(settings: Path, config: TrainConfig) -> None:
    """Raises ConfigError if the saved settings differ in one that decides the trained bits."""
    saved = load_config(settings)
    if saved.digest() == config.digest():
        return
    old, new = flatten(saved.model_dump(mode="json")), flatten(config.model_dump(mode="json"))
    changes = [
        f"  {key}: {old.get(key)!r}, now {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key.partition(".")[0] not in FREE
    ]
    raise ConfigError(
        f"{settings}: the run to resume has other settings:\n" + "\n".join(changes) + "\n"
        "a resumed run repeats the uninterrupted one, so only "
        f"{', '.join(FREE)} may change. Take the old settings, or start a new run from these weights: "
        f"ottava train --init {shlex.quote(str(settings.parent))} --run-dir NEW --set ..."
    )


def _like(fresh: Mapping[str, Any], saved: Any) -> dict[str, Any]:
    """Returns `saved` if it has the entries of `fresh` with their types, else raises TypeError."""
    if not isinstance(saved, dict):
        raise TypeError(f"it holds a {type(saved).__name__}, not an object")
    for name, value in fresh.items():
        if name != "commit" and not isinstance(saved.get(name), type(value)):  # a commit may be null
            raise TypeError(f"its {name} is {saved.get(name)!r}")
    return saved


def _this_process() -> dict[str, Any]:
    """Command, versions and machine of this process."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "versions": {"ottava": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": _commit(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def _commit() -> str | None:
    """The commit of this ottava, with "-dirty" if files changed; None if it was installed from a package."""
    source = Path(__file__)
    git = ["git", "-C", str(source.parent)]
    try:
        # ls-files first: a virtual environment inside another repository would report that repository's commit
        for arguments in (
            ["ls-files", "--error-unmatch", source.name],
            ["describe", "--always", "--dirty", "--abbrev=40"],
        ):
            answer = subprocess.run([*git, *arguments], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


# --- one process per folder ------------------------------------------------------------------------------------------

_NO_LOCKS = frozenset(getattr(errno, name) for name in ("ENOLCK", "ENOSYS", "EINVAL", "ENOTSUP", "EOPNOTSUPP"))


class FolderLock:
    """Makes the folder if it is missing, and holds it until `release`, the end of the process or garbage collection.

    A process takes the lock before it looks at the folder: two processes that look at the same time would both find the
    folder free. The system releases the lock of a process that is killed.

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
        path = folder / ".lock"
        lock = FileLock(path, timeout=0, thread_local=False)
        new: list[Path] = []
        try:
            new += [parent for parent in (folder, *folder.parents) if not parent.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            path.write_text(f"process {os.getpid()} on {platform.node()}, since {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
        except Timeout as error:
            raise ConfigError(
                f"{folder}: is in use by {_holder(path)}. Two processes would spoil the run: wait until that process "
                "ends, or give another run folder"
            ) from error
        except OSError as error:
            if error.errno in _NO_LOCKS:
                _log.warning(
                    "%s: the file system has no locks (%s); do not start a second process there", folder, error
                )
            elif not lock.is_locked:  # else: Windows lets nobody write to a locked file
                files = [parent for parent in (folder, *folder.parents) if os.path.isfile(parent)]
                why = f"{files[0]} is a file; needed: a folder" if files else error.strerror
                raise ConfigError(
                    f"{folder}: cannot be a run folder: {why}. Give another one with --run-dir"
                ) from error
        self.release = weakref.finalize(self, _release, lock, new, os.getpid())
        """Releases the folder, and removes it if the lock made it and it is still empty."""

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Releases the lock if the block ends with an exception."""
        try:
            yield
        except BaseException:
            self.release()
            raise


def _holder(path: Path) -> str:
    """The process that a lock's file names."""
    try:
        return path.read_text(encoding="utf-8").strip() or "another process"
    except OSError:
        return "another process"


def _release(lock: BaseFileLock, new: list[Path], owner: int) -> None:
    if os.getpid() == owner:  # a forked child does not own the folder
        with contextlib.suppress(OSError):  # Windows removes no open file; a used folder is not empty
            Path(lock.lock_file).unlink(missing_ok=True)
            for folder in new:
                folder.rmdir()
        lock.release()
