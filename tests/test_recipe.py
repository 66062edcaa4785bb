"""Named recipes cell by cell; through JSON and YAML and back; overrides; refusals with the nearest name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import yaml

from ottava.numerics.accumulator import ACCUMULATORS, Accumulator
from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW
from ottava.numerics.tensor import QuantizationSpec
from ottava.numerics.transforms import TRANSFORMS
from ottava.recipe import (
    ATTENTION_TENSORS,
    CELL_OF,
    CELLS,
    GEMMS,
    HIGH_PRECISION,
    RECIPES,
    AttentionRecipe,
    GemmRecipe,
    Override,
    Recipe,
    get_recipe,
)
from sweep import sweep

HP = "high precision"
TABLES = {
    # name: (fprop lhs = x, rhs = w; dgrad lhs = dy, rhs = w.T; wgrad lhs = dy.T, rhs = x.T)
    "bf16": (HP, HP, HP, HP, HP, HP),
    "tensorwise": (
        *("E4M3[tensor]", "E4M3[tensor]"),
        *("E5M2[tensor]", "E4M3[tensor]"),
        *("E5M2[tensor]", "E4M3[tensor]"),
    ),
    "tensorwise_e4m3": ("E4M3[tensor]",) * 6,
    "rowwise": ("E4M3[row, pow2]",) * 6,
    "rowwise_with_gw_hp": (
        *("E4M3[row, pow2]", "E4M3[row, pow2]"),
        *("E4M3[row, pow2]", "E4M3[tensor, pow2]"),
        *(HP, HP),
    ),
    "blockwise": (
        *("E4M3[1x128, pow2]", "E4M3[128x128, pow2]"),
        *("E4M3[1x128, pow2]", "E4M3[128x128, pow2]"),
        *("E4M3[1x128, pow2]", "E4M3[1x128, pow2]"),
    ),
    "blockwise_fp32": (
        *("E4M3[1x128]", "E4M3[128x128]"),
        *("E4M3[1x128]", "E4M3[128x128]"),
        *("E4M3[1x128]", "E4M3[1x128]"),
    ),
    "mxfp8": ("E4M3[1x32, e8m0]",) * 6,
    "mxfp8_floor": ("E4M3[1x32, e8m0_floor]",) * 6,
    "delayed": (
        *("E4M3[tensor, delayed]", "E4M3[tensor, delayed]"),
        *("E5M2[tensor, delayed]", "E4M3[tensor, delayed]"),
        *("E5M2[tensor, delayed]", "E4M3[tensor, delayed]"),
    ),
    "guarded": (
        *("E4M3[tensor, guarded]", "E4M3[tensor, guarded]"),
        *("E5M2[tensor, guarded]", "E4M3[tensor, guarded]"),
        *("E5M2[tensor, guarded]", "E4M3[tensor, guarded]"),
    ),
    "nvfp4": (
        *("E2M1[1x16, e4m3]", "E2M1[16x16, e4m3]"),
        *("E2M1[1x16, e4m3, stochastic]", "E2M1[16x16, e4m3]"),
        *("E2M1[1x16, e4m3, stochastic]", "E2M1[1x16, e4m3]"),
    ),
    "nvfp4_rht": (
        *("E2M1[1x16, e4m3]", "E2M1[16x16, e4m3]"),
        *("E2M1[1x16, e4m3, stochastic]", "E2M1[16x16, e4m3]"),
        *("E2M1[1x16, e4m3, stochastic, hadamard 16]", "E2M1[1x16, e4m3, hadamard 16]"),
    ),
    "four_over_six": (
        *("E2M1[1x16, e4m3, four_over_six]", "E2M1[16x16, e4m3, four_over_six]"),
        *("E2M1[1x16, e4m3, stochastic]", "E2M1[16x16, e4m3, four_over_six]"),
        *("E2M1[1x16, e4m3, stochastic, hadamard 16]", "E2M1[1x16, e4m3, four_over_six, hadamard 16]"),
    ),
    "four_over_six_te": (
        *("E2M1[1x16, e4m3, four_over_six_te]", "E2M1[16x16, e4m3, four_over_six_te]"),
        *("E2M1[1x16, e4m3, stochastic]", "E2M1[16x16, e4m3, four_over_six_te]"),
        *("E2M1[1x16, e4m3, stochastic]", "E2M1[1x16, e4m3, four_over_six_te]"),
    ),
    "ms_eden": (
        *("E2M1[1x16, e4m3, four_over_six]",) * 2,
        *("E2M1[1x16, e4m3, ms_eden, hadamard 128, signs fresh, fp32]",) * 4,
    ),
    "averis": (
        *("E2M1[1x16, e4m3, mean]", "E2M1[16x16, e4m3]"),
        *("E2M1[1x16, e4m3, stochastic, mean]", "E2M1[16x16, e4m3]"),
        *("E2M1[1x16, e4m3, stochastic, mean columns]", "E2M1[1x16, e4m3, mean columns]"),
    ),
    "mxfp4": (
        *("E2M1[1x32, e8m0]", "E2M1[1x32, e8m0]"),
        *("E2M1[1x32, e8m0, stochastic]", "E2M1[1x32, e8m0]") * 2,
    ),
}


def cell(recipe: Recipe, name: str) -> QuantizationSpec | None:
    gemm, side = name.split(".")
    return getattr(getattr(recipe, gemm), side)  # type: ignore[no-any-return]


@sweep
def test_cells_are_those_of_the_table(recipe: Recipe) -> None:
    """Six cells of every named recipe; a new recipe is written out here."""
    assert tuple(str(cell(recipe, name) or HP) for name in CELLS) == TABLES[recipe.name]
    assert [f"{gemm}.{side}" for gemm, side in sorted(CELL_OF.values())] == sorted(CELLS)
    for (tensor, direction), (gemm, side) in CELL_OF.items():
        assert recipe.cells(tensor)[direction == "col"] == cell(recipe, f"{gemm}.{side}")


@sweep
def test_only_fprop_accumulates_fast(recipe: Recipe) -> None:
    """The field's practice: errors of gradients add up over steps, those of activations do not."""
    assert [getattr(recipe, gemm).fast_accum for gemm in GEMMS] == [recipe.quantized, False, False]
    assert all(getattr(recipe, gemm).compute == "native" for gemm in GEMMS)
    assert recipe.overrides == ()


