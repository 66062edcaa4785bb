"""Blocks, their amax and their scale: against naive loops, exact rational arithmetic, torchao and TransformerEngine.

What is a power of two is checked exactly: Fractions, or fp64 where a product of two such numbers has no error.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest
import torch
from ml_dtypes import float4_e2m1fn, float8_e4m3fn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

import fp4_samples as fp4
import ottava
from ottava.numerics.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, Format
from ottava.numerics.rounding import decode, draw_seed, encode, round_to_format
from ottava.numerics.scaling import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_16X16,
    BLOCK_128X128,
    BLOCK_SCALES,
    PER_ROW,
    PER_TENSOR,
    Granularity,
    ScaleFormat,
    amax,
    column_major,
    compute_scale,
)
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.numerics.transforms import Hadamard
from ottava.ops.quantize import quantize
from ottava.recipe import RECIPES
from sweep import sweep

FP32_MAX = torch.finfo(torch.float32).max
OPERANDS = [E4M3, E5M2, E2M1, E2M3, E3M2]
POWERS_OF_TWO: tuple[ScaleFormat, ...] = ("pow2", "e8m0", "e8m0_floor")


def amaxes(fmt: Format) -> Tensor:
    """Every positive finite bf16 number; for every octave the top of `fmt` with its fp32 neighbours; random fp32."""
    every_bf16 = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(torch.float32)
    tops = (fmt.max * torch.exp2(torch.arange(-140.0, 110.0, dtype=torch.float64))).to(torch.float32)
    tops = tops[tops.isfinite() & (tops > 0)]
    near = [torch.nextafter(tops, torch.full_like(tops, towards)) for towards in (0.0, math.inf)]
    random = torch.randint(1, 0x7F800000, (20000,), dtype=torch.int32).view(torch.float32)
    return torch.cat([every_bf16, tops, *near, random]).reshape(-1, 1)


def naive_amax(x: Tensor, granularity: Granularity) -> Tensor:
    """Block by block, by slicing."""
    rows, cols = granularity.rows or max(x.shape[0], 1), granularity.cols or max(x.shape[1], 1)
    row_starts = range(0, x.shape[0], rows) if granularity.rows else (0,)
    col_starts = range(0, x.shape[1], cols) if granularity.cols else (0,)
    blocks = [[x[r : r + rows, c : c + cols].abs().float() for c in col_starts] for r in row_starts]
    largest = [[float(block.max()) if block.numel() else 0.0 for block in line] for line in blocks]
    return torch.tensor(largest).reshape(len(row_starts), len(col_starts))


# --- blocks and amax -------------------------------------------------------------------------------------------------


@sweep
def test_amax_is_that_of_a_naive_loop(granularity: Granularity, matrix: Tensor) -> None:
    """Bit for bit in fp32, ragged last blocks, transposed and strided and empty matrices included."""
    result = amax(matrix, granularity)
    assert (result.dtype, tuple(result.shape)) == (torch.float32, granularity.grid_shape(tuple(matrix.shape)))
    assert torch.equal(result, naive_amax(matrix, granularity))


@sweep
def test_amax_takes_fp64_as_well(granularity: Granularity) -> None:
    """Statistics are sometimes asked about fp64 tensors; the result is fp32 all the same."""
    x = torch.randn(37, 131, dtype=torch.float64).to(torch.float32)
    assert torch.equal(amax(x.double(), granularity), naive_amax(x, granularity))


@sweep
def test_multiplying_by_blocks_is_multiplying_by_the_expanded_factors(granularity: Granularity, matrix: Tensor) -> None:
    """In place, along memory whatever the layout, without making a factor for every element where blocks are whole."""
    x = matrix.to(torch.float32, copy=True)
    grid = granularity.grid_shape((x.shape[0], x.shape[1]))
    factors = torch.randn(grid)
    expected = x * granularity.expand(factors, (x.shape[0], x.shape[1]))
    assert granularity.multiply_(x, factors) is x
    assert torch.equal(x, expected)
    assert granularity.transposed.transposed == granularity
    assert granularity.transposed.grid_shape((x.shape[1], x.shape[0])) == (grid[1], grid[0])


@sweep
def test_expanded_scales_sit_on_their_blocks(granularity: Granularity, matrix: Tensor) -> None:
    """The entry that an element sees is the one of the block of its row and column."""
    rows, cols = matrix.shape
    grid = granularity.grid_shape((rows, cols))
    numbered = torch.arange(grid[0] * grid[1], dtype=torch.float32).reshape(grid)
    seen = granularity.expand(numbered, (rows, cols)).expand(rows, cols)
    height, width = granularity.block_shape((rows, cols))
    row, col = torch.meshgrid(torch.arange(rows) // height, torch.arange(cols) // width, indexing="ij")
    assert torch.equal(seen, (row * grid[1] + col).float())


class Largest(TorchDispatchMode):
    """The most numbers that a tensor has which is made meanwhile."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and all(result.data_ptr() != x.data_ptr() for x in args if isinstance(x, Tensor)):
            self.elements = max(self.elements, result.numel())
        return result


