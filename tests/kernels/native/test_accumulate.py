"""GEMM under accumulators in C++: the bits of torch, whatever the sizes, layouts and threads; and its time.

tests/kernels/test_accumulate.py compares both with results of real cards and with fractions.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
import torch

from kernels.test_accumulate import GRIDS, NEAREST, coded, operand, same
from ottava.kernels import accumulate as in_torch
from ottava.kernels.native import accumulate as native
from ottava.kernels.native import build as native_build
from ottava.numerics.accumulator import ACCUMULATORS, Accumulator
from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.quantize import quantize

BUILT = native_build.load("accumulate")
pytestmark = pytest.mark.skipif(BUILT.library is None, reason=BUILT.reason)


def test_c_plus_plus_has_the_bits_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """More columns than a panel, more rows than a task, more k than is packed at once; strided codes; any threads."""
    monkeypatch.setattr(native, "_SMALLEST_SHARE", 1)  # several threads at these sizes, too
    profiles = [p for p in ACCUMULATORS.values() if p.emulated and p.dot == 1]
    for number_of, profile in enumerate([*profiles, NEAREST]):
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


MXFP8, MXFP4, NVFP4 = ("E4M3", "1x32", "e8m0"), ("E2M1", "1x32", "e8m0"), ("E2M1", "1x16", "e4m3")
NARROW = Accumulator(name="narrow", group=48, dot=8, fraction_bits=12, kept_bits=9, scales_blocks=True, promotion=96)


def test_c_plus_plus_has_the_bits_of_torch_where_instructions_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands as casts make them: zeros, weights in squares, faint rows, NaN and infinity; K of no whole dot."""
    monkeypatch.setattr(native, "_SMALLEST_SHARE", 1)

    def cast(rows: int, k: int, of: tuple[str, str, str], spread: float) -> QuantizedTensor:
        fmt, blocks, scale = of
        x = torch.randn(rows, k) * torch.exp2(torch.randn(rows, -(-k // 16)) * spread).repeat_interleave(16, 1)[:, :k]
        x[0], x[1, :40] = 0.0, 0.0
        return quantize(x, QuantizationSpec.from_dict({"format": fmt, "granularity": blocks, "scale_format": scale}))

    pairs = ((MXFP8, MXFP8), (MXFP8, MXFP4), (("E5M2", "32x32", "e8m0"), MXFP8), (MXFP4, MXFP4))
    for lhs, rhs in (*pairs, (NVFP4, ("E2M1", "16x16", "e4m3"))):
        for (m, n, k), spread in itertools.product(((67, 3, 1030), (5, 130, 519), (3, 4, 9)), (0.5, 4.0, 30.0)):
            a, b = cast(m, k, lhs, spread), cast(n, k, rhs, spread)
            if lhs == MXFP8 and n == 3:
                a.data.view(torch.uint8)[2, 1] = 0x7F
            c, bias = torch.randn(m, n) * 1e3, torch.randn(n)
            for profile in (ACCUMULATORS["tcgen05"], *((NARROW,) if lhs[0] == rhs[0] == "E2M1" else ())):
                truth = in_torch.gemm(a, b, torch.float32, bias, profile, c)
                assert native.supports_accumulate(a, b, torch.float32, profile) is None
                plan = native.plan_accumulate(a, b, torch.float32, bias, profile)
                assert same(plan(a, b, bias, c), truth), (lhs, rhs, m, n, k, spread, profile)
    seen = []
    monkeypatch.setattr(in_torch, "gemm", lambda *args: seen.append(args) or torch.zeros(()))
    plan(replace(a, scale_inv=a.scale_inv * torch.nan), b, bias, c)
    assert len(seen) == 1  # what C++ has no exponents for


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
