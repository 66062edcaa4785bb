"""The reference's bits, from C++: codes, scales and amax of every spec, dtype and layout, rounded to nearest or by
numbers from the same seed; decoding of every code."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.native.older_builds import for_each_older_build, take_library, use_older_build
from layout_samples import LAYOUTS, tiles
from ottava.engine.quantizer import Quantizer
from ottava.kernels import reference
from ottava.kernels.native import build as native_build
from ottava.kernels.native import pointwise as native_sums
from ottava.kernels.native import quantize as native_quantize
from ottava.numerics.formats import BF16, E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, Format
from ottava.numerics.rounding import decode
from ottava.numerics.scaling import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_16X16,
    PER_ROW,
    PER_TENSOR,
    TE_FOUR_OVER_SIX,
    Granularity,
)
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.numerics.transforms import Hadamard
from ottava.ops import quantize as casts
from ottava.ops.quantize import cast_both, explain_quantize, quantize
from sweep import sweep

SMALL = (E4M3, E5M2, E2M1, E2M3, E3M2, E4M3FNUZ, E5M2FNUZ)
STOCHASTIC = QuantizationSpec(E2M1, BLOCK_1X16, "e4m3", rounding="stochastic")
AT_RANDOM = tuple(
    QuantizationSpec(E2M1, Granularity.parse(size), rounding="stochastic")
    for size in ("tensor", "row", "1x16", "*x1", "128x128")
)
FOUR, FOUR_WEIGHT = (
    QuantizationSpec(E2M1, blocks, "e4m3", block_scale="four_over_six") for blocks in (BLOCK_1X16, BLOCK_16X16)
)
EDEN = QuantizationSpec(E2M1, BLOCK_1X16, "e4m3", block_scale="ms_eden", transform=Hadamard(128, "fresh"))
RAGGED = tuple(
    QuantizationSpec(E2M1, Granularity.parse(blocks), "e4m3", block_scale="four_over_six")
    for blocks in ("3x5", "row", "*x4")
)
TE = tuple(replace(FOUR, block_scale=rule) for rule in TE_FOUR_OVER_SIX)
TE_WEIGHT = tuple(replace(spec, granularity=grid) for spec in TE[:2] for grid in (BLOCK_16X16, Granularity(3, 5)))
BY_RULE = (FOUR, FOUR_WEIGHT, EDEN, *RAGGED, *TE, *TE_WEIGHT)
IN_BLOCKS = tuple(
    QuantizationSpec(E4M3, Granularity.parse(size), scale_format)  # type: ignore[arg-type]
    for size in ("tensor", "row", "*x1", "1x128", "128x1", "128x128", "1x32", "1x16")
    for scale_format in (("fp32", "e4m3") if size != "tensor" else ("fp32", "pow2"))
)
REASON = next(filter(None, (native_build.load(name).reason for name in ("quantize", "stochastic", "block_scales"))), "")
needs_library = pytest.mark.skipif(bool(REASON), reason=REASON)


def raw(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8)


def without_nan(x: Tensor) -> Tensor:
    """NaN as -7, that it may equal itself."""
    return torch.where(x.isnan(), -7.0, x.float())


def assert_same(x: Tensor, spec: QuantizationSpec, scale: Tensor | None = None, seed: int = 0) -> None:
    """Codes (those of NaN too), scales and amax; NaN equals NaN."""
    assert native_quantize.supports_quantize(x, spec, scale) is None
    torch.manual_seed(seed)
    ours = native_quantize.plan_quantize(x, spec)(x, scale, None)
    after = torch.rand(1)
    torch.manual_seed(seed)
    truth = reference.quantize(x, spec, scale)
    assert torch.equal(torch.rand(1), after)  # as many numbers were drawn
    assert ours.data.dtype == truth.data.dtype
    assert torch.equal(raw(ours.data), raw(truth.data))
    assert torch.equal(without_nan(ours.scale_inv), without_nan(truth.scale_inv))
    assert torch.equal(without_nan(ours.amax), without_nan(truth.amax))
    if spec.rounding == "nearest_even" and spec.block_scale == "amax":
        assert [t.is_contiguous() for t in ours] == [t.is_contiguous() for t in truth]


@needs_library
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@sweep(rounding=None)
def test_every_spec_and_layout_gives_the_references_bits(
    spec: QuantizationSpec, dtype: torch.dtype, rounding: Any
) -> None:
    """Every format of at most 8 bits; zeros, subnormals, infinities and NaN of both signs, rows far apart."""
    spec = replace(spec, rounding=rounding)
    for make, fmt in zip(LAYOUTS.values(), itertools.cycle(SMALL)):
        assert_same(make(dtype), replace(spec, format=fmt))
    large = tiles(300, 260, dtype)[:, 1:259]
    for x in (tiles(37, 131, dtype), tiles(131, 37, dtype).t(), large):
        x[0, 5], x[3, 7], x[30, 30], x[20, 20], x[5] = math.inf, -math.inf, math.nan, -math.nan, x[5] * 1e-6
        x[6], x[7, ::2] = 0.0, -0.0
        for fmt in SMALL if x is not large and rounding == "nearest_even" else (E4M3, E5M2, E2M1):
            assert_same(x, replace(spec, format=fmt))


@needs_library
@sweep(fmt=SMALL, scale=[1.0, 0.37, 2.0**-120, 3e38])
def test_every_16_bit_number_is_cast_as_the_reference_does(fmt: Format, dtype: torch.dtype, scale: float) -> None:
    """All 65,536 patterns: ties, subnormals, saturation, NaN; for fp32, the same patterns as its upper half."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    x = patterns.view(torch.bfloat16).float() if dtype == torch.float32 else patterns.view(dtype)
    assert_same(x.view(64, 1024), QuantizationSpec(fmt), torch.tensor(scale))
    for scaling in ("delayed", "guarded"):
        spec = QuantizationSpec(fmt, scaling=scaling, rounding="stochastic")  # type: ignore[arg-type]
        assert_same(x.view(64, 1024), spec, torch.tensor(scale), seed=11)


