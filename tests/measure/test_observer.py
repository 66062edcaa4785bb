"""Observation: the very casts that the GEMMs get, and a training step that does not know it is watched."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.measure.statistics import STATISTICS
from ottava.measure.tally import Tally
from ottava.measure.walk import measure
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import Recipe

PREDICTED = ("scale_error_max", "scale_error_min", "scale_error_mean", "scale_delayed")
"""Statistics of predicted scales."""


def network(recipe: Recipe | str = "tensorwise") -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.ModuleDict({"up": nn.Linear(64, 96), "down": nn.Linear(96, 64)})
    block.forward = lambda x: block["down"](nn.functional.gelu(block["up"](x)))  # type: ignore[method-assign]
    model = nn.Sequential(block, nn.Linear(64, 64)).bfloat16()
    ottava.convert(model, recipe)
    return model


def data(seed: int = 1, requires_grad: bool = True) -> Tensor:
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return x.requires_grad_(requires_grad)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) for m in model.modules())


def cells(recipe: Recipe) -> dict[str, tuple[QuantizationSpec | None, QuantizationSpec | None]]:
    """{tensor: (spec of x, spec of x.T)} of a recipe's table."""
    return {
        "input": (recipe.fprop.lhs, recipe.wgrad.rhs),
        "weight": (recipe.fprop.rhs, recipe.dgrad.rhs),
        "grad_output": (recipe.dgrad.lhs, recipe.wgrad.lhs),
    }


def test_a_row_for_every_cast(recipe: Recipe) -> None:
    """Each tensor once where x and x.T share a cast, twice where they do not, never where it stays in BF16."""
    model = network(recipe)
    with ottava.debug.observe(model) as seen:
        model(data()).sum().backward()
    got = {(r["layer"], r["tensor"], r["direction"], r["format"], r["granularity"]) for r in seen.table()}
    expected = set()
    for layer in ("0.up", "0.down", "1"):
        for tensor, (row, col) in cells(recipe).items():
            if row is not None:
                expected.add((layer, tensor, "row", row.format.name, str(row.granularity)))
            if col is not None and not (row == col and col.granularity.transposes):
                expected.add((layer, tensor, "col", col.format.name, str(col.granularity)))
    assert got == expected
    assert len(seen.table()) == len(expected)


def test_numbers_are_those_of_the_casts() -> None:
    """x, w and dy are caught beside the observer and cast again by hand: all tallies are equal, bit for bit."""
    recipe = ottava.get_recipe("rowwise")
    model = network(recipe)
    layer, caught = model[1], {}
    layer.register_forward_hook(lambda m, args, y: caught.update(input=args[0].detach()))
    layer.register_full_backward_hook(lambda m, dx, dy: caught.update(grad_output=dy[0]))
    with ottava.debug.observe(model) as seen:
        model(data()).float().square().sum().backward()
    caught["weight"] = layer.weight.detach()
    for tensor, specs in cells(recipe).items():
        for direction, spec in zip(("row", "col"), specs, strict=True):
            assert spec is not None
            x = caught[tensor] if direction == "row" else caught[tensor].t()
            assert seen.tallies["1", tensor, direction, spec] == measure(x, ottava.quantize(x, spec))


