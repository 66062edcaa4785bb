"""A replay gives the same numbers every time and leaves no trace."""

from __future__ import annotations

import collections
import copy
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.experiments.replay import Replay, door_hooks, gradient_error, ottava_layers, untouched
from ottava.recipe import RECIPES


class Net(nn.Module):
    """Linear layers with everything that keeps state: dropout, batch norm, predicted scales."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 96), nn.BatchNorm1d(96), nn.Linear(96, 64)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.drop(torch.relu(self.norm(self.up(x)))))
        return y


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Mean square."""
    return model(batch).float().square().mean()


def trained(recipe: str) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """A net some steps into its training, with a gradient that waits for its step."""
    torch.manual_seed(0)
    model = Net()
    ottava.convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(32, 64)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    loss(model, batch).backward()
    return model, optimizer, batch


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All state there is, with what state_dict leaves out."""
    state: dict[str, Any] = {f"model.{n}": t.clone() for n, t in model.state_dict().items()}
    state |= {f"grad.{n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for name, layer in ottava_layers(model).items():
        for tensor, door in layer.quantizers.named_children():
            state[f"{name}.{tensor}.spec"] = door.spec
            if door.spec is not None:
                state[f"{name}.{tensor}.staged"] = door.staged.clone()
        state[f"{name}.boundaries"] = layer.scaling_state.boundaries
        state[f"{name}.forwards"] = layer.scaling_state._advice._forwards
        state[f"{name}.call"] = layer.last_call
    state["random"] = torch.get_rng_state()
    state |= {f"optimizer.{i}.{k}": v.clone() for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()}
    return state


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(
        torch.equal(v, other[k]) if isinstance(v, Tensor) else v == other[k] for k, v in one.items()
    )


@pytest.mark.parametrize("own", ["tensorwise", "delayed", "bf16"])
@pytest.mark.parametrize("target", ["gradient", "loss"])
def test_no_trace(own: str, target: str) -> None:
    """Under its own recipe, others that keep other state, in high precision; and training goes on bit for bit."""
    model, optimizer, batch = trained(own)
    twin, twin_optimizer, _ = trained(own)
    before = everything(model, optimizer)
    replay = Replay(model, batch, loss, target=target)
    for recipe in (None, RECIPES["delayed"], RECIPES["guarded"], RECIPES["tensorwise"], RECIPES["mxfp8"]):
        replay.run(recipe)
    replay.run(None, own=True)
    assert same(everything(model, optimizer), before)
    for net, opt in ((model, optimizer), (twin, twin_optimizer)):
        torch.manual_seed(1)
        for _ in range(2):
            opt.step()
            opt.zero_grad()
            loss(net, batch).backward()
    assert same(
        {n: t.clone() for n, t in model.state_dict().items()}, {n: t.clone() for n, t in twin.state_dict().items()}
    )


COUNT, DICE, STEPS = [0], np.random.default_rng(0), itertools.count()
SEEN, OTHER, TURNS = collections.Counter("a"), random.Random(7), itertools.cycle([1.0, 2.0, 3.0])
EACH: dict[str, int] = collections.defaultdict(int)


class Counts(nn.Module):
    """A forward that changes the script's own numbers, and its own iterator and deque."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.past = iter(range(9)), collections.deque([1.0], maxlen=3)
        self.turns, self.own = itertools.cycle([4.0, 5.0]), random.Random(9)

    def forward(self, x: Tensor) -> Tensor:
        COUNT[0] += 1
        self.past.append(float(next(self.places)))
        SEEN["a"] += 1
        EACH["x"] += 1
        drawn = SEEN["a"] * EACH["x"] * OTHER.random() * next(TURNS) * next(self.turns) * self.own.random()
        return x * float(DICE.random()) * COUNT[0] * next(STEPS) * sum(self.past) * drawn


def test_numbers_of_the_script_are_put_back() -> None:
    model, x = Counts(), torch.ones(3)
    for count in (1, 2):  # within the first round of a cycle, and behind it
        with untouched(model):
            first = model(x)
            model(x)
            model(x)
        assert torch.equal(model(x), first)
        assert COUNT[0] == count
    assert list(model.past) == [1.0, 0.0, 1.0]


