"""`quantize` and its kin: casts to FP8 and back, and the choice of the kernel that runs them.

The first kernel of an explicit tuple that supports a cast makes it; `explain_quantize` lists every refusal. All of them
give the reference's bits. Inside torch.compile casts are opaque custom operators (`ottava::quantize`,
`ottava::quantize_both`), with the bits of eager code.
"""

from __future__ import annotations

import functools
import json
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ottava.kernels import native_cpu, native_stochastic, reference, triton_quantize
from ottava.kernels.custom_operator import constant_in_graph, custom_operator
from ottava.quantized_tensor import QuantizationSpec, QuantizedTensor


class QuantizeKernel(Protocol):
    """What a kernel file that casts offers."""

    NAME: str

    def supports_quantize(self, x: Tensor, spec: QuantizationSpec, scale: Tensor | None) -> str | None:
        """None, or the reason why not."""

    def quantize(self, x: Tensor, spec: QuantizationSpec, scale: Tensor | None) -> reference.Cast:
        """(R, C) -> codes, scale_inv, amax: the bits of the reference."""


_CPU_CASTS: tuple[QuantizeKernel, ...] = (native_cpu, native_stochastic, reference)
_ACCELERATOR_CASTS: tuple[QuantizeKernel, ...] = (triton_quantize, reference)


class Both(NamedTuple):
    """Casts of x and of x.T."""

    row: QuantizedTensor | None
    """Of x."""
    col: QuantizedTensor | None
    """Of x.T."""
    amax: Tensor | None
    """Of the first of them, one entry a block; None: it has been staged."""


def quantize(x: Tensor, spec: QuantizationSpec, *, scale: Tensor | None = None) -> QuantizedTensor:
    """Casts a matrix to `spec`.

    Args:
        x: (R, C); float32, bfloat16 or float16; any strides, also empty.
        scale: fp32, one entry, multiplies x before the cast (delayed scaling); None: the current scale of each block.
    Returns:
        QuantizedTensor: .data codes (R, C) | .scale_inv fp32, one entry per block | .dequantize().
    Raises:
        TypeError: dtype.  ValueError: not a matrix.
    Edge cases: zero blocks have scale 1; infinities saturate; NaN stays; see `scaling.compute_scale`, `rounding`.

    Example:
        >>> from ottava.formats import E4M3
        >>> x_q = quantize(torch.tensor([[0.5, -3.0], [14.0, 7.0]]), QuantizationSpec(E4M3))
        >>> x_q.scale_inv, x_q.data.float()                                # 14 / 448, and what is kept in FP8
        (tensor([[0.0312]]), tensor([[ 16., -96.],
                [448., 224.]]))
    """
    return quantize_with_amax(x, spec, scale=scale)[0]


def quantize_with_amax(
    x: Tensor, spec: QuantizationSpec, *, scale: Tensor | None = None
) -> tuple[QuantizedTensor, Tensor]:
    """As `quantize`, and the amax of each block that the cast saw; where `scale` is 0 the current scale is used."""
    if torch.compiler.is_compiling():
        data, scale_inv, amax = torch.ops.ottava.quantize(x, spec.key, scale)
        return QuantizedTensor(data, scale_inv, spec, x.dtype), amax
    data, scale_inv, amax = _quantize(x, spec, scale)
    handed_on = amax if x.is_cpu or amax.numel() == 1 else None  # elsewhere nobody would read it back
    return QuantizedTensor(data, scale_inv, spec, x.dtype, handed_on), amax


def quantize_both(
    x: Tensor,
    spec: QuantizationSpec | None,
    spec_t: QuantizationSpec | None,
    *,
    scale: Tensor | None = None,
    staged: Tensor | None = None,
) -> Both | None:
    """x cast to spec and x.T cast to spec_t, where a kernel gives them from one reading of x; None where none does.

    Then cast them one by one: the bits are the same.

    Args:
        x: (R, C); spec, spec_t: None for one that is not wanted.
        scale: as for `quantize`, one for both.
        staged: fp32 (3,), what a door has seen since its last boundary; the same launch raises it to this cast's amax,
            whose spec has one scale for the whole tensor.
    """
    if not torch.compiler.is_compiling():
        return _quantize_both(x, spec, spec_t, scale, staged)
    if spec is None or spec_t is None:
        return None
    at_once, one_scale = _both_of(_casts_as(x), spec.key, spec_t.key)
    if not at_once:
        return None
    data, scale_inv, amax, data_t, own = torch.ops.ottava.quantize_both(x, spec.key, spec_t.key, scale)
    first = QuantizedTensor(data, scale_inv, spec, x.dtype)
    return Both(first, QuantizedTensor(data_t, scale_inv.t() if one_scale else own, spec_t, x.dtype), amax)


