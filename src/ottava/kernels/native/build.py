"""Compiles a C++ file of `src` on first use, with the system's compiler, and keeps the library in a cache.

A plain C interface, called through ctypes: no torch headers, so a file takes a second and not half a minute, and the
wheel stays pure Python. Nothing here raises: where no library can be had, `Built.reason` says why, kernels repeat it in
their refusals, and everything runs on the reference.

    OTTAVA_NATIVE=0    switches native kernels off
    OTTAVA_CACHE=DIR   where libraries are kept; else the user's cache folder
    CXX="clang++"      the compiler; else the first of c++, g++, clang++

A library's file name is NAME-KEY-FLAGS-CONTENT: KEY is a hash of all that decides what the compiler makes (source,
headers, compiler, flags, CPU, versions), CONTENT one of the library itself. So one rename publishes it, two processes
that build it at once do no harm, and a damaged file is not loaded but built anew. A cache that others can write to is
not used.

A new library is first loaded by a process of its own (`native.trial`), and published only then: one that ends that
process, or is cut off, is not used. Where NAME_trial.py lies in this folder, that process also runs it: one with an
instruction that this CPU does not have, or that computes something else, is not used either. NAME-KEY-failed-CONTENT
keeps what was wrong, so that the next process does not build it again; not so of one that could not be loaded, since
the next may be whole.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

_LOGGER = logging.getLogger(__name__)
SOURCES = Path(__file__).parent / "src"
"""Folder of our own .cpp and .h files."""
_LOADS = Path(__file__).parent / "trial.py"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    # not -O3, which takes longer: what it unrolls and peels is written so here
    *("-O2", "-ftree-vectorize", "-std=c++17", "-shared", "-fPIC"),
    "-ffp-contract=off",  # a fused multiply-add would round once
)
_EXTRAS = (  # the first that the compiler takes; Apple's clang has no OpenMP, and -mcpu where others have -march
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-fopenmp",),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)
_ROOM = 16 << 20  # bytes on a disk: a compiler that runs out of them would be taken for one that wants fewer flags
_TIMEOUT = 120  # seconds
_TRIAL_TIMEOUT = 20
_OWN_FAULTS = ("SIGILL", "SIGSEGV", "SIGFPE", "SIGABRT", "SIGTRAP")
"""Signals that a library brings on itself. Others come from outside (SIGBUS: from a file that is shorter than it says),
and the next process may try again."""
_NOT_LOADED = 3  # the exit code of trial.py


@dataclass(frozen=True)
class BuildSettings:
    """Where from and where to; `from_environment` reads them from the process's variables."""

    enabled: bool = True
    """False: native kernels are switched off."""
    compiler: str = ""
    """Command of the compiler, arguments allowed; "": the first that is found."""
    cache: Path | None = None
    """Folder of the libraries; None: build into a folder that goes when they are loaded."""
    sources: Path = field(default=SOURCES)
    """Folder of the .cpp and .h files; NAME_trial.py lies in the folder above."""


class Built(NamedTuple):
    """A loaded library, or why there is none."""

    library: ctypes.CDLL | None
    """Its functions, as ctypes has them."""
    reason: str
    """Why there is no library; "" if there is one."""
    seconds: float = 0.0
    """Spent compiling; 0 if it came from the cache."""
    flags: tuple[str, ...] = ()
    """What it was compiled with."""
    note: str = ""
    """What is not as it should be: a cache that cannot be used."""
    key: str = ""
    """A hash of all that decides what the compiler makes; "" if nothing was compiled."""
    failed_trial: bool = False
    """Whether there is no library because it crashed, or computed something else, when it was tried; now or before."""

    @property
    def threads(self) -> bool:
        """Whether it can use more than one thread."""
        return "-fopenmp" in self.flags


