"""Fills a `Tally` from a tensor and its cast: one walk over bands of rows, on any device.

Before squaring, the walk multiplies each row by a power of two that brings its elements near 1. Gradients of 1e-20,
activations of 1e30, and rows that differ by 30 decades therefore stay within fp32. A row is summed in fp32, the sums of
rows are added in fp64. Counts are exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.base.errors import refuse_other_sums
from ottava.kernels.native import measure as native_measure
from ottava.kernels.native.measure import Layout, Look
from ottava.measure.tally import (
    DETAIL_WIDTHS,
    DETAILS,
    EXPONENT_BINS,
    EXTREME_FIELDS,
    EXTREMES,
    GRANULARITIES,
    PARTS,
    RELATIVE_BINS,
    ROW_SQNR_BINS,
    ROW_SQNR_DB,
    SPREAD_BINS,
    SUM_FIELDS,
    SUMMED,
    Detail,
    Tally,
    unpack,
)
from ottava.numerics.formats import Format
from ottava.numerics.rounding import decode, floor_log2, power_of_two
from ottava.numerics.scaling import BLOCK_1X128, BLOCK_128X128, Granularity
from ottava.numerics.scaling import amax as block_amaxes
from ottava.numerics.tensor import QuantizedTensor
from ottava.ops.quantize import quantize

BAND_ROWS = 128
"""Rows of a band. A band holds whole 128x128 blocks, and its temporaries fit into a cache."""
_MAGNITUDE_BITS, _QUARTER_OCTAVE = 0x7FFFFFFF, 21
_TOP_BIN = (127 << 23) >> _QUARTER_OCTAVE  # of 1.0
_DEAD = 2.0**-80  # of the largest channel's energy
_BLOCKS = tuple((name, Granularity.parse(name)) for name in GRANULARITIES)


class Packed(NamedTuple):
    """A tally as two vectors on the tensor's device, see `tally.unpack`. Sums merge by addition, extremes by max."""

    sums: Tensor
    """fp64 (width,)."""
    extremes: Tensor
    """fp64, one per field of EXTREME_FIELDS, minima negated."""

    def tally(self) -> Tally:
        """Reads the numbers back from the device."""
        return unpack(self.sums.cpu().numpy(), self.extremes.cpu().numpy())


def measure(x: Tensor, x_q: QuantizedTensor) -> Tally:
    """The tally of one cast; x is (R, C). It waits for the device, so keep it out of hot paths.

    Example:
        >>> import ottava
        >>> x = torch.tensor([[1.0, 1e-9, 0.0, 448.0]])
        >>> tally = measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3)))
        >>> tally.n_nonzero, tally.n_underflow, tally.amax
        (3.0, 1.0, 448.0)
    """
    return measure_packed(x, x_q).tally()


@torch.no_grad()
def survey(x: Tensor, dtype: torch.dtype | None = None, *, finite: bool = True) -> Tensor:
    """Reads x (R, C) once and returns fp64 (4,) on its device: the amax (inf or NaN if an element is), the amax of the
    finite elements, the number of non-finite elements, and the number of elements.

    Args:
        dtype: surveys x as if it were converted to this dtype first; None: as it is.
        finite: False allows NaN for the second and third number if they would need another reading.

    Example:
        >>> survey(torch.tensor([[1.0, -3.0], [math.inf, 2.0]])).tolist()
        [inf, 3.0, 1.0, 4.0]
    """
    if native_measure.supports_survey(x) is None:
        return native_measure.survey(x, dtype)
    x = x if dtype is None else x.to(dtype)
    largest = block_amaxes(x).reshape(())
    largest_finite, nonfinite = largest, _f64(0, x)
    if x.device.type == "cpu" and math.isfinite(float(largest)):  # on a GPU this question would wait for the device
        pass
    elif finite:
        within = x.isfinite()
        largest_finite = block_amaxes(torch.where(within, x, 0)).reshape(())
        nonfinite = (~within).sum(dtype=torch.float64)
    else:
        largest_finite, nonfinite = _f64(math.nan, x), _f64(math.nan, x)
    return torch.stack([largest.double(), largest_finite.double(), nonfinite, _f64(x.numel(), x)])


