"""Muon: torch's bits; other parameters go to AdamW's rule."""

from __future__ import annotations

import torch
from torch import nn

from optim.samples import copies, follows_torch, made, same, steps
from ottava.optim import AdamW, Muon


def test_bits_are_those_of_torch() -> None:
    for options in ({"lr": 0.1}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}):
        follows_torch(lambda p, o=options: Muon(p, **o), lambda p, o=options: torch.optim.Muon(p, **o), matrices=True)


def test_a_group_of_adamw_is_adamw() -> None:
    parameters = made()
    twins = copies(parameters)
    muon = Muon([{"params": parameters, "adamw": True}], 1e-2, moments="fp8")
    adamw = AdamW(twins, 1e-2, (0.9, 0.95), weight_decay=0.1, moments="fp8")
    steps([(muon, parameters), (adamw, twins)], 10)
    assert same(parameters, twins)


def test_updates_are_nearly_orthogonal() -> None:
    """All singular values of the update, in units of lr: from 0.4 to 1.3, by the witness of an SVD."""
    for shape in ((16, 96), (96, 16)):
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape)
        Muon([weight], 1.0, weight_decay=0.0).step()
        values = torch.linalg.svdvals(weight.detach()) / max(1.0, shape[0] / shape[1]) ** 0.5
        assert float(values.min()) > 0.4
        assert float(values.max()) < 1.3
