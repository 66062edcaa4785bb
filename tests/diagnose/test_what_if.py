"""Predictions of whole recipes from run folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ottava
from ottava.diagnose.what_if import (
    FLOORS,
    HIGH_PRECISION,
    cell_cost,
    cheapest,
    default_recipes,
    predict,
    summary,
    thinned,
)
from ottava.measure.tally import Detail, Tally
from ottava.measure.walk import measure, measure_packed
from ottava.recipe import RECIPES
from ottava.record.amaxes import Recording
from ottava.record.reader import Run, Table
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter

KEY = SlotKey("fc2", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
SPEC = ottava.QuantizationSpec(ottava.E4M3)


def recorded(folder: Path, steps: Mapping[int, Mapping[SlotKey, Tensor]]) -> Table:
    """A run whose casts are really made and measured."""
    with RunWriter(folder) as writer:
        for step, tensors in steps.items():
            for key, x in tensors.items():
                writer.tally(step, key, measure(x, ottava.quantize(x, SPEC)))
    return Run.open(folder).table()


def massive(tokens: float) -> Tensor:
    """A Gaussian with two rows of huge tokens."""
    x = torch.randn(128, 256)
    x[:2] *= tokens
    return x


@pytest.fixture
def outliers(tmp_path: Path) -> Table:
    """A layer that is well, and one with massive tokens."""
    torch.manual_seed(0)
    well = KEY._replace(layer="fc1")
    return recorded(tmp_path, {1: {KEY: massive(1e5), well: massive(1.0)}})


def test_names_the_recipe_that_helps(outliers: Table) -> None:
    """One scale per tensor flushes; per row it does not, but rows of x.T hold every massive token: wgrad in BF16. The
    healthy layer needs nothing dearer than it has."""
    found = predict(outliers, [RECIPES[name] for name in ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp")])
    assert cheapest(found) == {"fc2": "rowwise_with_gw_hp", "fc1": "delayed"}
    (bad,) = [p for p in found if (p.layer, p.recipe, p.direction) == ("fc2", "tensorwise", "row")]
    assert not bad.clears
    assert bad.why.startswith("underflow of ")
    assert bad.underflow_pct > 50
    assert bad.sqnr_db > 30  # blind to it
    assert bad.element_sqnr_db < 5
    assert bad.spec == "E4M3[tensor]"


def test_agrees_with_what_another_recipe_really_does(tmp_path: Path) -> None:
    """All registered recipes: predicted from a tensorwise run, measured by casting."""
    torch.manual_seed(1)
    x = massive(1e3)
    found = predict(recorded(tmp_path, {1: {KEY: x}}))
    by_recipe = {p.recipe: p for p in found if p.direction == "row"}
    assert set(by_recipe) == {recipe.name for recipe in default_recipes()}
    for name, said in by_recipe.items():
        spec = RECIPES[name].fprop.lhs
        assert spec is not None
        real = measure(x, ottava.quantize(x, spec))
        assert said.spec == str(spec)
        assert said.underflow_pct == pytest.approx(100 * real.n_underflow / real.n_nonzero, abs=0.5)
        assert said.mean_relative_error == pytest.approx(real.srel / real.n_nonzero, abs=0.003)


def test_clearing_means_every_step(tmp_path: Path) -> None:
    """One bad step of twenty does not vanish in the mean, and is named."""
    torch.manual_seed(0)
    table = recorded(tmp_path, {step: {KEY: massive(1e5 if step == 7 else 1.0)} for step in range(1, 21)})
    (said, *_) = predict(table, [RECIPES["tensorwise"]])
    assert said.steps == 20
    assert said.underflow_pct < 5
    assert not said.clears
    assert "at step 7" in said.why


def test_delayed_replays_the_recorded_amaxes(tmp_path: Path) -> None:
    """A jump by 16 clips exactly the step after it under delayed scaling, not under guarded; with the amaxes of the
    steps between, the window has seen the jump before the step that was looked at."""
    torch.manual_seed(0)
    x = torch.randn(128, 128)
    table = recorded(tmp_path, {step: {KEY: 16 * x if step >= 5 else x} for step in (1, 2, 5)})
    recipes = [RECIPES["delayed"], RECIPES["guarded"]]
    delayed, guarded = predict(table, recipes)[:2]
    assert delayed.overflow_pct > 5
    assert "at step 5" in delayed.why
    assert "recorded steps only" in delayed.why
    assert guarded.overflow_pct == 0
    amax = x.abs().max().item()
    series = [amax, amax, amax, 16 * amax, 16 * amax]
    every = Recording.of({"fc2.input": ("E4M3", series)})
    (seen, *_) = predict(table, recipes, recording=every)
    assert seen.overflow_pct == 0
    assert "recorded steps only" not in seen.why


@pytest.mark.parametrize("outliers", ["channel", "tokens"])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_the_transpose_is_predicted_at_worst_where_it_was_not_recorded(
    tmp_path: Path, outliers: str, recipe: str
) -> None:
    """An outlier channel ruins rows of x, massive tokens rows of x.T. Where x.T is on record, it counts; where not, the
    prediction is not better than what would have happened."""
    torch.manual_seed(0)
    x = torch.randn(256, 256)
    x[(slice(None), 0) if outliers == "channel" else (slice(0, 2),)] *= 1e6
    both = predict(recorded(tmp_path / "a", {1: {KEY: x, KEY._replace(direction="col"): x.t()}}), [RECIPES[recipe]])
    assert [p.direction for p in both] == ["row", "col"]
    spec = RECIPES[recipe].wgrad.rhs
    assert spec is not None
    real = measure(x.t(), ottava.quantize(x.t(), spec))
    underflow = 100 * real.n_underflow / real.n_nonzero
    assert both[1].underflow_pct == pytest.approx(underflow, abs=1.0)
    alone = predict(recorded(tmp_path / "b", {1: {KEY: x}}), [RECIPES[recipe]])
    assert alone[1].underflow_pct > underflow - 1.0
    assert alone[1].why.endswith("worst case: the run has no cast of x.T")
    assert (alone[0].underflow_pct, alone[0].why) == (both[0].underflow_pct, both[0].why)


def test_overrides_and_high_precision(outliers: Table) -> None:
    """A recipe asks for what its layer asks for; high precision clears, and costs most."""
    mixed = replace(RECIPES["tensorwise"].override("fc2", "bf16"), name="mixed")
    found = predict(outliers, [RECIPES["tensorwise"], mixed])
    assert [p.spec for p in found if (p.layer, p.recipe) == ("fc2", "mixed")] == [HIGH_PRECISION] * 2
    assert [p.spec for p in found if (p.layer, p.recipe) == ("fc1", "mixed")] == ["E4M3[tensor]"] * 2
    assert cheapest(found) == {"fc2": "mixed", "fc1": "tensorwise"}
    costs = [cell_cost(RECIPES[name].fprop.lhs) for name in ("delayed", "guarded", "tensorwise", "rowwise", "mxfp8")]
    assert costs == sorted(costs)
    assert cell_cost(None) > costs[-1]
    assert cheapest(predict(outliers, [RECIPES["tensorwise"]]))["fc2"] is None


def test_unknown_is_said_not_guessed(tmp_path: Path) -> None:
    """Rows without histograms of blocks: no number, no clearance."""
    x = torch.randn(64, 64)
    tally = measure(x, ottava.quantize(x, SPEC))
    coarse = Tally(**{**vars(tally), **{name: 0 * value for name, value in vars(tally).items() if "below" in name}})
    with RunWriter(tmp_path) as writer:
        writer.tally(1, KEY, coarse)
    tensor, blocks = predict(Run.open(tmp_path).table(), [RECIPES["tensorwise"], RECIPES["blockwise"]])[:2]
    assert tensor.clears
    assert not blocks.clears
    assert blocks.steps == 0
    assert blocks.why == 'the run has no histograms for E4M3[1x128, pow2]; watch with detail="blocks"'
    assert json.loads(json.dumps(blocks.to_dict(), allow_nan=False))["underflow_pct"] is None


def test_looks_of_less_detail_are_asked_what_they_know(tmp_path: Path) -> None:
    """A run that was resumed with another detail: nothing is told by numbers, one scale by magnitudes, blocks by
    the looks that have them."""
    details: tuple[Detail, ...] = ("numbers", "exponents", "blocks", "blocks")
    torch.manual_seed(0)
    with RunWriter(tmp_path) as writer:
        for step, detail in enumerate(details):
            x = massive(1e5) if detail == "numbers" else massive(1.0)
            writer.tally(step, KEY, measure_packed(x, ottava.quantize(x, SPEC), detail=detail).tally())
    table = Run.open(tmp_path).table()
    assert predict(table.where(step=0)) == []
    assert 'detail="numbers"' in table.where(step=0).not_recorded()
    assert table.not_recorded() == ""
    recipes = [RECIPES["tensorwise"], RECIPES["blockwise"]]
    only_exponents = predict(table.where(step=[0, 1]), recipes)[:2]
    assert [p.clears for p in only_exponents] == [True, False]
    assert 'detail="blocks"' in only_exponents[1].why
    whole, part = predict(table, recipes)[:2], predict(table.where(step=[2, 3]), recipes)[:2]
    assert (whole[0].steps, part[0].steps) == (3, 2)
    assert whole[1].to_dict() == part[1].to_dict()


def test_light_rows_tell_amaxes_only(tmp_path: Path) -> None:
    """The window of a predicted scale sees the steps between; they are no recorded steps of their own."""
    torch.manual_seed(0)
    x = torch.randn(128, 128)
    with RunWriter(tmp_path) as writer:
        writer.tally(1, KEY, measure(x, ottava.quantize(x, SPEC)))
        writer.tally(2, KEY, Tally(amax=16 * x.abs().max().item(), n_casts=1), phase="light")
        writer.tally(3, KEY, measure(16 * x, ottava.quantize(16 * x, SPEC)))
    run = Run.open(tmp_path)
    assert predict(run.table(), [RECIPES["delayed"]])[0].overflow_pct > 5
    seen = predict(run.table(phase=None), [RECIPES["delayed"]])[0]
    assert (seen.overflow_pct, seen.steps) == (0, 2)


def test_summary_names_each_recipes_worst_tensor(outliers: Table) -> None:
    rows = {row["recipe"]: row for row in summary(predict(outliers))}
    assert rows["tensorwise"]["worst"] == "fc2 X"
    assert (rows["tensorwise"]["clears"], rows["rowwise_with_gw_hp"]["clears"], rows["rowwise"]["layers"]) == (1, 2, 2)
    costs = [row["cost"] for row in rows.values()]
    assert costs == sorted(costs)


def test_floors_cover_what_recipes_have() -> None:
    limits: Mapping[str, Callable[..., float]] = {floor.metric: floor.limit for floor in FLOORS}
    assert (limits["sqnr_db"](ottava.E4M3), limits["sqnr_db"](ottava.E5M2)) == (25.0, 20.0)  # facts, 5.8


def test_thinned_rows_keep_the_ends_and_the_worst(tmp_path: Path) -> None:
    """One bad step of forty, between the looks that are kept: still there, and the verdict is that of all rows."""
    torch.manual_seed(0)
    steps = {step: {KEY: massive(1e5 if step == 17 else 1.0)} for step in range(1, 41)}
    for step in steps:
        steps[step][KEY._replace(layer="fc1")] = massive(1.0)
    table = recorded(tmp_path, steps)
    some = thinned(table, 4)
    assert {1, 14, 17, 27, 40} <= set(some.where(layer="fc2")["step"].tolist())
    assert 2 * 4 <= len(some) <= 2 * 7
    assert len(thinned(table, 40)) == len(table)
    recipes = [RECIPES["tensorwise"], RECIPES["rowwise"]]
    assert cheapest(predict(some, recipes)) == cheapest(predict(table, recipes)) == {"fc2": None, "fc1": "tensorwise"}
    assert thinned(table.where(step=99), 4).slots() == []


def test_predicted_scales_know_the_steps_between(tmp_path: Path) -> None:
    """Of thinned rows each is predicted as among all: the amax before it is that of the step before."""
    torch.manual_seed(0)
    table = recorded(tmp_path, {step: {KEY: massive(1.0) * 2.0**step} for step in range(1, 13)})
    recipe = [RECIPES["delayed"]]
    (last,) = [p for p in predict(table.where(step=12), recipe, amaxes=table) if p.direction == "row"]
    (alone,) = [p for p in predict(table.where(step=12), recipe) if p.direction == "row"]
    assert last.overflow_pct > 0 == alone.overflow_pct


def test_routers_that_nothing_casts_are_no_obstacle(tmp_path: Path) -> None:
    gate = KEY._replace(layer="mlp.gate", source="hook")
    table = recorded(tmp_path, {1: {gate: massive(1e5), KEY: massive(1.0)}})
    assert {one.layer for one in predict(table)} == {"fc2"}
