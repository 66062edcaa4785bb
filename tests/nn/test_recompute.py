"""torch.utils.checkpoint around ottava layers: the bits, the histories and the random numbers of no checkpoint at all.

A recomputation runs inside backward, long after the `autocast` of its forward was left; it must run what that ran.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import ottava
from ottava.recipe import Recipe
from same_tensors import assert_same
from sweep import FIXED, sweep

# torch says so of every checkpoint inside a reentrant one, whose first forward runs without grad mode
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

Forward = Callable[[nn.Sequential, Tensor], Tensor]


class Block(nn.Module):
    """A residual block with dropout, whose random numbers a recomputation has to repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(64, 96), nn.Linear(96, 64), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))


def network(recipe: Recipe | str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block()).bfloat16()
    ottava.convert(model, recipe)
    return model


def plain(model: nn.Sequential, x: Tensor) -> Tensor:
    return model(x)


def each(reentrant: bool) -> Forward:
    """Every block checkpointed."""

    def forward(model: nn.Sequential, x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    return forward


def nested(outer: bool, inner: bool) -> Forward:
    """A checkpoint of all blocks around checkpoints of each."""
    return lambda model, x: checkpoint(each(inner), model, x, use_reentrant=outer)


def sequential(model: nn.Sequential, x: Tensor) -> Tensor:
    return checkpoint_sequential(model, 2, x, use_reentrant=False)


RECIPES = [ottava.get_recipe(name) for name in FIXED]  # a reentrant checkpoint draws no signs in its first forward
WAYS: dict[str, Forward] = {
    "reentrant": each(True),
    "non_reentrant": each(False),
    "nested_non_reentrant": nested(False, False),
    "nested_reentrant": nested(True, True),
    "nested_mixed": nested(False, True),
    "sequential": sequential,
}


def train(
    model: nn.Sequential, forward: Forward, recipe: Recipe | str | None = None, low: bool = False
) -> list[Tensor]:
    """Two steps of two micro-batches, both forwards before the backwards; the recipe (and torch.autocast) only around
    the forwards. All bits there are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for seed in range(2):
        xs = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(seed))
        xs = [x.clone().requires_grad_() for x in (xs if low else xs.bfloat16())]
        torch.manual_seed(seed)
        with ExitStack() as stack:
            if recipe is not None:
                stack.enter_context(ottava.autocast(recipe))
            if low:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            ys = [forward(model, x) for x in xs]
        optimizer.zero_grad()
        for y in ys:
            y.float().square().mean().backward()
        grads = [x.grad for x in xs] + [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert all(grad is not None for grad in grads)
        seen += [y.detach() for y in ys] + grads
        optimizer.step()
        ottava.ScalingState(model).update()
    return [*seen, *model.parameters(), *model.buffers()]


@pytest.mark.parametrize("predicted", [True, False])
@sweep(recipe=RECIPES, predicted=None)
def test_checkpointing_changes_no_bit(recipe: Recipe, predicted: bool) -> None:
    """y, all gradients, parameters after two steps, and the histories of delayed scaling, which a recomputation stages
    once: TE #415, #1190, #1254, #1723, #3394."""
    expected = train(network(recipe), plain) if recipe.predicted == predicted else []
    for forward in WAYS.values() if expected else ():
        assert_same(train(network(recipe), forward), expected)


@sweep(recipe=RECIPES)
def test_recomputation_runs_the_recipe_of_its_forward(recipe: Recipe) -> None:
    """autocast was left before backward; the layers' own recipe (mxfp8) is another. Every way, shared out."""
    ways, index = list(WAYS.values()), RECIPES.index(recipe)
    expected = train(network("mxfp8"), plain, recipe)
    for forward in ways if recipe.name == "delayed" else (ways[index % len(ways)], ways[(index + 2) % len(ways)]):
        assert_same(train(network("mxfp8"), forward, recipe), expected)


@sweep(recipe=RECIPES)
def test_recomputation_under_torch_autocast(recipe: Recipe) -> None:
    """FP32 parameters: torch restores its own autocast for the recomputation, ottava its recipe."""
    expected = train(network("mxfp8").float(), plain, recipe, low=True)
    for way in ("reentrant", "non_reentrant", "nested_mixed"):
        assert_same(train(network("mxfp8").float(), WAYS[way], recipe, low=True), expected)


@pytest.mark.parametrize("way", ["reentrant", "non_reentrant"])
def test_backward_in_another_context_recomputes_the_forwards(way: str) -> None:
    """backward() inside autocast(enabled=False), as in a training loop that has begun its evaluation."""
    grads = []
    for around in (True, False):
        model, x = network("tensorwise"), torch.ones(4, 64, dtype=torch.bfloat16).requires_grad_()
        torch.manual_seed(1)
        y = WAYS[way](model, x)
        with ottava.autocast(enabled=not around):
            y.float().sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert_same(*grads)


def test_selective_checkpointing_sees_ordinary_tensors() -> None:
    """Saved codes go through save_for_backward, so saved_tensors_hooks (offloading) can move them and back."""
    model, x = network("tensorwise"), torch.ones(4, 64, dtype=torch.bfloat16).requires_grad_()
    torch.manual_seed(1)
    model(x).float().sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad.clone(), None
    moved = []

    def pack(t: Tensor) -> tuple[str, Tensor]:
        moved.append(t.dtype)
        return "offloaded", t.clone()

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1]):
        y = model(x)
    y.float().sum().backward()
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    assert torch.float8_e4m3fn in moved
