"""What a library must get right before it is used; libraries that are wrong on purpose."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ottava.kernels.native import gemm as native_gemm
from ottava.kernels.native import gemm_trial as native_gemm_trial
from ottava.kernels.native.gemm_trial import K, M, N, trial

BUILT = native_gemm.built()
pytestmark = pytest.mark.skipif(BUILT.library is None, reason=BUILT.reason)


class Wrong:
    """The library, but for what a test changes."""

    def __init__(self, change: Callable[[Any], int]) -> None:
        self._change = change

    def ottava_gemm(self, *arguments: Any) -> int:
        assert BUILT.library is not None
        mode = BUILT.library.ottava_gemm(*arguments)
        y = (ctypes.c_float * (M * N)).from_address(arguments[0][20])
        return self._change((mode, arguments[0], y))


def test_a_good_library_passes() -> None:
    """By itself, and as `native.build` runs it: nothing but the standard library."""
    assert BUILT.library is not None
    assert trial(BUILT.library) == ""
    command = [sys.executable, "-I", "-S", str(native_gemm_trial.__file__), BUILT.library._name]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("ok\n", "", 0)


def test_one_wrong_number_is_found() -> None:
    """The last one, off by an ulp; in one mode and one layout only."""

    def change(call: Any) -> int:
        mode, argument, y = call
        if mode == 2 and argument[2] == 1:  # steps, by columns
            y[M * N - 1] *= 1 + 2.0**-23
        return int(mode)

    assert trial(Wrong(change)) == f"1 of {M * N} numbers are wrong (steps)"  # type: ignore[arg-type]


def test_another_mode_is_found() -> None:
    """And no memory, which is -1."""
    assert trial(Wrong(lambda call: max(call[0], 1))) == "it ran fold where plain was asked for"  # type: ignore[arg-type]
    assert trial(Wrong(lambda call: -1)) == "it ran -1 where plain was asked for"  # type: ignore[arg-type]


def test_sizes_leave_rests_everywhere() -> None:
    """Of tiles of 6 rows, of panels of 8 to 64 columns, of units and tiles along k."""
    assert all(M % size and N % size for size in (6, 8, 16, 32, 64))
    assert K % 32
