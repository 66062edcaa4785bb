"""Rows that a norm or an activation makes on an NVIDIA GPU, inside the kernel that casts them; and an activation's dx.

A norm's statistics are one launch that reads x. A cast makes a tile of the rows whenever it reads one (`quantize`), so
the rows never lie in memory. Who asks for them all the same (a watch, a cell in high precision) gets the same numbers.
"""

from __future__ import annotations

import functools
import importlib
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ottava.kernels.gate import launched, refusal
from ottava.kernels.triton.launch import Launch, Named
from ottava.kernels.triton.quantize import FUSED, NAME, UnmadeRows, filling, refuse_device

MADE = ("rmsnorm", "layernorm", "silu", "gelu", "gelu_tanh", "relu", "relu2")
"""What the device code knows."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST_NORM = 16_384
TILE = MappingProxyType({"TR": 64, "TC": 128, "num_warps": 8, **FUSED})
STATISTICS = MappingProxyType({"TC": 1024, "num_warps": 4, **FUSED})


def make_rows(unmade: UnmadeRows) -> Tensor:
    """The rows themselves (M, K), the numbers that a cast of `unmade` casts."""
    x, (m, k) = unmade.x, unmade.shape
    y = x.new_empty(m, k, dtype=unmade.dtype)
    if unmade.is_gradient and unmade.gated:
        assert unmade.beside is not None
        sizes = m, k // 2, x.stride(0)
        _gate_gradient(_device_code(), sizes, unmade.make)((x, y, unmade.beside))
        return y
    programs = -(-m // TILE["TR"]) * -(-k // TILE["TC"])
    named = ("rows", m), ("cols", k), ("stride_r", x.stride(0)), ("stride_c", x.stride(1))
    _rows(_device_code(), programs, (*named, *unmade.named))((x, y), unmade.extra)
    return y


def supports_rows(make: str, x: Tensor, dtype: torch.dtype, *parameters: Tensor | None) -> str | None:
    """Why no kernel here makes such rows of x (M, K), in that dtype; None if one does."""
    if make not in MADE:
        return f"{NAME}: makes {', '.join(MADE)}; got {make}"
    if x.device.type != "cuda":
        return f"{NAME}: runs on cuda; got {x.device.type}"
    # wider rows than x would hold digits that torch has rounded away
    if x.dtype not in _DTYPES or dtype not in (x.dtype, *_DTYPES[1:]):
        return f"{NAME}: makes rows of float32, bfloat16 or float16, and none wider than x; got {x.dtype} to {dtype}"
    if x.numel() == 0 or x.stride(-1) != 1:
        return f"{NAME}: makes rows of numbers that lie one after the other; got {tuple(x.shape)}, strides {x.stride()}"
    if torch.version.hip is not None:
        return f"{NAME}: makes rows on NVIDIA GPUs, whose library has its exp, erf and tanh"
    return refuse_device(x.device, x, *(t for t in parameters if t is not None))


def supports_gradient(make: str, dy: Tensor, x: Tensor, *, gated: bool) -> str | None:
    """Why no kernel here makes dx (M, features of x) of an activation's dy (M, features) and x; None if one does."""
    if reason := supports_rows(make, x, x.dtype):
        return reason
    if dy.dtype not in _DTYPES or not dy.is_contiguous() or (reason := refusal(dy)):
        return f"{NAME}: reads gradients that lie row by row; got {tuple(dy.shape)} {dy.dtype}, strides {dy.stride()}"
    if gated and dy.shape[1] % 16:
        return f"{NAME}: makes gradients of gates of a multiple of 16 features; got {dy.shape[1]}"
    return None


class UnmadeGradient(Tensor):
    """A gradient that autograd hands from one layer to the other before its numbers are made.

    The layer that gets it casts it as a kernel makes it. Any other operation on it, a hook's for one, makes it first.
    """

    rows: UnmadeRows

    @staticmethod
    def __new__(cls: type[UnmadeGradient], rows: UnmadeRows, shape: tuple[int, ...]) -> UnmadeGradient:
        """shape: that of the rows, or with their first dimension as several."""
        gradient: UnmadeGradient = Tensor._make_wrapper_subclass(cls, shape, dtype=rows.dtype, device=rows.device)
        gradient.rows = rows
        return gradient

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls a classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # a layer with an input of three dimensions puts one view between itself and its linear; others make the numbers
        if func is torch.ops.aten.view.default and args[1] and args[1][-1] == args[0].shape[-1]:
            shape = tuple(args[1])
            if -1 not in shape:
                return cls(args[0].rows, shape)
        return func(*tree_map_only(cls, cls.made, args), **tree_map_only(cls, cls.made, kwargs or {}))

    def made(self) -> Tensor:
        """Its numbers, in its shape."""
        return make_rows(self.rows).view(self.shape)

    def taken(self) -> UnmadeRows:
        """What a cast makes it of; for use on the current stream."""
        # the cast may run on another stream than the operation that freed these: the allocator must not hand them out
        # meanwhile
        for read in (self.rows.x, self.rows.beside):
            if read is not None and read.is_cuda:
                read.record_stream(torch.cuda.current_stream(read.device))
        return self.rows


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
    """The rows of a norm; computes their statistics now. `supports_rows` must take x (M, K)."""
    m, k = x.shape
    statistics = x.new_empty(2, m, dtype=torch.float32)
    launched(x, gamma, beta)
    _statistics(_device_code(), (m, k, x.stride(0)), eps, make)((x, statistics))
    return UnmadeRows(make, x, dtype, False, statistics, gamma, beta, zero_centered)


