"""Layers that torch.compile must not look into. Imported while it traces: torch's decorator imports Dynamo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ottava.nn.layer import Layer


@torch.compiler.disable(reason="compiled code can neither make buffers for predicted scales nor call an autocast")
def uncompiled(layer: Layer, *inputs: Any) -> Tensor:
    """The layer's eager `run`; a break in the graph around it."""
    return layer.run(*inputs)
