"""Operands of a GEMM and the types of fixtures, for all kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ottava.kernels import reference
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.quantize import quantize

Pair = tuple[QuantizationSpec, QuantizationSpec]
Float64Gemm = Callable[[QuantizedTensor, QuantizedTensor, Tensor | None], tuple[Tensor, Tensor]]


def cast(x: Tensor, spec: QuantizationSpec) -> QuantizedTensor:
    """By the reference."""
    data, scale_inv, _ = reference.quantize(x, spec)
    return QuantizedTensor(data, scale_inv, spec, x.dtype)


def quantized(x: Tensor, spec: QuantizationSpec) -> QuantizedTensor:
    """By the kernel that takes it; stochastic rounding always draws the same."""
    torch.manual_seed(1)
    return quantize(x, spec)


def raw(x_q: QuantizedTensor) -> Tensor:
    """The codes as bytes, contiguous."""
    return x_q.data.contiguous().view(torch.uint8)
