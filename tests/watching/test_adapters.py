"""Layers of other frameworks: what is taken for X, W and dY is what their GEMMs have.

torch's and torchao's layers are the real ones. Hugging Face's, Megatron's and TransformerEngine's are written down here
with the class names, packages, arguments and results that those have, since they cannot be installed beside the tests.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from foreign_samples import Conv1D
from ottava.measure.walk import measure
from ottava.numerics.tensor import QuantizedTensor
from ottava.watching.adapters import ADAPTERS, adapter_of
from ottava.watching.collector import Collector
from ottava.watching.config import WatchConfig
from ottava.watching.modules import ModuleTap
from watch_samples import Seen, noise, tapped


def linear_of(seen: Seen, layer: str, x: Tensor, weight: Tensor, dy: Tensor) -> None:
    """The tap saw the operands of y = x @ weight.T and the gradient of y."""
    assert torch.equal(seen.one(layer, "input"), x.detach())
    assert torch.equal(seen.one(layer, "weight"), weight.detach())
    torch.testing.assert_close(seen.one(layer, "grad_output"), dy.detach())


def test_conv1d_keeps_its_weight_the_other_way_round() -> None:
    layer, x = Conv1D(24, 8), noise(2, 3, 8)
    with tapped(tensors=("input", "weight", "grad_output", "grad_weight")) as (seen, tap):
        layer(x).square().sum().backward()
    linear_of(seen, "Conv1D", x.reshape(6, 8), layer.weight.t(), 2 * layer(x).reshape(6, 24))
    torch.testing.assert_close(seen.one("Conv1D", "grad_weight"), layer.weight.grad.t())
    assert tap.coverage()[0]["shape"] == [24, 8]


class ColumnParallelLinear(nn.Module):
    """Megatron's, in one rank: returns (y, bias) and may be given its weight."""

    def __init__(self, sizes: tuple[int, int] | None) -> None:
        super().__init__()
        self.weight = None if sizes is None else nn.Parameter(noise(*sizes))

    def forward(self, input_: Tensor, weight: Tensor | None = None) -> tuple[Tensor, None]:
        weight = self.weight if weight is None else weight
        assert weight is not None
        return torch.matmul(input_, weight.t()), None


class RowParallelLinear(ColumnParallelLinear):
    """The other one."""


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("tied", [False, True], ids=["own weight", "weight of the call"])
def test_layers_that_return_tuples(kind: type[ColumnParallelLinear], tied: bool) -> None:
    weight, x = nn.Parameter(noise(16, 8, seed=3)), noise(3, 2, 8)
    layer = kind(None if tied else (16, 8))
    used = weight if tied else layer.weight
    with tapped() as (seen, tap):
        (layer(input_=x, weight=weight) if tied else layer(x))[0].square().sum().backward()
    rows = x.reshape(6, 8)
    linear_of(seen, kind.__name__, rows, used, 2 * rows @ used.t())
    assert tap.coverage()[0]["shape"] == [16, 8]


