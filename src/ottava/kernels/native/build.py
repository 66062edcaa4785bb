"""Compiles a C++ file of `src` on first use, with the system's compiler, and keeps the library in a cache.

ctypes calls a plain C interface. Without torch headers a file compiles in a second and not in half a minute, and the
wheel stays pure Python. Nothing here raises. Without a library `Built.reason` says why, kernels repeat it in their
refusals, and the reference runs.

    OTTAVA_NATIVE=0    switches native kernels off
    OTTAVA_CACHE=DIR   folder of the libraries; else the user's cache folder
    CXX="clang++"      the compiler; else the first of c++, g++, clang++

A library's file name is NAME-KEY-FLAGS-CONTENT. KEY is a hash of all that decides the library's code (source, headers,
compiler, flags, CPU, versions), CONTENT a hash of the library itself. So one rename publishes it, two processes that
build it at once do no harm, and a process rebuilds a damaged file instead of loading it. ottava uses no cache to which
others can write. A wheel may carry libraries for machines without a compiler (`prebuilt`); a compiler comes first.

Before a library is published, a separate process (`native.trial`) loads it. A truncated library, or one that crashes
that process, is not used. If this folder has a NAME_trial.py, the process runs it, too; it refuses a library with an
instruction that this CPU lacks, or with wrong results. NAME-KEY-failed-CONTENT keeps the fault, so the next process
does not build the library again. A library that only failed to load leaves no such file: the next may be whole.
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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ottava.base import __version__
from ottava.kernels.native import prebuilt

_LOGGER = logging.getLogger(__name__)
SOURCES = Path(__file__).parent / "src"
"""Folder of our own .cpp and .h files."""
_LOADS = Path(__file__).parent / "trial.py"
_COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    # not -O3, which takes longer; our code is already unrolled and peeled
    *("-O2", "-ftree-vectorize", "-std=c++17", "-shared", "-fPIC"),
    "-ffp-contract=off",  # a fused multiply-add would round once
)
_EXTRAS = (  # the first that the compiler takes; Apple's clang has no OpenMP, and -mcpu instead of -march
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-fopenmp",),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)
_ROOM = 16 << 20  # bytes on a disk; a compiler on a full disk would look like one that refuses a flag
_TIMEOUT = 120  # seconds
_TRIAL_TIMEOUT = 120  # a stalled machine needs more than 20 for a script of 0.05
_OWN_FAULTS = ("SIGILL", "SIGSEGV", "SIGFPE", "SIGABRT", "SIGTRAP")
"""Signals that a library causes itself. After others the next process tries again (SIGBUS: a truncated file)."""
_NOT_LOADED = 3  # the exit code of trial.py

VARIANTS: Mapping[torch.dtype | None, str] = MappingProxyType(
    {torch.bfloat16: "", torch.float32: "OTTAVA_TYPE=Float32", torch.float16: "OTTAVA_TYPE=Float16"}
)
"""dtype -> macro with which a file is compiled for such tensors. A library for bf16 and one for fp32 each compile in
half the time of one for both, and few programs need both."""

_INT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
# Most functions take one packed struct, as bytes: ctypes takes longer over fourteen arguments than a small cast does.
_JOB = (_POINTER,)
_SYMBOLS: Mapping[str, tuple[Any, tuple[Any, ...]]] = MappingProxyType(
    {
        **dict.fromkeys(("cast", "cast_both", "factors", "cast_by_rule", "rotate"), (_INT, _JOB)),
        **dict.fromkeys(("column_sums", "gemm", "accumulate"), (_INT, _JOB)),
        **dict.fromkeys(("cast_stochastic", "swiglu", "rotate_heads"), (None, _JOB)),
        **dict.fromkeys(("gemm_level", "gemm_unit"), (_INT, ())),
        **dict.fromkeys(("sums", "extremes"), (ctypes.c_char_p, ())),
        "scales": (None, (_POINTER, _SIZE, *[_POINTER] * 3)),
        "decode": (None, (_POINTER, *[_SIZE] * 4, _POINTER, *[_INT] * 4, _POINTER, _INT, _INT)),
        "checksum": (ctypes.c_uint64, (_POINTER, _SIZE, _POINTER, _INT)),
        "survey": (_INT, (_POINTER, _INT, *[_SIZE] * 3, _POINTER, _INT)),
        "take": (None, (_POINTER, _INT, *[_SIZE] * 4, _POINTER, _SIZE, _POINTER, _POINTER, _INT)),
        "measure": (_INT, (_POINTER, _SIZE, _POINTER, _INT)),
    }
)
"""Every `ottava_NAME` of `src`, by its NAME -> what it returns and takes; each stands in one file. ctypes would cut a
pointer to the 32 bits of an int where nobody tells it otherwise."""


@dataclass(frozen=True)
class BuildSettings:
    """Settings of a build; `from_environment` reads them from the process's variables."""

    enabled: bool = True
    """False switches native kernels off."""
    compiler: str = ""
    """Command of the compiler, arguments allowed; "": the first on PATH."""
    cache: Path | None = None
    """Folder of the libraries; None: a temporary folder, deleted after loading."""
    sources: Path = field(default=SOURCES)
    """Folder of the .cpp and .h files; NAME_trial.py lies in the folder above."""
    prebuilt: Path = field(default=prebuilt.FOLDER)
    """Folder of libraries that a wheel carries; they serve only where there is no compiler."""


