"""Accumulators as data: profiles, and every way to name one: gemm, a cell, a recipe's name, autocast, compiled code."""

from __future__ import annotations

import itertools
import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import ottava
from ottava.kernels import accumulate
from ottava.numerics.accumulator import ACCUMULATORS, Accumulator, accumulator_from_key, get_accumulator
from ottava.numerics.formats import E2M1, E3M2, E4M3, E5M2
from ottava.numerics.rounding import decode, round_to_format
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X32, BLOCK_1X128, BLOCK_16X16, BLOCK_SCALES, Granularity
from ottava.numerics.tensor import QuantizationSpec
from ottava.numerics.transforms import Hadamard
from ottava.ops.gemm import explain, gemm
from ottava.recipe import GEMMS, RECIPES, GemmRecipe, Recipe, get_recipe
from sweep import sweep


def operands(fmt: Any = E4M3, m: int = 8, n: int = 16, k: int = 300) -> Any:
    """Two matrices of that format."""
    return [ottava.quantize(torch.randn(rows, k), QuantizationSpec(fmt)) for rows in (m, n)]


def test_a_profile_is_data() -> None:
    """By name, by key, as a mapping and back; frozen; the unconfirmed one says so."""
    for name, profile in ACCUMULATORS.items():
        assert get_accumulator(name) is profile
        assert get_accumulator(profile) is profile
        assert accumulator_from_key(profile.key) == profile
        assert profile.to_dict() == name
        assert profile.source
    mine = replace(ACCUMULATORS["hopper"], name="mine", promotion=64)
    assert get_accumulator(json.loads(json.dumps(mine.to_dict()))) == mine
    assert accumulator_from_key("") is None
    assert [name for name, profile in ACCUMULATORS.items() if not profile.confirmed] == ["tcgen05", "tcgen05_fp4"]
    with pytest.raises(FrozenInstanceError):
        mine.group = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"name": "x", "groups": 3}, TypeError, "did you mean 'group'"),
        ({"name": ""}, ValueError, "needs a word without a slash"),
        ({"name": "a/b"}, ValueError, "needs a word without a slash"),
        ({"name": "x", "group": 0}, ValueError, "needs 1 to 4096 products"),
        ({"name": "x", "group": 3.5}, TypeError, "group is 3.5; needs a whole number"),
        ({"name": "x", "group": 32, "fraction_bits": 30}, ValueError, "needs 1 to 29 bits"),
        ({"name": "x", "group": 32, "kept_bits": 24}, ValueError, "needs 1 to 23 bits"),
        ({"name": "x", "group": 32, "promotion": 100}, ValueError, "needs a multiple of the group, which is 32"),
        ({"name": "x", "promotion": 128}, ValueError, "needs a multiple of the group, which is None"),
        ({"name": "x", "group": 32, "dot": 16}, ValueError, "dot is 16; needs 1, or with scales_blocks a divisor"),
        ({"name": "x", "group": 32, "dot": 5, "scales_blocks": True}, ValueError, "a divisor of the group, 32"),
        ({"name": "x", "group": 32, "scales_blocks": 1}, TypeError, "scales_blocks is 1; needs"),
        ({"name": "x", "rounding": "truncat"}, ValueError, "did you mean 'truncate'"),
    ],
)
def test_a_profile_without_a_meaning_is_refused(values: dict[str, Any], error: type[Exception], words: str) -> None:
    """By name, value and what is needed."""
    with pytest.raises(error, match=words):
        Accumulator(**values)


