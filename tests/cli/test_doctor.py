"""`ottava doctor`: with a compiler, and without one."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

import ottava
from ottava.cli.doctor import MISSING, doctor
from ottava.kernels import native_build
from ottava.kernels.native_build import BuildSettings, Built


@pytest.fixture(autouse=True)
def forgets() -> Iterator[None]:
    """What was not found under a test's settings is looked for anew afterwards; before monkeypatch, so it ends last."""
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
    assert {"native_quantize", "native_measure"} <= set(native_build.sources())
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
    row = next(line for line in shown.splitlines() if line.startswith("tensorwise ") and "fprop" in line)
    assert row.split()[-2] == "reference"  # the cast
    assert "What is lost:" in shown


def test_a_machine_that_has_everything_is_told_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one without OpenMP is not."""
    full = ("-march=native", "-fopenmp")
    monkeypatch.setattr(native_build, "load", lambda name, declare=None: Built(None, "", flags=full))
    monkeypatch.setattr("ottava.cli.doctor._kernels", lambda recipe, device: [])
    assert doctor() == 0
    assert capsys.readouterr().out.rstrip().endswith("Nothing is missing.")
    monkeypatch.setattr(native_build, "load", lambda name, declare=None: Built(None, "", flags=()))
    assert doctor() == MISSING
    assert "run on one thread: the compiler has no OpenMP" in capsys.readouterr().out


def test_a_missing_compiler_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was looked for."""
    monkeypatch.setattr(native_build, "from_environment", lambda: BuildSettings(compiler="no-such-compiler"))
    doctor()
    assert "compiler  none" in capsys.readouterr().out