@sweep
def test_only_guarded_cells_keep_headroom(recipe: Recipe) -> None:
    """One octave: an amax may double before the guard takes the current scale. Every other cell fills its format."""
    margins = {spec.margin for name in CELLS if (spec := cell(recipe, name)) is not None}
    assert margins == ({1} if recipe.name == "guarded" else {0} if recipe.quantized else set())


@sweep
def test_names_find_their_recipe(recipe: Recipe) -> None:
    """A name or the recipe itself; the register is read-only and keyed by name."""
    assert get_recipe(recipe.name) is get_recipe(recipe) is RECIPES[recipe.name] is recipe
    assert recipe.quantized == (recipe.name != "bf16")
    with pytest.raises(TypeError):
        RECIPES["bf16"] = recipe  # type: ignore[index]


# --- through JSON and YAML -------------------------------------------------------------------------------------------

OVERRIDDEN = (
    RECIPES["tensorwise"]
    .override("layers.0.*", "bf16")
    .override(
        "*.down_proj", wgrad=None, dgrad=GemmRecipe(QuantizationSpec(E5M2, PER_ROW), QuantizationSpec(E4M3, PER_ROW))
    )
    .override("*.gate", cells={"fprop.lhs": QuantizationSpec(E4M3, margin=2)})
)


@pytest.mark.parametrize(
    "dump, load", [(json.dumps, json.loads), (yaml.safe_dump, yaml.safe_load)], ids=["json", "yaml"]
)
@sweep(form=[lambda r: r, lambda r: r.fp8_inputs_bf16_gemm(), lambda r: r.under("hopper")])
def test_recipes_survive_files(
    recipe: Recipe, form: Callable[[Recipe], Recipe], dump: Callable[[Any], str], load: Callable[[str], Any]
) -> None:
    """Written and read back: equal, with the same hash; with overrides of all three kinds too."""
    for original in (form(recipe), form(replace(OVERRIDDEN, name="mine")), form(recipe).override("head", "bf16")):
        again = Recipe.from_dict(load(dump(original.to_dict())))
        assert again == original
        assert hash(again) == hash(original)
        assert str(again) == str(original)


