"""Layers that torch.compile must not look into. Imported while it traces: torch's decorator imports Dynamo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.compiler.disable(reason="compiled code can neither make buffers for predicted scales nor call an autocast")
def uncompiled(layer: Any, *inputs: Any) -> Tensor:
    """The layer's eager `run`; a break in the graph around it."""
    return layer.run(*inputs)  # type: ignore[no-any-return]  # a Layer, which imports this


@torch.compiler.disable
def apart(function: Any, *arguments: Any) -> Any:
    """The call of a function outside of compiled code.

    Example:
        >>> apart(max, 1, 2)
        2
    """
    return function(*arguments)
