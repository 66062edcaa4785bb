"""`ottava bench gpu` as a whole: every suite runs on tiny shapes, on a CPU too. Its numbers mean nothing here."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from torch import nn

from ottava.bench import gpu
from ottava.bench.method import Run, WrongResultError, race
from ottava.bench.models import Contender, contender
from ottava.kernels import reference
from ottava.nn.plan import Device
from ottava.recipe import RECIPES

SMOKE = Run(
    torch.device("cuda" if torch.cuda.is_available() else "cpu"), smoke=True, rounds=2, rivals=False, compiled=False
)


def rows(run: Run, suite: str) -> list[dict[str, Any]]:
    return [value for _, kind, value in gpu.bench(run, [suite]) if kind == "row"]


@pytest.mark.parametrize("suite", gpu.SUITES)
def test_every_suite_has_rows_with_times(suite: str) -> None:
    """Percentiles in order, and one line a row, as they come; at last the state of the GPU before and after."""
    *found, (name, kind, states) = [one for one in gpu.bench(SMOKE, [suite]) if one[1] != "constants"]
    assert (name, kind, len(states)) == (suite, "gpu_state", 2)
    assert found
    for name, kind, row in found:
        assert (name, kind) == (suite, "row")
        assert "error" not in row, row
        assert 0 < row["p10"] <= row["median"] <= row["p90"]
        assert gpu.line(row).startswith("  ")


def test_an_unknown_suite_or_recipe_is_refused_before_anything_runs() -> None:
    """With the nearest known one."""
    with pytest.raises(ValueError, match=r"bench gpu: unknown suite 'linaer'.*linear"):
        next(gpu.bench(SMOKE, ["linaer"]))
    with pytest.raises(ValueError, match=r"bench gpu: unknown recipe 'rowise'.*rowwise"):
        next(gpu.bench(dataclasses.replace(SMOKE, recipes=("rowise",)), ["linear"]))


def test_who_fails_has_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that cannot be made, one that is wrong, one that fails in its backward: an error each, and no times."""
    made = gpu.contenders

    def with_bad_ones(run: Run, make: Any, *recipes: Any) -> list[Contender]:
        good = made(run, make, *recipes)
        wrong = make()
        wrong.weight.data.neg_()
        return [
            *good[:2],
            contender("unmade", lambda: nn.Linear(-1, 1), False),
            Contender("wrong", wrong, wrong),
            contender("late", lambda: gpu.Called(lambda x: make()(x).detach()), False),
            *good[2:],
        ]

    monkeypatch.setattr(gpu, "contenders", with_bad_ones)
    found = {row["recipe"]: row for row in rows(SMOKE, "linear")}
    assert len(found) == len(gpu.contenders(SMOKE, lambda: gpu.linear_layer(SMOKE, 64, 64)))
    errors = {name: row["error"] for name, row in found.items() if "error" in row}
    assert set(errors) == {"unmade", "wrong", "late"}
    assert errors["wrong"].startswith("WrongResultError: wrong: relative error 2 is not below")
    assert "does not require grad" in errors["late"]
    assert all("median" not in found[name] and errors[name] in gpu.line(found[name]) for name in errors)


def test_the_user_names_recipes_and_a_shape() -> None:
    """Nothing else runs, in every suite with shapes; a suite's own baselines stay."""
    run = dataclasses.replace(SMOKE, smoke=False, shape=(32, 64, 48), recipes=("rowwise",))
    for suite, shape, names in (
        ("cast", [32, 64], {"rowwise"}),
        ("linear", [32, 64, 48], {"bf16", "rowwise"}),
        ("gemm", [32, 48, 64], {"rowwise.fprop"}),
    ):
        found = rows(run, suite)
        assert {tuple(row["shape"]) for row in found} == {tuple(shape)}
        assert {row["recipe"] for row in found} == names


def test_time_that_is_over_begins_nothing_new() -> None:
    """What is left out has a row that says so; a case that had begun has three samples."""
    run = dataclasses.replace(SMOKE, smoke=False, rounds=50, until=time.monotonic() - 1)
    found = rows(run, "linear")
    assert len(found) == 5
    assert all(row["error"] == "left out: the time of --budget was over" for row in found)
    count = 0

    def work() -> None:
        nonlocal count
        count += 1

    assert set(race(run, {"one": work})["one"]) == {"median", "p10", "p90"}
    assert count == 1 + 3
    parts = [
        dataclasses.replace(SMOKE, until=time.monotonic() + 100).part(of).until - time.monotonic() for of in (1, 4)
    ]
    assert parts == pytest.approx([100, 25], abs=1)


KERNELS = Run(torch.device("cpu"), smoke=True, rounds=2)


def test_ceilings_give_every_constant_that_can_be_measured() -> None:
    """All of a Device's but the start of a GEMM, which a large one does not show; the rates are those of the table."""
    (constants,) = (value for _, kind, value in gpu.bench(KERNELS, ["ceilings"]) if kind == "constants")
    names = {field.name for field in dataclasses.fields(Device)}
    assert set(constants) == names - {"start"}
    found = {row["what"]: row for row in rows(KERNELS, "ceilings")}
    constants = gpu.constants(KERNELS, [*found.values()])
    assert constants["bf16"] == found["bf16"]["flops"]
    assert constants["tensor"] == found["tensor"]["flops"] / found["bf16"]["flops"]
    assert constants["launch"] == found["launch"]["median"]
    assert all(found[name]["relative_error"] < 4e-3 for name in ("tensor", "row", "block"))
    assert gpu.constants(KERNELS, [*found.values(), {"what": "row", "error": "late"}]) == {}


def test_other_codes_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts at once are compared with the reference before they are timed."""
    spec = RECIPES["tensorwise"].fprop.lhs
    assert spec is not None
    x = torch.randn(8, 8)

    def both(x: torch.Tensor, *_: object) -> tuple[reference.Cast, reference.Cast]:
        return reference.quantize(x, spec), reference.quantize(x.t() * 2, spec)

    monkeypatch.setattr(gpu.triton_quantize, "quantize_both", both)
    gpu.same_codes("scaled alike", x, spec, spec, None)  # twice the numbers, half the scale: the same codes
    monkeypatch.setattr(gpu.triton_quantize, "quantize_both", lambda x, *_: both(x.t()))
    with pytest.raises(WrongResultError, match="transposed: codes differ from those of the reference"):
        gpu.same_codes("transposed", x, spec, spec, None)
