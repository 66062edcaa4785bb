"""BF16 operands on torch's GEMM and on the ways that may beat it; fp64 is the witness.

What comes out differs from the exact sum by the rounding of an fp32 accumulation, and by one to bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ottava.kernels import reference, torch_mm
from ottava.kernels.native import gemm as native_gemm

Dense = Callable[[Tensor, Tensor, Tensor | None], Tensor]
SHAPES = ((1, 1, 1), (6, 64, 2), (7, 65, 3), (37, 67, 101), (130, 96, 515), (520, 200, 129), (33, 16, 1100))
LEVELS = [level for level in native_gemm.levels() if not native_gemm.built(level).reason]


def native(level: int) -> Dense:
    """`plan_dense` at a level of its own."""
    one = torch.ones(1, 1)

    def run(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        sides = native_gemm.Dense(a, one), native_gemm.Dense(b, one)
        return native_gemm.plan_gemm(*sides, a.dtype, bias, level=level)(*sides, bias)

    return run


def every() -> dict[str, Dense]:
    ways = {native_gemm.LEVELS[level]: native(level) for level in LEVELS}
    for kernel in (torch_mm, reference, *([native_gemm] if LEVELS else ())):
        ways[kernel.NAME] = lambda a, b, bias, kernel=kernel: kernel.plan_dense(a, b, bias)(a, b, bias)
    return ways


def layouts(x: Tensor) -> list[Tensor]:
    """The same numbers row by row, column by column, with gaps, at an odd address."""
    rows, cols = x.shape
    spread = x.new_zeros(rows, 2 * cols)
    spread[:, ::2] = x
    odd = x.new_zeros(rows * cols + 1)[1:].view(rows, cols).copy_(x)
    return [x, x.t().contiguous().t(), spread[:, ::2], odd]


def test_one_fp32_sum_and_one_rounding() -> None:
    """Every way, shape, layout and bias; numbers of very different sizes, and some that cancel."""
    torch.manual_seed(0)
    for m, n, k in SHAPES:
        x = (torch.randn(m, k) * torch.randn(m, k).mul(4).exp2()).bfloat16()
        w = torch.randn(n, k).bfloat16()
        bias = torch.randn(n)
        exact, size = x.double() @ w.double().t(), x.double().abs() @ w.double().abs().t()
        for name, way in every().items():
            for a, b in zip(layouts(x), reversed(layouts(w)), strict=True):
                for added in (None, bias, bias.bfloat16()):
                    y = way(a, b, added)
                    assert (y.dtype, y.shape) == (torch.bfloat16, (m, n))
                    truth = exact if added is None else exact + added.double()
                    bound = truth.abs() * 2**-8 + (size + bias.abs()) * (k + 2) * 2**-24
                    assert ((y.double() - truth).abs() <= bound * (1 + 2**-6)).all(), (name, m, n, k)


def test_integers_are_exact_and_special_numbers_stay() -> None:
    """In any order of the sum; an infinity or NaN reaches its row or column and nothing else."""
    a = torch.arange(40 * 70).reshape(40, 70).remainder(17).sub(8).bfloat16()
    b = torch.arange(90 * 70).reshape(90, 70).remainder(13).sub(6).bfloat16()
    exact = (a.double() @ b.double().t()).bfloat16()
    a_special = a.clone()
    a_special[3, 5], a_special[7, 69] = math.inf, math.nan
    for name, way in every().items():
        assert torch.equal(way(a, b, None), exact), name
        y = way(a_special, b, None)
        # oneDNN reads past a row of 70 numbers on AMX
        leaks = (2, 6) if name == "torch.mm" and torch.cpu._is_amx_tile_supported() else ()
        ordinary = [row for row in range(40) if row not in (3, 7, *leaks)]
        assert torch.equal(y[ordinary], exact[ordinary]), name
        assert y[7].isnan().all(), name
        assert torch.equal(y[3].isnan(), b[:, 5] == 0), name
        assert torch.equal(y[3] == math.inf, b[:, 5] > 0), name


@pytest.mark.skipif(not LEVELS, reason="there is no library")
def test_threads_change_no_bit_and_others_are_refused() -> None:
    """As on codes; fp32, empty, wrapped and foreign operands are refused with a reason."""
    x, w = torch.randn(300, 257).bfloat16(), torch.randn(200, 257).bfloat16()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append([native(level)(x, w, None) for level in LEVELS])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    assert native_gemm.supports_dense(x, w) is None
    for a, b, reason in (
        (x.float(), w.float(), "takes bfloat16 on cpu"),
        (x.to("meta"), w, "takes bfloat16 on cpu"),
        (x[:0], w, "an empty operand"),
        (x[:, :0], w[:, :0], "an empty operand"),
    ):
        assert reason in str(native_gemm.supports_dense(a, b))
