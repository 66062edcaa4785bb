"""The doors tap: the operands that GEMMs get, counted once, whatever runs around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.measure.tally import Tally
from ottava.record.schema import SlotKey
from ottava.watching.collector import Collector
from ottava.watching.config import WatchConfig
from ottava.watching.doors import DoorTap
from scaling_samples import two_linears

network = partial(two_linears, hidden=96)


def data() -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()


def looking(model: nn.Module | None, **settings: Any) -> tuple[Collector, DoorTap]:
    collector = Collector(WatchConfig(**({"sample": 1} | settings)))
    collector.looking = True
    tap = DoorTap(collector, model)
    tap.attach()
    return collector, tap


def counted(seen: dict[SlotKey, Tally]) -> dict[tuple[str, str, str], float]:
    return {(key.layer, key.tensor, key.direction): tally.n_casts for key, tally in seen.items()}


ONCE = {(layer, tensor, "row"): 1 for layer in ("0", "2") for tensor in ("input", "weight", "grad_output")}


def plain(model: nn.Sequential, x: Tensor) -> Tensor:
    return model(x)


def reentrant(model: nn.Sequential, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=True)


def non_reentrant(model: nn.Sequential, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)


@pytest.mark.parametrize("forward", [plain, reentrant, non_reentrant])
def test_recomputation_is_not_counted_twice(forward: Callable[[nn.Sequential, Tensor], Tensor]) -> None:
    """Every tensor once, with the same numbers, with and without activation checkpointing."""
    reference_model, model = network(), network()
    seen = []
    for net, run in ((reference_model, plain), (model, forward)):
        collector, tap = looking(net)
        run(net, data()).square().mean().backward()
        tap.detach()
        seen.append(collector.drain()[0])
    assert counted(seen[0]) == counted(seen[1]) == ONCE
    assert all(seen[0][key] == seen[1][key] for key in seen[0])


def test_evaluation_is_not_counted() -> None:
    """Forwards without gradients belong to no step."""
    model = network()
    collector, tap = looking(model)
    with torch.no_grad():
        model(data())
    tap.detach()
    assert collector.drain()[0] == {}
    assert tap.seen == set()


def test_blockwise_shows_both_directions() -> None:
    """Where x.T is cast on its own it has its own numbers; where one cast serves both it is shown once."""
    model = network("blockwise")
    collector, tap = looking(model)
    model(data()).square().mean().backward()
    tap.detach()
    directions = {(tensor, direction) for _, tensor, direction in counted(collector.drain()[0])}
    assert directions == {
        ("input", "row"),
        ("input", "col"),
        ("weight", "row"),
        ("grad_output", "row"),
        ("grad_output", "col"),
    }


def test_layers_converted_later_and_made_by_hand_are_seen() -> None:
    """Without a model at first; names are those of the conversion."""
    collector, tap = looking(None)
    model = network()
    by_hand = ottava.nn.Linear(64, 64, recipe="rowwise", dtype=torch.bfloat16)
    by_hand(model(data())).square().mean().backward()
    tap.detach()
    seen = collector.drain()[0]
    assert {key.layer for key in seen} == {"0", "2", "Linear 2"}
    assert {key.recipe for key in seen} == {"tensorwise", "rowwise"}


def test_a_watched_model_hides_another() -> None:
    """Only the layers of the model that is watched, also where another has the same names."""
    mine, other = network(), network()
    collector, tap = looking(mine)
    other(data()).square().mean().backward()
    assert collector.drain()[0] == {}
    mine(data()).square().mean().backward()
    tap.detach()
    assert counted(collector.drain()[0]) == ONCE


def test_a_layer_converted_after_the_watch_began_is_found() -> None:
    """In the watched model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    collector, tap = looking(model)
    ottava.convert(model, "rowwise")
    model(data()).square().mean().backward()
    tap.detach()
    assert {key.layer for key in collector.drain()[0]} == {"0"}


def test_the_weight_keeps_its_cache() -> None:
    """A hook of the weight's own door would switch it off; the second micro-batch finds the cast done."""
    model = network()
    _, tap = looking(model)
    model(data()).sum().backward()
    door = model[0].quantizers.weight
    first = door.cached
    model(data()).sum().backward()
    tap.detach()
    assert first is not None
    assert door.cached is not None
    assert door.cached[2] is first[2]


def test_the_recipe_of_the_call_is_on_record() -> None:
    """An autocast around the forward has the last word, and its name is what the rows say."""
    model = network()
    collector, tap = looking(model)
    with ottava.autocast("mxfp8"):
        model(data()).square().mean().backward()
    tap.detach()
    assert {(key.recipe, key.granularity, key.scale_format) for key in collector.drain()[0]} == {
        ("mxfp8", "1x32", "e8m0")
    }


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_slots_do_not_depend_on_who_needs_a_gradient(recipe: str) -> None:
    """Without a gradient of x only dY.T is cast; per tensor, that is the same cast."""
    slots = []
    for x in (data(), data().detach()):
        model = network(recipe)
        collector, tap = looking(model)
        model(x).sum().backward()
        tap.detach()
        slots.append({(k.tensor, k.direction): t for k, t in collector.drain()[0].items() if k.layer == "0"})
    with_dgrad, without = slots
    missing = {("grad_output", "row")} if recipe == "blockwise" else set()
    assert set(with_dgrad) - set(without) == missing
    for place, tally in without.items():
        assert (tally.n, tally.sxx, tally.see) == (with_dgrad[place].n, with_dgrad[place].sxx, with_dgrad[place].see)


def test_a_weight_is_checked_in_every_micro_batch() -> None:
    model, checked = network(), []
    collector = Collector(WatchConfig(sample=1))
    collector.looking = True
    tap = DoorTap(collector, model, lambda layer, tensor, door, x, row, col: checked.append((layer, tensor)))
    tap.attach()
    for _ in range(3):
        model(data()).sum().backward()
    tap.detach()
    assert checked.count(("0", "weight")) == 3
    assert counted(collector.drain()[0])["0", "weight", "row"] == 1


def test_of_layers_that_share_a_matrix_those_that_ran_are_expected() -> None:
    """torch's attention has a layer for each kind of call; the dtype before each cast is noted."""
    model = nn.Sequential(nn.MultiheadAttention(64, 4, batch_first=True)).bfloat16()
    ottava.convert(model, "tensorwise")
    _, tap = looking(model)
    x = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    assert len(tap.expected()) == 4
    model[0](x, x, x)[0].sum().backward()
    tap.detach()
    assert set(tap.expected()) == tap.seen == {"0.in_proj", "0.out_proj"}
    assert tap.dtypes["0.in_proj"] == dict.fromkeys(("input", "weight", "grad_output"), "bfloat16")
