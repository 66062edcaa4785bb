"""Casts x.T from the codes of x, where scales are powers of two: blocks turn without a second rounding."""

from __future__ import annotations

import torch

from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.quantize import cast_both, dequantize

_POWERS = ("pow2", "e8m0", "e8m0_floor")
"""Scale formats in which every scale is a power of two."""


def refuse_turn(spec: QuantizationSpec, spec_t: QuantizationSpec) -> str | None:
    """Why `turn` cannot make x.T from the codes of x; None if it can.

    Example:
        >>> from ottava.recipe import RECIPES
        >>> refuse_turn(*RECIPES["blockwise"].cells("input")), refuse_turn(*RECIPES["blockwise_fp32"].cells("input"))
        (None, 'fp32 scales are no powers of two, so that codes would be rounded twice')
    """
    if spec.format != spec_t.format:
        return f"x is cast to {spec.format} and x.T to {spec_t.format}"
    for side in (spec, spec_t):
        if side.scale_format not in _POWERS:
            return f"{side.scale_format} scales are no powers of two, so that codes would be rounded twice"
        if not side.repeatable or side.predicted:
            return f"only x itself can be cast to {side}"
    return None


def turn(x_q: QuantizedTensor, spec_t: QuantizationSpec) -> QuantizedTensor:
    """x.T cast to spec_t, from the codes of x: between scales that are powers of two a code moves by whole octaves.

    A number loses bits only if it becomes a subnormal of its new block. Then it is rounded once more, by at most half
    the smallest subnormal. ("e8m0_floor" saturates numbers near the top, as in any cast.) The caller may free x.

    Raises:
        ValueError: `refuse_turn` gives the reason.
    Source: FP8-Flow-MoE (arXiv 2511.02302). Its 128x128 tiles take the largest scale of their rows; here each block of
        x.T has the scale of its own amax.

    Example:
        >>> from ottava.recipe import RECIPES
        >>> row, col = RECIPES["mxfp8"].cells("input")
        >>> x = torch.tensor([[1.0, 300.0], [2.0, 500.0]])
        >>> from ottava.ops.quantize import quantize
        >>> turn(quantize(x, row), col).dequantize()                                 # 500 is no number of E4M3
        tensor([[  1.,   2.],
                [288., 512.]])
    """
    if reason := refuse_turn(x_q.spec, spec_t):
        raise ValueError(f"turn: {reason}: quantize x.T itself")
    numbers = dequantize(x_q, torch.float32)  # exact: a code times a power of two
    turned = cast_both(numbers, None, spec_t).col
    assert turned is not None
    return QuantizedTensor(turned.data, turned.scale_inv, spec_t, x_q.dtype)
