"""`ottava train` as a person runs it: what it prints, writes and exits with."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import warm
from ottava.cli.app import main
from ottava.train.config import TrainConfig, load_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.yaml"
TINY = [
    "--set=model={d_model: 32, layers: 1, heads: 2, kv_heads: 1, ffn: 48}",
    "--set=data.max_bytes=200000",
    "--set=batch_size=4",
    "--set=sequence_length=32",
    "--set=steps=12",
    "--set=evaluation={every: 5, batches: 2}",
]


@dataclass(frozen=True)
class Finished:
    code: int | str | None
    out: str
    err: str


Command = Callable[..., Finished]


@pytest.fixture
def ottava(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command, run in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> Finished:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Finished(caught.value.code, captured.out, captured.err)

    return call


def test_run_prints_progress_and_result_and_goes_into_its_folder(ottava: Command, tmp_path: Path) -> None:
    done = ottava("train", EXAMPLE, *TINY)
    assert (done.code, done.err) == (0, "")
    assert "4 of 5 linear layers under recipe 'tensorwise'" in done.out
    assert re.search(r"step 12/12: validation loss \d\.\d{4} nats per byte", done.out)
    assert re.search(r"tensorwise: 12 of 12 steps, validation loss \d\.\d{4} nats per byte, [\d,]+ tokens/s", done.out)
    assert (tmp_path / "runs" / "train" / "checkpoints" / "step-000012.safetensors").exists()
    again = ottava("train", EXAMPLE, *TINY)
    assert (again.code, again.out) == (2, "")
    assert "is not empty; give another run folder, or continue its run with --resume" in again.err
    finished = ottava("train", "--resume", "--run-dir", "runs/train")
    assert finished.code == 0
    assert finished.out.splitlines()[-1] == done.out.splitlines()[-1]


def test_json_is_one_object_on_stdout_and_the_rest_on_stderr(ottava: Command) -> None:
    done = ottava("train", *TINY, "--json", "--set=recipe=bf16")
    assert done.code == 0
    result = json.loads(done.out)
    assert result["schema_version"] == 1
    assert (result["recipe"], result["step"], result["steps"]) == ("bf16", 12, 12)
    assert (result["interrupted"], result["diverged"]) == (False, False)
    assert 3 < result["val_loss"] < 6
    assert "step 12/12" in done.err


def test_print_config_shows_what_would_run_and_writes_nothing(ottava: Command, tmp_path: Path) -> None:
    done = ottava("train", "--print-config", "--set=steps=7")
    assert done.code == 0
    assert not list(tmp_path.iterdir())
    saved = tmp_path / "a.yaml"
    saved.write_text(done.out)
    assert load_config(saved) == TrainConfig(steps=7)
    as_json = json.loads(ottava("train", saved, "--print-config", "--json").out)
    assert (as_json.pop("schema_version"), as_json.pop("steps")) == (1, 7)
    assert as_json == TrainConfig().model_dump(mode="json", exclude={"steps"})


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["--set=optimizer.learning_rat=1"], 2, "ottava: unknown setting 'optimizer.learning_rat'; did you mean"),
        (["none.yaml"], 2, "ottava: none.yaml: cannot be read"),
        (["--resume"], 2, "config.yaml: cannot be read"),
        (["--set=data.path=none.txt"], 4, "none.txt: does not exist"),
        (["--set=batch_size=1000000000000"], 2, "GB of memory; cpu has"),
        (["--set=recipe={name: x, fprop: 5}"], 2, "GemmRecipe is 5; needs a mapping"),
        ([f"--set=watch={'[' * 5000}"], 2, "is nested more than"),
        (["--init=none"], 4, "none: does not exist"),
        (["--stepz"], 2, "No such option"),
    ],
)
def test_bad_input_ends_with_its_exit_code_and_a_short_message(
    arguments: list[str], code: int, said: str, ottava: Command, tmp_path: Path
) -> None:
    done = ottava("train", *arguments)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback_wherever_it_stands(ottava: Command) -> None:
    for arguments in (["--debug", "train", "--set=steps=0"], ["train", "--set=steps=0", "--debug"]):
        done = ottava(*arguments)
        assert done.code == 2
        assert "Traceback" in done.err


def test_run_folder_below_a_file_is_refused(ottava: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for command in ("train", "demo"):
        done = ottava(command, "--run-dir", "file/run")
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("ottava: file/run: cannot be a run folder: file is a file; needed: a folder.")


def test_another_recipe_starts_from_the_weights_of_a_run(ottava: Command, tmp_path: Path) -> None:
    assert ottava("train", *TINY, "--set=recipe=bf16", "--run-dir=a").code == 0
    refused = ottava("train", "--resume", "--set=recipe=delayed", "--run-dir=a")
    assert refused.code == 2
    assert "ottava train --init a --run-dir NEW --set ..." in refused.err
    done = ottava("train", *TINY, "--set=recipe=delayed", "--init=a", "--run-dir=b", "--json")
    assert done.code == 0
    before, after = (json.loads((tmp_path / run / "manifest.json").read_text())["init"] for run in "ab")
    assert before == {}
    source = str(tmp_path / "a" / "checkpoints" / "step-000012.safetensors")
    assert after == {"from": source, "step": 12, "calibration_batches": 16, "carried": ["weights"]}
    first, later = (json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[0])["loss"] for run in "ab")
    assert later < first - 0.5  # it goes on where the other ended


def test_diverged_run_is_exit_code_1(ottava: Command) -> None:
    settings = ["--set=recipe=bf16", "--set=optimizer={learning_rate: 1e38, weight_decay: 0}"]
    done = ottava("train", *TINY, *settings, "--json")
    assert done.code == 1
    result = json.loads(done.out)
    assert (result["diverged"], result["loss"]) == (True, None)
    assert result["step"] < 12


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals to another process")
@pytest.mark.parametrize(
    "number, code, word", [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_signal_finishes_the_step_saves_and_says_how_to_go_on(
    number: signal.Signals, code: int, word: str, ottava: Command, tmp_path: Path
) -> None:
    """Meanwhile no second process can take the folder."""
    steps = 100
    settings = [*TINY, f"--set=steps={steps}", "--set=checkpoint.every=0", "--set=recipe=bf16"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    arguments = ["-m", "ottava", "train", *settings, "--run-dir", str(run)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # as this process has: sums in the same order
    process = warm.Warm(arguments, env=one_thread)
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size > 1000) and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGSTOP)  # else a busy machine could let it end before its signal comes
    second = ottava("train", "--resume", "--run-dir", run)
    assert second.code == 2
    assert f"{run}: is in use by process {process.pid} on " in second.err
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    ended = process.wait()
    assert ended.returncode == code, ended.stderr
    assert ended.stderr == f"{word} and saved; continue with: ottava train --resume --run-dir {run}\n"
    saved = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert saved < steps
    assert (run / "checkpoints" / f"step-{saved:06d}.safetensors").exists()
    assert ottava("train", "--resume", "--run-dir", run).code == 0
    assert ottava("train", *settings, "--run-dir", whole).code == 0
    curves = []
    for folder in (whole, run):
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        curves.append([{**record, "seconds": 0} for record in records])
    assert curves[0] == curves[1]
