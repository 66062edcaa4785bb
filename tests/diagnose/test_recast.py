"""What-if on dumped tensors: the numbers are those of the real casts, measured as a watch measures them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ottava
from ottava.cli.diagnose import what_if
from ottava.diagnose.what_if import predict, recast
from ottava.measure.statistics import STATISTICS
from ottava.measure.walk import measure
from ottava.numerics.tensor import QuantizedTensor
from ottava.ops.quantize import quantize
from ottava.recipe import CELL_OF, RECIPES, Recipe
from ottava.record.random_state import random_states
from ottava.record.reader import Run
from scaling_samples import with_cells

SMOOTH = replace(with_cells("tensorwise_e4m3", transform="smooth"), name="smooth")


def watched(folder: Path, rows: int = 0) -> tuple[Path, dict[str, torch.Tensor]]:
    """A step of one layer whose tensors are dumped, and these tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48)).bfloat16()
    ottava.convert(model, "nvfp4")
    x, dy = torch.randn(96, 64).bfloat16() + 3, torch.randn(96, 48).bfloat16() * 1e-3
    x[:, 5] *= 40
    with ottava.watch(model, folder, sample=1, dump={"steps": [1], "layers": "*", "rows": rows}) as seen:
        model(x).backward(dy)
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        seen.flush()
    return folder, {"input": x, "weight": model[0].weight.detach(), "grad_output": dy}


def cast_in_order(tensors: dict[str, torch.Tensor], recipe: Recipe, tensor: str, direction: str) -> QuantizedTensor:
    """By hand: the operand of a cell, after its partner where a training step casts that first."""
    gemm, side = CELL_OF[tensor, direction]
    order = {"fprop": ("input", "weight"), "dgrad": ("weight", "grad_output"), "wgrad": ("input", "grad_output")}[gemm]
    turned = {"fprop": (False, False), "dgrad": (True, False), "wgrad": (True, True)}[gemm]
    sides = {"fprop": ("lhs", "rhs")}.get(gemm, ("rhs", "lhs"))
    met = None
    for name, turn, own in zip(order, turned, sides, strict=True):
        x = tensors[name].t() if turn else tensors[name]
        met = quantize(x, getattr(getattr(recipe, gemm), own), beside=met)
        if own == side:
            return met
    raise AssertionError


def test_dumped_tensors_are_cast_for_real(tmp_path: Path) -> None:
    folder, tensors = watched(tmp_path / "run")
    recipes = [*(RECIPES[name] for name in ("nvfp4", "nvfp4_rht", "four_over_six", "averis", "delayed")), SMOOTH]
    predictions, before = predict(Run.open(folder).table(), recipes), random_states()
    found = recast(folder, predictions, recipes)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), random_states().values(), strict=True))
    assert len(found) == len(predictions) == 6 * len(recipes)
    compared = 0
    for old, new in zip(predictions, found, strict=True):
        assert new.steps == 1
        if old.steps:
            assert new is old
            continue
        recipe = SMOOTH if new.recipe == "smooth" else RECIPES[new.recipe]
        x_q = cast_in_order(tensors, recipe, new.tensor, new.direction)
        assert new.why.endswith("casts of dumped tensors")
        if x_q.spec.rounding == "stochastic":
            continue  # other random numbers
        x = tensors[new.tensor] if new.direction == "row" else tensors[new.tensor].t()
        tally = measure(x_q.transformed(x), x_q)
        for name in ("underflow_pct", "overflow_pct", "sqnr_db", "mean_relative_error"):
            wanted = float(STATISTICS[name].finish(tally))
            assert math.isclose(getattr(new, name), wanted, rel_tol=1e-6, abs_tol=1e-9), (new, name, wanted)
        compared += 1
    assert compared == 1 + 4 + 2 + 6  # cells that draw nothing: of rht, four_over_six, averis and smooth
    rotated = {p.recipe: p.sqnr_db for p in found if (p.tensor, p.direction) == ("input", "col")}
    assert rotated["nvfp4_rht"] != rotated["nvfp4"]


def test_without_whole_tensors_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = watched(tmp_path / "run", rows=40)
    predictions = predict(Run.open(folder).table(), [RECIPES["averis"]])
    assert recast(folder, predictions, [RECIPES["averis"]]) == predictions
    assert any("dump.rows=0" in p.why for p in predictions if not p.steps)
    whole, _ = watched(tmp_path / "whole")
    what_if(whole, recipes="nvfp4_rht", layers="*", as_json=False)
    assert "casts of dumped tensors" in capsys.readouterr().out
