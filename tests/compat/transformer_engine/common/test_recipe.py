"""TransformerEngine's recipes: the cells they become, against ottava's own, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import ottava
import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X128, BLOCK_128X128, Granularity
from ottava.ops.quantize import quantize
from ottava.recipe import GEMMS, HIGH_PRECISION, RECIPES, get_recipe


def cells(recipe: Recipe | ottava.Recipe) -> tuple[object, ...]:
    own = recipe.ottava if isinstance(recipe, Recipe) else recipe
    return own.fprop, own.dgrad, own.wgrad


def spec(recipe: Recipe, tensor: str) -> ottava.QuantizationSpec:
    found = recipe.ottava.cells(tensor)[0]
    assert found is not None
    return found


def test_defaults_are_the_registered_recipes() -> None:
    """Cell by cell, and under the registered name, which receipts print; DelayedScaling keeps 1024 amaxes."""
    for theirs, name in (
        (Float8CurrentScaling(), "tensorwise"),
        (Float8CurrentScaling(fp8_format=Format.E4M3), "tensorwise_e4m3"),
        (MXFP8BlockScaling(), "mxfp8"),
        (NVFP4BlockScaling(), "nvfp4_rht"),
        (NVFP4BlockScaling(disable_rht=True), "nvfp4"),
    ):
        assert cells(theirs) == cells(get_recipe(name))
    assert Float8CurrentScaling().ottava == get_recipe("tensorwise")
    assert cells(DelayedScaling()) == cells(get_recipe("delayed", amax_history_len=1024))
    assert DelayedScaling().ottava.name == "DelayedScaling"
    for scales, name in ((False, "blockwise"), (True, "blockwise_fp32")):
        ours = get_recipe(name)
        assert cells(Float8BlockScaling(use_f32_scales=scales)) == cells(ours)


def test_every_field_reaches_its_cells() -> None:
    delayed = DelayedScaling(margin=2, amax_history_len=7, amax_compute_algo="most_recent", fp8_format=Format.E4M3)
    for tensor in ("input", "weight", "grad_output"):
        own = spec(delayed, tensor)
        assert (own.margin, own.amax_history_len, own.amax_compute_algo) == (2, 7, "most_recent")
        assert (own.format, own.scaling) == (ottava.E4M3, "delayed")
        assert spec(Float8CurrentScaling(use_power_2_scales=True), tensor).scale_format == "pow2"
    for number, gemm in enumerate(GEMMS):
        kept = tuple(index == number for index in range(3))
        recipe = DelayedScaling(override_linear_precision=kept).ottava  # type: ignore[arg-type]
        assert [getattr(recipe, name) == HIGH_PRECISION for name in GEMMS] == list(kept)
        fast = Float8CurrentScaling(**{f"fp8_gemm_{gemm}": MMParams(use_split_accumulator=False)}).ottava
        assert getattr(fast, gemm).fast_accum
    assert Float8CurrentScaling().ottava.fprop.fast_accum
    assert spec(MXFP8BlockScaling(enable_2d_quantization=True), "weight").granularity == Granularity(32, 32)
    assert spec(MXFP8BlockScaling(fp8_format=Format.HYBRID), "grad_output").format == ottava.E5M2
    blocks = Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)
    assert [spec(blocks, tensor).granularity for tensor in ("input", "weight")] == [BLOCK_128X128, BLOCK_1X128]
    nvfp4 = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)
    assert spec(nvfp4, "weight").granularity == BLOCK_1X16
    assert spec(nvfp4, "grad_output").rounding == "nearest_even"


def test_four_over_six_is_that_of_the_fields() -> None:
    """Scopes, error and bound of each operand; gradients keep NVIDIA's scales, and rotated activations are refused."""
    cases = (
        ({"nvfp4_4over6": "all"}, "four_over_six_te", "four_over_six_te"),
        ({"nvfp4_4over6": "all", "nvfp4_4over6_err_mode": "MSE"}, *("four_over_six_te_mse",) * 2),
        ({"nvfp4_4over6": "all", "nvfp4_4over6_e4m3_use_256": "none"}, *("four_over_six_te_448",) * 2),
        (
            {"nvfp4_4over6": "all", "nvfp4_4over6_e4m3_use_256": "weights", "nvfp4_4over6_err_mode": "MSE"},
            *("four_over_six_te_mse_448", "four_over_six_te_mse"),
        ),
        ({"nvfp4_4over6": "activations"}, "four_over_six_te", "amax"),
        ({"nvfp4_4over6": "weights"}, "amax", "four_over_six_te"),
        ({"nvfp4_4over6": "weights", "disable_rht": False}, "amax", "four_over_six_te"),
        ({"nvfp4_4over6_err_mode": "MSE"}, "amax", "amax"),
    )
    for fields, x, w in cases:
        recipe = NVFP4BlockScaling(**{"disable_rht": True, **fields}).ottava  # type: ignore[arg-type]
        rules = [spec.block_scale for spec in (*recipe.cells("input"), *recipe.cells("weight")) if spec]
        assert rules == [x, x, w, w], fields
        assert {spec.block_scale for spec in recipe.cells("grad_output") if spec} == {"amax"}
        named = NVFP4BlockScaling(**{"disable_rht": True, **fields}).ottava == RECIPES["four_over_six_te"]  # type: ignore[arg-type]
        assert named == (fields == {"nvfp4_4over6": "all"})


