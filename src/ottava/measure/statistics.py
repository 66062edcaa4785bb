"""The statistics of a cast, each a formula over a `Tally`. A new statistic is one entry of `STATISTICS`.

With x the tensor before the cast, q the dequantized one and e = x - q:

    See = sum e**2    Sxx = sum x**2    Sxe = sum x*e    a = Sxe / Sxx    b = See / Sxx
    mse = See / n     sqnr_db = -10 log10 b     cosine = (1 - a) / sqrt(1 - 2a + b)

The cosine is thus never the quotient of two nearly equal sums, which would leave 4 digits in fp32. Cosine, MSE and SQNR
of a tensor weigh elements by their energy: they look perfect when a few huge rows hide that all other rows underflowed.
`row_sqnr_p50_db`, `mean_relative_error` and `underflow_pct` weigh rows or elements equally; look at those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from ottava.measure.tally import PARTS, ROW_SQNR_DB, Bins, Number, Tally, plain

Worse = Literal["high", "low", ""]


@dataclass(frozen=True)
class Statistic:
    """A formula: one number from a tally, or a column of numbers from a table of tallies.

    Example:
        >>> one = STATISTICS["underflow_pct"]
        >>> one.unit, one.worse, one.finish(Tally(n=8, n_nonzero=8, n_underflow=2))
        ('%', 'high', 25.0)
    """

    name: str
    """Key in tables and files."""
    unit: str
    """Unit of the number."""
    meaning: str
    """One sentence."""
    worse: Worse
    """Which values are bad: "high", "low", or "" for neither."""
    finish: Callable[[Tally], Number]
    """Computes the number; NaN if the tally does not know it."""


def ratio(part: Number, whole: Number) -> Number:
    """part / whole; NaN if whole is 0."""
    part, whole = np.asarray(part, dtype=np.float64), np.asarray(whole, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return plain(np.where(whole != 0, part / np.where(whole != 0, whole, 1.0), math.nan))


def _where(condition: Any, value: Any) -> Number:
    return plain(np.where(condition, value, math.nan))


def _percent(part: str, whole: str) -> Callable[[Tally], Number]:
    return lambda t: 100 * ratio(getattr(t, part), getattr(t, whole))


def decibels(noise_over_signal: Number) -> Number:
    """-10 log10 of a ratio of powers; inf without noise."""
    with np.errstate(divide="ignore"):
        return plain(-10 * np.log10(noise_over_signal))


def _cosine_and_gain(t: Tally) -> tuple[Number, Number]:
    a, b = ratio(t.sxe, t.sxx), ratio(t.see, t.sxx)
    norm = np.maximum(1 - 2 * a + b, 0.0)  # |q|**2 / |x|**2
    return ratio(1 - a, np.sqrt(norm)), ratio(1 - a, norm)


def _rms(t: Tally) -> Number:
    return np.sqrt(ratio(t.sxx, t.n))


def _std(t: Tally) -> Number:
    mean = ratio(t.sx, t.n)
    return plain(np.sqrt(np.maximum(ratio(t.sxx, t.n) - mean * mean, 0.0)))


def _amin(t: Tally) -> Number:
    return _where(np.isfinite(t.amin), t.amin)


def _dynamic_range(t: Tally) -> Number:
    with np.errstate(divide="ignore", invalid="ignore"):
        return plain(np.log2(ratio(t.amax, _amin(t))))


def _scale_spread(t: Tally) -> Number:
    mean = ratio(t.scale_log2, t.n_scales)
    return plain(np.sqrt(np.maximum(ratio(t.scale_log2_squared, t.n_scales) - mean * mean, 0.0)))


def _delayed_scale(t: Tally) -> Number:
    return _where(np.isfinite(t.scale_error_max) & (np.asarray(t.scale_max) > 0), t.scale_max)


def _current_scale(t: Tally) -> Number:
    """Of a predicted scale: what the largest amax of all micro-batches asks for."""
    predicted = np.isfinite(t.scale_error_max)
    ahead = np.exp2(np.where(predicted, t.scale_error_max, 0.0))
    return _where(np.isfinite(t.scale_min), np.where(predicted, t.scale_max / ahead, t.scale_min))


_ROWS = 2048


def percentile(histogram: Bins, share: float, *, width: float = 1.0, first: float = 0.0) -> Number:
    """The value below which `share` of a histogram's entries lie, linear within a bin; NaN for an empty histogram.

    Args:
        histogram: (bins,) or (rows, bins).
        share: 0 to 1.
        first: lower edge of the first bin.
        width: width of a bin.

    Example:
        >>> percentile(np.array([0.0, 4.0, 4.0]), 0.75)
        2.5
    """
    histogram = np.asarray(histogram)
    if histogram.ndim == 2 and len(histogram) > _ROWS:  # pieces that fit a cache take a quarter of the time
        pieces = [histogram[i : i + _ROWS] for i in range(0, len(histogram), _ROWS)]
        return np.concatenate([percentile(piece, share, width=width, first=first) for piece in pieces])
    histogram = histogram.astype(np.float64, copy=False)
    total = histogram.sum(-1)
    cumulative = histogram.cumsum(-1)
    target = total * share
    index = (cumulative < target[..., None]).sum(-1)
    index = np.minimum(index, histogram.shape[-1] - 1)
    inside = np.take_along_axis(histogram, index[..., None], -1)[..., 0]
    before = np.take_along_axis(cumulative, index[..., None], -1)[..., 0] - inside
    part = np.where(inside > 0, (target - before) / np.where(inside > 0, inside, 1), 0.0)
    return _where(total > 0, first + width * (index + part))


def _row_sqnr(share: float) -> Callable[[Tally], Number]:
    return lambda t: percentile(t.row_sqnr, share, width=ROW_SQNR_DB)


def _rows_below(limit_db: float) -> Callable[[Tally], Number]:
    bins = int(limit_db / ROW_SQNR_DB)
    return lambda t: 100 * ratio(np.asarray(t.row_sqnr)[..., :bins].sum(-1), t.n_rows)


def _part(name: str) -> Callable[[Tally], Number]:
    """Percent of the squared error; see `measure.walk.anatomy`."""

    def share(t: Tally) -> Number:
        dead, clipped, live, grid = map(np.asarray, (t.error_dead, t.error_clipped, t.error_live, t.error_grid))
        part = (dead, clipped, live - grid, grid)[PARTS.index(name)]
        return 100 * ratio(part, dead + clipped + live)

    return share


def _blocks_of(name: str) -> Callable[[Tally], Number]:
    index = PARTS.index(name)
    return lambda t: 100 * ratio(np.asarray(t.blocks_by_part)[..., index], np.asarray(t.blocks_by_part).sum(-1))


_ENTRIES = (
    Statistic("amax", "of x", "largest magnitude before the cast", "", lambda t: t.amax),
    Statistic("amin", "of x", "smallest magnitude that is not 0", "", _amin),
    Statistic(
        "underflow_pct",
        "%",
        "non-zero elements that the cast turned into 0",
        "high",
        _percent("n_underflow", "n_nonzero"),
    ),
    Statistic(
        "underflow_pct_numel",
        "%",
        "underflow as a share of all elements, zeros too: TransformerEngine's number",
        "high",
        _percent("n_underflow", "n"),
    ),
    Statistic(
        "subnormal_pct",
        "%",
        "non-zero elements that became subnormal numbers, which have fewer bits",
        "high",
        _percent("n_subnormal", "n_nonzero"),
    ),
    Statistic("overflow_pct", "%", "elements that the cast clipped", "high", _percent("n_overflow", "n")),
    Statistic("row_sqnr_p50_db", "dB", "SQNR of the median row: the first number to look at", "low", _row_sqnr(0.5)),
    Statistic("row_sqnr_p10_db", "dB", "one row in ten is worse", "low", _row_sqnr(0.1)),
    Statistic("row_sqnr_p1_db", "dB", "one row in a hundred is worse", "low", _row_sqnr(0.01)),
    Statistic("rows_below_15db_pct", "%", "rows that are mostly noise", "high", _rows_below(15)),
    Statistic(
        "channel_sqnr_p50_db",
        "dB",
        "SQNR of the median channel that is not dead: a channel that is huge in all rows hides in no other number",
        "low",
        lambda t: percentile(t.channel_sqnr, 0.5, width=ROW_SQNR_DB),
    ),
    Statistic(
        "channel_sqnr_p10_db",
        "dB",
        "one channel in ten is worse",
        "low",
        lambda t: percentile(t.channel_sqnr, 0.1, width=ROW_SQNR_DB),
    ),
    Statistic(
        "top_channel_pct",
        "%",
        "largest share of the energy that one channel has",
        "high",
        lambda t: _where(np.asarray(t.top_channel) > 0, 100 * np.asarray(t.top_channel)),
    ),
    Statistic(
        "dead_channels_pct",
        "%",
        "columns of the cast matrix whose energy is at most 2^-80 of the largest column's",
        "high",
        lambda t: 100 * ratio(t.n_dead, np.asarray(t.channel_sqnr).sum(-1) + t.n_dead),
    ),
    Statistic(
        "sqnr_db",
        "dB",
        "power of the tensor over the power of its error",
        "low",
        lambda t: decibels(ratio(t.see, t.sxx)),
    ),
    Statistic(
        "mean_relative_error",
        "",
        "|e| / |x|, mean of the non-zero elements; 1 for a flushed one",
        "high",
        lambda t: ratio(t.srel, t.n_nonzero),
    ),
    Statistic("cosine", "", "cosine between the tensor and its cast", "low", lambda t: plain(_cosine_and_gain(t)[0])),
    Statistic(
        "gain",
        "",
        "the factor by which the cast fits x best: above 1, the cast shrinks x",
        "",
        lambda t: plain(_cosine_and_gain(t)[1]),
    ),
    Statistic("mse", "of x squared", "mean squared error of the cast", "high", lambda t: ratio(t.see, t.n)),
    Statistic("error_dead_pct", "%", "share of the squared error of elements cast to 0", "high", _part("dead")),
    Statistic("error_clipped_pct", "%", "share of the squared error of clipped elements", "high", _part("clipped")),
    Statistic(
        "error_scale_pct",
        "%",
        "share of the squared error that the ideal scale of each block would save; below 0: the scale is better",
        "high",
        _part("scale"),
    ),
    Statistic("error_grid_pct", "%", "share of the squared error that no scale avoids", "", _part("grid")),
    Statistic("blocks_dead_pct", "%", "blocks that lose most by elements cast to 0", "high", _blocks_of("dead")),
    Statistic("blocks_clipped_pct", "%", "blocks that lose most by clipping", "high", _blocks_of("clipped")),
    Statistic("blocks_scale_pct", "%", "blocks that lose most by their scale", "high", _blocks_of("scale")),
    Statistic("max_error", "of x", "largest error of an element", "high", lambda t: t.max_error),
    Statistic("rms", "of x", "root of the mean square", "", lambda t: plain(_rms(t))),
    Statistic("mean", "of x", "mean", "", lambda t: ratio(t.sx, t.n)),
    Statistic("std", "of x", "standard deviation", "", _std),
    Statistic(
        "bias",
        "",
        "|mean| over rms: sums of products of two biased operands shrink in a short accumulator",
        "high",
        lambda t: ratio(np.abs(t.sx), t.n * _rms(t)),
    ),
    Statistic("dynamic_range_bits", "octaves", "log2(amax / amin)", "high", _dynamic_range),
    Statistic(
        "kurtosis", "", "n sum x**4 / (sum x**2)**2; 3 for a Gaussian", "high", lambda t: ratio(t.n * t.sx4, t.sxx**2)
    ),
    Statistic("outlier_ratio", "", "amax over rms", "high", lambda t: ratio(t.amax, _rms(t))),
    Statistic(
        "block_spread_p50",
        "octaves",
        "octaves from the amax of the median 1x128 block up to the tensor's amax: one scale for all loses them",
        "high",
        lambda t: percentile(t.block_spread, 0.5),
    ),
    Statistic(
        "block_spread_p99",
        "octaves",
        "one block in a hundred lies further below the tensor's amax",
        "high",
        lambda t: percentile(t.block_spread, 0.99),
    ),
    Statistic("scale_max", "1/x", "largest scale", "", lambda t: _where(np.asarray(t.scale_max) > 0, t.scale_max)),
    Statistic("scale_min", "1/x", "smallest scale", "", lambda t: _where(np.isfinite(t.scale_min), t.scale_min)),
    Statistic("scale_log2_std", "octaves", "standard deviation of log2(scale) over blocks", "", _scale_spread),
    Statistic(
        "scale_error_max",
        "octaves",
        "largest log2(predicted scale / current scale): above 0 the cast clips",
        "high",
        lambda t: _where(np.isfinite(t.scale_error_max), t.scale_error_max),
    ),
    Statistic(
        "scale_error_min",
        "octaves",
        "smallest log2(predicted scale / current scale): below 0 the cast loses low bits",
        "low",
        lambda t: _where(np.isfinite(t.scale_error_min), t.scale_error_min),
    ),
    Statistic(
        "scale_error_mean",
        "octaves",
        "mean of log2(predicted scale / current scale)",
        "",
        lambda t: ratio(t.scale_error, t.n_predicted),
    ),
    Statistic("scale_current", "1/x", "scale for the amax of this step; the smallest of several", "", _current_scale),
    Statistic("scale_delayed", "1/x", "scale that the history predicted for this step", "", _delayed_scale),
    Statistic("nonfinite", "elements", "infinities and NaNs before the cast", "high", lambda t: t.n_nonfinite),
)

STATISTICS: Mapping[str, Statistic] = MappingProxyType({s.name: s for s in _ENTRIES})
"""Name -> statistic: everything that a table, a report or a plot can show of a cast."""
