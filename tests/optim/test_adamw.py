"""AdamW: torch's bits, and the formula in fp64."""

from __future__ import annotations

import torch
from torch import nn

from optim.samples import follows_torch
from ottava.optim import AdamW


def test_bits_are_those_of_torch() -> None:
    for options in (
        {"lr": 1e-2, "weight_decay": 0.1},
        {"betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.0},
    ):
        follows_torch(lambda p, o=options: AdamW(p, **o), lambda p, o=options: torch.optim.AdamW(p, **o))


def test_adamw_is_near_fp64() -> None:
    """Against the formula in fp64; 100 steps of errors of some eps each."""
    weight = nn.Parameter(torch.randn(500))
    optimizer = AdamW([weight], 1e-2, weight_decay=0.1)
    w, m, v = weight.detach().double().clone(), torch.zeros(500).double(), torch.zeros(500).double()
    for t in range(1, 101):
        g = torch.randn(500)
        weight.grad = g
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g.double(), 0.999 * v + 0.001 * g.double() ** 2
        w = w - 1e-2 * (0.1 * w + (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8))
    assert float((weight.detach() - w).abs().max()) < 100 * 2.0**-24 * 8
