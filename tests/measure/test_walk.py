"""What `measure` fills, field by field, against an independent numpy in float64."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import ottava
from ottava.measure.sample import take_bands_of
from ottava.measure.statistics import STATISTICS
from ottava.measure.tally import DETAILS, GRANULARITIES, Detail, Tally, tally_fields
from ottava.measure.walk import BAND_ROWS, found_by, measure, measure_packed, survey
from ottava.numerics.scaling import BLOCK_1X128, BLOCK_128X128, PER_ROW, Granularity
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.quantize import cast_both
from sweep import AXES, CASTS, sweep

Array = np.ndarray[Any, np.dtype[Any]]
CODES = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2, "E2M1": ml_dtypes.float4_e2m1fn}
KERNEL = tuple(f for f in tally_fields() if f.metadata["detail"] != "anatomy")  # test_anatomy.py has the others
COUNTS = tuple(f.name for f in tally_fields("number") if f.name.startswith("n"))
EXACT = ("amax", "amin")
SUMS = tuple(f.name for f in KERNEL if not f.metadata["bins"] and f.name not in (*COUNTS, *EXACT))


# --- the oracle -----------------------------------------------------------------------------------------------------


def per_element(x_q: QuantizedTensor) -> Array:
    """scale_inv of every element, fp32."""
    rows, cols = x_q.shape
    block, scale_inv = x_q.spec.granularity, x_q.scale_inv.numpy()
    tall = np.repeat(scale_inv, block.rows or max(rows, 1), 0)[:rows]
    return np.repeat(tall, block.cols or max(cols, 1), 1)[:, :cols]


def block_amax(magnitude: Array, block: Granularity) -> Array:
    """The largest magnitude of the block that each element is in."""
    if not magnitude.size:
        return magnitude
    largest = magnitude
    for axis, extent in enumerate((block.rows, block.cols)):
        size = magnitude.shape[axis]
        starts = range(0, size, extent or size)
        largest = np.repeat(np.maximum.reduceat(largest, starts, axis), extent or size, axis).take(range(size), axis)
    return largest


def quarter_octaves(ratio: Array) -> Array:
    """floor of log2 in steps that quarter an octave linearly: 1, 1.25, 1.5, 1.75, 2 have 0, 1, 2, 3, 4."""
    mantissa, exponent = np.frexp(ratio)
    return 4 * (exponent - 1) + np.floor((mantissa * 2 - 1) * 4).astype(int)


def fp32_bins(size: Array) -> Array:
    """Bits 30 to 21 of fp32, which are linear below its smallest normal number."""
    return np.where(
        size < 2.0**-126, np.floor(np.minimum(size, 1) * 2.0**128 % 1024).astype(int), quarter_octaves(size) + 508
    )


def histogram(bins: Array, size: int, weights: Array | None = None) -> Array:
    return np.bincount(bins.clip(0, size - 1).ravel(), weights, minlength=size).astype(np.float64)


def oracle(x: Tensor, x_q: QuantizedTensor) -> dict[str, Any]:
    """Every field of a `Tally` by its definition; codes of a block that NaN decodes were made with scale 1."""
    fmt, x_q = x_q.spec.format, replace(x_q, scale_inv=x_q.scale_inv.nan_to_num(1.0))
    codes = x_q.data.contiguous().view(torch.uint8).numpy().view(CODES[fmt.name]).astype(np.float32)
    scale_inv = per_element(x_q)
    value, cast = x.double().numpy(), (codes * scale_inv).astype(np.float64)
    finite = np.isfinite(value)
    bad = ~finite
    value, cast, codes = np.where(bad, 0, value), np.where(bad, 0, cast), np.where(bad, 0, codes)
    size, nonzero, error = np.abs(value), value != 0, value - cast
    noise, signal = (error**2).sum(1), (value**2).sum(1)
    alive = signal > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        decibels = -10 * np.log10(noise[alive] / signal[alive])
        ratio = size / np.where(scale_inv == 0, math.inf, scale_inv.astype(np.float64))
    step = 2.0 ** (fmt.emax - fmt.mantissa_bits)
    even = (fmt.max / step) % 2 == 0
    top = fmt.max + step / 2
    used = x_q.scale_inv.double().numpy().ravel()
    used = used[used > 0]
    amax = float(size.max(initial=0))
    spread = block_amax(size, BLOCK_1X128)[:, ::128] if size.size else np.zeros((0, 0))
    with np.errstate(divide="ignore"):
        octaves = np.floor(np.log2(amax / spread[spread > 0])) if spread.any() else np.zeros(0)
    channel, lost = (value**2).sum(0), (error**2).sum(0)
    live = channel > 2.0**-80 * channel.max(initial=0)
    with np.errstate(divide="ignore"):
        channel_db = -10 * np.log10(lost[live] / channel[live])
    share = channel.max(initial=0) / channel.sum() if channel.sum() else 0.0
    truth: dict[str, Any] = {
        "n_dead": (~live).sum() if value.size else 0,
        "top_channel": math.floor(share * 2**20 + 0.5) / 2**20,
        "channel_sqnr": histogram(np.floor(np.nan_to_num(channel_db / 0.5, posinf=1e9)).astype(int), 128),
        "n": finite.sum(),
        "n_total": value.size,
        "n_nonfinite": bad.sum(),
        "n_nonzero": nonzero.sum(),
        "n_underflow": (nonzero & (cast == 0)).sum(),
        "n_subnormal": ((codes != 0) & (np.abs(codes) < 2.0**fmt.emin)).sum(),
        "n_overflow": ((ratio > top) if even else (ratio >= top)).sum(),
        "n_rows": alive.sum(),
        "n_casts": 1,
        "n_scales": len(used),
        "sx": math.fsum(value.ravel()),
        "sabs": math.fsum(size.ravel()),
        "sxx": math.fsum((value**2).ravel()),
        "sx4": math.fsum((value**4).ravel()),
        "see": math.fsum((error**2).ravel()),
        "sxe": math.fsum((value * error).ravel()),
        "srel": math.fsum(np.abs(error[nonzero]) / size[nonzero]),
        "scale_log2": math.fsum(-np.log2(used)),
        "scale_log2_squared": math.fsum(np.log2(used) ** 2),
        "amax": amax,
        "amin": float(size[nonzero].min(initial=math.inf)),
        "max_error": float(np.abs(error).max(initial=0)),
        "scale_max": float((1 / used).max(initial=0)),
        "scale_min": float((1 / used).min(initial=math.inf)),
        "exponents": histogram(fp32_bins(size[nonzero]), 1024),
        "row_sqnr": histogram(np.floor(np.nan_to_num(decibels / 0.5, posinf=1e9)).astype(int), 128),
        "block_spread": histogram(octaves.astype(int), 32),
        **predicted(x_q, amax),
    }
    for name in GRANULARITIES:
        below = -quarter_octaves(size[nonzero] / block_amax(size, Granularity.parse(name))[nonzero])
        truth[f"below_{name}"] = histogram(below, 164)
        truth[f"energy_below_{name}"] = histogram(below, 164, value[nonzero] ** 2)
    return truth


def predicted(x_q: QuantizedTensor, amax: float) -> dict[str, float]:
    """The scale that was used over the one that fits."""
    if not x_q.spec.predicted or amax == 0:
        return {"n_predicted": 0, "scale_error": 0, "scale_error_max": -math.inf, "scale_error_min": math.inf}
    fits = x_q.spec.format.max / 2**x_q.spec.margin / amax
    error = -math.log2(float(x_q.scale_inv)) - math.log2(fits)
    return {"n_predicted": 1, "scale_error": error, "scale_error_max": error, "scale_error_min": error}


def near(truth: dict[str, Any], name: str) -> float:
    """The magnitude against which a sum is judged: those that cancel have a larger one."""
    larger = {"sx": "sabs", "sxe": "sxx", "scale_log2": "scale_log2_squared", "scale_error": "n_predicted"}
    larger |= {"scale_error_max": "n_predicted", "scale_error_min": "n_predicted"}
    return float(abs(truth[larger.get(name, name)]))


def compare_with_oracle(x: Tensor, x_q: QuantizedTensor) -> Tally:
    """Counts, extremes and bins exactly; sums to 1e-6. An element within 4 ulps of the edge of a bin may be beside it:
    fp32 rounds the quotient and the decibels before the floor."""
    tally, truth = measure(x, x_q), oracle(x, x_q)
    assert set(truth) == {f.name for f in KERNEL}
    exact = (*COUNTS, *EXACT)
    assert {n: getattr(tally, n) for n in exact} == {n: float(truth[n]) for n in exact}
    for name in SUMS:
        bound = 1e-6 * max(near(truth, name), 1e-300)
        assert getattr(tally, name) == pytest.approx(truth[name], rel=1e-6, abs=bound), name
    for f in (f for f in KERNEL if f.metadata["bins"]):
        got, wanted = getattr(tally, f.name), truth[f.name]
        if f.name in ("exponents", "block_spread"):
            assert np.array_equal(got, wanted), f.name
        elif f.name.startswith("energy"):
            moved = np.abs(np.cumsum(got - wanted)).max()
            assert moved <= 1e-6 * truth["sxx"] + on_edges(x, f.name) * truth["amax"] ** 2, f.name
        else:
            assert got.sum() == wanted.sum(), f.name
            assert np.abs(np.cumsum(got - wanted)).max() <= on_edges(x, f.name), f.name
    return tally


def on_edges(x: Tensor, name: str) -> int:
    """How many elements are so near to the edge of a bin that rounding may move them."""
    if name.endswith("_sqnr"):
        return 1 + x.shape[name == "channel_sqnr"] // 200
    size = np.nan_to_num(np.abs(x.double().numpy()), nan=0, posinf=0)
    largest = block_amax(size, Granularity.parse(name.split("below_")[1]))
    ratio = (size / np.where(largest > 0, largest, 1))[size > 0]
    inside = (ratio != 1) & (np.abs(np.frexp(ratio)[0] * 8 - np.rint(np.frexp(ratio)[0] * 8)) < 8 * 2.0**-22)
    exact = np.frexp(ratio)[0] * 8 == np.rint(np.frexp(ratio)[0] * 8)
    return int((inside & ~exact).sum())


def hard(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Rows and columns of very different magnitude; both zeros, subnormals, infinities and NaN among them."""
    x = torch.randn(rows, cols, dtype=torch.float64)
    low, high = (-9.0, 4.0) if dtype == torch.float16 else (-60.0, 40.0)
    x *= torch.exp2(torch.empty(rows, 1, dtype=torch.float64).uniform_(low, high))
    x *= torch.exp2(torch.randn(1, cols, dtype=torch.float64))
    x = x.to(dtype)
    if x.numel() > 20:
        x[0, :7] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 0.0, -1.0])
        x[1, :2] = torch.finfo(dtype).smallest_normal / 4
        x[2] = 0
    return x


