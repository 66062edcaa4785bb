"""Faults for each attack: planted in every fork but the witness, an attack must report them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Fault:
    """A fault of ottava's that an attack must find."""

    attack: str
    name: str
    plant: Callable[[], None]
    works: Sequence[str] = ("train",)
    """Beginnings of the names of works that can show it."""
    tries: int = 40

    def fits(self, work: str) -> bool:
        """Whether this work can show it."""
        return work.startswith(tuple(self.works))


def replaces(name: str, value: Any) -> Callable[[], None]:
    """Puts a value in the place of "module:attribute", and of what other modules imported under that name."""

    def plant() -> None:
        import importlib

        module, _, attribute = name.partition(":")
        owner: Any = importlib.import_module(module)
        *path, last = attribute.split(".")
        for part in path:
            owner = getattr(owner, part)
        before = getattr(owner, last)
        setattr(owner, last, value)
        for other in [m for n, m in sys.modules.items() if n.startswith("ottava")]:
            if vars(other).get(last) is before:
                setattr(other, last, value)

    return plant


@contextlib.contextmanager
def folder_in_place(folder: Path) -> Iterator[Path]:
    """A writer without a scratch folder."""
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def forgets_optimizer(*_: Any) -> None:
    """A resumption without the states of the optimizer."""


def forgets_random(states: Any, device: torch.device) -> None:
    """A resumption with random generators of its own."""
    torch.manual_seed(time.time_ns() % 2**31)


def loses_lines(folder: Any, record: Any) -> None:
    """A writer that passes over a full disk."""
    with contextlib.suppress(OSError), folder._metrics.open("ab") as stream:
        stream.write(f"{record.to_json()}\n".encode())


class NoLock:
    """A lock that holds nothing."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.release: Callable[[], None] = lambda: None

    def released_on_error(self) -> contextlib.AbstractContextManager[None]:
        """As FolderLock's."""
        return contextlib.nullcontext()


class Raises:
    """A lock that takes an error of the system for one of its own."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".lock").write_text("")
        except OSError as error:
            raise RuntimeError("cannot lock") from error
        self.release: Callable[[], None] = lambda: None

    released_on_error = NoLock.released_on_error


def tells_time(corpus: Any, **sizes: Any) -> Any:
    """Batches whose order depends on the clock."""
    from ottava.train.data import ByteCorpus

    return ByteCorpus.honest(corpus, **{**sizes, "seed": int(time.time()) % 2**31})  # type: ignore[attr-defined]


def plant_clock() -> None:
    """`tells_time` in the place of the corpus's own batches."""
    from ottava.train.data import ByteCorpus

    ByteCorpus.honest = ByteCorpus.batch  # type: ignore[attr-defined]
    ByteCorpus.batch = tells_time  # type: ignore[method-assign]


def plant_belief() -> None:
    """A reader that takes the hash that a checkpoint states for the hash that it has; the writer is honest."""
    from ottava.train import checkpoint

    honest = checkpoint._digest
    checkpoint._digest = lambda header, tensors: header.get("sha256") or honest(header, tensors)


def plant_one_run() -> None:
    """A page that follows a run which only grows."""
    from ottava.report import live

    live.Following.poll = live.Following._poll  # type: ignore[method-assign]


@contextlib.contextmanager
def deaf() -> Iterator[Callable[[], None]]:
    """A process that leaves at once at SIGTERM, as if it were done."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0 if os.getpid() else 1))
    yield lambda: None


FORGETS = ("a resumption forgets the optimizer", replaces("ottava.train.checkpoint:load_optimizer", forgets_optimizer))
FAULTS: Sequence[Fault] = (
    Fault("kill", *FORGETS),
    Fault(
        "kill",
        "a resumption forgets random generators",
        replaces("ottava.train.loop:_set_random_states", forgets_random),
        works=("train bf16, stochastic", "train ms_eden"),
    ),
    Fault(
        "kill",
        "folders are written in place",
        replaces("ottava.base.files:replacing_folder", folder_in_place),
        works=("export", "import", "join"),
    ),
    Fault("kill a rank", *FORGETS),
    Fault("torchrun", *FORGETS, tries=8),
    Fault("other ranks", *FORGETS),
    Fault("live", "a run that is resumed ends its page", plant_one_run, works=("train watched", "watch")),
    Fault("SIGTERM", "the process leaves without a checkpoint", replaces("ottava.cli.console:stop_on_interrupt", deaf)),
    Fault("two processes", "the lock holds nothing", replaces("ottava.train.run_folder:FolderLock", NoLock)),
    Fault("clock", "the clock orders the batches", plant_clock),
    Fault("full disk", "a full disk loses lines", replaces("ottava.train.run_folder:RunFolder.append", loses_lines)),
    Fault("short files", "a full disk loses lines", replaces("ottava.train.run_folder:RunFolder.append", loses_lines)),
    Fault("quota", "a used up quota loses lines", replaces("ottava.train.run_folder:RunFolder.append", loses_lines)),
    Fault("read-only", "a refusal of the system is a bug", replaces("ottava.train.run_folder:FolderLock", Raises)),
    Fault("damage", "a checkpoint's hash is not compared", plant_belief),
)
