"""Hadamard transforms on a CPU in C++ (src/rotate.cpp): the bits of `transforms.Hadamard`, of rows or of columns."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from ottava.kernels.gate import address, refusal
from ottava.kernels.native import quantize as native_quantize
from ottava.kernels.native.build import Built, load
from ottava.numerics.transforms import Hadamard, Transform

NAME = "native_rotate"

_PIECE = 64  # signs that are drawn at once
_JOB = struct.Struct("@PPPqqqqqqqqqd")
"""The C++ file's `Job`."""


def built(dtype: torch.dtype = torch.bfloat16) -> Built:
    """The library that turns matrices of a dtype, or why there is none."""
    return load("rotate", _declare, native_quantize.VARIANTS.get(dtype, ""))


def _declare(library: ctypes.CDLL) -> None:
    library.ottava_rotate.restype = ctypes.c_int
    library.ottava_rotate.argtypes = [ctypes.c_char_p]


def supports_transform(x: Tensor, transform: Transform) -> str | None:
    """Why this kernel does not transform x; None if it does.

    Example:
        >>> supports_transform(torch.ones(2, 2, dtype=torch.float64), Hadamard())
        'native_rotate: turns float32, bfloat16 and float16; got torch.float64'
    """
    if not isinstance(transform, Hadamard):
        return f"{NAME}: rotates; got {transform.kind}"
    if not x.is_cpu:
        return f"{NAME}: runs on a cpu; got {x.device.type}"
    if x.dtype not in native_quantize.VARIANTS:
        return f"{NAME}: turns float32, bfloat16 and float16; got {x.dtype}"
    if x.dim() != 2 or not x.numel():
        return f"{NAME}: turns a matrix with elements; got {tuple(x.shape)}"
    if reason := refusal(x):
        return f"{NAME}: takes plain tensors; {reason}"
    if reason := built(x.dtype).reason:
        return f"{NAME}: {reason}"
    return None


def plan_transform(x: Tensor, transform: Transform) -> Callable[[Tensor, Tensor | None], Tensor]:
    """`transform.apply` for every matrix of the dtype and shape of x; call `supports_transform` first.

    Example:
        >>> x = torch.randn(3, 40)
        >>> reason, turn = supports_transform(x, Hadamard()), Hadamard().apply
        >>> reason is not None or plan_transform(x, Hadamard())(x, None).equal(turn(x, None))
        True
    """
    assert isinstance(transform, Hadamard)  # supports_transform was asked
    (rows, cols), size = x.shape, transform.size
    dtype = torch.bfloat16 if transform.narrows(x.dtype) else torch.float32
    out_shape = rows, -(-cols // size) * size
    library = built(x.dtype).library
    assert library is not None  # and it was built

    def run(x: Tensor, aside: Tensor | None) -> Tensor:
        drawn, out = aside is not None, torch.empty(out_shape, dtype=dtype, device="cpu")
        padded = -(-size // _PIECE) * _PIECE
        signs = torch.empty(padded, dtype=torch.float64, device="cpu") if drawn else transform.diagonal(None, x.device)
        job = _JOB.pack(
            *map(address, (x, signs, out)),
            *(rows, cols, *x.stride(), size, dtype == torch.bfloat16, torch.get_num_threads()),
            *(drawn, 0 if aside is None else int(aside), transform.factor),
        )
        if library.ottava_rotate(job):
            raise MemoryError(f"hadamard: no memory for groups of {size}")
        return out

    return run
