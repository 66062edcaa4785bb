"""Chooses the rows of a tensor that a look measures, and copies them, so that a look costs less than the whole tensor.

Rows come from bands of 128. A look measures whole rows, and the blocks along them. The amax of a 128x128 block is read
from all of its elements, so the numbers of a row never depend on which other rows are in the sample. Every row has the
same chance: sums over a sample, times the rate, estimate the sums over the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ottava.kernels.native import measure as native_sample
from ottava.kernels.native.measure import Look, spec_of
from ottava.measure.walk import BAND_ROWS
from ottava.numerics.scaling import BLOCK_128X128, Granularity, column_major
from ottava.numerics.scaling import amax as block_amaxes
from ottava.numerics.tensor import QuantizedTensor

Bands = Sequence[range]
"""Rows of a matrix in ascending order; a range with a step lies within one band of BAND_ROWS rows."""
_SPREAD, _UNEVEN = 8, 4
"""A sample takes rows from one band in 8, because block amaxes need all rows of that band. If the number of bands is no
multiple of 8 it takes one band in 4, so that looks differ less in size."""
_LEAST_ROWS = 32
"""Smallest sample: a median over fewer rows says little."""


def sample_bands(rows: int, every: int, phase: int, *, step: int = BAND_ROWS) -> Bands | None:
    """One row in `every`; the phases take different rows until all rows had their turn. None means all rows.

    The sample takes some bands, and in each band every step-th row, where the step is a power of two. It has at least
    32 rows if the matrix has. If `every` is no power of two, or is above a tenth of a very tall matrix, the sample is a
    little larger than asked for.

    Args:
        step: largest distance of two rows within a band: a power of two.

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
    """The largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)


def take_bands(x: Tensor, bands: Bands, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of the rows of a matrix that `bands` selects."""
    if native_sample.supports_take(x) is None:
        taken = native_sample.take(x, bands)
        return taken if dtype is None else taken.to(dtype)
    if x.dtype.itemsize == 1 and x.dtype != torch.uint8:  # torch cannot concatenate FP8 codes
        return take_bands(x.view(torch.uint8), bands).view(x.dtype)
    dim, lying = (1, x.t()) if column_major(x) else (0, x)
    parts = [lying[:, b.start : b.stop : b.step] if dim else lying[b.start : b.stop : b.step] for b in bands]
    taken = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
    dtype = dtype or x.dtype
    if len(parts) == 1 or dtype != x.dtype:
        taken = taken.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return taken.t() if dim else taken


def squares_of(x: Tensor, bands: Bands, dtype: torch.dtype | None = None) -> Tensor:
    """fp32 (bands, ceil(C / 128)): the largest finite magnitude of each 128x128 block of x that has selected rows.

    Example:
        >>> squares_of(torch.tensor([[1.0], [-3.0], [torch.inf]]), [range(0, 3, 2)])
        tensor([[3.]])
    """
    amaxes = []
    for band in bands:
        top = band.start // BAND_ROWS * BAND_ROWS
        block = x[top : top + BAND_ROWS].to(dtype or x.dtype).to(torch.float32)
        amaxes.append(block_amaxes(torch.where(block.isfinite(), block, 0.0), BLOCK_128X128))
    return torch.cat(amaxes)


def take_bands_of(x_q: QuantizedTensor, bands: Bands) -> QuantizedTensor:
    """The rows of a cast that `bands` selects, with their scales. Blocks become lower by the step of the bands.

    The step of the bands must divide the height of the blocks, and that height must divide BAND_ROWS.
    """
    spec, scale_inv, step = x_q.spec, x_q.scale_inv, bands[0].step
    if (height := spec.granularity.rows) is not None:
        lower = max(height // step, 1)  # selected rows of a block
        parts = []
        for b in bands:
            first, blocks = b.start // height, -(-len(b) // lower)
            parts.append(scale_inv[b.start : b.stop : step] if height == 1 else scale_inv[first : first + blocks])
        scale_inv = torch.cat(parts) if len(parts) > 1 else parts[0].clone()  # a view would keep all scales in memory
        if step > 1 and height > 1:
            spec = replace(spec, granularity=Granularity(lower, spec.granularity.cols))
    return QuantizedTensor(take_bands(x_q.data, bands), scale_inv, spec, x_q.dtype)


def sampled(
    look: Look, every: int, phase: int, dtype: torch.dtype | None = None, *, blocks: bool = True, complete: bool = False
) -> Look | None:
    """The look at a copy of one row in `every`, see `sample_bands`; None if the look needs all rows.

    Args:
        dtype: dtype of the copy, if the cast is still to be made.
        blocks: whether the look needs amaxes of 128x128 blocks; otherwise only the selected rows are read.
        complete: whether the look needs all rows of each block of the cast.

    Edge cases: if the height of a block does not divide 128 the look takes all rows. A cast that is still to be made
    in blocks of several rows takes whole bands, because its scales need all rows of a block.
    """
    x, cast, height = look.x.detach(), look.cast, spec_of(look).granularity.rows  # no Parameter: kernels refuse it
    tall = height is not None and height > 1
    if height is not None and BAND_ROWS % height:
        return None
    most = BAND_ROWS if not tall else height if isinstance(cast, QuantizedTensor) and not complete else 1
    if (bands := sample_bands(x.shape[0], every, phase, step=most or 1)) is None:
        return None
    if isinstance(cast, QuantizedTensor):
        cast = take_bands_of(cast, bands)
    step = bands[0].step
    if step == 1 or not blocks:
        return look._replace(x=take_bands(x, bands, dtype), cast=cast)
    if native_sample.supports_take(x) is None:
        whole, squares = x, torch.empty(len(bands), -(-x.shape[1] // BAND_ROWS), dtype=torch.float32)
        x = native_sample.take(x, bands, squares)
        if dtype not in (None, x.dtype):  # rounding keeps the order of numbers
            x, squares = x.to(dtype), squares.to(dtype).to(torch.float32)
            squares = squares if bool(squares.isfinite().all()) else squares_of(whole, bands, dtype)
    else:
        x, squares = take_bands(x, bands, dtype), squares_of(x, bands, dtype)
    return look._replace(x=x, cast=cast, squares=squares, square_rows=BAND_ROWS // step)
