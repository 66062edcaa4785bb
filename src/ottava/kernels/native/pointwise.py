"""Work between GEMMs in one pass over memory, with torch's bits: SwiGLU in bf16, and the rotation of heads.

There are 65,536 bf16 numbers, so silu and the two factors of its gradient are tables of torch's own results. They are
used only where they give the bits of torch's kernels, which is checked when a process makes them. A rotation is two
products and a sum, each rounded to fp32.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ottava.kernels.gate import LOWEST, PLAIN, address
from ottava.kernels.native import build as native_build

NAME = "pointwise"
_GATED = struct.Struct("=8q")  # struct Gated of src/pointwise.cpp
_ROTATION = struct.Struct("=16q")  # struct Rotation
_SMALL = 1 << 14  # elements; a single thread is done with so few before others wake up
_CHECKED = 16  # gradients by which each of the 65,536 numbers is checked


def swiglu(x: Tensor) -> Tensor | None:
    """x (..., 2 F) -> silu(gate) * up (..., F), the bits of these two operations in torch; None: not for this tensor.

    It takes bf16 without gaps on a CPU, outside of autograd and of torch.compile.
    """
    library = _library(x)
    return None if library is None else _run_gated(library, x, None, (*x.shape[:-1], x.shape[-1] // 2))


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor | None:
    """dy (..., F), x (..., 2 F) -> dx (..., 2 F): as `swiglu`, for torch's gradients of both operations."""
    library = _library(dy, x)
    return None if library is None else _run_gated(library, x, dy, x.shape)


def _run_gated(library: ctypes.CDLL, x: Tensor, dy: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    tables = _silu_tables()
    if tables is None:
        return None
    out = torch.empty(shape, dtype=torch.bfloat16, device="cpu")
    width, threads = x.shape[-1] // 2, torch.get_num_threads() if x.numel() > _SMALL else 1
    addresses = address(x), 0 if dy is None else address(dy), address(out), *map(address, tables)
    library.ottava_swiglu(_GATED.pack(*addresses, x.numel() // (2 * width), width, threads))
    return out


def _library(*tensors: Tensor) -> ctypes.CDLL | None:
    """The library, if it takes these tensors of bf16."""
    x = tensors[-1]
    if torch.compiler.is_compiling() or x.numel() == 0 or x.shape[-1] % 2:
        return None
    if any(dy.shape != (*x.shape[:-1], x.shape[-1] // 2) for dy in tensors[:-1]):
        return None
    for x in tensors:
        if x.dtype != torch.bfloat16 or not _readable(x) or not x.is_contiguous():
            return None
    return native_build.load(NAME).library


def _readable(x: Tensor) -> bool:
    """Whether the numbers of x lie at its address in the memory of the CPU, and autograd does not ask for x."""
    if type(x) not in PLAIN or not x.is_cpu or (x.requires_grad and torch.is_grad_enabled()):
        return False
    try:
        return address(x) > LOWEST and not x.is_neg()
    except RuntimeError:  # torch.func has wrapped it
        return False


class _SiluTables(NamedTuple):
    values: Tensor
    """silu of each bf16 number, in the order of their bits: bf16 (65536,)."""
    slopes: Tensor
    """sigmoid(x) and 1 + x (1 - sigmoid(x)): fp32 (65536, 2). dx = dy times both, from the left."""


@functools.lru_cache(maxsize=1)
def _silu_tables() -> _SiluTables | None:
    """None if torch's kernels here give other bits than these tables."""
    bits = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16)
    x = bits.view(torch.bfloat16)
    # as torch's silu_backward computes it; the check below decides whether this build of torch does
    sigmoid = 1 / (1 + x.float().neg().exp())
    slopes = torch.stack((sigmoid, 1 + x.float() * (1 - sigmoid)), 1)
    tables = _SiluTables(F.silu(x), slopes)
    # a mantissa of bf16 has 7 bits; other exponents of dy change the exponent of dx
    mantissas = torch.linspace(1, 2 - 2**-7, _CHECKED, dtype=torch.float32, device="cpu").bfloat16()
    dy = mantissas[:, None].expand(_CHECKED, 1 << 16).contiguous()
    wanted = torch.ops.aten.silu_backward(dy, x.expand_as(dy).contiguous())
    given = (dy.float() * slopes[:, 0] * slopes[:, 1]).bfloat16()
    return tables if torch.equal(wanted.nan_to_num(0.0), given.nan_to_num(0.0)) else None


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, *, interleaved: bool = False, back: bool = False
) -> Tensor | None:
    """x (..., heads, head_dim) -> x * cos + (each pair's other entry) * sin, in fp32, then rounded to dtype.

    None: not for these tensors. It takes heads in fp32 or bf16 on a CPU whose entries lie side by side and whose tokens
    lie at equal distances.

    Args:
        cos, sin: fp32 (..., 1, dim) without gaps, for the last dimensions of the tokens; dim at most head_dim.
        interleaved: whether neighbours are a pair, else i and i + dim / 2.
        back: take sin from the other entry of the pair: the gradient of the rotation.
    """
    types = (torch.float32, torch.bfloat16)
    if torch.compiler.is_compiling() or x.dtype not in types or dtype not in types or x.dim() < 3 or x.numel() == 0:
        return None
    if not (_readable(x) and _readable(cos) and _readable(sin)) or x.stride(-1) != 1:
        return None
    tokens, heads, size = x.shape[:-2], x.shape[-2], x.shape[-1]
    angles, dim, step = cos.shape[:-2], cos.shape[-1], x.stride(-3)
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or cos.shape[-2] != 1 or sin.shape != cos.shape:
        return None
    if not (cos.is_contiguous() and sin.is_contiguous()) or tokens[len(tokens) - len(angles) :] != angles:
        return None
    # the library takes one distance between tokens: dimensions of tokens must fold into one
    expected = step
    for n, stride in zip(reversed(tokens), reversed(x.stride()[:-2]), strict=True):
        if n != 1 and stride != expected:
            return None
        expected = stride * n if n != 1 else expected
    library = native_build.load(NAME).library
    if library is None:
        return None
    y = torch.empty(x.shape, dtype=dtype, device="cpu")
    threads = torch.get_num_threads() if x.numel() > _SMALL else 1
    library.ottava_rotate_heads(
        _ROTATION.pack(
            *(address(x), x.dtype == torch.bfloat16, tokens.numel(), heads, size, step, x.stride(-2)),
            *(address(y), dtype == torch.bfloat16, address(cos), address(sin), angles.numel(), dim),
            *(interleaved, back, threads),
        )
    )
    return y