@sweep(granularity=[BLOCK_1X16, BLOCK_16X16, Granularity(16, 1), Granularity(None, 16), PER_ROW, PER_TENSOR])
def test_multiplying_by_whole_blocks_makes_no_factor_for_every_element(granularity: Granularity) -> None:
    """Nor does it copy x: rows or columns in memory, one row, one column. What is not repeated is not copied either."""
    for x in (torch.randn(64, 32), torch.randn(32, 64).t(), torch.randn(1, 32), torch.randn(64, 1)):
        factors = torch.randn(granularity.grid_shape((x.shape[0], x.shape[1])))
        if all(extent % block == 0 for extent, block in zip(x.shape, granularity.block_shape(x.shape), strict=True)):
            with Largest() as made:
                granularity.multiply_(x, factors)
            assert made.elements < x.numel() or x.numel() == factors.numel(), (granularity, x.shape)
        if granularity in (PER_ROW, PER_TENSOR):
            assert granularity.expand(factors, (x.shape[0], x.shape[1])) is factors


def test_a_matrix_is_column_major_where_its_transpose_is_an_ordinary_one() -> None:
    """By its strides. A row, a column and a slice of either kind belong where the longer steps are."""
    x = torch.zeros(6, 8)
    assert [column_major(m) for m in (x.t(), x.t()[:, 1:], x.t()[1:])] == [True] * 3
    assert [column_major(m) for m in (x, x[:, 1:], x[:, :1], x[:, ::2], x.t()[::2])] == [False] * 5


