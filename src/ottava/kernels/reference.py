"""The truth: quantize and GEMM in plain torch on any device. Tests compare every other kernel with this file.

    quantize   q = round_to_format(x * scale)                     in fp32, block by block; NaN where x is infinite
    gemm       y = round_once(sum_k qa * qb * scale_inv_a * scale_inv_b + bias)

The GEMM emulates a tensor core with a full fp32 accumulator. It decodes codes exactly. Products are exact in fp32 (E4M3
and E5M2 have at most 4 significant bits), and sums are fp32. Scales multiply the sum (with blocks along K: each block's
sum), and there is ONE rounding to the output type. `accumulate` models the shorter accumulators of real tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.numerics.rounding import check_input_dtype, decode, encode_, infinities_to_nan_
from ottava.numerics.scaling import BLOCK_SCALES, Granularity, Scale, amax, column_major, compute_scale, with_nan
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor

NAME = "reference"
NATIVE = False

FOLD_OCTAVES = 94  # 126 - 16 * 2: E5M2 x E5M2's smallest product is 2**-32; FOLD_OCTAVES of src/gemm.h


class Cast(NamedTuple):
    """The result of a quantize kernel."""

    data: Tensor
    """Codes (R, C)."""
    scale_inv: Tensor
    """fp32, one entry per block."""
    amax: Tensor
    """fp32, one entry per block: the largest magnitude before the cast."""


def supports_quantize(x: Tensor, spec: QuantizationSpec, scale: Tensor | None = None) -> str | None:
    """Takes everything."""
    return None


def check_matrix(x: Tensor) -> None:
    """Refuses what is no matrix to cast.

    Raises:
        TypeError: dtype.  ValueError: x is not a matrix.
    """
    check_input_dtype(x, "quantize")
    if x.dim() != 2:
        raise ValueError(f"quantize: got shape {tuple(x.shape)}; needs a matrix (rows, columns): flatten it first")


def quantize(x: Tensor, spec: QuantizationSpec, scale: Tensor | None = None) -> Cast:
    """Casts x (R, C) to spec, with its own scale or a given one.

    Args:
        x: fp32, bf16 or fp16; any strides, also empty.
        scale: one entry, the factor of x (predicted scaling). The cast takes the current scale instead if it is 0 (no
            history yet), or if the spec is guarded and amax * scale misses the top `guard_bits` octaves of the format.
    Raises:
        TypeError: dtype.  ValueError: x is not a matrix.
    """
    check_matrix(x)
    if torch._C._functorch.is_batchedtensor(x) and not torch._C._functorch.get_unwrapped(x).numel():
        raise ValueError("quantize: got no element under vmap, where torch has no rule for it; leave empty batches out")
    # a rule may mix neighbours of a row, and random numbers are counted along rows: both see x as it is
    ordinary = spec.rounding == "nearest_even" and spec.block_scale == "amax"
    if column_major(x) and ordinary:  # cast along memory; random numbers keep the order of x
        data, scale_inv, block_amax = _quantize(x.t(), spec, spec.granularity.transposed, scale)
        return Cast(data.t(), scale_inv.t().contiguous(), block_amax.t().contiguous())
    return _quantize(x, spec, spec.granularity, scale)


def _quantize(x: Tensor, spec: QuantizationSpec, granularity: Granularity, scale: Tensor | None) -> Cast:
    block_amax = amax(x, granularity)
    factor, scale_inv = factors_of(x, block_amax, spec, granularity, scale)
    # a copy in fp32: torch multiplies in place there, block by block, and the caller keeps its x
    y = granularity.multiply_(infinities_to_nan_(x.to(torch.float32, copy=True), spec.format), factor)
    return Cast(encode_(y, spec.format, rounding=spec.rounding), scale_inv, block_amax)


def factors_of(
    x: Tensor, block_amax: Tensor, spec: QuantizationSpec, granularity: Granularity, scale: Tensor | None
) -> Scale:
    """As `factors`, or by the spec's rule for block scales, which may read x."""
    if spec.block_scale == "amax":
        return factors(block_amax, spec, scale)
    group = None if spec.transform is None else spec.transform.group
    return BLOCK_SCALES[spec.block_scale](x, block_amax, granularity, group, None)


def factors(block_amax: Tensor, spec: QuantizationSpec, scale: Tensor | None) -> Scale:
    """The factor of each block and its inverse: `scale` where `quantize` takes it, else the current scale."""
    # also where a scale is given: the guard, and a door without history, fall back to it
    current = compute_scale(block_amax, spec.format, scale_format=spec.scale_format, margin=spec.margin)
    if scale is None:
        return current
    given = scale.reshape(1, 1).expand_as(block_amax)
    taken = given > 0
    if spec.scaling == "guarded":
        # where amax lands: within the top guard_bits octaves the prediction stands
        top = block_amax * given
        inside = (top <= spec.format.max) & (top >= spec.format.max * 2.0**-spec.guard_bits)
        taken = taken & (inside | (block_amax == 0))
    chosen = Scale(torch.where(taken, given, current.scale), torch.where(taken, given.reciprocal(), current.scale_inv))
    return with_nan(chosen, block_amax, spec.format)


def supports_gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None) -> str | None:
    """Takes everything."""
    return None


