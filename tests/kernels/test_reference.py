"""The truth against the definition: casts block by block, GEMMs in fp64 with a bound derived from fp32's rounding."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.operands import Float64Gemm, Pair, cast
from ottava.kernels import reference
from ottava.numerics.formats import E2M1, E2M3, E3M2, E4M3, E5M2, FORMATS, Format
from ottava.numerics.rounding import encode
from ottava.numerics.scaling import PER_ROW, PER_TENSOR, Granularity, amax, compute_scale
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from sweep import AXES, sweep


def operands(pair: Pair, sizes: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16) -> list[QuantizedTensor]:
    """Both sides of a GEMM; rows and columns differ in magnitude."""
    m, n, k = sizes
    sides = []
    for rows, spec in zip((m, n), pair, strict=True):
        x = torch.randn(rows, k) * torch.exp2(torch.randint(-4, 5, (rows, 1)) + torch.randint(-4, 5, (1, k)))
        sides.append(cast(x.to(dtype), spec))
    return sides


# --- quantize --------------------------------------------------------------------------------------------------------


@sweep
def test_quantize_is_the_definition_block_by_block(spec: QuantizationSpec, matrix: Tensor) -> None:
    """Slice a block, take its scale, multiply in fp32, encode: the same bytes, scales and amax."""
    data, scale_inv, block_amax = reference.quantize(matrix, spec)
    rows, cols = matrix.shape
    height, width = spec.granularity.block_shape((rows, cols))
    assert torch.equal(block_amax, amax(matrix, spec.granularity))
    scale = compute_scale(block_amax, E4M3, scale_format=spec.scale_format)
    assert torch.equal(scale_inv, scale.scale_inv)
    assert data.shape == matrix.shape
    codes = data.view(torch.uint8)
    for row in range(scale_inv.shape[0])[:7]:
        for col in range(scale_inv.shape[1])[-7:]:
            block = (slice(row * height, (row + 1) * height), slice(col * width, (col + 1) * width))
            expected = encode(matrix[block].float() * scale.scale[row, col], E4M3)
            assert torch.equal(codes[block], expected.view(torch.uint8))


@sweep(fmt=[E4M3, E5M2, E2M1, E2M3, E3M2])
def test_a_given_scale_multiplies(fmt: Format, matrix: Tensor) -> None:
    """Delayed scaling: codes of x * scale, the inverse kept, what overflows saturated; scale 0 is the current scale."""
    spec = QuantizationSpec(fmt)
    data, scale_inv, seen = reference.quantize(matrix, spec, torch.tensor(3.0))
    assert torch.equal(data.view(torch.uint8), encode(matrix.float() * 3, fmt).view(torch.uint8))
    assert scale_inv == torch.tensor([[3.0]]).reciprocal()
    assert torch.equal(seen, amax(matrix))
    fallback, current = reference.quantize(matrix, spec, torch.tensor(0.0)), reference.quantize(matrix, spec)
    assert torch.equal(fallback.data.view(torch.uint8), current.data.view(torch.uint8))
    assert torch.equal(fallback.scale_inv, current.scale_inv)


@sweep
def test_infinity_and_nan_are_nan_in_their_place(spec: QuantizationSpec, dtype: torch.dtype) -> None:
    """One inf and one NaN, far apart: both dequantize to NaN; others survive. A format without NaN loses the block."""
    x = torch.ones(40, 300, dtype=dtype)
    x[1, 2], x[30, 290] = -math.inf, math.nan
    data, scale_inv, seen = reference.quantize(x, spec)
    y = QuantizedTensor(data, scale_inv, spec, dtype).dequantize(torch.float32)
    assert y.isnan().nonzero().tolist() == [[1, 2], [30, 290]]
    assert not seen.isfinite().all()
    small = replace(spec, format=E2M1)
    data, scale_inv, seen = reference.quantize(x, small)
    lost = QuantizedTensor(data, scale_inv, small, dtype).dequantize(torch.float32).isnan()
    blocks = spec.granularity.blocks(~x.isfinite()).any(3).any(1)
    assert torch.equal(lost, spec.granularity.expand(blocks, x.shape).expand(x.shape))
    y[1, 2], y[30, 290] = 1, 1
    torch.testing.assert_close(y, torch.ones(40, 300), rtol=E4M3.eps / 2, atol=0)


@sweep
def test_zeros_stay_zeros(spec: QuantizationSpec, dtype: torch.dtype) -> None:
    """Scale 1, code 0, sign kept."""
    x = torch.zeros(40, 300, dtype=dtype)
    x[:, ::2] = -0.0
    data, scale_inv, seen = reference.quantize(x, spec)
    assert (scale_inv == 1).all()
    assert (seen == 0).all()
    assert torch.equal(data.float().view(torch.int32), x.float().view(torch.int32))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_only_matrices_are_cast(shape: tuple[int, ...]) -> None:
    """Refused with the remedy."""
    with pytest.raises(ValueError, match=r"needs a matrix \(rows, columns\): flatten it first"):
        reference.quantize(torch.zeros(shape), QuantizationSpec(E4M3))


@pytest.mark.gpu
@sweep
def test_cuda_gives_the_same_bits(spec: QuantizationSpec) -> None:
    """Codes, scales and amax of a laptop and of a GPU, for every format, dtype and layout."""
    x = torch.randn(130, 300) * torch.exp2(torch.randint(-9, 9, (130, 1)))
    views = (x, x.t(), x[::3, 1::2], x[:1], x[:0])
    for fmt, dtype, view in itertools.product(FORMATS.values(), (torch.float32, torch.bfloat16, torch.float16), views):
        given = view.to(dtype)
        here, there = (reference.quantize(given.to(device), replace(spec, format=fmt)) for device in ("cpu", "cuda"))
        for ours, theirs in zip(here, there, strict=True):
            raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.dtype.itemsize]
            assert torch.equal(ours.contiguous().view(raw), theirs.cpu().contiguous().view(raw))


# --- gemm ------------------------------------------------------------------------------------------------------------


@sweep
def test_gemm_is_fp32_accumulation_rounded_once(
    pair: Pair, sizes: tuple[int, int, int], dtype: torch.dtype, float64_gemm: Float64Gemm
) -> None:
    """Within K * 2**-24 * sum |a||b| of fp64, and half an ulp of the output; the half ulp is there once. Sizes by
    turns with a bias, another turn in each dtype."""
    a, b = operands(pair, sizes)
    with_bias = (AXES["sizes"].index(sizes) + AXES["dtype"].index(dtype)) % 2
    bias = (torch.randn(sizes[1]) * 8).to(dtype) if with_bias else None
    exact, accumulation = float64_gemm(a, b, bias)
    y = reference.gemm(a, b, dtype, bias)
    assert (tuple(y.shape), y.dtype) == (sizes[:2], dtype)
    info = torch.finfo(dtype)
    half_ulp = info.eps / 2 * (exact.abs() + accumulation) + info.smallest_normal * info.eps / 2
    overflows = exact.abs() > info.max  # fp16
    error = (y.double() - exact).abs()
    assert (error <= accumulation + half_ulp)[~overflows].all()
    in_fp32 = reference.gemm(a, b, torch.float32, bias)
    assert ((in_fp32.double() - exact).abs() <= accumulation).all()
    assert torch.equal(y, in_fp32.to(dtype))


@sweep(
    lhs=["tensor", "row", "1x128", "*x16", "3x5"],
    rhs=["tensor", "1x32", "16x16", "128x128", "*x7"],
    scale_format=["fp32", "e8m0"],
)
def test_blocks_of_any_two_sizes_multiply(lhs: str, rhs: str, scale_format: str, float64_gemm: Float64Gemm) -> None:
    """Where blocks of a end inside blocks of b, sums end too: K = 300, blocks of 5 and 7, 128 and 32, 16 and all."""
    specs = [QuantizationSpec(E4M3, Granularity.parse(text), scale_format) for text in (lhs, rhs)]  # type: ignore[arg-type]
    a, b = operands((specs[0], specs[1]), (20, 40, 300))
    exact, accumulation = float64_gemm(a, b, None)
    y = reference.gemm(a, b, torch.float32, None)
    assert ((y.double() - exact).abs() <= 3 * accumulation).all()  # blocks of 1 column: two more roundings a product


def test_a_block_is_scaled_once_however_long_the_sum_is() -> None:
    """The other side has one scale, and 40 columns are no whole number of blocks of 16."""
    a, b = operands((QuantizationSpec(E4M3, Granularity(1, 16)), QuantizationSpec(E4M3)), (5, 7, 40))
    y = torch.zeros(5, 7)
    for i, columns in enumerate((slice(0, 16), slice(16, 32), slice(32, 40))):
        sums = a.data[:, columns].float() @ b.data[:, columns].float().t()
        y += sums * a.scale_inv[:, i : i + 1] * b.scale_inv
    assert torch.equal(reference.gemm(a, b, torch.float32, None), y)


@sweep
def test_nearly_every_output_is_correctly_rounded(pair: Pair, float64_gemm: Float64Gemm) -> None:
    """K = 1024, bf16 outputs: fp32 sums leave 0 to 1.1 in 10,000 one ulp off, NVFP4's two-level scales up to 3."""
    a, b = operands(pair, (256, 256, 1024))
    exact, _ = float64_gemm(a, b, None)
    wrong = reference.gemm(a, b, torch.bfloat16, None) != exact.to(torch.bfloat16)
    assert wrong.double().mean() <= (6e-4 if pair[0].format == E2M1 else 3e-4)


