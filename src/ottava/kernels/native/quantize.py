"""Quantize and dequantize on a CPU in C++ (src/quantize.cpp, src/decode.cpp): the reference's bits, much faster.

`native.build` compiles it on first use. If that fails, `supports_quantize` says why, and the reference runs. It uses as
many threads as torch; neither their number nor the instruction set changes a bit.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.kernels import reference
from ottava.kernels.gate import address, pointer, refusal
from ottava.kernels.native.build import Built, load
from ottava.kernels.reference import Cast
from ottava.numerics.formats import E4M3, Format
from ottava.numerics.rounding import check_input_dtype
from ottava.numerics.scaling import Granularity, column_major
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor

NAME = "native_quantize"

VARIANTS = MappingProxyType(
    {torch.bfloat16: "", torch.float32: "OTTAVA_TYPE=Float32", torch.float16: "OTTAVA_TYPE=Float16"}
)
"""dtype -> macro with which a file is compiled for such tensors."""
_SCALE_FORMATS = ("fp32", "pow2", "e8m0", "e8m0_floor", "e4m3")
_INT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_TILE_BYTES = 1 << 19  # of x, cast twice from a second-level cache; narrower tiles cost more calls than they save reads
_MOST_OCTAVES = 64  # of margin and guard; with more, intermediate numbers would leave fp32


RunCast = Callable[[Tensor, Tensor | None, Tensor | None], Cast]
"""(x, scale, staged) -> the cast."""
CastPair = tuple[Cast, Cast]
"""Of x and of x.T."""

_JOB = struct.Struct("@PqqqqqPPPPPPqq")
_BOTH = struct.Struct("@Pqqqqqq" + 2 * "qqPPPP")
"""The C++ file's `CastJob` and `Both`. Packed: ctypes takes longer over fourteen arguments than a small cast does."""


