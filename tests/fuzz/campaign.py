"""Damages files of every kind, reads them, and counts what became of it: `./x fuzz`.

    ./x fuzz [--cases N] [--seconds T] [--seed S] [--only PARSER] [--case I] [--json FILE]

Case I of a parser follows from the seed, the parser's name and I alone: `--only PARSER --case I` repeats it and prints
its traceback. An answer or an error of the house is right. Wrong are: an error that is not raised by ottava itself or
has no exit code for the user (`stray`), more than SECONDS of CPU time (`hang`), more than MEMORY beyond what the
process had (`memory`), a signal (`crash`), a file written outside of its folder or a process started (`outside`).

Each batch of cases runs in a fork, under limits of the system; an audit hook sees every file that Python opens.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import gc
import json
import linecache
import logging
import math
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import ottava
from fuzz.parsers import PARSERS, Parser
from ottava.base.text import progress
from ottava.cli.app import exit_code

SECONDS = 10
"""CPU time of one case."""
MEMORY = 2 << 30
"""Address space of one case, beside that of the process."""
BATCH = 100
MEMORY_DISK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A disk takes milliseconds for a file, a tenth of a case's time is reading it."""
WRONG = ("stray", "hang", "memory", "crash", "outside")
_SOURCE = str(Path(ottava.__file__).parent)
_FORBIDDEN = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "socket.connect",
    "pty.spawn",
)
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
_LONGEST = 8000
"""Characters of a message."""


class Hang(BaseException):
    """A case takes too long."""


class Guard:
    """Sees what the process does to files; while `inside` is set, everything outside of it is noted."""

    def __init__(self) -> None:
        self.inside: str | None = None
        self.found: list[str] = []
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.inside is None:
            return
        if event in _FORBIDDEN:
            self.found.append(f"{event} {str(arguments)[:200]}")
        elif event == "open":
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not isinstance(path, int):
                self._see(event, path)
        elif event in _CHANGES:
            self._see(event, arguments[1] if event in ("os.rename", "os.link", "os.symlink") else arguments[0])

    def _see(self, event: str, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        folder, name = os.path.split(os.fsdecode(path))
        followed = event in ("open", "os.truncate", "os.chmod")  # the others change a link itself
        place = os.path.realpath(os.fsdecode(path)) if followed else os.path.join(os.path.realpath(folder), name)
        if place != self.inside and not place.startswith((f"{self.inside}/", "/dev/null")):
            self.found.append(f"{event} {place}")


def of_the_house(error: BaseException) -> bool:
    """Whether a user reads a sentence of ours: an exit code, words, and raised by a line of ottava, or by the system
    about a file that it names."""
    if not isinstance(error, Exception) or exit_code(error) == 70 or not 0 < len(str(error).strip()) < _LONGEST:
        return False
    if isinstance(error, OSError) and error.filename is not None:
        return True
    if type(error).__module__.startswith(("click", "typer")):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    code, line = frames[-1][0].f_code.co_filename, linecache.getline(frames[-1][0].f_code.co_filename, frames[-1][1])
    return code.startswith(_SOURCE) and line.strip().startswith("raise ")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def judge(error: BaseException | None, guard: Guard) -> str:
    """The outcome of a case."""
    if guard.found:
        return "outside"
    if error is None:
        return "read"
    if isinstance(error, Hang):
        return "hang"
    if any(isinstance(one, MemoryError) or "t allocate memory" in str(one) for one in causes(error)):
        return "memory"
    return "refused" if of_the_house(error) else "stray"


def play(parser: Parser, seed: int, number: int, box: Path, guard: Guard) -> tuple[str, BaseException | None]:
    """One case. `box` holds the whole files in `whole`."""
    chance = Random(f"{seed} {parser.name} {number}")
    case = box / "case"
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(box / "whole", case / "in")
    with contextlib.suppress(Exception):  # what a first change has damaged, a second may not understand
        parser.change(case / "in", chance)
    before = sorted(box.iterdir())
    guard.inside, guard.found = str(case.resolve()) if parser.guarded else None, []
    error: BaseException | None = None
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, 6 * SECONDS)
        parser.read(case / "in", case / "out")
    except BaseException as caught:
        error = caught
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        guard.inside = None
    if sorted(box.iterdir()) != before or any(box.rglob("CANARY")) or list(Path.cwd().iterdir()):
        guard.found.append("a new file beside the case")
    return judge(error, guard), error


def _alarm(*_: Any) -> None:
    raise Hang


def prepare(parser: Parser, box: Path) -> None:
    """Makes the whole files, and reads them once: they must be right."""
    (box / "whole").mkdir(parents=True)
    parser.make(box / "whole")
    shutil.copytree(box / "whole", box / "case" / "in")
    parser.read(box / "case" / "in", box / "case" / "out")
    shutil.rmtree(box / "case")