def found_by(x_q: QuantizedTensor, elements: int) -> Tensor | None:
    """The `survey` of a tensor, read from the amax that its cast already found; None if the cast does not know enough.

    Example:
        >>> import ottava
        >>> found_by(ottava.quantize(torch.tensor([[1.0, -3.0]]), ottava.QuantizationSpec(ottava.E4M3)), 2).tolist()
        [3.0, 3.0, 0.0, 2.0]
    """
    if x_q.amax is None or not elements or x_q.amax.device.type != "cpu":  # on a GPU this would wait for the device
        return None
    largest = abs(float(x_q.amax if x_q.amax.numel() == 1 else x_q.amax.amax()))
    if not math.isfinite(largest):  # a cast does not count non-finite elements
        return None
    return torch.tensor([largest, largest, 0.0, elements], dtype=torch.float64)


def measure_packed(
    x: Tensor, x_q: QuantizedTensor, *, extent: Tensor | None = None, detail: Detail = "blocks"
) -> Packed:
    """As `measure`, but the tally stays on the device.

    Args:
        x: (R, C) before the cast; float32, bfloat16 or float16. Behind a transform: `x_q.transformed(x)`.
        x_q: the same elements after it.
        extent: the `survey` of the whole tensor if x is a sample of its rows. It gives the amax, the count of
            non-finite elements and the error of a predicted scale.
        detail: histograms to fill; the others stay empty. Histograms are most of the cost.
    """
    packed = measure_all([Look(x, x_q, survey(x) if extent is None else extent)], detail=detail)
    return Packed(packed.sums[0], packed.extremes[0])


def measure_all(looks: Sequence[Look], *, detail: Detail = "blocks") -> Packed:
    """The tallies of several looks, whose casts may still have to be made: sums (looks, width), extremes (looks, ...).

    Example:
        >>> import ottava
        >>> x, spec = torch.randn(8, 64), ottava.QuantizationSpec(ottava.E4M3)
        >>> measure_all([Look(x, spec, survey(x)), Look(x, quantize(x, spec), survey(x))]).sums.shape[0]
        2
    """
    if detail == "anatomy":
        return _with_anatomy(looks)
    looks = [look._replace(cast=cast_of(look)) if isinstance(look.cast, QuantizedTensor) else look for look in looks]
    if all(native_measure.supports_measure(look.x, look.cast) is None for look in looks):
        return Packed(*native_measure.measure(looks, _layout(detail), DETAILS.index(detail)))
    return Packed(*(torch.stack(parts) for parts in zip(*(_walked(look, detail) for look in looks), strict=True)))


def _with_anatomy(looks: Sequence[Look]) -> Packed:
    """The tallies with every detail. Torch finds the parts of the errors, on any device."""
    casts = [cast_of(look) for look in looks]
    packed = measure_all([look._replace(cast=cast) for look, cast in zip(looks, casts, strict=True)])
    first = DETAIL_WIDTHS["blocks"]
    for sums, look, cast in zip(packed.sums, looks, casts, strict=True):
        found = anatomy(look, cast)
        sums[first:] = torch.cat([found[f.name].reshape(-1) for f in SUM_FIELDS if f.metadata["detail"] == "anatomy"])
    return packed


def cast_of(look: Look) -> QuantizedTensor:
    """The cast of a look, which is made now if necessary, without changing the random generators of the process."""
    if isinstance(look.cast, QuantizedTensor):
        return _with_scales(look.cast)
    spec, scale = look.cast, look.scale
    if look.by_whole:
        largest = look.extent[:1].to(torch.float32).reshape(1, 1)
        scale = spec.scale_of(largest).scale
    if spec.repeatable:
        return _with_scales(quantize(look.x, spec, scale=scale))
    with torch.random.fork_rng([look.x.device] if look.x.device.type == "cuda" else []):
        return _with_scales(quantize(look.x, spec, scale=scale))


def _with_scales(cast: QuantizedTensor) -> QuantizedTensor:
    """The cast with scale 1 where NaN decodes a block, as its codes were made: the finite elements are measured."""
    if cast.spec.format.has_nan:
        return cast
    return replace(cast, scale_inv=torch.where(cast.scale_inv.isnan(), 1.0, cast.scale_inv))


