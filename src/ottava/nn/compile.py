"""What torch.compile must not look into. Imported while it traces: torch's decorator imports Dynamo."""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.disable(reason="compiled code can neither make buffers for predicted scales nor call an autocast")
def apart(function: Any, *arguments: Any) -> Any:
    """The call of a function outside of compiled code; a break in the graph around it."""
    return function(*arguments)
