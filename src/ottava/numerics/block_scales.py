"""Rules that choose the E4M3 scales of NVFP4's blocks by more than the amax. A new rule is one entry in `BLOCK_SCALES`.

NVFP4 has two levels: an fp32 scale t for the tensor, and an E4M3 scale s for each block of 16. A number is decoded as
code * s * t. NVIDIA's rule (`scaling.compute_scale`) brings the amax of each block to 6. The rules here search, or
correct what rounding has done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from ottava.numerics.formats import E2M1, E4M3
from ottava.numerics.rounding import round_to_format
from ottava.numerics.scaling import Granularity, Scale, with_nan

ChooseScales = Callable[[Tensor, Tensor, Granularity, int | None, Tensor | None], Scale]
"""(x (R, C), amax of each block, the blocks, columns that a rotation has mixed, the tensor's largest finite amax if x
is a part of it) -> the factors of x before it is rounded to E2M1, and the scales that decode, fp32, one per block."""

_FP32_MAX = torch.finfo(torch.float32).max
_UNCLIPPED = 17 / 16  # E4M3 rounds a scale down by at most 1/17 of it
_EDEN_SHRINK = 0.93 * 17 / 16  # amax lands at 6 / shrink: clipping it a little costs less than the coarser grid
FOUR_OVER_SIX_TOPS = 256.0 * E2M1.max, (6.0, 4.0)
"""The tensor's amax times its scale, and where a block's amax may go. At 256, 1.5 times a scale is an E4M3 number."""
MS_EDEN_TOPS = 255.99 * E2M1.max / _EDEN_SHRINK, (E2M1.max / _EDEN_SHRINK,)
"""The same; 255.99 leaves room for the correction, which may be above 1."""
TE_FOUR_OVER_SIX: Mapping[str, tuple[float, str]] = MappingProxyType(
    {
        "four_over_six_te": (256.0, "MAE"),
        "four_over_six_te_mse": (256.0, "MSE"),
        "four_over_six_te_448": (448.0, "MAE"),
        "four_over_six_te_mse_448": (448.0, "MSE"),
    }
)
"""TransformerEngine's rules: the E4M3 scale to which the tensor's amax goes, and the error that chooses. Its variable
NVTE_NVFP4_4OVER6 alone gives the first."""


def unclipped(
    x: Tensor, amax: Tensor, granularity: Granularity, group: int | None, largest: Tensor | None = None
) -> Scale:
    """Brings each block's amax to 6 * 16 / 17, so that no rounding of its scale clips it.

    Stochastic rounding is unbiased then. With NVIDIA's scales an amax that is clipped pulls the mean toward zero.

    Source: Quartet II (arXiv 2601.22813), its stochastic baseline.
    """
    encode = _tensor_scale(amax, E4M3.max * E2M1.max / _UNCLIPPED, largest)
    return _scale_of(_rounded(amax, encode, E2M1.max / _UNCLIPPED), encode, amax)


def four_over_six(
    x: Tensor, amax: Tensor, granularity: Granularity, group: int | None, largest: Tensor | None = None
) -> Scale:
    """Brings each block's amax to 6 or to 4, whichever gives the smaller squared error; at a tie to 6.

    Source: Four Over Six (arXiv 2512.02010).
    """
    tensor_top, tops = FOUR_OVER_SIX_TOPS
    encode = _tensor_scale(amax, tensor_top, largest)
    numbers = x.detach().to(torch.float32)
    candidates, errors = [], []
    for top in tops:
        scale = _scale_of(_rounded(amax, encode, top), encode, amax)
        rounded = round_to_format(granularity.multiply_(numbers.clone(), scale.scale), E2M1)
        error = (granularity.multiply_(rounded, scale.scale_inv) - numbers).to(torch.float64).square_()
        candidates.append(scale)
        errors.append(_sums(error, granularity))
    return _better(candidates, errors)


def four_over_six_te(
    x: Tensor, amax: Tensor, granularity: Granularity, group: int | None, largest: Tensor | None = None, *, rule: str
) -> Scale:
    """As TransformerEngine chooses between 6 and 4: by a sum of errors in fp32, one rounding after each operation.

    The errors of a row of a block are added from left to right, then rows in halves.

    Source: TransformerEngine's quantize_4over6_nvfp4.cuh without NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH.
    """
    bound, error_mode = TE_FOUR_OVER_SIX[rule]
    largest = _largest(amax) if largest is None else largest
    encode = _tensor_scale(amax, bound * E2M1.max, largest)
    numbers, base = x.detach().to(torch.float32), amax / E2M1.max * encode
    candidates, errors = [], []
    for wider in (1.0, 1.5):
        block = round_to_format((base * wider).clamp(max=E4M3.max), E4M3)
        scale = _scale_of(block, encode, amax)
        value = round_to_format(granularity.multiply_(numbers.clone(), scale.scale), E2M1)
        value = granularity.multiply_(value, block).mul_(largest)
        error = value.div_(torch.full_like(largest, bound * E2M1.max)).sub_(numbers)
        error = error.abs_() if error_mode == "MAE" else error.square_()
        lines = functools.reduce(torch.add, granularity.blocks(error).unbind(3))  # one after the other, in fp32
        candidates.append(scale)
        errors.append(_folded(lines.transpose(1, 2)))
    return _better(candidates, errors)


def ms_eden(
    x: Tensor, amax: Tensor, granularity: Granularity, group: int | None, largest: Tensor | None = None
) -> Scale:
    """Rounds elements to nearest and makes the result unbiased by its scales.

    With z the elements over their scale and q the nearest E2M1 numbers, each rotated group is multiplied by
    <z, z> / <z, q>, and the corrected block scale is rounded to E4M3 stochastically. The mean over random rotations is
    then x.

    Source: MS-EDEN of Quartet II (arXiv 2601.22813).
    """
    assert group is not None  # the spec has checked that a rotation comes first
    tensor_top, (top,) = MS_EDEN_TOPS
    encode = _tensor_scale(amax, tensor_top, largest)
    block = _rounded(amax, encode, top)
    block = torch.where(block > 0, block, 1.0)  # Quartet II: a scale that underflows is 1
    scale = _scale_of(block, encode, amax)
    z = granularity.multiply_(x.detach().to(torch.float32, copy=True), scale.scale)
    q = round_to_format(z, E2M1)
    groups = Granularity(1, group)
    length, overlap = (_sums(product, groups) for product in (z.double().square(), z.double() * q))
    correction = torch.where(overlap > 0, length / overlap, 1.0).to(torch.float32)
    wide = correction.repeat_interleave(group // (granularity.cols or group), 1)[:, : block.shape[1]]
    stored = round_to_format(block * wide, E4M3, rounding="stochastic")
    return Scale(scale.scale, torch.where(_usable(amax), stored * encode.reciprocal(), scale.scale_inv))


def _sums(x: Tensor, granularity: Granularity) -> Tensor:
    """The fp64 sum of each block, in an order that any kernel can repeat: the last half of a block's numbers is added
    to the first half, until one number is left."""
    return _folded(granularity.blocks(x).transpose(1, 2).flatten(2))


def _folded(sums: Tensor) -> Tensor:
    while (count := sums.shape[2]) > 1:
        half = count // 2
        sums = torch.cat([sums[..., :half] + sums[..., count - half :], sums[..., half : count - half]], 2)
    return sums.squeeze(2)


def _better(candidates: list[Scale], errors: list[Tensor]) -> Scale:
    """The second where its error is smaller, else the first."""
    taken, (six, four) = errors[1] < errors[0], candidates
    return Scale(torch.where(taken, four.scale, six.scale), torch.where(taken, four.scale_inv, six.scale_inv))


def _usable(amax: Tensor) -> Tensor:
    return (amax > 0) & amax.isfinite()


def _largest(amax: Tensor) -> Tensor:
    return torch.where(_usable(amax), amax, 0.0).amax().reshape(1, 1) if amax.numel() else amax.new_zeros(1, 1)


def _tensor_scale(amax: Tensor, top: float, largest: Tensor | None) -> Tensor:
    """1 / t (1, 1), where t brings the tensor's largest finite amax to `top`."""
    largest = _largest(amax) if largest is None else largest
    return torch.full_like(largest, top).div_(largest).clamp_(max=_FP32_MAX)


def _rounded(amax: Tensor, encode: Tensor, top: float) -> Tensor:
    """The nearest E4M3 scales that bring each block's amax to `top`."""
    return round_to_format((amax * encode.div(torch.full_like(encode, top))).clamp(max=_FP32_MAX), E4M3)


def _scale_of(block: Tensor, encode: Tensor, amax: Tensor) -> Scale:
    """1 for blocks of zeros, NaN as the scale of blocks with an infinity or a NaN."""
    scale_inv = block * encode.reciprocal()
    scale, usable = scale_inv.reciprocal().clamp(max=_FP32_MAX), _usable(amax)
    return with_nan(Scale(torch.where(usable, scale, 1.0), torch.where(usable, scale_inv, 1.0)), amax, E2M1)


BLOCK_SCALES: Mapping[str, ChooseScales] = MappingProxyType(
    {"unclipped": unclipped, "four_over_six": four_over_six, "ms_eden": ms_eden}
    | {rule: partial(four_over_six_te, rule=rule) for rule in TE_FOUR_OVER_SIX}
)
"""The registered rules, by name; "amax", the ordinary one, is `scaling.compute_scale`."""
