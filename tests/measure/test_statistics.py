"""Tallies and statistics against numpy in float64: counts exactly, sums to 1e-12."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import ottava
from ottava.measure.statistics import STATISTICS
from ottava.measure.tally import Tally
from ottava.measure.walk import measure
from ottava.numerics.formats import E8M0, Format
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_1X128, PER_ROW, PER_TENSOR, Granularity
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from sweep import CASTS, sweep

Array = np.ndarray[Any, np.dtype[np.float64]]
COUNTS = ("n", "n_nonfinite", "n_nonzero", "n_underflow", "n_overflow", "amax")
SUMS = ("sxx", "see", "sxe")


def wide(rows: int = 37, cols: int = 150, seed: int = 0) -> Tensor:
    """Normal numbers over 40 octaves, so that every cast underflows somewhere; zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.exp2(torch.randn(rows, cols, generator=generator) * 6)
    x[0, :4] = torch.tensor([0.0, -0.0, 1e-30, -1e-30])
    return x


def decoded(x_q: QuantizedTensor, ml_dtype: Any) -> Array:
    """What the codes and scales stand for, without ottava: ml_dtypes for the codes, numpy for the blocks; float64."""
    codes = x_q.data.contiguous()
    raw = codes.view(torch.uint8).numpy().view(ml_dtype) if codes.element_size() == 1 else codes.float().numpy()
    return (raw.astype(np.float32) * expanded(x_q)).astype(np.float64)


