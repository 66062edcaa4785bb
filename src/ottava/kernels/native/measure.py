"""Sums about casts in C++ (src/measure.cpp), for `measure.walk`: one walk, with the requested histograms, and with the
casts themselves if the caller has none.

The caller gives the library the name and place of each sum, and the library names the sums that it computes. This file
knows neither tallies nor statistics.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.base.errors import refuse_other_sums
from ottava.kernels.gate import pointer, refusal
from ottava.kernels.native import build as native_build
from ottava.kernels.native import quantize as native_quantize
from ottava.numerics.scaling import PER_TENSOR
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor

NAME = "native_measure"

_POINTERS, _SIZES, _INTS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Look(NamedTuple):
    """A cast for `measure`."""

    x: Tensor
    """(R, C) before the cast: a sample of rows, or all of them."""
    cast: QuantizedTensor | QuantizationSpec
    """The same rows after the cast; or the spec, if `measure` casts them."""
    extent: Tensor
    """Of the whole tensor, see `native.sample.survey`."""
    scale: Tensor | None = None
    """The scale if `measure` casts, fp32, one entry; None: the current one, see `by_whole`."""
    squares: Tensor | None = None
    """Of a sample: fp32, the largest finite magnitudes of the 128x128 blocks around its rows; None: x has all rows of
    each block."""
    square_rows: int = 128
    """Rows of x from each block but the last."""

    @property
    def by_whole(self) -> bool:
        """Whether `measure` casts with the scale of the whole tensor; a guard compares with the amax of the sample."""
        spec = spec_of(self)
        return self.scale is None and spec.granularity == PER_TENSOR and spec.scaling != "guarded"


class _Job(ctypes.Structure):
    """`Job` in src/numbers.h."""

    _fields_ = (
        *((name, _POINTERS) for name in ("x", "codes", "scale_inv", "cast", "given", "extent")),
        *((name, _SIZES) for name in ("rows", "cols", "x_row", "x_col", "code_row", "code_col")),
        *((name, _SIZES) for name in ("block_rows", "block_cols", "grid_cols", "scale_count")),
        *((name, _INTS) for name in ("mantissa_bits", "bias", "bits", "special_code", "detail", "tie_clips")),
        *((name, _INTS) for name in ("predicted", "by_whole")),
        ("clip", ctypes.c_double),
        ("squares", _POINTERS),
        ("square_rows", _SIZES),
        ("sums", _POINTERS),
        ("extremes", _POINTERS),
    )


class _Library(ctypes.Structure):
    """`Library` in src/measure.h."""

    _fields_ = (("quantize", _POINTERS), ("scales", _POINTERS), ("places", _POINTERS), ("width", _SIZES))


def supports_measure(x: Tensor, cast: QuantizedTensor | QuantizationSpec) -> str | None:
    """Why this kernel does not measure such a cast, made or to be made; None if it does."""
    spec = cast if isinstance(cast, QuantizationSpec) else cast.spec
    if spec.format.bits > 8 or not spec.format.signed:
        return f"{NAME}: takes signed formats of at most 8 bits; got {spec.format}"
    if isinstance(cast, QuantizedTensor):
        if any(not t.is_cpu or refusal(t) for t in (cast.data, cast.scale_inv)):
            return f"{NAME}: takes plain tensors on a cpu"
        # the guard of a predicted cast is judged by the scales that quantize.cpp computes
        if spec.predicted and (why := _settings(spec).refusal or native_build.load("quantize", x.dtype).reason):
            return why
        if x.shape != cast.shape:
            return f"{NAME}: takes a matrix and its codes; got {tuple(x.shape)} and {tuple(cast.shape)}"
    elif reason := native_quantize.supports_rounding(x, spec):
        return reason
    reason = not_a_matrix(x) or native_build.load("measure", x.dtype).reason
    return f"{NAME}: {reason}" if reason else None


class Layout(NamedTuple):
    """The requested sums and their places: the table of `measure.tally`."""

    sums: tuple[tuple[str, int], ...]
    """Name and bins (0 for a number) of each sum, in the order of a vector of sums."""
    extremes: tuple[tuple[str, int], ...]
    """The same of each extreme, which merges by the maximum; minima are negated."""
    used: int
    """Length of the part of a vector of sums, from its beginning, that the fields of a detail take."""
    width: int
    """Length of a vector of sums; what lies beyond its fields stays 0."""

    @property
    def places(self) -> list[int]:
        """The place of each field in a vector of sums, then the end of the last."""
        return list(itertools.accumulate((bins or 1 for _, bins in self.sums), initial=0))


@functools.lru_cache(maxsize=64)
def _places(layout: Layout, dtype: torch.dtype) -> ctypes.Array[ctypes.c_int64]:
    """The place of each sum of a library. Raises ValueError if the library computes other sums."""
    library = native_build.loaded("measure", dtype)
    words = [names().decode().split() for names in (library.ottava_sums, library.ottava_extremes)]
    sums, extremes = (dict(zip(w[::2], map(int, w[1::2]), strict=True)) for w in words)
    refuse_other_sums(NAME, dict(layout.sums), sums)
    refuse_other_sums(NAME, dict(layout.extremes), extremes)
    if list(extremes) != list(dict(layout.extremes)):
        raise ValueError(f"{NAME}: extremes are {', '.join(extremes)}; measure/tally.py needs them in its own order")
    begins = dict(zip(dict(layout.sums), layout.places, strict=False))
    return (_SIZES * len(sums))(*(begins[name] for name in sums))


def measure(looks: Sequence[Look], layout: Layout, detail: int) -> tuple[Tensor, Tensor]:
    """Sums over the finite elements of each x; call `supports_measure` for each look first.

    Args:
        layout: the requested fields, and their places in a vector of sums.
        detail: 0: no histograms over elements; 1: that of magnitudes; 2: those below the amax of blocks, too.
    Returns:
        (fp64 (looks, layout.width), 0 between fields; fp64 (looks, len(layout.extremes))). All threads of torch
        share one look, or take some of several each; the bits do not depend on their number.
    Raises:
        ValueError: C++ sums other fields.
    """
    width = layout.width
    sums = torch.zeros(len(looks), width, dtype=torch.float64, device="cpu")
    extremes = torch.empty(len(looks), len(layout.extremes), dtype=torch.float64, device="cpu")
    # one library a dtype, so one call for all looks of a dtype: its threads share them
    for dtype in dict.fromkeys([look.x.dtype for look in looks]):
        indices = [i for i, look in enumerate(looks) if look.x.dtype == dtype]
        jobs = (_Job * len(indices))()
        kept = [_fill(job, looks[i]) for job, i in zip(jobs, indices, strict=True)]
        for job, i in zip(jobs, indices, strict=True):
            job.detail = detail
            # each job writes its own row of fp64: threads share no memory, and no sum depends on their order
            job.sums = pointer(sums) + 8 * width * i
            job.extremes = pointer(extremes) + 8 * len(layout.extremes) * i
        settings = _Library(places=ctypes.addressof(_places(layout, dtype)), width=layout.used)
        if any(isinstance(looks[i].cast, QuantizationSpec) or spec_of(looks[i]).predicted for i in indices):
            casts = native_build.loaded("quantize", dtype)
            settings.quantize = ctypes.cast(casts.ottava_cast, _POINTERS)
            settings.scales = ctypes.cast(casts.ottava_scales, _POINTERS)
        library = native_build.loaded("measure", dtype)
        failed = library.ottava_measure(jobs, len(indices), ctypes.byref(settings), torch.get_num_threads())
        del kept  # the jobs point to these
        if failed:
            raise MemoryError(f"measure: no memory for the sums of {len(indices)} casts")
    return sums, extremes


@functools.lru_cache(maxsize=512)
def _settings(spec: QuantizationSpec) -> native_quantize.CastSettings:
    return native_quantize.settings(replace(spec, rounding="nearest_even"))  # given codes may have another rounding


def spec_of(look: Look) -> QuantizationSpec:
    """The spec of the cast."""
    return look.cast if isinstance(look.cast, QuantizationSpec) else look.cast.spec


@functools.lru_cache(maxsize=1024)
def _job_of(spec: QuantizationSpec, rows: int, cols: int) -> _Job:
    """A job with the values that all tensors of a shape and spec share; `_fill` copies it."""
    grid, fmt = spec.granularity.grid_shape((rows, cols)), spec.format
    job = _Job(rows=rows, cols=cols)
    job.block_rows, job.block_cols = spec.granularity.block_shape((rows, cols))
    job.grid_cols, job.scale_count = grid[1], grid[0] * grid[1]
    job.mantissa_bits, job.bias, job.bits, job.special_code = native_quantize.code_numbers(fmt)
    job.tie_clips, job.clip, job.predicted = int(fmt.tie_clips), fmt.clip, int(spec.predicted)
    return job


def _fill(job: _Job, look: Look) -> tuple[object, ...]:
    """Fills a job; returns the objects that must live until the job is done."""
    x, made, scale, spec = _strided(look.x), look.cast, look.scale, spec_of(look)
    settings = _settings(spec)
    # a copy of a struct: filling twenty fields one by one takes Python longer than measuring a small tensor takes C++
    ctypes.pointer(job)[0] = _job_of(spec, *x.shape)
    job.x, (job.x_row, job.x_col), job.extent = pointer(x), steps(x), pointer(look.extent)
    job.cast = ctypes.addressof(settings.cast)
    if look.squares is not None:
        job.squares, job.square_rows = pointer(look.squares), look.square_rows
    kept: tuple[object, ...] = (x, settings)
    if isinstance(made, QuantizedTensor):
        codes, scale_inv = _strided(made.data.view(torch.uint8)), made.scale_inv.contiguous()
        job.codes, job.scale_inv, (job.code_row, job.code_col) = pointer(codes), pointer(scale_inv), steps(codes)
        return (*kept, codes, scale_inv)
    if scale is not None:
        job.given = pointer(scale)
    job.by_whole = int(look.by_whole)
    return kept


def _strided(x: Tensor) -> Tensor:
    """x, or a copy if neither its rows nor its columns are contiguous."""
    return x if steps(x) != (0, 0) else x.contiguous()


# --- the facts of one reading of a tensor, and copies of some of its rows (src/sample.cpp) ---

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
    """Why this kernel does not survey a matrix; None if it does."""
    reason = not_a_matrix(x) or native_build.load("sample", x.dtype).reason
    return f"{NAME}: {reason}" if reason else None


def survey(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The facts of one reading of x (R, C), fp64 (4,): the amax, inf or NaN if an element is; the amax of the finite
    elements; the number of non-finite elements; the number of elements. Call `supports_survey` first.

    Args:
        dtype: float32, bfloat16 or float16: survey x cast to that dtype; None: x as it is.
    """
    extent = torch.empty(4, dtype=torch.float64, device="cpu")
    target = x.dtype if dtype is None else dtype
    row, col = steps(x)
    if col != 1:  # the order of elements does not matter
        # extremes and counts do not depend on the order, so columns are read as rows
        x, row, col = (x.t(), col, 1) if row == 1 else (x.contiguous(), x.shape[1], 1)
    library = native_build.loaded("sample", x.dtype)
    to = _ROUNDED.get(target, 0) if target != x.dtype else 0
    finite = library.ottava_survey(pointer(x), to, *x.shape, row, pointer(extent), torch.get_num_threads())
    # the amax of cast numbers is the cast amax, but what overflows in the cast has to be counted
    return extent if finite or target == x.dtype else survey(x.to(target))


def supports_take(x: Tensor) -> str | None:
    """Why this kernel copies no rows of a matrix of numbers or codes; None if it does."""
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
    """
    rows, cols = x.shape
    taken = torch.empty(sum(map(len, bands)), cols, dtype=x.dtype, device="cpu")
    library = native_build.loaded("sample", _holds(x))
    numbers = (ctypes.c_int64 * (3 * len(bands)))(*(n for band in bands for n in (band.start, band.stop, band.step)))
    # waking a thread takes longer than copying a few rows
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
