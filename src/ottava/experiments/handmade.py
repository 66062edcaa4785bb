"""Casts that a script makes by itself: runs a model without torch's conversions to FP8, which a `Trace` has seen.

A layer of a library is known by its class. A script that writes `x.to(torch.float8_e4m3fn)` in a function of its own
has no such class, so the conversion itself is what is seen, and what is left out: the numbers stay as they are, and so
do those that a clamp to the format's largest number would cut off. Scales before and after it remain. Rounding by other
means, such as a table of the values of FP4, is not seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ottava.numerics.formats import FORMATS

_NAMES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
NARROW = frozenset(getattr(torch, name) for name in _NAMES)
"""The dtypes whose conversions count. Not E8M0: it holds scales."""
_LARGEST = frozenset((240.0, *(f.max for f in FORMATS.values() if f.bits <= 8)))


class Exact(TorchDispatchMode):
    """Runs torch without conversions to FP8 and without clamps to its largest numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in NARROW:
            kwargs["dtype"] = None
        elif func in (torch.ops.aten.clamp.default, torch.ops.aten.clamp_.default) and _to_largest(*args[1:], **kwargs):
            return args[0] if func is torch.ops.aten.clamp_.default else args[0].clone()
        elif func is torch.ops.aten._scaled_mm.default and args[0].dtype not in NARROW:
            return _multiplied(*args, **kwargs)
        return func(*args, **kwargs)


def _to_largest(low: Any = None, high: Any = None, **bounds: Any) -> bool:
    low, high = bounds.get("min", low), bounds.get("max", high)
    return isinstance(high, (int, float)) and isinstance(low, (int, float)) and -low == high and high in _LARGEST


def _multiplied(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Any = None,
    _: Any = None,
    out_dtype: Any = None,
    *more: Any,
) -> Tensor:
    """`torch._scaled_mm` of operands that were not cast."""
    product = (a.float() * scale_a.float()) @ (b.float() * scale_b.float())
    product = product if bias is None else product + bias.float()
    return product if out_dtype is None else product.to(out_dtype)