class _Cast(ctypes.Structure):
    """The C++ file's `Cast`: the numbers of a spec."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("mantissa_bits", "emin", "emax", "bias", "bits", "nan_code")),
        *((name, ctypes.c_int32) for name in ("scale_format", "guarded", "margin")),
        *((name, ctypes.c_float) for name in ("max", "top", "guard_floor", "tensor_top")),
    )


def built(dtype: torch.dtype = torch.bfloat16) -> Built:
    """The library that casts from a dtype, or why there is none."""
    return load("quantize", _declare, VARIANTS.get(dtype, ""))


def built_decoder() -> Built:
    """The library that decodes, or why there is none."""
    return load("decode", _declare_decoder)


def _declare_decoder(library: ctypes.CDLL) -> None:
    library.ottava_decode.restype = None
    library.ottava_decode.argtypes = [
        *(_POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER),
        *(_INT, _INT, _INT, _INT, _POINTER, _INT, _INT),
    ]


def _declare(library: ctypes.CDLL) -> None:
    library.ottava_scales.restype = None
    library.ottava_cast.restype = _INT
    library.ottava_cast.argtypes = [ctypes.c_char_p]
    library.ottava_cast_both.restype = _INT
    library.ottava_cast_both.argtypes = [ctypes.c_char_p]


def supports_quantize(x: Tensor, spec: QuantizationSpec, scale: Tensor | None = None) -> str | None:
    """Why this kernel does not take such a cast; None if it does.

    Example:
        >>> supports_quantize(torch.ones(2, 2), QuantizationSpec(E4M3, rounding="stochastic"))
        'native_quantize: rounds to nearest even; got stochastic'
    """
    if not x.is_cpu or (scale is not None and not scale.is_cpu):
        return f"{NAME}: runs on a cpu; got {x.device.type}"
    if (reason := settings(spec).refusal) is not None:
        return reason
    if reason := refusal(x):
        return f"{NAME}: takes plain tensors; {reason}"
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        return f"{NAME}: takes one fp32 scale; got {scale.numel()} of {scale.dtype}"
    if reason := built(x.dtype).reason:
        return f"{NAME}: {reason}"
    return None


def quantize(x: Tensor, spec: QuantizationSpec, scale: Tensor | None = None, staged: Tensor | None = None) -> Cast:
    """As `reference.quantize`, bit for bit; call `supports_quantize` first.

    It casts row-major and column-major matrices in place, and copies others first.

    Args:
        staged: of a door, fp32 (3,), contiguous: the kernel raises it to the amax of this cast, which has one scale.

    Example:
        >>> from ottava.kernels import reference
        >>> x, spec = torch.tensor([[0.5, -3.0], [14.0, 7.0]]), QuantizationSpec(E4M3)
        >>> supports_quantize(x, spec) is not None or all(map(torch.equal, quantize(x, spec)[1:],
        ...                                                   reference.quantize(x, spec)[1:]))
        True
    """
    return plan_quantize(x, spec)(x, scale, staged)


def plan_quantize(x: Tensor, spec: QuantizationSpec) -> RunCast:
    """`quantize` for every matrix of the dtype, shape and strides of x: sizes are computed once."""
    check_input_dtype(x, "quantize")
    if x.dim() != 2:
        raise ValueError(f"quantize: got shape {tuple(x.shape)}; needs a matrix (rows, columns): flatten it first")
    if not x.numel():  # no codes and no amax, but a scale
        return lambda x, scale, staged: reference.quantize(x, spec, scale)
    rows, cols = x.shape
    (stride, step), turned = x.stride(), column_major(x)
    cell, granularity = settings(spec), spec.granularity
    shape, strides = (rows, cols), (1, rows) if turned else (cols, 1)
    grid = granularity.grid_shape(shape)
    if turned:  # casts x.T, whose rows lie one after the other in memory; scales and amaxes stay those of x
        rows, cols, stride, step, granularity = cols, rows, step, stride, cell.transposed
    copied = (step != 1 and cols > 1) or (stride < cols and rows > 1)
    pitch = stride if rows > 1 and not copied else cols
    sizes = (rows, cols, pitch, *granularity.block_shape((rows, cols)))
    code_dtype, float32, threads, pack = spec.format.storage_dtype, torch.float32, torch.get_num_threads, _JOB.pack
    empty, cpu = torch.empty_strided, x.device  # torch takes longer to read a size alone, or "cpu"
    library = built(x.dtype).library
    assert library is not None  # supports_quantize was asked
    cast = library.ottava_cast

    def run(x: Tensor, scale: Tensor | None, staged: Tensor | None) -> Cast:
        if copied:
            x = x.t().contiguous() if turned else x.contiguous()
        data = empty(shape, strides, dtype=code_dtype, device=cpu)
        scale_inv = empty(grid, (grid[1], 1), dtype=float32, device=cpu)
        amax = empty(grid, (grid[1], 1), dtype=float32, device=cpu)
        job = pack(
            address(x),
            *sizes,
            cell.address,  # the struct must live as long as this plan
            0 if scale is None else pointer(scale),
            address(data),
            address(scale_inv),
            address(amax),
            0 if staged is None else address(staged),
            turned,
            threads(),
        )
        if cast(job):
            raise MemoryError(f"quantize: no memory for the scales of {rows} x {cols} elements")
        return Cast(data, scale_inv, amax)

    return run


def supports_quantize_both(x: Tensor, spec: QuantizationSpec, spec_t: QuantizationSpec) -> str | None:
    """Why this kernel does not cast x to spec and x.T to spec_t in one reading; None if it does."""
    for side in (spec, spec_t):
        if reason := supports_quantize(x, side):
            return reason
        if side.scale_format == "e4m3":
            return f"{NAME}: two-level scales want the whole tensor's amax first"
    if spec == spec_t and spec.granularity.transposes:
        return f"{NAME}: one cast serves x and x.T"
    lines = x.t() if x.dim() == 2 and column_major(x) else x
    if x.dim() != 2 or not x.numel() or lines.stride(1) != 1 or lines.stride(0) < lines.shape[1]:
        return f"{NAME}: takes a matrix in rows or columns; got {tuple(x.shape)} with strides {x.stride()}"
    sides = (spec.granularity, spec_t.granularity.transposed)
    if any((side.cols if column_major(x) else side.rows) is None for side in sides):
        return f"{NAME}: blocks as long as the matrix are cast one by one; got {spec} and {spec_t}"
    return None


def quantize_both(x: Tensor, spec: QuantizationSpec, spec_t: QuantizationSpec) -> tuple[Cast, Cast]:
    """(Cast of x, Cast of x.T) with their current scales; call `supports_quantize_both` first.

    Example:
        >>> from ottava.kernels import reference
        >>> from ottava.numerics.scaling import BLOCK_1X128
        >>> x, spec = torch.tensor([[0.5, -3.0], [14.0, 7.0]]), QuantizationSpec(E4M3, BLOCK_1X128)
        >>> supports_quantize_both(x, spec, spec) is not None or all(map(torch.equal,
        ...     quantize_both(x, spec, spec)[1][1:], reference.quantize(x.t(), spec)[1:]))
        True
    """
    return plan_quantize_both(x, spec, spec_t)(x)


def plan_quantize_both(x: Tensor, spec: QuantizationSpec, spec_t: QuantizationSpec) -> Callable[[Tensor], CastPair]:
    """`quantize_both` for every matrix of the dtype, shape and strides of x."""
    turned = column_major(x)
    lines, (first, second) = (x.t(), (spec_t, spec)) if turned else (x, (spec, spec_t))
    rows, cols = shape = (lines.shape[0], lines.shape[1])
    granularity, granularity_t = first.granularity, settings(second).transposed
    block, block_t = granularity.block_shape(shape), granularity_t.block_shape(shape)
    grid, grid_t = granularity.grid_shape(shape), granularity_t.grid_shape(shape)[::-1]
    height, width = math.lcm(block[0], block_t[0]), math.lcm(block[1], block_t[1])
    width = min(width * max(_TILE_BYTES // (height * width * x.element_size()), 1), cols)
    sizes = rows, cols, lines.stride(0) if rows > 1 else cols, height, width
    cell, cell_t = settings(first), settings(second)  # they must live as long as this plan
    dtypes, float32 = (first.format.storage_dtype, second.format.storage_dtype), torch.float32
    library = built(x.dtype).library
    assert library is not None  # supports_quantize_both was asked
    cast_both, threads, pack = library.ottava_cast_both, torch.get_num_threads, _BOTH.pack
    empty, cpu = torch.empty_strided, x.device

    def run(x: Tensor) -> CastPair:
        codes = empty(shape, (cols, 1), dtype=dtypes[0], device=cpu)
        codes_t = empty((cols, rows), (1, cols), dtype=dtypes[1], device=cpu)
        scale_inv = empty(grid, (grid[1], 1), dtype=float32, device=cpu)
        amax = empty(grid, (grid[1], 1), dtype=float32, device=cpu)
        scale_inv_t = empty(grid_t, (grid_t[1], 1), dtype=float32, device=cpu)
        amax_t = empty(grid_t, (grid_t[1], 1), dtype=float32, device=cpu)
        job = pack(
            *(address(x), *sizes, threads()),
            *(*block, cell.address, address(codes), address(scale_inv), address(amax)),
            *(*block_t, cell_t.address, address(codes_t), address(scale_inv_t), address(amax_t)),
        )
        if cast_both(job):
            raise MemoryError(f"quantize: no memory for the scales of {rows} x {cols} elements")
        lies, other = Cast(codes, scale_inv, amax), Cast(codes_t, scale_inv_t, amax_t)
        return (other, lies) if turned else (lies, other)

    return run


def supports_decode(codes: Tensor, fmt: Format) -> str | None:
    """Why this kernel does not decode these codes; None if it does."""
    if not codes.is_cpu:
        return f"{NAME}: decodes on a cpu; got {codes.device.type}"
    if reason := refusal(codes):
        return f"{NAME}: decodes plain tensors; {reason}"
    if fmt.bits > 8 or not fmt.signed:
        return f"{NAME}: decodes signed formats of at most 8 bits; got {fmt}"
    if reason := built_decoder().reason:
        return f"{NAME}: {reason}"
    return None


def decode(codes: Tensor, fmt: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """The exact numbers of codes, as a new tensor; call `supports_decode` first.

    Args:
        codes: any shape, in fmt.storage_dtype.
        dtype: float32 or bfloat16; both hold every number of 8 bits or less.
    Raises:
        TypeError: the codes are not in fmt.storage_dtype, or another dtype is asked for.

    Example:
        >>> from ottava.numerics.formats import E2M1
        >>> codes = torch.tensor([1, 15, 7], dtype=torch.uint8)
        >>> supports_decode(codes, E2M1) is not None or decode(codes, E2M1).tolist() == [0.5, -6.0, 6.0]
        True
    """
    if codes.dtype != fmt.storage_dtype:
        raise TypeError(f"decode: {fmt} codes are held in {fmt.storage_dtype}; got {codes.dtype}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"decode: got dtype {dtype}; needs float32 or bfloat16")
    raw = codes.view(torch.uint8)
    dense = raw.is_contiguous() or (raw.dim() == 2 and raw.t().is_contiguous())
    raw = raw if dense else raw.contiguous()
    numbers = torch.empty_like(raw, dtype=dtype)  # the strides of the codes
    _decode(raw, (1, raw.numel()), (1, raw.numel()), torch.ones(1, device="cpu"), fmt, numbers)
    return numbers


def dequantize(x_q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """As `QuantizedTensor.dequantize`, bit for bit, in one reading; call `supports_decode` first.

    Args:
        dtype: float32 or bfloat16.

    Example:
        >>> from ottava.kernels import reference
        >>> x, spec = torch.tensor([[0.5, -3.0], [14.0, 7.0]]), QuantizationSpec(E4M3)
        >>> x_q = QuantizedTensor(*reference.quantize(x, spec)[:2], spec, x.dtype)
        >>> supports_decode(x_q.data, E4M3) is not None or dequantize(x_q, torch.float32).equal(x_q.dequantize())
        True
    """
    codes, scales, granularity = x_q.data.view(torch.uint8), x_q.scale_inv, x_q.spec.granularity
    turned = column_major(codes)
    if turned:
        codes, scales, granularity = codes.t(), scales.t(), granularity.transposed
    codes, scales = codes.contiguous(), scales.contiguous()
    numbers = torch.empty(codes.shape, dtype=dtype, device="cpu")
    rows, cols = codes.shape
    _decode(codes, (rows, cols), granularity.block_shape((rows, cols)), scales, x_q.spec.format, numbers)
    return numbers.t() if turned else numbers


def _decode(
    codes: Tensor, shape: tuple[int, int], block: tuple[int, int], scales: Tensor, fmt: Format, out: Tensor
) -> None:
    if not codes.numel():
        return
    library = load("decode", _declare_decoder).library
    assert library is not None  # supports_decode was asked
    largest = int((fmt.max / 2.0**fmt.emax - 1 + fmt.emax + fmt.bias) * 2**fmt.mantissa_bits)  # as a code
    library.ottava_decode(
        *(pointer(codes), *shape, *block, pointer(scales)),
        *(fmt.mantissa_bits, fmt.bias, fmt.bits, largest + 1 if fmt.has_nan else -1),
        *(out.data_ptr(), int(out.dtype == torch.bfloat16), torch.get_num_threads()),
    )


def nan_code(fmt: Format) -> int:
    """The code that C++ writes for NaN, of either sign; -1 for a format without one.

    Example:
        >>> from ottava.numerics.formats import E2M1, E4M3FNUZ
        >>> nan_code(E4M3), nan_code(E4M3FNUZ), nan_code(E2M1)
        (127, 128, -1)
    """
    sign_bit = 1 << (fmt.bits - 1)
    return -1 if not fmt.has_nan else sign_bit - 1 if fmt.has_negative_zero else sign_bit


class CastSettings(NamedTuple):
    """The settings of a spec for the C++ file."""

    refusal: str | None
    """Why this kernel makes no such casts."""
    cast: _Cast
    """The numbers of the spec."""
    address: int
    """Their address."""
    transposed: Granularity
    """Its granularity for x.T."""


@functools.lru_cache(maxsize=512)
def settings(spec: QuantizationSpec) -> CastSettings:
    """The settings of a spec; computed once."""
    fmt = spec.format
    refusal = None
    if spec.rounding != "nearest_even":
        refusal = f"{NAME}: rounds to nearest even; got {spec.rounding}"
    elif spec.block_scale != "amax":
        refusal = f"{NAME}: scales blocks by their amax; got {spec.block_scale}"
    elif fmt.bits > 8 or not fmt.signed:
        refusal = f"{NAME}: casts to signed formats of at most 8 bits; got {fmt}"
    elif abs(spec.margin) > _MOST_OCTAVES or spec.guard_bits > _MOST_OCTAVES:
        refusal = f"{NAME}: takes at most {_MOST_OCTAVES} octaves; got margin {spec.margin}, guard {spec.guard_bits}"
    if refusal is not None:
        return CastSettings(refusal, _Cast(), 0, spec.granularity.transposed)
    cast = _Cast(
        mantissa_bits=fmt.mantissa_bits,
        emin=fmt.emin,
        emax=fmt.emax,
        bias=fmt.bias,
        bits=fmt.bits,
        nan_code=nan_code(fmt),
        scale_format=_SCALE_FORMATS.index(spec.scale_format),
        guarded=int(spec.scaling == "guarded"),
        margin=spec.margin,
        max=fmt.max,
        top=fmt.max * 2.0**-spec.margin,
        guard_floor=fmt.max * 2.0**-spec.guard_bits,
        tensor_top=E4M3.max * fmt.max * 2.0**-spec.margin,
    )
    return CastSettings(None, cast, ctypes.addressof(cast), spec.granularity.transposed)
