"""Operands of a GEMM and the types of fixtures, for all kernels."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ottava.kernels import reference
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor

Pair = tuple[QuantizationSpec, QuantizationSpec]
Float64Gemm = Callable[[QuantizedTensor, QuantizedTensor, Tensor | None], tuple[Tensor, Tensor]]


def cast(x: Tensor, spec: QuantizationSpec) -> QuantizedTensor:
    """By the reference."""
    data, scale_inv, _ = reference.quantize(x, spec)
    return QuantizedTensor(data, scale_inv, spec, x.dtype)
