"""A study keeps what is done: stopped, damaged and widened studies measure only what is missing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import yaml

import ottava
from ottava.base.settings import ConfigError
from ottava.lab.study import (
    DISTRIBUTIONS,
    FEATURES,
    TOKENS,
    LabSettings,
    Study,
    bits,
    compared,
    drawn,
    measured,
    operand_bits,
    read_recipe,
)
from ottava.measure.tally import PARTS
from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.scaling import BLOCK_1X32
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import GEMMS, RECIPES, GemmRecipe, Recipe

YAML = """
fprop:
  lhs: {format: E2M1, granularity: 1x32, scale_format: e8m0}
  rhs: {format: E2M1, granularity: 1x32, scale_format: e8m0}
"""


def small(*names: str, seeds: int = 1) -> LabSettings:
    """The smallest study of these recipes."""
    return LabSettings(recipes=tuple(map(read_recipe, names)), seeds=seeds, steps=2, quick=True)


def test_a_rotation_halves_what_mxfp4_does_to_weight_gradients() -> None:
    """The recipe of docs/lab.md beside `mxfp4`, three seeds: a smaller error of dW in each, as that page says."""
    page = (Path(__file__).parents[2] / "docs" / "lab.md").read_text("utf-8")
    recipe = Recipe.from_dict(yaml.safe_load("name: mxfp4_" + page.partition("\nname: mxfp4_")[2].partition("```")[0]))
    for seed, (before, after) in enumerate([(24, 15), (26, 16), (26, 16)]):
        errors = [measured(one, seed)["heavy-tailed"]["gemms"]["wgrad"]["error"] for one in (RECIPES["mxfp4"], recipe)]
        assert [round(100 * error) for error in errors] == [before, after], seed


def test_a_stopped_study_goes_on_where_it_was(tmp_path: Path) -> None:
    """Stopped in the second recipe, it keeps the first; a damaged file and a new recipe are measured, nothing else."""
    study = Study(small("mxfp8"), tmp_path / "lab")

    def written() -> dict[str, int]:
        return {name: study.path(RECIPES[name], 0).stat().st_mtime_ns for name, _ in study.done()}

    assert not study.run(lambda: bool(study.done()))
    assert set(study.done()) == {("bf16", 0)}
    assert not (study.folder / "current").exists()
    first = written()
    study.lock.release()
    (tmp_path / "lab" / "current").mkdir()  # as kill -9 leaves it
    study = Study(small("mxfp8"), tmp_path / "lab")
    assert study.run(lambda: False)
    done, second = study.done(), written()
    assert set(done) == {("bf16", 0), ("mxfp8", 0)}
    assert second["bf16"] == first["bf16"]
    assert done["mxfp8", 0].losses[0] != done["bf16", 0].losses[0]
    assert not done["bf16", 0].diverged
    assert done["bf16", 0].seconds_per_step > 0
    study.lock.release()
    path = study.path(RECIPES["bf16"], 0)
    whole, damaged = path.read_text(), path.read_text()[:100]
    path.write_text(damaged)
    study = Study(small("mxfp8", "tensorwise"), tmp_path / "lab")
    assert study.run(lambda: False)
    assert written().keys() == {"bf16", "mxfp8", "tensorwise"}
    assert written()["mxfp8"] == second["mxfp8"]
    again, before = json.loads(path.read_text()), json.loads(whole)
    assert {k: v for k, v in again.items() if "seconds" not in k} == {
        k: v for k, v in before.items() if "seconds" not in k
    }
    study.lock.release()


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Every refusal says what it got and what it needs."""
    own = tmp_path / "own.yaml"
    own.write_text(YAML)
    assert read_recipe(str(own)).name == "own"
    assert str(read_recipe(str(own)).fprop.lhs) == "E2M1[1x32, e8m0]"
    bad = tmp_path / "bad.yaml"
    for text, match in (
        ("fprpo: {}", "fprop"),
        ("- 1", "mapping"),
        ("fprop: {lhs: {format: E4M4}}", "E4M4"),
        ("{", "bad.yaml"),
        ("", "is empty"),
        ("fprop: {}\nfprop: {}", "'fprop' twice"),
        ("fprop: {lhs: {format: E4M3, granularity: 128}}", "granularity '128'"),
        ("fprop: {lhs: {format: E4M3, block_scale: [a]}}", "block_scale is .* needs a text"),
        ("fprop: {lhs: {format: E4M3, transform: {kind: [1]}}}", "unknown transform"),
        ("fprop: {lhs: {format: E4M3}, rhs: {format: E4M3}, batch_invariant: 'no'}", "needs true or false"),
        ("fprop: {lhs: {format: E4M3}, rhs: {format: E4M3}, accumulator: {name: m, grp: 3}}", "did you mean 'group'"),
    ):
        bad.write_text(text)
        with pytest.raises((ValueError, TypeError), match=match):
            read_recipe(str(bad))
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        read_recipe(str(tmp_path / "none.yaml"))
    with pytest.raises(ValueError, match="mxfp8"):
        read_recipe("mxpf8")
    mxfp8 = RECIPES["mxfp8"]
    for wrong, match in (
        ({"recipes": ()}, "no recipe"),
        ({"recipes": (mxfp8, mxfp8)}, "two recipes"),
        ({"recipes": (Recipe("bf16", fprop=mxfp8.fprop),)}, "rename it"),
        ({"recipes": (mxfp8,), "seeds": 0}, "1 or more"),
        ({"recipes": (mxfp8,), "steps": 0}, "--steps 0"),
    ):
        with pytest.raises(ConfigError, match=match):
            LabSettings(**wrong)  # type: ignore[arg-type]
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds .*notes\.txt"):
        Study(small("mxfp8"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == [
        "bad.yaml",
        "notes.txt",
        "own.yaml",
    ]


def test_bits_are_those_of_codes_and_scales() -> None:
    """MX: 8 bits for 32 elements; NVFP4: 8 for 16, or for 256; fp32 scales: 32."""
    blockwise = RECIPES["blockwise"].fprop.lhs
    assert bits(blockwise) == 8 + 32 / 128
    assert bits(None) == 16
    assert bits(QuantizationSpec(RECIPES["tensorwise"].fprop.lhs.format)) == pytest.approx(8, abs=1e-5)  # type: ignore
    assert list(operand_bits(RECIPES["mxfp8"])) == [8.25] * 6
    assert list(operand_bits(RECIPES["nvfp4"]))[:2] == [4.5, 4 + 8 / 256]


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
