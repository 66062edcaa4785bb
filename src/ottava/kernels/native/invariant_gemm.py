"""`native_gemm` with each element of y as one sum over k in one order, whatever the other rows are and how many.

Its walk already has that order. Only how power-of-two scales enter depends on the numbers of all rows (they are folded
into exponents if the smallest product of the matrix allows it), so here they always multiply the sums of steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ottava.kernels.native import gemm as native_gemm
from ottava.numerics.tensor import QuantizedTensor

NAME = "native_gemm batch_invariant"
NATIVE = native_gemm.NATIVE
padding = native_gemm.padding


def supports_gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None) -> str | None:
    """As `native_gemm.supports_gemm`."""
    return native_gemm.supports_gemm(a, b, out_dtype, bias)


def supports_dense(a: Tensor, b: Tensor) -> str | None:
    """As `native_gemm.supports_dense`."""
    return native_gemm.supports_dense(a, b)


def plan_gemm(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False
) -> Callable[..., Tensor]:
    """As `native_gemm.plan_gemm`."""
    return native_gemm.plan_gemm(a, b, out_dtype, bias, fold=False)


def gemm(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False
) -> Tensor:
    """(M, K), (N, K) -> (M, N)."""
    return plan_gemm(a, b, out_dtype, bias)(a, b, bias)


plan_dense = native_gemm.plan_dense
"""One scale for each matrix, so nothing is folded."""


def multiply_bf16(a: Tensor, b: Tensor) -> Tensor:
    """(M, K), (N, K) in bf16 -> (M, N) in fp32."""
    one = torch.ones(1, 1)
    first, second = native_gemm.Dense(a, one), native_gemm.Dense(b, one)
    y: Tensor = native_gemm.plan_gemm(first, second, torch.float32, None)(first, second, None)
    return y
