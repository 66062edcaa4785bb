"""Sums about a cast in C++ (`native_measure.cpp`), for `debug.measure`: one walk, every histogram included.

What is summed is told to the library by name and place; this file knows neither tallies nor statistics.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.kernels.native_build import Built, load
from ottava.quantized_tensor import QuantizedTensor

NAME = "native_measure"

FIELDS = (
    *("n", "n_nonzero", "n_underflow", "n_subnormal", "n_overflow", "n_rows"),
    *("sx", "sabs", "sxx", "sx4", "see", "sxe", "srel", "exponents", "row_sqnr", "block_spread"),
    *("below_row", "energy_below_row", "below_1x128", "energy_below_1x128"),
    *("below_1x32", "energy_below_1x32", "below_128x128", "energy_below_128x128"),
    *("n_scales", "scale_log2", "scale_log2_squared"),
)
"""What is summed, in the order of the C++ file's `Field`."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_POINTERS, _SIZES, _INTS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Extremes(NamedTuple):
    """What is merged by the smallest and the largest."""

    amin: float
    """Smallest magnitude that is not 0; inf if there is none."""
    max_error: float
    """Largest |x - q|."""
    scale_max: float
    """Largest scale; 0 if there is none."""
    scale_min: float
    """Smallest scale; inf if there is none."""


class _Job(ctypes.Structure):
    """The C++ file's `Job`."""

    _fields_ = (
        *((name, _POINTERS) for name in ("x", "codes", "scale_inv")),
        *((name, _SIZES) for name in ("rows", "cols", "x_row", "x_col", "code_row", "code_col")),
        *((name, _SIZES) for name in ("block_rows", "block_cols", "grid_cols", "scale_count")),
        *((name, _INTS) for name in ("dtype", "mantissa_bits", "bias", "bits", "special_code", "fine", "tie_clips")),
        ("threads", _INTS),
        ("amax", ctypes.c_float),
        ("clip", ctypes.c_double),
        ("places", _POINTERS),
        ("width", _SIZES),
        ("sums", _POINTERS),
        ("extremes", _POINTERS),
    )


def built() -> Built:
    """The library, or why there is none."""
    return load("native_measure", _declare)


def _declare(library: ctypes.CDLL) -> None:
    library.ottava_measure.argtypes = [ctypes.POINTER(_Job)]
    library.ottava_measure.restype = ctypes.c_int


def supports_measure(x: Tensor, x_q: QuantizedTensor) -> str | None:
    """Why this kernel does not measure such a cast; None if it does.

    Example:
        >>> import ottava
        >>> x = torch.ones(2, 2)
        >>> supports_measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.formats.BF16)))
        'native_measure: takes signed formats of at most 8 bits; got BF16'
    """
    fmt = x_q.spec.format
    if x.device.type != "cpu" or x_q.device.type != "cpu":
        return f"{NAME}: runs on a cpu; got {x.device.type}"
    if any(type(t) not in (Tensor, torch.nn.Parameter) for t in (x, x_q.data, x_q.scale_inv)):
        return f"{NAME}: takes plain tensors"
    if fmt.bits > 8 or not fmt.signed or not fmt.has_zero:
        return f"{NAME}: takes signed formats of at most 8 bits; got {fmt}"
    if x.dtype not in _DTYPES or x.dim() != 2 or x.shape != x_q.shape:
        return f"{NAME}: takes a float32, bfloat16 or float16 matrix and its codes; got {x.dtype} {tuple(x.shape)}"
    if not x.numel():
        return f"{NAME}: an empty matrix"
    if reason := built().reason:
        return f"{NAME}: {reason}"
    return None


def measure(
    x: Tensor,
    x_q: QuantizedTensor,
    amax: float,
    clip: float,
    tie_clips: bool,
    places: Mapping[str, int],
    width: int,
    *,
    fine: bool,
) -> tuple[Tensor, Extremes]:
    """Sums over the finite elements of x (R, C); call `supports_measure` first.

    Args:
        amax: largest finite magnitude of the tensor that x is part of.
        clip: end of the format's rounding range; tie_clips: whether a number right there is clipped.
        places: where each of FIELDS begins in the vector of sums.
        width: length of that vector.
        fine: also fill the histograms of elements below the amax of their block.
    Returns:
        (fp64 (width,), 0 where no field lies; the extremes). The bits do not depend on the number of threads.
    """
    fmt = x_q.spec.format
    rows, cols = x.shape
    sums = torch.zeros(width, dtype=torch.float64)
    extremes = torch.empty(4, dtype=torch.float64)
    x, codes, scale_inv = _strided(x), _strided(x_q.data.view(torch.uint8)), x_q.scale_inv.contiguous()
    starts = (_SIZES * len(FIELDS))(*(places[name] for name in FIELDS))
    block_rows, block_cols = x_q.spec.granularity.block_shape((rows, cols))
    largest = (fmt.max / 2.0**fmt.emax - 1) * 2**fmt.mantissa_bits + (fmt.emax + fmt.bias) * 2**fmt.mantissa_bits
    job = _Job(
        *(x.data_ptr(), codes.data_ptr(), scale_inv.data_ptr()),
        *(rows, cols, *_steps(x), *_steps(codes)),
        *(block_rows, block_cols, scale_inv.shape[1], scale_inv.numel()),
        *(_DTYPES.index(x.dtype), fmt.mantissa_bits, fmt.bias, fmt.bits, int(largest) + 1 if fmt.has_nan else -1),
        *(int(fine), int(tie_clips), torch.get_num_threads(), amax, clip),
        *(ctypes.cast(starts, _POINTERS), width, sums.data_ptr(), extremes.data_ptr()),
    )
    library = built().library
    assert library is not None  # supports_measure was asked
    if library.ottava_measure(ctypes.byref(job)):
        raise MemoryError(f"measure: no memory for the sums of {rows} x {cols} elements")
    return sums, Extremes(*extremes.tolist())


def _strided(x: Tensor) -> Tensor:
    """x, or a copy of it where neither its rows nor its columns are contiguous."""
    return x if _steps(x) != (0, 0) else x.contiguous()


def _steps(x: Tensor) -> tuple[int, int]:
    """Elements from row to row and from column to column, one of them 1; (0, 0) if neither is."""
    (row, col), (rows, cols) = x.stride(), x.shape
    if col == 1 or cols == 1:
        return (row if rows > 1 else cols), 1
    if row == 1 or rows == 1:
        return 1, col
    return 0, 0
