"""`ottava bisect` on a trained run, a checkpoint, and dumped operands."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import command
from ottava.recipe import RECIPES
from ottava.record.dumps import Dumper, DumpError, save_batch
from ottava.record.writer import RunWriter
from ottava.train.checkpoint import CheckpointError, _digest
from ottava.train.config import load_config
from ottava.train.loop import Trainer

SMALL = ["steps=2", "model.layers=2", "model.d_model=64", "model.heads=2", "model.kv_heads=1", "model.ffn=96"]
SMALL += ["batch_size=2", "sequence_length=32", "evaluation.batches=1"]
SMALL += [f"data.path={Path(__file__).parents[2] / 'LICENSE'}"]  # one text under every Python
run = partial(command.run, "bisect")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps under delayed scaling."""
    folder = tmp_path_factory.mktemp("runs") / "delayed"
    Trainer(load_config(None, [*SMALL, "recipe=delayed"]), folder).advance()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_reads_a_run_and_changes_nothing_in_it(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, random = contents(trained), torch.get_rng_state()
    assert run(trained) == 0
    out, err = capsys.readouterr()
    assert "step-000002.safetensors, batch of step 3" in out
    assert "spread over many layers" in out
    assert "fprop in all 8 layers: error" in err
    assert contents(trained) == before
    assert torch.equal(torch.get_rng_state(), random)


def test_finds_a_scale_that_was_broken_in_a_checkpoint(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scale looks like that of a damaged history. The command names layer and tensor, and exits with 1."""
    newest = trained / "checkpoints" / "step-000002.safetensors"
    with safe_open(newest, "pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors["model.layers.1.mlp.down_proj.quantizers.input.amax_history"].mul_(1e-6)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    broken = tmp_path / "checkpoints" / newest.name
    save_file(tensors, broken, metadata={**header, "sha256": _digest(header, tensors)})
    assert run(broken, "--json", "--step", "1") == 1
    values = json.loads(capsys.readouterr().out)
    suspect = values["suspect"]
    assert (suspect["layer"], suspect["tensor"]) == ("layers.1.mlp.down_proj", "input")
    assert suspect["evidence"]["overflow_pct"] > 10
    assert (values["step"], values["recipe"]) == (1, "delayed")


def test_another_recipe_a_dumped_batch_and_the_loss(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = torch.randint(256, (2, 32)), torch.randint(256, (2, 32))
    batch = save_batch(tmp_path / "batch.safetensors", pair, step=77)
    run(trained, "--batch", batch, "--recipe", "tensorwise", "--target", "loss", "--json")
    values = json.loads(capsys.readouterr().out)
    assert (values["step"], values["recipe"], values["target"]) == (77, "tensorwise", "loss")
    assert {p["what"].split()[0] for p in values["probes"]} == {"fprop"}


def test_dumped_operands_need_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    with RunWriter(tmp_path) as writer:
        x, w, dy = torch.randn(32, 64), torch.randn(48, 64), torch.randn(32, 48)
        path = Dumper(writer, 1 << 20).dump_gemms(9, "fc1", RECIPES["tensorwise"], x, w, dy)
    assert path is not None
    assert run(path) == 0
    text = capsys.readouterr().out
    assert "fc1, step 9, recipe tensorwise" in text
    assert [line.split()[0] for line in text.splitlines() if "] x " in line] == ["fprop", "dgrad", "wgrad"]
    assert run(path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["gemms"][0]["both_db"] == pytest.approx(28.5, abs=0.7)  # facts, 3.1


def test_bad_input(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.yaml.*bisect\(model, batch, loss\)"):
        run(tmp_path)
    (tmp_path / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        run(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        run(tmp_path / "gone")
    with pytest.raises(ValueError, match="needs gradient or loss"):
        run(trained, "--target", "weights")
    for step in (0, 4, 99):  # the run ends at step 2, and step 3 follows its checkpoint
        with pytest.raises(ValueError, match=f"--step {step}: is no step of the run; needs 1 to 3"):
            run(trained, "--step", str(step))
    with pytest.raises(DumpError, match="not a dump of GEMM operands"):
        run(save_batch(tmp_path / "batch.safetensors", torch.ones(1)))
