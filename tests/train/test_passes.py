"""Microbatches in one process; pipelines are tested in tests/distributed/train_scenarios.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ottava.train.config import ModelConfig, ParallelConfig
from ottava.train.model import ByteTransformer, loss
from ottava.train.parallel import Microbatches
from ottava.train.ranks import Ranks


def test_microbatches_make_the_gradient_of_the_batch() -> None:
    """In double precision, to its eps."""
    torch.manual_seed(0)
    model = ByteTransformer(ModelConfig(d_model=32, layers=1, heads=2, kv_heads=1, ffn=48), 16)
    ids = torch.randint(0, 256, (2, 8, 16))
    compute = partial(torch.autocast, "cpu", torch.bfloat16, enabled=False)
    ranks = Ranks(ParallelConfig(), torch.device("cpu"))
    found = {}
    for count in (1, 2, 8):
        model.zero_grad()
        value = Microbatches(model, compute, count, ranks).train(*ids)
        assert value.item() == pytest.approx(loss(model, *ids).item(), rel=1e-6)
        assert Microbatches(model, compute, count, ranks).loss(*ids).item() == value.item()
        found[count] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for count in (2, 8):  # sums over 8 x 16 rows in FP32, in another order: some hundred roundings at most
        assert (found[count] - found[1]).norm() < 2**-15 * found[1].norm()
