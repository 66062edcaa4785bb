"""State dicts by TransformerEngine's keys: there and back, from plain torch, and with histories of delayed scaling."""

from __future__ import annotations

import io
import pickle
import pickletools
import sys
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common.recipe import DelayedScaling, Format
from ottava.compat.transformer_engine.pytorch.quantization import FP8GlobalStateManager
from ottava.engine.functional import quantized_layers
from ottava.interop.contents import read_contents

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
    """TransformerEngine's Llama tutorial loads weights like this: in place, through the tensors of a state dict."""
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


def test_experts_are_apart() -> None:
    layer, other = te.GroupedLinear(3, 8, 4), te.GroupedLinear(3, 8, 4)
    state = layer.state_dict()
    assert set(state) == {f"{name}{g}" for name in ("weight", "bias") for g in range(3)} | {"_extra_state"}
    state["weight1"].fill_(2.0)
    assert layer.weight1.eq(2.0).all()
    assert other.load_state_dict(state) == ([], [])
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), layer.parameters(), strict=True))


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


def trained(model: nn.Module, recipe: DelayedScaling, steps: Sequence[int]) -> nn.Module:
    """After a step on each of the numbered batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        x = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
        splits = ([8, 3, 5],) if isinstance(model, te.GroupedLinear) else ()
        with te.autocast(recipe=recipe):
            y = model(x.flatten(0, 1) if splits else x, *splits)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_written_histories_and_scales_come_back_and_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Their layout lacks the oldest entry, which no later scale reads. Keys stay theirs."""
    recipes = [
        DelayedScaling(margin=1, fp8_format=Format.E4M3),
        DelayedScaling(override_linear_precision=(False, True, True)),
    ]
    recipes += [
        DelayedScaling(amax_history_len=n, amax_compute_algo=how) for n in (1, 2, 4) for how in ("max", "most_recent")
    ]
    makers: list[tuple[Any, ...]] = [(te.Linear, 16, 16), (te.LayerNormMLP, 16, 32), (te.GroupedLinear, 3, 16, 16)]
    makers += [(te.LayerNormLinear, 16, 16), (te.TransformerLayer, 16, 32, 2)]
    for (kind, *sizes), recipe in [(maker, recipe) for maker in makers for recipe in recipes]:
        options = {"hidden_dropout": 0.0, "attention_dropout": 0.0} if kind is te.TransformerLayer else {}
        model, other = (kind(*sizes, **options, params_dtype=torch.bfloat16) for _ in range(2))
        keys = set(model.state_dict())
        trained(model, recipe, range(6))
        assert set(model.state_dict()) == keys
        torch.save(model.state_dict(), tmp_path / "model.pt")
        assert other.load_state_dict(torch.load(tmp_path / "model.pt")) == ([], [])
        for _ in range(2):
            compared = 0
            for one, two in zip(quantized_layers(model), quantized_layers(other), strict=True):
                for door, loaded in zip(one.quantizers.doors, two.quantizers.doors, strict=True):
                    assert door.spec == loaded.spec or door.spec is None
                    if door.spec is not None:
                        kept = len(door.amax_history) - 1
                        assert torch.equal(door.amax_history[:kept], loaded.amax_history[:kept])
                        assert torch.equal(door.scale, loaded.scale)
                        assert float(door.scale) > 0
                        compared += 1
            assert compared >= 2
            trained(model, recipe, range(6, 8))
            trained(other, recipe, range(6, 8))
        assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_state_dict_is_made_of_what_their_layout_cannot_say(tmp_path: Path) -> None:
    """Their layout has no function as amax_compute_algo and no meta device. Loading clears the earlier history."""
    recipe = ottava.get_recipe("delayed", amax_history_len=4, amax_compute_algo=lambda history: history.amax() * 2)
    layer = te.Linear(16, 16, params_dtype=torch.bfloat16)
    with ottava.autocast(recipe=recipe):
        layer(torch.ones(4, 16, dtype=torch.bfloat16)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.0).step()
    other = trained(te.Linear(16, 16, params_dtype=torch.bfloat16), DelayedScaling(amax_history_len=4), range(6))
    other.load_state_dict(layer.state_dict())
    assert (
        other.quantizers.input.amax_history.tolist() == layer.quantizers.input.amax_history.tolist() == [1.0, 0, 0, 0]
    )
    assert torch.equal(other.quantizers.input.scale, layer.quantizers.input.scale)
    assert layer.to("meta").state_dict()["_extra_state"].numel() == 0