@torch.no_grad()
def _walked(look: Look, detail: Detail) -> Packed:
    x, x_q = look.x.detach(), cast_of(look)
    if native_measure.supports_measure(x, x_q) is None:  # torch makes this cast or that of another look
        packed = measure_all([look._replace(cast=x_q)], detail=detail)
        return Packed(packed.sums[0], packed.extremes[0])
    extent = look.extent
    clean = x.device.type == "cpu" and not float(extent[2])
    walk = _Walk(look, x_q, clean, detail)
    for start in range(0, x.shape[0], BAND_ROWS):
        walk.band(start, min(start + BAND_ROWS, x.shape[0]))
    walk.sums |= {"n_total": extent[3], "n_casts": _f64(1, x), "n_nonfinite": extent[2]}
    walk.extremes["amax"] = extent[1]
    _scales(walk, x_q, walk.amax)
    if x.numel():
        walk.judge_channels()
        for asked, filled in ((SUMMED[detail], walk.sums), (EXTREMES, walk.extremes)):
            refuse_other_sums("measure", asked, {name: len(t) if t.dim() else 0 for name, t in filled.items()})
    return walk.packed()


@functools.cache
def _layout(detail: Detail) -> Layout:
    kernel = tuple(SUMMED["blocks"].items())
    return Layout(kernel, tuple(EXTREMES.items()), DETAIL_WIDTHS[detail], DETAIL_WIDTHS[DETAILS[-1]])


def _f64(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float64, device=like.device)


