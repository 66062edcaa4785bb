"""A study keeps what is done: stopped, damaged and widened studies measure only what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ottava.base.settings import ConfigError
from ottava.lab.study import LabSettings, Study, bits, operand_bits, read_recipe
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import RECIPES, Recipe

YAML = """
fprop:
  lhs: {format: E2M1, granularity: 1x32, scale_format: e8m0}
  rhs: {format: E2M1, granularity: 1x32, scale_format: e8m0}
"""


def small(*names: str, seeds: int = 1) -> LabSettings:
    """The smallest study of these recipes."""
    return LabSettings(recipes=tuple(map(read_recipe, names)), seeds=seeds, steps=2, quick=True)


def test_a_stopped_study_goes_on_where_it_was(tmp_path: Path) -> None:
    """Stopped in the second recipe, it keeps the first; a damaged file and a new recipe are measured, nothing else."""
    told: list[tuple[str, int, float]] = []

    def tell(recipe: str, seed: int, step: int, steps: int, done: float, left: float | None) -> None:
        assert 0 <= done <= 1
        assert left is None or left >= 0
        assert step <= steps
        told.append((recipe, seed, done))

    study = Study(small("mxfp8"), tmp_path / "lab")
    assert not study.run(tell, lambda: told[-1][0] == "mxfp8")
    assert set(study.done()) == {("bf16", 0)}
    assert not (study.folder / "current").exists()
    study.lock.release()
    (tmp_path / "lab" / "current").mkdir()  # as kill -9 leaves it
    told.clear()
    study = Study(small("mxfp8"), tmp_path / "lab")
    assert study.run(tell, lambda: False)
    assert {recipe for recipe, _, _ in told} == {"mxfp8"}
    done = study.done()
    assert set(done) == {("bf16", 0), ("mxfp8", 0)}
    assert done["mxfp8", 0].losses[0] != done["bf16", 0].losses[0]
    assert not done["bf16", 0].diverged
    assert done["bf16", 0].seconds_per_step > 0
    study.lock.release()
    path = study.path(RECIPES["bf16"], 0)
    whole, damaged = path.read_text(), path.read_text()[:100]
    path.write_text(damaged)
    told.clear()
    study = Study(small("mxfp8", "tensorwise"), tmp_path / "lab")
    assert study.run(tell, lambda: False)
    assert {recipe for recipe, _, _ in told} == {"bf16", "tensorwise"}
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
        ({"recipes": (mxfp8,), "seeds": 11}, "1 to 10"),
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
