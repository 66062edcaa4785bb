"""`ottava bench cpu`: a table, or one JSON object."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ottava.bench import cpu
from ottava.cli.bench import bench


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CAST_ELEMENTS", (4096,))


def test_json_is_one_object() -> None:
    """With the machine and every case."""
    arguments = ["cpu", "--suite", "cast", "--rounds", "2", "--threads", "1", "--cpu-time", "--json"]
    ran = CliRunner().invoke(bench, arguments)
    result = json.loads(ran.stdout)
    assert ran.exit_code == 0
    assert (result["schema_version"], [case["suite"] for case in result["cases"]]) == (1, ["cast"])
    assert result["machine"]["threads"] == 1


def test_the_table_has_ratios_and_quartiles() -> None:
    """One line a variant."""
    ran = CliRunner().invoke(bench, ["cpu", "--suite", "cast", "--rounds", "2", "--threads", "1"])
    assert ran.exit_code == 0
    assert "ratio to copy" in ran.stdout
    assert "ottava 1x32" in ran.stdout


def test_perplexity_needs_weights(tmp_path: Path) -> None:
    """Random ones know no text: exit code 2 of the app, which ValueError is."""
    text = tmp_path / "text"
    text.write_text("to be")
    ran = CliRunner().invoke(bench, ["cpu", "--suite", "smollm2", "--text", str(text)])
    assert isinstance(ran.exception, ValueError)
    assert "perplexity needs the weights of --checkpoint" in str(ran.exception)