class _Walk:
    """Collects sums and extremes, band by band."""

    def __init__(self, look: Look, x_q: QuantizedTensor, clean: bool, detail: Detail) -> None:
        x, amax = look.x, look.extent[1].to(torch.float32)
        self.x, self.x_q, self.amax, self.clean, self.detail = x, x_q, amax, clean, detail
        self.squares = None if look.squares is None else look.squares.repeat_interleave(look.square_rows, 0)
        self.format: Format = x_q.spec.format
        shape = (x.shape[0], x.shape[1])
        self.scale_inv = x_q.spec.granularity.expand(x_q.scale_inv, shape)
        self.unit = _unit(amax)
        self.zero = torch.zeros((), dtype=torch.float64, device=x.device)
        self.channels = torch.zeros(2, x.shape[1], dtype=torch.float64, device=x.device)
        """Energy of each channel, and of its error."""
        self.sums: dict[str, Tensor] = {}
        self.extremes: dict[str, Tensor] = {}
        """Minima negated."""

    def band(self, start: int, stop: int) -> None:
        """Adds the rows from start to stop."""
        x = self.x[start:stop].to(torch.float32).contiguous()
        numbers = decode(self.x_q.data[start:stop].contiguous(), self.format)
        scale_inv = self.scale_inv[start:stop] if self.scale_inv.shape[0] > 1 else self.scale_inv
        q = numbers * scale_inv
        size = _f64(x.numel(), x)
        if not self.clean:
            finite = x.isfinite()
            size = finite.sum(dtype=torch.float64)
            x, q, numbers = (torch.where(finite, t, 0) for t in (x, q, numbers))
        magnitude = x.abs()
        bits = magnitude.view(torch.int32)
        nonzero = torch.count_nonzero(magnitude)
        zeros = x.numel() - nonzero
        error = x - q
        self._add("n", size)
        self._count(magnitude, nonzero, q, numbers, scale_inv)
        if not x.numel():
            return
        self.channels += torch.stack([x, error]).to(torch.float64).square_().sum(1)
        blocks = block_amaxes(magnitude, BLOCK_1X128)
        squares = self._sum(x, magnitude, error, _unit(blocks.amax(1, keepdim=True)))
        smallest = ((bits - 1) & _MAGNITUDE_BITS).amin() + 1  # zeros wrap around to the top
        amin = torch.where(smallest > 0, smallest.view(torch.float32).to(torch.float64), math.inf)
        for name, value in (("amin", -amin), ("max_error", error.abs().amax().to(torch.float64))):
            self.extremes[name] = torch.maximum(self.extremes.get(name, value), value)
        self._histograms(magnitude, bits, zeros, blocks, squares, slice(start, stop))

    def _count(self, magnitude: Tensor, nonzero: Tensor, q: Tensor, numbers: Tensor, scale_inv: Tensor) -> None:
        self._add("n_nonzero", nonzero)
        remaining = torch.count_nonzero(q)
        self._add("n_underflow", nonzero - remaining if self.format.has_zero else self.zero)
        small = (numbers.abs() < 2.0**self.format.emin).sum()
        self._add("n_subnormal", small - (numbers.numel() - torch.count_nonzero(numbers)))
        self._add("n_overflow", self.zero)
        top = scale_inv * (self.format.max * (1 - 2.0**-20))  # a little lower, against rounding
        if magnitude.device.type != "cpu" or bool((magnitude >= top).any()):
            clipped = self.format.clips(magnitude.to(torch.float64), scale_inv.to(torch.float64))
            # if even the scale of a block underflowed, its elements underflow too; they are not clipped
            self._add("n_overflow", (clipped & (q != 0)).sum())

    def _sum(self, x: Tensor, magnitude: Tensor, error: Tensor, unit: Tensor) -> Tensor:
        """Adds the sums; returns x**2 in units of the tensor. unit (rows, 1) is the power of two of each row."""
        unit32 = unit.to(torch.float32)
        y, e = x * unit32, error * unit32
        squares = y * y
        rows = {
            "sx": y.sum(1),
            "sabs": magnitude.mul(unit32).sum(1),
            "sxx": squares.sum(1),
            "sx4": (squares * squares).sum(1),
            "see": (e * e).sum(1),
            "sxe": (y * e).sum(1),
            "srel": error.abs().div_(torch.where(magnitude > 0, magnitude, math.inf)).sum(1),
        }
        powers = {"sx": 1, "sabs": 1, "sxx": 2, "sx4": 4, "see": 2, "sxe": 2, "srel": 0}
        for name, per_row in rows.items():
            self._add(name, (per_row.to(torch.float64) / unit.squeeze(1) ** powers[name]).sum())
        signal, noise = rows["sxx"], rows["see"]
        alive = signal > 0
        self._add("row_sqnr", _by_sqnr(signal, noise, alive))
        self._add("n_rows", alive.sum())
        return squares.to(torch.float64).mul_((self.unit / unit).square()) if self.detail == "blocks" else squares

    def _histograms(
        self, magnitude: Tensor, bits: Tensor, zeros: Tensor, blocks: Tensor, squares: Tensor, rows: slice
    ) -> None:
        if self.detail != "numbers":
            counts = torch.bincount((bits >> _QUARTER_OCTAVE).flatten(), minlength=EXPONENT_BINS).to(torch.float64)
            counts[0] -= zeros
            self._add("exponents", counts)
        spread = floor_log2(self.amax / torch.where(blocks > 0, blocks, 1.0)).clamp(0, SPREAD_BINS - 1)
        self._add(
            "block_spread", torch.bincount(spread.flatten(), (blocks > 0).flatten().double(), minlength=SPREAD_BINS)
        )
        if self.detail != "blocks":
            return
        for name, granularity in _BLOCKS:
            if granularity == BLOCK_128X128 and self.squares is not None:
                granularity, largest = BLOCK_1X128, self.squares[rows]
            else:
                largest = blocks if granularity == BLOCK_1X128 else block_amaxes(magnitude, granularity)
            relative = _divided(magnitude, torch.where(largest > 0, largest, 1.0), granularity)
            below = (_TOP_BIN - (relative.view(torch.int32) >> _QUARTER_OCTAVE)).clamp_(0, RELATIVE_BINS - 1).flatten()
            counts = torch.bincount(below, minlength=RELATIVE_BINS).to(torch.float64)
            counts[-1] -= zeros  # zeros are in the last bin
            self._add(f"below_{name}", counts)
            energy = torch.bincount(below, squares.flatten(), minlength=RELATIVE_BINS)  # a long sum, so in fp64
            self._add(f"energy_below_{name}", energy / self.unit**2)

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums.get(name, self.zero) + value

    def judge_channels(self) -> None:
        """Adds what the channels of all bands add up to."""
        signal, noise = self.channels
        alive = signal > _DEAD * signal.amax()
        self._add("channel_sqnr", _by_sqnr(signal, noise, alive))
        self._add("n_dead", (~alive).sum())
        total = signal.sum()
        share = signal.amax() / torch.where(total > 0, total, 1.0)
        # in steps of a millionth: sums in another order have other last bits
        self.extremes["top_channel"] = (share * 2.0**20 + 0.5).floor() * 2.0**-20

    def packed(self) -> Packed:
        """The two vectors."""
        sums = [self.sums.get(f.name, self.zero.expand(f.metadata["bins"] or 1)) for f in SUM_FIELDS]
        nothing = {f.name: f.default * (-1 if f.metadata["merge"] == "min" else 1) for f in EXTREME_FIELDS}  # type: ignore[operator]
        extremes = [self.extremes.get(name, self.zero + start) for name, start in nothing.items()]
        return Packed(torch.cat([t.to(torch.float64).reshape(-1) for t in sums]), torch.stack(extremes))


