"""The attacks of the campaign. Each ends a case as "resumed" or "refused", or raises `Lost` with what went wrong.

Resumed: the work has ended, and what it made is the witness's, bit for bit. Refused: it ended with an exit code of the
house and a sentence. A kill must never end in a refusal; an attack on the files may.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import functools
import os
import platform
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from processes import LIMIT, End, Moments, Process
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from works import STORED, Result, Work, on_ranks

from ottava.cli import app as commands
from ottava.train.checkpoint import newest_checkpoint

NOBODY = 65534
SENTENCES = frozenset({2, 3, 4, 5})
"""Exit codes of a refusal."""
OTHER_RANK = 5


class Lost(Exception):
    """A case that ended neither resumed nor refused."""


@dataclass
class Subject:
    """A work, its witness, and the moments of an undisturbed run."""

    work: Work
    expected: Result
    moments: Moments
    finished: Path
    """The witness's folder."""


@dataclass
class Case:
    """One try of an attack."""

    subject: Subject
    folder: Path
    chance: random.Random
    kills: int = 0
    """SIGKILLs that hit."""
    notes: list[str] = field(default_factory=list)
    """What was done, for the report of a loss."""
    starts: int = 0

    @property
    def work(self) -> Work:
        return self.subject.work

    def start(self, **options: Any) -> Process:
        """The next start of the work."""
        self.starts += 1
        return self.work.run(self.folder, self.folder / f"log-{self.starts}", **options)

    def moment(self) -> int:
        """An event at random: one in two inside the files that write, the others anywhere."""
        moments = self.subject.moments
        if moments.stores and self.chance.random() < 0.5:
            return self.chance.choice(moments.stores)
        return self.chance.randint(1, moments.events)

    def finish(self) -> None:
        """The work undisturbed to its end, which must be the witness's."""
        end = together(self) if self.work.ranks > 1 else self.start().wait()
        if end.code != 0:
            raise Lost(f"it does not go on: exit code {end.code}: {end.text[-1500:]}")
        self.compare()

    def compare(self) -> None:
        """Raises unless what is there is the witness's."""
        try:
            difference = self.work.difference(self.folder, self.subject.expected)
        except Exception as error:
            raise Lost(f"what it left cannot be read: {type(error).__name__}: {error}") from error
        if difference:
            raise Lost(f"another result: {difference}")


def refused(end: End) -> bool:
    """Whether it ended with a sentence of the house."""
    return end.code in SENTENCES and "ottava: " in end.text and "Traceback" not in end.text and not end.hung


def must_be_sentence(end: End) -> None:
    """Raises unless the work ended well, or with a sentence."""
    if end.code and not refused(end):
        raise Lost(f"no sentence: exit code {end.code}{', hung' if end.hung else ''}: {end.text[-1500:]}")


# --- processes -------------------------------------------------------------------------------------------------------


def killing(case: Case) -> tuple[Callable[[Process], None], bool]:
    """A SIGKILL exactly at the event, or up to 3 ms later, in whatever C code runs then."""
    case.kills += 1
    if case.chance.random() < 0.5:
        return Process.kill, True
    delay = case.chance.uniform(0, 0.003)

    def later(process: Process) -> None:
        time.sleep(delay)
        process.kill()

    return later, False


def kill(case: Case) -> str:
    """SIGKILL at random moments, two to seven in a row; the same command goes on."""
    for _ in range(case.chance.randint(2, 7)):
        act, pause = killing(case)
        at = case.moment()
        case.notes.append(f"killed at event {at}{'' if pause else ' or soon after'}")
        end = case.start(at=at, act=act, pause=pause).wait()
        if end.code != -signal.SIGKILL:
            case.kills -= 1
            if end.code and not (case.work.makes_a_folder and refused(end)):
                raise Lost(f"after {case.kills} kills it ends with {end.code}: {end.text[-1500:]}")
            break
    if case.work.makes_a_folder:
        return _whole_or_absent(case)
    case.finish()
    return "resumed"


def _whole_or_absent(case: Case) -> str:
    """What has the name of the result is the whole result; else the command makes it."""
    out = case.folder / "out"
    if out.exists() and any(out.iterdir()):
        case.compare()
        return "resumed"
    case.finish()
    return "resumed"


