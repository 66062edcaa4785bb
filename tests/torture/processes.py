"""Runs a command in a fork of this process, and meets it at a moment of its work that a number names.

A fork costs 20 ms where a start of Python with torch costs seconds. The moment is a count of Python's profile events
(calls and returns, of C functions too), so a seed finds the same moment again. There the fork either waits, so that its
parent acts at exactly that point, or goes on, so that a kill hits it in the middle of C code.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

LIMIT = 240.0
"""Seconds until a process counts as hung."""


@dataclass(frozen=True)
class End:
    """How a process ended."""

    code: int
    """Its exit code; negative: the signal."""
    text: str
    """What it wrote to stdout and stderr."""
    met: bool
    """Whether it came to its moment."""
    hung: bool = False


@dataclass
class Moments:
    """Counts of profile events of a whole run."""

    events: int = 0
    stores: list[int] = field(default_factory=list)
    """Those inside the files that write."""


class _Counter:
    """A profile function that stops at one event."""

    def __init__(self, at: int, met: Callable[[], None]) -> None:
        self.left, self.met = at, met

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            self.met()


class _Recorder:
    """A profile function that counts all events, and notes those inside some files."""

    def __init__(self, files: Collection[str]) -> None:
        self.moments, self.files = Moments(), files

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        self.moments.events += 1
        if frame.f_code.co_filename in self.files:
            self.moments.stores.append(self.moments.events)


class Process:
    """A fork that runs `work`.

    Args:
        work: what it does; its exit code is that of SystemExit, else 0, or 1 after an exception.
        log: file of what it writes to stdout and stderr.
        at: number of the profile event at which parent and fork meet; 0: never.
        act: what the parent does there.
        pause: the fork waits until `act` is over.
        record: files whose events are noted; the fork writes its `Moments` beside the log.
    """

    def __init__(
        self,
        work: Callable[[], None],
        log: Path,
        *,
        at: int = 0,
        act: Callable[[Process], None] | None = None,
        pause: bool = True,
        record: Collection[str] = (),
    ) -> None:
        self.log, self.act, self._record = log, act, record
        self._meet, meet = os.pipe()
        answer, self._answer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._meet)
            os.close(self._answer)

            def met() -> None:
                os.write(meet, b"m")
                if pause:
                    os.read(answer, 1)

            self._become(work, at, met)
        os.close(meet)
        os.close(answer)

    def _become(self, work: Callable[[], None], at: int, met: Callable[[], None]) -> None:
        """The fork's own part; it does not return."""
        code = 1
        try:
            for number, (path, flags) in enumerate(((os.devnull, os.O_RDONLY), *[(self.log, os.O_WRONLY)] * 2)):
                file = os.open(path, flags | (os.O_APPEND | os.O_CREAT if number else 0), 0o666)
                os.dup2(file, number)
                os.close(file)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            recorder = _Recorder(self._record)
            sys.setprofile(recorder if self._record else _Counter(at, met) if at else None)
            try:
                work()
                code = 0
            finally:
                sys.setprofile(None)
                if self._record:
                    self.log.with_suffix(".moments").write_text(json.dumps(vars(recorder.moments)))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def wait(self, limit: float = LIMIT) -> End:
        """Its end. Meets it first, if it comes to its moment."""
        met = hung = False
        deadline = time.monotonic() + limit
        while True:
            ready, _, _ = select.select([self._meet], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                hung = True
                os.kill(self.pid, signal.SIGKILL)
            elif os.read(self._meet, 1):
                met = True
                if self.act is not None:
                    self.act(self)
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._answer, b"a")
                continue
            break
        _, status = os.waitpid(self.pid, 0)
        os.close(self._meet)
        os.close(self._answer)
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return End(os.waitstatus_to_exitcode(status), text, met, hung)

    def moments(self) -> Moments:
        """What a recording process has counted."""
        return Moments(**json.loads(self.log.with_suffix(".moments").read_text()))

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)


def settle() -> None:
    """Called once before the forks: what is there now is shared with them and not searched for garbage."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
