"""`ottava consolidate`, and `ottava inspect` on a folder; what they read is tested in tests/train/test_shards.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import ottava
from ottava.cli.consolidate import consolidate
from ottava.interop.state_file import read_scaling_state


def test_a_folder_becomes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = ottava.nn.Linear(64, 64, recipe="delayed").bfloat16()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    writer = HuggingFaceStorageWriter(str(tmp_path / "shards"), save_distributed=True)
    dcp.save({f"fc.{name}": value for name, value in layer.state_dict().items()}, storage_writer=writer, no_dist=True)
    app = typer.Typer()
    app.command()(consolidate)
    words = [str(tmp_path / "shards"), str(tmp_path / "whole"), "--json"]
    assert app(args=words, standalone_mode=False) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == len(layer.state_dict())
    found = load_file(tmp_path / "whole" / "model.safetensors")
    assert torch.equal(found["fc.weight"], layer.weight)
    shown = [str(read_scaling_state(tmp_path / name)).split("\n", 1)[1] for name in ("shards", "whole")]
    assert "fc" in shown[0]
    assert shown[0] == shown[1]
