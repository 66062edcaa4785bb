"""What is not finite stays so: the table "nonfinite" of docs/guarantees.md, and a GradScaler that sees it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.kernels import reference
from ottava.ops import quantize
from ottava.recipe import RECIPES
from sweep import sweep

TOKENS, INPUTS, OUTPUTS = 160, 288, 272  # several blocks of every size, with ragged last ones
PLACE = {"x": (37, 45), "W": (53, 45), "dY": (37, 53)}
VALUES = {"NaN": math.nan, "infinity": -math.inf}
RESULTS = ("y", "dX", "dW")
SMALL = [name for name in RECIPES if "E2M1" in str(RECIPES[name].fprop.lhs)]


def layer(recipe: str) -> nn.Sequential:
    """A layer without a bias; if it predicts scales, it has made a step with finite numbers."""
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False)).bfloat16()
    ottava.convert(model, recipe)
    if any(spec is not None and spec.predicted for spec in RECIPES[recipe].cells("input")):
        model(torch.randn(TOKENS, INPUTS).bfloat16()).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        model.zero_grad()
    return model


def lost(recipe: str, tensor: str, value: float, compiled: bool = False) -> tuple[Tensor, ...]:
    """Where y, dX and dW are not finite, if one element of a tensor is `value`."""
    model, x, dy = layer(recipe), torch.randn(TOKENS, INPUTS).bfloat16(), torch.randn(TOKENS, OUTPUTS).bfloat16()
    weight = model[0].weight
    with torch.no_grad():
        {"x": x, "W": weight, "dY": dy}[tensor][PLACE[tensor]] = value
    y = (torch.compile(model, backend="aot_eager") if compiled else model)(x.requires_grad_())
    y.backward(dy)
    return tuple(~result.isfinite() for result in (y, x.grad, weight.grad))


def assert_hides_nothing(recipe: str, tensor: str, word: str, found: tuple[Tensor, ...]) -> None:
    for name, bf16, ours in zip(RESULTS, lost("bf16", tensor, VALUES[word]), found, strict=True):
        assert ours[bf16].all(), f"{recipe}: {word} in {tensor} leaves {name} finite where BF16's is not"


def in_words(mask: Tensor) -> str:
    """The rows or columns that a mask covers."""
    for lines, covered, name in ((mask.all(1), mask.all(1)[:, None], "row"), (mask.all(0), mask.all(0), "column")):
        if lines.any() and torch.equal(covered.expand_as(mask), mask):
            return f"{int(lines.sum())} {name}{'s' if lines.sum() > 1 else ''}"
    return f"{int(mask.sum())} elements" if mask.any() else "finite"


def test_what_bf16_loses_no_recipe_hides(table: Callable[..., None]) -> None:
    """Where BF16's y, dX and dW are not finite, those of every recipe are not; the table says how much more is not."""
    behaviour: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for tensor in PLACE:
        for word, value in VALUES.items():
            for recipe in RECIPES:
                found = lost(recipe, tensor, value)
                assert_hides_nothing(recipe, tensor, word, found)
                behaviour.setdefault((tensor, *map(in_words, found)), {}).setdefault(recipe, []).append(word)
    rows = []
    for (tensor, *found), recipes in behaviour.items():
        for words in sorted(set(map(tuple, recipes.values()))):
            alike = [recipe for recipe in recipes if tuple(recipes[recipe]) == words]
            names = "all, `bf16` too" if len(alike) == len(RECIPES) else ", ".join(f"`{recipe}`" for recipe in alike)
            rows.append((tensor, " or ".join(words), *found, names))
    table("nonfinite", ("one element of", "is", *RESULTS, "under"), rows)


@sweep(recipe=SMALL, tensor=list(PLACE))
def test_the_reference_hides_nothing(recipe: str, tensor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts in plain torch, of the formats whose codes have no NaN."""
    monkeypatch.setattr(quantize, "_CPU_CASTS", (reference,))
    for word, value in VALUES.items():
        assert_hides_nothing(recipe, tensor, word, lost(recipe, tensor, value))


@sweep(recipe=["tensorwise", "mxfp8", "blockwise"], tensor=list(PLACE))
def test_a_named_accumulator_hides_nothing(recipe: str, tensor: str) -> None:
    """Sums as a tensor core makes them, of codes that are NaN."""
    for word, value in VALUES.items():
        with ottava.autocast(recipe, accumulator="hopper"):
            found = lost(recipe, tensor, value)
        assert_hides_nothing(recipe, tensor, word, found)


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4_rht"])
def test_compiled_code_hides_nothing(recipe: str) -> None:
    for tensor in PLACE:
        assert_hides_nothing(recipe, tensor, "infinity", lost(recipe, tensor, math.inf, compiled=True))


@sweep(recipe=list(RECIPES), tensor=["x", "dY"])
def test_a_grad_scaler_skips_the_step_as_under_bf16(recipe: str, tensor: str) -> None:
    """One infinity: the weight stays, the scale is halved; the next, finite step moves the weight."""
    model, scaler = layer(recipe), torch.amp.GradScaler("cpu", init_scale=1024.0)
    weight, optimizer = model[0].weight, ottava.optim.AdamW(model.parameters(), lr=0.1, master="fp32")
    before = weight.detach().clone()
    for value, moves in ((math.inf, False), (1.0, True)):
        x, factors = torch.randn(TOKENS, INPUTS).bfloat16(), torch.ones(TOKENS, OUTPUTS)
        {"x": x, "dY": factors}[tensor][PLACE[tensor]] = value
        optimizer.zero_grad()
        scaler.scale((model(x) * factors).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 512.0, f"{recipe}: {value} in {tensor}"
        assert torch.equal(weight, before) != moves
        assert weight.isfinite().all()


@sweep(recipe=[name for name in RECIPES if name not in ("bf16", "ms_eden")], master=["fp32", "remainder"])
def test_a_dead_master_has_no_living_weight(recipe: str, master: str) -> None:
    """After a gradient with a NaN the stored weight is NaN where BF16's is, and stays NaN with the next gradients."""
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False)).bfloat16()
    ottava.convert(model, recipe, weights="fp8")
    optimizer = ottava.optim.AdamW(model.parameters(), lr=0.1, master=master)
    for value in (math.nan, 1.0):
        gradient = torch.ones(OUTPUTS, INPUTS, dtype=torch.bfloat16)
        gradient[PLACE["W"]] = value
        model[0].weight.grad = gradient
        optimizer.step()
        numbers = model[0].weight.dequantize()
        assert numbers[PLACE["W"]].isnan(), recipe
        assert numbers.isnan().sum() <= 256, recipe  # a block of NVFP4
        assert model(torch.ones(4, INPUTS, dtype=torch.bfloat16))[:, PLACE["W"][0]].isnan().all(), recipe