@sweep(special=[math.inf, -math.inf, math.nan])
def test_non_finite_numbers_show_in_their_block(granularity: Granularity, special: float, dtype: torch.dtype) -> None:
    """|inf| = inf; NaN is not lost in a maximum, not even beside an infinity; other blocks do not see it."""
    x = torch.ones(40, 300, dtype=dtype)
    x[17, 131] = special
    result = amax(x, granularity)
    hit = (17 // granularity.block_shape((40, 300))[0], 131 // granularity.block_shape((40, 300))[1])
    expected = torch.ones_like(result)
    expected[hit] = abs(special)
    assert torch.equal(result.nan_to_num(-1.0), expected.nan_to_num(-1.0))
    x[17, 130] = math.inf
    x[17, 131] = math.nan
    assert amax(x, granularity)[hit].isnan()


@sweep
def test_amax_of_zeros_is_zero(granularity: Granularity, dtype: torch.dtype) -> None:
    """-0 too."""
    assert (amax(torch.full((40, 300), -0.0, dtype=dtype), granularity) == 0).all()


@sweep
def test_granularity_reads_what_it_prints(granularity: Granularity) -> None:
    """str and parse are inverses; equal and hashable."""
    assert Granularity.parse(str(granularity)) == granularity
    assert hash(Granularity(granularity.rows, granularity.cols)) == hash(granularity)


def test_granularity_names() -> None:
    """The words of receipts and YAML files."""
    named = (PER_TENSOR, PER_ROW, BLOCK_1X16, BLOCK_1X32, BLOCK_1X128, BLOCK_16X16, BLOCK_128X128, Granularity(None, 4))
    assert [str(g) for g in named] == ["tensor", "row", "1x16", "1x32", "1x128", "16x16", "128x128", "*x4"]
    assert [g.transposes for g in named] == [True, False, False, False, False, True, True, False]


@pytest.mark.parametrize("text", ["", "rows", "1", "1x", "x128", "0x128", "1x-1", "1x2x3", "axb"])
def test_other_texts_are_no_granularity(text: str) -> None:
    """Refused with what is expected."""
    with pytest.raises(ValueError, match="needs 'tensor', 'row' or 'ROWSxCOLS' such as '1x128'"):
        Granularity.parse(text)


def test_blocks_of_nothing_are_refused() -> None:
    """A block has a row and a column; a misspelt field is refused with the nearest."""
    for rows, cols in ((0, 1), (1, 0), (-1, None), (None, 0), (65_537, 1), (None, 65_537)):
        with pytest.raises(ValueError, match="at least 1 row and 1 column"):
            Granularity(rows, cols)
    assert Granularity(65_536, 65_536).block_shape((1, 1)) == (65_536, 65_536)
    with pytest.raises(TypeError, match="did you mean 'cols'"):
        Granularity(rows=1, col=1)  # type: ignore[call-arg]


# --- scales ----------------------------------------------------------------------------------------------------------


@sweep(fmt=OPERANDS)
def test_fp32_scale_is_rounded_once(fmt: Format) -> None:
    """448 / amax to the nearest fp32, as IEEE division in numpy has it; its inverse to the nearest of 1 / scale."""
    values = amaxes(fmt)
    scale, scale_inv = compute_scale(values, fmt)
    with np.errstate(over="ignore"):
        quotient = np.minimum(np.float32(fmt.max) / values.numpy(), np.finfo(np.float32).max)
    assert torch.equal(scale, torch.from_numpy(quotient))
    assert torch.equal(scale_inv, torch.from_numpy(np.float32(1) / quotient))


@sweep(fmt=OPERANDS)
def test_scale_rounded_down_is_the_largest_power_of_two_that_does_not_saturate(fmt: Format) -> None:
    """pow2: scale * amax <= max < 2 * scale * amax, exactly; amax 500 in E4M3: 0.5, for 448 / 500 = 0.896."""
    values = amaxes(fmt)
    scale, scale_inv = compute_scale(values, fmt, scale_format="pow2")
    assert (torch.frexp(scale.double()).mantissa == 0.5).all()
    assert (scale.double() * scale_inv.double() == 1).all()
    filled = scale.double() * values.double()  # exact: a power of two times a number
    assert (filled <= fmt.max).all()
    assert ((2 * filled > fmt.max) | (scale == 2.0**127)).all()


@sweep(fmt=OPERANDS)
def test_block_exponent_rounded_up_is_the_smallest_that_does_not_saturate(fmt: Format) -> None:
    """e8m0: amax <= max * scale_inv, and amax > max * scale_inv / 2; E4M3, amax 449: 2, for 449 / 448 > 1."""
    values = amaxes(fmt)
    scale, scale_inv = compute_scale(values, fmt, scale_format="e8m0")
    assert torch.equal(round_to_format(scale_inv, E8M0), scale_inv)
    assert (scale.double() * scale_inv.double() == 1).all()
    reach = fmt.max * scale_inv.double()
    assert (values.double() <= reach).all()
    assert ((values.double() > reach / 2) | (scale_inv == E8M0.min_normal)).all()


@sweep(fmt=OPERANDS)
def test_ocp_floor_is_the_letter_of_ocp(fmt: Format) -> None:
    """e8m0_floor: exponent = floor(log2(amax)) - emax by math.frexp; it saturates exactly where amax / scale > max."""
    values = amaxes(fmt)[::37]
    _, scale_inv = compute_scale(values, fmt, scale_format="e8m0_floor")
    exponents = [math.frexp(value)[1] - 1 - fmt.emax for value in values.flatten().tolist()]
    assert scale_inv.flatten().tolist() == [2.0 ** max(-127, min(127, exponent)) for exponent in exponents]


@sweep(scale_format=POWERS_OF_TWO, margin=[0, 1, 5])
def test_powers_of_two_agree_with_rational_arithmetic(scale_format: ScaleFormat, margin: int) -> None:
    """The definition in Fractions, E4M3: the largest 2**k with amax * 2**(k + margin) <= 448 (OCP's floor: < 512)."""
    values = amaxes(E4M3)[::53]
    values = values[(values > 2.0**-100) & (values < 2.0**100)].reshape(-1, 1)
    scale, _ = compute_scale(values, E4M3, scale_format=scale_format, margin=margin)

    def fits(value: float, exponent: int) -> bool:
        filled = Fraction(value) * Fraction(2) ** (exponent + margin)
        return filled < 512 if scale_format == "e8m0_floor" else filled <= 448

    for value, got in zip(values.flatten().tolist(), scale.flatten().tolist(), strict=True):
        too_large = 11 - math.frexp(value)[1]
        assert got == 2.0 ** next(k for k in itertools.count(too_large, -1) if fits(value, k))


@sweep(fmt=OPERANDS)
def test_scale_rounded_down_never_saturates(fmt: Format) -> None:
    """pow2 and e8m0: amax * scale <= max, whatever the amax; OCP's floor saturates: 511 * 2**0 > 448."""
    values = amaxes(fmt)
    for scale_format in ("pow2", "e8m0"):
        scaled = values.double() * compute_scale(values, fmt, scale_format=scale_format).scale.double()
        assert (scaled <= fmt.max).all()
    floor = values.double() * compute_scale(values, fmt, scale_format="e8m0_floor").scale.double()
    assert (floor > fmt.max).any()  # why "e8m0" is the default of the MX recipes


@sweep(fmt=OPERANDS, value=[0.0, math.inf, math.nan])
def test_an_amax_that_means_nothing_gives_one(fmt: Format, scale_format: ScaleFormat, value: float) -> None:
    """0, inf and nan: scale 1 in that block, and NaN decodes what has no NaN; the other block keeps its own scale."""
    scale, scale_inv = compute_scale(torch.tensor([[value, 3.0]]), fmt, scale_format=scale_format)
    decodes_to_nan = not fmt.has_nan and value != 0
    assert scale[0, 0] == 1
    assert scale_inv[0, 0].isnan() if decodes_to_nan else scale_inv[0, 0] == 1
    alone = compute_scale(torch.tensor([[3.0]]), fmt, scale_format=scale_format)
    assert (scale[0, 1], scale_inv[0, 1]) == (alone.scale[0, 0], alone.scale_inv[0, 0])


@sweep(fmt=OPERANDS, value=[2.0**-149, 2.0**-127, 2.0**-126, 1.0, 2.0**127, FP32_MAX])
def test_scales_are_finite_and_positive_everywhere(fmt: Format, scale_format: ScaleFormat, value: float) -> None:
    """Never infinite, however tiny or huge the amax; 0 only where an E4M3 block scale underflows, as its block does."""
    scale, scale_inv = compute_scale(torch.tensor([[value]]), fmt, scale_format=scale_format)
    assert scale.isfinite().all()
    assert scale_inv.isfinite().all()
    assert (scale > 0).all()
    assert (scale_inv > 0).all() if scale_format != "e4m3" or value >= 1 else (scale_inv >= 0).all()


@sweep
def test_an_empty_grid_has_no_scale(scale_format: ScaleFormat) -> None:
    """Shape in, shape out."""
    scale = compute_scale(torch.zeros(0, 3), E4M3, scale_format=scale_format)
    assert scale.scale.shape == scale.scale_inv.shape == (0, 3)


def test_options_are_given_by_name() -> None:
    """A third value could be a scale format or a margin."""
    with pytest.raises(TypeError, match="positional"):
        compute_scale(torch.ones(1, 1), E4M3, "pow2")  # type: ignore[misc]


def test_a_margin_is_octaves_of_headroom() -> None:
    """Margin m gives the scale of an amax that is 2**m times as large, to the bit."""
    values = torch.tensor([[1.0, 3.0, 500.0, 0.017]])
    for scale_format in get_args(ScaleFormat):
        for margin in (-1, 1, 3):
            got = compute_scale(values, E4M3, scale_format=scale_format, margin=margin)
            larger = compute_scale(values * 2.0**margin, E4M3, scale_format=scale_format)
            assert torch.equal(got.scale, larger.scale), scale_format
            assert torch.equal(got.scale_inv, larger.scale_inv), scale_format


def test_unknown_scale_formats_are_refused() -> None:
    """With the nearest name."""
    with pytest.raises(ValueError, match="unknown scale_format 'e8m1'; did you mean 'e8m0'"):
        compute_scale(torch.ones(1, 1), E4M3, scale_format="e8m1")  # type: ignore[arg-type]
    assert len(get_args(ScaleFormat)) == 5  # a new one joins POWERS_OF_TWO or gets laws of its own


# --- the others ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_format, mode", [("e8m0", "RCEIL"), ("e8m0_floor", "FLOOR")])
@sweep(fmt=[E4M3, E5M2], scale_format=None)
def test_mx_scales_and_codes_are_those_of_torchao(fmt: Format, scale_format: ScaleFormat, mode: str) -> None:
    """Byte for byte, on bf16 blocks from 2**-100 to 2**100; torchao's RCEIL is NVIDIA's rounding up."""
    magnitudes = torch.exp2(torch.randint(-100, 100, (256, 8, 1)).double())
    x = (torch.randn(256, 8, 32, dtype=torch.float64) * magnitudes).reshape(256, 256).to(torch.bfloat16)
    their_scale, their_codes = to_mx(x, fmt.storage_dtype, 32, ScaleCalculationMode[mode])
    ours = compute_scale(amax(x, BLOCK_1X32), fmt, scale_format=scale_format)
    assert torch.equal(encode(ours.scale_inv, E8M0).view(torch.uint8), their_scale.view(torch.uint8))
    scaled = x.float() * BLOCK_1X32.expand(ours.scale, (256, 256))
    assert torch.equal(encode(scaled, fmt).view(torch.uint8), their_codes.view(torch.uint8))


def transformer_engine_e8m0(block_amax: np.ndarray, fmt: Format) -> np.ndarray:
    """float_to_e8m0(amax * (1 / max)) of TransformerEngine's util/ptx_arch_spec.cuh, as a byte."""
    value = block_amax.astype(np.float32) * np.float32(1 / fmt.max)
    bits = value.view(np.uint32)
    exponent, mantissa = (bits >> 23).astype(np.int64), bits & 0x7FFFFF
    round_up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    return exponent + round_up


@sweep(fmt=[E4M3, E5M2])
def test_mxfp8_scales_are_those_of_transformer_engine(fmt: Format) -> None:
    """Its kernel multiplies with fp32(1 / 448), rounded twice; equal bytes for every bf16 amax all the same."""
    values = amaxes(fmt)
    ours = encode(compute_scale(values, fmt, scale_format="e8m0").scale_inv, E8M0).view(torch.uint8).long()
    theirs = torch.from_numpy(transformer_engine_e8m0(values.numpy(), fmt))
    is_bf16 = values == values.to(torch.bfloat16).float()
    assert torch.equal(ours[is_bf16], theirs[is_bf16])
    # of fp32 numbers it may round one just above max * 2**k down: a code saturates there, by less than an ulp
    differ = ours != theirs
    assert (ours[differ] == theirs[differ] + 1).all()
    assert (values.double()[differ] / (fmt.max * torch.exp2(theirs[differ] - 127.0)) < 1 + 2.0**-22).all()


def transformer_engine_nvfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, what they dequantize to) by TransformerEngine's core_nvfp4.cuh, 1 x 16 blocks, in numpy's fp32."""
    f32, top = np.float32, np.finfo(np.float32).max
    blocks = x.astype(f32).reshape(x.shape[0], -1, 16)
    tensor_amax = np.abs(blocks).max()
    s_enc = min(f32(448 * 6) / tensor_amax, top) if tensor_amax else f32(1)
    block_amax = np.abs(blocks).max(-1, keepdims=True)
    s = np.clip(np.minimum(block_amax * f32(s_enc / f32(6)), top), 0, 448).astype(float8_e4m3fn).astype(f32)
    with np.errstate(divide="ignore"):
        encode_scale = np.minimum(f32(1) / (s * f32(f32(1) / s_enc)), top)
    with np.errstate(over="ignore"):
        codes = np.clip(blocks * encode_scale, -6, 6).astype(float4_e2m1fn).astype(f32)
    return codes.reshape(x.shape), (codes * s * f32(f32(1) / s_enc)).reshape(x.shape)


@pytest.mark.parametrize("spread", [0, 4, 30], ids=["alike", "spread", "some block scales underflow"])
def test_nvfp4_two_level_scales_are_those_of_transformer_engine(spread: int) -> None:
    """Codes bit for bit, values to 2 ulp; blocks 2**30 apart: the small ones' E4M3 scale is 0, and so are they."""
    magnitudes = torch.exp2(torch.randint(-spread, 1, (64, 8, 1)).float())
    x = (torch.randn(64, 8, 16) * magnitudes).reshape(64, 128).to(torch.bfloat16)
    codes, dequantized = transformer_engine_nvfp4(x.float().numpy())
    scale, scale_inv = compute_scale(amax(x, BLOCK_1X16), E2M1, scale_format="e4m3")
    ours = round_to_format(x.float() * BLOCK_1X16.expand(scale, (64, 128)), E2M1)
    assert torch.equal(ours, torch.from_numpy(codes))
    theirs = torch.from_numpy(dequantized)
    # they multiply code * s first, which is exact, then by 1 / s_enc; scale_inv = s / s_enc is rounded before the code
    torch.testing.assert_close(ours * BLOCK_1X16.expand(scale_inv, (64, 128)), theirs, rtol=2.0**-22, atol=0)