def test_a_yaml_file_can_name_recipes_and_leave_things_out() -> None:
    """As a person writes it: an override by a recipe's name, an empty GEMM, a cell set to null."""
    text = """
        name: mine
        fprop: {lhs: {format: e4m3}, rhs: {format: E4M3, granularity: row}, fast_accum: true}
        dgrad:
        overrides:
          - {pattern: lm_head, recipe: bf16}
          - pattern: "*.experts.*"
            recipe: rowwise
            changes: {wgrad: {}, dgrad.rhs: {format: E4M3}}
    """
    recipe = Recipe.from_dict(yaml.safe_load(text))
    assert recipe.fprop == GemmRecipe(QuantizationSpec(E4M3), QuantizationSpec(E4M3, PER_ROW), fast_accum=True)
    assert recipe.dgrad == recipe.wgrad == HIGH_PRECISION
    assert not recipe.for_layer("lm_head").quantized
    expert = recipe.for_layer("layers.3.experts.7")
    assert (expert.fprop, expert.wgrad) == (RECIPES["rowwise"].fprop, HIGH_PRECISION)
    assert expert.dgrad == replace(RECIPES["rowwise"].dgrad, rhs=QuantizationSpec(E4M3))
    assert Recipe.from_dict(recipe.to_dict()) == recipe


# --- overrides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern, matches, others",
    [
        (
            "layers.0.*",
            ["layers.0.attention.wq", "layers.0.x"],
            ["layers.10.attention.wq", "model.layers.0.x", "layers.0"],
        ),
        ("*.mlp.*", ["layers.3.mlp.up", "a.mlp.experts.3.down"], ["mlp.up", "layers.3.mlp", "layers.3.mlps.up"]),
        ("*.layers.[0-2].*", ["model.layers.1.wq"], ["model.layers.3.wq", "model.layers.12.wq"]),
        ("lm_head", ["lm_head"], ["model.lm_head", "LM_HEAD"]),
        ("*", ["", "anything.at.all"], []),
    ],
)
def test_patterns_are_shell_patterns_over_the_whole_name(pattern: str, matches: list[str], others: list[str]) -> None:
    """* passes dots; the case counts; the whole name has to match."""
    recipe = RECIPES["tensorwise"].override(pattern, "bf16")
    assert [recipe.for_layer(name).quantized for name in matches] == [False] * len(matches)
    assert [recipe.for_layer(name).quantized for name in others] == [True] * len(others)


@sweep
def test_a_whole_recipe_replaces_all_six_cells(recipe: Recipe) -> None:
    """The layer runs exactly as that recipe; the name is the outer recipe's, which is what receipts show."""
    resolved = RECIPES["tensorwise"].override("a", recipe).for_layer("a")
    assert resolved == replace(recipe, name="tensorwise")
    assert RECIPES["bf16"].override("a", recipe.name).for_layer("a") == replace(recipe, name="bf16")


def test_one_gemm_or_one_cell_changes_alone() -> None:
    """wgrad in high precision leaves five cells as they are; a margin on fprop.lhs leaves five cells as they are."""
    base, wider = RECIPES["tensorwise"], QuantizationSpec(E4M3, margin=2)
    assert base.override("a", wgrad=None).for_layer("a") == replace(base, wgrad=HIGH_PRECISION)
    changed = base.override("a", cells={"fprop.lhs": wider}).for_layer("a")
    assert changed == replace(base, fprop=replace(base.fprop, lhs=wider))
    assert base.override("a", wgrad=None).for_layer("b") == base


def test_both_sides_of_a_gemm_change_together() -> None:
    """Half of a change to NVFP4 would be refused (8 bits against 4); the pair is taken."""
    fp4 = QuantizationSpec(RECIPES["nvfp4"].fprop.lhs.format, BLOCK_1X16, "e4m3")  # type: ignore[union-attr]
    both = RECIPES["tensorwise"].override("a", cells={"fprop.lhs": fp4, "fprop.rhs": fp4}).for_layer("a")
    assert (both.fprop.lhs, both.fprop.rhs) == (fp4, fp4)
    with pytest.raises(ValueError, match="both sides need one width"):
        RECIPES["tensorwise"].override("a", cells={"fprop.lhs": fp4})
    off = RECIPES["tensorwise"].override("a", cells={"fprop.lhs": None, "fprop.rhs": None}).for_layer("a")
    assert off.fprop == replace(RECIPES["tensorwise"].fprop, lhs=None, rhs=None)


