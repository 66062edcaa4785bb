"""Numbers that a cast may give and numbers that it may not: every recipe's cast is inside, every fault outside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ottava.numerics.tensor import QuantizedTensor
from ottava.ops.quantize import quantize
from ottava.recipe import RECIPES
from ottava.serving.evaluate import compare, differences
from ottava.serving.source import Source, Weight


def weight(values: torch.Tensor, cast: QuantizedTensor | None = None, name: str = "up.weight") -> Weight:
    return Weight(name, values, True, "", cast)


def samples() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(128, 256)
    outliers = x.clone()
    outliers[3, 7], outliers[90] = 3e3, outliers[90] * 100
    return {"normal": x, "outliers": outliers, "wide": x * torch.exp2(torch.randint(-20, 20, x.shape)), "zero": 0 * x}


def test_no_cast_leaves_its_own_bound() -> None:
    """Of FP32 masters and of their BF16 rounding, in every recipe, also with rounding that is stochastic."""
    for name, recipe in RECIPES.items():
        spec, _ = recipe.cells("weight")
        if spec is None:
            continue
        for rounding in ("nearest_even", "stochastic"):
            own = replace(spec, rounding=rounding)  # type: ignore[arg-type]
            for kind, x in samples().items():
                cast = quantize(x.bfloat16(), replace(own, scaling="current"))
                found = compare(weight(x), weight(x, cast))
                assert found.wrong == "", (name, rounding, kind, found)
                again = compare(weight(x, cast), weight(x, cast))
                assert (again.wrong, again.same_codes) == ("", True)


def test_faults_are_outside_and_named() -> None:
    for name, recipe in RECIPES.items():
        spec, _ = recipe.cells("weight")
        if spec is None or spec.predicted:
            continue
        x = samples()["normal"]
        cast = quantize(x.bfloat16(), spec)
        doubled = replace(cast, scale_inv=cast.scale_inv * 2)
        found = compare(weight(x), weight(x, doubled))
        assert "times the numbers of A: a scale is wrong" in found.wrong, name
        assert abs(found.factor - 2) < 0.05, name
        inverse = compare(weight(x), weight(x, replace(cast, scale_inv=1 / cast.scale_inv)))
        assert "fit when inverted" in inverse.wrong, name
        assert "other numbers" in compare(weight(x), weight(x, quantize(x.flip(0).bfloat16(), spec))).wrong
        if cast.scale_inv.numel() > 4:
            scales = cast.scale_inv.clone()
            scales[0, 0] *= 3
            one = compare(weight(x), weight(x, replace(cast, scale_inv=scales)))
            assert one.wrong == f"the scales of 1 of its {scales.numel():,} blocks are wrong", name
    x = samples()["normal"]
    assert "1 of its 128 rows" in compare(weight(x), weight(torch.cat((x[:1] * 2, x[1:])))).wrong
    assert compare(weight(0 * x), weight(x)).wrong
    assert compare(weight(x[:0]), weight(x[:0])).wrong == ""


def test_what_one_side_lacks_and_settings_that_differ_are_listed() -> None:
    x = torch.randn(32, 32)
    a = Source((weight(x), weight(x, name="lm_head.weight"), weight(x, name="b.weight")), {"rope_theta": 1e4, "x": 1})
    b = Source((weight(x), weight(x, name="c.weight")), {"rope_theta": 1e6, "x": 2})
    found = differences(a, b)
    assert (found.only_a, found.only_b) == (("b.weight",), ("c.weight",))
    assert "10000.0" in found.config[0]
    assert "1000000.0" in found.config[0]
    assert found.config[1:] == ("x is 1 in A, and 2 in B",)
    with pytest.raises(ValueError, match="shape"):
        differences(a, Source((weight(x[:4]),), {}))