def test_a_backward_in_high_precision_keeps_the_forward() -> None:
    for recipe in (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling):
        changed = recipe(backward_override="high_precision").ottava
        assert changed == replace(recipe().ottava, name=changed.name, dgrad=HIGH_PRECISION, wgrad=HIGH_PRECISION)


def test_a_backward_reads_what_the_forward_multiplied() -> None:
    """Also by quantizers, whose columns are decoded rows; a GroupedLinear has the bits of its groups."""
    custom = CustomRecipe(qfactory=te.mxfp8_fwd_high_precision_bwd_factory)
    custom_mx = CustomRecipe(qfactory=te.mxfp8_factory, backward_override="dequantized")
    kinds = (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)
    made = [(kind(backward_override="dequantized"), kind()) for kind in kinds]
    made += [(custom, MXFP8BlockScaling()), (custom_mx, MXFP8BlockScaling())]
    x, dy, layer = torch.randn(32, 64).bfloat16(), torch.randn(32, 48).bfloat16(), te.Linear(64, 48, bias=False)
    layer, grouped = layer.bfloat16(), te.GroupedLinear(2, 64, 48, bias=False, params_dtype=torch.bfloat16, name="g")
    for group in grouped.groups:
        group.weight.data.copy_(layer.weight)
    for changed, plain in made:
        cells = plain.ottava.fprop
        assert cells.lhs is not None
        assert cells.rhs is not None
        given = x.clone().requires_grad_()
        layer.zero_grad(), grouped.zero_grad()
        with te.autocast(recipe=changed):
            y, both_y = layer(given), grouped(x[:16], [16, 0])
        y.backward(dy), both_y.backward(dy[:16])
        w, rows = (quantize(t.detach(), spec).dequantize() for t, spec in ((layer.weight, cells.rhs), (x, cells.lhs)))
        assert torch.equal(given.grad, dy @ w)
        assert torch.equal(layer.weight.grad, dy.t() @ rows)
        first = quantize(x[:16], cells.lhs).dequantize()
        assert torch.equal(grouped.weight0.grad, dy[:16].t() @ first)
        with te.autocast(recipe=plain):
            assert torch.equal(layer(x), y)
        layer.eval()
        with torch.no_grad(), te.autocast(recipe=changed):
            assert torch.equal(layer(x), y)
        layer.train()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: DelayedScaling(amax_history_length=16), TypeError, "did you mean 'amax_history_len'"),
        (lambda: DelayedScaling(fp8_format=Format.E5M2), ValueError, "no tensor core multiplies E5M2 by E5M2"),
        (lambda: DelayedScaling(amax_compute_algo="mean"), ValueError, "mean"),
        (lambda: DelayedScaling(amax_compute_algo="mean", scaling_factor_compute_algo=max), ValueError, "mean"),
        (lambda: DelayedScaling(backward_override="high_precision"), ValueError, "for the other recipes"),
        (
            lambda: Float8CurrentScaling(fp8_quant_fwd_inp=QParams(amax_epsilon=1e-4)),
            NotImplementedError,
            "0.0001",
        ),
        (lambda: Float8BlockScaling(x_block_scaling_dim=2), ValueError, "128x128"),
        (lambda: Float8BlockScaling(w_block_scaling_dim=3), ValueError, "needs 1 or 2"),
        (lambda: NVFP4BlockScaling(nvfp4_4over6="all"), ValueError, "behind the random Hadamard transform"),
        (lambda: NVFP4BlockScaling(nvfp4_4over6="weight"), ValueError, "did you mean 'weights'"),
        (lambda: NVFP4BlockScaling(nvfp4_4over6_err_mode="MSA"), ValueError, "did you mean 'MAE'"),
        (lambda: CustomRecipe(qfactory=print), TypeError, "qfactory gave None for the input"),
        (lambda: CustomRecipe(qfactory=print, quantization_alignment=0), ValueError, "needs 1 or more"),
        (
            lambda: NVFP4BlockScaling(fp8_dpa=True),
            NotImplementedError,
            "attention casts per tensor or in blocks of 32",
        ),
        (lambda: MXFP8BlockScaling(fp8_mha=True), NotImplementedError, "results of attention stay in high precision"),
        (lambda: MXFP8BlockScaling(margin=1), NotImplementedError, "does nothing in TransformerEngine"),
    ],
)
def test_what_cannot_be_honoured_is_refused(make, error, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=words):
        make().ottava  # noqa: B018  # what an autocast asks for


