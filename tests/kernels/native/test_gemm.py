"""GEMM in C++: the sums of fp64 to the rounding of an fp32 accumulation, rounded once, at every instruction set.

Every test runs at each level that this CPU has (the portable one always), so a laptop with AVX512-BF16 tests what a
laptop without it runs.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import ottava
from kernels.native.older_builds import take_library
from kernels.operands import Float64Gemm, Pair, cast
from ottava.kernels import reference
from ottava.kernels.native import build as native_build
from ottava.kernels.native import gemm as native_gemm
from ottava.kernels.native.gemm import BatchInvariant as invariant_gemm
from ottava.kernels.native.gemm import Decoded as decoded
from ottava.numerics.formats import BF16, E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0
from ottava.numerics.scaling import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_128X128,
    PER_ROW,
    Granularity,
    ScaleFormat,
)
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.quantize import quantize
from ottava.recipe import RECIPES
from sweep import sweep

BUILT = native_gemm.built()
LEVELS = {native_gemm.LEVELS[level]: level for level in native_gemm.levels()}
needs_library = pytest.mark.skipif(BUILT.library is None, reason=BUILT.reason)

MX = QuantizationSpec(E4M3, BLOCK_1X32, "e8m0")
BLOCK = QuantizationSpec(E4M3, BLOCK_1X128)


def operands(pair: Pair, sizes: tuple[int, int, int]) -> tuple[QuantizedTensor, QuantizedTensor]:
    m, n, k = sizes
    x = torch.randn(m, k) * torch.exp2(torch.randint(-9, 9, (m, 1)))
    return cast(x, pair[0]), cast(torch.randn(n, k) * torch.exp2(torch.randint(-9, 9, (1, k))), pair[1])


def taken(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return native_gemm.supports_gemm(a, b, torch.float32, None) is None


def in_columns(x_q: QuantizedTensor) -> QuantizedTensor:
    """The same codes, column by column."""
    return replace(x_q, data=x_q.data.t().contiguous().t())


@pytest.fixture(params=LEVELS.values(), ids=LEVELS.keys())
def level(request: pytest.FixtureRequest) -> int:
    """Every instruction set that this CPU has."""
    return request.param


@pytest.fixture(autouse=True)
def _threads() -> None:
    """More than one: rows are shared out, and a last one has less."""
    torch.set_num_threads(3)


SIZES = ((5, 3, 7), (16, 32, 128), (33, 17, 300), (1, 1, 1), (2, 130, 1), (97, 65, 1030))


@sweep(sizes=SIZES)
def test_sums_are_those_of_fp64(pair: Pair, sizes: tuple[int, int, int], float64_gemm: Float64Gemm) -> None:
    """Within (K + 6) * 2**-24 * sum |a||b| in fp32; every layout, tails of rows, columns and k; and the same bits
    whatever the layout."""
    a, b = operands(pair, sizes)
    if not taken(a, b):
        assert "e4m3" in (a.spec.scale_format, b.spec.scale_format)
        return
    bias = torch.randn(sizes[1]) * 8
    exact, accumulation = float64_gemm(a, b, bias)
    a_in_columns, b_in_columns = in_columns(a), in_columns(b)
    for level in LEVELS.values():
        y, _ = native_gemm.run(a, b, torch.float32, bias, level)
        assert (tuple(y.shape), y.is_contiguous()) == (sizes[:2], True)
        assert ((y.double() - exact).abs() <= accumulation).all(), level
        for lhs, rhs in ((a, b_in_columns), (a_in_columns, b), (a_in_columns, b_in_columns)):
            assert torch.equal(native_gemm.run(lhs, rhs, torch.float32, bias, level)[0], y), level


@sweep(out=[torch.bfloat16, torch.float16], level=LEVELS.values())
def test_there_is_one_rounding(pair: Pair, out: torch.dtype, level: int) -> None:
    """16-bit outputs are the fp32 ones rounded by torch, bias included: normal, subnormal, infinite and NaN."""
    a, b = operands(pair, (40, 70, 300))
    if not taken(a, b):
        return
    rows = [2.0**-122, 2.0**-45, 2.0**-30, 1.0, 2.0**20, 2.0**100]  # the first: subnormal in bf16 too
    for magnitude in rows:
        lhs = replace(a, scale_inv=a.scale_inv * magnitude)
        for bias in (None, torch.randn(70).to(out)):
            y = native_gemm.run(lhs, b, out, bias, level)[0]
            in_fp32 = native_gemm.run(lhs, b, torch.float32, bias, level)[0]
            assert torch.equal(y.nan_to_num(7.0), in_fp32.to(out).nan_to_num(7.0))
            assert torch.equal(y.isnan(), in_fp32.isnan())


@sweep
def test_nearly_every_output_is_correctly_rounded(pair: Pair, float64_gemm: Float64Gemm) -> None:
    """K = 1024, bf16: one output in 10,000 may be an ulp off; 4 standard deviations of 65,536 draws are 10 more."""
    a, b = operands(pair, (256, 256, 1024))
    if not taken(a, b):
        return
    exact, _ = float64_gemm(a, b, None)
    for level in LEVELS.values():
        wrong = native_gemm.run(a, b, torch.bfloat16, None, level)[0] != exact.to(torch.bfloat16)
        assert int(wrong.sum()) <= 6.5 + 10, level


@sweep(sizes=[(200, 150, 700), (7, 900, 300), (13, 70, 31), (530, 64, 77)], level=LEVELS.values())
def test_threads_change_no_bit(pair: Pair, sizes: tuple[int, int, int], level: int) -> None:
    """1, 2, 3 and 8 threads: rows and columns shared out in other ways, one sum; row by row and column by column."""
    a, b = operands(pair, sizes)
    if not taken(a, b):
        return
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        for lhs, rhs in ((a, b), (in_columns(a), in_columns(b))):
            results.append(native_gemm.run(lhs, rhs, torch.float32, None, level)[0])
    assert all(torch.equal(y, results[0]) for y in results)


@sweep(level=LEVELS.values())
def test_rows_of_a_batch_do_not_know_each_other(pair: Pair, level: int) -> None:
    """y of some rows of a are those rows of y."""
    a, b = operands(
        (replace(pair[0], granularity=PER_ROW, scale_format="fp32", scaling="current", block_scale="amax"), pair[1]),
        (150, 70, 300),
    )
    if not taken(a, b):
        return
    y = native_gemm.run(a, b, torch.bfloat16, None, level)[0]
    few = replace(a, data=a.data[64:77], scale_inv=a.scale_inv[64:77])
    assert torch.equal(native_gemm.run(few, b, torch.bfloat16, None, level)[0], y[64:77])


@sweep(fmt=[E4M3, E5M2, E2M1, E2M3, E3M2, E4M3FNUZ, E5M2FNUZ], level=LEVELS.values())
def test_every_code_is_decoded(fmt: object, level: int) -> None:
    """All codes of a format times 1, in rows and in columns: what they stand for, -0 and NaN included."""
    spec = QuantizationSpec(fmt)  # type: ignore[arg-type]
    codes = torch.arange(1 << spec.format.bits, dtype=torch.uint8).view(spec.format.storage_dtype)
    one = cast(torch.ones(1, 1), spec)
    one = replace(one, scale_inv=torch.full((1, 1), 1.0 / float(reference.decode(one.data, spec.format))))
    column = QuantizedTensor(codes[:, None], torch.ones(1, 1), spec, torch.float32)
    truth = reference.gemm(column, one, torch.float32, None)
    for a, b in ((column, one), (one, column)):
        y = native_gemm.run(a, b, torch.float32, None, level)[0]
        y = y if a is column else y.t()
        assert torch.equal(y.isnan(), truth.isnan())
        assert torch.equal(y[~y.isnan()], truth[~truth.isnan()])


@sweep(level=LEVELS.values())
def test_scales_come_in_three_ways(level: int, float64_gemm: Float64Gemm) -> None:
    """On the sum; as exponents of the operands; and, where those would leave fp32's normal numbers, step by step."""
    x, w = torch.randn(20, 256), torch.randn(70, 256)
    wide = x * torch.exp2(torch.arange(8).repeat_interleave(32) * -14.0)  # 98 octaves between the blocks of a row
    for spec, matrix, mode in (
        (QuantizationSpec(E4M3, PER_ROW), x, "plain"),
        (MX, x, "fold"),
        (MX, wide, "steps"),
        (BLOCK, x, "steps"),
    ):
        for lhs, rhs in ((matrix, w), (w, matrix)):
            a, b = cast(lhs, spec), cast(rhs, spec)
            y, got = native_gemm.run(a, b, torch.float32, None, level)
            exact, accumulation = float64_gemm(a, b, None)
            assert got == mode
            assert ((y.double() - exact).abs() <= accumulation).all()


