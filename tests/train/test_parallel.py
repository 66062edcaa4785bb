"""The parts of a model by process; tests/distributed/train_scenarios.py trains them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ottava.train.config import ModelConfig, ParallelConfig
from ottava.train.model import ByteTransformer, loss
from ottava.train.parallel import Microbatches, _shared_out, parts_of
from ottava.train.ranks import Ranks


def test_stages_cover_all_layers_once() -> None:
    for layers in (4, 5, 9):
        for pp in (1, 2, 4):
            for schedule in ("1f1b", "interleaved"):
                config = ParallelConfig(pp=pp, schedule=schedule)
                if layers < config.stages:
                    continue
                parts = sorted(part for place in range(pp) for part in parts_of(config, layers, place))
                assert [number for number, _ in parts] == list(range(config.stages))
                assert [layer for _, part in parts for layer in part] == list(range(layers))


def test_stages_make_what_the_model_makes() -> None:
    sizes = ModelConfig(d_model=32, layers=5, heads=2, kv_heads=1, ffn=48)
    torch.manual_seed(0)
    whole = ByteTransformer(sizes, 16)
    ids = torch.randint(0, 256, (2, 16))
    config, x = ParallelConfig(pp=2, schedule="interleaved"), ids
    for number, place in enumerate((0, 1, 0, 1)):
        torch.manual_seed(0)
        stage = ByteTransformer(sizes, 16)
        own = parts_of(config, 5, place)
        stage.keep([part for _, part in own])
        assert stage.state_dict().keys() < whole.state_dict().keys()
        x = stage(x, dict(own)[number])
    assert torch.equal(x, whole(ids))


def test_rows_of_fused_weights_are_shared_out_by_matrix() -> None:
    order = _shared_out([8, 4, 4], 2)
    assert order.sort().values.tolist() == list(range(16))
    assert order[:8].tolist() == [0, 1, 2, 3, 8, 9, 12, 13]


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