class TransformersLikeModel(nn.Module):
    """Returns a mapping, nests tuples, passes by keyword."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_attn, self.c_proj = Conv1D(24, 8), Conv1D(8, 8)

        def forward(self, hidden_states: Tensor, use_cache: bool = False) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            q, k, v = self.c_attn(hidden_states).split(8, -1)
            return self.c_proj(nn.functional.scaled_dot_product_attention(q, k, v)), (k, v)

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(self.Attention() for _ in range(2))
        self.lm_head = nn.Linear(8, 16)

    def forward(self, inputs_embeds: Tensor, labels: Tensor) -> dict[str, Any]:
        x, kept = inputs_embeds, []
        for layer in self.h:
            y, cache = layer(hidden_states=x, use_cache=True)
            x = x + y
            kept.append(cache)
        logits = self.lm_head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "past": kept}


def test_a_model_that_returns_mappings_and_nested_tuples() -> None:
    model = TransformersLikeModel()
    with tapped() as (seen, tap):
        model(inputs_embeds=noise(2, 5, 8), labels=torch.arange(10).view(2, 5))["loss"].backward()
    layers = [f"h.{i}.{name}" for i in range(2) for name in ("c_attn", "c_proj")] + ["lm_head"]
    assert seen.counts == Counter((layer, t) for layer in layers for t in ("input", "weight", "grad_output"))
    kinds = {entry["name"]: entry["kind"] for entry in tap.coverage()}
    assert kinds["lm_head"] == "lm_head"
    assert kinds["h.1.c_attn"] == "qkv"


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("self_attention", [True, False])
def test_multihead_attention_calls_no_layer_and_is_seen_in_parts(batch_first: bool, self_attention: bool) -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=batch_first)
    model = nn.ModuleDict({"attention": attention})
    x = noise(3, 5, 16)
    memory = x if self_attention else noise(3, 7, 16, seed=2) if batch_first else noise(7, 5, 16, seed=2)
    with tapped(model=model) as (seen, tap):
        y = attention(x, memory, memory)[0]
        y.square().sum().backward()
    inputs = [x] if self_attention else [x, memory]
    for got, given in zip(seen.of("attention.in_proj", "input"), inputs, strict=True):
        assert torch.equal(got, (given.transpose(0, 1) if batch_first else given).reshape(-1, 16))
    dy = (2 * y).detach()
    dy = (dy.transpose(0, 1) if batch_first else dy).reshape(-1, 16)
    assert torch.equal(seen.one("attention.out_proj", "grad_output"), dy)
    torch.testing.assert_close(dy.sum(0), attention.out_proj.bias.grad)
    assert torch.equal(seen.one("attention.out_proj", "weight"), attention.out_proj.weight.detach())
    entries = {entry["name"]: entry for entry in tap.coverage()}
    assert set(entries) == {"attention.in_proj", "attention.out_proj"}
    assert all(entry["seen"] and "calls no module" in entry["why"] for entry in entries.values())
    assert entries["attention.in_proj"]["shape"] == [48, 16]


def test_encoder_layers_of_torch_are_seen_whole() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    with tapped() as (_, tap):
        model(noise(2, 5, 16)).sum().backward()
    names = ("self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2")
    assert [e["name"] for e in tap.coverage()] == [f"layers.{i}.{name}" for i in range(2) for name in names]
    assert all(entry["seen"] for entry in tap.coverage())


def of_te(kind: type[nn.Module]) -> type[nn.Module]:
    kind.__module__ = "transformer_engine.pytorch.module"
    return kind


@of_te
class LayerNormMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1_weight, self.fc2_weight = nn.Parameter(noise(32, 8)), nn.Parameter(noise(8, 32))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(nn.functional.layer_norm(x, (8,)) @ self.fc1_weight.t()) @ self.fc2_weight.t()


@of_te
class LayerNormLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(noise(32, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = nn.functional.layer_norm(x, (8,))
        return normed @ self.weight.t(), normed


@of_te
class GroupedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_gemms = 3
        for i in range(3):
            self.register_parameter(f"weight{i}", nn.Parameter(noise(16, 8, seed=i)))

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        parts = inp.split([int(size) for size in m_splits])
        return torch.cat([x @ getattr(self, f"weight{i}").t() for i, x in enumerate(parts)])


def test_where_a_norm_is_fused_the_module_input_is_not_taken_for_x() -> None:
    model = nn.ModuleList([LayerNormLinear(), LayerNormMLP()])
    x = noise(4, 8)
    with tapped(model=model) as (seen, tap):
        model[0](x)[0].sum().backward()
        model[1](x).sum().backward()
    assert set(seen.counts) == {
        ("0", "weight"),
        ("0", "grad_output"),
        ("1.fc1", "weight"),
        ("1.fc2", "weight"),
        ("1.fc2", "grad_output"),
    }
    assert all(entry["why"].startswith("X: the norm is fused") for entry in tap.coverage())


def test_of_our_fused_layers_x_is_what_the_gemm_multiplies() -> None:
    """Under a recipe that casts nothing, where no door tells: the normed and the activated rows."""
    own: dict[str, Any] = {"bias": False, "recipe": "bf16"}
    model = nn.ModuleList(
        [
            ottava.nn.NormLinear(32, 64, **own),
            ottava.nn.NormLinear(32, 64, return_norm_output=True, **own),
            ottava.nn.ActivatedLinear(16, 8, activation="swiglu", **own),
        ]
    )
    x = noise(4, 32).requires_grad_()
    with tapped(model=model) as (seen, tap):
        model[0](x).square().sum().backward()
        model[1](x)[0].square().sum().backward()
        model[2](x).square().sum().backward()
    normed, activated = nn.functional.layer_norm(x, (32,)), nn.functional.silu(x[:, :16]) * x[:, 16:]
    for i, rows in enumerate((normed, normed, activated)):
        weight = model[i].weight
        assert isinstance(weight, Tensor)
        linear_of(seen, str(i), rows, weight, 2 * rows @ weight.t())
    assert not any(entry["why"] for entry in tap.coverage())


def test_what_a_door_tells_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, calls = ottava.nn.NormLinear(32, 64, recipe="tensorwise"), 0
    rows = type(layer).rows

    def counted(*given: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return rows(*given)

    monkeypatch.setattr(type(layer), "rows", counted)
    with tapped(model=layer) as (seen, _):
        layer(noise(4, 32)).square().sum().backward()
    assert calls == 0
    assert set(seen.counts) == set()


@pytest.mark.parametrize("splits", [[2, 0, 5], torch.tensor([3, 3, 1])], ids=["list", "tensor"])
def test_grouped_gemms_are_layers_of_their_own(splits: Any) -> None:
    layer, x = GroupedLinear(), noise(7, 8)
    with tapped() as (seen, _):
        layer(x, m_splits=splits).square().sum().backward()
    start = 0
    for i, size in enumerate(int(s) for s in splits):
        rows, start = x[start : start + size], start + size
        if not size:
            assert not seen.of(f"GroupedLinear.{i}", "input")
            continue
        assert torch.equal(seen.one(f"GroupedLinear.{i}", "input"), rows)
        weight = getattr(layer, f"weight{i}").detach()
        torch.testing.assert_close(seen.one(f"GroupedLinear.{i}", "grad_output"), 2 * rows @ weight.t())


def test_a_class_of_the_same_name_is_not_taken_for_one_of_torch() -> None:
    """PEFT's Linear wraps the real one, which is seen by itself."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(8, 8)

        @property
        def weight(self) -> Tensor:
            return self.base_layer.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) + x

    with tapped() as (seen, _):
        Linear()(noise(2, 8)).sum().backward()
    assert {layer for layer, _ in seen.counts} == {"base_layer"}


