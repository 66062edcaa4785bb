"""The checkpoint that a run continues from; test_checkpoint.py and test_shards.py test damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ottava.train.checkpoint import CheckpointError, find_checkpoint, newest_of_run, prune, save_checkpoint

from .test_shards import folder_of


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
