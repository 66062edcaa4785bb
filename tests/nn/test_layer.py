"""The two seams in front of the formulas: rows made by the layer itself, and operands gathered between cast and GEMM.

The witnesses: the same rows made by plain torch in front of a Linear, and one process that holds all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import ottava
from ottava.engine.layer import QuantizedLayer, quantized_layers
from ottava.nn.layer import Layer
from ottava.nn.linear import Linear


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