def live(case: Case) -> str:
    """`ottava live` beside a run that is killed and goes on: it answers after each death, and leaves at the end."""
    pages: list[Process] = []
    log = case.folder.with_name(f"{case.folder.name}.live")

    def serve() -> None:
        case.work.prepare()
        commands.main(["live", str(case.folder / "run"), "--no-open"])

    def answers() -> None:
        deadline = time.monotonic() + LIMIT
        while not (said := re.search(r"http://\S+", log.read_text() if log.exists() else "")):
            if time.monotonic() > deadline:
                raise Lost("the page gives no address")
            time.sleep(0.05)
        while True:
            time.sleep(0.6)  # it looks twice a second
            try:
                return urllib.request.urlopen(said[0], timeout=60).close()
            except OSError as error:
                if getattr(error, "code", 0) != 503 or time.monotonic() > deadline:  # 503: not yet, ask again
                    raise Lost(f"the page does not answer: {error}: {log.read_text()[-1500:]}") from error

    try:
        for last in (*[False] * case.chance.randint(1, 3), True):
            if last:
                case.finish()
            else:
                act, pause = killing(case)
                case.kills -= case.start(at=case.moment(), act=act, pause=pause).wait().code != -signal.SIGKILL
            if not pages and (case.folder / "run" / "watch.json").exists():
                pages.append(Process(serve, log))
            if pages:
                answers()
    finally:
        for page in pages:
            os.kill(page.pid, signal.SIGINT)
            end = page.wait(60)
    if end.code:
        raise Lost(f"the page ends with {end.code}: {end.text[-1500:]}")
    case.compare()
    return "resumed"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def together(case: Case, victim: int | None = None, **options: Any) -> End:
    """All ranks at once; the options are the victim's. The end of the rank that ended worst, the victim aside."""
    port, processes = _free_port(), []
    for rank in range(case.work.ranks):
        own = options if rank == victim else {}
        processes.append(case.start(port=port, rank=rank, **own))
    order = sorted(range(case.work.ranks), key=lambda rank: rank != victim)
    ends = {rank: processes[rank].wait() for rank in order}
    if victim is not None and ends[victim].code == -signal.SIGKILL:
        for rank in order[1:]:
            must_be_sentence(ends[rank])
        return ends[victim]
    return max(ends.values(), key=lambda end: (end.code != 0, "ottava: " in end.text))


def kill_rank(case: Case) -> str:
    """SIGKILL of one of two gloo ranks; the other must end with a sentence, and both go on."""
    for _ in range(case.chance.randint(1, 2)):
        act, pause = killing(case)
        victim, at = case.chance.randrange(case.work.ranks), case.moment()
        case.notes.append(f"rank {victim} killed at event {at}")
        end = together(case, victim, at=at, act=act, pause=pause)
        if end.code != -signal.SIGKILL:
            case.kills -= 1
            if end.code:
                raise Lost(f"unkilled it ends with {end.code}: {end.text[-1500:]}")
            break
    case.finish()
    return "resumed"


def elastic(case: Case) -> str:
    """torchrun's agent with `--max-restarts`, and SIGKILL of a worker after some steps: all start again and go on."""
    agent = Process(functools.partial(_launch, case.work, case.folder), case.folder / "log-torchrun")
    metrics = case.folder / "run" / "metrics.jsonl"
    for step in sorted(case.chance.sample(range(6), case.chance.randint(1, 2))):
        while not _ended(agent) and (not metrics.exists() or metrics.read_bytes().count(b"\n") < step):
            time.sleep(0.005)
        time.sleep(case.chance.uniform(0, 0.2))
        if workers := _children(agent.pid):
            victim = case.chance.choice(workers)
            case.notes.append(f"a worker killed after {step} steps")
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                case.kills += 1
            while victim in _children(agent.pid):
                time.sleep(0.02)
    end = agent.wait(ELASTIC_LIMIT)
    if end.code:
        raise Lost(f"torchrun ends with {end.code}: {end.text[-1500:]}")
    case.compare()
    return "resumed"


def _ended(process: Process) -> bool:
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _launch(work: Work, folder: Path) -> None:
    """What `torchrun --standalone --max-restarts=4` does, with workers that are forks."""

    def worker() -> None:
        work.prepare()
        try:
            commands.main(work.words(folder))
        except SystemExit as end:  # the agent waits for an answer of who ends well
            if end.code:
                raise

    config = LaunchConfig(1, 1, work.ranks, run_id=folder.name, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                          max_restarts=4, start_method="fork")  # fmt: skip
    elastic_launch(config, worker)()


ELASTIC_LIMIT = 600.0
NEAR = 0.02
"""Relative distance of losses of 4 ranks from those of 2: their microbatches have scales of their own."""


