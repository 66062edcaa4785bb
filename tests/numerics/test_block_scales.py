"""Rules for NVFP4's block scales, and whole FP4 recipes, against numpy's words of their definitions, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import fp4_samples as fp4
import ottava
from ottava.numerics.rounding import decode, draw_seed
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_16X16, BLOCK_SCALES, amax
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.numerics.transforms import Hadamard
from ottava.ops.quantize import quantize
from ottava.recipe import RECIPES

UNCLIPPED = QuantizationSpec(ottava.E2M1, BLOCK_1X16, "e4m3", rounding="stochastic", block_scale="unclipped")

TE_RULES = {
    "four_over_six_te": (256, 1),
    "four_over_six_te_mse": (256, 2),
    "four_over_six_te_448": (448, 1),
    "four_over_six_te_mse_448": (448, 2),
}


def same(x_q: QuantizedTensor, found: tuple[np.ndarray, np.ndarray], case: str) -> None:
    """The same numbers and the same scales."""
    codes, scale_inv = found
    assert torch.equal(decode(x_q.data, x_q.spec.format), torch.from_numpy(codes)), case
    assert torch.equal(x_q.scale_inv, torch.from_numpy(scale_inv.astype(np.float32))), case


def matrices() -> dict[str, Tensor]:
    """BF16, because TransformerEngine rotates such; blocks of very different sizes, zeros, ragged ends."""
    spread = torch.randn(48, 256) * torch.exp2(torch.randint(-20, 4, (48, 16)).float()).repeat_interleave(16, 1)
    spread[3:7, 32:80] = 0
    faint = torch.tensor([1.0, 1.0, 1.0, 2.0**-24, 2.0**-30, 0.0]) / 99
    return {
        "bell": torch.randn(64, 128).bfloat16(),
        "spread": spread.bfloat16(),
        "ragged": (torch.randn(19, 45) + 2).bfloat16(),
        "zeros": torch.zeros(5, 33).bfloat16(),
        "faint": (torch.randn(6, 128) * faint[:, None]).bfloat16(),
        "turned": torch.randn(40, 64).bfloat16().t(),
    }


def test_every_cast_is_that_of_its_definition() -> None:
    for name, x in matrices().items():
        numbers = x.float().numpy()
        for layout in ("rows", "columns"):
            cast = {"rows": x, "columns": x.t().contiguous().t()}[layout]

            def by(spec: QuantizationSpec, x: Tensor = cast) -> QuantizedTensor:
                torch.manual_seed(3)
                return quantize(x, spec)

            def seeds(count: int) -> list[Tensor]:
                torch.manual_seed(3)
                return [draw_seed(torch.device("cpu")) for _ in range(count)]

            (seed,) = seeds(1)
            recipe = RECIPES["nvfp4_rht"]
            same(by(recipe.fprop.lhs), fp4.nvfp4(numbers), name)
            same(by(recipe.fprop.rhs), fp4.nvfp4(numbers, 16), name)
            same(by(recipe.dgrad.lhs), fp4.nvfp4(numbers, 1, fp4.at_random(seed)), name)
            same(by(recipe.wgrad.rhs), fp4.nvfp4(fp4.rotated(numbers)), name)
            same(by(recipe.wgrad.lhs), fp4.nvfp4(fp4.rotated(numbers), 1, fp4.at_random(seed)), name)
            recipe = RECIPES["four_over_six"]
            same(by(recipe.fprop.lhs), fp4.four_over_six(numbers), name)
            same(by(recipe.fprop.rhs), fp4.four_over_six(numbers, 16), name)
            same(by(recipe.wgrad.rhs), fp4.four_over_six(fp4.rotated(numbers)), name)
            for rule, (bound, power) in TE_RULES.items():
                for blocks, rows in ((BLOCK_1X16, 1), (BLOCK_16X16, 16)):
                    spec = QuantizationSpec(ottava.E2M1, blocks, "e4m3", block_scale=rule)
                    same(by(spec), fp4.four_over_six_te(numbers, rows, bound, power), f"{name} {rule}")
            signs, own = seeds(2)
            turned = fp4.rotated(numbers, 128, fp4.fresh_signs(signs), to_bf16=False)
            same(by(RECIPES["ms_eden"].dgrad.lhs), fp4.ms_eden(turned, own), name)
            same(by(UNCLIPPED), fp4.unclipped(numbers, fp4.at_random(seed)), name)
            same(by(RECIPES["mxfp4"].fprop.lhs), fp4.mxfp4(numbers), name)
            same(by(RECIPES["mxfp4"].dgrad.lhs), fp4.mxfp4(numbers, fp4.at_random(seed)), name)
            for spec, axis in ((RECIPES["averis"].fprop.lhs, 0), (RECIPES["averis"].wgrad.rhs, 1)):
                mean = numbers.astype(np.float64).mean(axis, keepdims=True).astype(np.float32)
                same(by(spec), fp4.nvfp4(numbers - mean), name)
            spec = RECIPES["averis"].dgrad.lhs
            mean = numbers.astype(np.float64).mean(0, keepdims=True).astype(np.float32)
            same(by(spec), fp4.nvfp4(numbers - mean, 1, fp4.at_random(seed)), name)


def test_blocks_without_an_amax_have_scale_1_or_nan() -> None:
    """Zeros 1; what is not finite decodes to NaN; its neighbours keep their scale. No block: no row or column."""
    x = torch.tensor([[0.0] * 16 + [torch.inf] * 16 + [torch.nan] * 16 + [3.0] * 16])
    rules = {"unclipped": UNCLIPPED, "four_over_six": RECIPES["four_over_six"].fprop.lhs}
    rules |= {rule: replace(rules["four_over_six"], block_scale=rule) for rule in TE_RULES}
    rules |= {"ms_eden": RECIPES["ms_eden"].dgrad.lhs}
    for name, rule in BLOCK_SCALES.items():
        found = rule(x, amax(x, BLOCK_1X16), BLOCK_1X16, 16)
        assert found.scale[0, :3].tolist() == [1, 1, 1], name
        assert found.scale_inv[0].isnan().tolist() == [False, True, True, False], name
        assert found.scale_inv[0, 0] == 1, name
        for shape in ((0, 32), (3, 0)):
            x_q = quantize(torch.empty(shape), rules[name])
            assert (x_q.data.shape[0], x_q.data.numel()) == (shape[0], 0), name


def squared_error(spec: QuantizationSpec, x: Tensor) -> float:
    x_q = quantize(x, spec)
    return float((x_q.dequantize(torch.float32) - x_q.transformed(x)).double().square().mean())


def test_squared_errors_are_those_of_the_field() -> None:
    """Of one million numbers N(0, 1), times 1000."""
    x = torch.randn(1000, 1024)
    nvfp4 = RECIPES["nvfp4"]
    expected = {
        "nearest, 1x16": (nvfp4.fprop.lhs, 9.04),
        "nearest, 16x16": (nvfp4.fprop.rhs, 12.39),
        "four over six": (RECIPES["four_over_six"].fprop.lhs, 7.57),
        "stochastic": (UNCLIPPED, 23.6),
        "MS-EDEN": (RECIPES["ms_eden"].dgrad.lhs, 9.73),
    }
    for name, (spec, error) in expected.items():
        assert spec is not None
        assert squared_error(spec, x) * 1000 == pytest.approx(error, rel=0.01), name


def test_means_over_seeds_are_unbiased_where_that_is_claimed() -> None:
    """The error of a mean falls with the root of the number of casts; a bias stays. NVIDIA's scales clip amaxes."""
    x = torch.randn(32, 128)
    casts = 150

    def mean_error(spec: QuantizationSpec) -> tuple[float, float]:
        """(relative error of one cast, of the mean of many)."""
        total, single = torch.zeros(32, 128, dtype=torch.float64), 0.0
        for _ in range(casts):
            x_q = quantize(x, spec)
            got = x_q.dequantize(torch.float32).double()
            if isinstance(spec.transform, Hadamard):  # H is orthogonal: its transpose turns back
                signs = torch.from_numpy(fp4.fresh_signs(x_q.aside)).double()
                got = (got @ torch.from_numpy(fp4.hadamard(128)).T) * signs
            total += got
            single = float((got - x).norm() / x.norm())
        return single, float((total / casts - x).norm() / x.norm())

    for spec in (UNCLIPPED, RECIPES["ms_eden"].dgrad.lhs):
        assert spec is not None
        single, mean = mean_error(spec)
        assert mean < 1.15 * single / casts**0.5, spec
    nearest = RECIPES["nvfp4"].fprop.lhs
    assert nearest is not None
    single, mean = mean_error(nearest)
    assert mean > 0.99 * single
    clipped = RECIPES["nvfp4"].dgrad.lhs
    assert clipped is not None
    single, mean = mean_error(clipped)
    assert 1.3 * single / casts**0.5 < mean < 0.3 * single  # which is why "unclipped" is there


