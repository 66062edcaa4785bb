"""Delayed scaling over the steps of a training run: one update a step, and nothing that leaks between models."""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.nn.linear import Linear
from ottava.quantizer import Quantizer
from ottava.recipe import Recipe


def delayed(length: int, algorithm: str = "max") -> Recipe:
    """The registered delayed recipe with another window."""
    recipe = ottava.get_recipe("delayed")
    gemms = {
        gemm: replace(
            cells,
            lhs=replace(cells.lhs, amax_history_len=length, amax_compute_algo=algorithm),
            rhs=replace(cells.rhs, amax_history_len=length, amax_compute_algo=algorithm),
        )
        for gemm, cells in (("fprop", recipe.fprop), ("dgrad", recipe.dgrad), ("wgrad", recipe.wgrad))
    }
    return replace(recipe, name=f"delayed, {length} {algorithm}", **gemms)


def network(recipe: Recipe | str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).bfloat16()
    ottava.convert(model, recipe)
    return model


def batch(amax: float) -> Tensor:
    x = torch.full((4, 32), amax / 4, dtype=torch.bfloat16)
    x[0, 0] = amax
    return x


def door_of(model: nn.Sequential, index: int = 0, name: str = "input") -> Quantizer:
    door = model[index].get_submodule(f"quantizers.{name}")
    assert isinstance(door, Quantizer)
    return door


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_worked_example() -> None:
    """TransformerEngine's example (window 4, max, E4M3; amax 2, 4, 1, idle, 8), with updates at the step's end.

    The first step bootstraps (448 / 2 where TransformerEngine takes 1.0). 4 * 224 = 896 and 8 * 112 = 896 saturate.
    """
    model = network(delayed(4))
    state, door = ottava.ScalingState(model), door_of(model)
    history = []
    for amax in (2.0, 4.0, 1.0, None, 8.0):
        if amax is not None:
            with ottava.debug.observe(model) as seen:
                model(batch(amax)).sum().backward()
            row = seen.table()[0]
            assert (row["layer"], row["tensor"], row["amax"]) == ("0", "input", amax)
            clipped = row["overflow_pct"] > 0
        state.update()
        history.append((clipped if amax else None, door.amax_history.tolist(), door.scale.item()))
    assert history == [
        (False, [2, 0, 0, 0], 224),
        (True, [4, 2, 0, 0], 112),
        (False, [1, 4, 2, 0], 112),
        (None, [1, 4, 2, 0], 112),
        (True, [8, 1, 4, 2], 56),
    ]


@pytest.mark.parametrize("length", [1, 2, 5, 16])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_windows_follow_a_deque(algorithm: str, length: int) -> None:
    """200 steps of 0 to 3 micro-batches, some all zero, some infinite, against the rule in plain Python."""
    recipe = delayed(length, algorithm)
    spec = recipe.fprop.lhs
    assert spec is not None
    rng, door, window, nonfinite = random.Random(length), Quantizer(), deque[float](maxlen=length), 0
    door.prepare(spec)
    holder = nn.ModuleList([door])
    scale = 0.0
    for _ in range(200):
        staged = 0.0
        for _ in range(rng.randrange(4)):
            amax = rng.choice([0.0, math.inf, *(2.0 ** rng.uniform(-9, 9) for _ in range(8))])
            x = torch.tensor([[amax, 0.0]])
            door(x, spec, spec)
            staged = max(staged, float(x[0, 0])) if math.isfinite(amax) else staged
            nonfinite += math.isinf(amax)
        ottava.ScalingState(holder).update()
        if staged:
            window.appendleft(staged)
            largest = max(window) if algorithm == "max" else window[0]
            scale = torch.tensor(448 / largest, dtype=torch.float64).float().item()
        assert door.amax_history.tolist()[: len(window)] == list(window)
        assert door.scale.item() == scale
        assert door.nonfinite.item() == nonfinite


def test_an_idle_layer_keeps_its_window() -> None:
    """A layer that a step skips (an expert without tokens, layer drop) neither rolls nor rescales."""
    model = network(delayed(4))
    state = ottava.ScalingState(model)
    model(batch(2.0)).sum().backward()
    state.update()
    before = snapshot(model[2])
    model[0](batch(4.0)).sum().backward()
    state.update()
    assert_same(snapshot(model[2]), before)
    assert door_of(model).amax_history.tolist() == [4, 2, 0, 0]


def test_micro_batches_are_one_step() -> None:
    """Gradient accumulation over amax 1, 8, 4: one entry, 8, in the window of input and of grad_output each."""
    model = network(delayed(4))
    state = ottava.ScalingState(model)
    for amax in (1.0, 8.0, 4.0):
        model(batch(amax)).sum().backward()
    state.update()
    assert door_of(model).amax_history.tolist() == [8, 0, 0, 0]
    assert door_of(model, 0, "grad_output").amax_history.count_nonzero() == 1