def other_ranks(case: Case) -> str:
    """SIGKILL of a rank, and the run goes on with 1, 2 or 4 of them, again and again.

    Runs of 1 process with 2 microbatches and of 2 processes have the same bits, but for moments that are cast anew;
    steps from 4 on are only near them.
    """
    exact, counts = 10**9, [2, *(case.chance.choice((1, 2, 4)) for _ in range(case.chance.randint(1, 3)))]
    for number, count in enumerate(counts, start=1):
        one = Case(replace(case.subject, work=on_ranks(case.work, count)), case.folder, case.chance, starts=case.starts)
        found = newest_checkpoint(case.folder / "run" / "checkpoints")[0]
        if count == 4 or (count != 2 and case.work.name.endswith(tuple(STORED))):
            exact = min(exact, found.step if found else 0)
        options: dict[str, Any] = {}
        if number < len(counts):
            act, pause = killing(case)
            options = {"at": one.moment(), "act": act, "pause": pause}
        victim = case.chance.randrange(count) if options else None
        case.notes.append(f"on {count} ranks" + (f", rank {victim} killed at event {options['at']}" if options else ""))
        end = together(one, victim, **options)
        case.starts = one.starts
        case.kills -= bool(options) and end.code != -signal.SIGKILL
        if end.code not in (0, -signal.SIGKILL):
            raise Lost(f"on {count} ranks it ends with {end.code}: {end.text[-1500:]}")
        if end.code == 0:
            break
    got, expected = case.work.result(case.folder), case.subject.expected
    kept = exact >= got["step"]
    for a, b in zip(got["curve"], expected["curve"], strict=True):
        if a != b if a["step"] <= exact else not abs(a["loss"] - b["loss"]) <= NEAR * b["loss"]:
            raise Lost(f"another curve at step {a['step']}, exact to {exact}: {a}, and {b} in the undisturbed run")
    if kept and got["tensors"] != expected["tensors"]:
        raise Lost("other weights or states")
    return "resumed"


def _children(parent: int) -> list[int]:
    """Processes whose parent it is, those that have ended but are not waited for left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, ppid = stat.read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state != "Z":
                found.append(int(stat.parent.name))
    return sorted(found)


def terminate(case: Case) -> str:
    """SIGTERM, one or three of them, as schedulers send: the run saves itself, exits with 143 and names the command."""
    count = case.chance.choice((1, 3))

    def act(process: Process) -> None:
        for _ in range(count):
            os.kill(process.pid, signal.SIGTERM)

    end = case.start(at=(at := case.moment()), act=act).wait()
    case.notes.append(f"{count} SIGTERM at event {at}")
    if end.code == 128 + signal.SIGTERM:
        if "terminated and saved; continue with: ottava train --resume" not in end.text:
            raise Lost(f"143 without the command that continues: {end.text[-800:]}")
        if "Traceback" in end.text:
            raise Lost(f"a traceback: {end.text[-1500:]}")
    elif end.code == 0:  # it had ended; who stops earlier may not say so
        case.compare()
        return "resumed"
    elif end.code != -signal.SIGTERM:
        raise Lost(f"exit code {end.code} after SIGTERM: {end.text[-1500:]}")
    case.finish()
    return "resumed"


def two(case: Case) -> str:
    """A second process in the folder while the first one stands still at a random moment."""
    second: list[End] = []

    def act(process: Process) -> None:
        second.append(case.start().wait())

    at = case.moment()
    case.notes.append(f"the second one starts at event {at} of the first")
    first = case.start(at=at, act=act).wait()
    for end in (first, *second):
        must_be_sentence(end)
    if second and second[0].code and "is in use by process" not in second[0].text:
        raise Lost(f"the second one was refused for another reason: {second[0].text[-800:]}")
    case.finish()
    return "refused" if any(end.code for end in (first, *second)) else "resumed"


def clock(case: Case) -> str:
    """A clock that jumps by years between any two looks at it, and kills."""
    seed = case.chance.random()
    for _ in range(case.chance.randint(1, 2)):
        act, pause = killing(case)
        end = case.start(at=case.moment(), act=act, pause=pause, before=lambda: _jumping(seed)).wait()
        if end.code != -signal.SIGKILL:
            case.kills -= 1
            if end.code:
                raise Lost(f"it ends with {end.code}: {end.text[-1500:]}")
    for path in case.folder.rglob("*"):
        with contextlib.suppress(OSError):
            os.utime(path, times=(case.chance.uniform(0, 4e9),) * 2)
    end = case.start(before=lambda: _jumping(seed + 1)).wait()
    if end.code:
        raise Lost(f"it does not go on: exit code {end.code}: {end.text[-1500:]}")
    case.compare()
    return "resumed"


def _jumping(seed: float) -> None:
    """In a fork: the wall clock jumps; the monotonic clock, which cannot, stays."""
    chance, honest = random.Random(seed), time.time

    class Jumping(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return datetime.datetime.fromtimestamp(chance.uniform(0, 4e9), tz)

    time.time = lambda: honest() + chance.uniform(-1e9, 1e9)
    for name, module in list(sys.modules.items()):
        if name.startswith("ottava") and getattr(module, "datetime", None) is datetime.datetime:
            module.datetime = Jumping  # type: ignore[attr-defined]


# --- disks -----------------------------------------------------------------------------------------------------------


def unable(attack: str) -> str:
    """Why this user or machine cannot run an attack; "" if it can."""
    if attack == "full disk" and not (os.geteuid() == 0 and shutil.which("mount") is not None and _mounts()):
        return "only root may mount a small disk"
    known = attack != "quota" or platform.machine() in WRITES
    return "" if known else f"no numbers of the system's calls for {platform.machine()}"


def _mounts() -> bool:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True).returncode:
            return False
        subprocess.run(["umount", folder], check=True)
    return True


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Callable[[], None]]:
    """A tmpfs of so many bytes in the folder; yields what gives it room."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield lambda: subprocess.run(["mount", "-o", "remount,size=256m", str(folder)], check=True) and None
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def full_disk(case: Case) -> str:
    """A disk with too little room: it ends with a sentence (or the watch says what it lost), and goes on with room."""
    used = sum(path.stat().st_size for path in case.subject.finished.rglob("*") if path.is_file())
    size = max(4096, int(case.chance.uniform(0.0, 1.3) * used))
    case.notes.append(f"a disk of {size} bytes")
    log = case.folder.with_name(case.folder.name + ".logs")
    log.mkdir()
    with small_disk(case.folder, size) as make_room:
        end = case.work.run(case.folder, log / "first").wait()
        must_be_sentence(end)
        make_room()
        if not case.work.makes_a_folder:
            end = case.work.run(case.folder, log / "second").wait()
        elif end.code:
            if (case.folder / "out").exists() and any((case.folder / "out").iterdir()):
                raise Lost("a part of the result has its name")
            end = case.work.run(case.folder, log / "second").wait()
        if end.code:
            raise Lost(f"with room it does not go on: exit code {end.code}: {end.text[-1500:]}")
        case.compare()
    return "resumed"


