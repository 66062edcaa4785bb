"""The benchmark's cases: small ones here, for what they run and not for how fast."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ottava.bench import cpu
from ottava.bench.cpu import Settings
from ottava.engine.quantizer import WeightQuantizer
from ottava.kernels.native import build as native_build

NAMES = ["BF16", *(f"ottava {recipe}" for recipe in cpu.RECIPES)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CAST_ELEMENTS", (4096,))
    monkeypatch.setattr(cpu, "GEMM_SHAPES", ((8, 32, 64),))
    monkeypatch.setattr(cpu, "LINEAR_SHAPES", ((8, 32, 64),))
    monkeypatch.setattr(cpu, "BLOCK_SIZES", (32, 4, 8, 2))
    monkeypatch.setattr(cpu, "SMOLLM2_SIZES", (97, 1, 16))


def test_every_case_measures_bf16_and_every_recipe() -> None:
    """Casts beside a copy, layers beside BF16 and torchao's emulation; the first is the unit."""
    cases = list(cpu.bench(["cast", "linear", "block"], Settings(rounds=2)))
    assert [case.suite for case in cases] == ["cast", "linear", "block"]
    assert cases[0].timings[0].name == "copy"
    for case in cases[1:]:
        names = [timing.name for timing in case.timings if "microxcaling" not in timing.name]  # where it is installed
        assert names == [*NAMES, "torchao tensorwise"]
    assert all(timing.milliseconds > 0 for case in cases for timing in case.timings)
    assert all(case.timings[0].ratio == 1.0 for case in cases)
    assert all(case.timings for case in cpu.bench(["gemm", "statistics"], Settings(rounds=2)))
    assert "ratio to BF16" in str(cases[1])
    assert cases[1].to_dict()["timings"][0]["name"] == "BF16"


def test_what_is_kept_for_backward_is_counted() -> None:
    """torch's linear keeps its input, 2 bytes an element; ours its codes and those of the weight, and scales."""
    rows, k, n = cpu.LINEAR_SHAPES[0]
    (case,) = cpu.bench(["linear"], Settings(rounds=2))
    activations, weights = case.figures.values()
    assert (activations["BF16"] * 2**20, weights["BF16"]) == (2 * rows * k, 0)
    assert activations["ottava tensorwise"] * 2**20 == rows * k + 4
    assert weights["ottava tensorwise"] * 2**20 == n * k + 4
    assert "kept for backward, MiB" in str(case)


def test_one_storage_is_counted_once() -> None:
    """A storage counts once, however many operations save it; a parameter never counts."""
    x = torch.ones(4, 4, requires_grad=True)
    assert cpu.saved_bytes(lambda: x * x + x.t() * x, nn.Linear(2, 2)) == (x.nbytes, 0)
    layer = nn.Linear(4, 4)
    assert cpu.saved_bytes(lambda: layer(x), layer) == (x.nbytes, 0)


@pytest.mark.parametrize("suite", ["linear", "block", "smollm2"])
def test_a_weight_changes_between_two_steps(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training: the cached cast is out of date, and the history holds its amax."""
    seen: dict[nn.Module, list[int]] = {}
    filled: list[bool] = []
    forward = WeightQuantizer.forward

    def spy(self: WeightQuantizer, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        seen.setdefault(self, []).append(x._version)
        filled.append(self.spec is not None and bool(self.amax_history.any()))
        return forward(self, x, *args, **kwargs)

    monkeypatch.setattr(WeightQuantizer, "forward", spy)
    list(cpu.bench([suite], Settings(rounds=2)))
    assert seen
    for versions in seen.values():
        assert len(set(versions[:4])) == 4, versions  # two runs to warm up, two that count
    assert any(filled) == (suite != "smollm2")  # where `delayed` is measured


@pytest.mark.parametrize("suite", ["block", "smollm2"])
def test_compiled_models_run_beside_their_own(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are named, the model itself: gradients of both are one, and freed together."""
    compiled: list[nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    case, *alone = cpu.bench([suite], Settings(rounds=2, compiled=True))
    names = [timing.name for timing in case.timings]
    assert names[-4:] == [f"{name}, compiled" for name in cpu.COMPILED]
    assert len({id(model) for model in compiled}) == len(cpu.COMPILED) + len(alone)
    parts = [part.name.split()[1] for part in alone]  # what the compiler gains and loses without us
    assert parts == (["GELU", "LayerNorm"] if suite == "block" else [])
    assert all([timing.name for timing in part.timings] == ["BF16", "BF16, compiled"] for part in alone)


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    """Random weights must not replace it."""
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        list(cpu.bench(["smollm2"], Settings(rounds=2, checkpoint=tmp_path)))


pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="native kernels are built on Linux and macOS"),
    pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"),
]


def test_it_is_compiled_each_time() -> None:
    """The user's cache holds the library, but is not used: the compiler takes time, less than the wall clock."""
    native_build.load("sums")
    seconds, by_the_clock = cpu.build_time(("sums", ""), 2)
    assert seconds >= 0.01
    assert by_the_clock > 0.01
    assert cpu.compiled_by().count(", ") >= 1


def test_what_cannot_be_built_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an empty build would look very good."""
    monkeypatch.setenv("OTTAVA_NATIVE", "0")
    with pytest.raises(RuntimeError, match="sums: switched off by OTTAVA_NATIVE=0"):
        cpu.build_time(("sums", ""), 1)


def test_the_first_step_loads_what_is_said_here(tmp_path: Path) -> None:
    """In a process with an empty cache."""
    program = (
        "import torch, ottava; m = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16(); ottava.convert(m);"
        "m(torch.ones(4, 64).bfloat16()).sum().backward()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"OTTAVA_CACHE": str(tmp_path)})
    assert {path.name.split("-")[0] for path in tmp_path.glob("*.so")} == {name for name, _ in cpu.FIRST_STEP}
