"""Rows that a norm or an activation makes on an NVIDIA GPU, inside the kernel that casts them.

A norm's statistics are one launch that reads x. A cast makes a tile of the rows whenever it reads one (`quantize`), so
the rows never lie in memory. Who asks for them all the same (a watch, a cell in high precision) gets the same numbers.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ottava.kernels.gate import launched, refusal
from ottava.kernels.triton.quantize import NAME, UnmadeRows, refuse_device

MADE = ("rmsnorm", "layernorm", "silu", "gelu", "gelu_tanh", "relu", "relu2")
"""What the device code knows."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = MappingProxyType({"TR": 64, "TC": 128})


def make_rows(unmade: UnmadeRows) -> Tensor:
    """The rows themselves (M, K), the numbers that a cast of `unmade` casts."""
    x, (m, k) = unmade.x, unmade.shape
    y = x.new_empty(m, k, dtype=unmade.dtype)
    launched(x, unmade.statistics, unmade.gamma, unmade.beta)
    sizes = {"rows": m, "cols": k, "stride_r": x.stride(0), "stride_c": x.stride(1)}
    grid = (-(-m // _TILE["TR"]) * -(-k // _TILE["TC"]),)
    with torch.cuda.device_of(x):
        _device_code().rows_kernel[grid](x, y, **sizes, **unmade.arguments, **_TILE, num_warps=8)
    return y


def supports_rows(make: str, x: Tensor, dtype: torch.dtype, *parameters: Tensor | None) -> str | None:
    """Why no kernel here makes such rows of x (M, K), in that dtype; None if one does.

    Example:
        >>> supports_rows("silu", torch.ones(2, 2), torch.bfloat16)
        'triton: runs on cuda; got cpu'
    """
    if make not in MADE:
        return f"{NAME}: makes {', '.join(MADE)}; got {make}"
    if x.device.type != "cuda":
        return f"{NAME}: runs on cuda; got {x.device.type}"
    if x.dtype not in _DTYPES or dtype not in (x.dtype, *_DTYPES[1:]):
        return f"{NAME}: makes rows of float32, bfloat16 or float16, and none wider than x; got {x.dtype} to {dtype}"
    if x.numel() == 0 or x.stride(-1) != 1:
        return f"{NAME}: makes rows of numbers that lie one after the other; got {tuple(x.shape)}, strides {x.stride()}"
    if reason := refusal(x, *(t for t in parameters if t is not None)):
        return f"{NAME}: takes plain tensors; {reason}"
    if torch.version.hip is not None:
        return f"{NAME}: makes rows on NVIDIA GPUs, whose library has its exp, erf and tanh"
    return refuse_device(x.device)


def normed(
    make: str,
    x: Tensor,
    dtype: torch.dtype,
    gamma: Tensor | None,
    beta: Tensor | None,
    *,
    eps: float,
    zero_centered: bool,
) -> UnmadeRows:
    """The rows of a norm, of which the statistics are made now; x (M, K) is one that `supports_rows` takes."""
    m, k = x.shape
    statistics = x.new_empty(2, m, dtype=torch.float32)
    launched(x, gamma, beta)
    with torch.cuda.device_of(x):
        kernel = _device_code().row_statistics_kernel[(m,)]
        kernel(x, statistics, m, k, x.stride(0), eps, MAKE=make, TC=1024, num_warps=4)
    return UnmadeRows(make, x, dtype, False, statistics, gamma, beta, zero_centered)


def _device_code() -> Any:
    return importlib.import_module("ottava.kernels.triton.rows_device_code")
