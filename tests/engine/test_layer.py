"""What is a quantized layer: by its class, wherever it stands, through copies and wrappers."""

from __future__ import annotations

import copy

import pytest
from torch import nn

import ottava
from ottava.engine.functional import QuantizedLayer, quantized_layers


def test_layers_are_found_in_the_order_of_the_model() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Sequential(nn.ReLU(), nn.Linear(64, 64))})
    assert quantized_layers(model) == []
    ottava.convert(model, "tensorwise")
    for one in (model, copy.deepcopy(model)):
        assert [layer.name for layer in quantized_layers(one)] == ["a", "b.1"]
        assert all(isinstance(layer, nn.Linear) and layer.last_call is None for layer in quantized_layers(one))


def test_what_an_optimizer_holds_is_the_weight_or_what_it_is_a_piece_of() -> None:
    linear, grouped = ottava.nn.Linear(64, 64), ottava.nn.GroupedLinear(2, 64, 32)
    assert linear.parameter is linear.weight
    assert [layer.parameter is grouped.weight for layer in quantized_layers(grouped)] == [True, True]
    assert [(layer.in_features, layer.out_features) for layer in quantized_layers(grouped)] == [(64, 32)] * 2


def test_a_layer_without_a_way_to_adopt_a_recipe_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"QuantizedLayer\.adopt"):
        QuantizedLayer().adopt(ottava.get_recipe("bf16"), "x")
