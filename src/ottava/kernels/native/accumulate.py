"""GEMM under an `Accumulator` in C++ on a CPU: the bits of `kernels.accumulate`, see src/accumulate.cpp.

They depend neither on the number of threads nor on the instruction set.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from ottava.kernels import accumulate as reference
from ottava.kernels.gate import pointer, refusal
from ottava.kernels.native import build as native_build
from ottava.kernels.reference import block_columns
from ottava.numerics.accumulator import Accumulator
from ottava.numerics.formats import E4M3, E8M0
from ottava.numerics.rounding import byte_values
from ottava.numerics.tensor import QuantizedTensor, instruction

NAME = "native_accumulator"
NATIVE = False

_CALL = struct.Struct("=36q")  # struct Call of src/accumulate.cpp: two sides, the rule, the result, three numbers
_SMALLEST_SHARE = 1 << 22  # products that pay for waking another thread, about a millisecond
_MOST_DOTS = 16  # in a group
_SCALES = -88, 70  # of the exponents of two scales, added; beyond them sums leave fp32's normal numbers
_EXPONENTS = 16  # larger ones would not fit in the bytes of the kernel


def supports_accumulate(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, accumulator: Accumulator
) -> str | None:
    """Why this kernel does not take the call; None if it does. It may build the library."""
    if not (a.data.is_cpu and b.data.is_cpu):
        return f"{NAME}: runs on cpu; got {a.device.type} and {b.device.type}"
    if reason := refusal(a.data, b.data, a.scale_inv, b.scale_inv):
        return f"{NAME}: takes plain tensors; {reason}"
    if reason := reference.supports_accumulate(a, b, out_dtype, accumulator):
        return reason
    for fmt in (a.spec.format, b.spec.format):
        if max(fmt.emax, -fmt.emin) > _EXPONENTS:
            return f"{NAME}: takes exponents up to {_EXPONENTS}; got {fmt}"
    rule = instruction(a.spec, b.spec, accumulator)[0]
    if rule.group is not None and rule.group > _MOST_DOTS * rule.dot > _MOST_DOTS:
        return f"{NAME}: takes groups of up to {_MOST_DOTS} dots; got {rule}"
    if 0 in (*a.shape, *b.shape):
        return f"{NAME}: an empty operand"
    reason = native_build.load("accumulate").reason
    return f"{NAME}: {reason}" if reason else None


def plan_accumulate(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, accumulator: Accumulator
) -> Callable[..., Tensor]:
    """A function (a, b, bias, c=None) -> y (M, N) for all operands of the specs, shapes and strides of these.

    Raises:
        RuntimeError: no library, or no memory; `supports_accumulate` foresees the first.
    """
    built = native_build.load("accumulate")
    library = built.library
    if library is None:
        raise RuntimeError(f"{NAME}: {built.reason}; ask supports_accumulate first")
    (m, k), n = a.shape, b.shape[0]
    step = block_columns(a.spec.granularity, b.spec.granularity, k)
    rule, inside = instruction(a.spec, b.spec, accumulator)
    numbers = (
        *(rule.group, rule.fraction_bits, rule.kept_bits, int(rule.rounding != "truncate"), rule.promotion or 0),
        *(int(inside), rule.dot, (E4M3 if a.spec.scale_format == "e4m3" else E8M0).emin),
    )
    tables = [byte_values(side.spec.format) for side in (a, b)]

    def side(x: QuantizedTensor, scale: Tensor, table: Tensor) -> tuple[int, ...]:
        rows, cols = x.spec.granularity.rows or x.shape[0], x.spec.granularity.cols or k
        fmt = x.spec.format
        strides = (*x.data.stride(), pointer(scale), *scale.stride())
        return pointer(x.data), x.shape[0], *strides, rows, cols, pointer(table), fmt.emin

    def run(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, c: Tensor | None = None) -> Tensor:
        scales = a.scale_inv, b.scale_inv
        if inside:
            (of_a, above_a), (of_b, above_b) = reference.block_scales(a), reference.block_scales(b)
            # the reference has room for every exponent, and the same bits
            if not _fits(of_a, of_b):
                return reference.gemm(a, b, out_dtype, bias, accumulator, c)
            scales, c = (of_a, of_b), None if c is None else c / above_a / above_b
        y = torch.empty(m, n, dtype=torch.float32, device="cpu")
        added = None if bias is None else bias.detach().to(torch.float32).contiguous()
        c = None if c is None else c.detach().contiguous()
        # the bits do not depend on it: one thread sums an element from first to last
        team = min(torch.get_num_threads(), max(m * n * k // _SMALLEST_SHARE, 1))
        arrays = (pointer(y), pointer(c), pointer(None if inside else added), k, k if inside else step, team)
        sides = (*side(a, scales[0], tables[0]), *side(b, scales[1], tables[1]))
        if library.ottava_accumulate(_CALL.pack(*sides, *numbers, *arrays)):
            raise RuntimeError(f"{NAME}: no memory for the operands of ({m}, {k}) x ({n}, {k})")
        if inside:
            y = y * above_a * above_b
            y = y if added is None else y + added
        return y.to(out_dtype)

    return run


def _fits(a: Tensor, b: Tensor) -> bool:
    """Whether the C++ code has room for the exponents of the scales of two operands; NaN has none."""
    ends = [scale[scale != 0].aminmax() if bool(scale.any()) else (scale.new_ones(()),) * 2 for scale in (a, b)]
    low, high = (float(one.log2() + other.log2()) for one, other in zip(*ends, strict=True))
    return low >= _SCALES[0] and high <= _SCALES[1]
