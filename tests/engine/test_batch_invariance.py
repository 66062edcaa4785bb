"""Which recipes can be batch invariant, and elementwise functions in tiles of one size."""

from __future__ import annotations

import pytest
import torch

from ottava.engine.batch_invariance import in_tiles, made_invariant
from ottava.recipe import GEMMS, RECIPES, GemmRecipe, Recipe


def test_recipes(recipe: Recipe) -> None:
    """A recipe is refused exactly if rows share a scale or random bits, and the message names the cell."""
    lhs = [getattr(recipe, gemm).lhs for gemm in ("fprop", "dgrad")]
    shares = any(
        spec.granularity.rows != 1
        or spec.scale_format == "e4m3"
        or spec.rounding == "stochastic"
        or spec.transform is not None
        for spec in lhs
        if spec is not None
    )
    if shares:
        with pytest.raises(
            ValueError, match=rf"recipe '{recipe.name}' cannot be batch invariant: (fprop|dgrad)\.lhs is"
        ):
            made_invariant(recipe)
        return
    made = made_invariant(recipe)
    assert made.casts
    assert made.quantized is recipe.quantized
    for gemm in GEMMS:
        one, other = getattr(made, gemm), getattr(recipe, gemm)
        assert (one.lhs, one.rhs, one.batch_invariant) == (other.lhs, other.rhs, True)
        assert GemmRecipe.from_dict(one.to_dict()) == one
    assert made_invariant(recipe) is made
    assert Recipe.from_dict(made.to_dict()) == made


def test_tiles_hide_the_place_of_a_row() -> None:
    """Where torch computes the ends of a tensor by other code than its middle, tiles do not."""
    torch.manual_seed(0)
    differs = False
    for width in (1, 64, 100, 128, 384, 40_000):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(23, width).to(dtype)
            for f in (torch.exp, torch.nn.functional.silu, torch.nn.functional.gelu, torch.cos):
                whole = in_tiles(f, x)
                assert torch.allclose(whole.float(), f(x).float(), rtol=2.0**-7, atol=2.0**-20)
                for a, b in ((0, 1), (5, 9), (22, 23)):
                    assert torch.equal(in_tiles(f, x[a:b]), whole[a:b]), (f, width, dtype)
                    differs |= not torch.equal(f(x[a:b]), f(x)[a:b])
    assert in_tiles(torch.exp, torch.ones(0, 64)).shape == (0, 64)
    assert in_tiles(torch.add, torch.ones(2, 3, 64), torch.ones(2, 3, 64)).shape == (2, 3, 64)
    assert RECIPES["rowwise"].fprop.batch_invariant is False
    assert differs or not torch.backends.cpu.get_cpu_capability().startswith("AVX")