def test_nvfp4_fills_both_levels() -> None:
    """The block of the largest amax has the E4M3 scale 448 and holds 6: 448 * 6 / s_enc = amax, to an ulp or two."""
    x = torch.randn(32, 64)
    _, scale_inv = compute_scale(amax(x, BLOCK_1X16), E2M1, scale_format="e4m3")
    torch.testing.assert_close(scale_inv.max() * 6, x.abs().max(), rtol=2.0**-22, atol=0)
    tensor_scale_inv = x.abs().max() / (448 * 6)
    block_scales = scale_inv / tensor_scale_inv
    torch.testing.assert_close(round_to_format(block_scales, E4M3), block_scales, rtol=2.0**-22, atol=0)


def test_scales_just_below_a_power_of_two_round_down() -> None:
    """2**k - ulp becomes 2**(k - 1); torchao's exp2(floor(log2(scale))) makes 2**k of most of them."""
    powers = torch.exp2(torch.arange(-110.0, 110.0))
    below = torch.nextafter(powers, torch.zeros_like(powers))  # the wanted scale
    values = (448 / below.double()).to(torch.float32).reshape(-1, 1)
    wanted = torch.full_like(values, 448.0).div(values)
    just_below = wanted.flatten() == below
    ours = compute_scale(values, E4M3, scale_format="pow2").scale.flatten()
    torchao = torch.exp2(torch.floor(torch.log2(wanted))).flatten()
    assert just_below.any()
    assert torch.equal(ours[just_below], (powers / 2)[just_below])
    assert (torchao[just_below] == powers[just_below]).any()