@needs_library
@sweep(spec=BY_RULE)
def test_every_rule_and_layout_gives_the_references_bits(spec: QuantizationSpec, dtype: torch.dtype) -> None:
    """Zeros, subnormals, infinities and NaN of both signs; groups and blocks that the edge cuts off."""
    for make in LAYOUTS.values():
        assert_same(make(dtype), spec)
    for x in (tiles(37, 131, dtype), tiles(131, 37, dtype).t(), tiles(48, 260, dtype)[:, 1:259], torch.randn(40, 256)):
        x[0, 5], x[3, 7], x[30, 30], x[20, 20], x[5] = math.inf, -math.inf, math.nan, -math.nan, x[5] * 1e-6
        x[6], x[7, ::2], x[8:24, :16], x[9] = 0.0, -0.0, 0.0, x[9] * torch.finfo(dtype).smallest_normal
        assert_same(x, spec, seed=5)


@needs_library
@sweep(spec=[FOUR, FOUR_WEIGHT, EDEN, *TE[:2]])
def test_every_16_bit_number_is_scaled_as_the_reference_does(spec: QuantizationSpec, dtype: torch.dtype) -> None:
    """Blocks of neighbours, and blocks of all magnitudes."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    x = patterns.view(torch.bfloat16).float() if dtype == torch.float32 else patterns.view(dtype)
    for order in (torch.arange(1 << 16), torch.randperm(1 << 16)):
        assert_same(x[order].view(64, 1024), spec, seed=11)


@needs_library
@sweep(fmt=SMALL)
def test_ties_of_fp32_go_to_even(fmt: Format) -> None:
    """Half way between all neighbours, and one ulp to either side, by the table of the format."""
    table = decode(torch.arange(1 << (fmt.bits - 1), dtype=torch.uint8).view(fmt.storage_dtype), fmt)
    numbers = table[table.isfinite()]
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = torch.stack([ties, ties.nextafter(torch.tensor(math.inf)), ties.nextafter(torch.tensor(0.0))])
    assert_same(torch.cat([near, -near]), QuantizationSpec(fmt), torch.tensor(1.0))


@needs_library
@pytest.mark.parametrize("scaling", ["delayed", "guarded"])
@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("given", [0.0, 1e-30, 0.5, 30.0, 150.0, 1e30, math.nan, math.inf, -1.0])
def test_a_given_scale_is_taken_as_the_reference_does(scaling: str, scale_format: str, given: float) -> None:
    """None yet, far too small, within the guard, too large, and numbers that no history gives."""
    for fmt in (E4M3, E5M2):
        spec = QuantizationSpec(fmt, scaling=scaling, scale_format=scale_format, guard_bits=2, margin=1)  # type: ignore[arg-type]
        for x in (torch.randn(40, 70).bfloat16(), torch.zeros(3, 5), torch.full((3, 5), math.nan), torch.ones(2, 0)):
            assert_same(x, spec, torch.tensor(given))
            assert_same(x.t(), spec, torch.tensor([given]))


@needs_library
@sweep(
    block=["1x32", "32x1", "1x48", "*x1", "1x128", "*x16", "64x64", "row", "tensor"],
    scale_format=["fp32", "pow2", "e8m0", "e8m0_floor"],
)
def test_blocks_of_every_16_bit_number_are_cast_as_the_reference_does(block: str, scale_format: str) -> None:
    """All that are finite, in bf16: beside numbers of any size, which leaves them subnormal or 0, and of their own."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    finite = patterns[patterns.isfinite()]
    mixed = finite[torch.randperm(finite.numel())].view(-1, 1020)
    near = torch.cat([finite.abs().sort().values.view(-1, 32)[::3], mixed.view(-1, 32)[:5]])  # neighbours in size
    for fmt in SMALL:
        spec = QuantizationSpec(fmt, Granularity.parse(block), scale_format)  # type: ignore[arg-type]
        for x in (mixed, near.view(1, -1), near.t().contiguous(), near * 2.0**-9, torch.cat([near, near * 2.0**-5], 1)):
            assert_same(x, spec)


