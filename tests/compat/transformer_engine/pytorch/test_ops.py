"""TransformerEngine's fusible operations: a sequence of them is the sequence of ottava's modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common.recipe import MXFP8BlockScaling


def test_a_sequence_has_the_bits_of_the_modules() -> None:
    torch.manual_seed(0)
    made = (te.ops.LayerNorm(32, dtype=torch.bfloat16), te.ops.Linear(32, 64, dtype=torch.bfloat16), te.ops.SwiGLU())
    norm, linear = te.LayerNorm(32, params_dtype=torch.bfloat16), te.Linear(32, 64, params_dtype=torch.bfloat16)
    linear.load_state_dict(made[1].state_dict())
    residual = te.ops.Sequential(te.ops.MakeExtraOutput(), *made, te.ops.AddExtraInput())
    x, more = torch.randn(16, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    with te.autocast(recipe=MXFP8BlockScaling()):
        y, kept = residual(x, more)
        gate, up = linear(norm(x)).chunk(2, -1)
    assert torch.equal(kept, x)
    assert torch.equal(y, nn.functional.silu(gate) * up + more)
    assert isinstance(residual[1:2] + made, te.ops.Sequential)
    with pytest.raises(ValueError, match="got 0 extra inputs; its operations need 1"):
        residual(x)
    with pytest.raises(NotImplementedError, match=r"ops\.AllReduce is not in ottava"):
        te.ops.AllReduce()


def test_operations_without_a_module_of_their_own() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    block = te.ops.Sequential(te.ops.ConstantScale(0.5), te.ops.Reshape((4, -1, 32)), te.ops.Dropout(0.0))
    assert torch.equal(block(x), (x / 2).view(4, 8, 32))
    cast = te.ops.Sequential(te.ops.Quantize(backward=True), te.ops.ConstantScale(2.0))
    assert torch.equal(cast(x), 2 * x)  # outside of an autocast it does nothing
    with te.autocast(recipe=MXFP8BlockScaling()):
        y, kept = cast(x), te.ops.Quantize()(x)
    assert isinstance(kept, te.MXFP8Tensor)
    assert torch.equal(y, 2 * kept.dequantize())
    dy = torch.randn(32, 32)
    y.backward(dy)
    assert torch.equal(x.grad.dequantize(), te.MXFP8Quantizer(te.DType.kFloat8E4M3)(2 * dy).dequantize())
