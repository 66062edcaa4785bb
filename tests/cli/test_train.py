"""`ottava train`, `demo` and `lab` as a person runs them: what they print, write and exit with."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import warm
from command import ended, run
from ottava.cli.train import _choices
from ottava.recipe import RECIPES
from ottava.train.config import TrainConfig, load_config
from warm import Warm

# --- train -----------------------------------------------------------------------------------------------------------


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
    code: int
    out: str
    err: str


Command = Callable[..., Finished]


@pytest.fixture
def ottava(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command, run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: Finished(ended(*arguments), *capsys.readouterr())


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


# --- demo ------------------------------------------------------------------------------------------------------------


SMALLEST = ("model.layers=1", "model.d_model=32", "model.heads=2", "model.ffn=32", "batch_size=2", "sequence_length=32")
COMMAND = (
    *("-m", "ottava", "demo", "--recipes", "tensorwise", "--seeds", "2"),
    *(word for setting in (*SMALLEST, "evaluation.batches=1", "data.max_bytes=60000") for word in ("--set", setting)),
)


def demo(*options: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return warm.run([*COMMAND, *map(str, options)], timeout=800)


def test_json_is_one_object_on_stdout_and_progress_is_on_stderr(tmp_path: Path) -> None:
    ran = demo("--steps", "10", "--run-dir", tmp_path, "--json")
    summary = json.loads(ran.stdout)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary["schema_version"] == 1
    assert "100 %" in ran.stderr


def test_the_page_opens_itself_but_where_nobody_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `open_page` does with the address, test_console.py tells: nothing in CI, through ssh, or in a pipe."""
    opened: list[str] = []
    monkeypatch.setattr("ottava.cli.train.open_page", opened.append)
    for name, more in (("a", ()), ("b", ("--no-open",)), ("c", ("--json",))):
        assert run(*COMMAND[2:], "--steps", "10", "--run-dir", tmp_path / name, *more) == 0
    assert opened == [(tmp_path / "a" / "report.html").as_uri()]


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The signal comes once the first line of progress is there; until then no second demo gets into the folder."""
    options = ("--steps", "5000", "--run-dir", str(tmp_path))
    process = warm.Warm([*COMMAND, *options])
    process.wait_for(" step ")
    assert ended("demo", "--resume", "--run-dir", tmp_path) == 2
    assert f"is in use by process {process.pid} on " in capsys.readouterr().err
    process.send_signal(signal.SIGINT)
    stopped = process.wait()
    assert stopped.returncode == 130
    assert f"ottava demo --resume --run-dir {tmp_path}" in stopped.stderr
    assert list(tmp_path.glob("runs/bf16-seed0/checkpoints/*.safetensors"))
    refused = demo("--steps", "10", "--run-dir", tmp_path)
    assert refused.returncode == 2
    assert "steps was 5000, now 10" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--recipes", "tensorwize"), "did you mean 'tensorwise'"),
        (("--seeds", "0"), "1 or more"),
        (("--resume",), "no demo to resume"),
        (("--data", "/nope"), "/nope: does not exist"),
    ],
)
def test_usage_errors_are_one_line_and_leave_nothing_behind(
    tmp_path: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended("demo", *options, "--run-dir", tmp_path) == (4 if "--data" in options else 2)
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_options_become_settings_only_where_given() -> None:
    assert _choices(None, None, None, None, None) == {}
    assert _choices("bf16, rowwise,", 10, 2, Path("/x"), ["a=1"]) == {
        "recipes": ("rowwise",),
        "steps": 10,
        "seeds": 2,
        "data": "/x",
        "overrides": ("a=1",),
    }
    assert _choices("rowwise", None, None, None, None, "hopper,ada")["recipes"] == ("rowwise/hopper", "rowwise/ada")
    assert _choices(None, None, None, None, None, "hopper")["recipes"] == ("tensorwise/hopper", "blockwise/hopper")
    assert _choices("all", None, None, None, None)["recipes"] == tuple(name for name in RECIPES if name != "bf16")


# --- lab -------------------------------------------------------------------------------------------------------------


CELL = "{format: E2M1, granularity: 1x32, scale_format: e8m0}"
SMALL = ("--quick", "--steps", "2", "--seeds", "2")


def test_a_killed_study_of_a_yaml_recipe_goes_on_and_writes_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9 in the middle; the same command measures what is missing, and the JSON holds what the page says."""
    monkeypatch.chdir(tmp_path)
    Path("mxfp4.yaml").write_text(
        "".join(f"{gemm}: {{lhs: {CELL}, rhs: {CELL}}}\n" for gemm in ("fprop", "dgrad", "wgrad"))
    )
    process = Warm(["-m", "ottava", "lab", "mxfp4.yaml", *SMALL], cwd=tmp_path)
    results, limit = tmp_path / "runs" / "lab" / "results", time.monotonic() + 600
    while not (results.is_dir() and any(results.glob("*.json"))) and time.monotonic() < limit:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in results.glob("*.json")}
    assert kept, "the first seed is kept"
    capsys.readouterr()
    assert run("lab", "mxfp4.yaml", *SMALL, "--json", "--out", "deep/page.html") == 0
    printed = capsys.readouterr()
    assert f"{len(kept)} of 4 are measured already" in printed.err
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
    values = json.loads(printed.out)
    assert [recipe["name"] for recipe in values["recipes"]] == ["bf16", "mxfp4"]
    assert len(values["measurements"]) == 4
    assert values["bits"]["mxfp4"]["wgrad.lhs"] == 4.25
    page = Path("deep/page.html").read_text()
    assert values["findings"][0]["sentence"].replace("'", "&#39;") in page
    assert "ottava lab mxfp4.yaml --seeds 2 --steps 2 --quick --out deep/page.html" in page
    assert run("lab", "mxfp4.yaml", *SMALL) == 0  # from the kept results alone
    said = capsys.readouterr().out
    assert values["findings"][0]["sentence"] in " ".join(said.split())
    assert "page: runs/lab/lab.html" in said


def test_wrong_words_are_refused_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, match in (
        (("mxpf8",), "mxfp8"),
        (("none.yaml",), "cannot be read"),
        (("mxfp8", "--seeds", 0), "1 or more"),
        (("mxfp8", "--out", tmp_path), "is a folder"),
    ):
        with pytest.raises((ValueError, OSError), match=match):
            run("lab", *words)
    assert list(tmp_path.iterdir()) == []
