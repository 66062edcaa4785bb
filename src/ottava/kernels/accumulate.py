"""GEMM under an `Accumulator`, in plain torch on any device: the truth that `native.accumulate` is compared with.

    one scale along K      acc = the profile's sum, started from c / scale_inv_a / scale_inv_b
                           y   = acc * scale_inv_a * scale_inv_b + bias
    blocks along K         y   = c; for each block: y = fma(scale_inv_a * scale_inv_b, the profile's sum from zero, y)
                           y   = y + bias

The second is what DeepGEMM's and CUTLASS's block-scaled kernels do: the sum of a block leaves the tensor core, and fp32
registers scale and add it. Everything after the profile's sums is fp32, and there is one rounding to the output's type.
NaN, infinity, and infinity times zero go through as IEEE has it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ottava.accumulator import Accumulator
from ottava.formats import Format
from ottava.kernels.reference import block_columns, scale_of_block
from ottava.quantized_tensor import QuantizedTensor
from ottava.rounding import decode, floor_log2, power_of_two

NAME = "accumulator_reference"
NATIVE = False

_NOTHING = -1000  # the exponent of a zero
_AT_ONCE = 1 << 21  # products


def supports_accumulate(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, accumulator: Accumulator
) -> str | None:
    """Why this kernel does not take the call; None if it does."""
    for fmt in (a.spec.format, b.spec.format):
        if fmt.bits > 8 or not fmt.signed:
            return f"{NAME}: takes signed formats of up to 8 bits; got {fmt}"
    return None


def plan_accumulate(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, accumulator: Accumulator
) -> Callable[..., Tensor]:
    """A function (a, b, bias, c=None) -> y (M, N) for all operands like these."""

    def run(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, c: Tensor | None = None) -> Tensor:
        return gemm(a, b, out_dtype, bias, accumulator, c)

    return run


@torch.no_grad()
def gemm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    accumulator: Accumulator,
    c: Tensor | None = None,
) -> Tensor:
    """(M, K), (N, K) -> (M, N), both contracted over their last dimension; c (M, N) fp32 starts the accumulator."""
    k = a.shape[1]
    step = block_columns(a.spec.granularity, b.spec.granularity, k)
    lhs, rhs = decode(a.data, a.spec.format).double(), decode(b.data, b.spec.format).double()
    exponents = _exponents(lhs, a.spec.format), _exponents(rhs, b.spec.format)
    start = torch.zeros(a.shape[0], b.shape[0], device=a.device) if c is None else c
    y = start
    for at in range(0, k, max(step, 1)):
        inside = slice(at, at + step)
        of_a, of_b = scale_of_block(a, at), scale_of_block(b, at).t()
        begin = torch.zeros_like(start) if step < k else start if c is None else start / of_a / of_b
        part = accumulate(
            lhs[:, inside], exponents[0][:, inside], rhs[:, inside], exponents[1][:, inside], begin, accumulator
        )
        y = fma(of_a * of_b, part, y) if step < k else part * of_a * of_b
    if bias is not None:
        y = y + bias.to(torch.float32)
    return y.to(out_dtype)


def accumulate(a: Tensor, a_exp: Tensor, b: Tensor, b_exp: Tensor, start: Tensor, rule: Accumulator) -> Tensor:
    """The profile's sums of a (M, K) x b (N, K), from start (M, N) on, fp32.

    Args:
        a, b: numbers in float64.
        a_exp, b_exp: their exponents, int64, see `accumulator`.
    """
    assert rule.group is not None
    (m, k), n = a.shape, b.shape[0]
    rows = max(1, _AT_ONCE // max(1, n * min(rule.group, k)))
    if m > rows:
        parts = [slice(r, r + rows) for r in range(0, m, rows)]
        return torch.cat([accumulate(a[r], a_exp[r], b, b_exp, start[r], rule) for r in parts])
    special = torch.where(start.isfinite(), 0.0, start.double())  # infinities and NaNs, summed on their own
    total = torch.where(start.isfinite(), start, 0.0)
    carry = total.double() if rule.promotion is None else torch.zeros_like(total, dtype=torch.float64)
    for at in range(0, k, rule.group):
        inside = slice(at, at + rule.group)
        products = a[:, None, inside] * b[None, :, inside]
        finite = products.isfinite()
        special = special + torch.where(finite, 0.0, products).sum(2)
        products = torch.where(finite, products, 0.0)
        carry = _next(products, a_exp[:, None, inside] + b_exp[None, :, inside], carry, rule)
        if rule.promotion and ((at + rule.group) % rule.promotion == 0 or at + rule.group >= k):
            total, carry = total + carry.float(), torch.zeros_like(carry)
    result = carry.float() if rule.promotion is None else total
    return torch.where(special == 0, result, special.float())


def _next(products: Tensor, exponents: Tensor, carry: Tensor, rule: Accumulator) -> Tensor:
    """One group (M, N, group) and the accumulator (M, N) -> the accumulator."""
    largest = torch.where(products != 0, exponents, _NOTHING).amax(2)
    largest = torch.maximum(largest, floor_log2(carry).clamp(min=-126))  # a zero's -126 is no more than any other's
    unit = power_of_two(rule.fraction_bits - largest)
    sums = (products * unit[:, :, None]).trunc().sum(2) + (carry * unit).trunc()  # exact: far below 2**53
    bits = (sums * power_of_two(largest - rule.fraction_bits)).view(torch.int64)
    dropped = 52 - rule.kept_bits
    if rule.rounding == "nearest_even":
        bits = bits + ((1 << (dropped - 1)) - 1) + (bits >> dropped & 1)
    return (bits >> dropped << dropped).view(torch.float64)


def _exponents(numbers: Tensor, fmt: Format) -> Tensor:
    return floor_log2(numbers).clamp(min=fmt.emin)


def fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x * y + z of fp32 tensors, rounded once.

    The product is exact in float64. Of the two float64 numbers around the sum the odd one is taken, so that the second
    rounding, to fp32, cannot see a tie where there is none (Boldo and Melquiond, "When double rounding is odd").

    Example:
        >>> fma(torch.tensor([1 + 2.0**-23]), torch.tensor([1 - 2.0**-23]), torch.tensor([-1.0]))
        tensor([-1.4211e-14])
    """
    product, z = x.double() * y.double(), z.double()
    total = product + z
    added = total - product
    rest = (product - (total - added)) + (z - added)
    bits = total.view(torch.int64)
    outward = torch.where((rest > 0) == (total > 0), 1, -1)
    even = (rest != 0) & (bits & 1 == 0) & total.isfinite()
    return torch.where(even, bits + outward, bits).view(torch.float64).float()
