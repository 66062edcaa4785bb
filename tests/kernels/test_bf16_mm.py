"""torch's BF16 GEMM on codes: one rounding, exact decoding, refusals where BF16 is not exact or not fast."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kernels.operands import Float64Gemm, Pair, cast
from ottava.kernels import bf16_mm, reference
from ottava.numerics.formats import BF16, E2M1, E4M3, E5M2, Format
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X32, BLOCK_1X128, PER_ROW
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from sweep import sweep


@pytest.fixture(autouse=True)
def _units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower on other CPUs, but no less exact: oneDNN sums in fp32 there too."""
    monkeypatch.setattr(bf16_mm, "_has_bf16_units", lambda: True)
    monkeypatch.setattr(bf16_mm, "_has_tiles", lambda: False)


def taken(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return bf16_mm.supports_gemm(a, b, torch.bfloat16, None) is None


@sweep(sizes=[(5, 3, 7), (16, 32, 128), (33, 17, 300), (1, 1, 1), (2, 130, 1)], with_bias=[False, True])
def test_sums_are_fp32_and_rounded_once(
    pair: Pair, sizes: tuple[int, int, int], with_bias: bool, float64_gemm: Float64Gemm
) -> None:
    """Half an ulp of bf16 beside what fp32 accumulation allows; any scale per tensor, powers of two elsewhere."""
    a, b = (cast(torch.randn(rows, sizes[2]), spec) for rows, spec in zip(sizes[:2], pair, strict=True))
    if not taken(a, b):
        assert any(s.format == E2M1 or (s.scale_format == "fp32" and str(s.granularity) != "tensor") for s in pair)
        return
    bias = torch.randn(sizes[1]).bfloat16() if with_bias else None
    y = bf16_mm.gemm(a, b, torch.bfloat16, bias)
    exact, accumulation = float64_gemm(a, b, bias)
    half_ulp = BF16.eps / 2 * (exact.abs() + accumulation)
    assert (tuple(y.shape), y.dtype, y.is_contiguous()) == (sizes[:2], torch.bfloat16, True)
    assert ((y.double() - exact).abs() <= accumulation + half_ulp).all()


@sweep
def test_nearly_every_output_is_correctly_rounded(pair: Pair, float64_gemm: Float64Gemm) -> None:
    """K = 1024: one output in 10,000 may be an ulp off, bias and scales included; scaling afterwards: 26 %."""
    a, b = cast(torch.randn(256, 1024), pair[0]), cast(torch.randn(256, 1024), pair[1])
    if not taken(a, b):
        return
    for bias in (None, torch.randn(256).bfloat16()):
        exact, _ = float64_gemm(a, b, bias)
        wrong = bf16_mm.gemm(a, b, torch.bfloat16, bias) != exact.to(torch.bfloat16)
        assert int(wrong.sum()) <= 6.5 + 10  # and 4 standard deviations


def test_scales_whose_product_no_fp32_holds_end_as_in_the_reference() -> None:
    for size in (1e25, 1e-30):
        a, b = (cast(torch.randn(8, 64) * size, QuantizationSpec(E4M3)) for _ in range(2))
        y = bf16_mm.gemm(a, b, torch.bfloat16, None)
        assert torch.equal(y.nan_to_num(7.0), reference.gemm(a, b, torch.bfloat16, None).nan_to_num(7.0))


def test_transposed_operands_multiply_like_copies() -> None:
    """codes.t() without a copy is what wgrad hands over."""
    for spec in (
        QuantizationSpec(E4M3),
        QuantizationSpec(E4M3, PER_ROW, "pow2"),
        QuantizationSpec(E4M3, BLOCK_1X32, "e8m0"),
    ):
        a, b = cast(torch.randn(40, 128), spec), cast(torch.randn(24, 128), spec)
        views = [replace(t, data=t.data.t().contiguous().t()) for t in (a, b)]
        y, anew = bf16_mm.gemm(a, b, torch.bfloat16, None), bf16_mm.gemm(views[0], views[1], torch.bfloat16, None)
        assert ((y.double() - anew.double()).abs() <= BF16.eps * y.double().abs() + 1e-4).all()


@sweep(fmt=[E4M3, E5M2])
def test_decoding_is_exact(fmt: Format) -> None:
    """All 256 codes: numbers, -0, infinities and NaN, in rows and columns; and nothing."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(fmt.storage_dtype)
    for view in (codes, codes.t(), codes[:0], codes[:, ::2]):
        y, truth = bf16_mm.decode(view, fmt), reference.decode(view, fmt)
        assert torch.equal(y.float().nan_to_num(7.0), truth.nan_to_num(7.0))
        assert torch.equal(y.isnan(), truth.isnan())
        numbers = ~truth.isnan()
        assert torch.equal(torch.signbit(y)[numbers], torch.signbit(truth)[numbers])


def test_nan_stays_in_its_row() -> None:
    """As everywhere."""
    a, b = cast(torch.randn(8, 256), QuantizationSpec(E4M3)), cast(torch.randn(8, 256), QuantizationSpec(E4M3))
    a.data[2, 100] = math.nan
    y = bf16_mm.gemm(a, b, torch.bfloat16, None)
    assert torch.equal(y.isnan().all(1), torch.arange(8) == 2)
    assert not y[torch.arange(8) != 2].isnan().any()


@pytest.mark.parametrize("octaves", [(126, -20), (-20, 126), (118, -90), (-115, 60), (60, -115)])
@pytest.mark.parametrize("spec", [QuantizationSpec(E4M3), QuantizationSpec(E4M3, PER_ROW, "pow2")])
def test_ends_of_fp32_are_the_reference(octaves: tuple[int, int], spec: QuantizationSpec) -> None:
    """A sum times a's scale overflows, or is subnormal, before b's scale brings it back: as in the reference."""
    a, b = (torch.randn(8, 256).clamp(-2, 2) * 2.0**octave for octave in octaves)
    pair = cast(a, QuantizationSpec(E4M3)), cast(b, spec)
    if not taken(*pair):  # a scale of a row beyond what it folds
        return
    y, expected = bf16_mm.gemm(*pair, torch.bfloat16, None), reference.gemm(*pair, torch.bfloat16, None)
    assert torch.equal(y.isfinite(), expected.isfinite())
    finite = y.isfinite()
    tops = expected[finite].float().abs().amax() if finite.any() else 0
    assert bool(((y - expected).float()[finite].abs() <= 2 * torch.finfo(torch.bfloat16).eps * tops).all())


ROW = QuantizationSpec(E4M3, PER_ROW, "pow2")


@pytest.mark.parametrize(
    "spec, out, bias, scale, message",
    [
        (QuantizationSpec(E2M1, BLOCK_1X16, "e4m3"), torch.bfloat16, None, 1.0, "takes E4M3 and E5M2; got E2M1"),
        (QuantizationSpec(E4M3), torch.float32, None, 1.0, "gives bfloat16 only; got torch.float32"),
        (QuantizationSpec(E4M3), torch.bfloat16, torch.float32, 1.0, "adds a bfloat16 bias only; got torch.float32"),
        (QuantizationSpec(E4M3, BLOCK_1X128), torch.bfloat16, None, 1.0, r"folds powers of two only; got E4M3[1x128]"),
        (ROW, torch.bfloat16, None, 2.0**-50, "scales from 8.9e-16 to 1.0e+00 leave BF16's range"),
        (ROW, torch.bfloat16, None, 2.0**50, "scales from 1.0e+00 to 1.1e+15 leave BF16's range"),
    ],
)
def test_refusals_say_why(
    spec: QuantizationSpec, out: torch.dtype, bias: torch.dtype | None, scale: float, message: str
) -> None:
    """In `explain` and in receipts."""
    a = QuantizedTensor(torch.zeros(8, 256, dtype=spec.format.storage_dtype), torch.ones(8, 1), spec, out)
    a.scale_inv[3] = scale
    reason = bf16_mm.supports_gemm(a, a, out, None if bias is None else torch.ones(8, dtype=bias))
    assert reason is not None
    assert message in reason
    assert reason.startswith("bf16_mm: ")


def test_other_machines_and_empty_operands_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without BF16 units is slower with it; another device has its own kernels."""
    a = cast(torch.ones(16, 16), QuantizationSpec(E4M3))
    assert taken(a, a)
    meta = replace(a, data=a.data.to("meta"), scale_inv=a.scale_inv.to("meta"))
    assert bf16_mm.supports_gemm(a, meta, torch.bfloat16, None) == "bf16_mm: runs on cpu; got cpu and meta"
    monkeypatch.setattr(bf16_mm, "_has_tiles", lambda: True)
    assert "reads past rows of 16 numbers" in (bf16_mm.supports_gemm(a, a, torch.bfloat16, None) or "")
    empty = cast(torch.ones(0, 16), QuantizationSpec(E4M3))
    assert bf16_mm.supports_gemm(empty, a, torch.bfloat16, None) == "bf16_mm: an empty operand"
    monkeypatch.setattr(bf16_mm, "_has_bf16_units", lambda: False)
    reason = bf16_mm.supports_gemm(a, a, torch.bfloat16, None)
    assert reason == "bf16_mm: this CPU multiplies BF16 no faster than fp32 (no AVX512-BF16, no AMX)"
