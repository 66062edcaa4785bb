"""`ottava demo` as a person runs it: exit codes, what is printed where, Ctrl-C."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

import warm
from ottava.cli.app import main
from ottava.cli.demo import _choices
from ottava.recipe import RECIPES

TINY = ("model.layers=1", "model.d_model=32", "model.heads=2", "model.ffn=32", "batch_size=2", "sequence_length=32")
COMMAND = (
    *("-m", "ottava", "demo", "--recipes", "tensorwise", "--seeds", "2"),
    *(word for setting in (*TINY, "evaluation.batches=1", "data.max_bytes=60000") for word in ("--set", setting)),
)


def demo(*options: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return warm.run([*COMMAND, *map(str, options)], timeout=800)


def test_a_demo_ends_with_a_verdict_and_the_place_of_the_report(tmp_path: Path) -> None:
    ran = demo("--steps", "10", "--run-dir", tmp_path)
    assert ran.returncode in (0, 1)
    assert "tensorwise ends" in ran.stdout
    assert "(seed spread " in ran.stdout
    assert ran.stdout.endswith(f"report: {tmp_path / 'report.html'}\n")
    assert (ran.returncode == 1) == ("clearly outside the noise\n" in ran.stdout)
    assert "\x1b" not in ran.stdout


def test_json_is_one_object_on_stdout_and_progress_is_on_stderr(tmp_path: Path) -> None:
    ran = demo("--steps", "10", "--run-dir", tmp_path, "--json")
    summary = json.loads(ran.stdout)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary["schema_version"] == 1
    assert "100 %" in ran.stderr


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The signal comes once the first line of progress is there; until then no second demo gets into the folder."""
    options = ("--steps", "5000", "--run-dir", str(tmp_path))
    process = warm.Warm([*COMMAND, *options])
    process.wait_for(" step ")
    with pytest.raises(SystemExit):
        main(["demo", "--resume", "--run-dir", str(tmp_path)])
    assert f"is in use by process {process.pid} on " in capsys.readouterr().err
    process.send_signal(signal.SIGINT)
    ended = process.wait()
    assert ended.returncode == 130
    assert f"ottava demo --resume --run-dir {tmp_path}" in ended.stderr
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
    with pytest.raises(SystemExit) as ended:
        main(["demo", *options, "--run-dir", str(tmp_path)])
    assert ended.value.code == (4 if "--data" in options else 2)
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
