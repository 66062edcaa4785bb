"""The AMX level of native_gemm on plain C++ (amx_model.h), for CPUs without AMX."""

from __future__ import annotations

import functools
import hashlib
import shlex
from dataclasses import replace
from pathlib import Path

from ottava.kernels.native import build as native_build
from ottava.kernels.native import gemm as native_gemm
from ottava.kernels.native.build import Built

AMX = native_gemm.LEVELS.index("AMX")
MODEL = Path(__file__).with_suffix(".h")


@functools.cache
def model() -> Built:
    """The AMX level on plain C++; its trial passes as the real one's must."""
    settings = native_build.from_environment()
    compiler = native_build.find_compiler(settings)
    assert not isinstance(compiler, str), compiler
    digest = hashlib.sha256(MODEL.read_bytes()).hexdigest()[:12]  # what the cache of libraries cannot know by itself
    command = shlex.join([*compiler, f'-DOTTAVA_AMX_MODEL="{MODEL}"', f"-DMODEL_{digest}"])
    found = native_build.build("gemm", replace(settings, compiler=command), f"OTTAVA_LEVEL={AMX}")
    assert found.library is not None, found.reason
    return found