class Built(NamedTuple):
    """A loaded library, or why there is none."""

    library: ctypes.CDLL | None
    """The library in ctypes."""
    reason: str
    """Why there is no library; "" if there is one."""
    seconds: float = 0.0
    """Spent compiling; 0 if it came from the cache."""
    flags: tuple[str, ...] = ()
    """Flags of the compiler."""
    note: str = ""
    """A fault, such as an unusable cache."""
    key: str = ""
    """A hash of all that decides the library's code; "" if nothing was compiled."""
    failed_trial: bool = False
    """Whether the library crashed or computed something else in its trial, now or before."""

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
    given_variables = os.environ if variables is None else variables
    if given := given_variables.get("OTTAVA_CACHE"):
        cache: Path | None = Path(given)
    elif given := given_variables.get("XDG_CACHE_HOME"):
        cache = Path(given) / "ottava"
    else:
        try:
            home = Path.home()
        except RuntimeError:  # a user id without an entry in the password file
            cache = None
        else:
            cache = home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "ottava"
    enabled = given_variables.get("OTTAVA_NATIVE", "1").strip().lower() not in ("0", "false", "off", "no")
    return BuildSettings(enabled, given_variables.get("CXX", ""), cache)


@functools.lru_cache(maxsize=64)
def load(name: str, dtype: torch.dtype | None = None, variant: str = "") -> Built:
    """The library of src/NAME.cpp; builds it if necessary, once for each process, name and variant.

    The log says once if there is no library, or if each process must build it. If another thread builds it (`begin`),
    this call waits for that thread.

    Args:
        dtype: of the tensors that it reads, where the file has one of VARIANTS for each.
        variant: a macro, "NAME=VALUE", for a separate library of the file.
    """
    built = _once(name, variant or VARIANTS.get(dtype, ""), from_environment(), os.getpid())()
    if built.library is None:
        _LOGGER.info("%s.cpp: %s. The slower reference runs instead.", name, built.reason)
    else:
        declare(built.library)
    if built.note:
        _LOGGER.info("%s", built.note)
    return built


def loaded(name: str, dtype: torch.dtype | None = None) -> ctypes.CDLL:
    """The library of `load`, which is there: a `supports_*` was asked."""
    built = load(name, dtype)
    assert built.library is not None, built.reason
    return built.library


def declare(library: ctypes.CDLL) -> None:
    """Tells ctypes what the functions of a library return and take."""
    for name, (result, arguments) in _SYMBOLS.items():
        if (function := getattr(library, f"ottava_{name}", None)) is not None:
            function.restype, function.argtypes = result, arguments


def begin(name: str, dtype: torch.dtype | None = None) -> None:
    """Starts to build a library in the background for a later `load`, and returns at once. A second call does nothing.

    Edge cases: `load` reports the errors. A process that ends meanwhile waits for the compiler, so that no partial file
    stays in the cache.
    """
    _in_background(_once(name, VARIANTS.get(dtype, ""), from_environment(), os.getpid()))


