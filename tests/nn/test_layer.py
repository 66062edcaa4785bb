"""The seams of a layer: rows that it makes, operands that it gathers, and weights that lie in pieces or elsewhere.

A layer in pieces computes what a layer in one piece does, bit for bit. A piece of another module's parameter follows it
through whatever replaces, moves or copies it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.engine.functional import QuantizedLayer, quantized_layers
from ottava.nn.layer import Layer, LayerView, Linear, Projection, ViewOwner, rows_of, split_projections


class SquaredReLU:
    """relu(x)**2 in front of the cast; keeps x."""

    def forward(self, x: Tensor, *parameters: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return x.relu().square(), (x,)

    def backward(self, d_rows: Tensor, saved: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        return (d_rows * 2 * saved[0].relu(),)


class Activated(Layer, nn.Linear):
    """A linear with an activation in front: a layer is `Layer` and a shape."""

    produce = SquaredReLU()


def test_rows_made_by_the_layer_are_those_made_in_front_of_it(recipe: ottava.Recipe) -> None:
    """y, dx, dw and db to the bit, with gradients that stop where nobody wants them; receipts see an ordinary layer."""
    torch.manual_seed(0)
    layer = Activated(64, 48).bfloat16()
    layer.adopt(recipe, "one")
    plain = Linear(64, 48, recipe=recipe, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict(), strict=False)
    for wanted in (True, False):
        results = []
        for model, in_front in ((layer, nn.Identity()), (plain, lambda x: x.relu().square())):
            x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_(wanted)
            model.zero_grad()
            torch.manual_seed(3)
            y = model(in_front(x))
            if recipe.casts or model is plain:
                y.square().sum().backward()
                results.append((y, x.grad, model.weight.grad, model.bias.grad))
        if recipe.casts:
            for ours, theirs in zip(*results, strict=True):
                assert (ours is None) == (theirs is None)
                assert ours is None or torch.equal(ours, theirs)
    assert ottava.receipt(layer).fp8_fraction == ottava.receipt(plain).fp8_fraction
    assert quantized_layers(nn.Sequential(layer, nn.ReLU(), plain)) == [layer, plain]
    assert isinstance(layer, QuantizedLayer)


class Pair(ViewOwner):
    """Two matrices in one parameter, the second kept as (K, N), and one bias for three."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Parameter(torch.randn(2, 32, 48, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.randn(96, dtype=torch.bfloat16))
        self.first = LayerView(self, "pair", None, 0)
        self.second = LayerView(self, "pair", "bias", 1, turned=True)
        self.third = LayerView(self, "pair", "bias", 1, of_bias=2)
        for name, part in self.named_children():
            part.adopt(ottava.get_recipe("delayed"), name)

    def forward(self, x: Tensor) -> Tensor:
        self.bind(self.children())  # type: ignore[arg-type]
        one, other = self.pair.unbind()
        return self.second.run(self.first.run(x, one, None), other.t(), None)


