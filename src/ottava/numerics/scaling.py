"""The elements that share a scale (`Granularity`), their largest magnitude (`amax`), and their scale.

    scale = fmt.max / (amax * 2**margin)         x * scale fills the format
    scale_inv = 1 / scale                        x ~= q * scale_inv; a quantized tensor stores scale_inv

`scale` lives only between this file and the cast. A quantized tensor always stores `scale_inv`, the factor that
dequantizes (TransformerEngine's word; the "decoding factor" of torch's scaled_mm). Powers of two come from bits:
torchao's exp2(floor(log2(s))) rounds *up* for 237 of 241 values just under a power of two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ottava.base.errors import RefusesUnknownFields, need_type, unknown_name
from ottava.numerics.formats import E2M1, E4M3, E8M0, Format
from ottava.numerics.rounding import floor_log2, power_of_two, round_to_format

ScaleFormat = Literal["fp32", "pow2", "e8m0", "e8m0_floor", "e4m3"]
"""The number format of a scale:

fp32        any fp32 number.
pow2        fp32 rounded down to a power of two: no mantissa error from scaling, nothing saturates.
e8m0        power of two in a byte; NVIDIA's rule rounds the exponent of scale_inv up, so nothing saturates.
e8m0_floor  the same byte by the OCP MX rule, floor(log2(amax)) - emax: saturates values near the top of the block.
e4m3        NVFP4's two levels: an fp32 scale for the tensor times an E4M3 scale for each block.
"""

_MAX_EXTENT = 1 << 16  # of a block: the reference pads a tensor to whole blocks
_FP32_MANTISSA_BITS = 23
_SMALLEST_BITS = 0x00400000  # 2**-127, which E8M0 holds as code 0 and fp32 as a subnormal number
_INFINITE_BITS, _NAN_BITS = 0x7F800000, 0x7FC00000
_FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Granularity(RefusesUnknownFields):
    """The block of elements that shares one scale; None means the whole extent. The contraction runs along columns.

    Example:
        >>> str(BLOCK_1X128), BLOCK_1X128.grid_shape((3, 300)), PER_ROW.grid_shape((3, 300))
        ('1x128', (3, 3), (3, 1))
    """

    rows: int | None
    """Rows of a block."""
    cols: int | None
    """Columns of a block."""
    transposes: bool = field(init=False, repr=False, compare=False)
    """Whether x and x.T share their scales, so that one cast serves both."""

    def __post_init__(self) -> None:
        for extent in (self.rows, self.cols):
            if extent is None:
                continue
            need_type("granularity", extent, int)
            if not 1 <= extent <= _MAX_EXTENT:
                raise ValueError(
                    f"granularity {self.rows} x {self.cols}: a block has at least 1 row and 1 column, at most "
                    f"{_MAX_EXTENT:,} of each, or all (None, * in text)"
                )
        object.__setattr__(self, "transposes", self.rows == self.cols)

    @functools.cached_property
    def transposed(self) -> Granularity:
        """The same blocks of the transpose."""
        return Granularity(self.cols, self.rows)

    def block_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of a block of a tensor of that shape; at least 1 x 1."""
        return self.rows or max(shape[0], 1), self.cols or max(shape[1], 1)

    def grid_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The number of blocks that cover a tensor of that shape, with ragged last ones; 1 along a whole extent."""
        rows = 1 if self.rows is None else -(-shape[0] // self.rows)
        cols = 1 if self.cols is None else -(-shape[1] // self.cols)
        return rows, cols

    def blocks(self, x: Tensor) -> Tensor:
        """x (R, C) as (grid rows, rows, grid columns, columns), zero-padded to whole blocks; a view if possible."""
        (rows, cols), (grid_rows, grid_cols) = (
            self.block_shape((x.shape[0], x.shape[1])),
            self.grid_shape((x.shape[0], x.shape[1])),
        )
        pad_rows, pad_cols = grid_rows * rows - x.shape[0], grid_cols * cols - x.shape[1]
        if pad_rows or pad_cols:
            x = nn.functional.pad(x, (0, pad_cols, 0, pad_rows))
        return x.reshape(grid_rows, rows, grid_cols, cols)

    def multiply_(self, x: Tensor, per_block: Tensor) -> Tensor:
        """x (R, C) times one factor per block, in place; returns x."""
        (height, width), lines, size = x.shape, x, self
        if not x.is_contiguous() and column_major(x):
            lines, per_block, size, height, width = x.t(), per_block.t(), self.transposed, width, height
        rows, cols = size.rows or max(height, 1), size.cols or max(width, 1)
        if lines.is_contiguous() and height % rows == 0 and width % cols == 0 and per_block.numel() > 1:
            # broadcasting needs no factor for every element
            lines.view(height // rows, rows, width // cols, cols).mul_(per_block[:, None, :, None])
        else:
            lines.mul_(size.expand(per_block, (height, width)))
        return x

    def expand(self, per_block: Tensor, shape: tuple[int, int]) -> Tensor:
        """One entry per block -> a tensor that broadcasts against a tensor of that shape."""
        rows, cols = self.block_shape(shape)
        if per_block.shape[0] > 1 and rows > 1:
            per_block = per_block.repeat_interleave(rows, 0)[: shape[0]]
        if per_block.shape[1] > 1 and cols > 1:
            per_block = per_block.repeat_interleave(cols, 1)[:, : shape[1]]
        return per_block

    def __str__(self) -> str:
        if self.cols is None and self.rows in (None, 1):
            return "row" if self.rows else "tensor"
        return f"{self.rows or '*'}x{self.cols or '*'}"

    @classmethod
    def parse(cls, text: str) -> Granularity:
        """The inverse of str(): "tensor", "row", "1x128", "*x16".

        Raises:
            ValueError: the text has another form.
        """
        named = {"tensor": PER_TENSOR, "row": PER_ROW}
        if text in named:
            return named[text]
        parts = [None if part == "*" else int(part) if part.isdigit() else 0 for part in text.split("x")]
        if len(parts) != 2 or 0 in parts:
            raise ValueError(f"granularity {text!r}: needs 'tensor', 'row' or 'ROWSxCOLS' such as '1x128'")
        return cls(parts[0], parts[1])


PER_TENSOR = Granularity(None, None)
PER_ROW = Granularity(1, None)
BLOCK_1X128 = Granularity(1, 128)
BLOCK_128X128 = Granularity(128, 128)
BLOCK_1X32 = Granularity(1, 32)
BLOCK_1X16 = Granularity(1, 16)
BLOCK_16X16 = Granularity(16, 16)


def amax(x: Tensor, granularity: Granularity = PER_TENSOR) -> Tensor:
    """Largest magnitude of each block.

    Args:
        x: (R, C); float64, float32, bfloat16 or float16; any strides, also empty.
    Returns:
        fp32, granularity.grid_shape(x.shape). A block with a NaN gives NaN, one with an infinity inf, an empty one 0.

    Example:
        >>> amax(torch.tensor([[1.0, -3.0], [0.5, 0.25]]), PER_ROW)
        tensor([[3.0000],
                [0.5000]])
    """
    if x.numel() == 0:
        return x.new_zeros(granularity.grid_shape((x.shape[0], x.shape[1])), dtype=torch.float32)
    if column_major(x):  # so that the reduction runs along memory
        return amax(x.t(), granularity.transposed).t().contiguous()
    if granularity == PER_TENSOR:  # aminmax reads once and allocates nothing, unlike abs().max()
        low, high = torch.aminmax(x)
        return torch.maximum(-low, high).to(torch.float32).reshape(1, 1)
    # Without the sign bit the bits of floats have the order of their magnitudes, infinity and NaN on top. torch reduces
    # integers several times faster than floats (aminmax along a dimension takes 25 times as long on a CPU).
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    magnitudes = granularity.blocks(x.resolve_neg().view(integer).bitwise_and(torch.iinfo(integer).max))
    largest = magnitudes.squeeze(1).amax(dim=-1) if granularity.rows == 1 else magnitudes.amax(dim=(1, 3))
    return largest.view(x.dtype).to(torch.float32)


def column_major(x: Tensor) -> bool:
    """Whether memory holds a matrix column by column, like the transpose of an ordinary one."""
    return x.stride(0) == 1 and x.stride(1) > 1


class Scale(NamedTuple):
    """The factor of a cast, and its inverse, which a quantized tensor stores; fp32, one entry per block."""

    scale: Tensor
    scale_inv: Tensor


def compute_scale(amax: Tensor, fmt: Format, *, scale_format: ScaleFormat = "fp32", margin: int = 0) -> Scale:
    """The scale that brings amax to the top of fmt: scale = fmt.max / (amax * 2**margin).

    Args:
        amax: fp32, one entry per block; unit: that of x.
        margin: headroom in octaves.
    Returns:
        Scale(scale, scale_inv), fp32, shape of amax. "fp32": both rounded to nearest; powers of two are exact.
    Edge cases: amax 0, inf or nan -> 1: zeros stay zeros, and the codes of the others are NaN. For a format without NaN
        scale_inv is NaN where amax is inf or nan, see `with_nan`. A scale beyond fp32 -> the largest one of its kind.
    Raises:
        ValueError: unknown scale_format.
    Source: TransformerEngine's recipe_common (fp32, pow2) and quantize_mxfp8 (e8m0); OCP MX v1.0 section 6.3
        (e8m0_floor); TransformerEngine's core_nvfp4 (e4m3).

    Example:
        >>> compute_scale(torch.tensor([[500.0]]), E4M3).scale                      # 448 / 500
        tensor([[0.8960]])
        >>> compute_scale(torch.tensor([[500.0]]), E4M3, scale_format="pow2").scale
        tensor([[0.5000]])
    """
    largest = fmt.max * 2.0**-margin * (E4M3.max if scale_format == "e4m3" else 1)
    if largest > _FP32_MAX:
        raise ValueError(
            f"{fmt.name} with margin {margin} and scales in {scale_format} ends at {largest:.3g}, beyond FP32; needs a "
            "narrower format or a larger margin"
        )
    return with_nan(_scale_of_usable(amax, fmt, scale_format, margin), amax, fmt)


def with_nan(scale: Scale, amax: Tensor, fmt: Format) -> Scale:
    """NaN as scale_inv of the blocks whose amax is infinite or NaN, if `fmt` has no code for NaN.

    E8M0 and E4M3, the scales of such formats in memory, have NaN, so the block decodes to NaN as in torchao.
    """
    return scale if fmt.has_nan else Scale(scale.scale, torch.where(amax < torch.inf, scale.scale_inv, torch.nan))


def _scale_of_usable(amax: Tensor, fmt: Format, scale_format: ScaleFormat, margin: int) -> Scale:
    """The scales of `compute_scale`, 1 where amax is 0, infinite or NaN."""
    usable = _usable(amax)
    amax = torch.where(usable, amax, 1.0)
    if scale_format in ("e8m0", "e8m0_floor"):
        scale_inv = _e8m0_scale_inv(amax, fmt, margin, round_up=scale_format == "e8m0")
        scale_inv = torch.where(usable, scale_inv, 1.0)
        return Scale(scale_inv.reciprocal(), scale_inv)
    if scale_format == "e4m3":
        return _two_level_scale(torch.where(usable, amax, 0.0), fmt, margin)
    # not `fmt.max / amax`: torch computes scalar / tensor as scalar * reciprocal, which rounds twice
    scale = torch.full_like(amax, fmt.max * 2.0**-margin).div_(amax).clamp_(max=_FP32_MAX)
    if scale_format == "pow2":
        scale = power_of_two(floor_log2(scale)).to(torch.float32)
    elif scale_format != "fp32":
        raise ValueError(unknown_name("scale_format", scale_format, get_args(ScaleFormat)))
    scale = torch.where(usable, scale, 1.0)
    return Scale(scale, scale.reciprocal())


def _e8m0_scale_inv(amax: Tensor, fmt: Format, margin: int, *, round_up: bool) -> Tensor:
    """2**e with e = ceil(log2(amax / fmt.max)), or OCP's floor(log2(amax)) - emax; exactly, within E8M0's range."""
    amax64 = amax.to(torch.float64) * 2.0**margin  # exact
    exponent = floor_log2(amax64) - fmt.emax
    if round_up:
        # amax = m * 2**a and fmt.max = n * 2**emax with 1 <= m, n < 2: one octave more exactly where m > n
        exponent = exponent + (amax64 * power_of_two(-exponent) > fmt.max).to(torch.int64)
    return power_of_two(exponent.clamp(E8M0.emin, E8M0.emax)).to(torch.float32)


def _two_level_scale(amax: Tensor, fmt: Format, margin: int) -> Scale:
    """scale_inv = s * d: d for the tensor in fp32, s for the block in E4M3. amax: per block, unusable ones 0."""
    top = fmt.max * 2.0**-margin  # the tensor's scale takes the margin: E4M3 has no range to spare
    encode = _tensor_scale(amax, E4M3.max * top, None)
    per_block = encode * torch.full_like(encode, 1 / top)  # NVIDIA multiplies by fp32's 1/6, and does not divide
    block = round_to_format((amax * per_block).clamp(max=_FP32_MAX), E4M3)
    return _scale_of(block, encode, amax)


def exponent_bytes(scale_inv: Tensor) -> Tensor:
    """E8M0's bytes of fp32 scales that are NaN or powers of two from 2**-127 to 2**127: the exponent fields, uint8.

    Example:
        >>> exponent_bytes(torch.tensor([[0.5, 1.0, torch.nan]]))
        tensor([[126, 127, 255]], dtype=torch.uint8)
    """
    return (scale_inv.view(torch.int32) >> _FP32_MANTISSA_BITS).to(torch.uint8)


def read_scales(scales: Tensor) -> Tensor:
    """The fp32 scales: the same memory, or those of E8M0's bytes, exactly.

    Example:
        >>> read_scales(torch.tensor([[0, 126, 127, 255]], dtype=torch.uint8))
        tensor([[5.8775e-39, 5.0000e-01, 1.0000e+00,        nan]])
    """
    if scales.dtype == torch.float32:
        return scales
    bits = scales.to(torch.int32) << _FP32_MANTISSA_BITS
    bits = torch.where(bits == _INFINITE_BITS, _NAN_BITS, bits)
    return torch.where(bits == 0, _SMALLEST_BITS, bits).view(torch.float32)


# --- rules for the E4M3 scales of NVFP4's blocks by more than the amax; a new one is an entry of BLOCK_SCALES ---

# NVFP4 has two levels: an fp32 scale t for the tensor, and an E4M3 scale s for each block of 16. A number is decoded as
# code * s * t. NVIDIA's rule (`compute_scale`) brings the amax of each block to 6. The rules here search, or correct
# what rounding has done.

ChooseScales = Callable[[Tensor, Tensor, Granularity, int | None, Tensor | None], Scale]
"""(x (R, C), amax of each block, the blocks, columns that a rotation has mixed, the tensor's largest finite amax if x
is a part of it) -> the factors of x before it is rounded to E2M1, and the scales that decode, fp32, one per block."""

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
    scale_inv, usable = block * encode.reciprocal(), _usable(amax)
    scale = scale_inv.reciprocal().clamp(max=_FP32_MAX)  # a block scale that underflowed to 0: its codes decode to 0
    return with_nan(Scale(torch.where(usable, scale, 1.0), torch.where(usable, scale_inv, 1.0)), amax, E2M1)


BLOCK_SCALES: Mapping[str, ChooseScales] = MappingProxyType(
    {"unclipped": unclipped, "four_over_six": four_over_six, "ms_eden": ms_eden}
    | {rule: partial(four_over_six_te, rule=rule) for rule in TE_FOUR_OVER_SIX}
)
"""The registered rules, by name; "amax", the ordinary one, is `compute_scale`."""