def from_environment(variables: Mapping[str, str] | None = None) -> BuildSettings:
    """OTTAVA_NATIVE, CXX and OTTAVA_CACHE as settings; None reads the process's own variables.

    Example:
        >>> settings = from_environment({"OTTAVA_NATIVE": "0", "OTTAVA_CACHE": "kept"})
        >>> settings.enabled, settings.cache.name
        (False, 'kept')
    """
    found = os.environ if variables is None else variables
    if given := found.get("OTTAVA_CACHE"):
        cache: Path | None = Path(given)
    elif given := found.get("XDG_CACHE_HOME"):
        cache = Path(given) / "ottava"
    else:
        try:
            home = Path.home()
        except RuntimeError:  # a user id without an entry in the password file
            cache = None
        else:
            cache = home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "ottava"
    enabled = found.get("OTTAVA_NATIVE", "1").strip().lower() not in ("0", "false", "off", "no")
    return BuildSettings(enabled, found.get("CXX", ""), cache)


@functools.lru_cache(maxsize=32)
def load(name: str, declare: Callable[[ctypes.CDLL], None] | None = None, variant: str = "") -> Built:
    """The library of src/NAME.cpp, built if need be; asked once a process, name and variant.

    What is lost without it, or built anew each time, is logged once. Where another thread is building it, as `begin`
    has it, that one is waited for.

    Args:
        declare: gives its functions their argument types.
        variant: a macro, "NAME=VALUE", with which the file is compiled to a library of its own: one for bf16 and one
            for fp32 are each there in half the time that one for both takes, and few programs want both.

    Example:
        >>> load("nothing_of_that_name").library is None
        True
    """
    built = _once(name, variant, from_environment(), os.getpid())()
    if built.library is None:
        _LOGGER.info("%s.cpp: %s. What it would have run takes the slower reference.", name, built.reason)
    elif declare is not None:
        declare(built.library)
    if built.note:
        _LOGGER.info("%s", built.note)
    return built


def begin(name: str, variant: str = "") -> None:
    """Builds in the background what `load` will ask for, and returns at once; a second call changes nothing.

    Edge cases: what goes wrong is what `load` reports when it is asked. A process that ends meanwhile waits for the
    compiler, so that nothing half made stays in the cache.

    Example:
        >>> begin("quantize")
        >>> begin("gemm")  # at the same time
        >>> load("quantize").seconds < 60  # waits for this one only
        True
    """
    _in_background(_once(name, variant, from_environment(), os.getpid()))


@functools.lru_cache(maxsize=64)
def _once(name: str, variant: str, settings: BuildSettings, process: int) -> Callable[[], Built]:
    """A build made by the first who calls it, while others wait; a forked process has no thread of its parent's."""
    lock = threading.Lock()
    made: list[Built] = []

    def built() -> Built:
        with lock:
            if not made:
                made.append(build(name, settings, variant))
            return made[0]

    return built


@functools.lru_cache(maxsize=64)
def _in_background(built: Callable[[], Built]) -> None:
    try:
        threading.Thread(target=built, name="ottava builds").start()
    except RuntimeError:  # the interpreter is ending, or there are too many threads: `load` builds it itself
        return


def build(name: str, settings: BuildSettings, variant: str = "") -> Built:
    """As `load`, under settings of one's own and without remembering.

    Edge cases: nothing is raised. No compiler, a compile error, native kernels switched off: `reason`. A cache that
    cannot be written to or that others may write to: compiled for this process only, and `note` says so.
    """
    if not settings.enabled:
        return Built(None, "switched off by OTTAVA_NATIVE=0")
    try:
        return _build(name, settings, variant)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Built(None, f"could not be built: {type(error).__name__}: {error}")


def find_compiler(settings: BuildSettings) -> tuple[str, ...] | str:
    """The compiler's command, or why there is none.

    Example:
        >>> find_compiler(BuildSettings(compiler="nowhere"))
        "the compiler 'nowhere' (CXX) was not found; name one that is there, or install g++ or clang++"
    """
    if settings.compiler:
        command = shlex.split(settings.compiler)
        if not command or shutil.which(command[0]) is None:
            asked = settings.compiler
            return f"the compiler {asked!r} (CXX) was not found; name one that is there, or install g++ or clang++"
        return tuple(command)
    for name in _COMPILERS:
        if found := shutil.which(name):
            return (found,)
    return f"no C++ compiler: none of {', '.join(_COMPILERS)} is on PATH; install one (g++ will do) or set CXX"


