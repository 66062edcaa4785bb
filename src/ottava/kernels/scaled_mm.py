"""torch's scaled GEMM: FP8 tensor cores on Hopper and later through cuBLASLt; the same call also runs on a CPU.

    y = (a * scale_inv_a) @ (b * scale_inv_b).T + bias           per tensor, or per row of a and of b

cuBLASLt wants K and N in multiples of 16; both are zero-padded here, which changes no sum, and the receipt says so.
torch's CPU version takes more than CUDA's does; the rules here are CUDA's on every device, so that what is refused on a
cluster is refused on a laptop.

Source: torch aten/src/ATen/native/cuda/ScaledBlas.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ottava.formats import E4M3, E5M2
from ottava.quantized_tensor import QuantizedTensor
from ottava.scaling import PER_ROW, PER_TENSOR

NAME = "scaled_mm"
NATIVE = True

_ALIGNMENT = 16
_HOPPER, _ADA = (9, 0), (8, 9)


def supports_gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None) -> str | None:
    """Why torch's scaled GEMM does not take this call; None if it does."""
    if not {a.spec.format, b.spec.format} <= {E4M3, E5M2}:
        return f"{NAME}: takes E4M3 and E5M2; got {a.spec.format} and {b.spec.format}"
    if a.spec.format == E5M2 and b.spec.format == E5M2:
        return f"{NAME}: no tensor core multiplies E5M2 by E5M2"
    known = (PER_TENSOR, PER_ROW)
    if a.spec.granularity not in known or b.spec.granularity not in known:
        return f"{NAME}: takes scales per tensor and per row; got {a.spec.granularity} and {b.spec.granularity}"
    per_row = PER_ROW in (a.spec.granularity, b.spec.granularity)
    if per_row and out_dtype != torch.bfloat16:
        return f"{NAME}: per-row scales give bfloat16 only; got {out_dtype}"
    if bias is not None and (out_dtype == torch.float32 or bias.dtype != out_dtype):
        return f"{NAME}: bias must be of the output's 16-bit dtype; got {bias.dtype} for {out_dtype}"
    if 0 in (*a.shape, *b.shape):
        return f"{NAME}: an empty operand"
    if a.device.type == "cuda":
        capability = torch.cuda.get_device_capability(a.device)
        if capability < _ADA or (per_row and capability < _HOPPER):
            return f"{NAME}: needs FP8 tensor cores; this device is sm_{capability[0]}{capability[1]}"
    elif a.device.type != "cpu":
        return f"{NAME}: runs on cuda and cpu; got {a.device.type}"
    return None


def padding(a: QuantizedTensor, b: QuantizedTensor) -> str:
    """What is zero-padded: "K 100->112" and the like."""
    sizes = (("K", a.shape[1]), ("N", b.shape[0]))
    return ", ".join(f"{name} {size}->{_aligned(size)}" for name, size in sizes if size % _ALIGNMENT)


def gemm(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False
) -> Tensor:
    """(M, K), (N, K) -> (M, N), both contracted over their last dimension."""
    n, k = b.shape
    pad_k, pad_n = _aligned(k) - k, _aligned(n) - n
    a_scale, b_scale = a.scale_inv, b.scale_inv  # (M, 1) or (1, 1); (N, 1) or (1, 1)
    if a_scale.numel() != 1 or b_scale.numel() != 1:
        a_scale, b_scale = a_scale.expand(a.shape[0], 1), b_scale.expand(n, 1)
        b_scale = nn.functional.pad(b_scale, (0, 0, 0, pad_n), value=1.0)
    if bias is not None and pad_n:
        bias = nn.functional.pad(bias, (0, pad_n))
    y = torch._scaled_mm(
        _pad(a.data, 0, pad_k),  # row-major (M, K)
        _pad(b.data, pad_n, pad_k).t(),  # column-major (K, N): the only layouts of sm_90
        scale_a=a_scale.contiguous(),
        scale_b=b_scale.t().contiguous(),
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=fast_accum,
    )
    return y[:, :n].contiguous() if pad_n else y  # the strides that ops promises to torch.compile


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _pad(codes: Tensor, rows: int, cols: int) -> Tensor:
    if rows or cols:  # as bytes: torch pads no FP8 tensor; code 0 is the number 0
        return nn.functional.pad(codes.view(torch.uint8), (0, cols, 0, rows)).view(codes.dtype)
    return codes.contiguous()
