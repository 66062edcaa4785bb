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

FLAGS = {"scalar": ("-O0",), "SSE2": ("-march=x86-64",), "AVX2": ("-march=haswell",)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def for_each_older_build(test):  # type: ignore[no-untyped-def]
    """The test takes `flags` and `dtype`, every pair."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    pairs = [
        pytest.param(FLAGS[name], dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name, dtype in itertools.product(FLAGS, DTYPES)
    ]
    skip = pytest.mark.skipif(not x86, reason="compares instruction sets of x86")
    return skip(pytest.mark.parametrize("flags, dtype", pairs)(test))


def use_older_build(
    name: str, flags: tuple[str, ...], dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds a file of C++ with these flags, and lets all kernels run it."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    variant = [f"-D{name}" for name in [native_build.VARIANTS[dtype]] if name]
    file, made = str(native_build.SOURCES / f"{name}.cpp"), str(folder / "made.so")
    subprocess.run([compiler, *native_build.FLAGS, *flags, *variant, file, "-o", made], check=True, timeout=800)
    library = ctypes.CDLL(made)
    native_build.declare(library)
    ours = native_build.load

    def load(asked: str, *rest: Any, **more: Any) -> native_build.Built:
        return native_build.Built(library, "") if asked == name else ours(asked, *rest, **more)

    monkeypatch.setattr(native_build, "load", load)


def take_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets one file of C++ have no library; the others keep theirs."""
    ours = native_build.load

    def load(asked: str, *rest: Any, **more: Any) -> native_build.Built:
        return native_build.Built(None, "no C++ compiler") if asked == name else ours(asked, *rest, **more)

    monkeypatch.setattr(native_build, "load", load)
