"""Predicts from histograms what a cast would do to a tensor: underflow, overflow and errors.

The error of rounding y depends only on y. Its mean over a bin of a histogram can therefore be computed: `_bin_table`
averages the real `round_to_format` over numbers spread evenly in every quarter octave. The scale of a bin's numbers
depends on the recipe:

    one scale per tensor        from `Tally.exponents` and the amax, which gives the scale exactly
    one scale per row or block  from `Tally.below_*`, the distances of elements below the amax of their block. The scale
                                maps that amax to the top of the format; a power of two maps it into the last octave,
                                where the prediction spreads it evenly
    blocks without histogram    1x16, 16x16: quantiles from the plane through those of 1x32, 1x128 and 128x128

The largest element is rounded exactly, because it is most of the energy in a tensor with outliers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ottava.measure.tally import EXPONENT_BINS, GRANULARITIES, RELATIVE_BINS, SPREAD_BINS, Tally
from ottava.numerics.formats import E4M3, Format
from ottava.numerics.rounding import round_to_format
from ottava.numerics.scaling import PER_TENSOR, Granularity
from ottava.numerics.tensor import QuantizationSpec

Array = npt.NDArray[np.float64]

_QUARTER_OCTAVE_BITS, _TOP_BIN = 21, 508
_SAMPLES = 16  # numbers in a quarter octave, in which E4M3 has two steps
_RANDOM_SAMPLES = 64
_TOPS = 16  # possible values of a block's scaled amax within an octave
_STEPS = 128  # steps of an octave to which the scale of a tensor is rounded


@dataclass(frozen=True, eq=False)
class Expected:
    """Sums over the elements of each row of a table of tallies; every field (rows,).

    Example: see `expect`.
    """

    elements: Array
    """Non-zero elements."""
    flushed: Array
    """Elements that the cast turns into 0."""
    clipped: Array
    """Elements beyond the largest number."""
    relative: Array
    """Sum of |e| / |x|."""
    relative_squared: Array
    """Sum of e**2 / x**2."""
    signal: Array
    """Sum of x**2."""
    noise: Array
    """Sum of e**2."""


def expect(tally: Tally, spec: QuantizationSpec, *, scale: Array | None = None) -> Expected | None:
    """Predicts the cast by `spec` for each row of a table of tallies.

    Args:
        tally: fields (rows,), histograms (rows, bins), as in `Table.tallies`.
        spec: the cast.
        scale: (rows,): predicted scale of each row; None: the current scale.
    Returns:
        The sums; None if the tallies lack the histograms for it, or no histogram says what a transform would do.

    Example:
        >>> import ottava
        >>> from ottava.measure.walk import measure
        >>> from ottava.measure.tally import tally_fields
        >>> x = torch.randn(256, 256) * torch.tensor([1.0, 3e-6]).repeat(128)
        >>> measured = measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E5M2)))
        >>> rows = Tally(**{f.name: np.array([getattr(measured, f.name)]) for f in tally_fields()})
        >>> expected = expect(rows, ottava.QuantizationSpec(ottava.E4M3))     # the run cast to E5M2
        >>> really = measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3)))
        >>> bool(abs(expected.flushed[0] - really.n_underflow) / really.n_nonzero < 0.005)
        True
    """
    if spec.transform is not None or spec.block_scale != "amax":
        return None
    if spec.granularity == PER_TENSOR:
        return _per_tensor(tally, spec, scale)
    return _per_block(tally, spec)


def current_scale(amax: Array, spec: QuantizationSpec) -> Array:
    """(rows,): the scales of current scaling."""
    amaxes = torch.from_numpy(np.asarray(amax, dtype=np.float32))
    return np.asarray(spec.scale_of(amaxes).scale.numpy(), dtype=np.float64)


def _per_tensor(tally: Tally, spec: QuantizationSpec, scale: Array | None) -> Expected | None:
    counts = np.asarray(tally.exponents)
    columns = np.flatnonzero(counts.any(axis=0))
    if not len(columns):
        return None
    counts = counts[:, columns].astype(np.float64)
    amax = np.asarray(tally.amax, dtype=np.float64)
    scale = current_scale(amax, spec) if scale is None else scale
    low, high = (_exponent_edges()[columns + side] for side in (0, 1))
    # the largest element is known exactly and may be most of the energy; its bin ends at it
    top: Any = (low[None] <= amax[:, None]) & (amax[:, None] < high[None]) & (counts > 0)
    alone = top.any(axis=1)
    beside = (counts * top).sum(axis=1) - alone
    lowest = np.where(alone, (low * top).sum(axis=1), 0.0)
    x = lowest[:, None] + (amax - lowest)[:, None] * _samples(spec.rounding)
    sums = _round(x, scale[:, None], spec) * beside[:, None]
    sums += _round(amax[:, None], scale[:, None], spec) * alone[:, None]
    below = np.where(top, 0.0, counts)
    # scale = 2**k * f: shift by whole bins, then take a row of the table
    octaves = np.rint(_STEPS * np.log2(scale)).astype(np.int64)
    index = np.clip(columns + 4 * (octaves[:, None] // _STEPS), 0, EXPONENT_BINS - 1)
    means = _bin_table(spec.format, spec.rounding)[octaves[:, None] % _STEPS, index]  # (rows, columns, 5)
    sums[:, :4] += np.einsum("rb,rbk->rk", below, means[..., :4])
    energy = below * (low**2 + low * high + high**2) / 3
    sums[:, 4] += energy.sum(axis=1)
    sums[:, 5] += (energy * means[..., 4]).sum(axis=1)
    return Expected(counts.sum(axis=1), *sums.T)


@functools.lru_cache(maxsize=16)
def _bin_table(fmt: Format, rounding: Any) -> Array:
    """(_STEPS, EXPONENT_BINS, 5): means over the numbers of a bin times 2**(step / _STEPS): flushed, clipped, relative,
    relative squared, e**2 over x**2."""
    spec = QuantizationSpec(fmt, rounding=rounding)
    edges = _exponent_edges().clip(max=1e37)
    x = edges[:-1, None] + np.diff(edges)[:, None] * _samples(rounding)
    tables = []
    for step in range(_STEPS):
        values = _round(x, np.exp2(np.array(step / _STEPS)), spec)
        tables.append(np.concatenate([values[:, :4], values[:, 5:] / np.maximum(values[:, 4:5], 1e-300)], axis=1))
    return np.stack(tables)


def _per_block(tally: Tally, spec: QuantizationSpec) -> Expected | None:
    blocks = _below(tally, spec.granularity)
    if blocks is None:
        return None
    counts, energy = blocks
    table = _block_table(spec.format, spec.scale_format, spec.margin, spec.rounding)  # (octaves, bins, 5)
    share = _spread(tally, counts) if len(table) > 1 else np.ones((len(counts), 1))
    flushed, clipped, relative, squared = np.einsum("rb,ro,obk->rk", counts, share, table[..., :4], optimize=True).T
    share = share * 4.0 ** -np.arange(len(table))  # energy: blocks near the top hold most of it
    lost = (share / share.sum(axis=1, keepdims=True)) @ table[..., 4]
    noise = (energy * lost).sum(axis=1)
    # the scale of the largest element's block is known, and so is its error
    amax = np.asarray(tally.amax, dtype=np.float64)
    top_energy = np.minimum(amax**2, energy[:, 0])
    noise += top_energy * (_round(np.ones((len(amax), 1)), _top_of_largest(amax, spec)[:, None], spec)[:, 3])
    noise -= top_energy * lost[:, 0]
    return Expected(counts.sum(axis=1), flushed, clipped, relative, squared, energy.sum(axis=1), noise)


def _top_of_largest(amax: Array, spec: QuantizationSpec) -> Array:
    """(rows,): the largest element of a tensor times its scale."""
    if spec.scale_format == "e4m3":
        exact = torch.tensor([math.ldexp(E4M3.max, -spec.margin)], dtype=torch.float32)
        rounded = round_to_format(exact, E4M3)
        return np.full(len(amax), spec.format.max * float(exact / rounded))
    return amax * current_scale(amax, spec)


def _spread(tally: Tally, counts: Array) -> Array:
    """(rows, SPREAD_BINS): share of blocks by the distance of their amax below the tensor's amax. The run records it
    for 1x128; for other blocks it is shifted by the mean difference of the elements' distances."""
    spread = np.asarray(tally.block_spread, dtype=np.float64)
    octaves = np.arange(RELATIVE_BINS) / 4
    means = []
    for histogram in (_recorded(tally, "1x128")[0], counts):
        total = histogram.sum(axis=1)
        means.append((histogram @ octaves) / np.where(total > 0, total, 1))
    shift = means[0] - means[1]
    grid = np.arange(SPREAD_BINS + 1, dtype=np.float64)
    shares = []
    for row, by in zip(spread, shift, strict=True):
        below = np.concatenate([[0.0], row.cumsum() / (row.sum() or 1.0)])
        moved = np.interp(grid - by, grid, below)
        moved[0], moved[-1] = 0.0, 1.0
        shares.append(np.diff(moved))
    return np.stack(shares)


