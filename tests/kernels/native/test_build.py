"""Built on first use, whatever the machine is like: raced for, damaged, read-only, no compiler or a bad one."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ottava.kernels.native import build as native_build
from ottava.kernels.native.build import BuildSettings, Built, build, from_environment

COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "")
pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="native kernels are built on Linux and macOS"),
    pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler"),
]

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def settings(tmp_path: Path) -> BuildSettings:
    """A file of one function, and an empty cache."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.cpp").write_text(SOURCE)
    return BuildSettings(cache=tmp_path / "cache", sources=sources)


def answer(built: Built) -> int:
    assert built.library is not None, built.reason
    assert built.reason == ""
    return int(built.library.answer())


def kept(settings: BuildSettings) -> list[Path]:
    """What is in the cache, hidden files included."""
    assert settings.cache is not None
    return sorted(settings.cache.iterdir())


def named_by_its_hash(path: Path) -> None:
    """Whole, whatever is in it."""
    path.rename(path.with_name(f"{path.stem.rsplit('-', 1)[0]}-{native_build._digest(path)}{path.suffix}"))


def test_the_second_time_it_comes_from_the_cache(settings: BuildSettings) -> None:
    """One library, nothing else left behind; the flags are known without compiling."""
    first, second = build("tiny", settings), build("tiny", settings)
    assert (answer(first), answer(second)) == (42, 42)
    assert first.seconds > 0
    assert second.seconds == 0
    assert first.flags == second.flags
    assert first.note == second.note == ""
    assert len(first.key) == 20
    assert first.key == second.key
    assert len(kept(settings)) == 1


def test_what_decides_the_code_decides_the_key(settings: BuildSettings) -> None:
    """Source, a header beside it, the compiler's command: each change is a library of its own."""
    build("tiny", settings)
    (settings.sources / "tiny.cpp").write_text('#include "number.h"\n' + SOURCE.replace("42", "NUMBER"))
    for number in (7, 8):
        (settings.sources / "number.h").write_text(f"#define NUMBER {number}\n")
        assert answer(build("tiny", settings)) == number
    assert len(kept(settings)) == 3
    assert answer(build("tiny", replace(settings, compiler=f"{COMPILER} -DUNUSED"))) == 8
    assert len(kept(settings)) == 4


def test_two_processes_may_build_it_at_once(settings: BuildSettings) -> None:
    """Four, in fact, started together: all get a library that works, and the cache is whole afterwards."""
    program = (  # the module by itself: without torch the processes start close together
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[3]); import build as b;"
        "built = b.build('tiny', b.BuildSettings(cache=Path(sys.argv[1]), sources=Path(sys.argv[2])));"
        "print(built.reason or built.library.answer())"
    )
    folder = Path(native_build.__file__).parent
    command = [sys.executable, "-c", program, str(settings.cache), str(settings.sources), str(folder)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [racer.communicate(timeout=800)[0] for racer in racers] == ["42\n"] * 4
    assert all(path.suffix == ".so" for path in kept(settings))
    assert build("tiny", settings).seconds == 0


def test_what_is_begun_is_built_at_the_same_time(
    settings: BuildSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two compilers waits for the other one to run, so one after the other would not end well; each is
    called once, however often it is begun, and whoever needs the library meanwhile waits for it.
    """
    waits = f"""
case "$*" in *--version*) exec {COMPILER} "$@";; esac
for source; do case "$source" in *.cpp) break;; esac; done
echo once >> {tmp_path}/ran-$(basename "$source")
for try in $(seq 2000); do
    [ -e {tmp_path}/ran-tiny.cpp ] && [ -e {tmp_path}/ran-other.cpp ] && exec {COMPILER} "$@"
    sleep 0.1