def expanded(x_q: QuantizedTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """scale_inv for every element, fp32. A block that decodes to NaN is measured as its codes were made: by scale 1."""
    rows, cols = x_q.shape
    block = x_q.spec.granularity
    scale_inv = np.nan_to_num(x_q.scale_inv.numpy(), nan=1.0)
    tall = np.repeat(scale_inv, block.rows or max(rows, 1), 0)[:rows]
    return np.repeat(tall, block.cols or max(cols, 1), 1)[:, :cols]


class Expected(NamedTuple):
    """A tally by definition."""

    n: float
    n_nonfinite: float
    n_nonzero: float
    n_underflow: float
    n_overflow: float
    sxx: float
    see: float
    sxe: float
    amax: float


def expected(x: Tensor, x_q: QuantizedTensor, ml_dtype: Any) -> Expected:
    fmt = x_q.spec.format
    x64, q64 = x.double().numpy(), decoded(x_q, ml_dtype)
    keep = np.isfinite(x64)
    scale_inv = expanded(x_q).astype(np.float64)[keep]
    # a block whose scale underflowed to 0 has lost its elements: that is no overflow
    scaled = np.abs(x64[keep]) / np.where(scale_inv == 0, math.inf, scale_inv)
    x64, q64 = x64[keep], q64[keep]
    error = x64 - q64
    # the format without an upper end: which numbers would have become larger than its largest?
    with np.errstate(divide="ignore"):
        quantum = np.exp2(np.maximum(np.floor(np.log2(scaled)), fmt.emin) - fmt.mantissa_bits)
    unbounded = np.rint(scaled / quantum) * quantum
    return Expected(
        n=float(keep.sum()),
        n_nonfinite=float((~keep).sum()),
        n_nonzero=float((x64 != 0).sum()),
        n_underflow=float(((x64 != 0) & (q64 == 0)).sum()),
        n_overflow=float((unbounded > fmt.max).sum()),
        sxx=math.fsum(x64 * x64),
        see=math.fsum(error * error),
        sxe=math.fsum(x64 * error),
        amax=float(np.abs(x64).max(initial=0.0)),
    )


def check(x: Tensor, x_q: QuantizedTensor, ml_dtype: Any) -> None:
    tally, truth = measure(x, x_q), expected(x, x_q, ml_dtype)
    assert {name: getattr(tally, name) for name in COUNTS} == {name: getattr(truth, name) for name in COUNTS}
    for name in SUMS:
        scale = truth.sxx if name == "sxe" else getattr(truth, name)  # sxe may cancel
        assert getattr(tally, name) == pytest.approx(getattr(truth, name), rel=1e-6, abs=1e-6 * scale), name


@sweep(granularity=[PER_TENSOR, PER_ROW, BLOCK_1X32, BLOCK_1X128, Granularity(16, 16)])
def test_tally_equals_numpy_for_every_format(
    fmt: Format, ml_dtypes_type: Any, granularity: Granularity, dtype: torch.dtype
) -> None:
    """Every format, block shape (ragged ones too) and input dtype, with NaN and infinities in the input."""
    x = wide().clamp(-6e4, 6e4).to(dtype)
    x[3, 5], x[4, 6], x[5, 7] = math.nan, math.inf, -math.inf
    if fmt == E8M0:
        x = x.abs().clamp(min=1e-3)  # it has neither a sign nor a zero
    x_q = ottava.quantize(x, QuantizationSpec(fmt, granularity))
    check(x, x_q, ml_dtypes_type)


@sweep(spec=CASTS.values())
def test_tally_equals_numpy_for_every_spec_of_a_recipe(spec: QuantizationSpec) -> None:
    """Powers of two, E8M0 and two-level scales, stochastic rounding."""
    types = {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2", "E2M1": "float4_e2m1fn"}
    ml_dtypes = pytest.importorskip("ml_dtypes")
    check(wide(), ottava.quantize(wide(), spec), getattr(ml_dtypes, types[spec.format.name]))


@pytest.mark.parametrize(
    "fmt, values, clipped",
    [
        (ottava.E4M3, [448.0, 460.0, 464.0, -464.0, 464.1, 480.0, -1e9], 3),  # 480 would follow; 464 ties to 448: even
        (ottava.E5M2, [57344.0, 61439.0, 61440.0, -61440.0, 65536.0], 3),  # 65536 would; 61440 ties to it: even
        (ottava.E2M1, [6.0, 6.9, 7.0, -7.0, 8.0], 3),
    ],
    ids=str,
)
def test_rounding_down_at_the_top_is_no_overflow(fmt: Format, values: list[float], clipped: int) -> None:
    """Half a step above the largest number is what nearest-even brings back to it; from there on values are clipped."""
    x = torch.tensor([values])
    assert measure(x, ottava.quantize(x, QuantizationSpec(fmt), scale=torch.tensor(1.0))).n_overflow == clipped


def test_a_block_whose_scale_vanished_is_lost_not_clipped() -> None:
    """NVFP4's second level: 1e-6 beside 1 asks for a block scale of 4e-4, below E4M3's smallest; its codes mean 0."""
    spec = ottava.RECIPES["nvfp4"].fprop.lhs
    assert spec is not None
    x = torch.ones(1, 32)
    x[0, 16:] = 1e-6
    tally = measure(x, ottava.quantize(x, spec))
    assert (tally.n_underflow, tally.n_overflow) == (16, 0)


# --- statistics -----------------------------------------------------------------------------------------------------


def by_definition(x: Array, q: Array) -> dict[str, float]:
    """Each statistic as a textbook has it."""
    error = x - q
    return {
        "amax": float(np.abs(x).max()),
        "underflow_pct": 100 * float(((x != 0) & (q == 0)).sum()) / float((x != 0).sum()),
        "sqnr_db": 10 * math.log10(math.fsum(x * x) / math.fsum(error * error)),
        "cosine": math.fsum(x * q) / math.sqrt(math.fsum(x * x) * math.fsum(q * q)),
        "mse": math.fsum(error * error) / x.size,
        "nonfinite": 0.0,
    }


@sweep(spec=CASTS.values())
def test_statistics_equal_their_definitions(spec: QuantizationSpec) -> None:
    """To 1e-6, and 1 - cosine of nearly parallel tensors to 1e-9."""
    x = wide()
    x_q = ottava.quantize(x, spec)
    tally = measure(x, x_q)
    truth = by_definition(x.double().numpy().ravel(), x_q.dequantize(torch.float32).double().numpy().ravel())
    for name, value in truth.items():
        assert STATISTICS[name].finish(tally) == pytest.approx(value, rel=1e-6, abs=1e-12), name
    assert STATISTICS["cosine"].finish(tally) == pytest.approx(truth["cosine"], abs=1e-9)


def test_cosine_keeps_its_digits_where_fp32_has_none_left() -> None:
    """An error of 2**-24 relative: 1 - cosine is 1.8e-15 (half the square of the angle), not 0 and not 1e-8."""
    n = 4.0
    tally = Tally(n=n, n_nonzero=n, sxx=n, see=n * 2.0**-48, sxe=0.0, amax=1.0)
    assert 1 - STATISTICS["cosine"].finish(tally) == pytest.approx(2.0**-49, rel=0.1)


UNKNOWN: tuple[tuple[str, Callable[[], Tensor], dict[str, float]], ...] = (
    ("nothing", lambda: torch.zeros(0, 8), {"underflow_pct": math.nan, "overflow_pct": math.nan, "mse": math.nan}),
    ("zeros", lambda: torch.zeros(2, 8), {"underflow_pct": math.nan, "overflow_pct": 0, "mse": 0, "sqnr_db": math.nan}),
    ("exact", lambda: torch.full((2, 8), 0.5), {"underflow_pct": 0, "sqnr_db": math.inf, "cosine": 1, "mse": 0}),
)


@pytest.mark.parametrize("make, values", [(make, values) for _, make, values in UNKNOWN], ids=[u[0] for u in UNKNOWN])
def test_what_a_tally_cannot_say_is_nan(make: Callable[[], Tensor], values: dict[str, float]) -> None:
    """NaN means "no such number", never 0; a cast without error has an infinite SQNR."""
    x = make()
    tally = measure(x, ottava.quantize(x, QuantizationSpec(ottava.E4M3)))
    got = {name: STATISTICS[name].finish(tally) for name in values}
    assert {n: "nan" if math.isnan(v) else v for n, v in got.items()} == {
        n: "nan" if math.isnan(v) else v for n, v in values.items()
    }


def test_a_tensor_that_vanished_has_no_direction() -> None:
    """All cast to 0: 100% underflow, an SQNR of 0 dB, no cosine."""
    x = torch.full((2, 8), 2.0**-30)
    tally = measure(x, ottava.quantize(x, QuantizationSpec(ottava.E4M3), scale=torch.tensor(1.0)))
    assert STATISTICS["underflow_pct"].finish(tally) == 100
    assert STATISTICS["sqnr_db"].finish(tally) == 0
    assert math.isnan(STATISTICS["cosine"].finish(tally))


def test_every_statistic_explains_itself() -> None:
    """Keys are names; each has a unit where it has one, and a sentence."""
    assert all(name == s.name and s.meaning for name, s in STATISTICS.items())
    ratios = {"cosine", "gain", "mean_relative_error", "kurtosis", "outlier_ratio", "bias"}
    assert {name for name, s in STATISTICS.items() if not s.unit} == ratios