def test_weight_history_sees_the_weight() -> None:
    """The weight's window holds max|w| of each step, before the optimizer moved it."""
    model = network(delayed(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(3):
        seen.insert(0, float(model[0].weight.detach().abs().max()))
        model(batch(1.0)).sum().backward()
        optimizer.step()
        ottava.ScalingState(model).update()
    assert door_of(model, 0, "weight").amax_history.tolist() == [*seen, 0]


@contextmanager
def no_context() -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    "contexts",
    [
        (torch.no_grad,),
        (torch.inference_mode,),
        (torch.no_grad, lambda: ottava.autocast(enabled=False)),
        (torch.no_grad, lambda: ottava.autocast("tensorwise")),
        (torch.no_grad, lambda: ottava.autocast(delayed(7))),
        (torch.inference_mode, lambda: ottava.autocast(delayed(16, "most_recent"))),
        (no_context, lambda: ottava.autocast(enabled=False)),
    ],
    ids=["no_grad", "inference_mode", "bf16", "tensorwise", "another_window", "another_algorithm", "bf16_with_grad"],
)
def test_evaluation_leaves_no_trace(contexts: tuple[type[AbstractContextManager[None]], ...]) -> None:
    """A validation set 100 times larger than the training data, with a NaN, changes no buffer, staged ones included."""
    model = network("delayed")
    model(batch(2.0)).sum().backward()
    ottava.ScalingState(model).update()
    model(batch(3.0)).sum().backward()
    before = snapshot(model)
    for poison in (300.0, math.nan):
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            model(batch(poison))
    assert_same(snapshot(model), before)


def test_an_exception_in_forward_updates_nothing() -> None:
    """Scales change in update() and nowhere else: not when a context unwinds."""
    model = network("delayed")
    model(batch(2.0)).sum().backward()
    ottava.ScalingState(model).update()
    before = snapshot(model)

    def interrupt() -> None:
        with ottava.autocast("delayed"):
            model[0](batch(3.0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    after = snapshot(model)
    staged = {name for name in before if name.endswith("amax_staged")}
    assert_same(
        {n: b for n, b in after.items() if n not in staged}, {n: b for n, b in before.items() if n not in staged}
    )


def train(models: list[nn.Sequential], steps: int, order: list[int]) -> list[dict[str, Tensor]]:
    """Each model sees its own stream of data; `order` says whose turn it is within a step."""
    streams = [torch.Generator().manual_seed(100 + i) for i in range(len(models))]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for _ in range(steps):
        for i in order:
            x = torch.randn(8, 32, generator=streams[i]).bfloat16() * (i + 1) * 3
            loss = models[i](x).float().square().mean()
            optimizers[i].zero_grad()
            loss.backward()
            optimizers[i].step()
            ottava.ScalingState(models[i]).update()
    return [{**snapshot(model), **{n: p.detach().clone() for n, p in model.named_parameters()}} for model in models]


def test_alternating_models_equal_each_alone() -> None:
    """TransformerEngine #814: two models trained by turns got other histories than each by itself."""
    together = train([network("delayed", 1), network("delayed", 2)], 6, [0, 1])
    reversed_turns = train([network("delayed", 1), network("delayed", 2)], 6, [1, 0])
    alone = [
        train([network("delayed", 1), network("delayed", 2)], 6, [0])[0],
        train([network("delayed", 1), network("delayed", 2)], 6, [1])[1],
    ]
    for got, by_turns, expected in zip(together, reversed_turns, alone, strict=True):
        assert_same(got, expected)
        assert_same(by_turns, expected)


def test_interleaved_forwards_and_backwards_equal_each_alone() -> None:
    """A's forward, B's forward, B's backward, A's backward: no order between models exists."""
    alone = [network("delayed", seed) for seed in (1, 2)]
    for model in alone:
        model(batch(3.0)).sum().backward()
    mixed = [network("delayed", seed) for seed in (1, 2)]
    losses = [model(batch(3.0)).sum() for model in mixed]
    for loss in reversed(losses):
        loss.backward()
    for one, other in zip(alone, mixed, strict=True):
        ottava.ScalingState(one).update()
        ottava.ScalingState(other).update()
        assert_same(snapshot(one), snapshot(other))


def test_a_copy_has_a_life_of_its_own() -> None:
    """deepcopy (an EMA or reference model) starts from the history it was copied with, and shares none of it."""
    model = network("delayed")
    model(batch(2.0)).sum().backward()
    ottava.ScalingState(model).update()
    twin = copy.deepcopy(model)
    before = snapshot(twin)
    model(batch(9.0)).sum().backward()
    ottava.ScalingState(model).update()
    assert_same(snapshot(twin), before)
    twin(batch(9.0)).sum().backward()
    ottava.ScalingState(twin).update()
    assert_same(snapshot(twin), snapshot(model))


def test_resume_from_state_dict_is_bit_identical() -> None:
    """Saved after step 3 of 6, loaded into a fresh model: the rest of the run has the same bits."""
    model = network("delayed", 1)
    train([model], 3, [0])
    resumed = network("delayed", 2)
    resumed.load_state_dict(model.state_dict())
    assert_same(*(train([m], 3, [0])[0] for m in (model, resumed)))


def test_stateless_recipes_need_no_update(recipe: Recipe) -> None:
    """update() may stand in every training loop; it does something for delayed recipes only."""
    model = network(recipe)
    model(batch(2.0)).sum().backward()
    ottava.ScalingState(model).update()
    ottava.ScalingState(nn.Linear(2, 2)).update()
    assert bool(snapshot(model)) == (recipe.name == "delayed")
    assert all(isinstance(layer, Linear) for layer in (model[0], model[2]))


def test_one_state_serves_layers_that_come_later() -> None:
    """The state holds the model, not a list of doors: converting after making it is no mistake."""
    model = nn.Sequential(nn.Linear(32, 32)).bfloat16()
    state = ottava.ScalingState(model)
    ottava.convert(model, "delayed")
    model(batch(2.0)).sum().backward()
    state.update()
    assert door_of(model).scale.item() == 224
