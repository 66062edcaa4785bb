"""Checkpoints: whole or absent, checked when read, and the newest readable one is found."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from ottava.bench.models import PlainByteTransformer
from ottava.engine.state import ScalingState
from ottava.nn.convert import convert
from ottava.train.checkpoint import (
    _FORMAT,
    HEADER,
    CheckpointError,
    _digest,
    _order_of,
    _renamed,
    collect_state,
    consolidate,
    find_checkpoint,
    newest_checkpoint,
    newest_of_run,
    prune,
    read_any,
    read_checkpoint,
    read_header,
    remove_temporary_files,
    restore_state,
    restore_weights,
    save_checkpoint,
    whole_checkpoint,
)
from ottava.train.config import ModelConfig
from ottava.train.model import ByteTransformer, loss

TENSORS = {
    "model.weight": torch.tensor([1.0, -0.0, float("inf"), 1e-45]),
    "model.fp8": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "optimizer.weight.step": torch.tensor(3.0),
    "model.empty": torch.empty(0),
}


def save(folder: Path, step: int, keep: int = 9) -> Path:
    return save_checkpoint(folder, step, TENSORS, {"config": "abc"}, keep=keep)


def test_what_is_read_is_what_was_saved_to_the_bit(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(save(tmp_path / "new", 200))
    assert checkpoint.path.name == "step-000200.safetensors"
    assert (checkpoint.step, checkpoint.metadata["config"]) == (200, "abc")
    assert set(checkpoint.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        got = checkpoint.tensors[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    # readable without us: eight bytes of length, then JSON
    content = checkpoint.path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    assert (header["step"], header["config"]) == ("200", "abc")


def test_keeps_the_newest_and_never_counts_later_ones(tmp_path: Path) -> None:
    """A damaged step 40 was skipped, and steps 10 and 20 are saved again: 40 must not push them out."""
    for step in (10, 20, 30):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000020.safetensors", "step-000030.safetensors"]
    (tmp_path / "step-000040.safetensors").write_bytes(b"damaged")
    save(tmp_path, 35, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000030.safetensors",
        "step-000035.safetensors",
        "step-000040.safetensors",
    ]


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """Damage in the header, too: with step 3 in place of 2 another run would resume."""
    path = save(tmp_path, 2)
    content = path.read_bytes()
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(CheckpointError):
            read_checkpoint(path)
    step = content.index(b'"step":"2"') + 8
    path.write_bytes(content[:step] + b"3" + content[step + 1 :])
    with pytest.raises(CheckpointError, match="hash of its header and tensors"):
        read_checkpoint(path)


def test_step_that_is_no_number_falls_back_to_the_older_checkpoint(tmp_path: Path) -> None:
    """The hash fits such a header."""
    save(tmp_path, 1)
    for step in ("abc", "", "-1", "1.5", None):
        header = {"format": _FORMAT} | ({} if step is None else {"step": step})
        save_file(TENSORS, tmp_path / "step-000002.safetensors", {**header, "sha256": _digest(header, TENSORS)})
        checkpoint, problems = newest_checkpoint(tmp_path)
        assert checkpoint is not None
        assert checkpoint.step == 1
        assert f"has step {step!r}; needed: a whole number" in problems[0]


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of a file as POSIX does")
def test_full_disk_leaves_the_older_checkpoint_and_no_litter(tmp_path: Path) -> None:
    import resource

    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"step-000002\.safetensors: cannot be written.*Make room, then continue"
        ):
            save(tmp_path, 2, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001.safetensors"]
    assert read_checkpoint(tmp_path / "step-000001.safetensors").step == 1


def test_weights_alone_are_taken_into_a_model_of_another_recipe(tmp_path: Path) -> None:
    model, optimizer = build(0)
    train(model, optimizer, range(3))
    checkpoint = read_checkpoint(save_checkpoint(tmp_path, 3, collect_state(model, optimizer), {}, keep=1))
    for recipe in ("delayed", "bf16"):
        other, _ = build(1, recipe)
        restore_weights(checkpoint, other)
        assert all(torch.equal(p, q) for p, q in zip(other.parameters(), model.parameters(), strict=True))
        assert not any(value.any() for name, value in other.state_dict().items() if name.endswith("amax_history"))
    narrow = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))
    for stranger in (narrow, nn.Sequential(nn.Linear(64, 64)), nn.Sequential(*other, nn.Linear(32, 32))):
        with pytest.raises(CheckpointError, match="does not fit this run's model"):
            restore_weights(checkpoint, stranger)


def test_checkpoint_to_start_from_is_found_in_a_run_or_by_its_name(tmp_path: Path) -> None:
    """Temporary files stay: their run may still be writing."""
    path = save(tmp_path / "checkpoints", 4)
    (tmp_path / "checkpoints" / ".step-000005.safetensors.part").write_bytes(b"being written")
    for source in (tmp_path, path):
        checkpoint, problems = find_checkpoint(source)
        assert (checkpoint.path, problems) == (path, [])
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    (tmp_path / "empty").mkdir()
    for source, said in ((tmp_path / "empty", "holds no checkpoint"), (tmp_path / "none", "none: does not exist")):
        with pytest.raises(CheckpointError, match=said):
            find_checkpoint(source)
    torn = save(tmp_path / "checkpoints", 5)
    torn.write_bytes(torn.read_bytes()[:-1])
    assert find_checkpoint(tmp_path)[0].path == path
    with pytest.raises(CheckpointError, match=f"000005.*the newest that is whole is {re.escape(str(path))}"):
        whole_checkpoint(tmp_path)  # what is exported is the last step, or what was named
    assert whole_checkpoint(path).path == path


def test_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step-000001.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match="is not a checkpoint of `ottava train`"):
        read_checkpoint(path)


def test_newest_readable_is_used_and_the_others_are_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    third = save(tmp_path, 3)
    third.write_bytes(third.read_bytes()[:-5])
    (tmp_path / ".step-000004.safetensors.part").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not ours")
    checkpoint, problems = newest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert len(problems) == 1
    assert "step-000003" in problems[0]
    remove_temporary_files(tmp_path)
    assert not list(tmp_path.glob(".*"))
    assert (tmp_path / "notes.txt").exists()


def test_no_checkpoint_is_fine_but_none_readable_is_not(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") == (None, [])
    assert newest_checkpoint(tmp_path) == (None, [])
    save(tmp_path, 1).write_bytes(b"")
    with pytest.raises(CheckpointError, match="start again in another run folder"):
        newest_checkpoint(tmp_path)


def build(seed: int, recipe: str = "delayed") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
    convert(model, recipe)
    # groups in another order than named_parameters, so that state found by index alone would be wrong
    groups = [{"params": [p for p in model.parameters() if p.ndim == ndim]} for ndim in (1, 2)]
    return model, torch.optim.AdamW(groups, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", torch.bfloat16):
            value = model(x).float().square().mean()
        value.backward()
        optimizer.step()
        ScalingState(model).update()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def test_restored_model_optimizer_and_histories_go_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = build(0)
    train(model, optimizer, range(3))
    state = collect_state(model, optimizer)
    assert {name for name in state if "amax_history" in name}
    path = save_checkpoint(tmp_path, 3, state, {}, keep=1)
    expected = train(model, optimizer, range(3, 6))
    other, other_optimizer = build(1)
    restore_state(read_checkpoint(path), other, other_optimizer)
    assert train(other, other_optimizer, range(3, 6)) == expected
    for name, tensor in collect_state(model, optimizer).items():
        assert torch.equal(tensor, collect_state(other, other_optimizer)[name]), name
    stranger = nn.Sequential(nn.Linear(64, 32))
    with pytest.raises(CheckpointError, match="does not fit this run's model"):
        restore_state(read_checkpoint(path), stranger, torch.optim.AdamW(stranger.parameters()))


def test_a_checkpoint_of_the_model_with_its_norms_apart_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Format 2: weights, moments and the state of scales come to the names of today, and the log says so."""
    small = ModelConfig(d_model=32, layers=2, heads=4, kv_heads=2, ffn=48)
    old, new = PlainByteTransformer(small, 8), ByteTransformer(small, 8)
    optimizers = []
    for model in (old, new):
        convert(model, "delayed")
        optimizers.append(torch.optim.AdamW(model.parameters(), lr=1e-2))
    loss(old, *torch.randint(0, 256, (2, 2, 8))).backward()
    optimizers[0].step()
    monkeypatch.setattr("ottava.train.checkpoint._FORMAT", "ottava.train.checkpoint/2")
    path = save_checkpoint(tmp_path, 7, collect_state(old, optimizers[0]), {}, keep=1)
    monkeypatch.undo()
    with caplog.at_level("INFO"):
        restore_state(read_checkpoint(path), new, optimizers[1])
    assert "step-000007.safetensors: an earlier ottava wrote it" in caplog.text
    want, got = collect_state(old, optimizers[0]), collect_state(new, optimizers[1])
    assert {_renamed(name) for name in want} == set(got)
    assert all(torch.equal(got[_renamed(name)], tensor) for name, tensor in want.items())
    assert sum("norm.weight.exp_avg" in name for name in got) == 2 * (2 * 2 + 1)


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
        read_any(folder)
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