def test_every_adapter_belongs_to_a_class_that_is_found() -> None:
    for name, adapters in ADAPTERS.items():
        for adapter in adapters:
            kind = type(name, (nn.Module,), {"__module__": adapter.package + "x"})
            assert adapter_of(kind()) is adapter


# --- torchao -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_what_is_simulated_for_torchao_is_what_it_casts(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own casts, caught where its GEMMs get them, have the same codes, and so the same tallies, but for torchao's
    scales, which it rounds in float64: those differ in the last bit."""
    float8 = pytest.importorskip("torchao.float8")
    from torchao.float8 import float8_linear

    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    layer = float8_linear.Float8Linear.from_float(nn.Linear(64, 32, bias=False).bfloat16(), config)
    casts: list[tuple[str, Tensor, Any]] = []
    real = float8_linear.hp_tensor_to_float8_dynamic

    def caught(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        casts.append((kwargs["gemm_input_role"].name.lower(), x.detach(), result := real(x, *args, **kwargs)))
        return result

    monkeypatch.setattr(float8_linear, "hp_tensor_to_float8_dynamic", caught)
    collector = Collector(WatchConfig(sample=1, recipes=recipe))
    collector.looking = True
    handed: dict[str, Tensor] = {}

    def see(layer: str, tensor: str, x: Tensor) -> None:
        handed[tensor] = x.clone()
        collector.simulate(layer, tensor, x)

    tap = ModuleTap(see)
    tap.attach()
    layer(noise(48, 64).bfloat16().requires_grad_()).square().sum().backward()
    tap.detach()
    tallies, _ = collector.drain()
    assert tap.coverage()[0]["type"] == "Float8Linear"
    assert len(casts) >= 3
    for role, x, _ in casts:
        x2 = x.reshape(-1, x.shape[-1])
        same = handed[role]
        assert torch.equal(x2, same) or torch.equal(x2.t(), same), role
    by_tensor = {(key.tensor, key.direction): (key, tally) for key, tally in tallies.items()}
    x_cast = next(cast for role, _, cast in casts if role == "input")
    key, tally = by_tensor["input", "row"]
    spec = ottava.get_recipe(recipe).fprop.lhs
    assert spec is not None
    theirs = QuantizedTensor(x_cast._data, x_cast._scale.reciprocal().reshape(-1, 1), spec, torch.bfloat16)
    expected = measure(handed["input"], theirs)
    for name in ("n", "n_nonzero", "n_underflow", "n_subnormal", "n_overflow", "n_rows", "amax", "amin", "sxx"):
        assert getattr(tally, name) == getattr(expected, name), name
    assert tally.see == pytest.approx(expected.see, rel=1e-5)
    assert key.format == "E4M3"