def short_files(case: Case) -> str:
    """A limit on the size of each file, as a quota sets one; then none."""
    import resource

    sizes = [path.stat().st_size for path in case.subject.finished.rglob("*") if path.is_file()]
    limit = int(case.chance.uniform(0.02, 1.1) * max(sizes))
    case.notes.append(f"files of at most {limit} bytes")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    end = case.start(before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))).wait()
    return _with_room(case, end)


def _with_room(case: Case, end: End) -> str:
    """After an end for want of room, which is over: it goes on."""
    must_be_sentence(end)
    if case.work.makes_a_folder and not end.code:
        case.compare()
    else:
        case.finish()
    return "resumed"


def quota(case: Case) -> str:
    """A quota that is used up at a random moment: from there on every write to a file is EDQUOT; then there is room."""
    case.notes.append(f"no quota left at event {(at := case.moment())}")

    def prepare() -> None:
        signal.signal(signal.SIGUSR1, lambda *_: _use_up())

    end = case.start(at=at, act=lambda process: os.kill(process.pid, signal.SIGUSR1), before=prepare).wait()
    return _with_room(case, end)


WRITES: Mapping[str, Sequence[int]] = {"x86_64": (1, 18, 20, 296), "aarch64": (64, 68, 66, 70)}
"""Numbers of write, pwrite64, writev and pwritev."""


