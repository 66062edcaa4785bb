"""The command itself: subcommands, help, versions, exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import ottava
from ottava.cli.app import exit_code, main
from ottava.train.checkpoint import CheckpointError
from ottava.train.config import ConfigError
from ottava.train.data import DataError
from ottava.train.loop import DeviceError


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_help_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("demo", "train", "formats", "--debug", "--version"):
        assert name in shown


def test_version_names_torch_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"ottava {ottava.__version__}, torch {torch.__version__}\n"


def test_unknown_subcommand_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trian"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "trian" in captured.err


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


def test_module_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "ottava", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"ottava {ottava.__version__}, torch {torch.__version__}\n")
