"""One process alone; tests/distributed/train_scenarios.py tests several."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.base.settings import ConfigError
from ottava.train.config import ParallelConfig, load_config
from ottava.train.ranks import Ranks, _place, _story, explained, first_not_finite

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


def test_the_story_names_who_failed_who_is_silent_and_who_was_elsewhere() -> None:
    here, there = {"place": "step 3, forward of a"}, {"place": "step 3, backward of b"}
    failed = {"place": "step 3, forward of c", "failed": "ValueError: odd"}
    assert _story(0, [here, failed, None]) == (
        "rank 1 failed (step 3, forward of c): ValueError: odd; rank 0 waited for it (step 3, forward of a)"
    )
    assert _story(1, [None, here, None]).startswith(
        "ranks 0, 2 did not answer: killed, or busy elsewhere; rank 1 waited"
    )
    assert "rank 2 did not come: it waited elsewhere (step 3, backward of b)" in _story(0, [here, here, there])
    assert "all processes waited at the same place" in _story(0, [here, here])


def test_the_place_of_an_error_is_a_layer() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError("odd")

    model = nn.Sequential(nn.Sequential(ottava.nn.Linear(4, 4), Bad()))
    with pytest.raises(ArithmeticError) as caught:
        model(torch.ones(1, 4))
    assert _place(caught.value.__traceback__, model) == "forward of 0.1"
    assert _place(None, model) == "outside of layers"


def test_the_first_output_that_is_not_finite_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU())
    assert first_not_finite(model, lambda: model(torch.ones(1, 4))) == ""
    with torch.no_grad():
        model[1].bias[0] = float("inf")
    assert first_not_finite(model, lambda: model(torch.ones(1, 4))) == "1"
    assert not any(module._forward_hooks for module in model.modules())


def test_one_process_has_its_own_error() -> None:
    alone = explained(Ranks(ParallelConfig(), torch.device("cpu")), nn.Linear(1, 1), lambda: "step 1")
    with pytest.raises(RuntimeError, match=r"^gloo: odd$"), alone:
        raise RuntimeError("gloo: odd")
