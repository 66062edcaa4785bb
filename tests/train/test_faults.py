"""The sentences about faults; real faults are in tests/distributed/train_scenarios.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.train.config import ParallelConfig
from ottava.train.parallel import _place, _story
from ottava.train.ranks import Ranks, explained, first_not_finite


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
