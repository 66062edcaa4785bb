"""GEMM under accumulators in C++: the bits of torch, whatever the sizes, layouts and threads; and its time.

tests/kernels/test_accumulate.py compares both with results of real cards and with fractions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernels.test_accumulate import GRIDS, NEAREST, coded, operand
from ottava.accumulator import ACCUMULATORS
from ottava.formats import E4M3, E5M2
from ottava.kernels import accumulate as in_torch
from ottava.kernels.native import accumulate as native
from ottava.kernels.native import build as native_build

BUILT = native_build.load("accumulate")
pytestmark = pytest.mark.skipif(BUILT.library is None, reason=BUILT.reason)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_c_plus_plus_has_the_bits_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """More columns than a panel, more rows than a task, more k than is packed at once; strided codes; any threads."""
    monkeypatch.setattr(native, "_SMALLEST_SHARE", 1)  # several threads at these sizes, too
    for number_of, profile in enumerate([p for p in ACCUMULATORS.values() if p.emulated] + [NEAREST]):
        for m, n, k in ((129, 3, 1030), (5, 130, 515)):
            of_a, of_b = GRIDS[number_of % len(GRIDS)]
            a, b = operand(m, k, E4M3, of_a, specials=False), operand(n, k, E5M2, of_b, specials=n == 3)
            c = torch.randn(m, n)
            truth = in_torch.gemm(a, b, torch.bfloat16, None, profile, c)
            for strided in (a, replace(a, data=a.data.t().contiguous().t())):
                plan = native.plan_accumulate(strided, b, torch.bfloat16, None, profile)
                for threads in (1, 5):
                    torch.set_num_threads(threads)
                    assert torch.equal(plan(strided, b, None, c.t().contiguous().t()).nan_to_num(), truth.nan_to_num())


def test_the_speed_of_a_small_gemm() -> None:
    """64 x 512 x 64 takes 5 ms at most, in CPU time of one thread; the best of some, because others work here too."""
    torch.set_num_threads(1)
    a, b = (coded(torch.randint(0, 120, (64, 512), dtype=torch.uint8), E4M3) for _ in range(2))
    plan = native.plan_accumulate(a, b, torch.float32, None, ACCUMULATORS["hopper"])
    seconds = []
    for _ in range(5):
        began = time.thread_time()
        plan(a, b, None)
        seconds.append(time.thread_time() - began)
    assert min(seconds) < 5e-3
