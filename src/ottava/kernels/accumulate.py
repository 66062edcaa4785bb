"""GEMM under an `Accumulator`, in plain torch on any device: the truth that `native.accumulate` is compared with.

    one scale along K      acc = the profile's sum, started from c / scale_inv_a / scale_inv_b
                           y   = acc * scale_inv_a * scale_inv_b + bias
    blocks along K         y   = c; for each block: y = fma(scale_inv_a * scale_inv_b, the profile's sum from zero, y)
                           y   = y + bias
    scaled inside          as the first, of numbers times the scales of their blocks; outside stand those of tensors

The second is what DeepGEMM's and CUTLASS's block-scaled kernels do: the sum of a block leaves the tensor core, and fp32
registers scale and add it. The third is the instruction of a profile with `scales_blocks`. Everything after
the profile's sums is fp32, and there is one rounding to the output's type. NaN, infinity, and infinity times zero go
through as IEEE has it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ottava.kernels.reference import block_columns, scale_of_block
from ottava.numerics.accumulator import Accumulator
from ottava.numerics.formats import E4M3, E8M0, Format
from ottava.numerics.rounding import code_values, decode, floor_log2, power_of_two, round_to_format
from ottava.numerics.tensor import QuantizedTensor, instruction, refuse_instruction

NAME = "accumulator_reference"
NATIVE = False

_NOTHING = -1000  # the exponent of a zero
_AT_ONCE = 1 << 21  # products
_NO_SCALE = -126  # the exponent of a scale that is zero
_BEYOND = 2.0**128  # what fp32 does not reach
_TO_256 = frozenset({"four_over_six", "four_over_six_te", "four_over_six_te_mse"})


def supports_accumulate(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, accumulator: Accumulator
) -> str | None:
    """Why this kernel does not take the call; None if it does."""
    for fmt in (a.spec.format, b.spec.format):
        if fmt.bits > 8 or not fmt.signed:
            return f"{NAME}: takes signed formats of up to 8 bits; got {fmt}"
    reason = refuse_instruction(a.spec, b.spec, accumulator)
    return f"{NAME}: {reason}" if reason else None


def plan_accumulate(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, accumulator: Accumulator
) -> Callable[..., Tensor]:
    """A function (a, b, bias, c=None) -> y (M, N) for all operands like these."""
    return lambda a, b, bias, c=None: gemm(a, b, out_dtype, bias, accumulator, c)


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
    accumulator, inside = instruction(a.spec, b.spec, accumulator)
    # what the accumulator begins with: (M, N), zeros without c
    start = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device) if c is None else c
    if inside:
        (lhs, lhs_exp, of_a), (rhs, rhs_exp, of_b) = (_scaled(side, accumulator) for side in (a, b))
        # c stands outside of the scales of the tensors, so it goes in divided by them, and comes out multiplied
        y = accumulate(lhs, lhs_exp, rhs, rhs_exp, start / of_a / of_b, accumulator) * of_a * of_b
        return (y if bias is None else y + bias.to(torch.float32)).to(out_dtype)
    step = block_columns(a.spec.granularity, b.spec.granularity, k)
    lhs, rhs = decode(a.data, a.spec.format).double(), decode(b.data, b.spec.format).double()
    exponents = _exponents(lhs, a.spec.format), _exponents(rhs, b.spec.format)
    y = start
    for at in range(0, k, max(step, 1)):
        columns = slice(at, at + step)
        of_a, of_b = scale_of_block(a, at), scale_of_block(b, at).t()
        # a block's sum begins at zero and is added in fp32; one sum over all of K begins at c
        begin = torch.zeros_like(start) if step < k else start if c is None else start / of_a / of_b
        part = accumulate(
            lhs[:, columns], exponents[0][:, columns], rhs[:, columns], exponents[1][:, columns], begin, accumulator
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
    # all products of a group lie in memory at once: (rows, n, group) in float64
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
        exponents = a_exp[:, None, inside] + b_exp[None, :, inside]
        if rule.dot > 1:
            products, exponents = products.unflatten(2, (-1, rule.dot)).sum(3), exponents[:, :, :: rule.dot]
        finite = products.isfinite()
        special = special + torch.where(finite, 0.0, products).sum(2)
        # so that an infinity does not take part in the alignment of the others
        products = torch.where(finite, products, 0.0)
        carry = _next(products, exponents, carry, rule)
        special = special + torch.where(carry.abs() < _BEYOND, 0.0, carry * torch.inf)
        # a sum beyond fp32 is infinite from here on; `special` remembers its sign
        carry = torch.where(carry.abs() < _BEYOND, carry, 0.0)
        if rule.promotion and ((at + rule.group) % rule.promotion == 0 or at + rule.group >= k):
            total, carry = total + carry.float(), torch.zeros_like(carry)
    # exact: the rule has kept no more bits than fp32 holds
    result = carry.float() if rule.promotion is None else total
    return torch.where(special == 0, result, special.float())


def _next(products: Tensor, exponents: Tensor, carry: Tensor, rule: Accumulator) -> Tensor:
    """One group (M, N, group) and the accumulator (M, N) -> the accumulator; of dots also those that are zero count."""
    # hardware aligns all products to the largest exponent, and cuts what lies below its last bit. A product of zero has
    # no exponent and does not take part; a dot that is zero does
    largest = torch.where((products != 0) | (rule.dot > 1), exponents, _NOTHING).amax(2)
    largest = torch.maximum(largest, floor_log2(carry).clamp(min=-126))  # a zero's -126 is no more than any other's
    # in these units the bits that survive are those before the point
    unit = power_of_two(rule.fraction_bits - largest)
    sums = (products * unit[:, :, None]).trunc().sum(2) + (carry * unit).trunc()  # exact: far below 2**53
    # float64 has room for every aligned sum, so its bits may be cut like those of the hardware
    bits = (sums * power_of_two(largest - rule.fraction_bits)).view(torch.int64)
    dropped = 52 - rule.kept_bits
    if rule.rounding == "nearest_even":
        bits = bits + ((1 << (dropped - 1)) - 1) + (bits >> dropped & 1)
    return ((bits >> dropped << dropped).view(torch.float64) * 2.0**149).trunc() * 2.0**-149  # fp32's subnormals


def _exponents(numbers: Tensor, fmt: Format) -> Tensor:
    return floor_log2(numbers).clamp(min=fmt.emin)


def _scaled(x: QuantizedTensor, rule: Accumulator) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers times their block's scale, their exponents or those of their dots, what stands outside), K in dots."""
    scales, outside = block_scales(x)
    wide = x.spec.granularity.expand(scales.double(), (x.shape[0], x.shape[1])).expand(*x.shape)
    fmt = E4M3 if x.spec.scale_format == "e4m3" else E8M0
    exponents = torch.where(wide > 0, floor_log2(wide).clamp(min=fmt.emin), _NO_SCALE)
    numbers = decode(x.data, x.spec.format).double()
    if rule.dot == 1:
        exponents = exponents + _exponents(numbers, x.spec.format)
    # zeros with the exponent of the last column: a dot that the edge cuts off aligns as a whole one does
    pad = -x.shape[1] % rule.dot
    edge = exponents[:, -1:].expand(-1, pad)
    return torch.nn.functional.pad(numbers * wide, (0, pad)), torch.cat([exponents, edge], 1), outside


