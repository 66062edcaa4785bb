"""Lion: its formula in fp64."""

from __future__ import annotations

import torch
from torch import nn

from ottava.optim import Lion


def test_lion_is_its_formula() -> None:
    weight = nn.Parameter(torch.randn(500))
    optimizer = Lion([weight], 1e-2, weight_decay=0.1)
    w, m = weight.detach().double().clone(), torch.zeros(500).double()
    for _ in range(50):
        g = torch.randn(500)
        weight.grad = g
        optimizer.step()
        w = w * (1 - 1e-3) - 1e-2 * (0.9 * m + 0.1 * g.double()).sign()
        m = 0.99 * m + 0.01 * g.double()
    assert float((weight.detach() - w).abs().max()) < 50 * 2.0**-24 * 4