@needs_library
@sweep(scaling=["delayed", "guarded"])
def test_what_a_door_has_seen_is_raised_as_the_door_does(scaling: str, dtype: torch.dtype) -> None:
    """Largest amax, something not finite, another scale than the predicted one: one at a time and on top of others."""
    spec = QuantizationSpec(E4M3, scaling=scaling)  # type: ignore[arg-type]
    cases = ((3.0, 0.0), (3.0, 64.0), (1e-3, 64.0), (900.0, 64.0), (math.inf, 64.0), (math.nan, 2.0), (0.0, 1.0))
    for value, given in cases:
        for before in ([0.0, 0.0, 0.0], [5.0, 1.0, 1.0]):
            x, staged, door = torch.full((3, 40), value).to(dtype), torch.tensor(before), Quantizer()
            door.prepare(spec)
            door.scale.fill_(given)
            door.staged.copy_(staged)
            truth = reference.quantize(x, spec, door.scale)
            door._see(truth.amax, truth.scale_inv, True)
            for operand in (x, x.t()):
                cast = native_quantize.plan_quantize(operand, spec)(operand, torch.tensor(given), staged)
                assert torch.equal(raw(cast.data), raw(truth.data.t() if operand is not x else truth.data))
                assert torch.equal(staged, door.staged), (value, given, before)


@needs_library
@sweep(margin=[-3, 2, 40], amax=[2.0**-149, 2.0**-130, 3.4e38, 448.0, 447.9999])
def test_extreme_scales_are_the_references(margin: int, amax: float, scale_format: str) -> None:
    """Beyond fp32 on either side, on and next to a power of two."""
    x = torch.randn(40, 64).clamp(-1, 1) * amax
    x[::8, ::16] = amax
    for fmt in SMALL:
        assert_same(x, QuantizationSpec(fmt, BLOCK_1X32, scale_format, margin=margin))  # type: ignore[arg-type]


@needs_library
@sweep(spec=[*IN_BLOCKS, *AT_RANDOM, FOUR, FOUR_WEIGHT, EDEN])
def test_threads_change_no_bit(spec: QuantizationSpec, dtype: torch.dtype) -> None:
    """One, two, and more than there are cores; rows and columns that do not divide."""
    x, casts = tiles(700, 333, dtype), []
    for threads in (1, 2, 5):
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        casts.append(native_quantize.plan_quantize(x, spec)(x, None, None))
    for other in casts[1:]:
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(casts[0], other, strict=True))


