"""GEMMs on codes with two levels of scales, on a CPU: C++ decodes the operands, torch multiplies them in fp32.

The bits are the reference's, which decodes with a table of torch: that takes longer than the products do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.kernels.gate import refusal
from ottava.kernels.native import quantize as native_quantize
from ottava.numerics.tensor import QuantizedTensor

NAME = "native_decoded"
NATIVE = False


def supports_gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None) -> str | None:
    """Why this kernel does not take the call; None if it does.

    Example:
        >>> import ottava
        >>> a = ottava.quantize(torch.ones(2, 2), ottava.QuantizationSpec(ottava.E4M3))
        >>> supports_gemm(a, a, torch.bfloat16, None)
        'native_decoded: scales on two levels; got fp32 and fp32'
    """
    kinds = {a.spec.scale_format, b.spec.scale_format}
    if "e4m3" not in kinds or "fp32" in kinds:
        return f"{NAME}: scales on two levels; got {a.spec.scale_format} and {b.spec.scale_format}"
    if 0 in (*a.shape, *b.shape):
        return f"{NAME}: an empty operand"
    if max(a.scale_inv.shape[1], b.scale_inv.shape[1]) <= 1:
        return f"{NAME}: scales change along k; got one scale for each row"
    if reason := refusal(a.scale_inv, b.scale_inv):
        return f"{NAME}: takes plain tensors; {reason}"
    for operand in (a, b):
        if operand.scale_inv.dtype != torch.float32:
            return f"{NAME}: takes scales in fp32; got {operand.scale_inv.dtype}"
        if reason := native_quantize.supports_decode(operand.data, operand.spec.format):
            return f"{NAME}: {reason}"
    return None


def padding(a: QuantizedTensor, b: QuantizedTensor) -> str:
    """Pads nothing: ragged blocks are sliced."""
    return ""


def gemm(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False
) -> Tensor:
    """(M, K), (N, K) -> (M, N), both contracted over their last dimension. fast_accum changes nothing here."""
    y = native_quantize.dequantize(a, torch.float32) @ native_quantize.dequantize(b, torch.float32).t()
    if bias is not None:
        y += bias.to(torch.float32)
    return y.to(out_dtype)
