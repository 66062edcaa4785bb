"""The sums of measure.walk from C++: counts, histograms and extremes exactly those of the torch walk, sums to 1e-6."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from layout_samples import LAYOUTS, tiles
from ottava import quantize
from ottava.kernels.native import build as native_build
from ottava.kernels.native import measure as native_measure
from ottava.kernels.native.measure import Look
from ottava.measure.sample import sampled, squares_of, take_bands
from ottava.measure.tally import DETAIL_WIDTHS, DETAILS, Detail, Tally, tally_fields
from ottava.measure.walk import Packed, measure_all, measure_packed, survey
from ottava.numerics.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, E8M0
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_1X128, PER_ROW, Granularity
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from sweep import sweep

REASON = native_build.load("measure").reason or native_build.load("sample").reason
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

SMALL = (E4M3, E5M2, E2M1, E2M3, E3M2)
SUMS = {"sx", "sabs", "sxx", "sx4", "see", "sxe", "srel", "scale_log2", "scale_log2_squared"}
SUMS |= {f.name for f in tally_fields() if f.name.startswith("energy")}
CANCELS = {"sx": "sabs", "sxe": "sxx"}


@contextmanager
def in_torch() -> Iterator[None]:
    """The walk in torch, which is the truth here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_measure, "supports_measure", lambda *_: "not now")
        yield


def assert_same(x: Tensor, x_q: QuantizedTensor, extent: Tensor | None = None, detail: Detail = "blocks") -> None:
    assert native_measure.supports_measure(x, x_q) is None
    ours = measure_packed(x, x_q, extent=extent, detail=detail).tally()
    with in_torch():
        truth = measure_packed(x, x_q, extent=extent, detail=detail).tally()
    differ = {f.name for f in tally_fields() if not equal(f.name, ours, truth)}
    assert {name: (getattr(ours, name), getattr(truth, name)) for name in differ} == {}
    assert_numbers(x, x_q, extent)


def assert_numbers(x: Tensor, x_q: QuantizedTensor, extent: Tensor | None = None) -> None:
    """The walk without histograms gives the bits of the one with them."""
    full, numbers = (measure_packed(x, x_q, extent=extent, detail=detail) for detail in ("blocks", "numbers"))
    width = DETAIL_WIDTHS["numbers"]
    assert torch.equal(full.sums[:width], numbers.sums[:width])
    assert torch.equal(full.extremes, numbers.extremes)
    assert not numbers.sums[width:].any()


def equal(name: str, ours: Tally, truth: Tally) -> bool:
    got, wanted = np.asarray(getattr(ours, name)), np.asarray(getattr(truth, name))
    if name == "row_sqnr":  # of fp32 sums: a row on the edge of a bin may be in its neighbour
        return got.sum() == wanted.sum() and float(np.abs(np.cumsum(got - wanted)).sum()) <= 1
    if name not in SUMS:
        return np.array_equal(got, wanted, equal_nan=True)
    size = getattr(truth, CANCELS[name]) if name in CANCELS else 0.0
    return np.allclose(got, wanted, rtol=1e-6, atol=1e-6 * size, equal_nan=True)


@sweep(fmt=SMALL, block=["tensor", "row", "1x128", "1x32", "128x128", "16x16", "3x5", "*x4"])
def test_the_tally_is_that_of_the_torch_walk(fmt: object, block: str, dtype: torch.dtype) -> None:
    """Every layout; infinities and NaN among numbers of very different size, casts of x.T too."""
    spec = QuantizationSpec(fmt, Granularity.parse(block))  # type: ignore[arg-type]
    for make in (*LAYOUTS.values(), lambda dtype: tiles(150, 700, dtype)):
        x = make(dtype)
        if not x.numel():
            continue
        assert_same(x, quantize(x, spec))
        assert_same(x, quantize(x, spec), detail="exponents")
    for x in (tiles(140, 131, dtype), tiles(131, 140, dtype).t()):
        x[0, 5], x[3, 7], x[30, 30], x[20, 20], x[5] = math.inf, -math.inf, math.nan, -math.nan, x[5] * 1e-6
        assert_same(x, quantize(x, spec))


@sweep(scale_format=["fp32", "pow2", "e8m0", "e8m0_floor", "e4m3"])
def test_every_scale_format_is_measured(scale_format: str) -> None:
    """Two-level scales that vanish, power-of-two ones that saturate."""
    for fmt in (E4M3, E2M1):
        spec = QuantizationSpec(fmt, BLOCK_1X32, scale_format)  # type: ignore[arg-type]
        x = torch.randn(130, 300) * torch.exp2(torch.randint(-40, 40, (130, 1)))
        assert_same(x, quantize(x, spec))