def test_the_later_override_has_the_last_word() -> None:
    """Everything in BF16, then layer 3 row-wise after all; the other way round layer 3 is BF16 too."""
    one, other = ("*", "bf16"), ("layers.3.*", "rowwise")
    late = RECIPES["tensorwise"].override(*one).override(*other)
    early = RECIPES["tensorwise"].override(*other).override(*one)
    assert late.for_layer("layers.3.wq") == replace(RECIPES["rowwise"], name="tensorwise")
    assert not early.for_layer("layers.3.wq").quantized
    assert not late.for_layer("layers.4.wq").quantized
    assert late != early


# --- the diagnostic form ---------------------------------------------------------------------------------------------


@sweep
def test_the_diagnostic_form_changes_only_where_gemms_run(recipe: Recipe) -> None:
    """Same cells, every GEMM in BF16, by method and by name; twice is once; overrides follow."""
    diagnostic = recipe.fp8_inputs_bf16_gemm()
    assert diagnostic == get_recipe(f"{recipe.name}/fp8_inputs_bf16_gemm") == diagnostic.fp8_inputs_bf16_gemm()
    assert [cell(diagnostic, name) for name in CELLS] == [cell(recipe, name) for name in CELLS]
    assert {getattr(diagnostic, gemm).compute for gemm in GEMMS} == {"bf16"}
    layer = recipe.override("a", "rowwise").fp8_inputs_bf16_gemm().for_layer("a")
    assert (layer.fprop.lhs, layer.fprop.compute) == (RECIPES["rowwise"].fprop.lhs, "bf16")


# --- history fields --------------------------------------------------------------------------------------------------


def test_history_fields_reach_every_predicted_cell_and_no_other() -> None:
    """By name, of a recipe, of overrides, and of the diagnostic form; what predicts nothing stays as it is."""
    wanted: dict[str, Any] = {
        "margin": 1,
        "amax_history_len": 1024,
        "amax_compute_algo": "most_recent",
        "bootstrap": False,
    }
    for name in ("delayed", "guarded", "delayed/fp8_inputs_bf16_gemm"):
        before, after = get_recipe(name), get_recipe(name, **wanted)
        assert after.name == before.name
        for gemm in GEMMS:
            for side in ("lhs", "rhs"):
                old, new = (getattr(getattr(r, gemm), side) for r in (before, after))
                assert new == replace(old, **wanted) != old
            assert getattr(after, gemm).compute == getattr(before, gemm).compute
    mixed = RECIPES["tensorwise"].override("a", "delayed").override("b", "blockwise")
    assert get_recipe(mixed, margin=2).for_layer("a").fprop == get_recipe("delayed", margin=2).fprop
    assert [get_recipe(mixed, margin=2).for_layer(layer) for layer in "bc"] == [
        mixed.for_layer(layer) for layer in "bc"
    ]
    one_cell = RECIPES["bf16"].override(
        "a", cells=dict.fromkeys(("fprop.lhs", "fprop.rhs"), get_recipe("delayed").fprop.lhs)
    )
    assert get_recipe(one_cell, margin=3).for_layer("a").fprop.rhs == replace(get_recipe("delayed").fprop.rhs, margin=3)


@pytest.mark.parametrize(
    "error, recipe, values, message",
    [
        (
            TypeError,
            "delayed",
            {"amax_history_length": 16},
            "unknown history field .*; did you mean 'amax_history_len'",
        ),
        (TypeError, "delayed", {"scaling": "current"}, "unknown history field 'scaling'"),
        (TypeError, "delayed", {"margin": "1"}, "margin is '1'; needs a whole number"),
        (ValueError, "delayed", {"amax_history_len": 0}, "needs 1 or more"),
        (ValueError, "delayed", {"amax_compute_algo": "maxx"}, "did you mean 'max'"),
        (ValueError, "tensorwise", {"margin": 1}, "'tensorwise', which predicts no scale.*Take 'delayed'"),
        (ValueError, "delaid", {"margin": 1}, "did you mean 'delayed'"),
    ],
)
def test_slips_in_history_fields_are_refused(
    error: type[Exception], recipe: str, values: dict[str, Any], message: str
) -> None:
    """TransformerEngine takes `amax_history_length=16` and keeps 1024."""
    with pytest.raises(error, match=message):
        get_recipe(recipe, **values)