def test_an_instruction_takes_the_scales_and_formats_that_it_has() -> None:
    """Formats of three widths run under the profile whose instruction takes them; other scales do not."""
    specs = {
        "E4M3": QuantizationSpec(E4M3),
        "E2M1": QuantizationSpec(E2M1),
        "E3M2": QuantizationSpec(E3M2),
        "128": QuantizationSpec(E4M3, BLOCK_1X128),
        "MXFP8": QuantizationSpec(E4M3, BLOCK_1X32, "e8m0"),
        "MXFP4": QuantizationSpec(E2M1, BLOCK_1X32, "e8m0"),
        "NVFP4": QuantizationSpec(E2M1, BLOCK_1X16, "e4m3"),
        "MX of 16": QuantizationSpec(E4M3, BLOCK_1X16, "e8m0"),
        "MX of 8": QuantizationSpec(E2M1, Granularity(1, 8), "e8m0"),
        "E4M3 by E4M3": QuantizationSpec(E4M3, BLOCK_1X16, "e4m3"),
    }
    cases = (
        *(("tcgen05", pair, "") for pair in ("E4M3 E2M1", "E3M2 E4M3", "E3M2 E2M1", "128 128", "MXFP8 MXFP4")),
        *(("tcgen05", pair, "") for pair in ("MXFP4 MXFP4", "NVFP4 NVFP4")),
        *(("tcgen05_fp4", pair, "") for pair in ("MXFP4 MXFP4", "NVFP4 NVFP4")),
        ("tcgen05", "MXFP8 E4M3", "scales blocks of 32 columns, or of multiples, by E8M0 on both sides"),
        ("tcgen05", "MXFP4 NVFP4", "scales blocks of 16 columns, or of multiples, by E8M0 on both sides, or by E4M3"),
        ("tcgen05", "MX of 16/MXFP8", "scales blocks of 32 columns"),
        ("tcgen05", "MX of 8/MXFP4", "scales blocks of 16 columns"),
        ("tcgen05", "E4M3 by E4M3/E4M3 by E4M3", "by E4M3 only E2M1 x E2M1"),
        ("tcgen05_fp4", "MXFP8 MXFP4", "is that of an instruction on E2M1 x E2M1 in blocks"),
        ("tcgen05_fp4", "E2M1 E2M1", "is that of an instruction on E2M1 x E2M1 in blocks"),
        ("hopper", "E4M3 E2M1", "both sides need one width"),
        ("hopper", "MXFP8 MXFP8", ""),
    )
    for profile, pair, reason in cases:
        lhs, rhs = (specs[name] for name in (pair.split("/") if "/" in pair else pair.split()))
        a, b = (ottava.quantize(torch.randn(rows, 96), spec) for rows, spec in ((3, lhs), (5, rhs)))
        for one, other in ((a, b), (b, a)):
            if reason:
                with pytest.raises(ValueError, match=reason):
                    gemm(one, other, out_dtype=torch.float32, accumulator=profile)
                with pytest.raises(ValueError, match=reason):
                    GemmRecipe(one.spec, other.spec, accumulator=profile)  # type: ignore[arg-type]
                continue
            y = gemm(one, other, out_dtype=torch.float32, accumulator=profile)
            exact = one.dequantize().double() @ other.dequantize().double().t()
            assert float((y - exact).norm() / exact.norm()) < 2.0**-9, (profile, pair)


