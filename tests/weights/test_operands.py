"""Operands of stored weights: the codes, or codes that move by octaves; what would round twice is refused."""

from __future__ import annotations

import pytest
import torch

import ottava
from ottava.numerics.formats import E4M3
from ottava.ops.quantize import quantize
from ottava.recipe import RECIPES, Recipe
from ottava.weights.operands import refuse_weight, shared_bytes, weight_operands
from ottava.weights.parameter import quantized_weight
from sweep import sweep


@sweep()
def test_operands_are_the_stored_codes(recipe: Recipe) -> None:
    """Of W for every recipe, and of W.T where it shares the scales; else W.T is the cast of the exact numbers."""
    row, col = recipe.cells("weight")
    if row is None:
        assert refuse_weight(None, row, col) == "the recipe leaves the weight in high precision"
        return
    if recipe.name == "ms_eden":
        assert "codes have been rounded already" in refuse_weight(None, row, col)
        return
    assert refuse_weight(None, row, col) == ""
    weight = quantized_weight(torch.randn(96, 160, dtype=torch.bfloat16), row)
    of_w, of_w_t = weight_operands(weight, row, col)
    assert of_w is not None
    assert of_w_t is not None
    assert of_w.data is weight.codes
    assert torch.equal(of_w.scale_inv, weight.scale_inv)
    assert weight.scales.dtype == torch.uint8 or of_w.scale_inv is weight.scales
    assert (of_w.spec, of_w_t.spec) == (row, col)
    if row.granularity.transposes and row == col:
        assert of_w_t.data.data_ptr() == weight.codes.data_ptr()
        assert torch.equal(of_w_t.dequantize(), weight.dequantize().t())
    else:
        assert torch.equal(
            of_w_t.dequantize(), quantize(weight.dequantize(torch.float32).t(), col).dequantize(torch.bfloat16)
        )
    _, decoded = weight_operands(weight, None, None)
    assert decoded is not None
    assert torch.equal(decoded.dequantize(), weight.dequantize().t())


def test_codes_of_other_cells_are_refused_with_the_reason() -> None:
    rows = ottava.QuantizationSpec(E4M3, RECIPES["rowwise"].cells("weight")[0].granularity)
    assert "fp32 scales are no powers of two" in refuse_weight(None, rows, rows)
    weight = quantized_weight(torch.ones(64, 96), ottava.QuantizationSpec(E4M3))
    with pytest.raises(ValueError, match=r"a second rounding\. Choose a recipe whose weight cell is E4M3\[tensor\]"):
        weight_operands(weight, *RECIPES["blockwise"].cells("weight"))


def test_what_shares_the_memory_of_a_weight_is_not_counted_twice() -> None:
    weight = quantized_weight(torch.ones(64, 96), ottava.QuantizationSpec(E4M3))
    spec = weight.spec
    row, col = weight_operands(weight, spec, spec)
    assert shared_bytes(row, weight) == shared_bytes(col, weight) == weight.nbytes
    assert shared_bytes(quantize(torch.ones(64, 96), spec), weight) == shared_bytes(row, torch.ones(2)) == 0
