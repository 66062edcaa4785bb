"""`python ...` in a process of its own that starts at once: a fork of an interpreter that has torch imported.

Starting Python with torch costs seconds of CPU time, and the command line is tested by many such starts. Here they cost
one a test run. The process is as real as another: its own id, signals, exit code, folder, environment and files. Tests
of what an import costs or does start Python the usual way.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

TESTS = Path(__file__).resolve().parent
RARELY = (50_000, 20, 100)
"""Thresholds of the garbage collector: some seventy times as many new objects as Python's own before it looks."""
PRELOADED = [
    "torch",
    "torch._dynamo",
    "pyarrow.parquet",
    "rich.console",
    "ottava.cli.app",
    "ottava.train.loop",
    "ottava.nn",
]
PRELOADED += ["ottava.watching.session", "ottava.record.reader", "ottava.train.demo"]
PRELOADED += ["torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor.parallel"]


class Warm:
    """A process that runs `python *words`; `words[0]` is `-m`, `-c` or a script."""

    def __init__(
        self, words: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None, merge: bool = False
    ) -> None:
        self.words = [str(word) for word in words]
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        folder = Path(self._folder.name)
        self._out, self._err = folder / "out", folder / "out" if merge else folder / "err"
        for path in (self._out, self._err):
            path.touch()
        place = os.fspath(cwd or Path.cwd())
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)  # imported when the first process starts
        given = dict(os.environ if env is None else env)
        self._process = context.Process(target=become, args=(self.words, place, given, str(self._out), str(self._err)))
        self._process.start()
        self.pid: int = self._process.pid or 0

    @property
    def stdout(self) -> str:
        """What it has written until now."""
        return self._out.read_text(encoding="utf-8", errors="replace")

    @property
    def stderr(self) -> str:
        """What it has written until now."""
        return self._err.read_text(encoding="utf-8", errors="replace")

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_for(self, text: str, timeout: float = 600) -> None:
        """Wait until it has written this to stdout or stderr."""
        deadline = time.monotonic() + timeout
        while text not in self.stdout + self.stderr:
            assert self.poll() is None, f"it ended with {self.poll()}, without {text!r}: {self.stdout}{self.stderr}"
            assert time.monotonic() < deadline, f"no {text!r} in {timeout} s: {self.stdout}{self.stderr}"
            time.sleep(0.02)

    def wait(self, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Its end; kills it and raises TimeoutExpired when that does not come."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise subprocess.TimeoutExpired(self.words, timeout, self.stdout, self.stderr)
        return subprocess.CompletedProcess(self.words, self._process.exitcode, self.stdout, self.stderr)


def run(words: Sequence[str], timeout: float = 600, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python *words` to its end."""
    return Warm(words, **options).wait(timeout)


def cpu_seconds() -> float:
    """CPU time of the processes started here that have ended: they are children of the server that forks them."""
    server = getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)
    if server is None or sys.platform != "linux":
        return 0.0
    fields = Path(f"/proc/{server}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")  # cutime and cstime; the state is fields[0]


def look_for_garbage_rarely() -> None:
    """What a fork inherits is no garbage, and a search through it would copy its pages."""
    gc.freeze()
    gc.set_threshold(*RARELY)


def start_ranks(function: Callable[..., None], arguments: tuple[Any, ...], size: int) -> Any:
    """function(rank, *arguments) in `size` processes, as torch.multiprocessing.spawn(..., join=False) starts them."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    return torch.multiprocessing.start_processes(function, arguments, size, join=False, start_method="forkserver")


def become(words: list[str], folder: str, environment: dict[str, str], out: str, err: str) -> None:
    """Turn the forked process into `python *words`."""
    for number, (path, flags) in enumerate(((os.devnull, os.O_RDONLY), (out, os.O_WRONLY), (err, os.O_WRONLY))):
        file = os.open(path, flags | (os.O_APPEND if number else 0))
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0)  # noqa: SIM115  # they end with the process
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    look_for_garbage_rarely()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
    code: object = 0
    try:
        execute(words)
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__  # as Python does
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def execute(words: list[str]) -> None:
    """Run a script, `-c code` or `-m module` in a new `__main__`, with the paths that Python would give it."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    kind = words[0] if words[0] in ("-m", "-c") else "script"
    first = os.path.dirname(os.path.abspath(words[0])) if kind == "script" else os.getcwd() if kind == "-m" else ""
    own = {str(TESTS.parent), first, ""}
    sys.path[:] = [first, *(path for path in sys.path if path not in own and not path.startswith(str(TESTS)))]
    sys.argv = words if kind == "script" else [kind, *words[2:]]
    if kind == "-m":
        runpy._run_module_as_main(words[1], alter_argv=True)  # type: ignore[attr-defined]
    elif kind == "-c":
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        main.__file__ = words[0]
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)
