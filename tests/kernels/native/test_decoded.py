"""GEMMs on operands that C++ decodes: the bits of the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ottava
from kernels.native.older_builds import take_library
from ottava.kernels import reference
from ottava.kernels.native import build as native_build
from ottava.kernels.native.gemm import Decoded as decoded
from ottava.numerics.scaling import BLOCK_1X16
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.quantize import quantize
from ottava.recipe import RECIPES
from sweep import sweep

REASON = native_build.load("decode").reason
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
CELLS = [
    (replace(gemm.lhs, transform=None), replace(gemm.rhs, transform=None))
    for gemm in (getattr(RECIPES["nvfp4"], name) for name in ("fprop", "dgrad", "wgrad"))
]
MIXED = (QuantizationSpec(ottava.E2M1, BLOCK_1X16, "e4m3"), QuantizationSpec(ottava.E4M3, BLOCK_1X16, "e8m0"))


@sweep(cells=[*CELLS, MIXED], with_bias=[False, True])
def test_the_bits_are_the_references(
    cells: tuple[QuantizationSpec, QuantizationSpec], sizes: tuple[int, int, int], with_bias: bool, dtype: torch.dtype
) -> None:
    """Ragged blocks, operands in rows and in columns; empty ones are the reference's."""
    m, n, k = sizes
    a, b = (quantize(torch.randn(rows, k).to(dtype), cell) for rows, cell in zip((m, n), cells, strict=True))
    reason = decoded.supports_gemm(a, b, dtype, None)
    if 0 in sizes or k <= 16:
        assert "empty operand" in str(reason) or "one scale for each row" in str(reason)
        return
    assert reason is None
    bias = torch.randn(n).to(dtype) if with_bias else None
    for one in (a, replace(a, data=a.data.t().contiguous().t())):
        for other in (b, replace(b, data=b.data.t().contiguous().t(), scale_inv=b.scale_inv.t().contiguous().t())):
            ours, truth = (kernel.gemm(one, other, dtype, bias) for kernel in (decoded, reference))
            assert torch.equal(ours, truth)


def test_it_runs_where_scales_have_two_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receipt names it; without a library the reference runs, with the same bits."""
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 48)).bfloat16(), torch.randn(32, 64).bfloat16()
    ottava.convert(model, "nvfp4")
    y = model(x)
    assert ottava.receipt(model).rows[0].kernel == decoded.NAME
    take_library("decode", monkeypatch)
    a, b = (quantize(torch.randn(4, 64), cell) for cell in CELLS[0])
    assert decoded.supports_gemm(a, b, torch.bfloat16, None) == "native_decoded: native_quantize: no C++ compiler"
    again = torch.nn.Sequential(torch.nn.Linear(64, 48)).bfloat16()
    again.load_state_dict(model.state_dict(), strict=False)
    ottava.convert(again, "nvfp4")
    assert torch.equal(again(x), y)
    assert ottava.receipt(again).rows[0].kernel == reference.NAME


def test_what_it_cannot_multiply_it_refuses() -> None:
    """With the reason."""
    rows = quantize(torch.ones(4, 64), QuantizationSpec(ottava.E4M3))
    assert "scales on two levels; got fp32 and fp32" in str(decoded.supports_gemm(rows, rows, torch.bfloat16, None))
    a = quantize(torch.ones(4, 64), CELLS[0][0])
    assert "scales on two levels; got e4m3 and fp32" in str(decoded.supports_gemm(a, rows, torch.bfloat16, None))
    short = quantize(torch.ones(4, 16), CELLS[0][0])
    assert "one scale for each row" in str(decoded.supports_gemm(short, short, torch.bfloat16, None))