@functools.lru_cache(maxsize=64)
def _once(name: str, variant: str, settings: BuildSettings, process: int) -> Callable[[], Built]:
    """A function that builds once; the first caller builds, the others wait. A forked process builds for itself."""
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
    with suppress(RuntimeError):  # the interpreter is ending, or there are too many threads: `load` will build
        threading.Thread(target=built, name="ottava builds").start()


def build(name: str, settings: BuildSettings, variant: str = "") -> Built:
    """As `load`, under given settings and without a cache in the process.

    Edge cases: it raises nothing. Without a compiler, after a compile error or with native kernels off, `reason` says
    so. If the cache is not writable, or others may write to it, the library serves this process only; see `note`.
    """
    if not settings.enabled:
        return Built(None, "switched off by OTTAVA_NATIVE=0")
    try:
        return _build(name, settings, variant)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Built(None, f"could not be built: {type(error).__name__}: {error}")


def find_compiler(settings: BuildSettings) -> tuple[str, ...] | str:
    """The compiler's command, or why there is none."""
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
        carried = prebuilt.candidates(settings.prebuilt, source, variant, platform.machine(), cpu())
        if isinstance(carried, str):
            return Built(None, "; ".join(filter(None, (compiler, carried))))
        for entry, path in carried:  # the best level may still fail its trial: then the next one
            key = prebuilt.digest([entry.content.encode(), cpu().encode(), _LOADS.read_bytes()])[:20]
            built = _make(source, settings, key, functools.partial(_take, entry, path))
            if built.library is not None:
                break
        return built
    compiler += (f"-D{variant}",) if variant else ()
    return _make(source, settings, _key(source, compiler), functools.partial(_compile, source, compiler))


def _make(source: Path, settings: BuildSettings, key: str, make: Callable[[Path], int | str]) -> Built:
    """The library of that key from the cache, or a new one. make: writes it, and returns its place in _EXTRAS or why it
    could not."""
    name = source.stem
    cache, note = usable_cache(settings.cache)
    if cache is not None and (cached := _from_cache(cache, name, key)) is not None:
        return cached._replace(key=key)
    # asked before compiling: a compiler that runs out of space fails like one that does not know a flag, and all of
    # _EXTRAS would be tried
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
        return _try_and_load(source, make, Path(folder), cache, key)._replace(note=note, key=key)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compile(source: Path, compiler: tuple[str, ...], made: Path) -> int | str:
    errors: list[str] = []
    # the first set of flags that works decides; a compiler without OpenMP gives a library with one thread
    for extra in _EXTRAS:
        command = [*compiler, *FLAGS, *extra, f"-I{source.parent}", str(source), "-o", str(made)]
        ran = _run(command, temporary=made.parent)
        if ran.returncode == 0 and made.is_file():
            return _EXTRAS.index(extra)
        errors.append(_first_error(ran.stderr or ran.stdout) or f"exit code {ran.returncode}")
    return f"{shlex.join(compiler)} could not compile {source.name}: {errors[-1]}"


def _take(entry: prebuilt.Entry, path: Path, made: Path) -> int | str:
    content = path.read_bytes()
    if prebuilt.digest([content]) != entry.content:
        return f"{path.name} is damaged: install ottava anew"
    made.write_bytes(content)  # a copy: the cache holds what was tried, whatever becomes of the installation
    return _EXTRAS.index(("-fopenmp",) if entry.threads else ())


def _try_and_load(source: Path, make: Callable[[Path], int | str], folder: Path, cache: Path | None, key: str) -> Built:
    started = time.perf_counter()
    made = folder / "made.so"
    extra = make(made)
    if isinstance(extra, str):
        return Built(None, extra)
    # nobody else may write to what this process will execute, whatever the umask is
    made.chmod(0o700)
    # in another process, because an illegal instruction ends the process that meets it
    if failure := _trial(source, made):
        if cache is not None and failure.lasting:
            note = folder / "failed"  # then a rename, so that nobody reads half of it
            note.write_text(failure.wrong, "utf-8")
            note.chmod(0o600)
            os.replace(note, cache / f"{source.stem}-{key}-failed-{_digest(note)}")
        return _failed(source.stem, failure.wrong)
    target = made
    if cache is not None:
        target = cache / f"{source.stem}-{key}-{extra}-{_digest(made)}.so"
        # one rename publishes it: no process loads half a file, and of two builders the later one replaces equal
        # content
        os.replace(made, target)
    seconds = time.perf_counter() - started
    return Built(ctypes.CDLL(str(target)), "", seconds, (*FLAGS, *_EXTRAS[extra]))


