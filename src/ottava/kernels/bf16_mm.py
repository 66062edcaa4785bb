"""torch's BF16 GEMM on codes, for CPUs with BF16 units: the fast path without a compiler.

    y = round_once(alpha * sum_k (qa * 2**i) * (qb * 2**j) + bias)

Codes of E4M3 and E5M2 are exact in bf16 and their products exact in fp32; a power-of-two scale moves the exponent of a
bf16 number and changes nothing else. oneDNN sums in fp32, applies alpha and bias to the sum and rounds once. So the
result is the reference's, up to the order of the sum. The kernel refuses CPUs without BF16 units, on which oneDNN takes
other and slower ways. With an arbitrary scale in the bf16 operands half of the outputs would be wrong.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ottava.kernels import reference
from ottava.kernels.gate import refusal
from ottava.numerics.formats import E4M3, E5M2, Format
from ottava.numerics.scaling import PER_TENSOR
from ottava.numerics.tensor import QuantizedTensor

NAME = "bf16_mm"
NATIVE = False

# |code| of both formats lies in 2**-16 ... 2**16: with these bounds neither a scaled operand nor a product of two
# leaves the normal numbers, below which BF16 units flush to zero; and no sum that fits in memory overflows
_SCALE_RANGE = (2.0**-47, 2.0**47)
_TILE = 32  # numbers of a row in a tile of AMX
_TINY, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def supports_gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None) -> str | None:
    """Why torch's BF16 GEMM does not take this call; None if it does. Reads the scales that it would fold."""
    if a.device.type != "cpu" or b.device.type != "cpu":
        return f"{NAME}: runs on cpu; got {a.device.type} and {b.device.type}"
    if reason := refusal(a.data) or refusal(b.data):
        return f"{NAME}: reads its operands; {reason}"
    if not {a.spec.format, b.spec.format} <= {E4M3, E5M2}:
        return f"{NAME}: takes E4M3 and E5M2; got {a.spec.format} and {b.spec.format}"
    if out_dtype != torch.bfloat16:
        return f"{NAME}: torch's BF16 GEMM gives bfloat16 only; got {out_dtype}"
    if bias is not None and bias.dtype != torch.bfloat16:
        return f"{NAME}: adds a bfloat16 bias only; got {bias.dtype}"
    if 0 in (*a.shape, *b.shape):
        return f"{NAME}: an empty operand"
    if not _has_bf16_units():
        return f"{NAME}: this CPU multiplies BF16 no faster than fp32 (no AVX512-BF16, no AMX)"
    if a.shape[1] % _TILE and _has_tiles():
        return f"{NAME}: on AMX oneDNN reads past rows of {a.shape[1]} numbers, and a NaN reaches the row before"
    for x in (a, b):
        if x.spec.granularity == PER_TENSOR:
            continue
        if x.spec.scale_format in ("fp32", "e4m3"):
            return f"{NAME}: folds powers of two only; got {x.spec} scales"
        low, high = torch.aminmax(x.scale_inv)
        if not (_SCALE_RANGE[0] <= float(low) and float(high) <= _SCALE_RANGE[1]):
            return f"{NAME}: scales from {float(low):.1e} to {float(high):.1e} leave BF16's range"
    return None


def reads_scales(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether `supports_gemm` depends on the numbers among the scales of such operands."""
    sides = a.spec, b.spec
    if not {side.format for side in sides} <= {E4M3, E5M2} or not _has_bf16_units():
        return False
    return any(side.granularity != PER_TENSOR and side.scale_format not in ("fp32", "e4m3") for side in sides)


def gemm(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False
) -> Tensor:
    """(M, K), (N, K) -> (M, N), both contracted over their last dimension. fast_accum changes nothing here."""
    # a scale of a whole tensor goes into alpha, which oneDNN multiplies the fp32 sum by; one of a row or block moves
    # exponents of the operand
    alpha, operands = 1.0, []
    for x in (a, b):
        numbers = decode(x.data, x.spec.format)
        if x.spec.granularity == PER_TENSOR:
            alpha *= float(x.scale_inv)
        else:
            x.spec.granularity.multiply_(numbers, x.scale_inv.to(torch.bfloat16))
        operands.append(numbers)
    # the reference multiplies by a's scale first: what it has then must be a normal number, too
    first = float(a.scale_inv) if a.spec.granularity == PER_TENSOR else 1.0
    largest = a.shape[1] * a.spec.format.max * b.spec.format.max
    if not (_TINY <= alpha <= _LARGEST and _TINY * 2.0**32 <= first <= _LARGEST / largest):
        return reference.gemm(a, b, out_dtype, bias)
    if bias is None:
        # addmm with beta 0 never reads it: mm has no alpha
        nothing = operands[0].new_zeros(1).expand(a.shape[0], b.shape[0])
        return torch.addmm(nothing, operands[0], operands[1].t(), beta=0, alpha=alpha)
    return torch.addmm(bias, operands[0], operands[1].t(), alpha=alpha)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Codes of E4M3 or E5M2 as bf16, exactly, in the layout of the codes.

    Example:
        >>> decode(torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn), E4M3)
        tensor([   0.5000, -448.0000], dtype=torch.bfloat16)
    """
    bits = codes.view(torch.int8).to(torch.int16)
    bits <<= 7 - fmt.mantissa_bits  # mantissa and exponent to the low end of bf16's fields, the sign to bit 15
    bits &= ~(0x7FFF & ~((1 << (7 + fmt.exponent_bits)) - 1))  # clears the sign extension in the upper exponent bits
    y = bits.view(torch.bfloat16).mul_(2.0 ** (127 - fmt.bias))  # exact, subnormals too
    low, high = torch.aminmax(y) if y.numel() else (y.new_zeros(()), y.new_zeros(()))
    if max(-float(low), float(high)) > fmt.max:  # these numbers stand for the codes of infinity and NaN
        above = y.abs() > fmt.max
        y[above] = codes[above].to(torch.bfloat16) if fmt == E5M2 else math.nan
    return y


def _has_bf16_units() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported()) or _has_tiles()


def _has_tiles() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())
