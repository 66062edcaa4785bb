"""Remedies that are made from outside: the same weights as where the script itself is mended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
import warm
from ottava.record.reader import Run
from ottava.remedy.cure import Retrained, last_loss, retrain

INF, NAN = float("inf"), float("nan")


class Cast(torch.autograd.Function):
    """E4M3 without a scale; its backward is wrong by a factor if it is asked to be."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.to(torch.float8_e4m3fn).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * Cast.factor


class Rounding(nn.Linear):
    """Casts its input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(Cast.apply(input))  # type: ignore[no-untyped-call]


def trained(
    folder: Path | None,
    cure: Mapping[str, Any] | None = None,
    *,
    lr: float = 0.1,
    clear: bool = True,
    held: int = 4,
    linear: type[nn.Linear] = nn.Linear,
    recipe: str | None = None,
    betas: tuple[float, float] | None = None,
    factor: float = 1.0,
    prefix: str = "",
) -> dict[str, Tensor]:
    """The weights of five steps."""
    torch.manual_seed(0)
    Cast.factor = factor
    model = nn.Sequential(nn.Linear(32, 32), linear(32, 32))
    if recipe is not None:
        ottava.convert(model, recipe)
    state = {f"{prefix}{name}": x * 0.5 for name, x in model.state_dict().items()}
    parameters = [*model.parameters()][:held]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr)
    if betas is not None:
        optimizer = torch.optim.Adam(parameters, lr, betas)
    session = None if folder is None else ottava.watch(model, folder, shadow=0, **({"cure": cure} if cure else {}))
    model.load_state_dict(state, strict=False)
    x = torch.randn(16, 32) * 0.004
    for _ in range(5):
        if clear:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if session is not None:
        session.close()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("cure", "bad", "good"),
    [
        ({"lr": 0.5}, {"lr": 1.0}, {"lr": 0.5}),
        ({"schedule": [0.5]}, {"lr": 1.0}, {"lr": 0.5}),
        ({"schedule": [[0.5]]}, {"lr": 1.0}, {"lr": 0.5}),
        ({"clear": True}, {"clear": False}, {}),
        ({"settings": {"beta1": 0.5}}, {"betas": (0.9, 0.99)}, {"betas": (0.5, 0.99)}),
        ({"load": True}, {"prefix": "module."}, {}),
        ({"recipe": "bf16"}, {"recipe": "tensorwise"}, {"recipe": "bf16"}),
        ({"sites": ["test_cure.py:28"]}, {"linear": Rounding}, {}),
        ({"derivatives": True}, {"linear": Rounding, "factor": 2.0}, {}),
    ],
    ids=["lr", "schedule", "rates", "clear", "settings", "load", "recipe", "sites", "derivatives"],
)
def test_a_cure_is_the_mended_script(
    cure: dict[str, Any], bad: dict[str, Any], good: dict[str, Any], tmp_path: Path
) -> None:
    cured, wanted = trained(tmp_path / "cure", cure, **bad), trained(None, **good)
    as_it_was = trained(tmp_path / "bad", **bad)
    assert any(not torch.equal(as_it_was[n], wanted[n]) for n in wanted)
    first = "recipe" in cure or "derivatives" in cure  # made when the first step has shown what there is to change
    for name, x in wanted.items():
        if first:
            assert (cured[name] - x).norm() < (as_it_was[name] - x).norm() + 1e-12, name
        else:
            assert torch.equal(cured[name], x), name
    assert nn.Module.load_state_dict.__module__ == "torch.nn.modules.module"


def test_parameters_that_nobody_held_move(tmp_path: Path) -> None:
    start = trained(None, lr=1e-30)
    lost, held = trained(tmp_path / "bad", held=2), trained(tmp_path / "cure", {"hold": True}, held=2)
    assert torch.equal(lost["1.weight"], start["1.weight"])
    assert not torch.equal(held["1.weight"], start["1.weight"])


def test_cured_is_four_fifths_of_the_gap() -> None:
    cases = {(10.0, 1.5, 1.0): True, (10.0, 5.0, 1.0): False, (INF, 1.1, 1.0): True, (10.0, INF, 1.0): False}
    cases |= {(10.0, 5.0, NAN): None, (INF, 5.0, NAN): True, (10.0, 10.1, 9.9): None}  # type: ignore[dict-item]
    assert {key: Retrained(*key).cured for key in cases} == cases


SCRIPT = """
import sys
import torch
lr = float(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr)
x = torch.randn(16, 8)
for _ in range(30):
    optimizer.zero_grad()
    (model(x) - x).square().mean().backward()
    optimizer.step()
"""


def test_a_run_is_trained_again_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    ended = warm.run(["-m", "ottava", "watch", "--out", "bad", "--", "train.py", "1e-6"], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    bad = Run.open(tmp_path / "bad")
    came = retrain(bad, {"trial": {"lr": 1e6}}, tmp_path / "cure")
    assert came.cure < 0.5 * came.bad == 0.5 * last_loss(bad)
    assert came.cured is None
    assert retrain(bad, {"trial": {"lr": 1e6}}, tmp_path / "cure") == came
    assert retrain(bad, {"trial": {"lr": 1.0}}, tmp_path / "cure").cure > came.cure
    assert (tmp_path / "cure-2" / "watch.json").is_file()
    assert "Trained again with it: the loss at the end is" in str(came)
    with pytest.raises(ValueError, match="only a person can make this change"):
        retrain(bad, {"trial": None}, tmp_path / "none")
    (tmp_path / "train.py").write_text("raise RuntimeError('no data')", encoding="utf-8")
    with pytest.raises(ValueError, match="ended before its first step: RuntimeError: no data"):
        retrain(bad, {"trial": {"lr": 1e6}}, tmp_path / "fails")


def test_a_schedule_goes_on_in_the_optimizer_of_a_resume(tmp_path: Path) -> None:
    model, rates, seen = nn.Linear(4, 4), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], []
    with ottava.watch(model, tmp_path, shadow=0, cure={"schedule": rates}):
        for _ in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for _ in range(3):
                before = model.bias.detach().clone()
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                seen.append(float((before - model.bias)[0].detach()) / 2)
            del optimizer
    assert seen == pytest.approx(rates, rel=1e-5)