# --- rules for NVFP4's block scales ---

UNCLIPPED = QuantizationSpec(ottava.E2M1, BLOCK_1X16, "e4m3", rounding="stochastic", block_scale="unclipped")

TE_RULES = {
    "four_over_six_te": (256, 1),
    "four_over_six_te_mse": (256, 2),
    "four_over_six_te_448": (448, 1),
    "four_over_six_te_mse_448": (448, 2),
}


def same(x_q: QuantizedTensor, found: tuple[np.ndarray, np.ndarray], case: str) -> None:
    """The same numbers and the same scales."""
    codes, scale_inv = found
    assert torch.equal(decode(x_q.data, x_q.spec.format), torch.from_numpy(codes)), case
    assert torch.equal(x_q.scale_inv, torch.from_numpy(scale_inv.astype(np.float32))), case


def matrices() -> dict[str, Tensor]:
    """BF16, because TransformerEngine rotates such; blocks of very different sizes, zeros, ragged ends."""
    spread = torch.randn(48, 256) * torch.exp2(torch.randint(-20, 4, (48, 16)).float()).repeat_interleave(16, 1)
    spread[3:7, 32:80] = 0
    faint = torch.tensor([1.0, 1.0, 1.0, 2.0**-24, 2.0**-30, 0.0]) / 99
    return {
        "bell": torch.randn(64, 128).bfloat16(),
        "spread": spread.bfloat16(),
        "ragged": (torch.randn(19, 45) + 2).bfloat16(),
        "zeros": torch.zeros(5, 33).bfloat16(),
        "faint": (torch.randn(6, 128) * faint[:, None]).bfloat16(),
        "turned": torch.randn(40, 64).bfloat16().t(),
    }