done
exit 1"""
    (settings.sources / "other.cpp").write_text(SOURCE.replace("42", "43"))
    own = replace(settings, compiler=script(tmp_path / "waiting-cxx", waits))
    monkeypatch.setattr(native_build, "from_environment", lambda: own)
    for _ in range(2):
        native_build.begin("tiny")
        native_build.begin("other")
    assert answer(native_build.load("tiny")) == 42
    assert answer(native_build.load("other")) == 43
    assert [(tmp_path / f"ran-{name}.cpp").read_text() for name in ("tiny", "other")] == ["once\n", "once\n"]
    native_build.load.cache_clear()


def test_a_fork_during_a_build_builds_for_itself(
    settings: BuildSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that would have told it does not exist in the child."""
    slow = f'case "$*" in *--version*) ;; *) echo > {tmp_path}/runs; sleep 1;; esac; exec {COMPILER} "$@"'
    own = replace(settings, compiler=script(tmp_path / "slow-cxx", slow))
    monkeypatch.setattr(native_build, "from_environment", lambda: own)
    native_build.begin("tiny")
    deadline = time.monotonic() + 300
    while not (tmp_path / "runs").exists():
        assert time.monotonic() < deadline, "the compiler was not begun"
        time.sleep(0.01)
    child = os.fork()
    if child == 0:
        signal.alarm(400)  # ends a child that waits for ever
        built = native_build.load("tiny")
        os._exit(built.library.answer() if built.library is not None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert answer(native_build.load("tiny")) == 42
    native_build.load.cache_clear()


@pytest.mark.parametrize("damage", ["cut off", "one bit", "emptied", "whole by its hash"])
def test_a_damaged_library_is_not_loaded_but_built_anew(settings: BuildSettings, damage: str) -> None:
    """Loading it could do anything."""
    build("tiny", settings)
    (path,) = kept(settings)
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    path.unlink()  # this process runs the old one: changed in place it would crash
    path.write_bytes({"cut off": whole[:middle], "one bit": flipped, "emptied": b""}.get(damage, b"not ours"))
    if damage == "whole by its hash":  # and still no library here
        named_by_its_hash(path)
    again = build("tiny", settings)
    assert answer(again) == 42
    assert again.seconds > 0
    assert build("tiny", settings).seconds == 0


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Not root, for whom nothing is read-only."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled before"])
def test_a_read_only_cache_is_read(filled: bool) -> None:
    """What an administrator put there is used; else each process compiles for itself, and says so."""
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        sources, cache = Path(base) / "sources", Path(base) / "cache"
        sources.mkdir()
        cache.mkdir(mode=0o755)
        (sources / "tiny.cpp").write_text(SOURCE)
        settings = BuildSettings(cache=cache, sources=sources)
        if filled:
            build("tiny", settings)
            for path in cache.iterdir():
                path.chmod(0o755)
        cache.chmod(0o555)
        try:
            with unprivileged():
                found = build("tiny", settings)
        finally:
            cache.chmod(0o755)
        assert answer(found) == 42
        assert (found.seconds == 0) == filled
        assert ("compiled anew in every process; set OTTAVA_CACHE" in found.note) == (not filled)


@pytest.mark.parametrize("kind", ["a file is there", "others may write", "none"])
def test_a_cache_that_cannot_be_used_costs_time_only(settings: BuildSettings, kind: str) -> None:
    """It still runs; what lies where others may write is not loaded, nor is anything put there."""
    assert settings.cache is not None
    if kind == "a file is there":
        settings.cache.write_text("in the way")
    elif kind == "others may write":
        settings.cache.mkdir()
        settings.cache.chmod(0o777)
    else:
        settings = replace(settings, cache=None)
    found = build("tiny", settings)
    assert answer(found) == 42
    assert "compiled anew in every process" in found.note
    if kind == "others may write":
        assert kept(settings) == []