class Scale:
    """Delayed scaling as scripts write it: no module, and its history no buffer; some of it belongs to the class."""

    casts, largest, top = 0, torch.ones(1), {"x": [0.5]}

    def __init__(self) -> None:
        self.history, self.calls, self.latest = collections.deque([1.0], maxlen=3), 0, torch.ones(1)

    def cast(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(float(x.abs().max()))
        self.latest.copy_(x.detach().abs().max() + self.latest)
        Scale.casts += 1
        Scale.largest += 1
        Scale.top["x"].append(float(Scale.casts))
        Scaled.first = getattr(Scaled, "first", 1.0) + 1
        Table.rows += 1
        shared = Scale.casts * Scale.largest * sum(Scale.top["x"]) * Scaled.first * Table.rows
        return x * max(self.history) * self.calls * self.latest * shared


OUTSIDE = [Scale()]


class Table:
    """No object of it is anywhere."""

    rows = 0


class Scaled(nn.Module):
    """Holds its scales in a dict, as others do in a list, and one that the script holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = {"x": [(Scale(),)]}

    def forward(self, x: Tensor) -> Tensor:
        OUTSIDE[0].history.append(2.0 + OUTSIDE[0].calls)
        OUTSIDE[0].calls += 1
        return self.scales["x"][0][0].cast(x) * sum(OUTSIDE[0].history)


def test_objects_of_the_scripts_classes_are_put_back() -> None:
    model, x = Scaled(), torch.full((3,), 2.0)
    with untouched(model):
        first = model(x)
        model(3 * x)
    assert (model.scales["x"][0][0].calls, list(OUTSIDE[0].history)) == (0, [1.0])
    assert (Scale.casts, Scale.top, Table.rows, "first" in vars(Scaled)) == (0, {"x": [0.5]}, 0, False)
    assert torch.equal(model(x), first)


def test_what_a_hook_has_closed_over_is_put_back() -> None:
    model, past, x, calls = nn.Linear(3, 3), [1.0], torch.ones(2, 3), 0

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        past.append(float(output.abs().max()))
        return output * calls * sum(past)

    model.register_forward_hook(hook)
    with untouched(model), torch.no_grad():
        first = model(x)
        model(x)
    assert past == [1.0]
    assert torch.equal(model(x), first)


def test_no_trace_after_an_exception() -> None:
    model, optimizer, batch = trained("delayed")
    before = everything(model, optimizer)

    def broken(net: nn.Module, data: Any) -> Tensor:
        loss(net, data).backward()
        raise ValueError("out of data")

    with pytest.raises(ValueError, match="out of data"):
        Replay(model, batch, broken).run(RECIPES["guarded"])
    assert same(everything(model, optimizer), before)


def test_the_same_numbers_every_time() -> None:
    """Dropout and stochastic rounding draw the same numbers; so does a replay that starts from given states."""
    model, _, batch = trained("tensorwise")
    torch.manual_seed(5)
    states = {"cpu": torch.get_rng_state()}
    replay = Replay(model, batch, loss)
    torch.rand(7)
    for recipe in (RECIPES["nvfp4"], None):
        one, other = replay.run(recipe), replay.run(recipe)
        assert one.loss == other.loss
        assert all(torch.equal(a, b) for a, b in zip(one.gradients, other.gradients, strict=True))
    assert Replay(model, batch, loss, random=states).run(None).loss == one.loss
    assert replay.runs == 4


def test_is_what_training_computes() -> None:
    """The gradient of a replay under the model's own recipe is that of a training step, bit for bit."""
    model, _, batch = trained("delayed")
    torch.manual_seed(2)
    replay = Replay(model, batch, loss)
    torch.rand(7)  # it starts from where it was made
    got = replay.run(None, own=True)
    model.zero_grad()
    torch.manual_seed(2)
    value = loss(model, batch)
    value.backward()
    assert got.loss == value.item()
    for gradient, parameter in zip(got.gradients, model.parameters(), strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad)


def test_errors_weigh_parameters_alike() -> None:
    """A tiny parameter whose gradient is lost counts as much as a huge one; a huge error counts once."""
    reference = [torch.tensor([1e6, 0.0]), torch.tensor([0.0, 1e-6]), None, torch.zeros(2)]
    lost = [torch.tensor([1e6, 0.0]), torch.zeros(2), torch.ones(2), torch.ones(2)]
    error, angle = gradient_error(lost, reference)
    assert error == pytest.approx(math.sqrt(1 / 2))
    assert angle < 1e-3
    wild = [torch.tensor([1e6, 0.0]), torch.tensor([0.0, 1e9]), None, torch.zeros(2)]
    assert gradient_error(wild, reference)[0] == pytest.approx(math.sqrt(1 / 2))
    nan = [torch.tensor([math.nan, 0.0]), torch.tensor([0.0, 1e-6]), None, None]
    assert gradient_error(nan, reference) == (pytest.approx(math.sqrt(1 / 2)), 90.0)
    assert gradient_error([None] * 4, reference) == (1.0, 90.0)
    assert gradient_error([], []) == (0.0, 0.0)
    quarter = [torch.tensor([1.0, 1.0])]
    assert gradient_error(quarter, [torch.tensor([1.0, 0.0])])[1] == pytest.approx(45)


def test_losses_are_compared_relatively() -> None:
    model, _, batch = trained("tensorwise")
    replay = Replay(model, batch, loss, target="loss")
    reference = replay.run(None)
    deviation = replay.compare(replay.run(RECIPES["tensorwise"]), reference)
    assert reference.gradients == ()
    assert 0 < deviation.error < 0.05
    assert deviation.error == abs(deviation.loss - reference.loss) / reference.loss
    assert math.isnan(deviation.angle_deg)


def test_models_that_cannot_be_replayed() -> None:
    with pytest.raises(ValueError, match=r"no ottava layers.*ottava\.convert"):
        ottava_layers(nn.Linear(4, 4))
    twice = nn.Sequential(nn.Sequential(nn.Linear(64, 64)), nn.Sequential(nn.Linear(64, 64)))
    for part in twice:
        ottava.convert(part)
    with pytest.raises(ValueError, match="two layers have the name '0'"):
        ottava_layers(twice)


def test_hooks_may_replace_operands() -> None:
    """A hook that hands back what came in turns the cast off."""
    model = copy.deepcopy(trained("tensorwise")[0]).eval()
    batch = torch.randn(4, 64)
    with untouched(model), torch.no_grad():
        with ottava.autocast(enabled=False):
            want = model(batch)
        with door_hooks(model.up, lambda _, x, out: (x, out[1])), door_hooks(model.down, lambda _, x, out: (x, out[1])):
            assert torch.allclose(model(batch), want, atol=1e-6)
        assert not torch.allclose(model(batch), want, atol=1e-4)
