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
    """(M, K), (N, K) -> (M, N), in their dtype; a bias of another one is added to the fp32 sum, as `reference` does."""
    if bias is None:
        return torch.mm(a, b.t())
    if bias.dtype == a.dtype or a.element_size() > 2:
        return torch.addmm(bias.to(a.dtype), a, b.t())
    # torch's GEMMs of 16-bit operands would round the bias first; only that of a GPU gives its sum in fp32
    y = torch.mm(a, b.t(), out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float().t()
    return (y + bias.float()).to(a.dtype)