@pytest.mark.parametrize("full", ["cache", "both"])
def test_a_full_disk_costs_a_library_no_flags(
    settings: BuildSettings, full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that cannot write what it makes is not asked for less of it, which would be kept for good."""
    real = shutil.disk_usage

    def usage(path: Path) -> object:
        is_full = full == "both" or settings.cache in (path, *Path(path).parents)
        return real(path)._replace(free=1000) if is_full else real(path)

    usual = build("tiny", replace(settings, cache=None))
    monkeypatch.setattr(shutil, "disk_usage", usage)
    found = build("tiny", settings)
    assert kept(settings) == []
    assert "is on a full disk: compiled anew in every process; free 16 MiB or set OTTAVA_CACHE" in found.note
    if full == "both":
        assert found.reason.endswith("is on a full disk: free 16 MiB or set TMPDIR")
    else:
        assert (answer(found), found.flags) == (42, usual.flags)


def test_a_compiler_puts_its_files_where_there_is_room(settings: BuildSettings, tmp_path: Path) -> None:
    """Beside the library, whatever TMPDIR says; nothing of them stays."""
    told = script(tmp_path / "cxx", f'echo "$TMPDIR" >> {tmp_path}/told; exec {COMPILER} "$@"')
    assert answer(build("tiny", replace(settings, compiler=told))) == 42
    assert Path((tmp_path / "told").read_text().splitlines()[-1]).parent == settings.cache
    assert [path.suffix for path in kept(settings)] == [".so"]


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_without_a_compiler_there_is_a_reason(settings: BuildSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was looked for, and what to do."""
    missing = build("tiny", replace(settings, compiler="no-such-compiler -O1"))
    assert missing.library is None
    assert missing.reason == (
        "the compiler 'no-such-compiler -O1' (CXX) was not found; name one that is there, or install g++ or clang++"
    )
    monkeypatch.setenv("PATH", "")
    assert build("tiny", settings).reason == (
        "no C++ compiler: none of c++, g++, clang++ is on PATH; install one (g++ will do) or set CXX"
    )


@pytest.mark.parametrize(
    "body, message",
    [
        ("echo 'fatal error: headers are gone' >&2; exit 1", "fatal error: headers are gone"),
        ("exit 3", "exit code 3"),
        ("exit 0", "exit code 0"),  # and no file
        ('for last; do :; done; case "$last" in *.so) echo junk > "$last"; esac', "it cannot be loaded: "),
    ],
    ids=["says why", "says nothing", "makes nothing", "makes junk"],
)
def test_a_broken_compiler_is_a_reason(settings: BuildSettings, tmp_path: Path, body: str, message: str) -> None:
    """Never an exception, and no litter in the cache that would be loaded later."""
    broken = script(tmp_path / "broken-cxx", body)
    found = build("tiny", replace(settings, compiler=broken))
    assert found.library is None
    assert message in found.reason
    assert answer(build("tiny", settings)) == 42


def test_an_old_compiler_gets_fewer_flags(settings: BuildSettings, tmp_path: Path) -> None:
    """No OpenMP, no -march: compiled all the same, and `threads` says so."""
    refuse = 'for f; do case "$f" in -fopenmp|-march=*|-mcpu=*) echo "error: $f" >&2; exit 1;; esac; done'
    found = build("tiny", replace(settings, compiler=script(tmp_path / "old-cxx", f'{refuse}; exec {COMPILER} "$@"')))
    assert answer(found) == 42
    assert not found.threads
    assert build("tiny", settings).threads == ("-fopenmp" in build("tiny", settings).flags)


def test_a_wrong_source_is_a_reason(settings: BuildSettings) -> None:
    """The compiler's first error; a file that is not there is named."""
    (settings.sources / "tiny.cpp").write_text("int f( {\n")
    assert "tiny.cpp" in build("tiny", settings).reason
    assert "error" in build("tiny", settings).reason
    assert build("other", settings).reason == "the package has no other.cpp; install it anew"


@pytest.mark.parametrize(
    "trial, reason",
    [
        ("print('ok')", ""),
        ("print('3 of 4 numbers are wrong')", "3 of 4 numbers are wrong"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "its trial was ended by SIGILL"),
        ("import time; time.sleep(60)", "its trial did not end within 1 s"),
        ("import no_such_module", ""),  # whatever it says: the library has not been run
    ],
)
def test_a_library_is_tried_before_it_is_used(
    settings: BuildSettings, monkeypatch: pytest.MonkeyPatch, trial: str, reason: str
) -> None:
    """By another process, which may crash: then nothing is loaded and nothing kept."""
    monkeypatch.setattr(native_build, "_TRIAL_TIMEOUT", 1 if "sleep" in trial else 20)
    (settings.sources.parent / "tiny_trial.py").write_text(trial)
    built = build("tiny", settings)
    if not reason:
        assert answer(built) == 42
        return
    assert built.library is None
    assert built.failed_trial
    assert built.reason == f"tiny.cpp was compiled, but cannot be used: {reason}"
    assert not [path for path in kept(settings) if path.suffix == ".so"]


TRIED = "import sys; open(__file__ + '.runs', 'a').write('x')\n"
FAILS = TRIED + "print('3 of 4 numbers are wrong')"


def runs(settings: BuildSettings) -> int:
    """How often the trial has been run."""
    return len((settings.sources.parent / "tiny_trial.py.runs").read_text())


def test_a_failed_trial_is_remembered(settings: BuildSettings) -> None:
    """Neither built nor tried again, and how to have it tried again is said; a new source is, and so is a copy of the
    cache without the note.
    """
    (settings.sources.parent / "tiny_trial.py").write_text(FAILS)
    first, second = build("tiny", settings), build("tiny", settings)
    (note,) = kept(settings)
    assert (first.failed_trial, second.failed_trial, runs(settings)) == (True, True, 1)
    assert second.reason == f"{first.reason} (found before; delete {note} to try it again)"
    assert (second.library, second.key) == (None, first.key)
    note.unlink()
    assert build("tiny", settings).reason == first.reason
    assert runs(settings) == 2
    (settings.sources / "tiny.cpp").write_text(SOURCE.replace("42", "43"))
    assert build("tiny", settings).reason == first.reason
    assert runs(settings) == 3


@pytest.mark.parametrize("damage", ["cut off", "others may write", "not text"])
def test_a_damaged_note_is_no_reason(settings: BuildSettings, damage: str) -> None:
    """The library is built and tried anew, and what was wrong is noted once more."""
    (settings.sources.parent / "tiny_trial.py").write_text(FAILS)
    build("tiny", settings)
    (note,) = kept(settings)
    if damage == "cut off":
        note.write_text("3 of 4")
    elif damage == "others may write":
        note.chmod(0o666)
    else:
        note.write_bytes(b"\xff\xfe")
        named_by_its_hash(note)
    assert "found before" not in build("tiny", settings).reason
    assert runs(settings) == 2
    assert "found before" in build("tiny", settings).reason


@pytest.mark.parametrize("ended", ["os.kill(os.getpid(), signal.SIGTERM)", "time.sleep(60)"], ids=["SIGTERM", "slow"])
def test_what_came_from_outside_is_not_remembered(
    settings: BuildSettings, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    """Out of memory, a busy machine, Ctrl-C: the next process tries again."""
    monkeypatch.setattr(native_build, "_TRIAL_TIMEOUT", 1)
    (settings.sources.parent / "tiny_trial.py").write_text(f"import os, signal, time; {ended}")
    assert build("tiny", settings).failed_trial
    assert kept(settings) == []


def test_a_failure_that_cannot_be_kept_is_told(settings: BuildSettings) -> None:
    """A read-only cache: built and tried in every process, and `note` says so."""
    assert settings.cache is not None
    (settings.sources.parent / "tiny_trial.py").write_text("print('wrong')")
    built = build("tiny", replace(settings, cache=None))
    assert built.reason.endswith("cannot be used: wrong")
    assert "compiled anew in every process" in built.note


def test_a_trial_gets_the_library_and_decides_the_key(settings: BuildSettings) -> None:
    """Its path, which can be loaded; another trial, another library."""
    script = "import ctypes, sys; print('ok' if ctypes.CDLL(sys.argv[1]).answer() == {} else 'wrong')"
    (settings.sources.parent / "tiny_trial.py").write_text(script.format(42))
    first = build("tiny", settings)
    assert (answer(first), build("tiny", settings).key) == (42, first.key)
    (settings.sources.parent / "tiny_trial.py").write_text(script.format(41))
    assert build("tiny", settings).reason.endswith("cannot be used: wrong")


def test_where_no_python_is_found_nothing_is_tried(settings: BuildSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside another program sys.executable may be empty."""
    (settings.sources.parent / "tiny_trial.py").write_text("print('wrong')")
    monkeypatch.setattr(sys, "executable", "")
    assert answer(build("tiny", settings)) == 42


def test_variables_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTTAVA_NATIVE, CXX, OTTAVA_CACHE before XDG_CACHE_HOME before the home folder."""
    assert not from_environment({"OTTAVA_NATIVE": "0"}).enabled
    assert from_environment({"OTTAVA_NATIVE": "1"}).enabled
    assert build("tiny", from_environment({"OTTAVA_NATIVE": "off"})).reason == "switched off by OTTAVA_NATIVE=0"
    both = {"OTTAVA_CACHE": "own", "XDG_CACHE_HOME": "shared", "CXX": "clang++ -g"}
    assert from_environment(both).cache == Path("own")
    assert from_environment(both).compiler == "clang++ -g"
    assert from_environment({"XDG_CACHE_HOME": "shared"}).cache == Path("shared/ottava")
    monkeypatch.setattr(Path, "home", lambda: Path("me"))
    assert from_environment({}).cache in (Path("me/.cache/ottava"), Path("me/Library/Caches/ottava"))


def test_what_is_lost_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not at every cast."""
    with caplog.at_level(logging.INFO, "ottava"):
        for _ in range(3):
            assert native_build.load("no_such_kernel").library is None
    assert [record.getMessage() for record in caplog.records] == [
        "no_such_kernel.cpp: the package has no no_such_kernel.cpp; install it anew. The slower reference runs instead."
    ]


def test_no_header_is_included_that_takes_long_to_read() -> None:
    """immintrin.h alone takes as long as all that a kernel has to compile; a first call waits for it."""
    small = {"cerrno", "cfloat", "cstdint", "cstdlib", "cstring", "new", "omp.h", "sys/syscall.h", "unistd.h"}
    small |= {"arm_neon.h"}  # of aarch64 alone, where the GEMM is written with it
    sources = [path.read_text("utf-8") for path in native_build.SOURCES.iterdir()]
    named = {name for text in sources for name in re.findall(r"#include <(.*)>", text)}
    assert "cstdint" in named
    assert named <= small, named - small


def test_every_function_is_declared() -> None:
    """ctypes would take a pointer for a 32-bit int: what a file offers has a line in the table, and no line is old."""
    texts = [path.read_text("utf-8") for path in native_build.SOURCES.glob("*.cpp")]
    offered = {name for text in texts for name in re.findall(r"^(?:extern.*|\w[\w *]*)\bottava_(\w+)\(", text, re.M)}
    assert offered == set(native_build._SYMBOLS)
    if (library := native_build.load("quantize", torch.float16).library) is not None:
        assert library.ottava_cast.argtypes == (ctypes.c_void_p,)
        assert not hasattr(library, "ottava_gemm")