def _round(x: Array, scale: Array, spec: QuantizationSpec) -> Array:
    """Means over the last dimension of x: flushed, clipped, relative, relative squared, x**2, e**2; (..., 6)."""
    y = torch.from_numpy(np.asarray(x * scale, dtype=np.float32))
    generator = torch.Generator().manual_seed(0) if spec.rounding == "stochastic" else None
    q = round_to_format(y, spec.format, rounding=spec.rounding, generator=generator).double().numpy()
    exact = y.double().numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(exact > 0, np.abs(exact - q) / exact, 1.0)
    flushed = (q == 0) if spec.format.has_zero else np.zeros_like(q, dtype=bool)
    columns = (flushed, spec.format.clips(exact), relative, relative**2, x**2, (relative * x) ** 2)
    return np.stack([np.mean(column, axis=-1) for column in columns], axis=-1)


def _samples(rounding: Any) -> Array:
    """Numbers spread evenly between 0 and 1."""
    return _midpoints(_RANDOM_SAMPLES if rounding == "stochastic" else _SAMPLES)


def _midpoints(count: int) -> Array:
    return (np.arange(count) + 0.5) / count


@functools.lru_cache(maxsize=1)
def _exponent_edges() -> Array:
    """(EXPONENT_BINS + 1,): the edges of the bins, from 0 up."""
    bits = np.minimum(np.arange(EXPONENT_BINS + 1, dtype=np.int64) << _QUARTER_OCTAVE_BITS, 0x7F7FFFFF)
    return np.asarray(bits.astype(np.int32).view(np.float32), dtype=np.float64)