def test_every_cast_is_that_of_its_definition() -> None:
    for name, x in matrices().items():
        numbers = x.float().numpy()
        for layout in ("rows", "columns"):
            cast = {"rows": x, "columns": x.t().contiguous().t()}[layout]

            def by(spec: QuantizationSpec, x: Tensor = cast) -> QuantizedTensor:
                torch.manual_seed(3)
                return quantize(x, spec)

            def seeds(count: int) -> list[Tensor]:
                torch.manual_seed(3)
                return [draw_seed(torch.device("cpu")) for _ in range(count)]

            (seed,) = seeds(1)
            recipe = RECIPES["nvfp4_rht"]
            same(by(recipe.fprop.lhs), fp4.nvfp4(numbers), name)
            same(by(recipe.fprop.rhs), fp4.nvfp4(numbers, 16), name)
            same(by(recipe.dgrad.lhs), fp4.nvfp4(numbers, 1, fp4.at_random(seed)), name)
            same(by(recipe.wgrad.rhs), fp4.nvfp4(fp4.rotated(numbers)), name)
            same(by(recipe.wgrad.lhs), fp4.nvfp4(fp4.rotated(numbers), 1, fp4.at_random(seed)), name)
            recipe = RECIPES["four_over_six"]
            same(by(recipe.fprop.lhs), fp4.four_over_six(numbers), name)
            same(by(recipe.fprop.rhs), fp4.four_over_six(numbers, 16), name)
            same(by(recipe.wgrad.rhs), fp4.four_over_six(fp4.rotated(numbers)), name)
            for rule, (bound, power) in TE_RULES.items():
                for blocks, rows in ((BLOCK_1X16, 1), (BLOCK_16X16, 16)):
                    spec = QuantizationSpec(ottava.E2M1, blocks, "e4m3", block_scale=rule)
                    same(by(spec), fp4.four_over_six_te(numbers, rows, bound, power), f"{name} {rule}")
            signs, own = seeds(2)
            turned = fp4.rotated(numbers, 128, fp4.fresh_signs(signs), to_bf16=False)
            same(by(RECIPES["ms_eden"].dgrad.lhs), fp4.ms_eden(turned, own), name)
            same(by(UNCLIPPED), fp4.unclipped(numbers, fp4.at_random(seed)), name)
            same(by(RECIPES["mxfp4"].fprop.lhs), fp4.mxfp4(numbers), name)
            same(by(RECIPES["mxfp4"].dgrad.lhs), fp4.mxfp4(numbers, fp4.at_random(seed)), name)
            for spec, axis in ((RECIPES["averis"].fprop.lhs, 0), (RECIPES["averis"].wgrad.rhs, 1)):
                mean = numbers.astype(np.float64).mean(axis, keepdims=True).astype(np.float32)
                same(by(spec), fp4.nvfp4(numbers - mean), name)
            spec = RECIPES["averis"].dgrad.lhs
            mean = numbers.astype(np.float64).mean(0, keepdims=True).astype(np.float32)
            same(by(spec), fp4.nvfp4(numbers - mean, 1, fp4.at_random(seed)), name)


