"""`ottava import`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ottava.cli.app import main
from ottava.record.reader import Run

LINES = "".join(
    f"2025-11-03 10:15:01,123 - INFO - layers.{i}.mlp.fc2_activation_{name} \t iteration=000100 \t value=12.5000\n"
    for i in range(3)
    for name in ("underflows%", "l1_norm")
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "logs" / "nvdlfw_inspect_globalrank-0.log"
    path.parent.mkdir()
    path.write_text(LINES, encoding="utf-8")
    return path


def code(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    return int(exit_.value.code or 0)


def test_a_log_becomes_a_run(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was read, what was not understood, and what to do next."""
    assert code("import", log.parent, tmp_path / "run", "--recipe", "delayed") == 0
    text = capsys.readouterr().out
    assert "3 rows of 3 layers at 1 steps" in text
    assert "not understood: l1_norm (3)" in text
    assert "ottava diagnose" in text
    assert Run.open(tmp_path / "run").table()["scaling"].tolist() == ["delayed"] * 3


def test_json_is_one_object(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code("import", log, tmp_path / "run", "--json", "--kind", "te_log") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rows"], facts["files"], facts["not_understood"]) == (3, {"te_log": 1}, {"l1_norm": 3})


@pytest.mark.parametrize(
    "arguments, exit_code, words",
    [
        (("--recipe", "delayd"), 2, "did you mean 'delayed'"),
        (("--tag", "loss"), 2, "needs TAG=NAME"),
        (("--kind", "te_lgo"), 4, "did you mean 'te_log'"),
        (("--kind", "tensorboard"), 4, "nothing to import"),
    ],
)
def test_mistakes_are_named(
    log: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    exit_code: int,
    words: str,
) -> None:
    """Each has the exit code of its kind, and leaves no file behind."""
    assert code("import", log, tmp_path / "run", *arguments) == exit_code
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
