"""Scaling state in checkpoints: plain tensors under stable names that fit BF16 both ways and resume bit for bit."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import ottava
from scaling_samples import (
    BUFFERS,
    ROLES,
    WIDTH,
    differences,
    door_of,
    doors,
    lengths,
    loss_of,
    network,
    noise,
    snapshot,
    state_of,
    train,
    windows,
    with_cells,
)

State = dict[str, Tensor]


def plain(seed: int = 0) -> nn.Sequential:
    """The same network, never converted."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).bfloat16()


def through_torch(state: State) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: State = torch.load(file, weights_only=True)
    return loaded


def through_safetensors(state: State) -> State:
    return safetensors.torch.load(safetensors.torch.save(state))


THROUGH: dict[str, Callable[[State], State]] = {"torch.save": through_torch, "safetensors": through_safetensors}


@pytest.mark.parametrize("recipe", ["delayed", "guarded"])
def test_names_and_shapes_are_fixed_by_the_recipe(recipe: str) -> None:
    """Before the first forward as after it: what a checkpoint holds does not depend on what has run."""
    model = network(recipe)
    expected = {
        f"{layer}.quantizers.{role}.{buffer}": size
        for layer in (0, 2)
        for role in ROLES
        for buffer, size in {**dict.fromkeys(BUFFERS, ()), "amax_history": (16,), "staged": (3,)}.items()
    }
    for steps in (0, 2):
        train(model, range(steps))
        got = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        assert {name: shape for name, shape in got.items() if "quantizers" in name} == expected
        assert set(got) - set(expected) == set(plain().state_dict())


@pytest.mark.parametrize("through", THROUGH.values(), ids=THROUGH.keys())
@pytest.mark.parametrize("recipe", ["delayed", "guarded"])
def test_resume_is_bitwise(recipe: str, through: Callable[[State], State]) -> None:
    """Three steps, a file, a new process's model and three more: the bits of six steps, optimizer included."""
    whole, first, second = network(recipe, seed=1), network(recipe, seed=1), network(recipe, seed=2)
    adam = torch.optim.AdamW
    losses = train(whole, range(6), adam(whole.parameters(), lr=1e-2))
    before = adam(first.parameters(), lr=1e-2)
    assert train(first, range(3), before) == losses[:3]
    second.load_state_dict(through(first.state_dict()))
    after = adam(second.parameters(), lr=1e-2)
    after.load_state_dict(before.state_dict())
    assert train(second, range(3, 6), after) == losses[3:]
    assert differences(snapshot(second), snapshot(whole)) == []


def test_a_loaded_state_is_a_copy() -> None:
    """Training on does not write into the checkpoint it came from."""
    model, source = network(), network()
    train(source, range(2))
    checkpoint = through_torch(source.state_dict())
    kept = {name: tensor.clone() for name, tensor in checkpoint.items()}
    model.load_state_dict(checkpoint)
    train(model, range(3))
    assert differences(checkpoint, kept) == []


@pytest.mark.parametrize("strict", [True, False])
def test_a_bf16_checkpoint_fits_an_fp8_model(strict: bool) -> None:
    """Weights load, histories stay as they are (empty: the first step takes current scales), nothing is missing."""
    model, source = network(seed=1), plain(seed=2)
    result = model.load_state_dict(source.state_dict(), strict=strict)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert torch.equal(model[0].weight, source[0].weight)
    assert lengths(model) == [0] * 6
    fresh = network(seed=2)
    assert train(model, range(3)) == train(fresh, range(3))


def test_an_fp8_checkpoint_fits_a_bf16_model() -> None:
    """Strictly where the recipe keeps no state or is BF16; a model that was never converted names what it leaves."""
    source = network(seed=1)
    train(source, range(2))
    state = source.state_dict()
    for recipe in ("tensorwise", "bf16"):
        model = network(recipe, seed=2)
        model.load_state_dict(state)
        assert torch.equal(model[2].weight, source[2].weight)
        assert "quantizers" not in "".join(model.state_dict())
    never = plain(seed=2)
    result = never.load_state_dict(state, strict=False)
    assert result.missing_keys == []
    assert all(".quantizers." in name for name in result.unexpected_keys)
    assert len(result.unexpected_keys) == 30
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"0\.quantizers\.input\.amax_history"):
        never.load_state_dict(state)


