"""The folder of a run: lines that survive, files that are whole, facts that are true."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

import ottava
import warm
from ottava.base.settings import ConfigError
from ottava.lab.study import LabSettings
from ottava.recipe import get_recipe
from ottava.train import loop
from ottava.train.checkpoint import CheckpointError
from ottava.train.config import TrainConfig
from ottava.train.run_folder import FolderLock, RunFolder, StepRecord


def record(step: int, **changes: float) -> StepRecord:
    values = {"loss": 0.1 + 0.2, "grad_norm": 1e-300, "lr": 1 / 3, "seconds": 0.5, "val_loss": None, **changes}
    return StepRecord(step=step, tokens=2048, **values)  # type: ignore[arg-type]


def filled(path: Path, steps: int) -> RunFolder:
    folder = RunFolder(path, TrainConfig(), resume=False)
    folder.begin(0, {})
    for step in range(1, steps + 1):
        folder.append(record(step))
    return folder


def test_history_is_cut_to_the_step_and_grows_from_there(tmp_path: Path) -> None:
    folder = filled(tmp_path / "run", 5)
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as torn:
        torn.write(b'{"step": 6, "los')
    assert folder.cut_history(3) == [record(1), record(2), record(3)]
    folder.append(record(4, loss=9.0))
    assert folder.cut_history(4) == [record(1), record(2), record(3), record(4, loss=9.0)]
    assert folder.cut_history(0) == []
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == b""


def test_missing_or_damaged_lines_are_refused(tmp_path: Path) -> None:
    folder = filled(tmp_path / "run", 3)
    with pytest.raises(CheckpointError, match="does not hold steps 1 to 4"):
        folder.cut_history(4)
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(lines[0] + "nonsense\n" + lines[2])
    with pytest.raises(CheckpointError, match="has a line without a step"):
        folder.cut_history(3)
    assert folder.cut_history(1) == [record(1)]
    for damaged in ("[]", "5", "[" * 5000, lines[1].replace("2048", '"many"'), lines[1].replace("2048", "10" * 50)):
        metrics.write_text(lines[0] + damaged.rstrip("\n") + "\n" + lines[2])
        with pytest.raises(CheckpointError, match="has a line without a step"):
            folder.cut_history(3)


def test_folder_of_a_run_killed_in_its_first_moment_may_be_used(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / ".config.yaml.part").write_text("half of it")
    for resume in (False, True):
        RunFolder(run, TrainConfig(), resume=resume)


def test_path_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run"
    file.write_text("")
    for path in (file, file / "below", file / "far" / "below"):
        with pytest.raises(ConfigError, match=rf"^{path}: cannot be a run folder: {file} is a file; needed: a folder"):
            RunFolder(path, TrainConfig(), resume=False)
    with pytest.raises(ConfigError, match="cannot be a run folder: File name too long"):
        RunFolder(tmp_path / ("x" * 300), TrainConfig(), resume=False)


def test_other_recipe_spelled_out_is_shown_by_its_cells(tmp_path: Path) -> None:
    run = tmp_path / "run"
    spelled_out = TrainConfig(recipe={"name": "mine"})
    RunFolder(run, spelled_out, resume=False).begin(0, {})
    RunFolder(run, spelled_out, resume=True)
    with pytest.raises(ConfigError, match=r"recipe: None, now 'bf16'\n  recipe.name: 'mine', now None") as refused:
        RunFolder(run, TrainConfig(recipe="bf16"), resume=True)
    assert f"ottava train --init {run} --run-dir NEW" in str(refused.value)


def test_a_checkout_on_the_path_has_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no metadata of an installation then."""
    monkeypatch.delattr("importlib.metadata.distribution")
    RunFolder(tmp_path / "run", TrainConfig(), resume=False).begin(0, {})
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["versions"]["ottava"] == loop._versions()["ottava"] == ottava.__version__
    assert LabSettings(recipes=(get_recipe("bf16"),)).key(get_recipe("bf16"), 0)


def test_manifest_keeps_the_first_process_and_lists_the_others(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", TrainConfig(), resume=False)
    folder.begin(0, {"parameters": 5})
    folder.begin(40, {"parameters": 6})
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["parameters"] == 5
    assert [entry["at_step"] for entry in manifest["resumed"]] == [40]
    assert manifest["resumed"][0]["versions"] == manifest["versions"]


def test_damaged_manifest_is_set_aside_and_a_new_one_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(tmp_path / "run", TrainConfig(), resume=False)
    folder.begin(0, {"parameters": 5})
    manifest = tmp_path / "run" / "manifest.json"
    whole = json.loads(manifest.read_text())
    for damaged in ("{", "[]", "null", "[" * 5000, "{}", json.dumps(whole | {"resumed": 3})):
        manifest.write_text(damaged)
        caplog.clear()
        folder.begin(40, {"parameters": 6})
        assert "manifest.json: is damaged" in caplog.text
        assert "it was renamed to manifest.json.damaged, and a new one begins" in caplog.text
        assert (tmp_path / "run" / "manifest.json.damaged").read_text() == damaged
        again = json.loads(manifest.read_text())
        assert again.keys() == whole.keys()
        assert [entry["at_step"] for entry in again["resumed"]] == [40]


def test_commit_is_that_of_the_source_or_none(tmp_path: Path) -> None:
    """None unless git itself tracks the file that runs: a repository around a virtual environment does not count."""
    folder = RunFolder(tmp_path / "run", TrainConfig(), resume=False)
    folder.begin(0, {})
    commit = json.loads((tmp_path / "run" / "manifest.json").read_text())["commit"]
    source = Path(__file__).parents[2] / "src" / "ottava"
    tracked = subprocess.run(["git", "ls-files", "train/run_folder.py"], cwd=source, capture_output=True, text=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=source, capture_output=True, text=True)
    if tracked.returncode or not tracked.stdout:
        assert commit is None
    else:
        assert commit.removesuffix("-dirty") == head.stdout.strip()


HOLD = """
import sys
import time
from pathlib import Path
from ottava.train.run_folder import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(300)
"""


def test_folder_of_another_process_is_refused_until_that_one_is_gone(tmp_path: Path) -> None:
    """A killed process cleans up nothing, so its lock file stays."""
    run = tmp_path / "run"
    other = warm.Warm(["-c", HOLD, str(run)])
    other.wait_for("held\n")
    with pytest.raises(ConfigError, match=rf"{run}: is in use by process {other.pid} on .*Two processes would spoil"):
        FolderLock(run)
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert (run / ".lock").exists()
    lock = FolderLock(run)
    assert f"process {os.getpid()} on " in (run / ".lock").read_text()
    lock.release()
    assert not (run / ".lock").exists()


def test_what_was_made_for_the_lock_alone_goes_with_it(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "a" / "b")
    with pytest.raises(ConfigError, match="is in use by process"):
        FolderLock(tmp_path / "a" / "b")
    lock.release()
    lock.release()  # again is nothing
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="wrong"), FolderLock(tmp_path / "a").released_on_error():
        raise RuntimeError("wrong")
    assert list(tmp_path.iterdir()) == []
    lock = FolderLock(tmp_path / "a" / "b")
    (tmp_path / "a" / "kept").touch()
    del lock  # collected: released
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept"]


def test_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    FolderLock(tmp_path)
    assert "the file system has no locks" in caplog.text
