"""`ottava bench cpu`: a table, or one JSON object."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ottava.bench import cpu
from ottava.cli.app import main
from ottava.cli.bench import MISSING, bench
from ottava.nn.plan import Device


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CAST_ELEMENTS", (4096,))


def test_json_is_one_object() -> None:
    """The object holds the machine and every case."""
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
    """A text without a checkpoint is a ValueError; the app turns it into exit code 2."""
    text = tmp_path / "text"
    text.write_text("to be")
    ran = CliRunner().invoke(bench, ["cpu", "--suite", "smollm2", "--text", str(text)])
    assert isinstance(ran.exception, ValueError)
    assert "perplexity needs trained weights" in str(ran.exception)


def test_the_gpu_benchmark_writes_what_it_prints(tmp_path: Path) -> None:
    """One table for each suite, and one JSON file with device and versions; the planner reads the file."""
    out = tmp_path / "out.json"
    ran = CliRunner().invoke(bench, ["gpu", "host", "ceilings", "--smoke", "--no-rivals", "--json", str(out)])
    assert ran.exit_code == 0, ran.output
    report = json.loads(out.read_text())
    assert list(report["suites"]) == ["host", "ceilings"]
    assert {"schema_version", "device", "driver", "versions", "commit", "constants", "left_out"} <= set(report)
    assert [line for line in ran.stdout.splitlines() if line in report["suites"]] == ["host", "ceilings"]
    assert Device.read(out).bf16 == report["constants"]["bf16"] > 0


def test_ceilings_are_written_for_the_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ceilings.json, or in the file that the command line names."""
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(bench, ["ceilings", "--smoke"]).exit_code == 0
    assert Device.read(tmp_path / "ceilings.json").launch > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("words", [["gpu"], ["ceilings"]])
def test_nothing_is_measured_without_a_gpu(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """CPU times would look like results."""
    code = bench(words, standalone_mode=False)
    assert code == MISSING
    assert "no CUDA device, nothing to measure; --smoke checks" in capsys.readouterr().err


def test_a_wheel_names_the_way_to_the_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its package has no `ottava.bench`."""
    monkeypatch.setitem(sys.modules, "ottava.bench", None)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "cpu"])
    assert ended.value.code == MISSING
    assert "clone ottava, and run ./x bench there" in capsys.readouterr().err