def test_a_part_is_a_view_of_what_its_owner_holds() -> None:
    owner = Pair()
    assert (owner.first.in_features, owner.first.out_features, owner.first.bias) == (48, 32, None)
    assert (owner.second.in_features, owner.second.out_features) == (32, 48)
    assert torch.equal(owner.second.weight, owner.pair[1].T)
    assert torch.equal(owner.third.bias, owner.bias[64:])
    assert all(part.parameter is owner.pair for part in owner.children())
    assert [name for name, _ in owner.named_parameters()] == ["pair", "bias"]
    owner.pair = nn.Parameter(torch.zeros(2, 32, 48, dtype=torch.bfloat16))
    assert owner.first.parameter is owner.pair
    owner.load_state_dict({n: t.clone() for n, t in owner.state_dict().items()}, assign=True)
    assert owner.first.parameter is owner.pair
    for twin in (copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
        assert twin.first.parameter is twin.pair is not owner.pair
    assert "48 -> 32 of pair, recipe=delayed" in repr(owner)


def test_parts_made_by_hand_share_one_state_that_an_optimizer_moves() -> None:
    """Also once unpickled, when no state knows them."""
    for owner in (Pair(), pickle.loads(pickle.dumps(Pair()))):
        optimizer = torch.optim.SGD(owner.parameters(), lr=0.1)
        owner(torch.ones(4, 48, dtype=torch.bfloat16)).sum().backward()
        assert owner.first.scaling_state is owner.second.scaling_state
        optimizer.step()
        assert float(owner.first.quantizers.input.scale) == 448.0
        assert owner.pair.grad is not None
        assert owner.pair.grad.abs().amax(dim=(1, 2)).min() > 0


def test_rows_that_a_layer_can_expect() -> None:
    owner = Pair()
    owner.first.share = 0.25
    assert (rows_of(owner.first, 1000), rows_of(owner.first, 1), rows_of(nn.Linear(2, 2), 1000)) == (250, 1, 1000)


def results(layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    layer(x).float().square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def test_pieces_have_the_bits_of_the_whole() -> None:
    """Three steps of every layer that knows its pieces, cached casts and predicted scales included; and of copies."""
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for recipe in ("tensorwise", "delayed", "blockwise", "bf16"):
        attention = ottava.nn.MultiheadAttention(64, 4, kv_heads=2, dtype=torch.bfloat16, recipe=recipe)
        mlp = ottava.nn.NormMLP(64, 96, activation="swiglu", norm=None, dtype=torch.bfloat16, recipe=recipe)
        for whole in (attention.qkv, mlp.fc1):
            ottava.convert(whole, recipe, filter=lambda name, layer: True)
            split = copy.deepcopy(whole)
            split_projections(split)
            names = [piece.name for piece in whole.projections]
            assert [n for n, _ in split.named_parameters()] == [
                f"{n}_{kind}" for kind in ("weight", "bias") for n in names
            ]
            for one in (split, copy.deepcopy(split), pickle.loads(pickle.dumps(split))):
                reference = copy.deepcopy(whole)
                optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, one)]
                for _ in range(3):
                    wanted, got = results(reference, x), results(one, x)
                    assert torch.equal(got[0], wanted[0])
                    assert torch.equal(torch.cat(got[1 : 1 + len(names)]), wanted[1])
                    assert torch.equal(torch.cat(got[1 + len(names) :]), wanted[2])
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                assert one.quantizers.state_dict().keys() == reference.quantizers.state_dict().keys()
                for other, buffer in zip(one.quantizers.buffers(), reference.quantizers.buffers(), strict=True):
                    assert torch.equal(other, buffer)


def test_state_dicts_of_either_form_load_into_both() -> None:
    whole = ottava.nn.NormMLP(64, 96, activation="swiglu").fc1
    split = ottava.nn.NormMLP(64, 96, activation="swiglu").fc1
    split_projections(split)
    assert split.load_state_dict(whole.state_dict()).missing_keys == []
    assert torch.equal(split.weight, whole.weight)
    assert torch.equal(split.bias, whole.bias)
    other = ottava.nn.NormMLP(64, 96, activation="swiglu").fc1
    assert other.load_state_dict(split.state_dict()).unexpected_keys == []
    assert torch.equal(other.weight, whole.weight)


def test_refusals() -> None:
    layer = ottava.nn.Linear(64, 64)
    with pytest.raises(ValueError, match=r"got projections of \[32, 16\] rows; needs 64 in all"):
        split_projections(layer, [Projection("a", 32), Projection("b", 16)])
    ottava.convert(layer, "tensorwise", weights="fp8")
    with pytest.raises(TypeError, match="weights='bf16'"):
        split_projections(layer, [Projection("a", 32), Projection("b", 32)])
    assert list(layer.state_dict()) == ["weight", "bias", "weight_scale_inv"]
