"""A watched run tries itself without its casts, says what it found, and trains on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.diagnose.diagnose import diagnose
from ottava.record.reader import Run


class Net(nn.Module):
    """Dropout, batch norm, a counter and, perhaps, checkpointing: everything that a second forward disturbs."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(32, 96)
        self.norm = nn.BatchNorm1d(96)
        self.mid = nn.Linear(96, 96)
        self.down = nn.Linear(96, 32)
        self.drop, self.reentrant, self.calls = nn.Dropout(0.1), reentrant, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.drop(torch.relu(self.norm(self.up(x))))
        if self.reentrant is None:
            hidden = torch.relu(self.mid(hidden))
        else:
            hidden = checkpoint(self.mid, hidden, use_reentrant=self.reentrant)
        return self.down(hidden)


def mse(y: Tensor, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(y, 2 * x)


def trained(
    folder: Path | None,
    *,
    recipe: str = "tensorwise",
    model: Callable[[], nn.Module] = Net,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    loss: Callable[[Tensor, Tensor], Tensor] = mse,
    micro: int = 1,
    steps: int = 11,
    lr: float = 1e-3,
    spoil: Callable[[nn.Module], object] = lambda net: None,
    convert: Callable[[nn.Module], object] | None = None,
    **settings: Any,
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """All tensors after a short training, and the lines of its experiments; folder None: it is not watched."""
    torch.manual_seed(0)
    net = model()
    if convert is not None:
        convert(net)
    elif recipe:
        ottava.convert(net, recipe)
    spoil(net)
    stepper = optimizer(net.parameters(), lr=lr)
    watch = None if folder is None else ottava.watch(net, folder, **settings)
    for _ in range(steps):
        for _ in range(micro):
            x = torch.randn(256, 32)
            (loss(net(x), x) / micro).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad()
    after = {name: t.clone() for name, t in net.state_dict().items()} | {"random": torch.rand(3)}
    for i, state in enumerate(stepper.state.values()):
        after |= {f"{i}.{k}": v.clone() for k, v in state.items() if isinstance(v, Tensor)}
    after["calls"] = torch.tensor(getattr(net, "calls", 0))
    if watch is None or folder is None:
        return after, []
    watch.close()
    return after, Run.open(folder).experiments


CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd, accumulation": {"optimizer": torch.optim.SGD, "micro": 2},
    "delayed": {"recipe": "delayed"},
    "checkpointing": {"model": lambda: Net(False)},
    "reentrant checkpointing": {"model": lambda: Net(True)},
    "nothing cast": {"recipe": ""},
}


@pytest.mark.parametrize("case", CASES)
def test_training_keeps_every_bit_and_the_shadow_repeats_it(case: str, tmp_path: Path) -> None:
    alone, _ = trained(None, **CASES[case])
    watched, lines = trained(tmp_path / "run", **CASES[case])
    assert {name for name in alone if not torch.equal(alone[name], watched[name])} == set()
    assert [line["step"] for line in lines] == [5, 10]
    for line in lines:
        assert line["kind"] == "shadow", line
        assert (line["reproduces"], line["tail"]) == (True, "replayed"), line
        assert line["mode"] == ("real" if case != "nothing cast" else "simulated")
        assert 0.005 < line["error"] < 0.15  # healthy 8-bit casts
        assert 0.0 < line["noise"] < 0.5
        assert abs(line["bias"]) < line["error"]
        assert len(line["worst"]) == 5
        assert line["loss"] != line["loss_without"]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * 3.0


def _through(y: Tensor, x: Tensor) -> Tensor:
    return mse(_Through.apply(y), x)


class _Counts:
    """A loss with a memory: called twice, it would be another one."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, y: Tensor, x: Tensor) -> Tensor:
        self.calls += 1
        return mse(y, x) * (1 + 0.01 * self.calls)


def test_a_loss_with_a_function_of_its_own_is_replaced_by_the_gradients_that_came_back(tmp_path: Path) -> None:
    _, lines = trained(tmp_path / "run", loss=_through)
    found = [(line["tail"], line["reproduces"], line["loss_without"]) for line in lines]
    assert found == [("recorded", True, None)] * 2
    assert "autograd.Function" in lines[0]["why_recorded"]


def test_nobody_calls_the_loss_function_twice(tmp_path: Path) -> None:
    loss = _Counts()
    _, lines = trained(tmp_path / "run", loss=loss)
    assert loss.calls == 11
    assert all(line["reproduces"] and line["tail"] == "replayed" for line in lines)


def _underflowing(net: nn.Module) -> None:
    """A margin under which most numbers of the input of `mid` underflow in its forward."""
    recipe = ottava.get_recipe("tensorwise")
    assert recipe.fprop.lhs is not None
    spec = replace(recipe.fprop.lhs, margin=16)
    ottava.convert(net, recipe.override("mid", fprop=replace(recipe.fprop, lhs=spec)))


def test_a_margin_that_makes_an_operand_underflow_is_seen(tmp_path: Path) -> None:
    _, lines = trained(tmp_path / "run", convert=_underflowing)
    shadows = [line for line in lines if line["kind"] == "shadow"]
    assert all(line["error"] > 0.15 for line in shadows)
    (found,) = (line for line in lines if line["kind"] == "ablation")
    assert found["set"] == [{"layer": "mid", "gemm": "fprop", "operand": "input"}]
    assert found["error_after"] < found["error_before"] / 2
    assert found["trials"] <= 40


@pytest.mark.parametrize(
    ("recipe", "optimizer", "lost"),
    [
        ("tensorwise_e4m3", torch.optim.Adam, True),
        ("tensorwise", torch.optim.Adam, False),
        ("tensorwise_e4m3", torch.optim.SGD, False),
    ],
)
def test_small_elements_that_casts_make_zero_are_told_of_an_optimizer_that_moves_them(
    recipe: str, optimizer: Callable[..., torch.optim.Optimizer], lost: bool, tmp_path: Path
) -> None:
    """Half of the outputs weigh a ten millionth: E4M3's gradients are zero there, and the gradient is as long."""
    weigh = torch.where(torch.arange(32) < 16, 1.0, 1e-7)
    _, lines = trained(
        tmp_path, recipe=recipe, optimizer=optimizer, loss=lambda y, x: (weigh * (y - 2 * x).square()).mean()
    )
    shadows = [line for line in lines if line["kind"] == "shadow"]
    assert all((line["lost"] > 0.05) == (recipe == "tensorwise_e4m3") and line["error"] < 0.15 for line in shadows)
    assert [f.title for f in diagnose(Run.open(tmp_path)).findings] == ["FP8 casts lose a tensor: down"] * lost


def test_a_learning_rate_that_is_too_high_is_not_the_casts(tmp_path: Path) -> None:
    _, lines = trained(tmp_path / "run", lr=0.3, optimizer=torch.optim.SGD)
    assert all(line["error"] < 0.15 for line in lines), [line["error"] for line in lines]


def test_zero_switches_experiments_off(tmp_path: Path) -> None:
    assert trained(tmp_path / "run", shadow=0)[1] == []


def test_torchao_runs_without_its_casts(tmp_path: Path) -> None:
    float8 = pytest.importorskip("torchao.float8")

    def convert(net: nn.Module) -> None:
        config = float8.Float8LinearConfig(emulate=True)
        float8.convert_to_float8_training(net, config=config, module_filter_fn=lambda m, name: name == "mid")

    alone, _ = trained(None, convert=convert)
    watched, lines = trained(tmp_path / "run", convert=convert)
    assert all(torch.equal(alone[name], watched[name]) for name in alone)
    assert [line["recipe"] for line in lines] == ["torchao TENSORWISE"] * 2
    assert all(line["reproduces"] and 0.005 < line["error"] < 0.15 for line in lines)
    assert {entry["parameter"] for entry in lines[0]["worst"]} & {"mid.weight", "mid.bias", "up.weight"}


class _ReturnsLoss(nn.Module):
    """As Hugging Face's models: labels go in, a dataclass with the loss comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.net(x)
        return {"loss": mse(y, x), "logits": y}


def test_a_model_that_returns_its_loss(tmp_path: Path) -> None:
    _, lines = trained(tmp_path / "run", model=_ReturnsLoss, loss=lambda out, x: out["loss"])
    assert all(line["reproduces"] and line["tail"] == "replayed" for line in lines)
    assert all(0.0 < line["noise"] < 0.5 and line["error"] < 0.15 for line in lines)
    _, plain = trained(tmp_path / "plain")
    assert [line["norm"] for line in lines] == [line["norm"] for line in plain]  # no path counts twice


def test_a_grad_scaler_and_autocast_are_repeated(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with ottava.watch(None, tmp_path / "run") as watch:
        for _ in range(6):
            x = torch.randn(64, 64)
            with torch.autocast("cpu", torch.bfloat16):
                loss = mse(net(x), x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    (line,) = Run.open(watch.folder).experiments
    assert (line["mode"], line["reproduces"], line["tail"]) == ("simulated", True, "replayed"), line
    assert 1.0 < line["loss"] < 10.0  # unscaled
    assert line["norm"] < 10.0


def test_modules_under_the_names_of_transformer_engine(tmp_path: Path) -> None:
    from ottava.compat.transformer_engine import pytorch as te
    from ottava.compat.transformer_engine.common.recipe import DelayedScaling

    torch.manual_seed(0)
    net = nn.Sequential(te.Linear(64, 128), nn.GELU(), te.LayerNormLinear(128, 64))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with ottava.watch(net, tmp_path / "run") as watch:
        for _ in range(6):
            x = torch.randn(64, 64)
            with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling()):  # scales change before the shadow
                y = net(x)
            mse(y.float(), x).backward()
            optimizer.step()
            optimizer.zero_grad()
    (line,) = Run.open(watch.folder).experiments
    assert (line["mode"], line["recipe"], line["reproduces"]) == ("real", "DelayedScaling", True), line
    assert 0.005 < line["error"] < 0.15