def test_delayed_state_continues_under_guarded_and_back() -> None:
    """Same names and shapes; the scale follows the recipe that reads it: guarded keeps one octave free."""
    source, guarded, back = network(seed=1), network("guarded", seed=2), network(seed=3)
    train(source, range(3))
    guarded.load_state_dict(source.state_dict())
    assert windows(guarded) == windows(source)
    assert torch.equal(2 * door_of(guarded).scale, door_of(source).scale)
    back.load_state_dict(guarded.state_dict())
    assert differences(state_of(back), state_of(source)) == []


def test_part_of_a_state_is_missing_or_not_there() -> None:
    """A layer without any is a BF16 layer; one with some is damaged: named, and left as it was."""
    source, model = network(seed=1), network(seed=2)
    train(source, range(2))
    whole = {n: t for n, t in source.state_dict().items() if not n.startswith("2.quantizers.weight")}
    model.load_state_dict(whole)
    assert [d.amax_history.count_nonzero().item() for d in doors(model).values()] == [2, 2, 2, 2, 0, 2]
    del whole["0.quantizers.input.scale"]
    model = network(seed=2)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.quantizers.input.scale"'):
        model.load_state_dict(whole)
    result = model.load_state_dict(whole, strict=False)
    assert result.missing_keys == ["0.quantizers.input.scale"]
    assert door_of(model, 0).amax_history.count_nonzero() == 0
    assert door_of(model, 2).amax_history.count_nonzero() == 2


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "bad, reason",
    [
        (torch.tensor(math.nan), r"scale holds negative or non-finite entries: the checkpoint is damaged"),
        (torch.tensor(-1.0), r"scale holds negative or non-finite entries: the checkpoint is damaged"),
        (torch.zeros(3), r"scale has shape \(3,\), needs \(\)"),
    ],
    ids=["nan", "negative", "shape"],
)
def test_damage_is_named_with_its_layer(bad: Tensor, reason: str, strict: bool) -> None:
    """Also where loading is not strict: a wrong scale is worse than none. The door keeps what it had."""
    source, model = network(seed=1), network(seed=2)
    train(source, range(2))
    train(model, range(1))
    before = state_of(model)
    with pytest.raises(RuntimeError, match=rf"2\.quantizers\.weight: {reason}"):
        model.load_state_dict({**source.state_dict(), "2.quantizers.weight.scale": bad}, strict=strict)
    after = state_of(model)
    assert [name for name in differences(after, before) if name.startswith("2.quantizers.weight")] == []


def test_another_window_is_refused_with_the_way_out() -> None:
    """Converting to the checkpoint's length, loading, and converting back keeps the newest entries."""
    source = network(with_cells("delayed", amax_history_len=4), seed=1)
    train(source, range(3))
    model = network(seed=2)
    with pytest.raises(RuntimeError, match=r"shape \(4,\), needs \(16,\); convert with that amax_history_len first"):
        model.load_state_dict(source.state_dict())
    with pytest.warns(UserWarning, match="from 16 to 4"):
        ottava.convert(model, with_cells("delayed", amax_history_len=4))
    model.load_state_dict(source.state_dict())
    with pytest.warns(UserWarning, match="from 4 to 16"):
        ottava.convert(model, "delayed")
    assert windows(model) == windows(source)


def test_a_model_made_on_meta_takes_its_state_by_assignment() -> None:
    """load_state_dict(assign=True), as large models are loaded: nothing stays on meta, and training resumes bitwise."""
    source = network(seed=1)
    train(source, range(3))
    checkpoint = through_torch(source.state_dict())
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).bfloat16()
    ottava.convert(model, "delayed")
    model.load_state_dict(checkpoint, assign=True)
    model.requires_grad_(True)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    assert train(model, range(3, 6)) == train(source, range(3, 6))
    assert differences(snapshot(model), snapshot(source)) == []


@pytest.mark.parametrize("through", THROUGH.values(), ids=THROUGH.keys())
def test_an_open_accumulation_is_saved(through: Callable[[Any], Any]) -> None:
    """Two micro-batches in two processes give the histories of one; a checkpoint without `staged` loads as before."""
    model, other, older = network(), network(seed=1), network(seed=2)
    train(model, range(2))
    loss_of(model, 10 * noise(2)).backward()
    assert door_of(model).staged[0] == (10 * noise(2)).abs().max()
    state = through(model.state_dict())
    loss_of(other, 99 * noise(3)).backward()
    other.load_state_dict(state)
    older.load_state_dict({name: tensor for name, tensor in state.items() if not name.endswith("staged")})
    for one in (model, other):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.0)
        loss_of(one, noise(4)).backward()
        optimizer.step()
    assert differences(state_of(model), state_of(other)) == []
    assert door_of(model).amax_history[0] == (10 * noise(2)).abs().max()
    assert all(not door.staged.any() for door in doors(older).values())
