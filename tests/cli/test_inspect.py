"""`ottava inspect` on checkpoints; what it reads is tested in tests/interop/test_state_file.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import ottava
from ottava.cli.inspect import inspect
from ottava.interop.state_file import StateFileError


def run(*arguments: str | Path) -> int:
    """Runs the command like the app, and lets its errors through."""
    app = typer.Typer()
    app.command()(inspect)
    return app(args=list(map(str, arguments)), standalone_mode=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A layer after one step: input 1, so the scale is 448."""
    layer = ottava.nn.Linear(64, 64, recipe="delayed").bfloat16()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    torch.save({"fc": layer.state_dict()}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_shows_a_row_per_tensor(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(checkpoint) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{checkpoint}: scaling state of ottava, 3 tensors\n")
    (row,) = [line for line in shown.splitlines() if line.startswith("fc     input")]
    assert row.split() == ["fc", "input", "1/16", "1", "1", "448", "0", "0", "E4M3,", "max,", "margin", "0"]


def test_json_is_one_object(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(checkpoint, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["schema_version"], values["source"], values["file"]) == (1, "ottava", str(checkpoint))
    first = values["rows"][0]
    assert (first["layer"], first["tensor"], first["filled"], first["scale"]) == ("fc", "input", 1, 448.0)


def test_contradiction_is_exit_code_1(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = torch.load(checkpoint)
    contents["fc"]["quantizers.input.scale"].fill_(3.0)
    torch.save(contents, checkpoint)
    assert run(checkpoint) == 1
    assert "problem: fc input: the scale does not follow from the history" in capsys.readouterr().out


class RunsACommand:
    """What an attacker's pickle does when loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize("contents", [{"fc.weight": torch.ones(2)}, {"fc.weight": RunsACommand()}])
def test_file_without_state_or_with_code_in_it_is_a_bad_input_file(contents: Any, tmp_path: Path) -> None:
    torch.save(contents, tmp_path / "file.pt")
    with pytest.raises(StateFileError) as caught:
        run(tmp_path / "file.pt")
    assert caught.value.exit_code == 4
