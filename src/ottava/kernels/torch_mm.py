"""torch's own GEMM on matrices in high precision: the fastest kernel if the device has units for their dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NAME = "torch.mm"


def supports_dense(a: Tensor, b: Tensor) -> str | None:
    """Takes everything."""
    return None


def plan_dense(a: Tensor, b: Tensor, bias: Tensor | None) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """A function (a, b, bias) -> y of their dtype, for all matrices like these; mostly torch's own."""
    return torch.nn.functional.linear if bias is None or bias.dtype == a.dtype else dense


def dense(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """(M, K), (N, K) -> (M, N), in their dtype."""
    if bias is None:
        return torch.mm(a, b.t())
    return torch.addmm(bias.to(a.dtype), a, b.t())
