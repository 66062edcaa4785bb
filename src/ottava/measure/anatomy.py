"""What the error of a cast is made of, block by block: dead zone, clipping, scale bias and grid noise.

A block has elements x, their casts q, e = x - q, and the ideal scale a / F: amax of the block over the largest number
of the format, unrounded. Each element that is not zero and finite belongs to one of three sets:

    dead zone     sum e**2 where q = 0                the element is lost; e = x
    clipped       sum e**2 where x is beyond the format by more than its rounding range
    live          the others; r is the error that rounding x under the ideal scale would make
        grid noise    sum r**2                        no scale avoids it
        scale bias    sum e**2 - sum r**2             what the scale in use costs

The four parts sum to sum e**2, in each block and in the tensor, because their terms do. Scale bias is negative where
the scale in use happens to be better than the ideal one, or where a scale that clips buys a finer grid for the rest;
"four over six" lives on it. Under stochastic rounding r**2 is its expectation, (x - l) (u - x) with the neighbours l
and u, so that chance is no bias.

The three components are those of arXiv 2605.20402, which splits the error of MXFP4 into scale bias "from power-of-two
rounding", dead zone "from zeroing small values" and grid noise. The formulas are ours: they need no power of two, and
clipping is a part of its own, because FP8 with predicted scales clips.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.kernels.native.measure import Look
from ottava.measure.tally import PARTS
from ottava.numerics.formats import Format
from ottava.numerics.rounding import floor_log2, power_of_two
from ottava.numerics.scaling import Granularity
from ottava.numerics.scaling import amax as block_amaxes
from ottava.numerics.tensor import QuantizedTensor

_BAND_ROWS = 128  # at least; a band holds whole blocks


@torch.no_grad()
def anatomy(look: Look, cast: QuantizedTensor) -> dict[str, Tensor]:
    """The fields of a `Tally` with detail "anatomy", in fp64: error_dead, error_clipped, error_live and error_grid in
    units of x squared, and blocks_by_part (4,), the blocks with an error by their largest part.

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
    step = _BAND_ROWS if height is None else height * max(1, _BAND_ROWS // height)
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
    return torch.stack([spec.granularity.blocks(term).sum((1, 3)) for term in terms])


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
