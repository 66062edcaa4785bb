"""Scaling state in checkpoints: plain tensors under stable names that fit BF16 both ways and resume bit for bit."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

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


THROUGH: dict[str, Callable[[State], State]] = {
    "torch.save": through_torch,
    "safetensors": lambda state: safetensors.torch.load(safetensors.torch.save(state)),
}


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


def through_save_model(source: nn.Module, target: nn.Module, folder: Path) -> None:
    safetensors.torch.save_model(source, str(folder / "model.safetensors"))
    assert safetensors.torch.load_model(target, folder / "model.safetensors") == (set(), [])


def through_accelerate(source: nn.Module, target: nn.Module, folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    for model, method in ((source, "save_state"), (target, "load_state")):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(model)
        getattr(accelerator, method)(str(folder))


def through_dcp(source: nn.Module, target: nn.Module, folder: Path) -> None:
    """In one process, as torch's own recipe has it."""
    dcp.save(get_model_state_dict(source), checkpoint_id=folder)
    state = get_model_state_dict(target)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(target, state)


def through_torch_save(source: nn.Module, target: nn.Module, folder: Path) -> None:
    torch.save(source.state_dict(), folder / "model.pt")
    target.load_state_dict(torch.load(folder / "model.pt", weights_only=True))


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("through", [through_save_model, through_accelerate, through_dcp, through_torch_save])
def test_every_door_of_a_checkpoint_keeps_every_bit(
    through: Callable[[nn.Module, nn.Module, Path], None], tmp_path: Path
) -> None:
    """After boundaries, when buffers are views of one memory, and in the middle of an accumulation."""
    source, target = network(), network(seed=1)
    for model in (source, target):
        train(model, range(3))
    loss_of(source, noise(5)).backward()
    storages = [tensor.untyped_storage().data_ptr() for tensor in source.state_dict().values()]
    assert len(set(storages)) == len(storages)
    through(source, target, tmp_path)
    assert differences(dict(source.state_dict()), dict(target.state_dict())) == []
    train(target, [6])
    assert len({id(door.pack) for door in doors(target).values()} - {id(None)}) == 2  # a pack a spec: one update each


def test_a_file_of_transformers_loads_into_a_converted_model(tmp_path: Path) -> None:
    """The path that docs/state.md shows: from_pretrained knows no histories, so convert, and then load the file."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(transformers.LlamaForCausalLM(config).bfloat16())
        ottava.convert(models[-1], "delayed")
    source, target = models
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    source(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    source.save_pretrained(tmp_path)
    safetensors.torch.load_model(target, tmp_path / "model.safetensors")
    assert differences(dict(source.state_dict()), dict(target.state_dict())) == []
    assert any("amax_history" in name for name in target.state_dict())