# --- equality, refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value",
    [
        ("lhs", QuantizationSpec(E5M2)),
        ("rhs", QuantizationSpec(E5M2)),
        ("fast_accum", True),
        ("compute", "bf16"),
        ("accumulator", ACCUMULATORS["hopper"]),
        ("batch_invariant", True),
    ],
)
def test_every_field_of_a_gemm_counts_in_a_comparison(field: str, value: Any) -> None:
    """Unequal, another hash, other words."""
    gemm = GemmRecipe(QuantizationSpec(E4M3), QuantizationSpec(E4M3))
    other = replace(gemm, **{field: value})
    assert (gemm == other, hash(gemm) == hash(other)) == (False, False)
    assert GemmRecipe.from_dict(other.to_dict()) == other
    names = {"lhs", "rhs", "fast_accum", "compute", "accumulator", "batch_invariant"}
    assert {f.name for f in fields(GemmRecipe)} == names


@pytest.mark.parametrize("field", [f.name for f in fields(Recipe) if f.init])
def test_every_field_of_a_recipe_counts_in_a_comparison(field: str) -> None:
    """Two recipes that differ in one field are two recipes."""
    changes: dict[str, Any] = {"name": "x", "overrides": (Override("a", (("wgrad", HIGH_PRECISION),)),)}
    recipe = RECIPES["tensorwise"]
    other = replace(recipe, **{field: changes.get(field, HIGH_PRECISION)})
    assert (recipe == other, hash(recipe) == hash(other)) == (False, False)
    assert recipe == replace(recipe)
    with pytest.raises(FrozenInstanceError):
        setattr(recipe, field, None)


def spec(**values: Any) -> dict[str, Any]:
    return {"format": "E4M3"} | values


EMULATED = {"lhs": spec(), "rhs": spec(), "accumulator": "hopper"}


@pytest.mark.parametrize(
    "error, values, message",
    [
        (TypeError, {"fprpo": {}}, "did you mean 'fprop'"),
        (TypeError, {"fprop": {"lsh": spec()}}, "GemmRecipe: unknown field 'lsh'; did you mean 'lhs'"),
        (TypeError, {"fprop": {"lhs": spec(margn=1), "rhs": spec()}}, "did you mean 'margin'"),
        (ValueError, {"fprop": {"lhs": spec(format="E4M"), "rhs": spec()}}, "did you mean 'E4M3'"),
        (ValueError, {"fprop": {"compute": "bf61"}}, "did you mean 'bf16'"),
        (ValueError, {"fprop": {"lhs": spec()}}, "quantize both or neither"),
        (ValueError, {"dgrad": {"lhs": spec(format="E5M2"), "rhs": spec(format="E5M2")}}, "E5M2 by E5M2"),
        (ValueError, {"fprop": EMULATED | {"compute": "bf16"}}, "multiplies no codes"),
        (ValueError, {"overrides": [{"patern": "a", "recipe": "bf16"}]}, "did you mean 'pattern'"),
        (ValueError, {"overrides": [{"pattern": "a", "recipe": "bf61"}]}, "unknown recipe 'bf61'; did you mean 'bf16'"),
        (ValueError, {"overrides": [{"pattern": "a", "changes": {"wgad": {}}}]}, "did you mean 'wgrad'"),
        (ValueError, {"overrides": [{"pattern": "a", "changes": {"fprop.lsh": spec()}}]}, "did you mean 'fprop.lhs'"),
        (ValueError, {"overrides": [{"recipe": "bf16"}]}, "the pattern is empty"),
        (ValueError, {"overrides": [{"pattern": "a"}]}, "override 'a': nothing to change"),
        (ValueError, {"name": ""}, "a name is needed"),
    ],
)
def test_slips_are_refused_with_a_remedy(error: type[Exception], values: dict[str, Any], message: str) -> None:
    """At every level of a file: the recipe, a GEMM, a cell, an override."""
    with pytest.raises(error, match=message):
        Recipe.from_dict({"name": "mine"} | values)


def test_unknown_recipes_are_refused_with_the_nearest() -> None:
    """By name, as a diagnostic form, and what is no name at all."""
    for name in ("tensorwize", "tensorwize/fp8_inputs_bf16_gemm"):
        with pytest.raises(ValueError, match="unknown recipe 'tensorwize'; did you mean 'tensorwise'"):
            get_recipe(name)
    with pytest.raises(TypeError, match="got int; needs a Recipe or the name of one"):
        get_recipe(8)  # type: ignore[arg-type]


