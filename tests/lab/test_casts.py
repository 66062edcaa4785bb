"""What the lab measures of a layer: against fp64 by hand, and what must hold for every recipe."""

from __future__ import annotations

import math

import pytest
import torch

import ottava
from ottava.lab.study import DISTRIBUTIONS, FEATURES, TOKENS, compared, drawn, measured
from ottava.measure.tally import PARTS
from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.scaling import BLOCK_1X32
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import GEMMS, RECIPES, GemmRecipe, Recipe


def test_distributions_are_what_their_names_say() -> None:
    """Tails, channels and rows differ as said; a seed gives the same numbers."""
    drawn_twice = [[drawn(name, torch.Generator().manual_seed(3)) for _ in range(2)] for name in DISTRIBUTIONS]
    assert all(torch.equal(*pair) for pair in drawn_twice)
    normal, tails, channel, gradient = (pair[0].double() for pair in drawn_twice)
    assert normal.shape == (TOKENS, FEATURES)
    kurtosis = [float(x.pow(4).mean() / x.square().mean() ** 2) for x in (normal, tails)]
    assert abs(kurtosis[0] - 3) < 0.2
    assert kurtosis[1] > 10
    assert int((channel.square().mean(0) > 100).sum()) == 4
    rows = gradient.square().mean(1).sqrt().log()
    assert 1.6 < float(rows.std()) < 2.4
    assert abs(float(rows.mean()) + 14 * math.log(2)) < 0.5


def test_errors_of_bf16_are_roundings_and_those_of_a_recipe_are_of_the_layer() -> None:
    """BF16: below 2**-8, nothing cast. tensorwise: the error of the layer's own results, by hand."""
    plain = measured(RECIPES["bf16"], 0)
    for name in DISTRIBUTIONS:
        assert plain[name]["casts"] == {}
        assert all(0 < plain[name]["gemms"][gemm]["error"] < 2.0**-8 for gemm in GEMMS), name
    recipe = RECIPES["tensorwise"].override("layers.*", "bf16")  # the layer has the recipe's own cells
    found = measured(recipe, 5)["normal"]
    generator = torch.Generator().manual_seed(4 * 5)
    x, _ = drawn("normal", generator), drawn("normal", generator)
    w = (torch.randn(FEATURES, FEATURES, generator=generator) * FEATURES**-0.5).bfloat16()
    spec = RECIPES["tensorwise"].fprop.lhs
    assert spec is not None
    a, b = ottava.quantize(x, spec), ottava.quantize(w, spec)
    y, exact = ottava.gemm(a, b, out_dtype=torch.bfloat16).double(), x.double() @ w.double().t()
    error = float((y - exact).norm() / exact.norm())
    assert found["gemms"]["fprop"]["error"] == pytest.approx(error, rel=1e-9)
    e = x.double() - a.dequantize(torch.float64)
    sqnr = -10 * math.log10(float(e.square().sum() / x.double().square().sum()))
    assert found["casts"]["X"]["sqnr_db"] == pytest.approx(sqnr, abs=1e-4)
    assert sum(found["casts"]["X"][part] for part in PARTS) == pytest.approx(100)


def test_stochastic_rounding_is_unbiased_and_rounding_to_nearest_is_not() -> None:
    """dX from a stochastic dY in E5M2 has little that is systematic, the weight's share; the nearest nothing else."""
    for rounding, low, high in (("stochastic", -0.1, 0.2), ("nearest_even", 0.999, 1.001)):
        spec = QuantizationSpec(E5M2, BLOCK_1X32, scale_format="e8m0", rounding=rounding)  # type: ignore[arg-type]
        weight = QuantizationSpec(E4M3, BLOCK_1X32, scale_format="e8m0")
        found = measured(Recipe("one", dgrad=GemmRecipe(spec, weight)), 0)["normal"]["gemms"]
        assert low < found["dgrad"]["systematic"] < high, rounding
        assert found["fprop"]["error"] < 2.0**-8, "not quantized"
    exact = torch.randn(100, dtype=torch.float64)
    same = compared(exact * 0.75, exact * 0.75, exact)
    assert same == {"error": 0.25, "systematic": 1.0, "shrink": 0.25}
    assert compared(exact, exact, exact) == {"error": 0.0, "systematic": 0.0, "shrink": -0.0}


def test_every_registered_recipe_can_be_measured() -> None:
    """Errors are small on normal data, the parts of every cast sum to all of it, and draws share at most all."""
    for name, recipe in RECIPES.items():
        found = measured(recipe, 1)
        for gemm in GEMMS:
            error = found["normal"]["gemms"][gemm]
            assert 0 < error["error"] < 0.3, (name, gemm)
            assert -1 <= error["systematic"] <= 1 + 1e-9, (name, gemm)
            if "ms_eden" in name and gemm != "fprop":
                assert abs(error["systematic"]) < 0.05, "unbiased by construction"
        for distribution in DISTRIBUTIONS:
            for operand, cast in found[distribution]["casts"].items():
                assert sum(cast[part] for part in PARTS) == pytest.approx(100), (name, distribution, operand)
        assert bool(found["normal"]["casts"]) == recipe.casts, name
