"""Builds of a library for older CPUs, whose bits are those of the build that all other tests run."""

import ctypes
import itertools
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ottava.kernels.native import build as native_build
from ottava.kernels.native import quantize as native_quantize

FLAGS = {"scalar": ("-O0",), "SSE2": ("-march=x86-64",), "AVX2": ("-march=haswell",)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SOON = set(zip(FLAGS, DTYPES, strict=True))
"""Each of the flags and each of the types once; a compiler needs half a second for one build."""


def for_each_older_build(test):  # type: ignore[no-untyped-def]
    """The test takes `flags` and `dtype`; `./x test --all` runs every pair."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    pairs = [
        pytest.param(
            FLAGS[name],
            dtype,
            id=f"{name}-{str(dtype).removeprefix('torch.')}",
            marks=[] if (name, dtype) in SOON else [pytest.mark.slow],
        )
        for name, dtype in itertools.product(FLAGS, DTYPES)
    ]
    skip = pytest.mark.skipif(not x86, reason="compares instruction sets of x86")
    return skip(pytest.mark.parametrize("flags, dtype", pairs)(test))


def use_older_build(
    module: Any, source: str, flags: tuple[str, ...], dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds a file of C++ with these flags and lets the module run it."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    variant = [f"-D{name}" for name in [native_quantize.VARIANTS[dtype]] if name]
    file, made = str(native_build.SOURCES / source), str(folder / "made.so")
    subprocess.run([compiler, *native_build._FLAGS, *flags, *variant, file, "-o", made], check=True, timeout=800)
    library = ctypes.CDLL(made)
    module._declare(library)
    monkeypatch.setattr(module, "built", lambda *_: native_build.Built(library, ""))