def test_blocks_without_an_amax_have_scale_1_or_nan() -> None:
    """Zeros 1; what is not finite decodes to NaN; its neighbours keep their scale. No block: no row or column."""
    x = torch.tensor([[0.0] * 16 + [torch.inf] * 16 + [torch.nan] * 16 + [3.0] * 16])
    rules = {"unclipped": UNCLIPPED, "four_over_six": RECIPES["four_over_six"].fprop.lhs}
    rules |= {rule: replace(rules["four_over_six"], block_scale=rule) for rule in TE_RULES}
    rules |= {"ms_eden": RECIPES["ms_eden"].dgrad.lhs}
    for name, rule in BLOCK_SCALES.items():
        found = rule(x, amax(x, BLOCK_1X16), BLOCK_1X16, 16)
        assert found.scale[0, :3].tolist() == [1, 1, 1], name
        assert found.scale_inv[0].isnan().tolist() == [False, True, True, False], name
        assert found.scale_inv[0, 0] == 1, name
        for shape in ((0, 32), (3, 0)):
            x_q = quantize(torch.empty(shape), rules[name])
            assert (x_q.data.shape[0], x_q.data.numel()) == (shape[0], 0), name


def test_squared_errors_are_those_of_the_field() -> None:
    """Of one million numbers N(0, 1), times 1000."""
    x = torch.randn(1000, 1024)
    nvfp4 = RECIPES["nvfp4"]
    expected = {
        "nearest, 1x16": (nvfp4.fprop.lhs, 9.04),
        "nearest, 16x16": (nvfp4.fprop.rhs, 12.39),
        "four over six": (RECIPES["four_over_six"].fprop.lhs, 7.57),
        "stochastic": (UNCLIPPED, 23.6),
        "MS-EDEN": (RECIPES["ms_eden"].dgrad.lhs, 9.73),
    }
    for name, (spec, error) in expected.items():
        assert spec is not None
        x_q = quantize(x, spec)
        found = (x_q.dequantize(torch.float32) - x_q.transformed(x)).double().square().mean().item()
        assert found * 1000 == pytest.approx(error, rel=0.01), name