def test_training_does_not_know_it_is_watched(recipe: Recipe) -> None:
    """Three steps with and without, stochastic rounding and delayed histories included: the same bits."""
    runs = []
    for watched in (True, False):
        model = network(recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(3)
        for seed in range(3):
            optimizer.zero_grad()
            if watched:
                with ottava.debug.observe(model):
                    model(data(seed)).float().square().mean().backward()
            else:
                model(data(seed)).float().square().mean().backward()
            optimizer.step()
            ottava.ScalingState(model).update()
        runs.append([*model.parameters(), *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_off_means_not_there() -> None:
    """No hook before, none after, none after an exception; the numbers stay readable."""
    model = network()
    assert hooks(model) == 0
    with ottava.debug.observe(model) as seen:
        assert hooks(model) == 9
        model(data())
    assert hooks(model) == 0
    assert len(seen.table()) == 6

    def fail() -> None:
        with ottava.debug.observe(model):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert hooks(model) == 0


def test_calls_merge() -> None:
    """Two micro-batches in one observation are the sum of two observations."""
    model = network("mxfp8")
    with ottava.debug.observe(model) as both:
        for seed in (1, 2):
            model(data(seed)).sum().backward()
    singles = []
    for seed in (1, 2):
        with ottava.debug.observe(model) as one:
            model(data(seed)).sum().backward()
        singles.append(one)
    assert both.tallies == {key: singles[0].tallies[key] + singles[1].tallies[key] for key in singles[0].tallies}
    weight = ("1", "weight", "row", cells(ottava.get_recipe("mxfp8"))["weight"][0])
    assert both.tallies[weight].n == 2 * 64 * 64  # type: ignore[index]


def test_observations_nest() -> None:
    """An outer one sees what the inner one sees, and what comes after."""
    model = network()
    with ottava.debug.observe(model) as outer:
        with ottava.debug.observe(model) as inner:
            model(data()).sum().backward()
        first = copy.copy(inner.tallies)
        model(data(2)).sum().backward()
    assert inner.tallies == first
    assert set(outer.tallies) == set(first)
    assert all(outer.tallies[key].n == 2 * first[key].n for key in first)


def test_the_recipe_of_the_moment_is_observed() -> None:
    """Under autocast its casts; with enabled=False none; both recipes apart where both ran."""
    model = network("tensorwise")
    with ottava.debug.observe(model) as seen, ottava.autocast("mxfp8"):
        model(data()).sum().backward()
    assert {row["granularity"] for row in seen.table()} == {"1x32"}
    with ottava.debug.observe(model) as seen, ottava.autocast(enabled=False):
        model(data()).sum().backward()
    assert seen.table() == []
    with ottava.debug.observe(model) as seen:
        model(data()).sum().backward()
        with ottava.autocast("mxfp8"):
            model(data()).sum().backward()
    assert {row["granularity"] for row in seen.table() if row["tensor"] == "input"} == {"tensor", "1x32"}


def test_nonfinite_inputs_are_counted_and_blind_nothing() -> None:
    """A NaN and an infinity in one activation: the other 1534 elements still have their statistics."""
    model = network("rowwise")
    x = data(requires_grad=False)
    x[0, 0], x[1, 1] = math.nan, math.inf
    with ottava.debug.observe(model, detail="anatomy") as seen:
        model(x)
    row = next(r for r in seen.table() if (r["layer"], r["tensor"], r["direction"]) == ("0.up", "input", "row"))
    assert row["nonfinite"] == 2
    assert all(math.isfinite(row[name]) for name in STATISTICS if name not in PREDICTED)


def test_layers_have_their_full_names() -> None:
    """As in named_modules, below any prefix; "" for a model that is a Linear itself."""
    layer = nn.Linear(64, 64).bfloat16()
    ottava.convert(layer, "tensorwise")
    with ottava.debug.observe(layer) as seen:
        layer(data())
    assert {row["layer"] for row in seen.table()} == {""}
    wrapped = nn.ModuleDict({"module": network()})
    with ottava.debug.observe(wrapped) as seen:
        wrapped["module"](data())
    assert {row["layer"] for row in seen.table()} == {"module.0.up", "module.0.down", "module.1"}


def test_a_scale_from_the_past_shows_as_overflow() -> None:
    """Delayed scaling, and activations that grow a hundredfold: most of the input is clipped, and the table says it."""
    model = network("delayed")
    state = ottava.ScalingState(model)
    model(data()).sum().backward()
    state.update()
    with ottava.debug.observe(model) as seen:
        model(100 * data(2, requires_grad=False))
    first = next(row for row in seen.table() if (row["layer"], row["tensor"]) == ("0.up", "input"))
    assert first["overflow_pct"] > 90
    assert first["sqnr_db"] < 2


def test_checkpointed_casts_count_as_often_as_they_run() -> None:
    """The recomputed forward casts again: twice the elements, the same percentages."""
    model = network("tensorwise")
    with ottava.debug.observe(model) as seen:
        torch.utils.checkpoint.checkpoint(model, data(), use_reentrant=False).sum().backward()
    with ottava.debug.observe(model) as plain:
        model(data()).sum().backward()
    for key, tally in plain.tallies.items():
        times = 1 if key[1] == "grad_output" else 2
        merged = Tally()
        for _ in range(times):
            merged += tally
        assert seen.tallies[key] == merged


def test_it_can_be_printed() -> None:
    """A line for each cast, the worst first, with the numbers of the table; and a sentence where there is none."""
    model = network("blockwise")
    with ottava.debug.observe(model) as seen:
        assert str(seen).startswith("no casts")
        model(data()).sum().backward()
    head, *lines = str(seen).splitlines()
    assert head.split() == ["layer", "tensor", "cast", "row_sqnr_p50_db", "underflow_pct", "overflow_pct", "amax"]
    table = sorted(seen.table(), key=lambda row: row["row_sqnr_p50_db"])
    assert len(lines) == len(table) > 6
    worst = table[0]
    assert lines[0].split()[:2] == [worst["layer"], "dY.T" if worst["direction"] == "col" else "dY"]
    assert f"{worst['row_sqnr_p50_db']:.1f} dB" in lines[0]
    assert "0x" not in repr(seen)
