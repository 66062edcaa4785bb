"""Times the compilation of the native kernels: each library alone, and all libraries of a first step together."""

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

from ottava.kernels.native import build as native_build
from ottava.kernels.native import gemm as native_gemm
from ottava.numerics.formats import dtype_name

Library = tuple[str, str]
"""Name of a C++ file, and the macro of its variant, or ""."""

FIRST_STEP: tuple[Library, ...] = (("quantize", ""), ("gemm", ""), ("sums", ""), ("pointwise", ""))
"""The libraries of the first training step of a BF16 model."""


class BuildTime(NamedTuple):
    """Seconds of one library, medians."""

    cpu: float
    """CPU time of the compiler and its child processes."""
    wall: float
    """Wall-clock time until the library is loaded."""


def libraries() -> dict[str, Library]:
    """Name in a table -> library, for all libraries."""
    names: dict[str, Library] = {}
    for name in native_build.sources():
        per_dtype = name in ("quantize", "sample", "measure", "stochastic", "block_scales", "rotate")
        for dtype, macro in native_build.VARIANTS.items() if per_dtype else ((None, ""),):
            names[f"{name} {dtype_name(dtype)}" if dtype is not None else name] = name, macro
    return names


def build_time(library: Library, rounds: int) -> BuildTime:
    """Builds one library in an empty cache, `rounds` times.

    Raises:
        RuntimeError: the library cannot be built; the message gives the reason.

    Example:
        >>> build_time(("nothing_of_that_name", ""), 1)
        Traceback (most recent call last):
        RuntimeError: nothing_of_that_name: the package has no nothing_of_that_name.cpp; install it anew
    """
    times = []
    for _ in range(rounds):
        start, started = os.times(), time.perf_counter()
        build_all([library], 1)
        wall, end = time.perf_counter() - started, os.times()
        times.append((end.children_user + end.children_system - start.children_user - start.children_system, wall))
    return BuildTime(*map(statistics.median, zip(*times, strict=True)))


def build_all(libraries: Iterable[Library], at_once: int) -> None:
    """Builds libraries in an empty cache, `at_once` at a time. Raises as `build_time`."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        settings = replace(native_build.from_environment(), cache=Path(folder))
        builds = [(name, pool.submit(native_build.build, name, settings, macro)) for name, macro in libraries]
        for name, build in builds:
            if reason := build.result().reason:
                raise RuntimeError(f"{name}: {reason}")


def compiled_by() -> str:
    """The version line of the compiler and the instruction set of its GEMM; "" without a compiler."""
    command = native_build.find_compiler(native_build.from_environment())
    library = native_gemm.built().library
    if isinstance(command, str) or library is None:
        return ""
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    return f"{version.splitlines()[0]}, {native_gemm.LEVELS[library.ottava_gemm_level()]}"
