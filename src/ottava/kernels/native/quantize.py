"""Casts on a CPU in C++: the reference's bits, much faster. The work is done by these files of src:

    quantize       rounds to nearest even; with scales that are given, predicted or their own; x and x.T in one reading
    stochastic     rounds at random, by the scales of `quantize`
    block_scales   searches NVFP4's scales by a rule, and makes the codes, in one reading
    rotate         Hadamard transforms in front of a cast
    decode         codes to numbers

Where a file cannot be built, `supports_quantize` says why, and the reference runs. Neither the number of threads nor
the instruction set changes a bit.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.kernels import reference
from ottava.kernels.gate import address, pointer, refusal
from ottava.kernels.native import build as native_build
from ottava.kernels.reference import Cast
from ottava.numerics.formats import E2M1, E4M3, Format
from ottava.numerics.rounding import draw_seed
from ottava.numerics.scaling import FOUR_OVER_SIX_TOPS, MS_EDEN_TOPS, TE_FOUR_OVER_SIX, Granularity, column_major
from ottava.numerics.scaling import amax as block_amax
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.numerics.transforms import Hadamard, Transform

NAME = "native_quantize"

RULES: Mapping[str, tuple[int, float, tuple[float, ...]]] = MappingProxyType(
    {"four_over_six": (0, *FOUR_OVER_SIX_TOPS), "ms_eden": (1, *MS_EDEN_TOPS)}
    | {
        rule: (2 if error == "MAE" else 3, bound * E2M1.max, FOUR_OVER_SIX_TOPS[1])
        for rule, (bound, error) in TE_FOUR_OVER_SIX.items()
    }
)
"""Rule -> its number in the C++ file, the tensor's amax times its scale, where a block's amax may go."""
_SCALE_FORMATS = ("fp32", "pow2", "e8m0", "e8m0_floor", "e4m3")
_TILE_BYTES = 1 << 19  # of x, cast twice from a second-level cache; narrower tiles cost more calls than they save reads
_MOST_OCTAVES = 64  # of margin and guard; with more, intermediate numbers would leave fp32
_LARGEST_BLOCK = 1 << 14  # elements whose errors a rule sums at once
_PIECE = 64  # signs that a rotation draws at once

RunCast = Callable[[Tensor, Tensor | None, Tensor | None], Cast]
"""(x, scale, staged) -> the cast."""
CastPair = tuple[Cast, Cast]
"""Of x and of x.T."""

# the structs of the C++ files, packed
_JOB = struct.Struct("@PqqqqqPPPPPPqq")  # CastJob
_BOTH = struct.Struct("@Pqqqqqq" + 2 * "qqPPPP")  # Both
_STOCHASTIC = struct.Struct("@PPPqqqqqqiiiif")
_RULE = struct.Struct("@PPPPqqqqqqqqfff")
_ROTATION = struct.Struct("@PPPqqqqqqqqqd")


class _Cast(ctypes.Structure):
    """The C++ file's `Cast`: the numbers of a spec."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("mantissa_bits", "emin", "emax", "bias", "bits", "nan_code")),
        *((name, ctypes.c_int32) for name in ("scale_format", "guarded", "margin")),
        *((name, ctypes.c_float) for name in ("max", "top", "guard_floor", "tensor_top")),
    )


def supports_quantize(x: Tensor, spec: QuantizationSpec, scale: Tensor | None = None) -> str | None:
    """Why this kernel does not take such a cast; None if it does."""
    if not x.is_cpu or (scale is not None and not scale.is_cpu):
        return f"{NAME}: runs on a cpu; got {x.device.type}"
    cell = settings(spec)
    if cell.refusal is not None:
        return cell.refusal
    if reason := refusal(x):
        return f"{NAME}: takes plain tensors; {reason}"
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        return f"{NAME}: takes one fp32 scale; got {scale.numel()} of {scale.dtype}"
    if (
        cell.library == "block_scales"
        and math.prod(spec.granularity.block_shape((x.shape[0], x.shape[-1]))) > _LARGEST_BLOCK
    ):
        return f"{NAME}: searches scales of blocks of at most {_LARGEST_BLOCK:,} elements; got {spec.granularity}"
    for library in {cell.library, "quantize" if cell.library == "stochastic" else cell.library}:
        if reason := native_build.load(library, x.dtype).reason:
            return f"{NAME}: {reason}"
    return None


