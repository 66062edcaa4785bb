"""SGD: torch's bits."""

from __future__ import annotations

import torch

from optim.samples import follows_torch
from ottava.optim import SGD


def test_bits_are_those_of_torch() -> None:
    for options in (
        {},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"momentum": 0.9, "nesterov": True},
    ):
        follows_torch(lambda p, o=options: SGD(p, 0.1, **o), lambda p, o=options: torch.optim.SGD(p, 0.1, **o))
