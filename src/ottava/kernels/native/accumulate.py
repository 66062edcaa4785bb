"""GEMM under an `Accumulator` in C++ on a CPU: the bits of `kernels.accumulate`, see src/accumulate.cpp.

They depend neither on the number of threads nor on the instruction set.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from ottava.accumulator import Accumulator
from ottava.formats import Format
from ottava.kernels import accumulate as reference
from ottava.kernels.gate import pointer, refusal
from ottava.kernels.native import build as native_build
from ottava.kernels.reference import block_columns
from ottava.quantized_tensor import QuantizedTensor
from ottava.rounding import code_values

NAME = "native_accumulator"
NATIVE = False

_CALL = struct.Struct("=33q")  # struct Call of src/accumulate.cpp: two sides, the rule, the result, three numbers
_SMALLEST_SHARE = 1 << 22  # products that pay for waking another thread, about a millisecond
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
    rule = accumulator
    numbers = (rule.group, rule.fraction_bits, rule.kept_bits, int(rule.rounding != "truncate"), rule.promotion or 0)
    tables = [_table(side.spec.format) for side in (a, b)]

    def side(x: QuantizedTensor, table: Tensor) -> tuple[int, ...]:
        rows, cols = x.spec.granularity.rows or x.shape[0], x.spec.granularity.cols or k
        scale, fmt = x.scale_inv, x.spec.format
        strides = (*x.data.stride(), pointer(scale), *scale.stride())
        return pointer(x.data), x.shape[0], *strides, rows, cols, pointer(table), fmt.emin

    def run(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, c: Tensor | None = None) -> Tensor:
        y = torch.empty(m, n, dtype=torch.float32, device="cpu")
        bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        c = None if c is None else c.detach().contiguous()
        team = min(torch.get_num_threads(), max(m * n * k // _SMALLEST_SHARE, 1))
        arrays = (pointer(y), pointer(c), pointer(bias), k, step, team)
        if library.ottava_accumulate(_CALL.pack(*side(a, tables[0]), *side(b, tables[1]), *numbers, *arrays)):
            raise RuntimeError(f"{NAME}: no memory for the operands of ({m}, {k}) x ({n}, {k})")
        return y.to(out_dtype)

    return run


@functools.lru_cache(maxsize=16)
def _table(fmt: Format) -> Tensor:
    values = code_values(fmt)
    return torch.nn.functional.pad(values, (0, 256 - values.numel()))
