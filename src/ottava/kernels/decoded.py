"""GEMMs that the device does not have: decodes the operands to BF16 and multiplies on BF16 tensor cores.

An A100 runs it for every recipe, a Hopper GPU for 1x32 and 1x16 blocks. It emulates FP8 at BF16's speed, and the
receipt says so. Codes have at most 4 significant bits, so BF16 holds them exactly. The scales decide:

    one scale along K           codes in BF16, fp32 sums, then the scales, the bias and one rounding: as `reference`
    powers of two, in blocks    codes times scales are exact in BF16 as well (above 2**-126)
    other scales, in blocks     BF16 rounds codes times scales first: half a BF16 ulp on each operand
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.numerics.rounding import decode
from ottava.numerics.tensor import QuantizedTensor

NAME = "decoded_bf16"
NATIVE = False

_AMPERE = (8, 0)


def supports_gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None) -> str | None:
    """Why this kernel does not take the call; None if it does."""
    if max(a.spec.format.mantissa_bits, b.spec.format.mantissa_bits) > 7:
        return f"{NAME}: {a.spec.format} x {b.spec.format} does not fit in BF16"
    if 0 in (*a.shape, *b.shape):
        return f"{NAME}: an empty operand"
    if a.device.type != "cuda":
        return f"{NAME}: runs on cuda; got {a.device.type}"
    capability = torch.cuda.get_device_capability(a.device)
    if capability < _AMPERE:
        return f"{NAME}: needs BF16 tensor cores (sm_80); this device is sm_{capability[0]}{capability[1]}"
    return None


def gemm(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False
) -> Tensor:
    """(M, K), (N, K) -> (M, N), both contracted over their last dimension. fast_accum changes nothing here."""
    # y (M, N) = a (M, K) @ b (N, K).T; with one scale along K codes are exact in BF16, whatever the scale is
    one_block = a.scale_inv.shape[1] <= 1 and b.scale_inv.shape[1] <= 1
    if one_block:
        y = _mm(*(decode(t.data, t.spec.format).to(torch.bfloat16) for t in (a, b)))
        for operand, rows_first in ((a, True), (b, False)):
            factor = operand.spec.granularity.expand(operand.scale_inv, (operand.shape[0], 1))
            y *= factor if rows_first else factor.t()
    else:
        y = _mm(a.dequantize(torch.bfloat16), b.dequantize(torch.bfloat16))
    if bias is not None:
        y += bias.to(torch.float32)
    return y.to(out_dtype)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """BF16 products, fp32 sums and result."""
    # an fp32 result of BF16 products: rounding to BF16 here would be a second one
    if a.device.type == "cuda":
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return a.float() @ b.float().t()