@pytest.mark.parametrize("amax", [2.0**-149, 1e-40, 1e-20, 1e30, 3.4e38])
def test_numbers_at_the_ends_of_fp32_are_measured(amax: float) -> None:
    """Neither squares nor quotients leave their range; a row of subnormals, too."""
    x = torch.randn(140, 200).clamp(-1, 1) * amax
    x[7] *= 1e-3
    for spec in (QuantizationSpec(E4M3), QuantizationSpec(E4M3, PER_ROW, "pow2"), QuantizationSpec(E5M2, BLOCK_1X128)):
        assert_same(x, quantize(x, spec))


@pytest.mark.parametrize(
    "largest, smallest", [(0, -126), (0, -127), (0, -140), (60, -66), (60, -67), (60, -80), (-60, -126)]
)
@sweep(dtype=[torch.float32, torch.bfloat16])
def test_a_row_with_numbers_that_a_unit_would_make_subnormal(largest: int, smallest: int, dtype: torch.dtype) -> None:
    """Or that are: they are summed as exactly as all others, whatever is quicker for normal ones. One row in three, in
    casts that keep them and in casts that lose them."""
    x = torch.randn(96, 256, dtype=torch.float64).clamp(-1, 1) * 2.0**largest
    x[::3, 10:20] = 1.5 * 2.0**smallest
    x = x.to(dtype)
    for block in ("tensor", "1x32"):
        x_q = quantize(x, QuantizationSpec(E4M3, Granularity.parse(block)))
        assert_same(x, x_q)
    zeros = torch.where(x.abs() < 2.0 ** (largest - 60), x, 0)
    assert_same(zeros, quantize(zeros, QuantizationSpec(E5M2, PER_ROW)))


@sweep(octaves=[6, 7, 8, 9, 23, 24, 25, 60, 100, 130], by=["rows of a block", "parts of a row", "elements"])
def test_histograms_of_numbers_far_apart_are_those_of_the_torch_walk(octaves: int, by: str, dtype: torch.dtype) -> None:
    """Elements are counted in two blocks at once, and two neighbours at once, where they lie close to each other and to
    the largest of all; so at every limit of that, beyond it, among zeros, and where not even inverses are normal."""
    x = torch.randn(256, 320, dtype=torch.float64)
    low = 2.0 ** -(octaves + torch.rand(8, dtype=torch.float64))
    if by == "elements":
        x[torch.rand(x.shape) < 0.3] *= low[0]
        x[:, 100:140] = 0
    elif by == "parts of a row":
        x *= low.repeat_interleave(32).new_tensor([1.0, *low.tolist(), 1.0]).repeat_interleave(32)
    else:
        x[1::2] *= low[0]
        x[7] = 0
    x = (x / x.abs().max() * float(torch.finfo(dtype).max) / 4).to(dtype)
    for spec in (QuantizationSpec(E4M3), QuantizationSpec(E5M2, BLOCK_1X32, "e8m0")):
        assert_same(x, quantize(x, spec))


@sweep
def test_zeros_below_numbers_far_smaller_than_their_row_are_counted(dtype: torch.dtype) -> None:
    """Their block's amax is so small in units of the row that its inverse is infinite, and 0 times that is NaN."""
    info = torch.finfo(dtype)
    x = torch.zeros(2, 256, dtype=dtype)
    x[0, 0], x[1, 128:] = info.max / 4, info.smallest_normal * 2
    assert_same(x, quantize(x, QuantizationSpec(E4M3)))


