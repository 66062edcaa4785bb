"""One process reads checkpoint folders; several write them in tests/distributed/train_scenarios.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from ottava.train.checkpoint import HEADER, CheckpointError, _order_of, consolidate, read_any, read_header, read_whole


def folder_of(tmp_path: Path, **tensors: Tensor) -> Path:
    """One process writes it, with the header of several."""
    folder = tmp_path / "step-000004"
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save({name.replace("__", "."): tensor for name, tensor in tensors.items()}, storage_writer=writer, no_dist=True)
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
    header = {"format": "ottava.train.shards/1", "step": "4", "config": "c", "text": "t", "files": sizes}
    (folder / HEADER).write_text(json.dumps(header))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    weight = torch.arange(6.0).view(2, 3)
    codes = weight.to(torch.float8_e4m3fn)
    states = {"optimizer__a__weight__exp_avg": weight + 1, "random__0__cpu": torch.zeros(4, dtype=torch.uint8)}
    return folder_of(tmp_path, model__a__weight=weight, model__a__codes=codes, **states)


def test_a_folder_is_read_whole(folder: Path) -> None:
    found = read_whole(folder)
    assert found.step == 4
    assert found.metadata["config"] == "c"
    assert set(found.tensors) == {"model.a.weight", "model.a.codes", "optimizer.a.weight.exp_avg", "random.cpu"}
    assert torch.equal(found.tensors["model.a.weight"], torch.arange(6.0).view(2, 3))
    assert torch.equal(found.tensors["model.a.codes"].float(), torch.arange(6.0).view(2, 3))
    assert read_any(folder, whole=False).tensors == {}


def test_one_file_of_a_folder(folder: Path, tmp_path: Path) -> None:
    assert consolidate(folder, tmp_path / "model", keep=False) == {"tensors": 2, "bytes": 24 + 6}
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == {"a.weight", "a.codes"}
    assert consolidate(folder, tmp_path / "all", keep=True)["tensors"] == 4
    with pytest.raises(CheckpointError, match="exists; give a new folder"):
        consolidate(folder, tmp_path / "all", keep=True)


def test_damage_is_named(folder: Path, tmp_path: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"is missing, cut short or damaged; ottava.json lists it with \d+ bytes"):
        read_header(folder)
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        consolidate(folder, tmp_path / "no", keep=False)
    file.write_bytes(b"\xff" * len(whole))
    with pytest.raises(CheckpointError, match="a file of it is damaged"):
        read_whole(folder)
    header = '{"format": "ottava.train.shards/1", "step": "4", "files": []}'
    for text in ("{", "[]", "{}", header, header.replace("4", "x").replace("[]", "{}")):
        (folder / HEADER).write_text(text)
        with pytest.raises(CheckpointError):
            read_header(folder)
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        read_header(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no safetensors files"):
        consolidate(tmp_path / "empty", tmp_path / "no", keep=False)
    assert not (tmp_path / "no").exists()


def test_the_order_of_a_fused_weight_is_that_of_its_moments() -> None:
    order = torch.tensor([1, 0])
    orders = {"layers.0.qkv.weight": order}
    for name in ("model.layers.0.qkv.weight", "optimizer.layers.0.qkv.weight.exp_avg"):
        assert _order_of(name, orders) is order
    for name in ("model.layers.0.o.weight", "optimizer.layers.0.qkv.weight.step", "model.layers.0.qkv.weight.x.y"):
        assert _order_of(name, orders) is None
