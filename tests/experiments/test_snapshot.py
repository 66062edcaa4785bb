"""A snapshot brings back every bit that a training step changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.experiments.snapshot import Snapshot
from same_tensors import assert_same

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def network(recipe: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """With buffers of every kind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 64)).to(dtype)
    model.register_buffer("calls", torch.zeros(()), persistent=False)
    ottava.convert(model, recipe)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, scheduler: Any = None) -> list[float]:
    """Steps on random batches from torch's generator; losses."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, 64).to(next(model.parameters()).dtype)
        loss = (model(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        model.calls += 1
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of both."""
    tensors = {n: t.clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    for i, (_, entries) in enumerate(optimizer.state.items()):
        tensors |= {f"{i}.{k}": torch.as_tensor(v).clone() for k, v in entries.items() if v is not None}
    return tensors


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
@pytest.mark.parametrize("before", [0, 3])
def test_training_goes_on_as_it_did(optimizer: str, recipe: str, before: int) -> None:
    """From before the first step too, when neither moments nor histories are there yet. Twice from one snapshot."""
    model = network(recipe)
    opt = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)
    train(model, opt, before, scheduler)
    snapshot = Snapshot.take(model, opt, before, (scheduler,))
    want = train(model, opt, 4, scheduler)
    end = state(model, opt)
    for _ in range(2):
        snapshot.restore(model, opt, (scheduler,))
        assert train(model, opt, 4, scheduler) == want
        assert_same(state(model, opt), end)


def test_tensors_stay_the_ones_that_others_hold() -> None:
    model = network("delayed")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    held = {id(t) for t in [*model.parameters(), *model.buffers()]} | {
        id(v) for entries in optimizer.state.values() for v in entries.values()
    }
    snapshot = Snapshot.take(model, optimizer, 2)
    train(model, optimizer, 1)
    snapshot.restore(model, optimizer)
    now = {id(t) for t in [*model.parameters(), *model.buffers()]} | {
        id(v) for entries in optimizer.state.values() for v in entries.values()
    }
    assert now == held
    assert all(p.grad is None for p in model.parameters())


def test_moments_keep_their_dtype() -> None:
    """FP32 moments of BF16 parameters, which load_state_dict would cast."""
    model = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4).bfloat16()).sum().backward()
    optimizer.step()
    for entries in optimizer.state.values():
        entries["exp_avg"] = entries["exp_avg"].float() + 1e-6
    want = state(model, optimizer)
    snapshot = Snapshot.take(model, optimizer, 1)
    for entries in optimizer.state.values():
        entries["exp_avg"] = torch.zeros(1)
    snapshot.restore(model, optimizer)
    assert_same(state(model, optimizer), want)


def test_a_recipe_that_changed_meanwhile_stays() -> None:
    """History and scale of the snapshot come back under the new recipe's doors, where it has the same ones."""
    model = network("delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 3)
    snapshot = Snapshot.take(model, optimizer, 3)
    history = model[0].quantizers.input.amax_history.clone()
    model[3].adopt(ottava.RECIPES["bf16"], "3")
    train(model, optimizer, 2)
    snapshot.restore(model, optimizer)
    assert torch.equal(model[0].quantizers.input.amax_history, history)
    assert model[3].resolved.name == "bf16"
    train(model, optimizer, 1)


def test_a_snapshot_is_not_changed_by_what_follows() -> None:
    model = network("delayed")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    snapshot = Snapshot.take(model, optimizer, 2)
    before = copy.deepcopy(snapshot)
    train(model, optimizer, 2)
    for one, other in ((snapshot.parameters, before.parameters), (snapshot.buffers, before.buffers)):
        assert all(torch.equal(one[name], other[name]) for name in other)
    assert all(torch.equal(m["exp_avg"], before.moments[i]["exp_avg"]) for i, m in snapshot.moments.items())