def test_a_field_can_be_assigned_and_is_checked() -> None:
    """A bad value leaves the old one; three assignments may lead over cells that no GEMM multiplies."""
    recipe = Float8CurrentScaling()
    before = recipe.ottava
    assert recipe.ottava is before  # plans are kept by the identity of specs
    recipe.fp8_quant_fwd_weight = QParams(power_2_scale=True)
    assert [spec(recipe, tensor).scale_format for tensor in ("input", "weight")] == ["fp32", "pow2"]
    with pytest.raises(ValueError, match="unknown backward_override"):
        recipe.backward_override = "none"
    assert recipe.backward_override is None
    with pytest.raises(AttributeError, match="did you mean 'use_power_2_scales'"):
        recipe.use_power2_scales = True  # type: ignore[attr-defined]
    for name, value in (("fp8_quant_fwd_inp", 3), ("fp8_format", "E4M3"), ("fp8_dpa", 1), ("fp8_gemm_dgrad", None)):
        with pytest.raises(TypeError, match=f"Float8CurrentScaling: {name} is"):
            setattr(recipe, name, value)
    nvfp4 = NVFP4BlockScaling()
    assert nvfp4.fp4_quant_bwd_grad == QParams(random_hadamard_transform=True, stochastic_rounding=True)
    nvfp4.fp4_quant_fwd_inp = QParams()
    with pytest.raises(ValueError, match="both sides have the same one"):
        nvfp4.ottava  # noqa: B018
    nvfp4.fp4_quant_fwd_weight = nvfp4.fp4_quant_bwd_grad = QParams()
    plain = NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True, disable_stochastic_rounding=True)
    assert cells(nvfp4) == cells(plain)


def test_an_amax_function_reads_their_history() -> None:
    """Row 0 is the newest amax, the others follow from the oldest on; (L, n) -> (n,)."""
    import torch

    seen = []

    def first_rows(history: torch.Tensor) -> torch.Tensor:
        seen.append(history)
        return history[:2].amax(0)

    algorithm = spec(DelayedScaling(amax_history_len=4, amax_compute_algo=first_rows), "input").amax_compute_algo
    assert callable(algorithm)
    assert float(algorithm(torch.tensor([4.0, 3.0, 2.0, 7.0]))) == 7.0
    assert torch.equal(seen[0], torch.tensor([[4.0], [7.0], [2.0], [3.0]]))


def test_a_function_makes_the_scales() -> None:
    """scaling_factor_compute_algo(amax, scale, fp8_max, recipe), in their order, by hand: the scale moves half the way
    to fp8_max / amax in each step. TransformerEngine's own rule as a function gives the scales of no function."""
    import torch

    import ottava.compat.transformer_engine.pytorch as te
    from ottava.compat.transformer_engine.pytorch.quantization import _default_sf_compute

    def halfway(amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: DelayedScaling) -> torch.Tensor:
        return (scale + fp8_max / amax / 2**recipe.margin) / 2

    def default(amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: DelayedScaling) -> torch.Tensor:
        return _default_sf_compute(amax, scale, fp8_max, recipe.margin)

    scales = {}
    for algorithm, rule in (("max", None), ("max", default), ("most_recent", halfway), (lambda rows: rows[0], halfway)):
        fields: Any = {"amax_compute_algo": algorithm, "scaling_factor_compute_algo": rule}
        layer, by_hand = te.Linear(32, 32), torch.ones(1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        for step in range(4):
            with te.autocast(recipe=DelayedScaling(margin=1, amax_history_len=3, **fields)):
                layer(torch.full((4, 32), 2.0**step)).sum().backward()
            optimizer.step()
            by_hand = halfway(torch.tensor([2.0**step]), by_hand, 448.0, DelayedScaling(margin=1))
        scales[algorithm, rule] = layer.quantizers.input.scale
        assert rule is not halfway or torch.equal(layer.quantizers.input.scale.view(1), by_hand)
    assert scales["max", None] == scales["max", default] == 28.0