SHAPES: dict[str, Callable[[torch.dtype], Tensor]] = {
    "1x1": lambda dtype: hard(1, 1, dtype),
    "odd 37x131": lambda dtype: hard(37, 131, dtype),
    "whole blocks 128x256": lambda dtype: hard(128, 256, dtype),
    "bands and a rest 300x40": lambda dtype: hard(300, 40, dtype),
    "transposed 131x150": lambda dtype: hard(150, 131, dtype).t(),
    "strided": lambda dtype: hard(80, 131, dtype)[::2, 1::3],
    "0x5": lambda dtype: hard(0, 5, dtype),
    "5x0": lambda dtype: hard(5, 0, dtype),
}


@sweep(case=enumerate(itertools.product(CASTS.values(), SHAPES.values())))
def test_every_field_equals_the_oracle(
    case: tuple[int, tuple[QuantizationSpec, Callable[[torch.dtype], Tensor]]],
) -> None:
    """Every field, spec of a recipe and shape, in a dtype by turns; with zeros, subnormals, infinities and NaN."""
    index, (spec, make) = case
    x = make(AXES["dtype"][(index + index // len(SHAPES)) % 3])
    scale = torch.tensor(3.0) if spec.predicted else None
    compare_with_oracle(x, ottava.quantize(x, spec, scale=scale))


# --- single hard cases ----------------------------------------------------------------------------------------------

E4M3 = QuantizationSpec(ottava.E4M3)


def test_a_row_far_below_the_others_keeps_its_own_sqnr() -> None:
    """30 decades below the largest row, whose squares fp32 does not hold beside it: scaled by row, it is as good."""
    x = torch.randn(2, 256).repeat(2, 1) * torch.tensor([[1.0], [1.0], [1e-30], [1e-30]])
    tally = measure(x, ottava.quantize(x, QuantizationSpec(ottava.E4M3, PER_ROW)))
    assert tally.n_rows == 4
    assert np.flatnonzero(tally.row_sqnr).min() >= 60  # 30 dB
    assert tally.row_sqnr.sum() == 4


def test_more_elements_than_fp32_can_count() -> None:
    """2**24 + 1 and beyond: n, n_nonzero, underflow, exponents, sums, in less than 10 s."""
    began = time.process_time()
    rows, cols = 4097, 4099
    x = torch.ones(rows, cols, dtype=torch.bfloat16)
    x[:, ::2] = 2.0**-30
    x[0, 0] = 0
    tally = measure(x, ottava.quantize(x, E4M3))
    ones, small = rows * 2049, rows * 2050 - 1
    assert rows * cols > 2**24
    assert (tally.n, tally.n_nonzero, tally.n_underflow) == (rows * cols, ones + small, small)
    assert (tally.exponents[508], tally.exponents[388]) == (ones, small)
    assert (tally.below_128x128[0], tally.below_1x32[120]) == (ones, small)
    assert tally.sx == pytest.approx(ones + small * 2.0**-30, rel=1e-7)
    assert tally.see == pytest.approx(small * 2.0**-60, rel=1e-7)
    assert time.process_time() - began < 10


@sweep(spec=CASTS.values())
def test_shards_cut_at_bands_merge_to_the_whole(spec: QuantizationSpec) -> None:
    """Every count and histogram of counts exactly, energies and sums to 1e-12, for every number of shards."""
    x = hard(5 * BAND_ROWS + 17, 96, torch.float32)
    x_q = ottava.quantize(x, spec, scale=torch.tensor(5.0) if spec.predicted else None)
    whole = measure(x, x_q)
    for cuts in ([2], [1, 3], [1, 2, 3, 4, 5]):
        merged = Tally()
        edges = [0, *(cut * BAND_ROWS for cut in cuts), len(x)]
        for start, stop in itertools.pairwise(edges):
            part = measure_packed(x[start:stop], take_bands_of(x_q, [range(start, stop)]))
            merged += part.tally()
        for f in tally_fields():
            if f.metadata.get("of_cast") or f.name == "n_predicted" or "scale" in f.name:  # a call each
                continue
            got, wanted = getattr(merged, f.name), getattr(whole, f.name)
            if f.name.startswith("n") or (f.metadata["bins"] and not f.name.startswith("energy")):
                assert np.array_equal(got, wanted), f.name
            else:
                assert np.allclose(got, wanted, rtol=1e-12, atol=1e-9 * np.max(np.abs(wanted))), f.name


@sweep(spec=CASTS.values(), turned=[False, True])
def test_a_cast_knows_what_a_survey_would_say(spec: QuantizationSpec, turned: bool) -> None:
    """The largest amax of its blocks, of x and of x.T, cast alone or at once; not where elements are not finite."""
    x = hard(200, 130, torch.bfloat16).nan_to_num(posinf=1.0, neginf=1.0)
    x = x.t() if turned else x
    scale = torch.tensor(5.0) if spec.predicted else None
    both = cast_both(x, spec, spec, scale=scale)
    casts = [ottava.quantize(x, spec, scale=scale), both.row, both.col]
    assert all(cast is not None and torch.equal(found_by(cast, x.numel()), survey(x)) for cast in casts)  # type: ignore
    x[150 if not turned else 3, 7] = math.nan
    assert found_by(ottava.quantize(x, spec, scale=scale), x.numel()) is None


def test_details_differ_in_the_histograms_over_elements_only() -> None:
    """Each leaves out what those after it add, and nothing else; the bits of all else are the same."""
    assert set(DETAILS) == {f.metadata["detail"] for f in tally_fields()} == set(get_args(Detail))
    x = hard(200, 130, torch.float32)
    x_q = ottava.quantize(x, QuantizationSpec(ottava.E4M3, BLOCK_128X128))
    full = measure_packed(x, x_q, detail=DETAILS[-1]).tally()
    for i, detail in enumerate(DETAILS):
        some = measure_packed(x, x_q, detail=detail).tally()
        for f in tally_fields():
            if f.metadata["detail"] in DETAILS[: i + 1]:
                assert np.array_equal(getattr(full, f.name), getattr(some, f.name)), f.name
            else:
                assert not np.any(getattr(some, f.name)), f.name


# --- which number sees which fault ----------------------------------------------------------------------------------


def massive_tokens(factor: float) -> Tensor:
    """A SwiGLU product of 2048 tokens, four of which are `factor` times larger."""
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(2048, 512, generator=generator) for _ in range(2))
    x = torch.nn.functional.silu(gate) * up
    x[::512] *= factor
    return x


def test_which_statistic_sees_massive_tokens() -> None:
    """Four tokens 1e5 times larger: global SQNR and cosine look better than ever while half of all elements are gone;
    the median row and underflow see it, and say that scales per row mend it."""
    healthy, broken, mended = (
        {name: s.finish(tally) for name, s in STATISTICS.items()}
        for tally in (
            measure(massive_tokens(1), ottava.quantize(massive_tokens(1), E4M3)),
            measure(massive_tokens(1e5), ottava.quantize(massive_tokens(1e5), E4M3)),
            measure(massive_tokens(1e5), ottava.quantize(massive_tokens(1e5), QuantizationSpec(ottava.E4M3, PER_ROW))),
        )
    )
    assert broken["sqnr_db"] > healthy["sqnr_db"] - 1.5
    assert broken["cosine"] > 0.999
    assert broken["cosine"] > healthy["cosine"] - 2e-4
    assert broken["underflow_pct"] > 40 > 3 > healthy["underflow_pct"]
    assert broken["row_sqnr_p50_db"] < 20 < 30 < healthy["row_sqnr_p50_db"]
    assert broken["mean_relative_error"] > 0.5 > 0.1 > healthy["mean_relative_error"]
    assert mended["row_sqnr_p50_db"] > 30
    assert mended["underflow_pct"] < 3
