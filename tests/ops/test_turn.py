"""x.T from the codes of x, between scales that are powers of two."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.scaling import BLOCK_1X128
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.quantize import quantize
from ottava.ops.turn import refuse_turn, turn
from ottava.recipe import Recipe


def test_a_turned_operand_is_the_cast_of_the_decoded_numbers(recipe: Recipe) -> None:
    """Where scales are powers of two: codes, scales and all; numbers clear of the subnormals do not change."""
    row, col = recipe.cells("input")
    if row is None or col is None or (reason := refuse_turn(row, col)) is not None:
        assert recipe.name not in ("rowwise", "blockwise", "mxfp8", "mxfp8_floor", "mxfp4"), reason
        return
    for rows, cols in ((1, 1), (40, 300), (129, 33), (0, 32)):
        x = (torch.randn(rows, cols) * torch.exp2(torch.randint(-3, 4, (rows, 1)))).bfloat16()
        x_q = quantize(x, row)
        turned, wanted = turn(x_q, col), quantize(x_q.dequantize(torch.float32).t(), col)
        assert torch.equal(turned.data.view(torch.uint8), wanted.data.view(torch.uint8))
        assert torch.equal(turned.scale_inv, wanted.scale_inv)
        assert turned.dtype == torch.bfloat16
        exact, got = x_q.dequantize(torch.float32).t(), turned.dequantize(torch.float32)
        scale = col.granularity.expand(turned.scale_inv, (cols, rows)) if x.numel() else turned.scale_inv
        fits = (
            exact.abs() <= col.format.max * scale
        )  # the OCP rule saturates what is near the top of a block, here as in a cast
        assert bool(fits.all()) or col.scale_format == "e8m0_floor"
        smallest = col.format.min_subnormal * scale
        assert bool(((got - exact).abs() <= smallest / 2)[fits].all())
        normal = (exact.abs() >= col.format.min_normal * scale) & fits
        assert torch.equal(got[normal], exact[normal])


def test_codes_are_turned_between_powers_of_two_alone() -> None:
    x_q = quantize(torch.ones(2, 2), QuantizationSpec(E4M3, BLOCK_1X128))
    with pytest.raises(ValueError, match=r"turn: fp32 scales are no powers of two.*quantize x\.T itself"):
        turn(x_q, QuantizationSpec(E4M3, BLOCK_1X128, "pow2"))
    pow2 = QuantizationSpec(E4M3, BLOCK_1X128, "pow2")
    assert refuse_turn(pow2, replace(pow2, format=E5M2)) == "x is cast to E4M3 and x.T to E5M2"
    tensor = QuantizationSpec(E4M3, scale_format="pow2")
    assert refuse_turn(tensor, tensor) is None
    for spec in (replace(tensor, rounding="stochastic"), replace(tensor, scaling="delayed")):
        assert "only x itself can be cast to" in str(refuse_turn(tensor, spec))
        assert "only x itself can be cast to" in str(refuse_turn(spec, tensor))
