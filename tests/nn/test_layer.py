"""The two seams in front of the formulas: rows made by the layer itself, and operands gathered between cast and GEMM.

The witnesses: the same rows made by plain torch in front of a Linear, and one process that holds all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import ottava
from ottava.nn.layer import Layer
from ottava.nn.linear import Linear
from ottava.quantized_layer import QuantizedLayer, quantized_layers
from ottava.quantized_tensor import Operand, QuantizedTensor


class SquaredReLU:
    """relu(x)**2 in front of the cast; keeps x."""

    def forward(self, x: Tensor, *parameters: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return x.relu().square(), (x,)

    def backward(self, d_rows: Tensor, saved: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        return (d_rows * 2 * saved[0].relu(),)


class Activated(Layer, nn.Linear):
    """A linear with an activation in front: a layer is `Layer` and a shape."""

    produce = SquaredReLU()


class OtherRank:
    """Two ranks in one process: the other one's rows are known, and so are its casts."""

    def __init__(self, other: dict[int, Operand]) -> None:
        self.other, self.gathered = other, 0

    def gather(self, operand: Operand, dim: int) -> Operand:
        theirs = self.other[dim]
        assert isinstance(operand, QuantizedTensor)
        assert isinstance(theirs, QuantizedTensor)
        self.gathered += 1
        codes = torch.cat([operand.data.view(torch.uint8), theirs.data.view(torch.uint8)], dim)
        scales = torch.cat([operand.scale_inv, theirs.scale_inv], dim)
        return replace(operand, data=codes.view(operand.data.dtype), scale_inv=scales, amax=None)

    def scatter(self, dx: Tensor) -> Tensor:
        return dx[: len(dx) // 2]


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


def test_gathered_operands_multiply_as_in_one_process() -> None:
    """Codes and scales of another rank between cast and GEMM: y of all rows, dw of all rows, dx of one's own."""
    for name in ("rowwise", "mxfp8", "blockwise"):
        torch.manual_seed(0)
        x, dy = torch.randn(256, 128).bfloat16(), torch.randn(256, 64).bfloat16()
        whole = Linear(128, 64, bias=False, recipe=name, dtype=torch.bfloat16)
        part = Linear(128, 64, bias=False, recipe=name, dtype=torch.bfloat16)
        part.load_state_dict(whole.state_dict())
        row_spec, col_spec = whole.resolved.cells("input")
        assert row_spec is not None
        assert col_spec is not None
        if name == "rowwise":  # x.T has one scale over all rows: only equal on both ranks where x is
            x[128:] = x[:128]
        other = {0: ottava.quantize(x[128:], row_spec), 1: ottava.quantize(x[128:].t(), col_spec)}
        if name == "rowwise":
            other[1] = replace(other[1], scale_inv=other[1].scale_inv[:, :0])
        part.exchange = OtherRank(other)
        leaf, own = x.clone().requires_grad_(), x[:128].clone().requires_grad_()
        expected, got = whole(leaf), part(own)
        assert torch.equal(got, expected)
        expected.backward(dy)
        got.backward(dy)
        assert leaf.grad is not None
        assert torch.equal(own.grad, leaf.grad[:128])  # type: ignore[arg-type]
        assert torch.equal(part.weight.grad, whole.weight.grad)  # type: ignore[arg-type]
        assert part.exchange.gathered == 2