def sources() -> tuple[str, ...]:
    """Names of the C++ files that `load` builds."""
    return tuple(sorted(path.stem for path in SOURCES.glob("*.cpp")))


def _build(name: str, settings: BuildSettings, variant: str) -> Built:
    if os.name != "posix":
        return Built(None, f"native kernels are built on Linux and macOS; this is {platform.system()}")
    source = settings.sources / f"{name}.cpp"
    if not source.is_file():
        return Built(None, f"the package has no {source.name}; install it anew")
    compiler = find_compiler(settings)
    if isinstance(compiler, str):
        return Built(None, compiler)
    compiler += (f"-D{variant}",) if variant else ()
    key = _key(source, compiler)
    cache, note = usable_cache(settings.cache)
    if cache is not None and (cached := _from_cache(cache, name, key)) is not None:
        return cached._replace(key=key)
    if cache is not None and _is_full(cache):
        note = f"{cache} is on a full disk: compiled anew in every process; free 16 MiB or set OTTAVA_CACHE"
        cache = None
    try:  # beside its place in the cache: a rename does not cross file systems
        folder = tempfile.mkdtemp(prefix=".build-", dir=cache)
    except OSError as error:
        cache, note = None, _unusable(cache, error)
        folder = tempfile.mkdtemp(prefix="ottava-")
    try:
        if cache is None and _is_full(Path(folder)):
            return Built(None, f"{folder} is on a full disk: free 16 MiB or set TMPDIR", note=note)
        return _compile_and_load(source, compiler, Path(folder), cache, key)._replace(note=note, key=key)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compile_and_load(source: Path, compiler: tuple[str, ...], folder: Path, cache: Path | None, key: str) -> Built:
    started = time.perf_counter()
    made = folder / "made.so"
    errors: list[str] = []
    for extra in _EXTRAS:
        ran = _run([*compiler, *_FLAGS, *extra, f"-I{source.parent}", str(source), "-o", str(made)], temporary=folder)
        if ran.returncode == 0 and made.is_file():
            break
        errors.append(_first_error(ran.stderr or ran.stdout) or f"exit code {ran.returncode}")
    else:
        return Built(None, f"{shlex.join(compiler)} could not compile {source.name}: {errors[-1]}")
    made.chmod(0o700)
    if failure := _trial(source, made):
        if cache is not None and failure.lasting:
            _remember(failure.wrong, folder, cache / f"{source.stem}-{key}-failed")
        return _failed(source.stem, failure.wrong)
    target = made
    if cache is not None:
        target = cache / f"{source.stem}-{key}-{_EXTRAS.index(extra)}-{_digest(made)}.so"
        os.replace(made, target)
    seconds = time.perf_counter() - started
    return Built(ctypes.CDLL(str(target)), "", seconds, (*_FLAGS, *extra))


class _Failure(NamedTuple):
    wrong: str
    lasting: bool  # whether the same library would fail again


def _trial(source: Path, library: Path) -> _Failure | None:
    """What is wrong with a new library; None if nothing is, or if nothing can try it (no Python at sys.executable)."""
    if missing := _cut_off(library):
        return _Failure(missing, False)
    if not sys.executable:
        return None
    own = map(str, _own_trial(source))
    try:
        ran = _run([sys.executable, "-I", "-S", str(_LOADS), str(library), *own], _TRIAL_TIMEOUT)
    except OSError:  # not a Python that this process may run
        return None
    except subprocess.TimeoutExpired:
        return _Failure(f"its trial did not end within {_TRIAL_TIMEOUT} s", False)
    if ran.returncode < 0:
        ended = signal.Signals(-ran.returncode).name
        return _Failure(f"its trial was ended by {ended}", ended in _OWN_FAULTS)
    if ran.returncode == _NOT_LOADED:
        return _Failure(f"it cannot be loaded: {ran.stdout.strip()}", False)
    wrong = ran.stdout.strip().removeprefix("ok") if ran.returncode == 0 else ""
    return _Failure(wrong, True) if wrong else None


def _own_trial(source: Path) -> list[Path]:
    return list(source.parent.parent.glob(f"{source.stem}_trial.py"))