def supports_rounding(x: Tensor, spec: QuantizationSpec) -> str | None:
    """As `supports_quantize`, of casts that round to nearest by the amax of each block."""
    if (library := settings(spec).library) == "quantize":
        return supports_quantize(x, spec)
    return f"{NAME}: rounds to nearest by the amax of blocks here; got {spec.rounding}, {spec.block_scale} ({library})"


def plan_quantize(x: Tensor, spec: QuantizationSpec) -> RunCast:
    """`reference.quantize`, bit for bit, of every matrix of the dtype, shape and strides of x: sizes are computed once.

    It casts row-major and column-major matrices in place, and copies others first; call `supports_quantize` first.

    Returns:
        (x, scale, staged) -> Cast; staged: of a door, fp32 (3,), contiguous: the kernel raises it to the amax of this
        cast, which has one scale.
    """
    reference.check_matrix(x)
    if not x.numel():  # no codes and no amax, but a scale
        return lambda x, scale, staged: reference.quantize(x, spec, scale)
    if (plan := _PLANS.get(settings(spec).library)) is not None:
        return plan(x, spec)
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
    cast = native_build.loaded("quantize", x.dtype).ottava_cast

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
        if reason := supports_rounding(x, side):
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


def plan_quantize_both(x: Tensor, spec: QuantizationSpec, spec_t: QuantizationSpec) -> Callable[[Tensor], CastPair]:
    """x -> (Cast of x, Cast of x.T) with their current scales, for every matrix of the dtype, shape and strides of x;
    call `supports_quantize_both` first."""
    turned = column_major(x)
    lines, (first, second) = (x.t(), (spec_t, spec)) if turned else (x, (spec, spec_t))
    rows, cols = shape = (lines.shape[0], lines.shape[1])
    # in the orientation of the lines in memory, where blocks of x.T are blocks turned
    granularity, granularity_t = first.granularity, settings(second).transposed
    block, block_t = granularity.block_shape(shape), granularity_t.block_shape(shape)
    grid, grid_t = granularity.grid_shape(shape), granularity_t.grid_shape(shape)[::-1]
    # a tile holds whole blocks of both casts, so neither needs an amax from outside of it
    height, width = math.lcm(block[0], block_t[0]), math.lcm(block[1], block_t[1])
    # as wide as the cache allows: each tile costs two calls, and rows of a tile begin anew
    width = min(width * max(_TILE_BYTES // (height * width * x.element_size()), 1), cols)
    sizes = rows, cols, lines.stride(0) if rows > 1 else cols, height, width
    cell, cell_t = settings(first), settings(second)  # they must live as long as this plan
    dtypes, float32 = (first.format.storage_dtype, second.format.storage_dtype), torch.float32
    cast_both = native_build.loaded("quantize", x.dtype).ottava_cast_both
    threads, pack, empty, cpu = torch.get_num_threads, _BOTH.pack, torch.empty_strided, x.device

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
        # what lies row by row in memory is the first of the C++ file's two; for a matrix in columns that is x.T
        lies, other = Cast(codes, scale_inv, amax), Cast(codes_t, scale_inv_t, amax_t)
        return (other, lies) if turned else (lies, other)

    return run


def _plan_stochastic(x: Tensor, spec: QuantizationSpec) -> RunCast:
    """Scales by `ottava_factors`, or by torch if a rule chooses them; then codes, from one drawn seed."""
    shape, granularity, fmt = (x.shape[0], x.shape[1]), spec.granularity, spec.format
    block, grid, cell = granularity.block_shape(shape), granularity.grid_shape(shape), settings(spec)
    numbers = fmt.mantissa_bits, fmt.emin, fmt.bits, nan_code(fmt), fmt.max
    factors = native_build.loaded("quantize", x.dtype).ottava_factors
    round_ = native_build.loaded("stochastic", x.dtype).ottava_cast_stochastic
    # a rule reads the numbers of a block, not only its amax; only torch has all of them
    by_rule, empty, threads = spec.block_scale != "amax", torch.empty, torch.get_num_threads

    def run(x: Tensor, scale: Tensor | None, staged: Tensor | None) -> Cast:
        x = x.detach().contiguous()  # random numbers run along rows
        data = empty(shape, dtype=fmt.storage_dtype, device="cpu")
        if by_rule:
            amax = block_amax(x, granularity)
            factor, scale_inv = reference.factors_of(x, amax, spec, granularity, scale)
            factor = factor.contiguous()
        else:
            # amax, scales and factors in one reading, by one call
            factor = empty(grid, dtype=torch.float32, device="cpu")
            scale_inv, amax = torch.empty_like(factor), torch.empty_like(factor)
            given = 0 if scale is None else pointer(scale)
            addresses = cell.address, given, address(factor), address(scale_inv), address(amax), 0
            if factors(_JOB.pack(address(x), *shape, shape[1], *block, *addresses, False, threads())):
                raise MemoryError(f"quantize: no memory for the scales of {shape[0]} x {shape[1]} elements")
        seed = int(draw_seed(x.device))
        # the factor of the cast, not the stored inverse: 1 / (1 / s) need not be s
        places = address(x), address(factor), address(data)
        round_(_STOCHASTIC.pack(*places, *shape, *block, seed, threads(), *numbers))
        return Cast(data, scale_inv, amax)

    return run


def _plan_by_rule(x: Tensor, spec: QuantizationSpec) -> RunCast:
    """One reading searches the scales of a row of blocks and makes its codes."""
    shape, (rule, top, candidates) = (x.shape[0], x.shape[1]), RULES[spec.block_scale]
    block, grid = spec.granularity.block_shape(shape), spec.granularity.grid_shape(shape)
    group = 0 if spec.transform is None else spec.transform.group or 0
    cast = native_build.loaded("block_scales", x.dtype).ottava_cast_by_rule

    def run(x: Tensor, scale: Tensor | None, staged: Tensor | None) -> Cast:
        x = x.detach().contiguous()
        data = torch.empty(shape, dtype=spec.format.storage_dtype, device="cpu")
        scale_inv, amax = (torch.empty(grid, dtype=torch.float32, device="cpu") for _ in range(2))
        seed = int(draw_seed(x.device)) if spec.block_scale == "ms_eden" else 0
        job = _RULE.pack(
            *map(address, (x, data, scale_inv, amax)),
            *(*shape, *block, group, seed, torch.get_num_threads(), rule),
            *(top, candidates[0], candidates[-1]),
        )
        if cast(job):
            raise MemoryError(f"quantize: no memory for the errors of a block of {block[0]} x {block[1]}")
        return Cast(data, scale_inv, amax)

    return run


_PLANS: Mapping[str, Callable[[Tensor, QuantizationSpec], RunCast]] = MappingProxyType(
    {"stochastic": _plan_stochastic, "block_scales": _plan_by_rule}
)
"""The files besides quantize.cpp -> the plan of their casts, for every matrix of the dtype and shape of x."""


def supports_transform(x: Tensor, transform: Transform) -> str | None:
    """Why no C++ transforms x; None if it does."""
    if not isinstance(transform, Hadamard):
        return f"{NAME}: rotates; got {transform.kind}"
    if not x.is_cpu:
        return f"{NAME}: runs on a cpu; got {x.device.type}"
    if x.dtype not in native_build.VARIANTS:
        return f"{NAME}: rotates float32, bfloat16 and float16; got {x.dtype}"
    if x.dim() != 2 or not x.numel():
        return f"{NAME}: rotates a matrix with elements; got {tuple(x.shape)}"
    if reason := refusal(x):
        return f"{NAME}: takes plain tensors; {reason}"
    reason = native_build.load("rotate", x.dtype).reason
    return f"{NAME}: {reason}" if reason else None


def plan_transform(x: Tensor, transform: Transform) -> Callable[[Tensor, Tensor | None], Tensor]:
    """`transform.apply` for every matrix of the dtype and shape of x; call `supports_transform` first."""
    assert isinstance(transform, Hadamard)  # supports_transform was asked
    (rows, cols), size = x.shape, transform.size
    dtype = torch.bfloat16 if transform.narrows(x.dtype) else torch.float32
    out_shape = rows, -(-cols // size) * size
    rotate = native_build.loaded("rotate", x.dtype).ottava_rotate

    def run(x: Tensor, aside: Tensor | None) -> Tensor:
        drawn, out = aside is not None, torch.empty(out_shape, dtype=dtype, device="cpu")
        padded = -(-size // _PIECE) * _PIECE
        # C++ draws fresh signs from the seed, whole pieces at a time, into memory that torch made
        signs = torch.empty(padded, dtype=torch.float64, device="cpu") if drawn else transform.diagonal(None, x.device)
        job = _ROTATION.pack(
            *map(address, (x, signs, out)),
            *(rows, cols, *x.stride(), size, dtype == torch.bfloat16, torch.get_num_threads()),
            *(drawn, 0 if aside is None else int(aside), transform.factor),
        )
        if rotate(job):
            raise MemoryError(f"hadamard: no memory for groups of {size}")
        return out

    return run


def supports_decode(codes: Tensor, fmt: Format) -> str | None:
    """Why this kernel does not decode these codes; None if it does."""
    if not codes.is_cpu:
        return f"{NAME}: decodes on a cpu; got {codes.device.type}"
    if reason := refusal(codes):
        return f"{NAME}: decodes plain tensors; {reason}"
    if fmt.bits > 8 or not fmt.signed:
        return f"{NAME}: decodes signed formats of at most 8 bits; got {fmt}"
    if reason := native_build.load("decode").reason:
        return f"{NAME}: {reason}"
    return None


def plan_dequantize(x_q: QuantizedTensor, dtype: torch.dtype) -> Callable[[QuantizedTensor], Tensor]:
    """`QuantizedTensor.dequantize`, bit for bit, in one reading, for operands of the spec, shape and strides of x_q.

    Call `supports_decode` first.

    dtype: float32 or bfloat16; both hold every number of 8 bits or less.
    """
    fmt, granularity, turned = x_q.spec.format, x_q.spec.granularity, column_major(x_q.data)
    rows, cols = x_q.data.shape
    if turned:
        rows, cols, granularity = cols, rows, granularity.transposed
    if not rows or not cols:
        return lambda x_q: torch.empty(x_q.shape, dtype=dtype, device="cpu")
    sizes = rows, cols, *granularity.block_shape((rows, cols))
    numbers, in_bf16 = code_numbers(fmt), int(dtype == torch.bfloat16)
    decode, threads, empty = native_build.loaded("decode").ottava_decode, torch.get_num_threads, torch.empty

    def run(x_q: QuantizedTensor) -> Tensor:
        codes, scales = x_q.data, x_q.scale_inv
        if turned:
            codes, scales = codes.t(), scales.t()
        codes, scales = codes.contiguous(), scales.contiguous()
        out = empty((rows, cols), dtype=dtype, device="cpu")
        decode(address(codes), *sizes, address(scales), *numbers, address(out), in_bf16, threads())
        return out.t() if turned else out

    return run


def code_numbers(fmt: Format) -> tuple[int, int, int, int]:
    """mantissa_bits, bias, bits, and the first code that is no number, -1 if there is none."""
    largest = int((fmt.max / 2.0**fmt.emax - 1 + fmt.emax + fmt.bias) * 2**fmt.mantissa_bits)  # as a code
    return fmt.mantissa_bits, fmt.bias, fmt.bits, largest + 1 if fmt.has_nan else -1


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
    library: str
    """The file of C++ that makes the codes."""
    cast: _Cast
    """The numbers of the spec."""
    address: int
    """Their address."""
    transposed: Granularity
    """Its granularity for x.T."""


@functools.lru_cache(maxsize=512)
def settings(spec: QuantizationSpec) -> CastSettings:
    """The settings of a spec; computed once."""
    fmt, by_rule, at_random = spec.format, spec.block_scale != "amax", spec.rounding == "stochastic"
    # random rounding first: by a rule it takes scales that torch has chosen
    library = "stochastic" if at_random else "block_scales" if by_rule else "quantize"
    refusal = None
    if fmt.bits > 8 or not fmt.signed:
        refusal = f"{NAME}: casts to signed formats of at most 8 bits; got {fmt}"
    elif by_rule and not at_random and spec.block_scale not in RULES:
        refusal = f"{NAME}: has no rule {spec.block_scale!r} for block scales"
    elif abs(spec.margin) > _MOST_OCTAVES or spec.guard_bits > _MOST_OCTAVES:
        refusal = f"{NAME}: takes at most {_MOST_OCTAVES} octaves; got margin {spec.margin}, guard {spec.guard_bits}"
    if refusal is not None:
        return CastSettings(refusal, library, _Cast(), 0, spec.granularity.transposed)
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
    return CastSettings(None, library, cast, ctypes.addressof(cast), spec.granularity.transposed)