def test_power_of_two_scales_leave_small_sums_exact() -> None:
    """Integers of E4M3 up to 16, 64 products: every sum fits in fp32's 24 bits, every scale in its exponent."""
    for pair_spec in (QuantizationSpec(E4M3, PER_ROW, "pow2"), QuantizationSpec(E4M3, PER_TENSOR, "pow2")):
        x, w = (torch.randint(-16, 17, (24, 64)).float() for _ in range(2))
        y = reference.gemm(cast(x, pair_spec), cast(w, pair_spec), torch.float32, None)
        assert torch.equal(y, (x.double() @ w.double().t()).float())


@sweep
def test_nan_stays_in_its_row(pair: Pair) -> None:
    """A NaN in row 2 of a makes row 2 of y NaN and no other; a format without NaN has made a number of it."""
    a, b = operands(pair, (8, 8, 256))
    clean = reference.gemm(a, b, torch.float32, None)
    if pair[0].format.has_nan:
        a.data[2, 100] = math.nan
    y = reference.gemm(a, b, torch.float32, None)
    rows = torch.arange(8) == (2 if pair[0].format.has_nan else -1)
    assert y[rows].isnan().all()
    assert torch.equal(y[~rows], clean[~rows])


def test_a_product_has_one_order_of_sums() -> None:
    """For any strides, and for sums below 1,000 numbers for any number of threads; torch's own depend on both."""
    sizes = itertools.product((1, 2, 3, 8, 12, 13, 64), (1, 12, 128), (2, 17, 257, 1000))
    for rows, columns, depth in sizes:
        a, b = torch.randn(rows, depth), torch.randn(columns, depth)
        torch.set_num_threads(1)
        expected = reference.product(a, b)
        torch.set_num_threads(1 if depth == 1000 else 2)
        for one, other in itertools.product((a, a.t().contiguous().t()), (b, b.t().contiguous().t())):
            assert torch.equal(reference.product(one, other), expected), (rows, columns, depth)