def _both_on_cpu(
    x: Tensor,
    spec: QuantizationSpec | None,
    spec_t: QuantizationSpec | None,
    scale: Tensor | None,
    staged: Tensor | None,
) -> Both | None:
    one = spec or spec_t
    alike = spec is spec_t or spec is None or spec_t is None or spec == spec_t  # `==` walks over every field
    if one is not None and alike and one.granularity.transposes:
        if not x.numel() or native_cpu.supports_quantize(x, one, scale) is not None:
            return None
        data, scale_inv, amax = native_cpu.quantize(x, one, scale, staged)
        x_q = QuantizedTensor(data, scale_inv, one, x.dtype, amax)
        here, there = None if spec is None else x_q, None if spec_t is None else x_q.t()
        return Both(here, there, amax if staged is None else None)
    if scale is not None or staged is not None or spec is None or spec_t is None:
        return None
    if native_cpu.supports_quantize_both(x, spec, spec_t) is not None:
        return None
    casts = native_cpu.quantize_both(x, spec, spec_t)
    row, col = (
        QuantizedTensor(c.data, c.scale_inv, s, x.dtype, c.amax) for c, s in zip(casts, (spec, spec_t), strict=True)
    )
    return Both(row, col, casts[0].amax)


def dequantize(x_q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """As `QuantizedTensor.dequantize`, bit for bit, by the fastest kernel that takes it.

    Args:
        dtype: that of the original by default.

    Example:
        >>> from ottava.formats import E4M3
        >>> dequantize(quantize(torch.tensor([[1.0, 2.0]]), QuantizationSpec(E4M3)))
        tensor([[1., 2.]])
    """
    wanted = dtype or x_q.dtype
    if (
        not torch.compiler.is_compiling()
        and wanted in (torch.float32, torch.bfloat16)
        and native_cpu.supports_decode(x_q.data, x_q.spec.format) is None
    ):
        return native_cpu.dequantize(x_q, wanted)
    return x_q.dequantize(wanted)


def explain_quantize(x: Tensor, spec: QuantizationSpec, *, scale: Tensor | None = None) -> str:
    """Which kernel `quantize` would run on this matrix, and why not those before it, one a line.

    Example:
        >>> from ottava.formats import E4M3
        >>> explain_quantize(torch.ones(2, 2), QuantizationSpec(E4M3, rounding="stochastic"))
        'native_cpu: rounds to nearest even; got stochastic\\nnative_stochastic: runs'
    """
    lines = []
    for kernel in _casts(x):
        if reason := kernel.supports_quantize(x.detach(), spec, scale):
            lines.append(reason)
        else:
            return "\n".join([*lines, f"{kernel.NAME}: runs"])
    raise AssertionError("the reference takes every cast")


def _casts(x: Tensor) -> tuple[QuantizeKernel, ...]:
    return _CPU_CASTS if x.is_cpu else _ACCELERATOR_CASTS


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Inside the operations dtypes are explicit: torch.autocast must not turn the fp32 accumulation into BF16."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _quantize(x: Tensor, spec: QuantizationSpec, scale: Tensor | None) -> reference.Cast:
    if x.requires_grad:  # codes carry no gradient
        x = x.detach()
    for kernel in _casts(x):
        if kernel.supports_quantize(x, spec, scale) is None:
            break
    if kernel is native_cpu:  # no torch operation that autocast could change
        return native_cpu.quantize(x, spec, scale)
    with no_autocast(x.device):
        return kernel.quantize(x, spec, scale)


def _quantize_both(
    x: Tensor,
    spec: QuantizationSpec | None,
    spec_t: QuantizationSpec | None,
    scale: Tensor | None,
    staged: Tensor | None,
) -> Both | None:
    x = x.detach()
    if native_cpu in _casts(x):
        return _both_on_cpu(x, spec, spec_t, scale, staged)
    if any(s is not None and triton_quantize.supports_quantize(x, s, scale) for s in (spec, spec_t)):
        return None
    casts = triton_quantize.quantize_both(x, spec, spec_t, scale, staged)
    row, col = (
        QuantizedTensor(cast.data, cast.scale_inv, wanted, x.dtype) if cast is not None and wanted is not None else None
        for cast, wanted in zip(casts, (spec, spec_t), strict=True)
    )
    return Both(row, col, next(cast.amax for cast in casts if cast is not None) if staged is None else None)


@functools.lru_cache(maxsize=256)
def spec_from_key(key: str) -> QuantizationSpec:
    """The spec of `QuantizationSpec.key`."""
    return QuantizationSpec.from_dict(json.loads(key))


def _codes_like(x: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """An accelerator's GEMMs want contiguous codes, and Triton writes such; on a CPU they keep the strides of x."""
    if x.device.type == "cpu":
        return torch.empty_like(x, dtype=dtype, device=device)
    return torch.empty(x.shape, dtype=dtype, device=device)


def _as_promised(data: Tensor, x: Tensor) -> Tensor:
    """Codes of x with the strides that compiled code was told; nearly always they have them."""
    if data.stride() == x.stride() and x.device.type == "cpu":
        return data
    strides = _codes_like(x, data.dtype, "meta").stride()
    if data.stride() == strides:
        return data
    return torch.empty_strided(data.shape, strides, dtype=data.dtype, device=data.device).copy_(data)


def _promised(x: Tensor, spec: str, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    parsed = spec_from_key(spec)
    grid = parsed.granularity.grid_shape((x.shape[0], x.shape[1]))
    data = _codes_like(x, parsed.format.storage_dtype, x.device)
    return data, x.new_empty(grid, dtype=torch.float32), x.new_empty(grid, dtype=torch.float32)


@custom_operator("quantize(Tensor x, str spec, Tensor? scale) -> (Tensor, Tensor, Tensor)", _promised)
def _quantize_op(x: Tensor, spec: str, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    data, scale_inv, amax = _quantize(x, spec_from_key(spec), scale)
    return _as_promised(data, x), scale_inv, amax


def _casts_as(x: Tensor) -> str:
    """The type of device whose way of casting x and x.T compiled code takes."""
    return x.device.type


@constant_in_graph
def _both_of(device: str, spec: str, spec_t: str) -> tuple[bool, bool]:
    """Whether compiled code asks for both casts at once, and whether these have one scale for each element."""
    cells = spec_from_key(spec), spec_from_key(spec_t)
    if device == "cpu":
        return not (cells[0] == cells[1] and cells[0].granularity.transposes), False
    return not any(map(triton_quantize.refuses, cells)), triton_quantize.shared(*cells)


def _both_promised(x: Tensor, spec: str, spec_t: str, scale: Tensor | None) -> tuple[Tensor, ...]:
    data, scale_inv, amax = _promised(x, spec, scale)
    data_t, scale_inv_t, _ = _promised(x.t(), spec_t, scale)
    shared = triton_quantize.shared(spec_from_key(spec), spec_from_key(spec_t))
    return data, scale_inv, amax, data_t, x.new_empty(0, dtype=torch.float32) if shared else scale_inv_t


@custom_operator(
    "quantize_both(Tensor x, str spec, str spec_t, Tensor? scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _both_promised,
)
def _quantize_both_op(x: Tensor, spec: str, spec_t: str, scale: Tensor | None) -> tuple[Tensor, ...]:
    """(codes, scale_inv, amax) of x, (codes, scale_inv) of x.T; the last is empty where they share their scales."""
    row_spec, col_spec = spec_from_key(spec), spec_from_key(spec_t)
    at_once, _ = _both_of(_casts_as(x), spec, spec_t)  # else one cast may serve both, and outputs must not share memory
    both = _quantize_both(x, row_spec, col_spec, scale, None) if at_once else None
    if both is None:
        row, col = _quantize(x, row_spec, scale), _quantize(x.t(), col_spec, scale)
        ours, theirs, amax = (row.data, row.scale_inv), (col.data, col.scale_inv), row.amax
    else:
        assert both.row is not None
        assert both.col is not None
        assert both.amax is not None  # both were asked for, and nothing is staged
        ours, theirs, amax = (both.row.data, both.row.scale_inv), (both.col.data, both.col.scale_inv), both.amax
    own = x.new_empty(0, dtype=torch.float32) if triton_quantize.shared(row_spec, col_spec) else theirs[1]
    return _as_promised(ours[0], x), ours[1], amax, _as_promised(theirs[0], x.t()), own
