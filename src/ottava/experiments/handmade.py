"""Casts that a script makes by itself: sees torch's conversions to FP8, and runs a model without them.

A layer of a library is known by its class. A script that writes `x.to(torch.float8_e4m3fn)` in a function of its own
has no such class, so the conversion itself is what is seen, and what is left out: the numbers stay as they are, and so
do those that a clamp to the format's largest number would cut off. Scales before and after it remain. Rounding by other
means, such as a table of the values of FP4, is not seen.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ottava.experiments.program import lay_below, take_away
from ottava.numerics.formats import FORMATS

_NAMES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
NARROW = frozenset(getattr(torch, name) for name in _NAMES)
"""The dtypes whose conversions count. Not E8M0: it holds scales."""
_LARGEST = frozenset((240.0, *(f.max for f in FORMATS.values() if f.bits <= 8)))


class Seen(TorchFunctionMode):
    """Notes where Python converts to FP8, from `begin` to `end`.

    Args:
        inside: whether a forward of a watched model runs, or a backward.

    Example:
        >>> seen = Seen(lambda: True).begin()
        >>> _ = torch.ones(2).to(torch.float8_e4m3fn)
        >>> seen.end()
        >>> seen.model is not None, seen.outside
        (True, None)
    """

    def __init__(self, inside: Callable[[], bool]) -> None:
        super().__init__()
        self._inside, self.active = inside, True
        self.model: str | None = None
        """FILE:LINE of the first conversion inside a forward or a backward."""
        self.outside: str | None = None
        """The same of the first one elsewhere: in an optimizer, in a collective, at loading."""

    def begin(self) -> Seen:
        """Enters it, below the modes of others."""
        lay_below(self)
        return self

    def end(self) -> None:
        """Leaves it."""
        self.active = False
        take_away(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.active:
            return result
        # not through an attribute: a getter of a tensor would come here again
        if type(result) is Tensor and (self.model is None or self.outside is None):
            with torch._C.DisableTorchFunctionSubclass():
                narrow = result.dtype in NARROW
            if narrow and args and not (isinstance(args[0], Tensor) and args[0].dtype in NARROW):
                self._note()
        return result

    def _note(self) -> None:
        where = _caller()
        if where and (self._inside() or torch._C._current_graph_task_id() != -1):
            self.model = self.model or where
        elif where:
            self.outside = self.outside or where


@functools.cache
def _places() -> tuple[str, tuple[str, ...]]:
    """(the folder of our code, the folders that are passed: torch's, and those that only look on)."""
    ours = Path(__file__).resolve().parents[1]
    return str(ours), (str(Path(torch.__file__).parent), str(ours / "watching"), str(ours / "experiments"))


def _caller() -> str:
    """FILE:LINE of the innermost frame that is neither torch's nor ours; "" if the call is ours."""
    ours, passed = _places()
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(passed):
            return "" if name.startswith(ours) else f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


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