@sweep(dtype=[torch.bfloat16, torch.float16])
def test_a_quotient_on_the_edge_of_a_bin_is_in_the_right_one(dtype: torch.dtype) -> None:
    """Magnitudes of 16 bits within 8 octaves of amaxes of many significands, edges included: no division is made."""
    one, top = torch.ones((), dtype=dtype).view(torch.int16), torch.full((), 2.0, dtype=dtype).view(torch.int16)
    step = max(int(top - one) // 128, 1)
    for amax in range(int(one), int(top), 5 * step + 1):
        bits = torch.arange(amax - 8 * int(top - one), amax + 1, dtype=torch.int16)
        x = bits[-(len(bits) // 32 * 32) :].reshape(-1, 32).view(dtype)
        x = torch.cat([x, torch.full_like(x[:, :1], 0)], 1)[:, :32]
        x[:, 0] = x.max()  # one amax for all
        assert_same(x, quantize(x, QuantizationSpec(E4M3)))


@sweep(fmt=SMALL, octaves=[-40, 0, 1, 9])
def test_predicted_scales_are_measured(fmt: object, octaves: int) -> None:
    """Far too small: underflow; too large: what is clipped, the tie at the top included; and the error of each."""
    for scaling in ("delayed", "guarded"):
        spec = QuantizationSpec(fmt, scaling=scaling)  # type: ignore[arg-type]
        x = torch.randn(130, 300) * 4
        scale = torch.tensor(spec.format.max / float(x.abs().max()) * 2.0**octaves)
        assert_same(x, quantize(x, spec, scale=scale))
    step = math.ldexp(spec.format.eps, spec.format.emax)
    tie = torch.tensor([[spec.format.max + step / 2, spec.format.max + step, spec.format.max + step / 4, 1.0]])
    spec = replace(spec, scaling="delayed")  # a guard would not let it clip
    assert_same(tie, quantize(tie, spec, scale=torch.tensor(1.0)))


@sweep(fmt=SMALL, block=["tensor", "row", "1x128", "1x32", "128x128", "3x5", "*x4"])
def test_a_cast_still_to_be_made_is_the_one_of_quantize(fmt: object, block: str, dtype: torch.dtype) -> None:
    """Several at once, each in one of the layouts, with current and with given scales."""
    specs = [QuantizationSpec(fmt, Granularity.parse(block))]  # type: ignore[arg-type]
    if block == "tensor":
        specs += [replace(specs[0], scaling="delayed"), replace(specs[0], scaling="guarded")]
    for spec in specs:
        for scale in (None, torch.tensor(0.375)) if spec.predicted else (None,):
            xs = [make(dtype) for make in LAYOUTS.values()]
            xs = [x for x in [*xs, tiles(140, 131, dtype).nan_to_num(), tiles(131, 140, dtype).t()] if x.numel()]
            looks = [Look(x, spec, survey(x), scale) for x in xs]
            assert [native_measure.supports_measure(x, spec) for x in xs] == [None] * len(xs)
            together = measure_all(looks)
            for i, x in enumerate(xs):
                alone = measure_packed(x, quantize(x, spec, scale=scale))
                assert torch.equal(together.sums[i], alone.sums), i
                assert torch.equal(together.extremes[i], alone.extremes), i


def test_the_scale_of_a_sample_is_that_of_its_tensor() -> None:
    """Where one serves all of it; blocks have their own."""
    x = tiles(600, 140, torch.bfloat16)
    x[550, 3] = 1e4
    for granularity in ("tensor", "row", "1x128", "128x128"):
        spec = QuantizationSpec(E4M3, Granularity.parse(granularity))
        to_make, made = (sampled(Look(x, cast, survey(x)), 4, 0) for cast in (spec, quantize(x, spec)))
        assert to_make is not None
        if granularity == "128x128":  # of blocks that are still to be cast whole bands are taken
            rows = [*range(128), *range(512, 600)]
            made = Look(x[rows], quantize(x[rows], spec), survey(x))
        assert made is not None
        assert torch.equal(measure_all([to_make]).sums, measure_all([made]).sums)


def test_threads_change_no_bit() -> None:
    """Bands are added in their order, whoever measured them: fp64 sums, too."""

    def run(x: Tensor, x_q: QuantizedTensor, detail: Detail, threads: int) -> Packed:
        torch.set_num_threads(threads)
        return measure_packed(x, x_q, detail=detail)

    for rows, cols in ((128 * 37 + 5, 333), (100, 3000), (300, 1100)):  # of one band, its groups are shared
        x = tiles(rows, cols, torch.bfloat16)
        x_q = quantize(x, QuantizationSpec(E4M3, BLOCK_1X32))
        for detail in DETAILS:
            alone = run(x, x_q, detail, 1)
            for threads in (2, 5):
                assert all(map(torch.equal, alone, run(x, x_q, detail, threads)))


@pytest.mark.parametrize("block", ["tensor", "row", "1x128", "1x32", "16x16", "128x128", "3x5", "*x4"])
@pytest.mark.parametrize("rows, cols, every", [(600, 140, 4), (1100, 300, 16), (130, 40, 4), (128 * 9 + 70, 128, 8)])
def test_samples_are_measured_as_by_the_torch_walk(block: str, rows: int, cols: int, every: int) -> None:
    """Against amax and faults of the whole tensor and the amaxes of the 128x128 blocks that the rows are from; of x.T,
    in several phases, where rows lie far below others of their block."""
    for x in (tiles(rows, cols, torch.bfloat16), tiles(cols, rows, torch.float32).t()):
        x[::3] *= 2.0**-20
        x[rows - 1, 3], x[5, 1] = math.inf, math.nan
        for phase in (0, 1, 5):
            look = Look(x, quantize(x, QuantizationSpec(E4M3, Granularity.parse(block))), survey(x))
            part = sampled(look, every, phase)
            if part is None:
                assert block == "3x5"
                continue
            ours = measure_all([part])
            with in_torch():
                truth = measure_all([part])
            tallies = [Packed(p.sums[0], p.extremes[0]).tally() for p in (ours, truth)]
            assert {f.name for f in tally_fields() if not equal(f.name, *tallies)} == set()


def test_a_cast_that_is_all_wrong_is_measured_as_such() -> None:
    """Codes of another tensor, NaN among them: what a damaged cache would show."""
    x, other = tiles(40, 300, torch.float32), tiles(40, 300, torch.float32)
    x_q = quantize(other, QuantizationSpec(E4M3))
    assert_same(x, x_q)
    assert measure_packed(x, x_q).tally().see > 0.1 * measure_packed(x, x_q).tally().sxx


def test_what_it_cannot_measure_it_refuses() -> None:
    """And torch measures it."""
    x = torch.rand(4, 40) + 1
    for fmt in (BF16, E8M0):
        x_q = quantize(x, QuantizationSpec(fmt))
        reason = native_measure.supports_measure(x, x_q)
        assert reason == f"native_measure: takes signed formats of at most 8 bits; got {fmt}"
        assert measure_packed(x, x_q).tally().n == 160
    x_q = quantize(x[:0], QuantizationSpec(E4M3))
    assert native_measure.supports_measure(x[:0], x_q) == "native_measure: an empty matrix"
    assert "takes a matrix and its codes; got (4, 40) and (0, 40)" in str(native_measure.supports_measure(x, x_q))
    wide = replace(quantize(x, QuantizationSpec(E4M3)), dtype=torch.float64)
    assert "got torch.float64" in str(native_measure.supports_measure(x.double(), wide))


# --- samples ---


def test_what_is_negated_when_it_is_read_is_not_read_from_memory() -> None:
    """Of conjugated numbers torch keeps the sign apart."""
    x = torch.randn(300, 1, dtype=torch.complex64).conj().imag
    for matrix in (x, torch._neg_view(torch.randn(300, 40))):
        assert "takes plain tensors; got a tensor that is negated" in str(native_measure.supports_survey(matrix))
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
                assert native_measure.supports_survey(spoiled) is None
                y = spoiled if target is None else spoiled.to(target)
                finite = y.isfinite()
                expected = [
                    float(y.abs().max()),
                    float(y.where(finite, 0).abs().max()),
                    float((~finite).sum()),
                    y.numel(),
                ]
                got = native_measure.survey(spoiled, target)
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
        extent = native_measure.survey(number.reshape(1, 1), target)
        assert float(extent[0]) == float(y)
        assert float(extent[1]) == (float(y) if y.isfinite() else 0.0)


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_that_are_taken_are_those_rows(dtype: torch.dtype, threads: int) -> None:
    """Of every layout in rows or columns, of numbers and of codes; in memory of their own."""
    xs = [make(dtype) for make in LAYOUTS.values()]
    xs += [tiles(300, 700, dtype), tiles(700, 300, dtype).t(), tiles(777, 133, dtype).t()]
    torch.set_num_threads(threads)
    for x in xs:
        bands = [range(len(x) // 3), range(len(x) // 2, len(x))]
        bands += [range(top, min(top + 128, len(x)), 4) for top in range(0, len(x), 256)]
        for matrix in (x, quantize(x, QuantizationSpec(E5M2)).data.view(torch.uint8)):
            if reason := native_measure.supports_take(matrix):
                assert reason == f"native_measure: takes a matrix in rows or columns; got strides {matrix.stride()}"
                continue
            taken = native_measure.take(matrix, bands)
            assert torch.equal(taken, torch.cat([matrix[b.start : b.stop : b.step] for b in bands]))
            assert taken.is_contiguous()
        if x.numel() and native_measure.supports_take(x) is None:
            matrix = x.clone(memory_format=torch.preserve_format)
            matrix[0, 0], matrix[-1, -1] = math.inf, math.nan
            squares = torch.empty(len(bands) - 2, -(-x.shape[1] // 128))
            native_measure.take(matrix, bands[2:], squares)
            assert torch.equal(squares, squares_of(matrix, bands[2:]))
