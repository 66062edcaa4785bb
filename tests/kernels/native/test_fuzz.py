"""Random calls of every C++ kernel between pages that nobody may touch (fuzz.py), where a crash is a result."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.native import fuzz
from ottava.kernels.native import build as native_build
from ottava.kernels.native import quantize as native_quantize
from ottava.kernels.reference import Cast
from ottava.numerics.tensor import QuantizationSpec

REASON = native_build.load("quantize").reason
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="mmap and mprotect as Linux numbers their flags"),
    pytest.mark.skipif(bool(REASON), reason=REASON),
]

CASES = 12


def test_kernels_stay_inside_their_operands_and_have_the_bits_of_the_reference() -> None:
    """Every format, granularity, layout and dtype by chance, one seed for ever."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", fuzz.__file__, "1", str(CASES)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "4"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    lines = ran.stdout.splitlines()
    wrong = [line for pair in itertools.pairwise(lines) if pair[1].startswith("WRONG") for line in pair]
    assert (ran.returncode, wrong) == (0, []), (lines[-1:], ran.stderr[-2000:])
    assert len(lines) == CASES * len(fuzz.KERNELS)


def ends_with(act: Callable[[], object]) -> int:
    """The signal that ends a copy of this process which does that; 0: none."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        act()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("at_end", [True, False], ids=["after", "before"])
def test_one_element_too_far_ends_the_process(at_end: bool) -> None:
    """For reading as for writing; the last one there is does not."""
    fence = fuzz.Fence(at_end)
    x = fence.copy(torch.full((3, 5), 2.0).t())
    assert (x.stride(), float(x.sum())) == ((1, 5), 30.0)
    last, beyond = (x.data_ptr() + 4 * place for place in ((14, 15) if at_end else (0, -1)))
    for access in (lambda at: ctypes.c_float.from_address(at).value, lambda at: ctypes.memset(at, 0, 4)):
        assert ends_with(functools.partial(access, last)) == 0
        assert ends_with(functools.partial(access, beyond)) == signal.SIGSEGV
    fence.drop()


def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And the process that finds it goes on, and says so in the end."""
    real = native_quantize.plan_quantize

    def wrong(x: torch.Tensor, spec: QuantizationSpec) -> native_quantize.RunCast:
        def run(*arguments: Any) -> Cast:
            cast = real(x, spec)(*arguments)
            cast.data.view(torch.uint8)[0, 0] ^= 1
            return cast

        return run

    monkeypatch.setattr(native_quantize, "plan_quantize", wrong)
    with pytest.raises(SystemExit, match="1"):
        fuzz.main(3, 2, "quantize")
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["quantize", "WRONG", "quantize", "WRONG"]
