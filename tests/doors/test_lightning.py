"""Lightning's own Trainer with the plugin: the bits of a plain loop, validation, checkpoints, refusals."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava

pl = pytest.importorskip("lightning.pytorch")
doors = pytest.importorskip("ottava.doors.lightning")

STEPS = 4


class Net(pl.LightningModule):  # type: ignore[misc,name-defined]
    """Two linears; it keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.losses: list[Tensor] = []
        self.validated: list[tuple[bool, Tensor]] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.net(batch[0]).float().square().mean()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        self.losses.append(loss := self.loss(batch))
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.validated.append((torch.is_inference_mode_enabled(), self.loss(batch)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def batches() -> Any:
    rows = torch.randn(16 * STEPS, 64, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=16)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():  # Lightning's advice about workers and loggers
        warnings.simplefilter("ignore")
        yield


def trainer(plugin: Any, folder: Path, epochs: int = 2, **settings: Any) -> Any:
    return pl.Trainer(
        plugins=[plugin],
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        **settings,
    )


def plainly(recipe: str, epochs: int = 2) -> Net:
    """The same training in a plain loop."""
    model = Net()
    ottava.convert(model, recipe)
    optimizer = model.configure_optimizers()
    for _ in range(epochs):
        for index, batch in enumerate(batches()):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = model.training_step(batch, index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_trains_with_the_bits_of_a_plain_loop(recipe: str, tmp_path: Path) -> None:
    """Weights, histories and losses. Validation before and after, in inference mode, leaves no trace."""
    model, plain = Net(), plainly(recipe)
    plugin = doors.OttavaPrecision(recipe)
    runs = trainer(plugin, tmp_path)
    runs.validate(model, batches(), verbose=False)
    before = [float(loss) for _, loss in model.validated]
    runs.fit(model, batches(), batches())
    assert len(plugin.report.converted) == 2
    assert model.net[0].last_call.recipe.name == recipe
    assert [bool(torch.equal(a, b)) for a, b in zip(model.losses, plain.losses, strict=True)] == [True] * 2 * STEPS
    assert same(model, plain)
    runs.validate(model, batches(), verbose=False)
    assert same(model, plain)
    assert [inference for inference, _ in model.validated].count(True) == 2 * STEPS
    after = [float(loss) for _, loss in model.validated[-STEPS:]]
    assert all(late < early for early, late in zip(before, after, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert float(plain.loss(next(iter(batches())))) == after[0]


@pytest.mark.parametrize("recipe, tensors", [("delayed", 34), ("mxfp8", 4)])
def test_two_ranks_have_the_bits_of_torchs_ddp(recipe: str, tensors: int, tmp_path: Path) -> None:
    """Losses, and weights with histories, on both ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(Path(__file__).with_name("lightning_ranks.py"))
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [*command, script, str(tmp_path), recipe],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert f"answers [(True, True), (True, True)] {tensors}" in done.stdout, done.stderr[-3000:]


def test_resumes_where_it_was_saved(tmp_path: Path) -> None:
    """Histories travel in the plugin's part of the checkpoint; its weights load into a BF16 model."""
    whole = Net()
    trainer(doors.OttavaPrecision("delayed"), tmp_path, 2).fit(whole, batches())
    first = trainer(doors.OttavaPrecision("delayed"), tmp_path, 1)
    first.fit(Net(), batches())
    first.save_checkpoint(tmp_path / "half.ckpt")
    assert not [key for key in torch.load(tmp_path / "half.ckpt", weights_only=False)["state_dict"] if "quant" in key]
    Net().load_state_dict(torch.load(tmp_path / "half.ckpt", weights_only=False)["state_dict"])

    resumed = Net()
    trainer(doors.OttavaPrecision("delayed"), tmp_path, 2).fit(
        resumed, batches(), ckpt_path=tmp_path / "half.ckpt", weights_only=False
    )
    assert same(resumed, whole)
    assert [float(loss) for loss in resumed.losses] == [float(loss) for loss in whole.losses[STEPS:]]

    fewer = doors.OttavaPrecision("delayed", filter=lambda name, _: name == "net.0")
    with pytest.raises(ValueError, match=r"no place for, net\.2\.quantizers\.grad_output\.amax_history"):
        trainer(fewer, tmp_path, 2).fit(Net(), batches(), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    other = Net()  # a recipe without histories drops them
    trainer(doors.OttavaPrecision("tensorwise"), tmp_path, 2).fit(
        other, batches(), ckpt_path=tmp_path / "half.ckpt", weights_only=False
    )
    assert other.net[0].last_call.recipe.name == "tensorwise"


def test_one_plugin_converts_once(tmp_path: Path) -> None:
    """fit, validate and predict of one model; true BF16; a watch around them."""
    model, plugin = Net(), doors.OttavaTruePrecision("tensorwise")
    runs = trainer(plugin, tmp_path, 1)
    with ottava.watch(model, tmp_path / "watch", every=1):
        runs.fit(model, batches(), batches())
    report = plugin.report
    runs.validate(model, batches(), verbose=False)
    assert plugin.report is report
    assert model.net[0].weight.dtype == torch.bfloat16
    assert model.net[0].last_call.recipe.name == "tensorwise"
    assert (tmp_path / "watch").is_dir()


def test_a_model_that_is_taken_already_is_refused(tmp_path: Path) -> None:
    converted, compiled = Net(), Net()
    ottava.convert(converted, "mxfp8")
    with pytest.raises(ValueError, match=r"OttavaPrecision: net\.0 is under ottava's recipe 'mxfp8' already"):
        trainer(doors.OttavaPrecision(), tmp_path).fit(converted, batches())
    compiled.net = torch.compile(compiled.net)
    with pytest.raises(ValueError, match=r"OttavaPrecision: net is compiled; hand in the plain model"):
        trainer(doors.OttavaPrecision(), tmp_path).fit(compiled, batches())
    with pytest.raises(ValueError, match="unknown recipe 'mxfp9'; did you mean 'mxfp8'"):
        doors.OttavaPrecision("mxfp9")


def test_the_example_goes_on_after_its_restart(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "door_lightning.py"))
    first, second = example["main"]("delayed")
    assert second < first / 2
    assert "100.0% of the linear work in FP8" in capsys.readouterr().out
