"""The facts of one reading of a tensor, and copies of some of its rows, in C++ (src/sample.cpp), for `measure.walk`
and `measure.sample`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from ottava.kernels.gate import pointer, refusal
from ottava.kernels.native import build as native_build

NAME = "native_sample"

_ROUNDED = MappingProxyType({torch.bfloat16: 1, torch.float16: 2})  # `ottava_survey` rounds amaxes to these
_SHARED = 1 << 15  # elements; with more to copy another thread is worth waking


def not_a_matrix(x: Tensor) -> str | None:
    """Why C++ cannot read x as a matrix of numbers; None if it can."""
    if x.device.type != "cpu":
        return f"runs on a cpu; got {x.device.type}"
    if reason := refusal(x):
        return f"takes plain tensors; {reason}"
    if x.dtype not in native_build.VARIANTS or x.dim() != 2:
        return f"takes a float32, bfloat16 or float16 matrix; got {x.dtype} {tuple(x.shape)}"
    return None if x.numel() else "an empty matrix"


def supports_survey(x: Tensor) -> str | None:
    """Why this kernel does not survey a matrix; None if it does.

    Example:
        >>> supports_survey(torch.ones(2, 2, dtype=torch.float64))
        'native_sample: takes a float32, bfloat16 or float16 matrix; got torch.float64 (2, 2)'
    """
    reason = not_a_matrix(x) or native_build.load("sample", x.dtype).reason
    return f"{NAME}: {reason}" if reason else None


def survey(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The facts of one reading of x (R, C), fp64 (4,): the amax, inf or NaN if an element is; the amax of the finite
    elements; the number of non-finite elements; the number of elements. Call `supports_survey` first.

    Args:
        dtype: float32, bfloat16 or float16: survey x cast to that dtype; None: x as it is.

    Example:
        >>> x = torch.tensor([[1.0, -3.0], [float("inf"), 2.0]])
        >>> supports_survey(x) is not None or survey(x).tolist() == [float("inf"), 3.0, 1.0, 4.0]
        True
    """
    extent = torch.empty(4, dtype=torch.float64, device="cpu")
    target = x.dtype if dtype is None else dtype
    row, col = steps(x)
    if col != 1:  # the order of elements does not matter
        x, row, col = (x.t(), col, 1) if row == 1 else (x.contiguous(), x.shape[1], 1)
    library = native_build.load("sample", x.dtype).library
    assert library is not None  # supports_survey was asked
    to = _ROUNDED.get(target, 0) if target != x.dtype else 0
    finite = library.ottava_survey(pointer(x), to, *x.shape, row, pointer(extent), torch.get_num_threads())
    return extent if finite or target == x.dtype else survey(x.to(target))


def supports_take(x: Tensor) -> str | None:
    """Why this kernel copies no rows of a matrix of numbers or codes; None if it does.

    Example:
        >>> supports_take(torch.ones(4, 4, dtype=torch.int64))
        'native_sample: takes rows of float32, bfloat16, float16 or single bytes; got torch.int64 (4, 4)'
    """
    if x.device.type != "cpu":
        return f"{NAME}: runs on a cpu; got {x.device.type}"
    if reason := refusal(x):
        return f"{NAME}: takes plain tensors; {reason}"
    if (x.dtype not in native_build.VARIANTS and x.dtype.itemsize != 1) or x.dim() != 2:
        return f"{NAME}: takes rows of float32, bfloat16, float16 or single bytes; got {x.dtype} {tuple(x.shape)}"
    if steps(x) == (0, 0):
        return f"{NAME}: takes a matrix in rows or columns; got strides {x.stride()}"
    if reason := native_build.load("sample", _holds(x)).reason:
        return f"{NAME}: {reason}"
    return None


def _holds(x: Tensor) -> torch.dtype:
    """The dtype of the library that copies x; each library copies bytes."""
    return torch.bfloat16 if x.dtype.itemsize == 1 else x.dtype


def take(x: Tensor, bands: Sequence[range], squares: Tensor | None = None) -> Tensor:
    """Copies some rows of x (R, C) into a new matrix; call `supports_take` first.

    Args:
        bands: the rows; all rows of a range with a step lie in one band of 128.
        squares: fp32 (bands, ceil(C / 128)); it receives the largest finite magnitudes of the 128x128 blocks around
            each range, over all rows of the blocks.

    Example:
        >>> x = torch.arange(6.0).reshape(3, 2)
        >>> supports_take(x) is not None or take(x, [range(0, 3, 2)]).tolist() == [[0.0, 1.0], [4.0, 5.0]]
        True
    """
    rows, cols = x.shape
    taken = torch.empty(sum(map(len, bands)), cols, dtype=x.dtype, device="cpu")
    library = native_build.load("sample", _holds(x)).library
    assert library is not None  # supports_take was asked
    numbers = (ctypes.c_int64 * (3 * len(bands)))(*(n for band in bands for n in (band.start, band.stop, band.step)))
    threads = torch.get_num_threads() if taken.numel() >= _SHARED else 1
    from_to = *steps(x), rows, cols, numbers, len(bands), pointer(taken)
    library.ottava_take(pointer(x), x.element_size(), *from_to, pointer(squares), threads)
    return taken


def steps(x: Tensor) -> tuple[int, int]:
    """Elements from row to row and from column to column, one of them 1; (0, 0) if neither is."""
    (row, col), (rows, cols) = x.stride(), x.shape
    if col == 1 or cols == 1:
        return (row if rows > 1 else cols), 1
    if row == 1 or rows == 1:
        return 1, col
    return 0, 0
