"""Grouped linears: each group gives the bits of a Linear of its own, for any split, under every recipe."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.nn import GroupedLinear, Linear
from ottava.quantized_layer import quantized_layers
from ottava.recipe import RECIPES, Recipe

K, N = 48, 40


def pair(groups: int, recipe: Recipe | str, bias: bool = True) -> tuple[GroupedLinear, list[Linear]]:
    """A grouped linear and one Linear a group, with the same weights, trained by nothing."""
    grouped = GroupedLinear(groups, K, N, bias=bias, recipe=recipe, dtype=torch.bfloat16)
    singles = []
    for group in range(groups):
        single = Linear(K, N, bias=bias, recipe=recipe, dtype=torch.bfloat16)
        with torch.no_grad():
            single.weight.copy_(grouped.weight[group])
            if bias:
                single.bias.copy_(grouped.bias[group])
        singles.append(single)
    return grouped, singles


def random_splits(draw: random.Random, groups: int) -> list[int]:
    """Nothing, one row, an odd number, more than a block of 32 and of 128."""
    return [draw.choice((0, 0, 1, draw.randrange(2, 31), 32, draw.randrange(33, 70), 129)) for _ in range(groups)]


def both(
    grouped: GroupedLinear, singles: Sequence[Linear], splits: Sequence[int], x: Tensor, dy: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """(y, dx, dw, db) of the grouped linear, and of one Linear a group."""
    own, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    grouped.zero_grad()
    y = grouped(own, splits)
    y.backward(dy)
    parts = []
    for single, rows in zip(singles, theirs.split(list(splits)), strict=True):
        single.zero_grad()
        parts.append(single(rows) if len(rows) else rows.new_empty(0, N) + 0 * rows.sum())
    torch.cat(parts).backward(dy)

    def stacked(name: str) -> Tensor:
        parameters = [getattr(single, name) for single in singles]
        return torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])

    assert own.grad is not None
    assert theirs.grad is not None
    assert grouped.weight.grad is not None
    assert grouped.bias.grad is not None
    return (
        [y, own.grad, grouped.weight.grad, grouped.bias.grad],
        [torch.cat(parts), theirs.grad, stacked("weight"), stacked("bias")],
    )


@pytest.mark.parametrize("index", range(len(RECIPES)))
def test_each_group_gives_the_bits_of_a_linear_of_its_own(index: int) -> None:
    """1,000 random splits over all recipes; where scales are predicted every split is a training step."""
    recipe = list(RECIPES.values())[index]
    draw, groups = random.Random(index), 5
    grouped, singles = pair(groups, recipe)
    states = [ottava.ScalingState(module) for module in (grouped, *singles)]
    for number in range(-(-1000 // len(RECIPES))):
        splits = random_splits(draw, groups)
        x = torch.randn(sum(splits), K, dtype=torch.bfloat16) * 2.0 ** draw.randrange(-6, 6)
        dy = torch.randn(sum(splits), N, dtype=torch.bfloat16)
        if recipe.name == "nvfp4":  # stochastic rounding: the same draws for both, one group at a time
            splits = [sum(splits) if group == number % groups else 0 for group in range(groups)]
        torch.manual_seed(number)
        state = torch.get_rng_state()
        mine = both(grouped, singles, splits, x, dy) if recipe.name != "nvfp4" else _drawn_alike(
            grouped, singles, splits, x, dy, state
        )
        for what, a, b in zip(("y", "dx", "dw", "db"), *mine, strict=True):
            assert torch.equal(a, b), f"{what} of splits {splits}"
        if recipe.predicted:
            for one in states:
                one.update()
            for part, single in zip(grouped.groups, singles, strict=True):
                for a, b in zip(part.quantizers.doors, single.quantizers.doors, strict=True):
                    assert torch.equal(a.amax_history, b.amax_history)
                    assert torch.equal(a.scale, b.scale)
