"""Stochastic rounding on a CPU in C++ (src/stochastic.cpp): the reference's bits for any number of threads.

The reference computes amaxes and scales; C++ computes random numbers and codes.
"""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from ottava.kernels import reference
from ottava.kernels.gate import address, refusal
from ottava.kernels.native import quantize as native_quantize
from ottava.kernels.native.build import Built, load
from ottava.kernels.native.quantize import RunCast
from ottava.kernels.reference import Cast
from ottava.numerics.rounding import check_input_dtype, draw_seed
from ottava.numerics.scaling import amax
from ottava.numerics.tensor import QuantizationSpec

NAME = "native_stochastic"

_JOB = struct.Struct("@PPPqqqqqqiiiif")
"""The C++ file's `Job`."""


def built(dtype: torch.dtype = torch.bfloat16) -> Built:
    """The library that casts from a dtype, or why there is none."""
    return load("stochastic", _declare, native_quantize.VARIANTS.get(dtype, ""))


def _declare(library: ctypes.CDLL) -> None:
    library.ottava_cast_stochastic.restype = None
    library.ottava_cast_stochastic.argtypes = [ctypes.c_char_p]


def supports_quantize(x: Tensor, spec: QuantizationSpec, scale: Tensor | None = None) -> str | None:
    """Why this kernel does not take such a cast; None if it does.

    Example:
        >>> from ottava.numerics.formats import E4M3
        >>> supports_quantize(torch.ones(2, 2), QuantizationSpec(E4M3))
        'native_stochastic: rounds stochastically; got nearest_even'
    """
    fmt = spec.format
    if spec.rounding != "stochastic":
        return f"{NAME}: rounds stochastically; got {spec.rounding}"
    if not x.is_cpu:
        return f"{NAME}: runs on a cpu; got {x.device.type}"
    if fmt.bits > 8 or not fmt.signed:
        return f"{NAME}: casts to signed formats of at most 8 bits; got {fmt}"
    if reason := refusal(x):
        return f"{NAME}: takes plain tensors; {reason}"
    if reason := built(x.dtype).reason:
        return f"{NAME}: {reason}"
    return None


def quantize(x: Tensor, spec: QuantizationSpec, scale: Tensor | None = None) -> Cast:
    """As `reference.quantize`, bit for bit, from the same seed of torch's generator; call `supports_quantize` first.

    Example:
        >>> from ottava.numerics.formats import E4M3
        >>> x, spec = torch.rand(4, 40), QuantizationSpec(E4M3, rounding="stochastic")
        >>> def cast(kernel):
        ...     torch.manual_seed(0)
        ...     return kernel(x, spec).data.float()
        >>> supports_quantize(x, spec) is not None or cast(quantize).equal(cast(reference.quantize))
        True
    """
    return plan_quantize(x, spec)(x, scale, None)


def plan_quantize(x: Tensor, spec: QuantizationSpec) -> RunCast:
    """`quantize` for every matrix of the dtype and shape of x."""
    check_input_dtype(x, "quantize")
    if x.dim() != 2 or not x.numel():  # the reference raises the error, or makes a scale
        return lambda x, scale, staged: reference.quantize(x, spec, scale)
    shape, granularity, fmt = (x.shape[0], x.shape[1]), spec.granularity, spec.format
    block, library = granularity.block_shape(shape), built(x.dtype).library
    numbers = fmt.mantissa_bits, fmt.emin, fmt.bits, native_quantize.nan_code(fmt), fmt.max
    assert library is not None  # supports_quantize was asked

    def run(x: Tensor, scale: Tensor | None, staged: Tensor | None) -> Cast:
        x = x.detach().contiguous()  # random numbers run along rows
        block_amax = amax(x, granularity)
        factor, scale_inv = reference.factors_of(x, block_amax, spec, granularity, scale)
        factor, data = factor.contiguous(), torch.empty(shape, dtype=fmt.storage_dtype, device="cpu")
        library.ottava_cast_stochastic(
            _JOB.pack(
                *(address(x), address(factor), address(data), *shape, *block),
                *(int(draw_seed(x.device)), torch.get_num_threads(), *numbers),
            )
        )
        return Cast(data, scale_inv, block_amax)

    return run
