"""Scaling state of many models in one process: by turns, copied, in threads, and gone when its model is gone."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel

import ottava
from scaling_samples import (
    differences,
    door_of,
    lengths,
    loss_of,
    network,
    noise,
    sgd,
    snapshot,
    train,
    with_cells,
)


def streams(models: list[nn.Sequential], turns: list[int], steps: int = 5) -> list[dict[str, Tensor]]:
    """Each model sees its own data; `turns` says who trains within a step."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(steps):
        for i in turns:
            train(models[i], [100 * i + step], optimizers[i])
    return [snapshot(model) for model in models]


def test_models_by_turns_equal_each_alone() -> None:
    """TransformerEngine #814: two models trained by turns got other histories than each by itself."""

    def pair() -> list[nn.Sequential]:
        return [network(seed=seed) for seed in (1, 2)]

    alone = [streams(pair(), [0])[0], streams(pair(), [1])[1]]
    for turns in ([0, 1], [1, 0]):
        for got, expected in zip(streams(pair(), turns), alone, strict=True):
            assert differences(got, expected) == []


def test_interleaved_forwards_and_backwards_equal_each_alone() -> None:
    """A's forward, B's forward, B's backward, A's backward: no order between models exists."""
    alone, mixed = ([network(seed=seed) for seed in (1, 2)] for _ in range(2))
    for model in alone:
        train(model, [0])
    losses = [loss_of(model, noise(0)) for model in mixed]
    for loss in reversed(losses):
        loss.backward()
    for one, other in zip(alone, mixed, strict=True):
        sgd(other).step()
        assert differences(snapshot(one), snapshot(other)) == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: AveragedModel(model).module], ids=["deepcopy", "EMA"])
def test_a_copy_has_a_life_of_its_own(copied: Callable[[nn.Module], nn.Sequential]) -> None:
    """A copy starts from the history it was copied with, shares none of it, and can be trained in its turn."""
    model = network()
    train(model, range(2))
    twin = copied(model)
    before = snapshot(twin)
    train(model, range(2, 4))
    assert differences({n: t for n, t in snapshot(twin).items() if n in before}, before) == []
    train(twin, range(2, 4))
    assert differences(snapshot(twin), snapshot(model)) == []
    assert twin[0].scaling_state is twin[2].scaling_state is not model[0].scaling_state


def test_reset_re_arms_live_modules() -> None:
    """TransformerEngine's reset() freezes the scales of live modules; after ours a model trains like a new one."""
    model, fresh = network(), network()
    train(model, range(3))
    ottava.ScalingState(model).reset()
    assert lengths(model) == [0] * 6
    model.load_state_dict({n: t for n, t in fresh.state_dict().items() if "quantizers" not in n})
    model.zero_grad(set_to_none=True)
    assert differences(snapshot(model), snapshot(fresh)) == []
    assert train(model, range(3)) == train(fresh, range(3))
    assert differences(snapshot(model), snapshot(fresh)) == []


def test_a_pickle_does_not_grow_with_the_square_of_the_model() -> None:
    """Each door's buffers are views of one tensor for all doors; 8 times the layers are 8 times the bytes."""

    def size(layers: int) -> int:
        model = network(layers=layers)
        train(model, [0])
        return len(pickle.dumps(model))

    assert size(48) < 10 * size(6)


def test_a_larger_state_takes_over() -> None:
    """ScalingState(whole) after parts were converted: one boundary for all, and histories go on."""
    model = network(layers=4)
    for part in (model[0], model[2:]):
        ottava.convert(part, "delayed")
    train(model, range(2))
    state = ottava.ScalingState(model)
    train(model, range(2, 4))
    assert lengths(model) == [4] * 12
    assert {layer.scaling_state for layer in model if hasattr(layer, "scaling_state")} == {state}


def test_a_state_made_before_the_conversion_serves_it() -> None:
    """The order of two lines is nobody's mistake."""
    model = nn.Sequential(nn.Linear(32, 32)).bfloat16()
    state = ottava.ScalingState(model)
    ottava.convert(model, "delayed")
    loss_of(model, noise(0)).backward()
    state.update()
    assert lengths(model) == [1] * 3


def test_nothing_outlives_a_model() -> None:
    """Model, state and buffers are freed without garbage collection once the last name is gone."""
    model = network()
    optimizer = sgd(model)
    train(model, range(2), optimizer)
    parts = (model, model[0], model[0].scaling_state, door_of(model), door_of(model).pack)
    refs = [weakref.ref(part) for part in parts]
    gc.disable()
    try:
        del model, optimizer, parts
        assert [ref() for ref in refs] == [None] * 5
    finally:
        gc.enable()


def test_a_model_that_dies_during_a_step_of_another_breaks_nothing() -> None:
    """Garbage collection runs whenever it likes, also between torch's step hooks: models in cycles die there."""

    def leave_garbage() -> None:
        dead = network()
        dead.__dict__["itself"] = [dead]
        train(dead, [0])

    gc.collect()
    gc.freeze()  # what lives now: to look through it at each of the collections below takes seconds
    for where in ("hook", "algorithm"):
        once = iter([gc.collect])

        def collect(window: Tensor, once: Any = once) -> Tensor:
            next(once, int)()
            return window.max()

        model = network(with_cells("delayed", amax_compute_algo=collect) if where == "algorithm" else "delayed")
        handle = register_optimizer_step_post_hook(lambda *_: gc.collect() and None) if where == "hook" else None
        gc.disable()
        try:
            for _ in range(3):
                leave_garbage()
            train(model, range(2))
        finally:
            gc.enable()
            if handle is not None:
                handle.remove()
        assert lengths(model) == [2] * 6


def test_threads_train_as_if_alone() -> None:
    """Four threads, each with its own model, converting, training and dropping models at the same time."""
    expected = {}
    for seed in range(4):
        model = network(seed=seed)
        losses = train(model, range(100 * seed, 100 * seed + 6))
        expected[seed] = (losses, snapshot(model))
    models = {seed: network("tensorwise", seed=seed) for seed in expected}  # seeds are the process's, not the thread's
    got: dict[int, Any] = {}
    start = threading.Barrier(4)

    def run(seed: int) -> None:
        start.wait()
        for _ in range(3):
            ottava.convert(nn.Sequential(nn.Linear(32, 32)), "delayed")  # comes and goes
        ottava.convert(models[seed], "delayed")
        got[seed] = (train(models[seed], range(100 * seed, 100 * seed + 6)), snapshot(models[seed]))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, expected))
    for seed, (losses, tensors) in expected.items():
        assert got[seed][0] == losses
        assert differences(got[seed][1], tensors) == []
