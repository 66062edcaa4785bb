"""Only a training step leaves a trace in the histories of predicted scales: the third table of docs/guarantees.md."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.recipe import RECIPES
from scaling_samples import WIDTH, differences, loss_of, network, noise, state_of, train

PREDICTED = [name for name, recipe in RECIPES.items() if recipe.predicted]
LOUD = 1000 * noise(7)
AS_WITHOUT = "as without it"

Made = tuple[nn.Sequential, torch.optim.Optimizer]
Event = Callable[[nn.Sequential, torch.optim.Optimizer], Made | None]


class Interrupted(Exception):
    """The failure of a forward or a backward."""


def interrupt(*_: object) -> None:
    raise Interrupted


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def evaluation(context: Callable[[], contextlib.AbstractContextManager[object]]) -> Event:
    def event(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        model.eval()
        with context():
            model(LOUD)
        model.train()

    return event


def frozen_evaluation(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Its last layer has no gradient, and so no backward."""
    model[2].requires_grad_(False)
    model[2](LOUD)
    model[2].requires_grad_(True)


def failing_forward(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    with model[2].register_forward_pre_hook(interrupt), pytest.raises(Interrupted):
        model(LOUD)


def failing_backward(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """The last layer has had its backward, and its gradient."""
    optimizer.zero_grad()
    with model[0].register_full_backward_hook(interrupt), pytest.raises(Interrupted):
        loss_of(model, LOUD).backward()
    assert model[2].weight.grad is not None


def overflow(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, LOUD)).backward()
    model[0].bias.grad.fill_(math.inf)  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0  # it has skipped the step


def skipped(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model, LOUD).backward()


def skipped_beside_others(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Another model of the process steps in between, as a GAN's second half does."""
    skipped(model, optimizer)
    optimizer.zero_grad()
    other = nn.Parameter(torch.zeros(3))
    other.grad = torch.ones(3)
    torch.optim.SGD([other], lr=1.0).step()


def gradient_of_the_input(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    x = LOUD.clone().requires_grad_()
    torch.autograd.grad(loss_of(model, x), x)


def frozen_backward(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model.requires_grad_(False)
    loss_of(model, LOUD.clone().requires_grad_()).backward()
    model.requires_grad_(True)


def skipped_with_zeros(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    skipped(model, optimizer)
    optimizer.zero_grad(set_to_none=False)
    ottava.ScalingState(model).discard()


def skipped_compiled(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(torch.compile(model, backend="aot_eager"), LOUD).backward()
    optimizer.zero_grad()
    ottava.ScalingState(model).discard()


def failing_calibration(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    with contextlib.suppress(Interrupted), ottava.autocast(calibrating=True, enabled=False):
        loss_of(model, LOUD).backward()
        raise Interrupted


def failing_autocast(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    with contextlib.suppress(Interrupted), ottava.autocast(update="autocast"):
        model(LOUD)
        raise Interrupted


OUTSIDE: dict[str, Event] = {
    "`eval()`, a forward with gradients": evaluation(contextlib.nullcontext),
    "`eval()`, a forward under `no_grad`": evaluation(torch.no_grad),
    "`eval()`, a forward under `inference_mode`": evaluation(torch.inference_mode),
    "a compiled forward without a backward": lambda model, _: torch.compile(model, backend="aot_eager")(LOUD),
    "a forward of a frozen layer without a backward": frozen_evaluation,
    "a forward that raises": failing_forward,
    "a backward that raises": failing_backward,
    "a step that GradScaler skips": overflow,
    "a step that the loop skips, then `zero_grad()`": skipped,
    "the same, then another model's step": skipped_beside_others,
    "`torch.autograd.grad` to the input": gradient_of_the_input,
    "a backward through the frozen model to its input": frozen_backward,
    "a skipped step, then `zero_grad(set_to_none=False)` and `discard()`": skipped_with_zeros,
    "a compiled step that the loop skips, then `discard()`": skipped_compiled,
    "`autocast(calibrating=True)` that raises": failing_calibration,
    '`autocast(update="autocast")` that raises in its forward': failing_autocast,
}
"""Events that are no training step."""


def histories(event: Event | None, recipe: str) -> dict[str, Tensor]:
    """Two steps, the event, two more steps; a step begins with `zero_grad`."""
    model = network(recipe)
    optimizer = optimizer_of(model)
    train(model, range(2), optimizer)
    if event is not None:
        event(model, optimizer)
    train(model, range(2, 4), optimizer)
    return {name: tensor for name, tensor in state_of(model).items() if "count" not in name}


def accumulated(recipe: str, way: str) -> dict[str, Tensor]:
    """Steps of two micro-batches, of which something interrupts or repeats the second step."""
    model = network(recipe)
    optimizer = optimizer_of(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, 4 * noise(step)).backward()
        if step == 1 and way == "saved":
            state, gradients = model.state_dict(), [p.grad for p in model.parameters()]
            model = network(recipe, seed=9)
            model.load_state_dict(state)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer = optimizer_of(model)
        if way == "evaluated":
            model(LOUD)
        model.train(way != "in eval()")
        if way.startswith("recomputed"):
            y = checkpoint(model, noise(10 + step).requires_grad_(), use_reentrant=way.endswith("reentrant"))
            y.float().square().mean().backward()
        else:
            loss_of(model, noise(10 + step)).backward()
        optimizer.step()
    return state_of(model)


WAYS = {
    "an accumulation that is saved and loaded": ("saved", "as uninterrupted"),
    "`torch.utils.checkpoint`": ("recomputed", "as without it"),
    "`torch.utils.checkpoint(use_reentrant=True)`": ("recomputed, reentrant", "as without it"),
    "a forward between two micro-batches": ("evaluated", "as without it"),
    "a training step of a model in `eval()`": ("in eval()", "as in `train()`"),
}


def test_only_a_training_step_leaves_a_trace(table: Callable[..., None]) -> None:
    """Histories and scales, bit for bit, of runs with and without an event."""
    rows = []
    without = {recipe: histories(None, recipe) for recipe in PREDICTED}
    whole = {recipe: accumulated(recipe, "") for recipe in PREDICTED}
    for name, event in OUTSIDE.items():
        changed = {recipe: differences(histories(event, recipe), without[recipe]) for recipe in PREDICTED}
        rows.append([name, *("changed" if changed[recipe] else AS_WITHOUT for recipe in PREDICTED)])
        assert not any(changed.values()), (name, changed)
    for name, (way, good) in WAYS.items():
        changed = {recipe: differences(accumulated(recipe, way), whole[recipe]) for recipe in PREDICTED}
        rows.append([name, *("changed" if changed[recipe] else good for recipe in PREDICTED)])
        assert not any(changed.values()), (name, changed)
    table("events", ["event", *PREDICTED], rows)


def test_a_loud_step_does_leave_one() -> None:
    """The comparison above can fail: a step on the loud batch changes histories under every recipe."""

    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        skipped(model, optimizer)
        optimizer.step()

    for recipe in PREDICTED:
        assert differences(histories(step, recipe), histories(None, recipe))
        assert LOUD.shape[1] == WIDTH