def test_files_and_folders_are_one_order(tmp_path: Path) -> None:
    same = {"config": "c", "text": "t"}
    save_checkpoint(tmp_path, 2, {"a": torch.ones(1)}, same, keep=5)
    folder_of(tmp_path, model__a=torch.ones(2))
    found = newest_of_run(tmp_path, same, whole=True)
    assert found is not None
    assert (found.step, found.path.name) == (4, "step-000004")
    assert find_checkpoint(tmp_path / "step-000004")[0].step == 4
    with pytest.raises(CheckpointError, match="comes from a run with another text"):
        newest_of_run(tmp_path, {"config": "c", "text": "other"}, whole=False)
    next(found.path.glob("*.safetensors")).unlink()
    older = newest_of_run(tmp_path, same, whole=True)
    assert older is not None
    assert older.step == 2
    prune(tmp_path, 4, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]
    assert newest_of_run(tmp_path / "none", same, whole=True) is None


@pytest.mark.skipif(sys.platform == "win32", reason="needs FIFOs")
def test_a_fifo_in_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    """A checkpoint, a shard, and the records of a run: a reader would wait forever."""
    os.mkfifo(tmp_path / "step-000001.safetensors")
    with pytest.raises(CheckpointError, match="is a FIFO"):
        read_checkpoint(tmp_path / "step-000001.safetensors")
    with pytest.raises(CheckpointError, match="is a FIFO"):
        consolidate(tmp_path, tmp_path / "new", keep=True)


def test_a_header_names_files_of_its_folder_only(tmp_path: Path) -> None:
    facts = {"format": "ottava.train.shards/1", "step": "1", "files": {"../outside": 1}}
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / HEADER).write_text(json.dumps(facts))
    (tmp_path / "outside").write_text("x")
    with pytest.raises(CheckpointError, match=r"names '\.\./outside', which is no file of this folder"):
        read_header(tmp_path / "step-000001")
