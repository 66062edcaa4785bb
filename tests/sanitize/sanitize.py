"""Runs the tests of the C++ kernels on libraries that a sanitizer of the compiler watches.

    ./x sanitize                   all three
    ./x sanitize address           reads and writes outside of memory, and after its end
    ./x sanitize undefined         what C++ leaves undefined: overflow, shifts, alignment, floats beyond an integer
    ./x sanitize thread            races between threads
    ./x sanitize thread --tests tests/kernels/native/test_sums.py --cases 0

The kernels are built anew with -fsanitize into a cache of the run, so every test of `TESTS` and every case of fuzz.py
runs them. `thread` links openmp.cpp in place of libgomp, whose waits ThreadSanitizer cannot see. Reports that touch no
line of ours are counted apart. The exit code is 1 after a report of ours, a failed test, or a run without a watched
library.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "tests/kernels/native"
TESTS = tuple(
    f"{KERNELS}/{path.name}"
    for path in sorted((ROOT / KERNELS).glob("test_*.py"))
    if path.stem[5:] not in ("build", "fuzz", "gemm_levels", "gemm_trial", "prebuilt", "trial")
)
"""The others test the compiling itself, compile with flags of their own, or start fuzz.py."""
OPTIONS = "halt_on_error=0:exitcode=0:print_stacktrace=1:detect_leaks=0:detect_odr_violation=0:report_signal_unsafe=0"


class Sanitizer(NamedTuple):
    """How the compiler builds for it, and what a report and a library of it look like."""

    flags: tuple[str, ...]
    runtime: str
    variable: str
    report: str
    mark: bytes


SANITIZERS: Mapping[str, Sanitizer] = MappingProxyType(
    {
        "address": Sanitizer(
            ("-fsanitize=address", "-fsanitize-recover=address"),
            "libasan.so",
            "ASAN",
            "ERROR: AddressSanitizer",
            b"__asan_init",
        ),
        "undefined": Sanitizer(
            ("-fsanitize=undefined,float-cast-overflow",), "libubsan.so", "UBSAN", "runtime error:", b"__ubsan_handle"
        ),
        "thread": Sanitizer(("-fsanitize=thread",), "libtsan.so", "TSAN", "WARNING: ThreadSanitizer", b"__tsan_init"),
    }
)


class Result(NamedTuple):
    """Of one sanitizer."""

    libraries: int
    """That it watched."""
    ours: Counter[str]
    """First line of ours in a report -> how often."""
    others: Counter[str]
    failed: bool
    said: str
    """The last lines of the tests and of fuzz.py."""


_OURS = re.compile(r"native/src/(\w+\.(?:cpp|h):\d+)|/?(\w+)-[0-9a-f]{20}-\d-[0-9a-f]+\.so")
_FOREIGN = re.compile(r"\((?:libtorch|libc10|libgomp|ld-linux)[\w.-]*\+0x")


def reports(text: str, begins: str) -> tuple[Counter[str], Counter[str]]:
    """(those of our C++, the others) of a sanitizer's log, by their kind and our first line in a stack.

    Of a race both sides must be ours: torch's threads wait by libgomp, which ThreadSanitizer cannot see.
    """
    ours, others = Counter[str](), Counter[str]()
    for body in re.split(rf"(?m)^(?=.*{re.escape(begins)})", text)[1:]:
        kind = body.partition(begins)[2].partition("\n")[0].strip(": ")
        kind = re.sub(r"0x[0-9a-f]+|\(pid=\d+\)|-?\d[\d.e+]{3,}", "N", kind).partition(" on address")[0]
        accesses = re.split(r"\n  (?:Thread T|Location is)", body)[0]  # not where a thread was made
        place = _OURS.search(accesses)
        race = begins.endswith("ThreadSanitizer") and body.startswith("WARNING")
        if place and not (race and any(_FOREIGN.search(stack) for stack in accesses.split("\n\n"))):
            ours[f"{place[1] or place[2]}: {kind}"] += 1
        else:
            others[kind] += 1
    return ours, others


def environment(name: str, folder: Path, source: Path) -> dict[str, str]:
    """Variables under which Python builds and loads watched libraries."""
    chosen, found = SANITIZERS[name], shutil.which("g++")
    if found is None or sys.platform != "linux":
        raise SystemExit("sanitize: needs g++ on Linux")
    extra: list[str] = []
    if name == "thread":
        shim = folder / "openmp.o"
        flags = ["-O1", "-g", "-std=c++17", "-fPIC", *chosen.flags]
        made = ["-c", str(Path(__file__).with_name("openmp.cpp")), "-o", str(shim)]
        subprocess.run([found, *flags, *made], check=True)
        extra = [str(shim)]
    # without the runtime in the compiler itself
    compiler = ["env", "-u", "LD_PRELOAD", found, "-g", "-fno-omit-frame-pointer", *chosen.flags, *extra]
    files = [
        subprocess.run([found, f"-print-file-name={file}"], capture_output=True, text=True, check=True).stdout.strip()
        for file in (chosen.runtime, "libstdc++.so")  # the runtime looks for the exceptions of C++ when it starts
    ]
    if missing := [file for file in files if not Path(file).is_file()]:
        raise SystemExit(f"sanitize: the compiler has no {missing[0]}; install it (Debian: libgcc-12-dev or its like)")
    options = f"{OPTIONS}:log_path={folder}/log:suppressions={Path(__file__).with_name('suppressions.txt')}"
    return {
        **os.environ,
        "CXX": shlex.join(compiler),
        "OTTAVA_CACHE": str(folder / "cache"),
        "LD_PRELOAD": ":".join(files),
        f"{chosen.variable}_OPTIONS": options,
        "PYTHONPATH": os.pathsep.join([str(source), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",  # of torch; the tests ask our kernels for more
        "PYTHONFAULTHANDLER": "1",
    }


def sanitize(name: str, tests: Sequence[str], cases: int, source: Path) -> Result:
    """Runs the tests and so many cases of fuzz.py of each kernel under one sanitizer."""
    with tempfile.TemporaryDirectory(prefix=f"sanitize-{name}-") as made:
        folder = Path(made)
        variables = environment(name, folder, source)
        chosen = ["-k", "not speed", *(["--under", "10"] if name == "thread" else [])]
        commands = [["-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *tests]] if tests else []
        commands += [[f"{KERNELS}/fuzz.py", "1", str(cases)]] if cases else []
        failed, said = False, []
        for command in commands:
            ran = subprocess.run([sys.executable, *command], cwd=ROOT, env=variables, capture_output=True, text=True)
            lines = ran.stdout.splitlines()
            wrong = ["".join(pair) for pair in itertools.pairwise(lines) if pair[1].startswith(("WRONG", "FAILED"))]
            failed |= ran.returncode != 0
            tail = lines[-1:] if ran.returncode == 0 else [*wrong[:20], *lines[-3:], ran.stderr[-1500:]]
            said.append(f"{command[0] if tests else ''} ended with {ran.returncode}: " + "\n  ".join(tail))
        cache = folder / "cache"
        libraries = (
            sum(SANITIZERS[name].mark in path.read_bytes() for path in cache.glob("*.so")) if cache.is_dir() else 0
        )
        log = "".join(path.read_text("utf-8", errors="replace") for path in sorted(folder.glob("log*")))
        if keep := os.environ.get("SANITIZE_LOG"):
            Path(keep).write_text(log, "utf-8")
        return Result(libraries, *reports(log, SANITIZERS[name].report), failed, "\n".join(said))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="./x sanitize", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="address|undefined|thread")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="files of tests; none: only fuzz.py")
    parser.add_argument("--cases", type=int, default=20, help="of fuzz.py, of each kernel")
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="folder of another ottava")
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - SANITIZERS.keys()):
        parser.error(f"{unknown[0]!r} is no sanitizer; choose from {', '.join(SANITIZERS)}")
    bad = False
    for name in given.names or SANITIZERS:
        result = sanitize(name, given.tests, given.cases, given.source.resolve())
        ours, others = result.ours.total(), result.others.total()
        print(f"{name}: {result.libraries} libraries, {ours} reports of ours, {others} of others")
        for said, times in result.ours.most_common():
            print(f"  {times} x {said}")
        for said, times in result.others.most_common(5):
            print(f"  elsewhere: {times} x {said}")
        print(f"  {result.said}", flush=True)
        bad |= bool(result.ours) or result.failed or not result.libraries
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