def _use_up() -> None:
    """In a fork: the kernel answers each of these calls of all threads with EDQUOT, but for stdout and stderr."""

    def step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("HBBI", code, then, otherwise, value)

    numbers = WRITES[platform.machine()]
    tests = [step(0x15, number, then=len(numbers) - i) for i, number in enumerate(numbers)]  # equal: to its file
    allow, refuse = step(0x06, 0x7FFF0000), step(0x06, 0x00050000 | errno.EDQUOT)
    filters = b"".join([step(0x20, 0), *tests, allow, step(0x20, 16), step(0x25, 2, otherwise=1), refuse, allow])
    kept = ctypes.create_string_buffer(filters)
    program = struct.pack("HxxxxxxP", len(filters) // 8, ctypes.addressof(kept))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges
    if libc.syscall({"x86_64": 317, "aarch64": 277}[platform.machine()], 1, 1, program):  # seccomp, every thread
        raise OSError(ctypes.get_errno(), "seccomp")


def _become_nobody() -> None:
    if os.geteuid() == 0:  # root may write everywhere
        os.setegid(NOBODY)
        os.seteuid(NOBODY)


def read_only(case: Case) -> str:
    """Folders that lose their permission to write, before the start or in its middle; then they have it again."""
    at = case.chance.choice((0, case.moment()))
    case.notes.append(f"read-only from event {at} on")

    def change(mode: int) -> None:
        for folder in [case.folder, *(path for path in case.folder.rglob("*") if path.is_dir())]:
            folder.chmod(mode)

    case.folder.chmod(0o777)
    os.umask(0)
    if not at:
        change(0o555)
    try:
        log = case.folder.with_name(case.folder.name + ".log")
        log.touch()
        log.chmod(0o666)
        end = case.work.run(case.folder, log, before=_become_nobody, at=at, act=lambda _: change(0o555)).wait()
    finally:
        change(0o777)
        os.umask(0o022)
    must_be_sentence(end)
    if case.work.makes_a_folder and not end.code:
        case.compare()
        return "resumed"
    case.finish()
    return "resumed" if not end.code else "refused"


# --- files -----------------------------------------------------------------------------------------------------------


def harm(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """One bit flipped, the end cut off, a block of zeros as a torn sector leaves it, or nothing left."""
    match chance.randrange(5) if data else 4:
        case 0 | 1:
            at, bit = chance.randrange(len(data)), chance.randrange(8)
            return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], f"bit {bit} of byte {at} flipped"
        case 2:
            return data[: (at := chance.randrange(len(data)))], f"cut to {at} bytes"
        case 3:
            at = chance.randrange(0, len(data), 512) if len(data) > 512 else 0
            return data[:at] + bytes(len(data[at : at + 512])) + data[at + 512 :], f"512 bytes from {at} on are 0"
        case _:
            return b"", "emptied"


def damage(case: Case) -> str:
    """A killed run, one to be exported, or shards to be joined, of which a file is damaged: bit for bit, or refused."""
    if case.work.source is not None:
        shutil.copytree(case.work.source, case.folder / "source")
        return _harmed(case, [p for p in (case.folder / "source").rglob("*") if p.name.endswith(HASHED)])
    act, pause = killing(case)
    events = case.subject.moments.events
    end = case.start(at=int(case.chance.uniform(0.3, 1.0) * events), act=act, pause=pause).wait()
    case.kills -= end.code != -signal.SIGKILL
    files = sorted(
        p for p in case.folder.rglob("*") if p.is_file() and not p.name.startswith((".", "log-", "state", "done"))
    )
    if not files:
        case.finish()
        return "resumed"
    return _harmed(case, files)


HASHED = (".safetensors", "ottava.json")
"""Files of a checkpoint; a hash lies within or beside. Others' files have none, and a flipped bit is another weight."""


def _harmed(case: Case, files: list[Path]) -> str:
    # by kinds, so that many files of one kind hide no other
    kinds = sorted({path.suffix for path in files})
    kind = case.chance.choice(kinds)
    path = case.chance.choice([path for path in files if path.suffix == kind])
    harmed, note = harm(path.read_bytes(), case.chance)
    path.write_bytes(harmed)
    case.notes.append(f"{path.relative_to(case.folder)}: {note}")
    end = case.start().wait()
    must_be_sentence(end)
    if end.code:
        return "refused"
    case.compare()
    return "resumed"


ATTACKS: Mapping[str, Callable[[Case], str]] = {
    "kill": kill,
    "kill a rank": kill_rank,
    "torchrun": elastic,
    "other ranks": other_ranks,
    "SIGTERM": terminate,
    "two processes": two,
    "clock": clock,
    "live": live,
    "full disk": full_disk,
    "short files": short_files,
    "quota": quota,
    "read-only": read_only,
    "damage": damage,
}
WEIGHTS: Mapping[str, int] = {"kill": 12, "damage": 3}
"""Shares of the cases; 1 for the others."""


def fits(attack: str, work: Work) -> bool:
    """Whether an attack is for this work."""
    train = work.name.startswith("train")
    if attack == "other ranks":
        return "elastic" in work.name
    if attack in ("kill a rank", "torchrun"):
        return work.ranks > 1
    if work.ranks > 1:
        return False
    if attack in ("SIGTERM", "clock", "two processes"):
        return train
    if attack == "live":
        return work.name in ("train watched", "watch a script")
    if attack == "damage":
        return train or work.name.startswith("watch") or work.source is not None
    return True
