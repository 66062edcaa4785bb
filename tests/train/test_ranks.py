"""One process alone; tests/distributed/train_scenarios.py tests several."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ottava.base.settings import ConfigError
from ottava.train.config import ParallelConfig, load_config
from ottava.train.ranks import Ranks

CPU = torch.device("cpu")


def test_one_process_sums_what_it_has() -> None:
    ranks = Ranks(ParallelConfig(), CPU)
    batch = torch.arange(6).view(3, 2)
    assert ranks.first
    assert torch.equal(ranks.rows(batch), batch)
    assert ranks.sum(torch.tensor(0.1)) == ranks.mean(torch.tensor(0.1)) == torch.tensor(0.1).item()
    assert (ranks.any(True), ranks.any(False), ranks.tell("x"), ranks.everything([1])) == (True, False, ["x"], [1])
    ranks.agree({"a": 1})
    with pytest.raises(KeyError):
        ranks.together(lambda: {}["x"])
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    assert ranks.clip(layer.parameters(), 1.0) == 5.0
    assert layer.weight.grad.norm() == pytest.approx(1.0, abs=1e-5)


def test_sizes_that_do_not_fit_are_sentences() -> None:
    with pytest.raises(
        ConfigError, match=r"needs 4 processes \(pp 1 x dp 2 x cp 1 x shard 1 x tp 2\), but there is one"
    ):
        Ranks(ParallelConfig(dp=2, tp=2), CPU)
    for settings, said in (
        (["parallel.ep=2"], "parallel.dp x parallel.cp is 1; needs a multiple of parallel.ep, which is 2"),
        (["parallel={dp: 2, ep: 2}"], "parallel.ep needs model.experts"),
        (["parallel={dp: 2, ep: 2}", "model.experts=3"], "model.experts is 3; needs a multiple of parallel.ep"),
        (["parallel={dp: 2, ep: 2, shard: 2}", "model.experts=4"], "shard=1"),
        (["parallel.tp=2", "model.experts=4"], "set parallel.ep instead"),
        (["parallel.cp=3"], "sequence_length is 128; needs a multiple of parallel.cp x parallel.tp, which is 3"),
        (["model.experts=1"], "experts is 1; needs at least experts_per_token, 2"),
        (["optimizer.name=muon", "model.experts=4"], "set adamw"),
        (["parallel.dp=3"], "batch_size is 16; needs a multiple of parallel.dp x parallel.shard x microbatches, which"),
        (["parallel.tp=4"], "model.kv_heads is 2; needs a multiple of parallel.tp, which is 4"),
        (["parallel.pp=2"], "microbatches is 1; needs a multiple of parallel.pp"),
        (["parallel.pp=8", "microbatches=8"], "model.layers is 5; needs one for each of 8 pipeline stages"),
        (["parallel.dp=2", "guard={}"], "guard and auto_fallback watch one process"),
        (["parallel.shard=2", "optimizer.name=muon"], "needs whole weights"),
        (["parallel.dp=2", "init=runs/a", "carry=optimizer"], "carry=optimizer needs one process"),
        (["parallel.tp=2", "optimizer={weights: fp8, master: fp32}"], "cannot be split by parallel.tp"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(None, settings)
        assert said in str(caught.value)