@sweep(level=LEVELS.values())
def test_folding_changes_no_product(level: int) -> None:
    """Integers up to 16 with power-of-two scales: sums fit in 24 bits, so every mode gives fp64's."""
    blocks = torch.exp2(torch.randint(0, 3, (24, 8))).repeat_interleave(32, 1)
    x, w = (torch.randint(-16, 17, (24, 256)).float() * blocks for _ in range(2))
    for spec in (MX, QuantizationSpec(E4M3, BLOCK_1X128, "pow2"), QuantizationSpec(E4M3, PER_ROW, "pow2")):
        a, b = cast(x, spec), cast(w, spec)
        exact = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().t()
        assert torch.equal(native_gemm.run(a, b, torch.float32, None, level)[0].double(), exact)
        assert torch.equal(native_gemm.run(in_columns(a), in_columns(b), torch.float32, None, level)[0].double(), exact)


@sweep(granularity=[BLOCK_1X32, BLOCK_1X128], scale_format=["e8m0", "e8m0_floor", "pow2"], level=LEVELS.values())
def test_what_overflows_in_between_does_so_in_the_reference(
    granularity: Granularity, scale_format: ScaleFormat, level: int
) -> None:
    """Scales that are powers of two enter in one order; decoded operands, the witness, overflow elsewhere."""
    spec, (m, n, k) = QuantizationSpec(E4M3, granularity, scale_format), (17, 33, 260)
    modes, found, elsewhere = set(), set[bool](), 0
    for octaves, sign in itertools.product((30, 60, 110, 120), (1, -1)):
        sides = []
        for rows, turn in ((m, 1), (n, sign)):
            exponents = torch.randint(octaves - 30, octaves, (rows, -(-k // 32))).mul(turn).float()
            sides.append(torch.randn(rows, k) * torch.exp2(exponents).repeat_interleave(32, 1)[:, :k])
        a, b = (cast(x.clamp(-3e38, 3e38), spec) for x in sides)
        y, mode = native_gemm.run(a, b, torch.float32, None, level)
        truth, decoded = reference.gemm(a, b, torch.float32, None), a.dequantize() @ b.dequantize().t()
        assert torch.equal(y.isfinite(), truth.isfinite())
        assert torch.equal(y.isnan(), truth.isnan())
        modes.add(mode)
        found |= set(y.isfinite().flatten().tolist())
        elsewhere += int((decoded.isfinite() != truth.isfinite()).sum())
    assert found == {True, False}
    assert modes <= {"fold", "steps"}
    assert elsewhere > 0


@sweep(
    lhs=["tensor", "row", "1x128", "*x16", "4x6"],
    rhs=["tensor", "1x32", "16x16", "128x128", "*x10"],
    scale_format=["fp32", "e8m0"],
    level=LEVELS.values(),
)
def test_blocks_of_any_two_even_sizes_multiply(
    lhs: str, rhs: str, scale_format: str, level: int, float64_gemm: Float64Gemm
) -> None:
    """As the reference does: sums end where a block of either side ends."""
    specs = [QuantizationSpec(E4M3, Granularity.parse(text), scale_format) for text in (lhs, rhs)]  # type: ignore[arg-type]
    a, b = operands((specs[0], specs[1]), (20, 70, 300))
    exact, accumulation = float64_gemm(a, b, None)
    for y in (native_gemm.run(t, b, torch.float32, None, level)[0] for t in (a, in_columns(a))):
        assert ((y.double() - exact).abs() <= 3 * accumulation).all()


@sweep(level=LEVELS.values())
def test_nan_survives_every_exponent(level: int) -> None:
    """Folding moves the exponents of blocks; one of NaN stays. Rows and columns, either side."""
    x = torch.randn(8, 256) * torch.exp2(torch.arange(8).repeat_interleave(32) * -3.0)
    for k in (3, 40, 250):
        a, b = cast(x, MX), cast(torch.randn(70, 256), MX)
        a.data[2, k] = math.nan
        for t in (a, in_columns(a)):
            assert native_gemm.run(t, b, torch.bfloat16, None, level)[0].isnan().all(1).tolist() == [
                i == 2 for i in range(8)
            ]
            assert native_gemm.run(b, t, torch.bfloat16, None, level)[0].isnan().all(0).tolist() == [
                i == 2 for i in range(8)
            ]


@sweep(level=LEVELS.values())
def test_any_nan_of_the_bias_stays(level: int) -> None:
    """One with all bits set would round over into -0."""
    a = cast(torch.ones(4, 16), QuantizationSpec(E4M3))
    bias = torch.zeros(4, dtype=torch.int32)
    bias[1], bias[2] = 0x7FFFFFFF, -1
    for out in (torch.bfloat16, torch.float16):
        y = native_gemm.run(a, a, out, bias.view(torch.float32), level)[0]
        assert y.isnan().all(0).tolist() == [False, True, True, False]


@sweep(level=LEVELS.values())
def test_any_strides(level: int) -> None:
    """Every second row and every third column, and one row for all: as their copies."""
    x, w = cast(torch.randn(40, 90), QuantizationSpec(E4M3)), cast(torch.randn(30, 30), QuantizationSpec(E4M3))
    for view in (x.data[::2, ::3], x.data[:1, :30].expand(6, -1), x.data[3:9, 7:37], x.data.t()[:, :30][::2]):
        a, copy = replace(x, data=view), replace(x, data=view.contiguous())
        results = [native_gemm.run(t, w, torch.float32, None, level)[0] for t in (a, copy)]
        assert torch.equal(results[0], results[1])


@sweep(m=[2, 7, 13, 40], n_and_k=[(130, 1), (3, 7), (64, 33)])
def test_few_rows_of_any_size(m: int, n_and_k: tuple[int, int], float64_gemm: Float64Gemm) -> None:
    """One thread and few rows go another way: packed rows of any length, then a panel that begins on a cache line."""
    torch.set_num_threads(1)
    a, b = operands((QuantizationSpec(E4M3), QuantizationSpec(E4M3)), (m, *n_and_k))
    exact, accumulation = float64_gemm(a, b, None)
    for lhs, rhs, level in itertools.product((a, in_columns(a)), (b, in_columns(b)), LEVELS.values()):
        y = native_gemm.run(lhs, rhs, torch.float32, None, level)[0]
        assert ((y.double() - exact).abs() <= accumulation).all(), level


def test_sums_longer_than_a_panel_stay_deterministic(float64_gemm: Float64Gemm) -> None:
    """K = 40,000 and N = 300: panels come in several rounds, sums in many chunks."""
    a, b = operands((QuantizationSpec(E5M2), QuantizationSpec(E4M3)), (8, 300, 40_000))
    exact, accumulation = float64_gemm(a, b, None)
    for level in LEVELS.values():
        y = native_gemm.run(a, b, torch.float32, None, level)[0]
        assert ((y.double() - exact).abs() <= accumulation).all(), level


# --- what is not taken -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lhs, rhs, out, message",
    [
        (QuantizationSpec(BF16), QuantizationSpec(BF16), torch.bfloat16, "signed formats of up to 8 bits; got BF16"),
        (QuantizationSpec(E4M3), QuantizationSpec(E8M0), torch.bfloat16, "signed formats of up to 8 bits"),
        (*[QuantizationSpec(E2M1, BLOCK_1X16, "e4m3")] * 2, torch.bfloat16, "two-level scales"),
        (QuantizationSpec(E4M3), QuantizationSpec(E4M3), torch.float64, "gives float32, bfloat16 or float16"),
        (*[QuantizationSpec(E4M3, Granularity(None, 5))] * 2, torch.bfloat16, "scales change at odd places of k"),
    ],
)
def test_refusals_say_why(lhs: QuantizationSpec, rhs: QuantizationSpec, out: torch.dtype, message: str) -> None:
    """In `explain` and in receipts."""
    a, b = (
        QuantizedTensor(torch.empty(8, 256, dtype=s.format.storage_dtype), torch.ones(1, 1), s, out) for s in (lhs, rhs)
    )
    reason = native_gemm.supports_gemm(a, b, out, None)
    assert reason is not None
    assert message in reason
    assert reason.startswith("native_gemm: ")


@pytest.mark.parametrize("m, n, k", [(0, 16, 16), (16, 0, 16), (16, 16, 0)])
def test_empty_operands_are_refused(m: int, n: int, k: int) -> None:
    """The reference gives zeros, or nothing."""
    a, b = cast(torch.ones(m, k), BLOCK), cast(torch.ones(n, k), replace(BLOCK, granularity=BLOCK_128X128))
    assert native_gemm.supports_gemm(a, b, torch.bfloat16, None) == "native_gemm: an empty operand"


def test_other_devices_are_refused() -> None:
    """Named, so that `explain` can show it."""
    a = cast(torch.ones(16, 16), QuantizationSpec(E4M3))
    meta = replace(a, data=a.data.to("meta"), scale_inv=a.scale_inv.to("meta"))
    assert native_gemm.supports_gemm(meta, a, torch.bfloat16, None) == "native_gemm: runs on cpu; got meta and cpu"


def test_without_a_library_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal, not an exception; called all the same, an error that repeats it."""
    a = cast(torch.ones(16, 16), QuantizationSpec(E4M3))
    monkeypatch.setattr(native_build, "load", lambda *_: native_build.Built(None, "no C++ compiler"))
    assert native_gemm.supports_gemm(a, a, torch.bfloat16, None) == "native_gemm: no C++ compiler"
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler; ask supports_gemm first"):
        native_gemm.plan_gemm(a, a, torch.bfloat16, None)


@needs_library
def test_a_level_that_is_not_there_is_an_error() -> None:
    """Never another one in its place."""
    a = cast(torch.ones(16, 16), QuantizationSpec(E4M3))
    with pytest.raises(RuntimeError, match="this CPU has no such instruction set"):
        native_gemm.run(a, a, torch.bfloat16, None, 9)


# --- operands that C++ decodes: the bits of the reference ---

REASON = native_build.load("decode").reason or native_build.load("gemm").reason
needs_both = pytest.mark.skipif(bool(REASON), reason=REASON)
CELLS = [
    (replace(gemm.lhs, transform=None), replace(gemm.rhs, transform=None))
    for gemm in (getattr(RECIPES["nvfp4"], name) for name in ("fprop", "dgrad", "wgrad"))
]
MIXED = (QuantizationSpec(ottava.E2M1, BLOCK_1X16, "e4m3"), QuantizationSpec(ottava.E4M3, BLOCK_1X16, "e8m0"))


@needs_both
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
            ours = decoded.plan_gemm(one, other, dtype, bias)(one, other, bias)
            assert torch.equal(ours, reference.gemm(one, other, dtype, bias))


@needs_both
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


@needs_both
def test_what_it_cannot_multiply_it_refuses() -> None:
    """With the reason."""
    rows = quantize(torch.ones(4, 64), QuantizationSpec(ottava.E4M3))
    assert "scales on two levels; got fp32 and fp32" in str(decoded.supports_gemm(rows, rows, torch.bfloat16, None))
    a = quantize(torch.ones(4, 64), CELLS[0][0])
    assert "scales on two levels; got e4m3 and fp32" in str(decoded.supports_gemm(a, rows, torch.bfloat16, None))
    short = quantize(torch.ones(4, 16), CELLS[0][0])
    assert "one scale for each row" in str(decoded.supports_gemm(short, short, torch.bfloat16, None))


# --- the batch invariant GEMM: bits of a row alone, also where the other rows change how scales enter ---


@needs_both
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
    y = invariant_gemm.plan_gemm(a, w, torch.float32, None)(a, w, None)
    assert torch.equal(y[:7], invariant_gemm.plan_gemm(alone, w, torch.float32, None)(alone, w, None))
    assert torch.equal(y, whole)


@needs_both
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
