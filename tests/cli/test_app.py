"""The command itself: subcommands, help, versions, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from command import ended
from ottava.base.settings import ConfigError
from ottava.cli.app import app, exit_code
from ottava.train.checkpoint import CheckpointError
from ottava.train.data import DataError, DeviceError


def test_help_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--help") == 0
    shown = capsys.readouterr().out
    for name in ("demo", "train", "formats", "--debug", "--version"):
        assert name in shown


def test_unknown_subcommand_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """With the nearest one and all others, also below `ottava bench`."""
    for words, nearest, other in ((("trian",), "train", "what-if"), (("bench", "gpuu"), "gpu", "ceilings")):
        assert ended(*words) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert f"unknown command '{words[-1]}'; did you mean '{nearest}'? known: " in captured.err
        assert other in captured.err


def test_help_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """The first paragraph of each command's help stands in the list, whole."""
    assert ended("--help") == 0
    listed = " ".join(capsys.readouterr().out.split())
    for one in app.registered_commands:
        assert one.callback is not None
        name = one.name or one.callback.__name__
        said = " ".join((one.callback.__doc__ or "").partition("\n\n")[0].split())
        assert f" {name} {said}" in listed
    assert "..." not in listed.replace("[ARGS]...", "")


@pytest.mark.parametrize(
    "error, code",
    [
        (ConfigError("x"), 2),
        (ValueError("x"), 2),
        (TypeError("x"), 2),
        (DeviceError("x"), 3),
        (ModuleNotFoundError("x"), 3),
        (DataError("x"), 4),
        (CheckpointError("x"), 4),
        (PermissionError("x"), 4),
        (RuntimeError("x"), 70),
        (AssertionError("x"), 70),
    ],
)
def test_every_kind_of_error_has_its_exit_code(error: Exception, code: int) -> None:
    assert exit_code(error) == code


QUICK = """
import os, sys
from ottava.cli.app import main
known = dict(os.environ)
for words, environment in {calls!r}:
    os.environ.clear()
    os.environ.update(known, **environment)
    try:
        main(words)
    except SystemExit as done:
        assert done.code == 0, (words, done.code)
    print(end=chr(0))
heavy = ("torch", "numpy", "pyarrow", "jinja2", "rich", "yaml", "safetensors", "ottava.recipe")
print(*(name for name in heavy if sys.modules.get(name)))
"""


def quickly(*calls: tuple[list[str], dict[str, str]]) -> list[str]:
    """The output of these command lines, in one fresh Python that imports typer and its dependencies only."""
    code = QUICK.format(calls=calls)
    known = {name: value for name, value in os.environ.items() if not name.startswith(("_OTTAVA", "_TYPER", "COMP_"))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=known)
    assert done.returncode == 0, done.stderr
    *printed, loaded = done.stdout.split(chr(0))
    assert loaded.split() == []
    return printed


def test_help_and_version_need_no_torch() -> None:
    """For the command and each subcommand: people type `--help` first, and most often."""
    names = [one.name or one.callback.__name__ for one in app.registered_commands if one.callback is not None]
    lines = [["--help"], ["--version"], ["bench", "--help"], *([name, "--help"] for name in names)]
    shown = quickly(*((line, {}) for line in lines))[-len(names) :]
    assert [name for name, page in zip(names, shown, strict=True) if f"Usage: ottava {name} " not in page] == []
    assert len(names) > 10


def test_every_shell_completes_without_torch() -> None:
    """A shell's completion script runs these words at each press of the tab key, for subcommands and options."""
    shells = {
        "bash": {"COMP_WORDS": "{}", "COMP_CWORD": "{last}"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "{}"},
        "fish": {"_TYPER_COMPLETE_ARGS": "{}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    keys = {"ottava dia": "diagnose", "ottava diagnose --fai": "--fail-on"}
    calls: list[tuple[list[str], dict[str, str]]] = []
    for shell, environment in shells.items():
        for typed in keys:
            words = {key: text.format(typed, last=len(typed.split()) - 1) for key, text in environment.items()}
            calls.append(([], {"_OTTAVA_COMPLETE": f"complete_{shell}", **words}))
    asked = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    completions = iter(quickly(*calls))
    scripts = quickly(*((["--show-completion", shell], asked) for shell in shells))
    for (shell, environment), script in zip(shells.items(), scripts, strict=True):
        for expected in keys.values():
            assert expected in next(completions), shell
        assert f"_OTTAVA_COMPLETE=complete_{shell}" in script
        assert all(key in script for key in environment)


def test_without_words_it_says_what_to_do_next_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command for each thing that lies there, the newest first; a FIFO does not stop it."""
    monkeypatch.chdir(tmp_path)
    assert ended() == 0
    assert capsys.readouterr().out.rstrip().endswith("a small Llama in BF16 and FP8, in a minute or two")
    there = ("runs/new one/watch.json", "runs/old/watch.json", "runs/t/receipt.json", "hf/config.json")
    for age, name in enumerate(there):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")
    (tmp_path / "fit.py").write_text("import os\nfrom trl import SFTTrainer\n")
    (tmp_path / "other.py").write_text("torch = 1\n")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.py")
    assert ended() == 0
    said = capsys.readouterr().out.partition("Next, in this folder:")[2].splitlines()
    assert [line.strip() for line in said if line.startswith("  ottava ")] == [
        "ottava report 'runs/new one' --open",
        "ottava diagnose 'runs/new one' --baseline runs/old",
        "ottava export runs/t NEW_FOLDER",
        "ottava inspect hf",
        "ottava watch -- fit.py",
        "ottava demo",
    ]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("lab mxfp8 --lang fr", 2, "--lang"),  # before it trains, not where the page is written
        ("plan llama-1b --world 8 --mesh dp=8 --microbatches 0", 2, "--microbatches"),
        ("compare a b --top -3", 2, "--top"),
        ("bench cpu --threads -1", 2, "--threads"),
        ("certify torch.encode.e4m3 --device tpu", 2, "certify: --device tpu"),
        ("watch -- .", 2, "there is no file '.'"),
        ("consolidate nowhere out", 4, "nowhere: does not exist"),
    ],
)
def test_wrong_words_are_no_bug_of_ours(words: str, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(*words.split()) == code
    assert said in capsys.readouterr().err
