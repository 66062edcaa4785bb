"""The batch invariant GEMM: bits of a row alone, also where the other rows change how scales enter."""

from __future__ import annotations

import pytest
import torch

import ottava
from ottava.kernels.native import build as native_build
from ottava.kernels.native import gemm as native_gemm
from ottava.kernels.native.gemm import BatchInvariant as invariant_gemm
from ottava.recipe import RECIPES

pytestmark = pytest.mark.skipif(native_build.load("gemm").library is None, reason="no compiler")


def test_a_row_of_tiny_numbers_changes_no_other_row() -> None:
    """It keeps `native_gemm` from folding scales into exponents, and so changes the order of sums of all rows."""
    torch.manual_seed(0)
    x = torch.randn(40, 512).bfloat16()
    x[7] = x[7] * torch.cat([torch.full((256,), 2.0**-60), torch.full((256,), 2.0**60)]).bfloat16()
    spec = RECIPES["mxfp8"].fprop
    assert spec.lhs is not None
    assert spec.rhs is not None
    w = ottava.quantize(torch.randn(64, 512).bfloat16(), spec.rhs)
    a, alone = ottava.quantize(x, spec.lhs), ottava.quantize(x[:7], spec.lhs)
    (whole, mode), (part, other) = (native_gemm.run(one, w, torch.float32, None) for one in (a, alone))
    assert (mode, other) == ("steps", "fold")
    assert not torch.equal(whole[:7], part)
    y = invariant_gemm.gemm(a, w, torch.float32, None)
    assert torch.equal(y[:7], invariant_gemm.gemm(alone, w, torch.float32, None))
    assert torch.equal(y, whole)


def test_matrices_in_bf16_have_an_fp32_result() -> None:
    """Each row alone, in any number of them; the witness is fp64."""
    torch.manual_seed(1)
    for m, n, k in ((1, 1, 1), (37, 65, 130), (200, 24, 1030)):
        a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        y = native_gemm.multiply_bf16(a, b)
        exact = a.double() @ b.double().t()
        bound = k * 2.0**-24 * (a.double().abs() @ b.double().abs().t())
        assert bool(((y.double() - exact).abs() <= bound).all())
        for i in (0, m // 2, m - 1):
            assert torch.equal(native_gemm.multiply_bf16(a[i : i + 1], b), y[i : i + 1])
        longer = torch.nn.functional.pad(a, (0, 77)), torch.nn.functional.pad(b, (0, 77), value=3.0)
        assert torch.equal(native_gemm.multiply_bf16(*longer), y)  # zeros behind change nothing
    assert invariant_gemm.supports_dense(a.float(), b.float()) is not None
    plan = invariant_gemm.plan_dense(a, b, None)
    assert torch.equal(plan(a, b, None), y.bfloat16())