def test_nvfp4_scales_are_found_again() -> None:
    """By every rule, also of parts of a tensor: E4M3 scales and one above them that give each product."""
    x = torch.randn(48, 256) * torch.exp2(torch.randn(48, 16) * 6).repeat_interleave(16, 1)
    x[3], x[16:32, 32:48] = 0.0, 0.0
    for rule, blocks in itertools.product(("amax", *BLOCK_SCALES), (BLOCK_1X16, BLOCK_16X16)):
        if rule == "ms_eden" and blocks != BLOCK_1X16:
            continue
        turned = {"transform": Hadamard(128, "fresh")} if rule == "ms_eden" else {}
        x_q = ottava.quantize(x, QuantizationSpec(E2M1, blocks, "e4m3", block_scale=rule, **turned))
        for part in (
            x_q,
            replace(x_q, data=x_q.data[:16, :32], scale_inv=x_q.scale_inv[: 16 // (blocks.rows or 1), :2]),
        ):
            scales, above = accumulate.block_scales(part)
            empty = part.spec.granularity.blocks(decode(part.data, E2M1)).abs().amax((1, 3)) == 0
            assert torch.equal(scales * above, torch.where(empty, 0.0, part.scale_inv)), rule
            assert torch.equal(round_to_format(scales, E4M3), scales)
            if rule == "amax" and part is x_q:
                assert float(scales.max()) == 448
    broken = replace(x_q, scale_inv=torch.rand_like(x_q.scale_inv) + 1)
    with pytest.raises(ValueError, match="are no products of E4M3 scales and one fp32 scale"):
        accumulate.block_scales(broken)


def test_unknown_profiles_are_refused_with_the_nearest() -> None:
    """Wherever a profile is named."""
    a, b = operands()
    for name in (
        lambda: gemm(a, b, out_dtype=torch.float32, accumulator="hoper"),
        lambda: ottava.autocast(accumulator="hoper"),
        lambda: GemmRecipe(a.spec, b.spec, accumulator="hoper"),
        lambda: get_recipe("tensorwise/hoper"),
        lambda: RECIPES["tensorwise"].under("hoper"),
    ):
        with pytest.raises(ValueError, match="did you mean 'hopper'"):
            name()
    with pytest.raises(TypeError, match="needs an Accumulator or the name of one"):
        get_accumulator(3)  # type: ignore[arg-type]


@sweep
def test_recipes_carry_profiles_through_json_and_yaml(recipe: Recipe) -> None:
    """Each recipe under each profile; the name is one that get_recipe knows; another profile takes its place."""
    mine = replace(ACCUMULATORS["hopper"], name="mine", promotion=64)
    for profile in (*(p for p in ACCUMULATORS.values() if p.dot == 1), mine):
        changed = recipe.override("layers.0", "tensorwise").under(profile)
        for text in (json.dumps(changed.to_dict()), yaml.safe_dump(changed.to_dict())):
            assert Recipe.from_dict(yaml.safe_load(text)) == changed
        assert changed.under("ada").under(None) == recipe.override("layers.0", "tensorwise")
        for layer in ("layers.0", "layers.1"):
            for name in GEMMS:
                cells = getattr(changed.for_layer(layer), name)
                assert cells.accumulator == (profile if cells.quantized else None)
        if profile is not mine and recipe.casts:
            assert get_recipe(f"{recipe.name}/{profile.name}") == recipe.under(profile)
            assert f"under {profile.name}" in str(recipe.under(profile))
    assert RECIPES["bf16"].under("hopper") is RECIPES["bf16"]


def test_a_profile_multiplies_codes() -> None:
    """Not decoded ones, and not those that nobody cast; the diagnostic form drops it."""
    a, b = operands()
    with pytest.raises(ValueError, match="which multiplies no codes"):
        GemmRecipe(a.spec, b.spec, compute="bf16", accumulator="hopper")  # type: ignore[arg-type]
    for x, y, more in ((a.dequantize(), b.dequantize(), {}), (a, b, {"compute": "bf16"})):
        with pytest.raises(ValueError, match="accumulator 'hopper' is that of instructions on FP8 codes"):
            gemm(x, y, out_dtype=torch.float32, accumulator="hopper", **more)
    with pytest.raises(ValueError, match="c starts the accumulator of quantized operands"):
        gemm(a.dequantize(), b.dequantize(), out_dtype=torch.float32, c=torch.zeros(8, 16))
    assert get_recipe("tensorwise/hopper").fp8_inputs_bf16_gemm().fprop.accumulator is None


def test_gemm_names_what_it_emulates() -> None:
    """The record and explain name the profile; both kernels give one result; E5M2 x E5M2 runs under a profile only."""
    for fmt, name in ((E4M3, "hopper"), (E5M2, "ada"), (E5M2, "fp32"), (E4M3, "tcgen05")):
        (a, b), records = operands(fmt), []
        y = gemm(a, b, out_dtype=torch.float32, accumulator=name, log=records.append)
        assert (records[0].accumulator, records[0].native) == (name, False)
        lines = explain(a, b, out_dtype=torch.float32, accumulator=name)
        assert f"{records[0].kernel}: runs" in lines
        if name == "fp32":
            assert torch.allclose(y, a.dequantize() @ b.dequantize().t(), rtol=300 * 2.0**-23, atol=300 * 2.0**-23)
            continue
        assert f"accumulator: {ACCUMULATORS[name]}" in lines
        assert ("unconfirmed" in lines) == (name == "tcgen05")
        other = gemm(a, b, out_dtype=torch.float32, accumulator=name, backend="accumulator_reference")
        assert torch.equal(y, other)
        with pytest.raises(ValueError, match="unknown backend under accumulator"):
            gemm(a, b, out_dtype=torch.float32, accumulator=name, backend="native_gem")
    a, b = operands(E5M2)
    for refused in (lambda: gemm(a, b, out_dtype=torch.float32), lambda: GemmRecipe(a.spec, b.spec)):
        with pytest.raises(ValueError, match="no tensor core multiplies E5M2 by E5M2"):
            refused()
    assert GemmRecipe(a.spec, b.spec, accumulator="hopper").quantized  # type: ignore[arg-type]


def test_c_is_what_the_sum_starts_from() -> None:
    """fp32 sums get it added; under a profile it goes through the accumulator; another shape or dtype is refused."""
    a, b = operands()
    c, bias = torch.randn(8, 16), torch.randn(16)
    plain = gemm(a, b, out_dtype=torch.float32)
    for name in (None, "fp32"):
        assert torch.equal(gemm(a, b, out_dtype=torch.float32, accumulator=name, c=c), plain + c)
        y = gemm(a, b, out_dtype=torch.bfloat16, bias=bias, accumulator=name, c=c)
        assert torch.equal(y, (plain + c + bias).bfloat16())
    ones = [replace(side, scale_inv=torch.ones(1, 1)) for side in (a, b)]
    zeros = replace(ones[1], data=torch.zeros_like(b.data))
    y = gemm(ones[0], zeros, out_dtype=torch.float32, accumulator="hopper", c=c)
    assert torch.equal(y.view(torch.int32), c.view(torch.int32) >> 10 << 10)  # 13 bits of c
    for wrong in (c[:3], c.double(), c.bfloat16()):
        with pytest.raises(ValueError, match=r"needs \(8, 16\) in float32 on cpu"):
            gemm(a, b, out_dtype=torch.float32, accumulator="hopper", c=wrong)
    with pytest.raises(TypeError, match="gemm: c is 1; needs Tensor"):
        gemm(a, b, out_dtype=torch.float32, c=1)  # type: ignore[arg-type]


@sweep
def test_every_gemm_of_a_layer_runs_under_its_profile(recipe: Recipe) -> None:
    """fprop, dgrad and wgrad have the bits of the kernel on the layer's own casts; autocast and convert agree."""
    for name in ("hopper", "blackwell_mma"):
        layer = ottava.nn.Linear(48, 32, recipe=recipe, dtype=torch.bfloat16)
        x = torch.randn(40, 48, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(40, 32, dtype=torch.bfloat16)
        results = []
        state = torch.get_rng_state()
        for under in (ottava.autocast(accumulator=name), ottava.autocast(recipe, accumulator=name)):
            torch.set_rng_state(state)  # nvfp4 rounds gradients stochastically
            x.grad = layer.weight.grad = None
            with under:
                y = layer(x)
            y.backward(dy)  # a backward takes the recipe of its forward
            results.append((y.detach(), x.grad.clone(), layer.weight.grad.clone()))
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        for row in ottava.receipt(layer).rows:
            assert (f"under {name}" in row.operands) == row.fp8
        own, w = x.detach(), layer.weight.detach()
        sides = (own, w, layer.bias.detach()), (dy, w.t(), None), (dy.t(), own.t(), None)
        for cells, (left, right, bias), got in zip(
            (recipe.fprop, recipe.dgrad, recipe.wgrad), sides, results[0], strict=True
        ):
            specs = cells.lhs, cells.rhs
            if recipe.predicted or any(spec is None or not spec.repeatable for spec in specs):
                continue
            a, b = (ottava.quantize(t, spec) for t, spec in zip((left, right), specs, strict=True))
            assert torch.equal(got, accumulate.gemm(a, b, torch.bfloat16, bias, ACCUMULATORS[name])), cells
            if (name, recipe.name) == ("hopper", "tensorwise"):  # fp32 sums are others
                assert not torch.equal(got, gemm(a, b, out_dtype=torch.bfloat16, bias=bias)), cells


def test_fp32_is_what_runs_without_a_name() -> None:
    """On a CPU: the same kernel, the same bits."""
    for recipe in RECIPES.values():
        layer = ottava.nn.Linear(48, 32, recipe=recipe, dtype=torch.bfloat16)
        x = torch.randn(40, 48, dtype=torch.bfloat16)
        with ottava.autocast(accumulator="fp32"):
            y = layer(x)
        assert torch.equal(y, layer(x))


def test_compiled_code_has_the_bits_of_eager() -> None:
    """A recipe under a profile is compiled; autocast without a recipe runs uncompiled; gemm with c is one operation."""
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32)).bfloat16()
    ottava.convert(model, "tensorwise/hopper")
    x = torch.randn(24, 64, dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
        with ottava.autocast(accumulator="ada"):
            under_ada = compiled(x)
            assert torch.equal(under_ada, model(x))
        assert not torch.equal(under_ada, model(x))
    a, b = operands()
    c = torch.randn(8, 16)

    def product(c: torch.Tensor) -> torch.Tensor:
        return gemm(a, b, out_dtype=torch.float32, accumulator="hopper", c=c)

    assert torch.equal(torch.compile(product, backend="aot_eager", fullgraph=True)(c), product(c))