def child(parser: Parser, seed: int, numbers: Sequence[int], box: Path, pipe: int) -> None:
    """Plays cases, and writes a line about each to the pipe."""
    faulthandler.disable()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, _alarm)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + MEMORY, pages + MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 20, 256 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    empty = box / "cwd"
    empty.mkdir(exist_ok=True)
    os.chdir(empty)
    if parser.guarded:
        os.environ.update(HOME=str(empty), HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    guard = Guard()
    for number in numbers:
        os.write(pipe, f"{number}\n".encode())
        outcome, error = play(parser, seed, number, box, guard)
        about = "" if outcome in ("read", "refused") else told(error, guard)
        kind = type(error).__name__ if error is not None else ""
        os.write(pipe, (json.dumps([number, outcome, kind, about]) + "\n").encode())


def told(error: BaseException | None, guard: Guard) -> str:
    """Where it happened, and what."""
    if guard.found:
        return "; ".join(guard.found[:3])
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    ours = next((f for f in reversed(frames) if f.filename.startswith(_SOURCE)), frames[-1])
    said = repr(str(error))[:160]
    return f"{Path(ours.filename).name}:{ours.lineno} {type(error).__name__} {said}"


def batch(parser: Parser, seed: int, numbers: Sequence[int], box: Path) -> Iterator[list[Any]]:
    """The lines of a fork; a case that ends the process is a crash."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            child(parser, seed, numbers, box, writing)
            code = 0
        except BaseException:
            with contextlib.suppress(BaseException):
                os.write(writing, (json.dumps([-1, "stray", "harness", traceback.format_exc()[-600:]]) + "\n").encode())
        finally:
            os._exit(code)
    os.close(writing)
    current, rest = None, b""
    while True:
        ready, _, _ = select.select([reading], [], [], 12 * SECONDS)
        data = os.read(reading, 1 << 16) if ready else b""
        if not ready:
            os.kill(pid, signal.SIGKILL)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            value = json.loads(line)
            current = value if isinstance(value, int) else None
            if current is None:
                yield value
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    if current is not None:
        why = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
        yield [current, "hang" if why == "signal 9" else "crash", why, why]


def campaign(parser: Parser, cases: int, seed: int, first: int = 0, seconds: float = math.inf) -> dict[str, Any]:
    """Cases of one parser, all or as many as the seconds allow: how they ended, and the first of each wrong kind."""
    began = time.monotonic()
    counts, kinds = collections.Counter[str](), collections.Counter[str]()
    wrong: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=MEMORY_DISK) as folder:
        box = Path(folder).resolve()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepare(parser, box)
        gc.collect()
        gc.freeze()
        number = first
        while number < first + cases and time.monotonic() - began < seconds:
            numbers = range(number, min(number + BATCH, first + cases))
            number = numbers[-1] + 1
            for case, outcome, kind, about in batch(parser, seed, numbers, box):
                counts[outcome] += 1
                kinds[kind] += outcome == "refused"
                if outcome in WRONG:
                    found = wrong.setdefault(f"{outcome}: {about.partition(' ')[0]} {kind}", {"case": case, "times": 0})
                    found["times"] += 1
                    found.setdefault("about", about)
                if kind.startswith(("signal", "exit")):  # the rest in a new fork
                    number = case + 1
    played = sum(counts.values())
    return {
        "parser": parser.name, "cases": played, "seed": seed, "seconds": round(time.monotonic() - began, 1),
        **{name: counts[name] for name in ("read", "refused", *WRONG)},
        "errors": {kind: count for kind, count in kinds.most_common() if count}, "found": wrong,
    }  # fmt: skip


def repeat(parser: Parser, seed: int, number: int) -> None:
    """One case in this process, with its traceback."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-")).resolve()
    prepare(parser, folder)
    (folder / "cwd").mkdir()
    os.chdir(folder / "cwd")
    for alarm in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(alarm, _alarm)
    guard = Guard()
    outcome, error = play(parser, seed, number, folder, guard)
    if error is not None:
        traceback.print_exception(error)
    print(f"{outcome} {'; '.join(guard.found)}\nthe files: {folder / 'case' / 'in'}")


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    asked = argparse.ArgumentParser(prog="./x fuzz", description="Damages files of every kind and reads them.")
    asked.add_argument("--cases", type=int, default=10_000, help="of each parser [10000]")
    asked.add_argument("--seconds", type=float, default=math.inf, help="then a parser begins no more cases [no limit]")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--only", action="append", metavar="PARSER", help="; ".join(one.name for one in PARSERS))
    asked.add_argument("--case", type=int, help="repeat this one")
    asked.add_argument("--json", type=Path, metavar="FILE", help="write the table")
    given = asked.parse_args(words)
    chosen = [one for one in PARSERS if not given.only or any(word in one.name for word in given.only)]
    if not chosen:
        asked.error(f"--only {given.only}: known are {', '.join(one.name for one in PARSERS)}")
    torch.set_num_threads(1)
    if given.case is not None:
        repeat(chosen[0], given.seed, given.case)
        return 0
    rows = []
    made = ((parser, campaign(parser, given.cases, given.seed, seconds=given.seconds)) for parser in chosen)
    for parser, row in progress(made, "fuzzing", total=len(chosen), prints=True):
        rows.append(row)
        counts = " ".join(f"{name} {row[name]}" for name in ("read", "refused", *WRONG) if row[name])
        print(f"{parser.name:20} {row['cases']:6} cases {row['seconds']:7.1f} s  {counts}", flush=True)
        for name, found in row["found"].items():
            print(f"    {found['times']} x {name}: case {found['case']}: {found['about']}", flush=True)
        if given.json is not None:
            limit = f" --seconds {given.seconds:g}" if given.seconds < math.inf else ""
            given.json.write_text(json.dumps({"command": f"./x fuzz --cases {given.cases}{limit} --seed {given.seed}",
                                              "ottava": ottava.__version__, "torch": torch.__version__,
                                              "parsers": rows}, indent=1) + "\n")  # fmt: skip
    return int(any(row["found"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