@functools.lru_cache(maxsize=64)
def _block_table(fmt: Format, scale_format: Any, margin: int, rounding: Any) -> Array:
    """(octaves, RELATIVE_BINS, 5): means over a bin of elements below the amax of their block: flushed, clipped,
    relative, relative squared, e**2 over x**2. octaves: 1, or the distances of that amax below the tensor's amax."""
    spec = QuantizationSpec(fmt, Granularity(1, 32), scale_format=scale_format, margin=margin, rounding=rounding)
    edges = _exponent_edges()
    low = edges[_TOP_BIN - np.arange(RELATIVE_BINS)]
    high = edges[_TOP_BIN + 1 - np.arange(RELATIVE_BINS)]
    high[0] = low[0]  # nothing is above the amax
    x = low[:, None] + (high - low)[:, None] * _samples(rounding)
    tables = []
    for tops in _tops(fmt, scale_format, margin):
        values = np.mean([_round(x, np.asarray(top), spec) for top in tops], axis=0)
        tables.append(np.concatenate([values[:, :4], values[:, 5:] / values[:, 4:5]], axis=1))
    return np.stack(tables)


def _tops(fmt: Format, scale_format: str, margin: int) -> Array:
    """(octaves, tops): equally likely values of a block's amax times its scale."""
    top, octave = math.ldexp(fmt.max, -margin), np.exp2(_midpoints(_TOPS))
    if scale_format == "fp32":
        return np.array([[top]])
    if scale_format in ("pow2", "e8m0"):
        return (top / octave)[None]
    if scale_format == "e8m0_floor":
        return (math.ldexp(1.0, fmt.emax - margin) * octave)[None]
    # e4m3: the scale of a block is rounded too, more coarsely the further its amax lies below the tensor's
    exact = math.ldexp(E4M3.max, -margin) / octave / np.exp2(np.arange(SPREAD_BINS))[:, None]
    rounded = round_to_format(torch.from_numpy(exact.astype(np.float32)), E4M3).double().numpy()
    return np.where(rounded > 0, fmt.max * exact / np.where(rounded > 0, rounded, 1), 0.0)


def _below(tally: Tally, granularity: Granularity) -> tuple[Array, Array] | None:
    """Counts and energy of elements below the amax of their block, (rows, RELATIVE_BINS) each."""
    if str(granularity) in GRANULARITIES:
        histograms = _recorded(tally, str(granularity))
    elif granularity.rows is None or granularity.cols is None:
        return None
    else:
        histograms = _between(tally, granularity)
    return histograms if histograms[0].any() else None


def _recorded(tally: Tally, name: str) -> tuple[Array, Array]:
    counts, energy = (getattr(tally, f"{kind}_{name}") for kind in ("below", "energy_below"))
    return np.asarray(counts, dtype=np.float64), np.asarray(energy, dtype=np.float64)


def _between(tally: Tally, granularity: Granularity) -> tuple[Array, Array]:
    rows, cols = math.log2(granularity.rows or 1), math.log2(granularity.cols or 1)
    wider, taller = (cols - 5) / 2, rows / 7  # of the way from 1x32 to 1x128, from there to 128x128
    weights = {"1x32": 1 - wider, "1x128": wider - taller, "128x128": taller}
    recorded = [_recorded(tally, name) for name in weights]
    counts, energy = (
        np.stack([_mixed(rows, list(weights.values())) for rows in zip(*histograms, strict=True)])
        for histograms in zip(*recorded, strict=True)
    )
    return counts, energy


def _mixed(histograms: Sequence[Array], weights: Sequence[float]) -> Array:
    """(bins,): the histogram whose quantiles are the weighted sum of the histograms' quantiles."""
    totals = [histogram.sum() for histogram in histograms]
    size = len(histograms[0])
    if min(totals) <= 0:
        return np.zeros(size)
    levels = [np.concatenate([[0.0], h.cumsum() / h.sum()]) for h in histograms]
    grid = np.unique(np.concatenate([*levels, np.linspace(0, 1, 257)]).clip(0, 1))
    middle, mass = (grid[1:] + grid[:-1]) / 2, np.diff(grid)
    bins = np.arange(size + 1, dtype=np.float64)
    mixed = sum(w * np.interp(middle, level, bins) for w, level in zip(weights, levels, strict=True))
    index = np.clip(np.floor(mixed), 0, size - 1).astype(int)
    return np.asarray(np.bincount(index, mass * totals[0], minlength=size), dtype=np.float64)
