"""The weight cache's checksum and the gradient of the bias: what changes them, what does not, with and without C++."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ottava.kernels.native import build as native_build
from ottava.kernels.native import pointwise as native_sums
from sweep import sweep


@pytest.fixture(params=["C++", "torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the library, and as on a machine without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(native_build, "load", lambda name: native_build.Built(None, "no compiler"))
    elif native_build.load("sums").library is None:
        pytest.skip(native_build.load("sums").reason)
    return request.param


# --- checksum --------------------------------------------------------------------------------------------------------

SIZES = (1, 7, 255, 256, 257, 131_072, 400_000)
"""Bytes / 2: tails of a stripe of 256 bytes, and more than one segment of 2**18."""


@pytest.mark.parametrize("n", SIZES)
def test_every_bit_counts(library: str, n: int) -> None:
    """One bit flipped anywhere gives another number; flipped back, the old one."""
    x = torch.randn(n).bfloat16()
    before = native_sums.checksum(x)
    bits = x.view(torch.int16)
    for at in {0, n // 3, n // 2, n - 1}:
        for bit in (0, 7, 14):
            bits[at] ^= 1 << bit
            assert native_sums.checksum(x) != before
            bits[at] ^= 1 << bit
    assert native_sums.checksum(x) == before


def test_changes_that_fool_a_sum(library: str) -> None:
    """Rows that change places, all signs flipped, two signs flipped in one lane, a zero appended."""
    x = torch.randn(64, 4096).bfloat16()
    seen = {native_sums.checksum(x), native_sums.checksum(-x), native_sums.checksum(x.flip(0))}
    seen.add(native_sums.checksum(x.roll(128, 1)))  # a whole stripe
    two = x.clone()
    two[3, 3] *= -1
    two[3, 3 + 128] *= -1
    seen.add(native_sums.checksum(two))
    zeros = [native_sums.checksum(torch.zeros(n)) for n in (64, 65, 128, 65536, 65537)]
    assert len(seen) == 5
    assert len(set(zeros)) == 5


@given(st.binary(max_size=700), st.integers(0, 10_000))
def test_prefixes_and_changes_differ(data: bytes, at: int) -> None:
    """Any bytes: another length, or one byte changed."""
    x = torch.tensor(list(data), dtype=torch.uint8)
    before = native_sums.checksum(x)
    assert native_sums.checksum(torch.cat([x, torch.zeros(1, dtype=torch.uint8)])) != before
    if data:
        x[at % len(data)] += 1
        assert native_sums.checksum(x) != before


def test_threads_and_strides_change_nothing(library: str) -> None:
    """The bits of the numbers in their order."""
    x = torch.randn(1000, 700)
    seen = set()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        seen |= {native_sums.checksum(x), native_sums.checksum(x.t().contiguous().t())}
    assert len(seen) == 1
    assert native_sums.checksum(torch.empty(0)) == native_sums.checksum(torch.empty(0, 5))


# --- column sums -----------------------------------------------------------------------------------------------------


@sweep(shape=[(1, 1), (3, 5), (64, 256), (65, 257), (1000, 33), (5000, 7), (0, 4), (4, 0)])
def test_sums_are_fp32(library: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Within R * 2**-24 of the sum of magnitudes; in 64s far better: 70 roundings of 5000 rows, not 5000."""
    x = torch.randn(shape).to(dtype)
    y = native_sums.column_sums(x)
    magnitude = x.double().abs().sum(0)
    assert (tuple(y.shape), y.dtype) == (shape[1:], torch.float32)
    assert (
        (y.double() - x.double().sum(0)).abs() <= min(shape[0], 64 + shape[0] // 64 + 1) * 2.0**-24 * magnitude
    ).all()


@pytest.mark.parametrize("view", ["transposed", "strided", "rows apart", "expanded"])
def test_any_strides(library: str, view: str) -> None:
    """As of a copy."""
    x = torch.randn(130, 260)
    made: Tensor = {"transposed": x.t(), "strided": x[:, ::2], "rows apart": x[::2], "expanded": x[:1].expand(90, -1)}[
        view
    ]
    y, copy = native_sums.column_sums(made), native_sums.column_sums(made.contiguous())
    assert torch.allclose(y, copy, rtol=1e-5, atol=1e-4)


def test_threads_change_no_bit(library: str) -> None:
    """Columns are shared out, rows are not; in whatever order they lie."""
    x = torch.randn(777, 1500).bfloat16()
    for view in (x, x.t(), x[:, ::7], torch.randn(1).expand(777, 1500)):
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(native_sums.column_sums(view))
        assert library == "torch" or all(torch.equal(y, results[0]) for y in results)


def test_no_gradient_and_nan(library: str) -> None:
    """The gradient of a gradient is nobody's; NaN stays in its column."""
    x = torch.randn(9, 4, requires_grad=True)
    assert not native_sums.column_sums(x).requires_grad
    bad = x.detach().clone()
    bad[3, 2] = float("nan")
    assert native_sums.column_sums(bad).isnan().tolist() == [False, False, True, False]