def gemm(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False
) -> Tensor:
    """(M, K), (N, K) -> (M, N), both contracted over their last dimension. fast_accum changes nothing here."""
    k = a.data.shape[1]
    one_block = a.scale_inv.shape[1] <= 1 and b.scale_inv.shape[1] <= 1
    kinds = {a.spec.scale_format, b.spec.scale_format}
    if k == 0:  # an expert without tokens: no sum, and no block with a scale
        y = a.scale_inv.new_zeros(a.shape[0], b.shape[0])
    elif one_block or "fp32" in kinds:
        y = _sum_of_codes(a, b)
    elif "e4m3" in kinds or not a.data.is_cpu:
        # fp32 holds code * scale_inv (E4M3 block scales: to half an ulp, see docs), so scaled operands give the same
        # products without rounding. Whether a GPU's scales could be folded it would have to tell the host
        y = product(a.dequantize(torch.float32), b.dequantize(torch.float32))
    else:
        y = _sum_of_powers(a, b)
    if bias is not None:
        y += bias.to(torch.float32)
    return y.to(out_dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) @ b (N, K).T in fp32, by torch, in an order of the sums that strides do not change.

    With two threads MKL sums 5 to 11 rows in another order than with one; 12 rows it does not, and they have the bits
    that one thread gives to fewer. Sums of 1,000 numbers it may divide among threads, whatever the number of rows.
    """
    rows = a.shape[0]
    if a.is_cpu:
        a, b = a.contiguous(), b.contiguous()
    if not a.is_cpu or not 4 < rows < 12 or b.shape[0] == 1:
        return a @ b.t()
    return (torch.cat((a, a.new_zeros(12 - rows, a.shape[1]))) @ b.t())[:rows]


def supports_dense(a: Tensor, b: Tensor) -> str | None:
    """Takes everything."""
    return None


def plan_dense(a: Tensor, b: Tensor, bias: Tensor | None) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """A function (a, b, bias) -> y for all matrices like these: an fp32 GEMM, and one rounding to their dtype."""

    def dense(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        y = product(a.to(torch.float32), b.to(torch.float32))
        if bias is not None:
            y += bias.to(torch.float32)
        return y.to(a.dtype)

    return dense


def _sum_of_powers(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    """The fp32 sum, of scales in blocks along K that are powers of two; scales enter as in src/gemm.cpp.

    The largest of a row multiplies the finished sum, the others go into the operand relative to it. No bit of an
    ordinary sum depends on that: powers of two move exponents. But near the ends of fp32 it decides what overflows in
    between, and a sum that fits would be infinite on one kernel and finite on another.
    """
    folded = _fold(a), _fold(b)
    if sum(octaves for _, _, octaves in folded) > FOLD_OCTAVES:  # the smallest products would become subnormal
        return _sum_of_codes(a, b)
    (x, top_a, _), (w, top_b, _) = folded
    return product(x, w).mul_(top_a).mul_(top_b.t())


def _fold(x_q: QuantizedTensor) -> tuple[Tensor, Tensor, float]:
    """(decoded codes times scales relative to the largest of their row, those (R, 1), octaves to the smallest)."""
    scales, granularity = x_q.scale_inv, x_q.spec.granularity
    # a power of two times another is exact, so the largest may leave the sum
    tops = scales.amax(1, keepdim=True)
    rows = granularity.expand(tops, (x_q.shape[0], 1))
    numbers = decode(x_q.data, x_q.spec.format)
    if scales.shape[1] == 1 or not scales.numel():  # an expert without tokens has no scale
        return numbers, rows, 0.0
    spread = (tops / scales).amax().log2()  # infinite beyond fp32, and NaN where a scale is
    octaves = float(spread) if bool(tops.isfinite().all()) else math.inf
    return granularity.multiply_(numbers, scales / tops), rows, math.inf if math.isnan(octaves) else octaves


def _sum_of_codes(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    """The fp32 sum. It scales the sum of each step of K, inside which no scale changes."""
    a_codes, b_codes = decode(a.data, a.spec.format), decode(b.data, b.spec.format)
    k = a_codes.shape[1]
    step = block_columns(a.spec.granularity, b.spec.granularity, k)
    if step == k:
        return _scale(product(a_codes, b_codes), a, b, 0)
    y = a_codes.new_zeros(a.shape[0], b.shape[0])
    for start in range(0, k, step):
        stop = min(start + step, k)
        # (M, step) @ (step, N): inside a step no scale changes, so its sum may be scaled as a whole
        y += _scale(product(a_codes[:, start:stop], b_codes[:, start:stop]), a, b, start)
    return y


def block_columns(a: Granularity, b: Granularity, k: int) -> int:
    """The number of k between changes of a scale."""
    # scales of either side change at multiples of its block, so of neither inside their common divisor
    blocks = [side.cols for side in (a, b) if side.cols is not None and side.cols < k]
    return math.gcd(*blocks) if blocks else k  # blocks as long as k never change


def _scale(sums: Tensor, a: QuantizedTensor, b: QuantizedTensor, start: int) -> Tensor:
    """sums (M, N) over the block of K that begins at `start`, times the scales of that block."""
    for operand, rows_first in ((a, True), (b, False)):
        # first a's, then b's: the order decides where a product of two large scales overflows
        scale_inv = scale_of_block(operand, start)
        sums *= scale_inv if rows_first else scale_inv.t()
    return sums


def scale_of_block(operand: QuantizedTensor, start: int) -> Tensor:
    """The scales (R, 1) of an operand's rows in the block of K that begins at `start`."""
    granularity = operand.spec.granularity
    column = start // granularity.cols if granularity.cols else 0
    return granularity.expand(operand.scale_inv[:, column : column + 1], (operand.shape[0], 1))
