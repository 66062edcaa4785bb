"""`ottava doctor`, with a compiler and without one; `ottava bench`: a table, or one JSON object."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import ottava
from command import ended
from ottava.bench import cpu
from ottava.cli.doctor import MISSING, WRONG, MachineFacts, bench, doctor, traps
from ottava.kernels.native import build as native_build
from ottava.kernels.native import gemm as native_gemm
from ottava.kernels.native.build import Built
from ottava.nn.plan import Device
from ottava.ops import dispatch, quantize
from ottava.ops import gemm as ops

# --- doctor ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def forgets() -> Iterator[None]:
    """Clears the cache of libraries after a test with other settings. It starts before monkeypatch, so it ends last."""
    yield
    native_build.load.cache_clear()


@pytest.fixture
def switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process with OTTAVA_NATIVE=0 sees it."""
    monkeypatch.setenv("OTTAVA_NATIVE", "0")
    native_build.load.cache_clear()


def found(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, object]]:
    code = doctor(as_json=True)
    return code, json.loads(capsys.readouterr().out)


def test_json_lists_every_library_and_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    """One row a quantized GEMM; the exit code says whether something is lost."""
    code, values = found(capsys)
    assert values["schema_version"] == 1
    assert [one["name"] for one in values["libraries"]] == list(native_build.sources())  # type: ignore[attr-defined]
    assert values["measured"] == {
        "levels of native_gemm": str(native_gemm.ranking()),
        "gemm": str(dispatch.cpu_ranking()),
        "gemm of BF16 operands": str(dispatch.dense_ranking()),
    }
    assert {"quantize", "measure"} <= set(native_build.sources())
    quantized = {
        (recipe.name, name)
        for recipe in ottava.RECIPES.values()
        for name in ("fprop", "dgrad", "wgrad")
        if getattr(recipe, name).quantized
    }
    assert {(row["recipe"], row["gemm"]) for row in values["recipes"]} == quantized  # type: ignore[attr-defined]
    assert (code == MISSING) == bool(values["lost"])


@pytest.mark.usefixtures("switched_off")
def test_what_is_lost_is_said(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Each library with its reason, and what runs in its place."""
    with caplog.at_level(logging.CRITICAL, "ottava"):
        assert doctor() == MISSING
    shown = capsys.readouterr().out
    for name in native_build.sources():
        assert f"native    {name}: switched off by OTTAVA_NATIVE=0" in shown
    assert "measured  levels of native_gemm: nothing, for there is one way only" in shown
    row = next(line for line in shown.splitlines() if line.startswith("tensorwise ") and "fprop" in line)
    assert row.split()[-3] == "reference"  # the cast
    assert "Missing:" in shown


def test_a_machine_that_has_everything_is_told_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without OpenMP is not told so."""
    full = ("-march=native", "-fopenmp")
    monkeypatch.setattr(native_build, "load", lambda name, declare=None: Built(None, "", flags=full))
    monkeypatch.setattr("ottava.cli.doctor._kernels", lambda recipe, device: [])
    assert doctor() == 0
    assert capsys.readouterr().out.rstrip().endswith("Nothing is missing.")
    monkeypatch.setattr(native_build, "load", lambda name, declare=None: Built(None, "", flags=()))
    assert doctor() == MISSING
    assert "run on one thread: the compiler has no OpenMP" in capsys.readouterr().out


# --- the self-test ---------------------------------------------------------------------------------------------------


def test_every_recipe_is_right_here(capsys: pytest.CaptureFixture[str]) -> None:
    """Casts and GEMMs of every recipe, by the kernels that run on this machine."""
    code, values = found(capsys)
    assert {row["check"] for row in values["recipes"]} == {"ok"}  # type: ignore[attr-defined]
    assert code != WRONG


@pytest.mark.parametrize(
    "name, wrong, message",
    [
        (
            "codes",
            lambda q: replace(q, data=_flipped(q.data)),
            "1 of 16384 codes of the right operand differ",
        ),
        (
            "scales",
            lambda q: replace(q, scale_inv=q.scale_inv * 2),
            "scales of the right operand differ",
        ),
    ],
)
def test_a_wrong_cast_is_found(
    name: str, wrong: Any, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One code of 16,384, in one sign; a scale."""
    real, calls = quantize.quantize, count()
    monkeypatch.setattr(
        quantize, "quantize", lambda *a, **k: wrong(real(*a, **k)) if next(calls) == 1 else real(*a, **k)
    )
    assert doctor() == WRONG
    shown = capsys.readouterr().out
    assert "Wrong results:" in shown
    assert f"tensorwise.fprop: {message}" in shown
    assert "Do not train with these recipes on this machine" in shown


def test_a_wrong_product_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """0.8 percent is more than a rounding to BF16."""
    real = ops.gemm
    monkeypatch.setattr(ops, "gemm", lambda *a, **k: real(*a, **k) * 1.008)
    assert doctor(as_json=True) == WRONG
    rows = json.loads(capsys.readouterr().out)["recipes"]
    assert all(row["check"].startswith("the product is off by 0.00") for row in rows)


def _flipped(codes: Tensor) -> Tensor:
    copy = codes.clone()
    copy.view(torch.uint8)[3, 5] ^= 0x80
    return copy


# --- traps -----------------------------------------------------------------------------------------------------------


def test_traps_are_those_of_the_machine() -> None:
    """A good Hopper has one trap left, the dtype of the inputs; each missing part adds its own trap."""
    good = MachineFacts((9, 0), (13, 0), 91900, True, "high")
    assert [trap.split(":")[0] for trap in traps(good)] == ["float32 inputs"]
    for change, name, words in (
        ({"cudnn": 91500}, "attention", "cuDNN 9.15;"),
        ({"cudnn_attention": False}, "attention", "switched off"),
        ({"cuda": (12, 8)}, "blocks of 128", "built for CUDA 12.8"),
        ({"matmul_precision": "highest"}, "float32 GEMMs", "set_float32_matmul_precision('high')"),
        ({"capability": (8, 0)}, "tensor cores", "sm_80 has none for FP8"),
    ):
        found = traps(replace(good, **change))  # type: ignore[arg-type]
        assert len(found) == 2
        assert found[1].startswith(f"{name}:")
        assert words in found[1]


# --- bench -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _small(forgets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CAST_ELEMENTS", (4096,))


def test_json_is_one_object() -> None:
    """The object holds the machine and every case."""
    arguments = ["cpu", "--suite", "cast", "--rounds", "2", "--threads", "1", "--cpu-time", "--json"]
    ran = CliRunner().invoke(bench, arguments)
    result = json.loads(ran.stdout)
    assert ran.exit_code == 0
    assert (result["schema_version"], [case["suite"] for case in result["cases"]]) == (1, ["cast"])
    assert result["machine"]["threads"] == 1


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
    assert ended("bench", "cpu") == MISSING
    assert "clone ottava, and run ./x bench there" in capsys.readouterr().err
