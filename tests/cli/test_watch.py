"""`ottava watch`: an unmodified script, its output, its exit code, and a run folder beside it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import typer

import warm
from ottava.base.settings import ConfigError
from ottava.cli.watch import watch
from ottava.record.reader import Run
from ottava.watching.launch import LaunchError

SCRIPT = """
import argparse, sys, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--debug", action="store_true")
parser.add_argument("--end")
given = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=given.lr)
for step in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(2, 8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), torch.rand(()).item().hex())
print(given.debug)
if given.end == "raise":
    raise RuntimeError("boom")
if given.end is not None:
    sys.exit(int(given.end) if given.end.isdigit() else given.end)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT.lstrip())
    return tmp_path


def start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm.run(words, cwd=folder)


def test_output_numbers_and_arguments_are_the_scripts_own(folder: Path) -> None:
    script = ("train.py", "--lr", "0.5", "--debug")
    alone = start(folder, *script)
    options = ("--out", "run", "--every", "2", "--recipe", "blockwise", "--tensors", "X,dY", "--layers", "2")
    options += ("--detail", "numbers")
    watched = start(folder, "-m", "ottava", "watch", *options, "--", *script)
    assert alone.returncode == watched.returncode == 0, watched.stderr
    assert watched.stdout == alone.stdout
    assert "4 steps, 1 of 2 linear layers seen" in watched.stderr
    assert "no sample" not in watched.stderr
    run = Run.open(folder / "run")
    table = run.table(phase="full")
    assert {(key.layer, key.tensor, key.recipe) for key in table.slots()} == {
        ("2", "input", "blockwise"),
        ("2", "grad_output", "blockwise"),
    }
    losses = [float.fromhex(line.split()[1]) for line in alone.stdout.splitlines()[:4]]
    assert list(run.steps["loss"]) == pytest.approx(losses)
    assert run.manifest["coverage"]["linear"] == 2
    assert run.manifest["settings"]["detail"] == "numbers"
    assert 'watched with detail="numbers"' in table.not_recorded()


@pytest.mark.parametrize(("end", "code"), [("3", 3), ("bad luck", 1), ("raise", 1)])
def test_exit_code_and_traceback_are_the_scripts_own(folder: Path, end: str, code: int) -> None:
    watched = start(
        folder, "-m", "ottava", "watch", "--json", "--out", "run", "--", "train.py", "--lr", "1", "--end", end
    )
    assert watched.returncode == code
    facts = json.loads(watched.stdout.splitlines()[-1])
    assert (facts["steps"], facts["script_exit_code"]) == (4, code)
    if end == "raise":
        lines = watched.stderr.splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[-1] == "RuntimeError: boom"
        assert [line for line in lines if "File" in line] == [
            f'  File "{folder / "train.py"}", line 19, in <module>',
        ]
    elif code == 1:
        assert watched.stderr.splitlines()[0] == end


def test_without_the_dashes_what_follows_the_script_is_its_own(folder: Path) -> None:
    watched = start(folder, "-m", "ottava", "watch", "--out", "run", "train.py", "--lr", "1")
    assert watched.returncode == 0, watched.stderr
    assert Run.open(folder / "run").steps["step"].tolist() == [1, 2, 3, 4]


def test_a_pattern_without_a_layer_is_a_wrong_command(folder: Path) -> None:
    watched = start(folder, "-m", "ottava", "watch", "--out", "run", "--layers", "nope*", "--", "train.py", "--lr", "1")
    assert watched.returncode == 2
    assert "the pattern 'nope*' matches no layer; the layers are: 0, 2" in watched.stderr
    assert "Traceback" not in watched.stderr


def run(*arguments: str) -> int:
    app = typer.Typer()
    app.command(context_settings={"allow_interspersed_args": False})(watch)
    return app(args=list(arguments), standalone_mode=False)


def test_several_processes_need_one_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="--out"):
        run("--", str(folder / "train.py"))


def test_what_is_wrong_is_said_before_anything_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(LaunchError, match=r"no file .absent\.py."):
        run("--", "absent.py")
    for options, why in (
        (["--every", "0"], "every"),
        (["--tensors", "Z"], "tensor"),
        (["--compiled", "maybe"], "compiled"),
        (["--config", "absent.yaml"], "absent.yaml"),
    ):
        with pytest.raises(ConfigError, match=why):
            run("--out", "run", *options, "--", "train.py")
    assert not (folder / "run").exists()
