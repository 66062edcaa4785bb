"""Histories travel in one tensor, and arrive where they were; every entry finds its name in the model."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from torch import nn

import ottava
from ottava.doors.entries import HISTORIES, pack, read_entries, take_histories, unpack, unpack_before_load


def trained(weights: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64))).bfloat16()
    ottava.convert(model, "delayed", weights=weights)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.dim() == 1], lr=0.1)
    for step in range(3):
        model(torch.randn(8, 64).bfloat16() * (step + 1)).float().square().sum().backward()
        optimizer.step()
    return model


def test_packing_keeps_every_bit() -> None:
    model = trained()
    state = model.state_dict()
    histories = take_histories(model, state)
    assert len(histories) == 2 * 3 * 5
    assert sorted(state) == ["0.bias", "0.weight", "1.0.bias", "1.0.weight"]
    back = unpack(pack(histories))
    assert back.keys() == histories.keys()
    assert all(torch.equal(back[key], histories[key]) for key in back)


def test_a_state_dict_with_packed_histories_loads() -> None:
    model, other = trained(), nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64))).bfloat16()
    ottava.convert(other, "delayed")
    other.register_load_state_dict_pre_hook(unpack_before_load)
    state = dict(model.state_dict())
    packed = {**state, HISTORIES: pack(take_histories(model, state))}
    packed = {key: value for key, value in packed.items() if key in state or key == HISTORIES}
    assert len(packed) == 5
    assert other.load_state_dict(packed) == ([], [])
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_entries_are_found_under_other_prefixes(tmp_path: Path) -> None:
    """A file of a model with a head, read for its body; and back."""
    body = trained("fp8")
    whole = nn.ModuleDict({"model": body})
    for source, target, base in ((whole, body, "model"), (body, whole, "model")):
        target.base_model_prefix = base  # type: ignore[assignment]
        state = dict(source.state_dict())
        histories = take_histories(source, state)
        path = tmp_path / "model.safetensors"
        safetensors.torch.save_file({**state, HISTORIES: pack(histories)}, path)
        found = dict(read_entries(target, [str(path)]))
        own = target.state_dict()
        assert found.keys() == {key for key in own if not key.endswith("bias")}
        assert all(torch.equal(found[key], own[key]) for key in found)
