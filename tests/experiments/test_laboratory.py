"""When a watched run experiments, what the step does to its own batch, and what cannot be tried."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.diagnose.diagnose import diagnose
from ottava.experiments import laboratory
from ottava.experiments.laboratory import EARLY, Laboratory
from ottava.record.reader import Run
from ottava.watching.session import watch


def trained(folder: Path, *, convert: bool, lr: float = 0.05, steps: int = 12) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16()
    if convert:
        ottava.convert(model, "tensorwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    with watch(model, folder):
        for _ in range(steps):
            loss = nn.functional.mse_loss(model(x).float(), x.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return Run.open(folder)


def test_shadow_steps_come_early_and_then_by_the_period(tmp_path: Path) -> None:
    for convert, mode in ((True, "real"), (False, "simulated")):
        lines = [e for e in trained(tmp_path / mode, convert=convert).experiments if e["kind"] == "shadow"]
        assert [e["step"] for e in lines] == [step for step in EARLY if step <= 12]
        assert {e["mode"] for e in lines} == {mode}


@pytest.mark.parametrize("cheap", (math.inf, 0.0))
def test_a_shadow_that_takes_long_waits_until_it_is_paid_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cheap: float
) -> None:
    monkeypatch.setattr(laboratory, "_CHEAP", cheap)
    monkeypatch.setattr(laboratory, "_SHARE", 0.0)  # nothing is paid for
    lines = trained(tmp_path, convert=True, steps=24).experiments
    assert [e["step"] for e in lines if e["kind"] == "shadow"] == ([5, 10, 20] if cheap else [5, 10])


def test_a_step_makes_its_own_batch_better_unless_it_is_too_long(tmp_path: Path) -> None:
    """SGD on one batch: a short step goes down, one of a hundred times the stable length goes up."""
    for lr, better in ((0.05, True), (100.0, False)):
        first = next(e for e in trained(tmp_path / str(lr), convert=True, lr=lr, steps=6).experiments)
        assert first["tail"] == "replayed"
        after, before = float(first["loss_after"]), float(first["loss"])  # "inf" is a text in JSON
        assert (after < before) is better, first


def test_a_first_step_that_is_too_long_is_tried_as_it_began(tmp_path: Path) -> None:
    """On a quadratic loss SGD climbs if its rate is more than twice the inverse of the curvature."""
    torch.manual_seed(0)
    x = torch.randn(256, 64)
    curvature = float(torch.linalg.eigvalsh(x.T @ x / 256).max()) * 2 / 64
    for k, steps in ((0.5, []), (4.0, [1, 2, 3, 4])):
        model = nn.Linear(64, 64, bias=False)
        ottava.convert(model, "tensorwise")
        optimizer = torch.optim.SGD(model.parameters(), lr=k / curvature)
        weights = []
        with watch(model, tmp_path / str(k)):
            for _ in range(4):
                weights.append(model.weight.detach().clone())
                loss = nn.functional.mse_loss(model(x), torch.zeros(256, 64))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        lines = Run.open(tmp_path / str(k)).experiments
        assert [e["step"] for e in lines] == steps
        for line, weight in zip(lines, weights, strict=False):
            with torch.no_grad():
                model.weight.copy_(weight)
                assert line["loss"] == float(nn.functional.mse_loss(model(x), torch.zeros(256, 64)))
            assert line["loss_tenth"] < line["loss"] < line["loss_after"]
            assert line["reproduces"]
            assert 0 < line["error"] < 0.15


def test_a_step_whose_closure_makes_the_gradients_is_tried_as_any_other(tmp_path: Path) -> None:
    """As Lightning steps: the forward and the backward run inside of `optimizer.step`."""
    found = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16()
        ottava.convert(model, "tensorwise")
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.05), torch.randn(64, 64, dtype=torch.bfloat16)

        def closure(model: nn.Module = model, optimizer: Any = optimizer, x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x).float(), x.float())
            loss.backward()
            return loss

        with watch(model, folder := tmp_path / str(inside)):
            for _ in range(6):
                if inside:
                    optimizer.step(closure=closure)
                else:
                    closure()
                    optimizer.step()
        run = Run.open(folder)
        kinds = ("step", "kind", "error", "loss", "loss_after", "loss_longer")
        found.append(([{k: e.get(k) for k in kinds} for e in run.experiments], run.steps["grad_norm"].tolist()))
    assert found[0] == found[1]
    assert [e["step"] for e in found[1][0]] == [5]


def test_a_model_without_linear_layers_has_its_steps_tried(tmp_path: Path) -> None:
    model = nn.Embedding(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, tmp_path / "run"):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.arange(8)).square().mean().backward()
            optimizer.step()
    line = next(e for e in Run.open(tmp_path / "run").experiments if e["kind"] == "shadow")
    assert line["loss_longer"] < line["loss_after"] < line["loss"]
    assert "error" not in line


def test_no_experiment_if_nobody_wants_one(tmp_path: Path) -> None:
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, tmp_path / "run", shadow=0):
        for _ in range(6):
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
    assert Run.open(tmp_path / "run").experiments == []


def lines_of(model: nn.Module, steps: int, *, every: int, asked: int = 0, holds: bool = True) -> list[dict[str, Any]]:
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
        keep=lambda step, facts: None,
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
    laboratory.drop()
    return lines


def network(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    if recipe:
        ottava.convert(model, recipe)
    return model


def test_the_step_after_an_event_gets_a_shadow() -> None:
    lines = lines_of(network("tensorwise"), 25, every=12, asked=14)
    came = {line["step"]: line["why"] for line in lines}
    assert came.keys() - {12, 13, 14, 16, 24, 25} == {5, 10, 15, 20}  # the budget of time may put steps 12 and 24 off
    assert {step for step, why in came.items() if why != "schedule"} == {15}
    assert came[15] == "trigger: loss_z"
    assert {(line["kind"], line["mode"], line["reproduces"]) for line in lines} == {("shadow", "real", True)}
    assert all(0 < line["error"] < 0.15 and line["loss_after"] < line["loss"] for line in lines)


def test_of_a_run_without_casts_two_shadows_are_a_forecast() -> None:
    lines = lines_of(network(""), 22, every=20)
    assert [(line["step"], line.get("mode"), line.get("recipe")) for line in lines] == [
        (5, "simulated", "mxfp8"),
        (10, "simulated", "mxfp8"),
        (20, None, None),  # the length of its step alone
    ]


def test_what_cannot_be_tried_is_said_once() -> None:
    (line,) = lines_of(network("tensorwise"), 12, every=12, holds=False)
    assert (line["kind"], line["of"]) == ("refused", "shadow")
    assert line["why"] == "no forward of the watched model was seen in the step"
    wrapped = type("DataParallel", (nn.Sequential,), {})(network("tensorwise"))
    (line,) = lines_of(wrapped, 12, every=12)
    assert line["why"] == "DataParallel shards or copies the model by itself"


@pytest.mark.parametrize("moves", [True, False])
def test_a_loss_that_no_step_can_change_is_no_optimizer_that_moves_nothing(moves: bool, tmp_path: Path) -> None:
    """GRPO's loss is zero whatever the weights are; they move."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD([*(model if moves else nn.Linear(8, 8)).parameters()], lr=0.1)
    with ottava.watch(model, tmp_path / "run"):
        for _ in range(12):
            y = model(torch.randn(16, 8))
            (torch.randn(16, 8) * (y - y.detach())).mean().backward()
            if not moves:
                for p in optimizer.param_groups[0]["params"]:
                    p.grad = torch.ones_like(p)
            optimizer.step()
            model.zero_grad()
    assert [f.id for f in diagnose(Run.open(tmp_path / "run")).findings] == ["O1"] * (not moves)
