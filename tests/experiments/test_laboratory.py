"""When a watched run experiments, what the step does to its own batch, and what a run without casts gets."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import ottava
from ottava.experiments.laboratory import EARLY
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


def test_a_step_makes_its_own_batch_better_unless_it_is_too_long(tmp_path: Path) -> None:
    """SGD on one batch: a short step goes down, one of a hundred times the stable length goes up."""
    for lr, better in ((0.05, True), (100.0, False)):
        first = next(e for e in trained(tmp_path / str(lr), convert=True, lr=lr, steps=6).experiments)
        assert first["tail"] == "replayed"
        assert (first["loss_after"] < first["loss"]) is better, first


def test_no_experiment_if_nobody_wants_one(tmp_path: Path) -> None:
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, tmp_path / "run", shadow=0):
        for _ in range(6):
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
    assert Run.open(tmp_path / "run").experiments == []
