"""The GPU benchmark as a program: every suite runs on tiny shapes, on a CPU too. Its numbers mean nothing here."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ottava.nn.plan import Device

PROGRAM = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    """The program, imported."""
    spec = importlib.util.spec_from_file_location("benchmark_gpu", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_suite_runs_and_its_constants_feed_the_planner(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table a suite, and one JSON file with where and what it was."""
    out = tmp_path / "out.json"
    assert gpu.main(["--smoke", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert set(report["suites"]) == set(gpu.SUITES)
    assert {"device", "torch", "commit", "smoke", "constants"} <= set(report)
    for suite in report["suites"].values():
        assert all(row["p10"] <= row["median"] <= row["p90"] for row in suite["rows"])
    linear = report["suites"]["linear"]["rows"]
    assert all(row["relative_error"] < 0.1 for row in linear if row["recipe"] != "bf16")
    assert all(row["ran"]["fprop"] for row in linear if row["recipe"] != "bf16")
    assert Device.read(out).bf16 == report["constants"]["bf16"] > 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if not line.startswith(" ")] == list(gpu.SUITES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nothing_is_measured_without_a_gpu(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """No CPU times that look like results."""
    assert gpu.main(["ceilings"]) == 3
    assert "no CUDA device: nothing to measure" in capsys.readouterr().err


def test_wrong_results_have_no_times(gpu: ModuleType) -> None:
    """Correctness is part of the run."""
    right = torch.randn(8, 8)
    assert gpu.check("same", right, right, 1e-6) == 0.0
    for wrong in (right * 1.1, right * float("nan")):
        with pytest.raises(SystemExit, match="wrong results, no times"):
            gpu.check("scaled", wrong, right, 0.05)


def test_unknown_suites_are_refused(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--smoke", "linaer"])
    assert "unknown suite 'linaer'; there are ceilings, gemm, cast" in capsys.readouterr().err
