"""Which rows of a tensor are measured, and copies of them, so that a look costs a part of what the whole would.

Rows are taken from inside bands of 128. What is said of rows and of blocks along them comes from whole rows; of the
128x128 blocks in which the rows lie all elements are read for their amax, so that nothing said of a row depends on
which others were taken. Every row has the same chance, so sums over a sample, times the rate, mean those of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ottava.debug.measure import BAND_ROWS
from ottava.kernels.native import sample as native_sample
from ottava.kernels.native.measure import Look, spec_of
from ottava.quantized_tensor import QuantizedTensor
from ottava.scaling import BLOCK_128X128, Granularity, column_major
from ottava.scaling import amax as block_amaxes

Bands = Sequence[range]
"""Rows of a matrix, in their order; those of a range with a step lie in one band of BAND_ROWS rows."""
_SPREAD, _UNEVEN = 8, 4
"""Bands in which one is sampled, where so many rows are wanted: with all of their rows it is read for block amaxes. And
where the bands are no multiple of it, so that looks differ less in size."""
_LEAST_ROWS = 32
"""Of a sample: a median of fewer rows says little."""


def sample_bands(rows: int, every: int, phase: int, *, step: int = BAND_ROWS) -> Bands | None:
    """One row in `every`, others in each phase until all have been seen; None for all of them.

    Taken are some bands, and of each of them one row in a power of two. At least 32 rows are taken, where there are so
    many; where `every` is no power of two, or above a tenth of a very tall matrix, a few more than asked for.

    Args:
        step: rows of a band from one to the next, at most: a power of two.

    Example:
        >>> sample_bands(1000, 16, 1), sample_bands(1000, 16, 4)
        ([range(128, 256, 4), range(640, 768, 4)], [range(1, 128, 4), range(513, 640, 4)])
    """
    rate, full = min(every, rows // _LEAST_ROWS), max(rows // BAND_ROWS, 1)
    if rate < 2:
        return None
    spread = _power_of_two(min(_UNEVEN if full % _SPREAD else _SPREAD, full, rate))
    step = min(step, _power_of_two(rate // spread))
    apart = min(rate // step, full)
    first, offset = phase % apart, phase // apart % step
    starts = range(first * BAND_ROWS, rows - offset, apart * BAND_ROWS)
    return [range(start + offset, min(start + BAND_ROWS, rows), step) for start in starts]


def _power_of_two(n: int) -> int:
    """The largest that is at most n."""
    return 1 << (n.bit_length() - 1)


def take_bands(x: Tensor, bands: Bands, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of those rows of a matrix."""
    if native_sample.supports_take(x) is None:
        taken = native_sample.take(x, bands)
        return taken if dtype is None else taken.to(dtype)
    if x.dtype.itemsize == 1 and x.dtype != torch.uint8:  # torch joins no codes
        return take_bands(x.view(torch.uint8), bands).view(x.dtype)
    dim, lying = (1, x.t()) if column_major(x) else (0, x)
    parts = [lying[:, b.start : b.stop : b.step] if dim else lying[b.start : b.stop : b.step] for b in bands]
    taken = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
    dtype = dtype or x.dtype
    if len(parts) == 1 or dtype != x.dtype:
        taken = taken.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return taken.t() if dim else taken


def squares_of(x: Tensor, bands: Bands, dtype: torch.dtype | None = None) -> Tensor:
    """fp32 (bands, ceil(C / 128)): the largest finite magnitudes of the 128x128 blocks of x in which those rows lie.

    Example:
        >>> squares_of(torch.tensor([[1.0], [-3.0], [torch.inf]]), [range(0, 3, 2)])
        tensor([[3.]])
    """
    found = []
    for band in bands:
        top = band.start // BAND_ROWS * BAND_ROWS
        block = x[top : top + BAND_ROWS].to(dtype or x.dtype).to(torch.float32)
        found.append(block_amaxes(torch.where(block.isfinite(), block, 0.0), BLOCK_128X128))
    return torch.cat(found)


def take_bands_of(x_q: QuantizedTensor, bands: Bands) -> QuantizedTensor:
    """Those rows of a cast, with their scales; blocks are as much lower as rows are fewer.

    The step of the bands divides the height of blocks, and that BAND_ROWS.
    """
    spec, scale_inv, step = x_q.spec, x_q.scale_inv, bands[0].step
    if (height := spec.granularity.rows) is not None:
        lower = max(height // step, 1)  # rows of a block that are taken
        parts = []
        for b in bands:
            first, blocks = b.start // height, -(-len(b) // lower)
            parts.append(scale_inv[b.start : b.stop : step] if height == 1 else scale_inv[first : first + blocks])
        scale_inv = torch.cat(parts) if len(parts) > 1 else parts[0].clone()  # not a view: it would keep all of them
        if step > 1 and height > 1:
            spec = replace(spec, granularity=Granularity(lower, spec.granularity.cols))
    return QuantizedTensor(take_bands(x_q.data, bands), scale_inv, spec, x_q.dtype)


def sampled(
    look: Look, every: int, phase: int, dtype: torch.dtype | None = None, *, blocks: bool = True
) -> Look | None:
    """The same look at a copy of one row in `every`, see `sample_bands`; None where it is of all rows.

    Args:
        dtype: of the copy, where the cast is still to be made.
        blocks: whether amaxes of 128x128 blocks will be asked for; without, only the rows themselves are read.

    Edge cases: of blocks whose height does not divide 128 all are taken; of those that are still to be cast, whose
    scales need all of their rows, whole bands.
    """
    x, cast, height = look.x.detach(), look.cast, spec_of(look).granularity.rows  # no Parameter: kernels refuse it
    tall = height is not None and height > 1
    if height is not None and BAND_ROWS % height:
        return None
    most = BAND_ROWS if not tall else height if isinstance(cast, QuantizedTensor) else 1
    if (bands := sample_bands(x.shape[0], every, phase, step=most or 1)) is None:
        return None
    if isinstance(cast, QuantizedTensor):
        cast = take_bands_of(cast, bands)
    step = bands[0].step
    if step == 1 or not blocks:
        return look._replace(x=take_bands(x, bands, dtype), cast=cast)
    if native_sample.supports_take(x) is None:
        whole, squares = x, torch.empty(len(bands), -(-x.shape[1] // BAND_ROWS))
        x = native_sample.take(x, bands, squares)
        if dtype not in (None, x.dtype):  # rounding keeps the order of numbers
            x, squares = x.to(dtype), squares.to(dtype).to(torch.float32)
            squares = squares if bool(squares.isfinite().all()) else squares_of(whole, bands, dtype)
    else:
        x, squares = take_bands(x, bands, dtype), squares_of(x, bands, dtype)
    return look._replace(x=x, cast=cast, squares=squares, square_rows=BAND_ROWS // step)
