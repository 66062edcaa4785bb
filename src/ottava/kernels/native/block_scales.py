"""NVFP4's casts by rules for block scales on a CPU in C++ (src/block_scales.cpp): the reference's bits, much faster.

One reading searches the scales of a row of blocks and makes its codes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ottava.kernels import reference
from ottava.kernels.gate import address, refusal
from ottava.kernels.native import quantize as native_quantize
from ottava.kernels.native.build import Built, load
from ottava.kernels.native.quantize import RunCast
from ottava.kernels.reference import Cast
from ottava.numerics.block_scales import FOUR_OVER_SIX_TOPS, MS_EDEN_TOPS, TE_FOUR_OVER_SIX
from ottava.numerics.formats import E2M1
from ottava.numerics.rounding import check_input_dtype, draw_seed
from ottava.numerics.tensor import QuantizationSpec

NAME = "native_block_scales"

RULES: Mapping[str, tuple[int, float, tuple[float, ...]]] = MappingProxyType(
    {"four_over_six": (0, *FOUR_OVER_SIX_TOPS), "ms_eden": (1, *MS_EDEN_TOPS)}
    | {
        rule: (2 if error == "MAE" else 3, bound * E2M1.max, FOUR_OVER_SIX_TOPS[1])
        for rule, (bound, error) in TE_FOUR_OVER_SIX.items()
    }
)
"""Rule -> its number in the C++ file, the tensor's amax times its scale, where a block's amax may go."""
_LARGEST_BLOCK = 1 << 14  # elements whose errors are summed at once
_JOB = struct.Struct("@PPPPqqqqqqqqfff")
"""The C++ file's `Job`."""


def built(dtype: torch.dtype = torch.bfloat16) -> Built:
    """The library that casts from a dtype, or why there is none."""
    return load("block_scales", _declare, native_quantize.VARIANTS.get(dtype, ""))


def _declare(library: ctypes.CDLL) -> None:
    library.ottava_cast_by_rule.restype = ctypes.c_int
    library.ottava_cast_by_rule.argtypes = [ctypes.c_char_p]


def supports_quantize(x: Tensor, spec: QuantizationSpec, scale: Tensor | None = None) -> str | None:
    """Why this kernel does not take such a cast; None if it does.

    Example:
        >>> from ottava.numerics.formats import E4M3
        >>> supports_quantize(torch.ones(2, 2), QuantizationSpec(E4M3))
        'native_block_scales: chooses scales by a rule for FP4; got amax'
    """
    if spec.block_scale not in RULES:
        return f"{NAME}: chooses scales by a rule for FP4; got {spec.block_scale}"
    if spec.rounding != "nearest_even":
        return f"{NAME}: rounds to nearest even; got {spec.rounding}"
    if not x.is_cpu:
        return f"{NAME}: runs on a cpu; got {x.device.type}"
    if reason := refusal(x):
        return f"{NAME}: takes plain tensors; {reason}"
    rows, cols = spec.granularity.block_shape((x.shape[0], x.shape[-1]))
    if rows * cols > _LARGEST_BLOCK:
        return f"{NAME}: takes blocks of at most {_LARGEST_BLOCK:,} elements; got {spec.granularity}"
    if reason := built(x.dtype).reason:
        return f"{NAME}: {reason}"
    return None


def quantize(x: Tensor, spec: QuantizationSpec, scale: Tensor | None = None) -> Cast:
    """As `reference.quantize`, bit for bit, from the same seed of torch's generator; call `supports_quantize` first.

    Example:
        >>> from ottava.numerics.formats import E2M1
        >>> from ottava.numerics.scaling import BLOCK_1X16
        >>> x, spec = torch.randn(4, 40), QuantizationSpec(E2M1, BLOCK_1X16, "e4m3", block_scale="four_over_six")
        >>> supports_quantize(x, spec) is not None or all(map(torch.equal, quantize(x, spec),
        ...                                                   reference.quantize(x, spec)))
        True
    """
    return plan_quantize(x, spec)(x, scale, None)


def plan_quantize(x: Tensor, spec: QuantizationSpec) -> RunCast:
    """`quantize` for every matrix of the dtype and shape of x."""
    check_input_dtype(x, "quantize")
    if x.dim() != 2 or not x.numel():  # the reference raises the error, or makes a scale
        return lambda x, scale, staged: reference.quantize(x, spec, scale)
    shape, (rule, top, candidates) = (x.shape[0], x.shape[1]), RULES[spec.block_scale]
    block, grid = spec.granularity.block_shape(shape), spec.granularity.grid_shape(shape)
    group = 0 if spec.transform is None else spec.transform.group or 0
    library = built(x.dtype).library
    assert library is not None  # supports_quantize was asked

    def run(x: Tensor, scale: Tensor | None, staged: Tensor | None) -> Cast:
        x = x.detach().contiguous()
        data = torch.empty(shape, dtype=spec.format.storage_dtype, device="cpu")
        scale_inv, amax = (torch.empty(grid, dtype=torch.float32, device="cpu") for _ in range(2))
        seed = int(draw_seed(x.device)) if spec.block_scale == "ms_eden" else 0
        job = _JOB.pack(
            *map(address, (x, data, scale_inv, amax)),
            *(*shape, *block, group, seed, torch.get_num_threads(), rule),
            *(top, candidates[0], candidates[-1]),
        )
        if library.ottava_cast_by_rule(job):
            raise MemoryError(f"quantize: no memory for the errors of a block of {block[0]} x {block[1]}")
        return Cast(data, scale_inv, amax)

    return run
