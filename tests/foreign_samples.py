"""A layer of another library, for the tests of whoever meets it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """That of Hugging Face's GPT-2: a linear layer whose weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / 8), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], self.nf)