class _Failure(NamedTuple):
    wrong: str
    lasting: bool  # whether the same library would fail again


def _trial(source: Path, library: Path) -> _Failure | None:
    """The fault of a new library; None: it has none, or no process can try it (no Python at sys.executable)."""
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
    # killed by a signal: its own fault will happen again, one from outside (a full machine) may not
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
    """Why a library of Linux (ELF, 64 bits) is truncated, by its last part, the table of its sections; else "". A
    truncated library may load, and then end the process at the first call of a missing function."""
    # the table of sections ends an ELF file, so a truncated one lacks its end
    content = library.read_bytes()
    if len(content) < 64 or content[:6] != b"\x7fELF\x02\x01":
        return ""  # the trial will load it
    size, number = struct.unpack_from("<HH", content, 58)
    end = struct.unpack_from("<Q", content, 40)[0] + size * number
    if end > len(content):
        return f"the compiler wrote {len(content)} bytes of {end}"
    return "" if any(content[end - size : end]) else f"the compiler left the end of its {end} bytes empty"


def _failed(name: str, wrong: str) -> Built:
    return Built(None, f"{name}.cpp was compiled, but cannot be used: {wrong}", failed_trial=True)


def _failed_before(cache: Path, name: str, key: str) -> Built | None:
    for path in sorted(cache.glob(f"{name}-{key}-failed-*")):
        with suppress(OSError, UnicodeDecodeError):  # gone or unreadable
            if _only_ours(path) and _digest(path) == path.name.rsplit("-", 1)[1]:
                return _failed(name, f"{path.read_text('utf-8')} (found before; delete {path} to try it again)")
    return None


def _from_cache(cache: Path, name: str, key: str) -> Built | None:
    # the content's hash is in the name: a damaged file is passed over, and built anew
    for path in sorted(cache.glob(f"{name}-{key}-*.so")):
        number, content = path.stem.rsplit("-", 2)[1:]
        try:
            if not _only_ours(path) or _digest(path) != content:
                continue
            library = ctypes.CDLL(str(path))
        except OSError:  # gone, unreadable, or of another machine after all
            continue
        return Built(library, "", 0.0, (*FLAGS, *_EXTRAS[int(number)]))
    return _failed_before(cache, name, key)


def _key(source: Path, compiler: tuple[str, ...]) -> str:
    # an updated compiler under the same name makes another library
    described = _run([*compiler, "--version"])
    parts = [shlex.join(compiler), described.stdout, __version__, cpu(), platform.machine(), platform.libc_ver()[1]]
    trial = [_LOADS, *_own_trial(source)]  # the library has passed these
    parts += [*FLAGS, *(path.read_text("utf-8") for path in [source, *sorted(source.parent.glob("*.h")), *trial])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _run(
    command: list[str], seconds: int = _TIMEOUT, temporary: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """temporary: folder for the command's temporary files; None: its default."""
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
    """The facts on which -march=native depends, one per line."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.processor()} {platform.version()}"
    # not the whole file: clock rates and core numbers change from one reading to the next
    x86 = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
    arm = ("Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in lines if line.partition(":")[0].strip() in (*x86, *arm))


def usable_cache(cache: Path | None) -> tuple[Path | None, str]:
    """(the folder or None, why it cannot hold libraries of ours)."""
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
    return usage.total > 0 and usage.free < _ROOM  # some file systems report 0 of 0


def _unusable(cache: Path | None, error: OSError) -> str:
    return f"{cache} cannot be used ({error.strerror}): compiled anew in every process; set OTTAVA_CACHE"


def _only_ours(path: Path) -> bool:
    """Whether only we or root can write here. ottava executes files from here."""
    status = path.stat()
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "")[:300]
