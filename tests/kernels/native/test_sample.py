"""Surveys and copies of rows in C++, against torch."""

from __future__ import annotations

import math

import pytest
import torch

from layout_samples import LAYOUTS, tiles
from ottava import quantize
from ottava.kernels.native import build as native_build
from ottava.kernels.native import sample as native_sample
from ottava.measure.sample import squares_of, take_bands
from ottava.measure.walk import survey
from ottava.numerics.formats import E5M2
from ottava.numerics.tensor import QuantizationSpec

pytestmark = pytest.mark.skipif(bool(native_build.load("sample").reason), reason=native_build.load("sample").reason)


def test_what_is_negated_when_it_is_read_is_not_read_from_memory() -> None:
    """Of conjugated numbers torch keeps the sign apart."""
    x = torch.randn(300, 1, dtype=torch.complex64).conj().imag
    for matrix in (x, torch._neg_view(torch.randn(300, 40))):
        assert "takes plain tensors; got a tensor that is negated" in str(native_sample.supports_survey(matrix))
        assert torch.equal(take_bands(matrix, [range(128, 256)]), matrix[128:256])
        assert torch.equal(survey(matrix), survey(matrix + 0.0))


def test_a_survey_is_what_torch_says(dtype: torch.dtype) -> None:
    """Amaxes, those of finite elements, and how many are not; of every layout, and of x in another dtype."""
    for make in LAYOUTS.values():
        x = make(dtype)
        if not x.numel():
            continue
        for spoiled in (x, x.where(torch.rand(x.shape) > 0.1, math.inf), x.where(torch.rand(x.shape) > 0.1, math.nan)):
            for target in (None, torch.float32, torch.bfloat16, torch.float16):
                assert native_sample.supports_survey(spoiled) is None
                y = spoiled if target is None else spoiled.to(target)
                finite = y.isfinite()
                expected = [
                    float(y.abs().max()),
                    float(y.where(finite, 0).abs().max()),
                    float((~finite).sum()),
                    y.numel(),
                ]
                got = native_sample.survey(spoiled, target)
                assert torch.equal(got.nan_to_num(-1.0), torch.tensor(expected, dtype=torch.float64).nan_to_num(-1.0))


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_an_amax_is_rounded_as_its_tensor_would_be(target: torch.dtype) -> None:
    """Ties to even, subnormal numbers, and what rounds to infinity."""
    info = torch.finfo(target)
    x = torch.cat(
        [torch.randn(2000) * torch.exp2(torch.randint(-150, 128, (2000,))), torch.tensor([info.max, info.tiny])]
    )
    x = torch.cat([x, x.to(target).float() * (1 + info.eps / 2), torch.tensor([info.max * (1 + info.eps / 4)])])
    x = x[x.isfinite()]
    for number in x:
        y = number.abs().to(target).double()
        extent = native_sample.survey(number.reshape(1, 1), target)
        assert float(extent[0]) == float(y)
        assert float(extent[1]) == (float(y) if y.isfinite() else 0.0)


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_that_are_taken_are_those_rows(dtype: torch.dtype, threads: int) -> None:
    """Of every layout in rows or columns, of numbers and of codes; in memory of their own."""
    xs = [make(dtype) for make in LAYOUTS.values()]
    xs += [tiles(300, 700, dtype), tiles(700, 300, dtype).t(), tiles(777, 133, dtype).t()]
    torch.set_num_threads(threads)
    try:
        for x in xs:
            bands = [range(len(x) // 3), range(len(x) // 2, len(x))]
            bands += [range(top, min(top + 128, len(x)), 4) for top in range(0, len(x), 256)]
            for matrix in (x, quantize(x, QuantizationSpec(E5M2)).data.view(torch.uint8)):
                if reason := native_sample.supports_take(matrix):
                    assert reason == f"native_sample: takes a matrix in rows or columns; got strides {matrix.stride()}"
                    continue
                taken = native_sample.take(matrix, bands)
                assert torch.equal(taken, torch.cat([matrix[b.start : b.stop : b.step] for b in bands]))
                assert taken.is_contiguous()
            if x.numel() and native_sample.supports_take(x) is None:
                matrix = x.clone(memory_format=torch.preserve_format)
                matrix[0, 0], matrix[-1, -1] = math.inf, math.nan
                squares = torch.empty(len(bands) - 2, -(-x.shape[1] // 128))
                native_sample.take(matrix, bands[2:], squares)
                assert torch.equal(squares, squares_of(matrix, bands[2:]))
    finally:
        torch.set_num_threads(1)