def _cut_off(library: Path) -> str:
    """How much of a file is missing, if it is one of Linux (ELF, 64 bits) and its last part, the table of its sections,
    is not all there; else "". Loading it may go well, and the first call of what is missing end the process."""
    content = library.read_bytes()
    if len(content) < 64 or content[:6] != b"\x7fELF\x02\x01":
        return ""  # loading tells
    size, number = struct.unpack_from("<HH", content, 58)
    end = struct.unpack_from("<Q", content, 40)[0] + size * number
    if end > len(content):
        return f"the compiler wrote {len(content)} bytes of {end}"
    return "" if any(content[end - size : end]) else f"the compiler left the end of its {end} bytes empty"


def _failed(name: str, wrong: str) -> Built:
    return Built(None, f"{name}.cpp was compiled, but cannot be used: {wrong}", failed_trial=True)


def _remember(wrong: str, folder: Path, place: Path) -> None:
    """Leaves in the cache what was wrong; written in `folder` and renamed, so that nobody reads half of it."""
    note = folder / "failed"
    note.write_text(wrong, "utf-8")
    note.chmod(0o600)
    os.replace(note, f"{place}-{_digest(note)}")


def _failed_before(cache: Path, name: str, key: str) -> Built | None:
    for path in sorted(cache.glob(f"{name}-{key}-failed-*")):
        try:
            if _only_ours(path) and _digest(path) == path.name.rsplit("-", 1)[1]:
                return _failed(name, f"{path.read_text('utf-8')} (found before; delete {path} to try it again)")
        except (OSError, UnicodeDecodeError):  # gone or unreadable
            continue
    return None


def _from_cache(cache: Path, name: str, key: str) -> Built | None:
    for path in sorted(cache.glob(f"{name}-{key}-*.so")):
        number, content = path.stem.rsplit("-", 2)[1:]
        try:
            if not _only_ours(path) or _digest(path) != content:
                continue
            library = ctypes.CDLL(str(path))
        except OSError:  # gone, unreadable, or of another machine after all
            continue
        return Built(library, "", 0.0, (*_FLAGS, *_EXTRAS[int(number)]))
    return _failed_before(cache, name, key)


def _key(source: Path, compiler: tuple[str, ...]) -> str:
    told = _run([*compiler, "--version"])
    try:
        own_version = version("ottava")
    except PackageNotFoundError:  # run from its sources
        own_version = ""
    parts = [shlex.join(compiler), told.stdout, own_version, cpu(), platform.machine(), platform.libc_ver()[1]]
    trial = [_LOADS, *_own_trial(source)]  # it has passed them
    parts += [*_FLAGS, *(path.read_text("utf-8") for path in [source, *sorted(source.parent.glob("*.h")), *trial])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _run(
    command: list[str], seconds: int = _TIMEOUT, temporary: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`temporary`: where it puts files of its own; None: where it likes to."""
    variables = os.environ if temporary is None else {**os.environ, "TMPDIR": str(temporary)}
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        env=variables,
    )


def cpu() -> str:
    """What -march=native depends on, a line a fact."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.processor()} {platform.version()}"
    x86 = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
    arm = ("Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in lines if line.partition(":")[0].strip() in (*x86, *arm))


def usable_cache(cache: Path | None) -> tuple[Path | None, str]:
    """The folder if it can hold libraries of ours, and what is wrong with it otherwise."""
    if cache is None:
        return None, "no cache folder: compiled anew in every process; set OTTAVA_CACHE"
    cache = cache.absolute()
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _only_ours(cache):
            return None, f"others may write to {cache}: not used, compiled anew in every process; chmod go-w it"
    except OSError as error:
        return None, _unusable(cache, error)
    return cache, ""


def _is_full(folder: Path) -> bool:
    usage = shutil.disk_usage(folder)
    return usage.total > 0 and usage.free < _ROOM  # some file systems do not say: 0 of 0


def _unusable(cache: Path | None, error: OSError) -> str:
    return f"{cache} cannot be used ({error.strerror}): compiled anew in every process; set OTTAVA_CACHE"


def _only_ours(path: Path) -> bool:
    """Whether nobody else (but root) could have put something there: what lies there is run."""
    status = path.stat()
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "")[:300]
