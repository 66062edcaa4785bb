"""What it takes to compile the native kernels, each for itself and those of a first step together."""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ottava.formats import dtype_name
from ottava.kernels.native import build as native_build
from ottava.kernels.native import gemm as native_gemm
from ottava.kernels.native import quantize as native_quantize

Library = tuple[str, str]
"""Name of a C++ file, and the macro of a variant or ""."""

FIRST_STEP: tuple[Library, ...] = (("quantize", ""), ("gemm", ""), ("sums", ""))
"""What the first training step of a BF16 model loads."""


class BuildTime(NamedTuple):
    """Seconds of one library, medians."""

    cpu: float
    """Of the compiler and its parts."""
    wall: float
    """Of the clock, until it is loaded."""


def libraries() -> dict[str, Library]:
    """Every library there is, by the name it has in a table."""
    found: dict[str, Library] = {}
    for name in native_build.sources():
        per_dtype = name in ("quantize", "sample", "measure", "stochastic")
        for dtype, macro in native_quantize.VARIANTS.items() if per_dtype else ((None, ""),):
            found[f"{name} {dtype_name(dtype)}" if dtype is not None else name] = name, macro
    return found


def build_time(library: Library, rounds: int) -> BuildTime:
    """Builds one library in an empty cache, `rounds` times.

    Raises:
        RuntimeError: it cannot be built; the reason is named.

    Example:
        >>> build_time(("nothing_of_that_name", ""), 1)
        Traceback (most recent call last):
        RuntimeError: nothing_of_that_name: the package has no nothing_of_that_name.cpp; install it anew
    """
    times = []
    for _ in range(rounds):
        before, started = os.times(), time.perf_counter()
        build_all([library], 1)
        wall, after = time.perf_counter() - started, os.times()
        times.append(
            (after.children_user + after.children_system - before.children_user - before.children_system, wall)
        )
    return BuildTime(*map(statistics.median, zip(*times, strict=True)))


def build_all(wanted: Iterable[Library], at_once: int) -> None:
    """Builds libraries in an empty cache, so many at a time; raises as `build_time`."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        settings = replace(native_build.from_environment(), cache=Path(folder))
        for library, built in [(one, pool.submit(native_build.build, one[0], settings, one[1])) for one in wanted]:
            if reason := built.result().reason:
                raise RuntimeError(f"{library[0]}: {reason}")


def compiled_by() -> str:
    """The compiler's own words, and the instruction set that it compiles the GEMM for; "" where there is none."""
    command = native_build.find_compiler(native_build.from_environment())
    library = native_gemm.built().library
    if isinstance(command, str) or library is None:
        return ""
    told = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    return f"{told.splitlines()[0]}, {native_gemm.LEVELS[library.ottava_gemm_level()]}"