def test_means_over_seeds_are_unbiased_where_that_is_claimed() -> None:
    """The error of a mean falls with the root of the number of casts; a bias stays. NVIDIA's scales clip amaxes."""
    x = torch.randn(32, 128)
    casts = 150

    def mean_error(spec: QuantizationSpec) -> tuple[float, float]:
        """(relative error of one cast, of the mean of many)."""
        total, single = torch.zeros(32, 128, dtype=torch.float64), 0.0
        for _ in range(casts):
            x_q = quantize(x, spec)
            got = x_q.dequantize(torch.float32).double()
            if isinstance(spec.transform, Hadamard):  # H is orthogonal: its transpose turns back
                signs = torch.from_numpy(fp4.fresh_signs(x_q.aside)).double()
                got = (got @ torch.from_numpy(fp4.hadamard(128)).T) * signs
            total += got
            single = float((got - x).norm() / x.norm())
        return single, float((total / casts - x).norm() / x.norm())

    for spec in (UNCLIPPED, RECIPES["ms_eden"].dgrad.lhs):
        assert spec is not None
        single, mean = mean_error(spec)
        assert mean < 1.15 * single / casts**0.5, spec
    nearest = RECIPES["nvfp4"].fprop.lhs
    assert nearest is not None
    single, mean = mean_error(nearest)
    assert mean > 0.99 * single
    clipped = RECIPES["nvfp4"].dgrad.lhs
    assert clipped is not None
    single, mean = mean_error(clipped)
    assert 1.3 * single / casts**0.5 < mean < 0.3 * single  # which is why "unclipped" is there


def test_rules_are_refused_where_they_mean_nothing() -> None:
    def spec(**fields: object) -> QuantizationSpec:
        return QuantizationSpec.from_dict(
            {"format": "E2M1", "granularity": "1x16", "scale_format": "e4m3", **fields}  # type: ignore[arg-type]
        )

    assert set(BLOCK_SCALES) == {"unclipped", "four_over_six", "ms_eden", *TE_RULES}
    for fields, message in (
        ({"block_scale": "four_over_sixs"}, "did you mean 'four_over_six'"),
        ({"block_scale": "four_over_six", "scale_format": "e8m0"}, "is for E2M1 with scale_format 'e4m3'"),
        ({"block_scale": "four_over_six", "format": "E4M3"}, "got E4M3"),
        ({"block_scale": "four_over_six", "margin": 1}, "margin 1"),
        ({"block_scale": "ms_eden"}, "unbiased behind a random rotation only"),
        ({"block_scale": "ms_eden", "transform": {"kind": "hadamard", "size": 8, "signs": 1}}, "divide its size"),
    ):
        with pytest.raises(ValueError, match=message):
            spec(**fields)
    for recipe in ("nvfp4_rht", "ms_eden"):
        for gemm in ("fprop", "dgrad", "wgrad"):
            cell = getattr(RECIPES[recipe], gemm).lhs
            assert QuantizationSpec.from_dict(cell.to_dict()) == cell