def test_rules_are_refused_where_they_mean_nothing() -> None:
    def spec(**fields: object) -> QuantizationSpec:
        return QuantizationSpec.from_dict(
            {"format": "E2M1", "granularity": "1x16", "scale_format": "e4m3", **fields}  # type: ignore[arg-type]
        )

    assert set(BLOCK_SCALES) == {"unclipped", "four_over_six", "ms_eden", *TE_RULES}
    for fields, message in (
        ({"block_scale": "four_over_sixs"}, "did you mean 'four_over_six'"),
        ({"block_scale": "four_over_six", "scale_format": "e8m0"}, "is for E2M1 with scale_format 'e4m3'"),
        ({"block_scale": "four_over_six", "format": "E4M3"}, "got E4M3"),
        ({"block_scale": "four_over_six", "margin": 1}, "margin 1"),
        ({"block_scale": "ms_eden"}, "unbiased behind a random rotation only"),
        ({"block_scale": "ms_eden", "transform": {"kind": "hadamard", "size": 8, "signs": 1}}, "divide its size"),
    ):
        with pytest.raises(ValueError, match=message):
            spec(**fields)
    for recipe in ("nvfp4_rht", "ms_eden"):
        for gemm in ("fprop", "dgrad", "wgrad"):
            cell = getattr(RECIPES[recipe], gemm).lhs
            assert QuantizationSpec.from_dict(cell.to_dict()) == cell