def block_scales(x: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """(the scales of the blocks that an instruction reads, the fp32 scale (1, 1) above them), both fp32.

    E8M0's are as they are stored, above them is 1. Of NVFP4 an operand holds products, each rounded to fp32: this
    finds the E4M3 scales and the scale of the tensor that give every one of them. A block of zeros has scale 0, as
    hardware casts it.

    Raises:
        ValueError: no two such scales give the products.
    """
    # E8M0's scales are in the instruction's form already
    if x.spec.scale_format != "e4m3" or not x.scale_inv.numel():
        return x.scale_inv, x.scale_inv.new_ones(1, 1)
    codes = x.spec.granularity.blocks(decode(x.data, x.spec.format) != 0)
    filled = codes.any(3).any(1) & (x.scale_inv != 0)
    known = x.scale_inv[filled & x.scale_inv.isfinite()]
    lost = torch.where(x.scale_inv.isfinite(), 0.0, x.scale_inv)  # NaN stays
    if not known.numel():
        return lost, x.scale_inv.new_ones(1, 1)
    known, largest = known.unique(), known.max()
    tops = code_values(E4M3).to(known.device)
    tops = tops[(tops >= E4M3.min_normal) & tops.isfinite()].sort(descending=True).values
    # 256 or 384 where a rule leaves room for a scale that is half as large again
    likely = tops.new_tensor([384.0, 256.0] if x.spec.block_scale in _TO_256 else [E4M3.max])
    for top in torch.cat([likely, tops]):
        # a quotient rounds, so the scale of the tensor may be one of its neighbours
        for tensor in _neighbours(largest / top):
            found = round_to_format(known / tensor, E4M3)
            if torch.equal(found * tensor, known):
                scales = round_to_format(torch.where(filled, x.scale_inv / tensor, 0.0), E4M3)
                return torch.where(x.scale_inv.isfinite(), scales, lost), tensor.reshape(1, 1)
    raise ValueError(
        f"accumulate: scales of {x.spec} are no products of E4M3 scales and one fp32 scale for the tensor, which the "
        "instruction needs; cast the tensor as a whole, or leave the accumulator out"
    )


def _neighbours(x: Tensor) -> list[Tensor]:
    bits = x.view(torch.int32)
    return [(bits + step).view(torch.float32) for step in (0, -1, 1)]


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
