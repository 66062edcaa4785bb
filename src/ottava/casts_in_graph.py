"""Casts inside torch.compile: calls of the opaque operators that `casts` defines, with the bits of eager code.

Which operator runs is decided by specs and the type of device while torch traces, so a layer stays in one graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.kernels.custom_operator import constant_in_graph
from ottava.kernels.triton import quantize as triton_quantize
from ottava.quantized_tensor import Beside, Both, Operand, QuantizationSpec, QuantizedTensor, spec_from_key


def cast_in_graph(
    x: Tensor, spec: QuantizationSpec | None, spec_t: QuantizationSpec | None, scale: Tensor | None, beside: Beside
) -> Both:
    """As `casts.cast_both`, of opaque operators."""
    known = spec or spec_t
    assert known is not None
    if (spec is not None and spec.transform) or (spec_t is not None and spec_t.transform):
        of_x = None if spec is None else _behind(x, spec, beside[0])
        of_x_t = None if spec_t is None else _behind(x.t(), spec_t, beside[1])
        return Both(of_x, of_x_t, None)
    if spec is not None and spec_t is not None:
        at_once, one_scale = _both_of(_casts_as(x), spec.key, spec_t.key)
        if at_once:
            data, scale_inv, amax, data_t, own = torch.ops.ottava.quantize_both(x, spec.key, spec_t.key, scale)
            col = QuantizedTensor(data_t, scale_inv.t() if one_scale else own, spec_t, x.dtype)
            return Both(QuantizedTensor(data, scale_inv, spec, x.dtype), col, amax)
    if known.granularity.transposes and (spec is None or spec_t is None or spec == spec_t):
        data, scale_inv, amax = torch.ops.ottava.quantize(x, known.key, scale)
        x_q = QuantizedTensor(data, scale_inv, known, x.dtype)
        return Both(None if spec is None else x_q, None if spec_t is None else x_q.t(), amax)
    row = col_alone = seen = None
    if spec is not None:
        data, scale_inv, seen = torch.ops.ottava.quantize(x, spec.key, scale)
        row = QuantizedTensor(data, scale_inv, spec, x.dtype)
    if spec_t is not None:
        data, scale_inv, amax = torch.ops.ottava.quantize(x.t(), spec_t.key, scale)
        col_alone = QuantizedTensor(data, scale_inv, spec_t, x.dtype)
        seen = amax if seen is None else seen
    return Both(row, col_alone, seen)


def _behind(x: Tensor, spec: QuantizationSpec, other: Operand | None) -> QuantizedTensor:
    """A cast behind the transform of its spec, if there is one."""
    if spec.transform is None:
        data, scale_inv, _ = torch.ops.ottava.quantize(x, spec.key, None)
        return QuantizedTensor(data, scale_inv, spec, x.dtype)
    met = other.aside if isinstance(other, QuantizedTensor) and spec.transform.paired else None
    operator = torch.ops.ottava.quantize_drawn if _draws(spec.key) else torch.ops.ottava.quantize_behind
    data, scale_inv, aside = operator(x, spec.key, met)
    return QuantizedTensor(data, scale_inv, spec, x.dtype, aside=None if aside.dim() == 1 else aside)


@constant_in_graph
def _draws(spec: str) -> bool:
    """Whether a cast takes numbers from torch's generator, so that compiled code may not merge two of them."""
    parsed = spec_from_key(spec)
    drawn = parsed.rounding == "stochastic" or parsed.block_scale == "ms_eden"
    return drawn or (parsed.transform is not None and parsed.transform.draws)


def _casts_as(x: Tensor) -> str:
    """The type of device; it decides how compiled code casts x and x.T."""
    return x.device.type


@constant_in_graph
def _both_of(device: str, spec: str, spec_t: str) -> tuple[bool, bool]:
    """Whether compiled code calls one operator for both casts, and whether both share each element's scale."""
    cells = spec_from_key(spec), spec_from_key(spec_t)
    if device == "cpu":
        return not (cells[0] == cells[1] and cells[0].granularity.transposes), False
    return not any(map(triton_quantize.refuses, cells)), triton_quantize.shared(*cells)
