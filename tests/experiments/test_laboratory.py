"""Which steps get an experiment, what is written of it, and what is refused with a reason."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import ottava
from ottava.experiments.laboratory import Laboratory


def trained(model: nn.Module, steps: int, *, every: int, asked: int = 0, holds: bool = True) -> list[dict[str, Any]]:
    """The lines that a laboratory writes; `asked`: a step after which something happens."""
    lines: list[dict[str, Any]] = []
    optimizer = torch.optim.SGD(model.parameters() if holds else [nn.Parameter(torch.zeros(1))], lr=0.01)
    parameters = {id(p): name for name, p in model.named_parameters()}
    modules = {id(module): name for name, module in model.named_modules()}

    def write(step: int, kind: str, **facts: Any) -> None:
        lines.append({"step": step, "kind": kind, **facts})

    def name_of(parameter: Tensor) -> str:
        return parameters[id(parameter)]

    laboratory = Laboratory(
        lambda: [model],
        every=every,
        recipe="mxfp8",
        write=write,
        name_of=name_of,
        name_of_module=lambda module: modules.get(id(module), ""),
        quiet=nullcontext,
    )
    for step in range(1, steps + 1):
        laboratory.begin(step)
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().mean()
        laboratory.backward(loss, loss, None, False)
        loss.backward()
        laboratory.before_step(optimizer)
        optimizer.step()
        laboratory.after_step()
        optimizer.zero_grad()
        laboratory.lost(step, float(loss))
        if step == asked:
            laboratory.triggered("loss_z")
    return lines


def network(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    if recipe:
        ottava.convert(model, recipe)
    return model


def test_early_steps_then_multiples_and_the_step_after_an_event_get_a_shadow() -> None:
    lines = trained(network("tensorwise"), 25, every=12, asked=14)
    assert [(line["step"], line["why"]) for line in lines] == [
        (5, "schedule"),
        (10, "schedule"),
        (12, "schedule"),
        (15, "trigger: loss_z"),
        *[(line["step"], line["why"]) for line in lines[4:]],
    ]
    assert {line["step"] for line in lines[4:]} <= {24, 25}  # the budget of time may put step 24 off
    assert {(line["kind"], line["mode"], line["reproduces"]) for line in lines} == {("shadow", "real", True)}
    assert all(0 < line["error"] < 0.15 and line["loss_after"] < line["loss"] for line in lines)


def test_of_a_run_without_casts_two_shadows_are_a_forecast() -> None:
    lines = trained(network(""), 22, every=20)
    assert [(line["step"], line["mode"], line["recipe"]) for line in lines] == [
        (5, "simulated", "mxfp8"),
        (10, "simulated", "mxfp8"),
    ]


def test_what_cannot_be_tried_is_said_once() -> None:
    (line,) = trained(network("tensorwise"), 12, every=12, holds=False)
    assert (line["kind"], line["of"]) == ("refused", "shadow")
    assert line["why"] == "no forward of the watched model was seen in the step"
    wrapped = type("DataParallel", (nn.Sequential,), {})(network("tensorwise"))
    (line,) = trained(wrapped, 12, every=12)
    assert line["why"] == "DataParallel shards or copies the model by itself"


def test_zero_switches_experiments_off() -> None:
    assert trained(network("tensorwise"), 6, every=0, asked=2) == []