@functools.lru_cache(maxsize=256)
def _rows(device_code: Any, programs: int, named: Named) -> Launch:
    return Launch(device_code.rows_kernel, programs, (), (), TILE, named)


@functools.lru_cache(maxsize=256)
def _statistics(device_code: Any, sizes: tuple[int, ...], eps: float, make: str) -> Launch:
    return Launch(device_code.row_statistics_kernel, sizes[0], sizes, (eps,), STATISTICS, (("MAKE", make),))


@functools.lru_cache(maxsize=256)
def _gate_gradient(device_code: Any, sizes: tuple[int, ...], make: str) -> Launch:
    programs = -(-sizes[0] // TILE["TR"]) * -(-sizes[1] // TILE["TC"])
    return Launch(device_code.gate_gradient_kernel, programs, sizes, (), TILE, (("MAKE", make),))


def supports_norm(x: Tensor, *others: Tensor | None) -> str | None:
    """Why no kernel here runs a norm alone, forward or backward, on x (..., K) and these; None if one does."""
    if x.device.type != "cuda":
        return f"{NAME}: runs on cuda; got {x.device.type}"
    if torch.compiler.is_compiling():
        return f"{NAME}: norms of compiled code are Inductor's"
    given = [t for t in others if t is not None]
    if any(t.dtype not in _DTYPES for t in (x, *given)) or x.shape[-1] > _WIDEST_NORM:
        return (
            f"{NAME}: norms up to {_WIDEST_NORM} numbers of float32, bfloat16 or float16; got {x.dtype} {x.shape[-1]}"
        )
    if x.numel() == 0 or not all(t.is_contiguous() for t in (x, *given)):
        return f"{NAME}: norms rows that lie one after the other; got {tuple(x.shape)}, strides {x.stride()}"
    return refuse_device(x.device, x, *given)


def norm(
    make: str, x: Tensor, gamma: Tensor | None, beta: Tensor | None, *, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """(y like x, statistics (2, rows): mean, which "rmsnorm" leaves unset, and rstd); `supports_norm` must take x."""
    cols = x.shape[-1]
    rows = x.numel() // cols
    y, statistics = torch.empty_like(x), x.new_empty(2, rows, dtype=torch.float32)
    launched(x, gamma, beta)
    with torch.cuda.device_of(x):
        kernel = _device_code().norm_kernel[(rows,)]
        kernel(x, y, statistics, gamma, beta, rows, cols, cols, eps, CENTERED=zero_centered, **norm_launch(make, cols))
    return y, statistics


def norm_gradient(
    make: str, dy: Tensor, x: Tensor, statistics: Tensor, gamma: Tensor | None, *, beta: bool, zero_centered: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx like x, d_gamma and d_beta (K,) in fp32) of `norm`, reading x and dy once; beta: whether d_beta is wanted."""
    cols = x.shape[-1]
    rows = x.numel() // cols
    programs = min(rows, filling(x.device))
    dx = torch.empty_like(x)
    d_gamma = None if gamma is None else x.new_empty(programs, cols, dtype=torch.float32)
    d_beta = x.new_empty(programs, cols, dtype=torch.float32) if beta else None
    launched(x, dy, statistics, gamma)
    with torch.cuda.device_of(x):
        kernel = _device_code().norm_gradient_kernel[(programs,)]
        sizes = (rows, cols, cols)
        settings = {"CENTERED": zero_centered, **norm_launch(make, cols)}
        kernel(x, dy, dx, statistics, gamma, d_gamma, d_beta, *sizes, **settings)
    return dx, None if d_gamma is None else d_gamma.sum(0), None if d_beta is None else d_beta.sum(0)


def norm_launch(make: str, cols: int) -> dict[str, Any]:
    """The compile-time parameters of `norm_kernel` and its gradient: a row in registers, 32 numbers a thread."""
    wide = max(1 << (cols - 1).bit_length(), 128)
    return {"MAKE": make, "TC": wide, "num_warps": max(wide // 1024, 1), **FUSED}


def _device_code() -> Any:
    return importlib.import_module("ottava.kernels.triton.rows_device_code")