def test_overrides_by_hand_are_checked_as_well() -> None:
    """Wrong kinds of value in Python code."""
    with pytest.raises(TypeError, match="wgrad is None; needs a GemmRecipe"):
        Override("a", (("wgrad", None),))
    with pytest.raises(TypeError, match=r"fprop\.lhs is 'E4M3'; needs a QuantizationSpec or None"):
        RECIPES["tensorwise"].override("a", cells={"fprop.lhs": "E4M3"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="did you mean 'wgrad'"):
        RECIPES["tensorwise"].override("a", wgradd=None)


def test_a_tensor_has_one_delayed_history() -> None:
    """x delayed as E4M3 in fprop and as E5M2 in wgrad would roll one window twice; equal specs are fine."""
    e4m3, e5m2 = QuantizationSpec(E4M3, scaling="delayed"), QuantizationSpec(E5M2, scaling="delayed")
    with pytest.raises(ValueError, match=r"input is predicted as .* a tensor has one history"):
        Recipe("x", fprop=GemmRecipe(e4m3, e4m3), wgrad=GemmRecipe(e4m3, e5m2))
    with pytest.raises(ValueError, match="weight is predicted as"):
        RECIPES["delayed"].override("a", dgrad=GemmRecipe(e4m3, replace(e4m3, margin=1)))
    assert Recipe("x", fprop=GemmRecipe(e4m3, e4m3), wgrad=GemmRecipe(e5m2, e4m3)).quantized


def test_blocks_on_both_sides_are_refused_in_a_recipe() -> None:
    """128x128 with 128x128 is no GEMM of cuBLASLt's; 1x128 with it is."""
    square, row = QuantizationSpec(E4M3, BLOCK_128X128), QuantizationSpec(E4M3, BLOCK_1X128)
    assert GemmRecipe(row, square).quantized
    with pytest.raises(ValueError, match="make one of them 1x128"):
        GemmRecipe(square, square)


def test_recipes_print_as_tables() -> None:
    """One GEMM a line, then the layers that differ."""
    lines = str(RECIPES["tensorwise"].override("lm_head", wgrad=None).fp8_inputs_bf16_gemm()).splitlines()
    assert lines[0] == "tensorwise/fp8_inputs_bf16_gemm"
    assert lines[1].strip() == "fprop  E4M3[tensor] x E4M3[tensor] in BF16"
    assert lines[-1].strip() == "lm_head: wgrad = high precision x high precision"


EVERYTHING = """
name: everything
fprop:
  lhs: {format: E4M3, granularity: 1x128, scale_format: pow2, margin: 1, transform: {kind: smooth, strength: 0.25}}
  rhs: {format: E4M3, granularity: 128x128, scale_format: pow2, margin: 1, transform: {kind: smooth, strength: 0.25}}
  accumulator: hopper_promoted
  fast_accum: true
dgrad:
  lhs: {format: E5M2FNUZ, scaling: guarded, amax_history_len: 4, amax_compute_algo: most_recent, bootstrap: false,
    guard_bits: 2}
  rhs: {format: E4M3FNUZ}
  accumulator: {name: mine, group: 16, fraction_bits: 14, kept_bits: 20, promotion: 64, rounding: nearest_even,
    confirmed: false, source: me, scales_blocks: true, dot: 1, fp4: tcgen05_fp4}
wgrad:
  lhs: {format: E2M1, granularity: 1x16, scale_format: e4m3, rounding: stochastic,
    transform: {kind: hadamard, size: 32, signs: 7, rounded: false}}
  rhs: {format: E2M1, granularity: 1x16, scale_format: e4m3, block_scale: four_over_six,
    transform: {kind: hadamard, size: 32, signs: 7, rounded: false}}
  compute: bf16
attention: {qkv: {format: E4M3}}
overrides:
- {pattern: "*.lm_head", recipe: bf16}
- {pattern: "*", changes: {wgrad: {}, fprop.lhs: {format: E4M3, transform: {kind: hot, tokens: columns, channels: 4}},
    fprop.rhs: {format: E4M3}}}
- {pattern: "*", changes: {fprop: {lhs: {format: E4M3}, rhs: {format: E4M3}, batch_invariant: true}, attention: null}}
"""


def test_every_field_can_be_written_in_yaml() -> None:
    """Each field of a recipe, a cell, a transform and an accumulator stands above, and comes back."""
    values = yaml.safe_load(EVERYTHING)
    recipe = Recipe.from_dict(values)
    assert Recipe.from_dict(yaml.safe_load(yaml.safe_dump(recipe.to_dict()))) == recipe
    assert set(values) == {f.name for f in fields(Recipe) if f.init}
    words = set(EVERYTHING.replace("{", " ").replace(":", " ").replace(",", " ").split())
    for kind in (QuantizationSpec, GemmRecipe, Accumulator, *TRANSFORMS.values()):
        missing = {f.name for f in fields(kind) if f.init} - words
        assert not missing, (kind, missing)
    assert recipe.fprop.lhs is not None
    assert str(recipe.fprop.lhs.transform) == "smooth 0.25"


# --- one row, and attention -------------------------------------------------------------------------------------------

E4, E5 = QuantizationSpec(E4M3), QuantizationSpec(E5M2)


def test_a_row_survives_plain_values_and_says_what_it_is() -> None:
    rows = {
        "high precision x high precision": HIGH_PRECISION,
        "E5M2[tensor] x E4M3[tensor]": GemmRecipe(E5, E4, fast_accum=True),
        "E4M3[tensor] x E4M3[tensor] in BF16": GemmRecipe(E4, E4, compute="bf16"),
        "E5M2[tensor] x E5M2[tensor] under hopper": GemmRecipe(E5, E5, accumulator="hopper"),  # type: ignore[arg-type]
    }
    for text, row in rows.items():
        assert str(row) == text
        assert GemmRecipe.from_dict(row.to_dict()) == row
        assert row.quantized == (row is not HIGH_PRECISION)


ON = replace(get_recipe("tensorwise"), name="fp8_attention", attention=AttentionRecipe())


def test_attention_survives_plain_values() -> None:
    for one in (
        AttentionRecipe(),
        AttentionRecipe(o=None, dqkv=None),
        AttentionRecipe(s=QuantizationSpec(E4M3, margin=1)),
    ):
        assert AttentionRecipe.from_dict(one.to_dict()) == one
        assert tuple(one.to_dict()) == ATTENTION_TENSORS
    assert AttentionRecipe.from_dict({}) == AttentionRecipe()
    assert str(AttentionRecipe(o=None)).startswith("qkv E4M3[tensor], s E4M3[tensor], o high precision, do E5M2")


def test_a_recipe_says_where_attention_is_on() -> None:
    assert Recipe.from_dict(ON.to_dict()) == ON
    off = ON.override("layers.0.*", "tensorwise")
    assert ON.override("layers.0.*", attention=None).for_layer("layers.0.x").attention is None
    assert off.for_layer("layers.0.x").attention is None
    assert off.for_layer("layers.1.x").attention == AttentionRecipe()
    for one in (off, ON.override("*", attention=None), get_recipe("bf16").override("*", attention=AttentionRecipe())):
        assert Recipe.from_dict(one.to_dict()) == one
    assert "attention  qkv E4M3[tensor]" in str(ON)
    assert get_recipe("delayed", margin=1).override("x", attention=AttentionRecipe()).for_layer("x").attention
    with pytest.raises(TypeError, match="attention is 1; needs a AttentionRecipe or None"):
        ON.override("x", attention=1)


def test_mistakes_of_attention_are_named() -> None:
    for settings, error, words in (
        ({"qkv": QuantizationSpec(E4M3, BLOCK_1X128)}, ValueError, "needs one scale for the tensor"),
        ({"o": QuantizationSpec(E4M3, BLOCK_1X32, "e8m0")}, ValueError, "needs one scale for the tensor"),
        ({"s": None}, TypeError, "AttentionRecipe: s is None"),
        ({"qkv": QuantizationSpec(E5M2)}, ValueError, "qkv meets qkv: no tensor core multiplies E5M2 by E5M2"),
        ({"do": None}, TypeError, "AttentionRecipe: do is None"),
        ({"qvk": None}, TypeError, "did you mean 'qkv'?"),
    ):
        with pytest.raises(error, match="AttentionRecipe: ") as said:
            AttentionRecipe(**settings)
        assert words in str(said.value)