def test_what_is_written_is_what_their_loader_unpickles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pickle.loads reads it with classes like theirs, and `ottava inspect` finds the rule of each scale."""

    class Theirs(Enum):
        E4M3, HYBRID = (448, 448), (448, 57344)

    class Delayed:
        def __init__(self) -> None:
            self.reduce_amax = True

    names = ["transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[names[-1]]).update(Format=Theirs, DelayedScaling=Delayed)
    recipe = DelayedScaling(margin=1, amax_history_len=4)
    mlp = trained(te.LayerNormMLP(16, 32, params_dtype=torch.bfloat16), recipe, range(6))
    saved = mlp.state_dict()["_extra_state"]
    data = saved.numpy().tobytes()
    assert (saved.dtype, saved.device.type) == (torch.uint8, "cpu")
    globals_ = {argument for opcode, argument, _ in pickletools.genops(data) if opcode.name == "GLOBAL"}
    assert globals_ == {
        *(f"{names[-1]} DelayedScaling", f"{names[-1]} Format", "collections OrderedDict"),
        *("torch._utils _rebuild_tensor_v2", "torch.storage _load_from_bytes"),
    }
    state = pickle.loads(data)  # written above
    settings = {"margin": 1, "amax_history_len": 4, "amax_compute_algo": "max", "fp8_format": Theirs.HYBRID}
    others = {"scaling_factor_compute_algo": None, "fp8_dpa": False, "fp8_mha": False, "backward_override": None}
    assert vars(state.pop("recipe")) == {"reduce_amax": True, **settings, **others}
    maxima = {"fp8_max_fwd": 448.0, "fp8_max_bwd": 57344.0}
    assert state["extra_fp8_variables"] == {"num_gemms": 2, "fp8_checkpoint": True, **maxima}
    for gemm, layer in enumerate((mlp.fc1.quantizers, mlp.fc2.quantizers)):
        for key, column, door in (
            ("fwd", 3 * gemm, layer.input),
            ("fwd", 3 * gemm + 1, layer.weight),
            ("bwd", 2 * gemm, layer.grad_output),
        ):
            history = state[f"amax_history_{key}"][:, column].tolist()
            assert history == [0.0, *reversed(door.amax_history[:3].tolist())]
            assert state[f"scale_{key}"][column] == door.scale
    assert state["amax_history_fwd"].shape == (4, 6)
    assert state["amax_history_bwd"].shape == (4, 4)
    assert state["scale_fwd"][[2, 5]].tolist() == state["scale_bwd"][[1, 3]].tolist() == [1.0, 1.0]  # FP8 outputs
    torch.save(mlp.state_dict(), tmp_path / "te.pt")
    found = read_contents(tmp_path / "te.pt").state
    assert (found.source, found.problems, len(found.rows)) == ("transformer_engine", [], 6)
    assert all(row.follows.endswith("max, margin 1") or row.follows == "an older amax" for row in found.rows)


def test_parts_have_their_names() -> None:
    """Submodules, rows of a fused parameter, assignment, and attributes that only their code needs."""
    layer = te.TransformerLayer(32, 64, 4, num_gqa_groups=2, fuse_qkv_params=True)
    assert layer.self_attention.layernorm_qkv.weight is layer.attention.qkv.weight
    assert layer.self_attention.proj.bias is layer.attention.out.bias
    assert layer.layernorm_mlp.fc2_weight is layer.mlp.fc2.weight
    assert layer.self_attention.core_attention.layout == "sbhd"
    split = te.TransformerLayer(32, 64, 4, num_gqa_groups=2)
    rows = split.self_attention.layernorm_qkv
    assert [tuple(getattr(rows, f"{name}_weight").shape) for name in ("query", "key", "value")] == [
        (32, 32), (16, 32), (16, 32),
    ]  # fmt: skip
    assert torch.equal(torch.cat((rows.query_weight, rows.key_weight, rows.value_weight)), split.attention.qkv.weight)
    rows.key_weight = torch.ones(16, 32)  # as a script assigns it that loads another checkpoint
    assert bool((split.attention.qkv.weight[32:48] == 1).all())
    split.self_attention.proj.bias = new = nn.Parameter(torch.ones(32))
    assert split.attention.out.bias is new
    grouped = te.GroupedLinear(3, 16, 8)
    assert grouped.weight1.is_leaf
    assert grouped.weight1 is grouped.groups[1].weight
    grouped(torch.ones(5, 16), [0, 2, 3]).sum().backward()
    assert [float(getattr(grouped, f"weight{g}").grad[0, 0]) for g in range(3)] == [0, 2, 3]
    with pytest.raises(ValueError, match=r"got splits \[1, 2\] for 5 rows; needs 3 numbers"):
        grouped(torch.ones(5, 16), [1, 2])
    linear, new = te.LayerNormLinear(16, 8), nn.Parameter(torch.full((16,), 2.0))
    linear.layer_norm_weight = new
    assert linear.norm.weight is new
    with pytest.raises(AttributeError, match=r"Linear\._get_quantizers is not in ottava: layer\.last_call"):
        te.Linear(16, 8)._get_quantizers  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nobody'"):
        te.Linear(16, 8).nobody  # noqa: B018


def test_scripts_read_the_state_of_a_layer() -> None:
    """Scales and histories are those of the checkpoint, and a recipe without them shows none."""
    layer, recipe = te.LayerNormMLP(16, 32, params_dtype=torch.bfloat16), DelayedScaling(amax_history_len=4)
    assert layer.fp8_meta == {"fp8_checkpoint": False, "num_gemms": 2, "recipe": None}
    with ottava.autocast(replace(recipe.ottava)):  # an autocast keeps the first of equal recipes
        pass
    with te.autocast(recipe=recipe):
        assert FP8GlobalStateManager.get_fp8_recipe() == recipe
        layer(torch.randn(16, 16).bfloat16()).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    meta, doors = layer.fp8_meta, layer.fc2.quantizers
    assert meta["recipe"] == recipe
    assert meta["scaling_fwd"].scale[3:5].tolist() == [float(doors.input.scale), float(doors.weight.scale)]
    assert meta["scaling_fwd"].amax_history.shape == (4, 6)
    assert float(meta["scaling_bwd"].amax_history[3, 2]) == float(doors.grad_output.amax_history[0]) > 0
    with pytest.raises(AttributeError, match="fp8_meta"):
        te.TransformerLayer(32, 64, 4).fp8_meta  # noqa: B018


def test_parameters_have_their_order() -> None:
    """By it optimizers number them: the norm in front of a linear layer comes first."""
    linear, mlp = te.LayerNormLinear(16, 8), te.LayerNormMLP(16, 32)
    assert [name for name, _ in linear.named_parameters()] == ["norm.weight", "norm.bias", "weight", "bias"]
    assert [name for name, _ in nn.Sequential(mlp).named_parameters()] == [
        f"0.{name}" for name in ("fc1.norm.weight", "fc1.norm.bias", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    ]


def test_values_are_filled_in_again() -> None:
    layer = te.LayerNormMLP(16, 32, init_method=nn.init.ones_, device="meta")
    layer.reset_parameters(defer_init=True)
    assert layer.fc1.weight.is_meta
    layer.reset_parameters()
    assert bool((layer.fc1_weight == 1).all())
    assert bool((layer.layer_norm_weight == 1).all())
    assert not layer.fc1_bias.any()
    assert 0.015 < float(layer.fc2_weight.detach().std()) < 0.03