@needs_library
@pytest.mark.parametrize("library", ["quantize", "stochastic", "block_scales"])
@for_each_older_build
def test_instruction_sets_change_no_bit(
    library: str, flags: tuple[str, ...], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three older builds against the reference; the default build is what all other tests run."""
    use_older_build(library, flags, dtype, tmp_path, monkeypatch)
    x = tiles(140, 300, dtype)
    x[0, 5], x[3, 7] = math.inf, math.nan
    sizes = [Granularity.parse(size) for size in ("tensor", "row", "1x32", "128x1")]
    specs = {
        "quantize": [QuantizationSpec(fmt, size) for fmt in SMALL for size in sizes],
        "stochastic": [QuantizationSpec(fmt, BLOCK_1X16, rounding="stochastic") for fmt in SMALL],
        "block_scales": BY_RULE,
    }
    for spec in specs[library]:
        assert_same(x, spec)


@needs_library
@sweep(fmt=SMALL)
def test_every_code_is_decoded(fmt: Format) -> None:
    """The bits of `rounding.decode`, the sign of zeros too; BF16 holds them all; strides are kept."""
    codes, one = torch.arange(1 << fmt.bits, dtype=torch.uint8).view(fmt.storage_dtype), torch.ones(1, 1)
    assert native_quantize.supports_decode(codes, fmt) is None
    square = codes.view(-1, 16)
    for layout in (square, square.t(), square[:, ::3], codes.expand(40, -1), square[:0], codes.repeat(1000)[None]):
        truth = without_nan(decode(layout, fmt))
        x_q = QuantizedTensor(layout, one, QuantizationSpec(fmt), torch.float32)
        for dtype in (torch.float32, torch.bfloat16):
            numbers = native_quantize.plan_dequantize(x_q, dtype)(x_q)
            assert numbers.dtype == dtype
            assert torch.equal(without_nan(numbers).view(torch.int32), truth.to(dtype).float().view(torch.int32))


BOTH = {  # x and x.T
    "blockwise": (QuantizationSpec(E4M3, BLOCK_1X128), QuantizationSpec(E4M3, BLOCK_1X128)),
    "mxfp8": (QuantizationSpec(E4M3, BLOCK_1X32, "e8m0"), QuantizationSpec(E5M2, BLOCK_1X32, "e8m0_floor")),
    "two sizes": (QuantizationSpec(E4M3, Granularity(48, 5)), QuantizationSpec(E2M1, BLOCK_1X32, "pow2")),
    "row and block": (QuantizationSpec(E4M3, PER_ROW), QuantizationSpec(E4M3, BLOCK_1X128)),
}


@needs_library
@sweep(specs=BOTH.values())
def test_both_casts_in_one_reading_are_the_references(
    specs: tuple[QuantizationSpec, QuantizationSpec], dtype: torch.dtype
) -> None:
    """Those of x and of x.T, their layouts too, in rows, in columns and out of a wider matrix, on any threads."""
    for rows, cols in ((300, 333), (3, 5), (1, 40), (40, 1)):
        x = tiles(rows, cols, dtype)
        x[0, 0], x[rows - 1, cols // 2] = math.nan, math.inf
        for layout in (x, x.t().contiguous().t(), torch.cat((x, x), 1)[:, :cols]):
            if native_quantize.supports_quantize_both(layout, *specs) is not None:
                assert specs[0].granularity == PER_ROW  # blocks as long as the columns of a column-major matrix
                continue
            for threads in (1, 3):
                torch.set_num_threads(threads)
                both = native_quantize.plan_quantize_both(layout, *specs)(layout)
                torch.set_num_threads(1)
                for cast, operand, spec in zip(both, (layout, layout.t()), specs, strict=True):
                    alone = reference.quantize(operand, spec)
                    if min(rows, cols) > 1:
                        assert (
                            cast.data.stride()
                            == native_quantize.plan_quantize(operand, spec)(operand, None, None).data.stride()
                        )
                    assert all(
                        torch.equal(without_nan(a.float()), without_nan(b.float()))
                        for a, b in zip(cast, alone, strict=True)
                    )


def test_what_is_not_cast_in_one_reading() -> None:
    """With the reason."""
    x, tensor, row = torch.randn(8, 8), QuantizationSpec(E4M3), QuantizationSpec(E4M3, PER_ROW)
    nvfp4 = QuantizationSpec(E2M1, Granularity(1, 16), "e4m3")
    blocks = QuantizationSpec(E4M3, BLOCK_1X128)
    if REASON:
        assert native_quantize.supports_quantize_both(x, blocks, blocks) == f"native_quantize: {REASON}"
        return
    assert "one cast serves" in str(native_quantize.supports_quantize_both(x, tensor, tensor))
    assert "blocks as long as the matrix" in str(native_quantize.supports_quantize_both(x, row, row))
    assert "two-level scales" in str(native_quantize.supports_quantize_both(x, nvfp4, nvfp4))
    assert "takes a matrix" in str(native_quantize.supports_quantize_both(x[::2, ::2], blocks, blocks))
    assert "takes a matrix" in str(native_quantize.supports_quantize_both(x[0].expand(4, 8), blocks, blocks))
    assert native_quantize.supports_quantize_both(x, blocks, blocks) is None


@needs_library
@sweep(
    granularity=["tensor", "row", "*x1", "1x128", "128x1", "128x128", "1x32", "32x1", "1x16"],
    out=[torch.float32, torch.bfloat16],
)
def test_dequantizing_has_the_bits_of_the_definition(granularity: str, out: torch.dtype) -> None:
    """Every format, ragged blocks, rows as short as one, columns that lie in memory first, a batch's slice."""
    for rows, cols in ((140, 333), (3, 5), (1, 1), (700, 64)):
        x = tiles(rows, cols, torch.float32)
        for fmt in SMALL:
            x_q = quantize(x, QuantizationSpec(fmt, Granularity.parse(granularity)))
            turned = replace(x_q, data=x_q.data.t().contiguous().t())
            part = replace(x_q, data=x_q.data.view(torch.uint8).repeat(1, 2)[:, :cols].view(x_q.data.dtype))
            for operand in (x_q, turned, part):
                got, expected = casts.dequantize(operand, out), operand.dequantize(out)
                assert torch.equal(without_nan(got.float()), without_nan(expected.float()))
                assert torch.equal(got.float().signbit(), expected.float().signbit())


@needs_library
@pytest.mark.parametrize("scale_inv", [0.37, 1 + 2.0**-8, 1 + 3 * 2.0**-8], ids=["", "tie down", "tie up"])
def test_every_code_is_dequantized(scale_inv: float) -> None:
    """With one rounding, ties to even; NaN and infinity stay, with their sign."""
    for fmt in SMALL:
        codes = torch.arange(1 << fmt.bits, dtype=torch.uint8).view(4, -1).view(fmt.storage_dtype)
        x_q = QuantizedTensor(codes, torch.full((1, 1), scale_inv), QuantizationSpec(fmt), torch.float32)
        for out in (torch.float32, torch.bfloat16):
            got, expected = native_quantize.plan_dequantize(x_q, out)(x_q).float(), x_q.dequantize(out).float()
            assert torch.equal(got.isnan(), expected.isnan())
            assert torch.equal(without_nan(got), without_nan(expected))


@needs_library
def test_dequantizing_on_any_number_of_threads_gives_the_same_bits() -> None:
    """Flat and by rows."""
    x_q = {g: quantize(tiles(700, 333, torch.bfloat16), QuantizationSpec(E4M3, g)) for g in (PER_TENSOR, BLOCK_1X32)}
    for operand in x_q.values():
        alone = native_quantize.plan_dequantize(operand, torch.bfloat16)(operand)
        torch.set_num_threads(3)
        assert torch.equal(native_quantize.plan_dequantize(operand, torch.bfloat16)(operand), alone)
        torch.set_num_threads(1)


def test_wide_formats_are_not_decoded() -> None:
    """A table of 256 numbers has no room for them."""
    assert native_quantize.supports_decode(torch.zeros(2, dtype=BF16.dtype), BF16) is not None


@needs_library
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_only_matrices_are_cast(shape: tuple[int, ...]) -> None:
    """As the reference says it; other dtypes as well."""
    with pytest.raises(ValueError, match=r"needs a matrix \(rows, columns\): flatten it first"):
        native_quantize.plan_quantize(torch.zeros(shape), QuantizationSpec(E4M3))
    with pytest.raises(TypeError, match=r"got torch\.float64; needs float32, bfloat16 or float16"):
        native_quantize.plan_quantize(torch.zeros(2, 2, dtype=torch.float64), QuantizationSpec(E4M3))


REFUSED = {
    "bf16": (QuantizationSpec(BF16), "casts to signed formats of at most 8 bits; got BF16"),
    "e8m0": (QuantizationSpec(E8M0), "casts to signed formats of at most 8 bits; got E8M0"),
    "margin": (QuantizationSpec(E4M3, margin=100), "takes at most 64 octaves; got margin 100, guard 3"),
}


@pytest.mark.parametrize("spec, message", REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_cast_it_refuses(spec: QuantizationSpec, message: str) -> None:
    """And another kernel runs, which `explain_quantize` says."""
    x = torch.rand(4, 40) + 1
    assert native_quantize.supports_quantize(x, spec) == f"native_quantize: {message}"
    assert explain_quantize(x, spec) == f"native_quantize: {message}\nreference: runs"
    assert quantize(x, spec).spec == spec


def test_what_it_cannot_draw_or_search_it_refuses() -> None:
    """With the reason."""
    x = torch.ones(2, 2)
    for spec, x_, message in (
        (QuantizationSpec(BF16, rounding="stochastic"), x, "signed formats of at most 8 bits; got BF16"),
        (replace(FOUR, block_scale="unclipped"), x, "has no rule 'unclipped' for block scales"),
        (replace(STOCHASTIC, margin=70), x, "takes at most 64 octaves; got margin 70"),
        (STOCHASTIC, torch.ones(2, 2, device="meta"), "runs on a cpu; got meta"),
        (FOUR, torch.ones(2, 2, device="meta"), "runs on a cpu; got meta"),
        (RAGGED[1], torch.ones(1, 20000), "blocks of at most 16,384 elements; got row"),
    ):
        assert message in str(native_quantize.supports_quantize(x_, spec))
    for spec in (STOCHASTIC, FOUR):
        with FakeTensorMode():
            assert "takes plain tensors" in str(native_quantize.supports_quantize(torch.ones(2, 2), spec))
        assert "rounds to nearest by the amax of blocks" in str(native_quantize.supports_rounding(x, spec))


def test_tensors_without_memory_are_refused() -> None:
    """Fake ones, other devices, a scale that is not one fp32 number."""
    spec = QuantizationSpec(E4M3)
    with FakeTensorMode():
        assert "takes plain tensors; got a FakeTensor" in str(native_quantize.supports_quantize(torch.ones(2, 2), spec))
    assert "runs on a cpu; got meta" in str(native_quantize.supports_quantize(torch.ones(2, 2, device="meta"), spec))
    two = native_quantize.supports_quantize(torch.ones(2, 2), spec, torch.ones(2))
    assert two == "native_quantize: takes one fp32 scale; got 2 of torch.float32"


@needs_library
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_what_is_negated_or_made_when_it_is_read_is_not_read_from_memory(rounding: str) -> None:
    """Of conjugated numbers torch keeps the sign apart, and of some zeros nothing at all; all give those of a copy."""
    x = torch.randn(40, 1, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    for matrix in (x, x.t(), torch._neg_view(torch.randn(5, 64)), torch._efficientzerotensor((5, 64))):
        copy = matrix + 0.0
        assert torch.allclose(native_sums.column_sums(matrix), native_sums.column_sums(copy), atol=1e-4)
        for granularity in (PER_TENSOR, PER_ROW, BLOCK_1X32):
            spec = QuantizationSpec(E4M3, granularity, rounding=rounding)  # type: ignore[arg-type]
            assert "takes plain tensors; got a tensor " in explain_quantize(matrix, spec)
            torch.manual_seed(0)
            got = cast_both(matrix, spec, None)
            torch.manual_seed(0)
            wanted = cast_both(copy, spec, None)
            assert torch.equal(raw(got[0].data), raw(wanted[0].data))
            assert torch.equal(got[2], wanted[2])


@pytest.mark.parametrize(
    "library, spec",
    [("quantize", QuantizationSpec(E4M3, BLOCK_1X128))]
    + [("stochastic", STOCHASTIC), ("quantize", STOCHASTIC), ("block_scales", FOUR)],
)
def test_without_a_library_the_reference_runs(
    library: str, spec: QuantizationSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits; the reason is in the explanation."""
    x, results = torch.randn(40, 300), []
    for missing in (False, True):
        if missing:
            take_library(library, monkeypatch)
            assert explain_quantize(x, spec).split("\n") == ["native_quantize: no C++ compiler", "reference: runs"]
        torch.manual_seed(2)
        results.append(cast_both(x, spec, None))
    before, after = results
    assert torch.equal(raw(before[0].data), raw(after[0].data))
    assert torch.equal(before[0].scale_inv, after[0].scale_inv)
    assert torch.equal(before[2], after[2])
