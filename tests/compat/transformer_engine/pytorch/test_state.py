"""State dicts by TransformerEngine's keys: there and back, from plain torch, and with histories of delayed scaling."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common.recipe import DelayedScaling

KEYS = {
    te.Linear: {"weight", "bias"},
    te.LayerNormLinear: {"layer_norm_weight", "layer_norm_bias", "weight", "bias"},
    te.LayerNormMLP: {
        *("layer_norm_weight", "layer_norm_bias"),
        *("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"),
    },
}


def as_saved(state: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def test_keys_are_theirs_and_writing_through_them_reaches_the_parameters() -> None:
    """As their Llama tutorial loads weights: in place, through the tensors of a state dict."""
    for make, keys in KEYS.items():
        model = nn.Sequential(make(16, 16))
        state = model.state_dict()
        assert set(state) == {f"0.{key}" for key in (*keys, "_extra_state")}
        for key in keys:
            state[f"0.{key}"].fill_(0.5)
            assert getattr(model[0], key).eq(0.5).all()
        other = nn.Sequential(make(16, 16))
        other.load_state_dict(state)
        assert all(parameter.eq(0.5).all() for parameter in other.parameters())
        without = {key: value for key, value in state.items() if "_extra_state" not in key}
        assert nn.Sequential(make(16, 16)).load_state_dict(without) == ([], [])
        broken = model[0].load_state_dict({"weights": torch.ones(1)}, strict=False)
        assert broken.unexpected_keys == ["weights"]


def test_experts_are_apart_in_theirs_and_a_stack_in_ours() -> None:
    layer, other = te.GroupedLinear(3, 8, 4), te.GroupedLinear(3, 8, 4)
    state = layer.state_dict()
    assert set(state) == {f"{name}{g}" for name in ("weight", "bias") for g in range(3)} | {"_extra_state"}
    state["weight1"].fill_(2.0)
    assert layer.weight[1].eq(2.0).all()
    assert other.load_state_dict(state) == ([], [])
    assert torch.equal(other.weight, layer.weight)


def test_histories_and_scales_are_taken() -> None:
    """Row 0 is where TransformerEngine stages amaxes; the oldest entry lies in row 1. An MLP has six columns."""
    length = 4
    forward = torch.zeros(length, 6)
    forward[1:, 0], forward[1:, 1], forward[1:, 4] = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0] * 3), 7.0
    backward = torch.zeros(length, 4)
    backward[1:, 2] = torch.tensor([0.0, 0.5, 0.25])
    state = {
        "recipe": None,
        "scale_fwd": torch.tensor([10.0, 11.0, 1.0, 1.0, 14.0, 1.0]),
        "amax_history_fwd": forward,
        "scale_bwd": torch.tensor([1.0, 1.0, 22.0, 1.0]),
        "amax_history_bwd": backward,
        "extra_fp8_variables": {"num_gemms": 2},
    }
    mlp = te.LayerNormMLP(16, 16)
    mlp.load_state_dict({**mlp.state_dict(), "_extra_state": as_saved(state)})
    first, second = mlp.fc1.quantizers, mlp.fc2.quantizers
    assert first.input.amax_history[:4].tolist() == [3.0, 2.0, 1.0, 0.0]
    assert (float(first.input.scale), float(first.weight.scale)) == (10.0, 11.0)
    assert (float(second.weight.scale), float(second.grad_output.scale)) == (14.0, 22.0)
    assert second.grad_output.amax_history[:3].tolist() == [0.25, 0.5, 0.0]
    assert float(first.grad_output.scale) == 0.0  # never cast: it starts from its own amax
    with te.autocast(recipe=DelayedScaling()):
        mlp(torch.ones(2, 16)).sum().backward()
    assert float(first.input.scale) == 10.0


def test_damaged_and_hostile_states_are_refused(tmp_path: Any) -> None:
    """Nothing is executed."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(tmp_path / "written"), "w")

    layer = te.Linear(16, 16)
    for state, words in (
        (as_saved({"scale_fwd": Evil()}), "would run code; it was not read"),
        (torch.arange(9, dtype=torch.uint8), "cut short or damaged"),
        ("text", "got str; needs a uint8 tensor"),
    ):
        with pytest.raises(RuntimeError, match=words):
            layer.load_state_dict({**layer.state_dict(), "_extra_state": state})
    assert not (tmp_path / "written").exists()
    layer.load_state_dict({**layer.state_dict(), "_extra_state": io.BytesIO(b"")})
