"""Builds of a library for older CPUs, whose bits are those of the build that all other tests run."""

import itertools
import platform

import pytest
import torch

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