def _by_sqnr(signal: Tensor, noise: Tensor, alive: Tensor) -> Tensor:
    """The histogram of the SQNR of rows or channels that are alive."""
    decibels = -10 * torch.log10(noise / torch.where(alive, signal, 1.0))
    bins = (decibels / ROW_SQNR_DB).nan_to_num(0.0, ROW_SQNR_BINS, 0.0).floor().clamp(0, ROW_SQNR_BINS - 1)
    return torch.bincount(bins.to(torch.int64), alive.to(torch.float64), minlength=ROW_SQNR_BINS)


def _unit(largest: Tensor) -> Tensor:
    """The power of two (fp64, within the range of fp32) that brings the largest magnitude into [1, 2)."""
    return power_of_two(-torch.where(largest > 0, floor_log2(largest), 0).clamp(-126, 126))


def _divided(magnitude: Tensor, per_block: Tensor, granularity: Granularity) -> Tensor:
    """Divides by block. A reciprocal would not do: it is infinite for subnormals, and x * (1 / x) may be below 1."""
    rows, cols = granularity.block_shape((magnitude.shape[0], magnitude.shape[1]))
    if magnitude.shape[0] % rows == 0 and magnitude.shape[1] % cols == 0:
        blocks = magnitude.view(magnitude.shape[0] // rows, rows, magnitude.shape[1] // cols, cols)
        return (blocks / per_block[:, None, :, None]).view(magnitude.shape)
    return magnitude / granularity.expand(per_block, (magnitude.shape[0], magnitude.shape[1]))


def _scales(walk: _Walk, x_q: QuantizedTensor, amax: Tensor) -> None:
    scale_inv = x_q.scale_inv.to(torch.float64).flatten()
    if not scale_inv.numel():
        return
    used = scale_inv > 0
    octaves = -torch.where(used, scale_inv, 1.0).log2()
    walk.sums["n_scales"] = used.sum(dtype=torch.float64)
    walk.sums["scale_log2"], walk.sums["scale_log2_squared"] = octaves.sum(), octaves.square().sum()
    scales = torch.where(used, scale_inv.reciprocal(), math.nan)
    walk.extremes["scale_max"] = scales.nan_to_num(0.0).amax()
    walk.extremes["scale_min"] = -scales.nan_to_num(math.inf).amin()
    has_scale, error = _prediction_error(x_q, amax) if x_q.spec.predicted else (walk.zero > 0, walk.zero)
    walk.sums["n_predicted"], walk.sums["scale_error"] = has_scale.to(torch.float64), error
    walk.extremes["scale_error_max"] = torch.where(has_scale, error, -math.inf)
    walk.extremes["scale_error_min"] = torch.where(has_scale, -error, -math.inf)


def _prediction_error(x_q: QuantizedTensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """(whether a current scale exists, log2(scale used / current scale))."""
    spec = x_q.spec
    # compares scale_inv, which is unique for each scale: an unchanged amax then has an error of exactly 0
    now = spec.scale_of(amax.reshape(1, 1)).scale_inv
    used = x_q.scale_inv.to(torch.float64).flatten()
    octaves = -torch.where(used > 0, used, 1.0).log2()
    return amax > 0, torch.where(amax > 0, octaves.sum() + now.to(torch.float64).log2().reshape(()), 0.0)


@torch.no_grad()
def anatomy(look: Look, cast: QuantizedTensor) -> dict[str, Tensor]:
    """What the error of a cast is made of: dead zone, clipping, scale bias and grid noise, as fields of a `Tally`.

    A block has elements x, their casts q, e = x - q, and the ideal scale a / F: amax of the block over the largest
    number of the format, unrounded. Each element that is not zero and finite belongs to one of three sets:

        dead zone     sum e**2 where q = 0                the element is lost; e = x
        clipped       sum e**2 where x is beyond the format by more than its rounding range
        live          the others; r is the error that rounding x under the ideal scale would make
            grid noise    sum r**2                        no scale avoids it
            scale bias    sum e**2 - sum r**2             what the scale in use costs

    The four parts sum to sum e**2, in each block and in the tensor, because their terms do. Scale bias is negative
    where the scale in use happens to be better than the ideal one, or where a scale that clips buys a finer grid for
    the rest; "four over six" lives on it. Under stochastic rounding r**2 is its expectation, (x - l) (u - x) with the
    neighbours l and u, so that chance is no bias.

    The three components are those of arXiv 2605.20402, which splits the error of MXFP4 into scale bias "from
    power-of-two rounding", dead zone "from zeroing small values" and grid noise. The formulas are ours: they need no
    power of two, and clipping is a part of its own, because FP8 with predicted scales clips.

    Args:
        look: its x is (R, C) before the cast; if it is a sample, `extent` gives the amax of a block that is the whole
            tensor, and a block of several rows must be whole.
        cast: the same elements after it.

    Edge cases: elements that are not finite are left out. A format without zero has no dead zone.

    Example:
        >>> import ottava
        >>> from ottava.measure.walk import survey
        >>> x = torch.tensor([[448.0, 17.0, 0.0005]])
        >>> parts = anatomy(Look(x, spec := ottava.QuantizationSpec(ottava.E4M3), survey(x)), ottava.quantize(x, spec))
        >>> parts["error_grid"].item(), parts["error_live"].item(), parts["blocks_by_part"].tolist()
        (1.0, 1.0, [0.0, 0.0, 0.0, 1.0])
    """
    x, block = look.x, cast.spec.granularity
    height = block.rows
    step = BAND_ROWS if height is None else height * max(1, BAND_ROWS // height)
    amax = _whole(look, block)
    total = torch.zeros(len(PARTS), dtype=torch.float64, device=x.device)
    counts, tall = total.clone(), total.new_zeros(len(PARTS), *block.grid_shape((1, x.shape[1])))
    for start in range(0, x.shape[0], step):
        stop = min(start + step, x.shape[0])
        scales = cast.scale_inv if height is None else cast.scale_inv[start // height : -(-stop // height)]
        sums = _band(x[start:stop], cast.data[start:stop], scales, cast, amax)
        if height is None:
            tall += sums
        else:
            counts += _by_part(sums)
        total += sums.sum((1, 2))
    dead, clipped, live, grid = total
    counts = _by_part(tall) if height is None else counts
    return {
        "error_dead": dead,
        "error_clipped": clipped,
        "error_live": live,
        "error_grid": grid,
        "blocks_by_part": counts,
    }


def _whole(look: Look, block: Granularity) -> Tensor | None:
    """The amaxes of blocks that reach over all rows; None: a band has whole blocks."""
    if block.rows is not None:
        return None
    if block.cols is None:
        return look.extent[1].reshape(1, 1)
    return block_amaxes(torch.where(look.x.isfinite(), look.x, 0), block).to(torch.float64)


def _band(x: Tensor, codes: Tensor, scale_inv: Tensor, cast: QuantizedTensor, amax: Tensor | None) -> Tensor:
    """fp64 (4, grid rows, grid columns): squared errors of dead, clipped and live elements, and the live ones' r**2."""
    spec, fmt, shape = cast.spec, cast.spec.format, (x.shape[0], x.shape[1])
    finite = x.isfinite()
    numbers = torch.where(finite, x, 0).to(torch.float64)
    q = QuantizedTensor(codes.contiguous(), scale_inv, spec, cast.dtype).dequantize(torch.float64)
    amax = block_amaxes(numbers, spec.granularity).to(torch.float64) if amax is None else amax
    ideal = spec.granularity.expand(torch.where(amax > 0, amax / fmt.max, 1.0), shape)
    magnitude = numbers.abs()
    error = torch.where(finite, numbers - q, 0.0).square_()
    dead = (q == 0) & (numbers != 0)
    clipped = fmt.clips(magnitude, spec.granularity.expand(scale_inv.to(torch.float64), shape)) & ~dead
    live = ~(dead | clipped)
    grid = _squared_rounding(magnitude.div_(ideal), fmt, spec.rounding == "stochastic") * ideal * ideal
    terms = (error * dead, error * clipped, error * live, grid * live)
    # row by row, then the rows: torch shares a sum to one number out to its threads, and the bits depend on how many
    return torch.stack([spec.granularity.blocks(term).sum(3).sum(1) for term in terms])


def _squared_rounding(y: Tensor, fmt: Format, stochastic: bool) -> Tensor:
    """The squared error of rounding magnitudes up to fmt.max, or its expectation."""
    quantum = power_of_two(floor_log2(y).clamp_(fmt.emin, fmt.emax) - fmt.mantissa_bits)
    below = y % quantum
    above = quantum - below
    return below * above if stochastic else torch.minimum(below, above).square_()


def _by_part(sums: Tensor) -> Tensor:
    """(4,): blocks by their largest part, of those with an error; sums as `_band` gives them."""
    dead, clipped, live, grid = sums
    parts = torch.stack([dead, clipped, live - grid, grid])
    largest = parts.argmax(0).flatten()
    return torch.bincount(largest, ((dead + clipped + live) > 0).flatten().double(), minlength=len(PARTS))
