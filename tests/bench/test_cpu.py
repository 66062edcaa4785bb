"""The benchmark's cases: small ones here, for what they run and not for how fast."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ottava.bench import cpu
from ottava.bench.cpu import Settings
from ottava.engine.quantizer import WeightQuantizer
from ottava.kernels.native import build as native_build
from ottava.train.config import ModelConfig, TrainConfig

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
    assert "ratio to BF16" in str(cases[1])
    assert cases[1].to_dict()["timings"][0]["name"] == "BF16"


def test_gemms_have_the_layouts_of_a_linear() -> None:
    """Both operands contracted over their last dimension, beside torch's BF16."""
    cases = list(cpu.bench(["gemm"], Settings(rounds=2)))
    names = ["fprop (8, 32) x (64, 32)", "dgrad (8, 64) x (32, 64)", "wgrad (64, 8) x (32, 8)"]
    assert [case.name for case in cases] == names
    variants = ["torch.mm BF16", "ottava tensor", "ottava 1x128", "ottava 1x32"]
    assert all([timing.name for timing in case.timings] == variants for case in cases)


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


def test_statistics_compare_a_watched_step_with_an_unwatched_one() -> None:
    """Per tensor and in blocks; numbers of all elements, and everything of some bands."""
    cases = list(cpu.bench(["statistics"], Settings(rounds=2)))
    looks = ("detail=numbers, sample=1", "detail=blocks, sample=16")
    assert [case.name for case in cases] == [
        f"block, {recipe}, 3 steps, {look}" for recipe in ("tensorwise", "blockwise") for look in looks
    ]
    assert [timing.name for timing in cases[0].timings] == ["unwatched", "every step"]


def test_the_demo_has_tokens_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the median step; BF16 is torch alone, beside it the recipe bf16."""
    small = TrainConfig(model=ModelConfig(d_model=32, layers=1, ffn=32), batch_size=2, sequence_length=16)
    monkeypatch.setattr(cpu, "TrainConfig", lambda: small)
    (case,) = cpu.bench(["demo"], Settings(rounds=2))
    assert list(case.figures["tokens/s"]) == ["BF16", "ottava bf16", *NAMES[1:]]
    first = case.timings[0]
    assert case.figures["tokens/s"]["BF16"] == pytest.approx(2 * 16 / first.milliseconds * 1e3)


def test_smollm2_says_whose_weights_it_ran() -> None:
    """Without a checkpoint: random ones, and no perplexity."""
    (case,) = cpu.bench(["smollm2"], Settings(rounds=2))
    assert "random weights" in case.name
    assert case.figures == {}
    assert [timing.name for timing in case.timings] == [
        "BF16",
        "ottava tensorwise",
        "ottava mxfp8",
        "torchao tensorwise",
    ]


@pytest.mark.slow  # tests/bench/test_cpu.py compiles once
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_builds_are_timed_together_and_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock and in CPU seconds, with the compiler's name; here of one library."""
    monkeypatch.setattr(cpu, "FIRST_STEP", (("sums", ""),))
    monkeypatch.setattr(cpu, "libraries", lambda: {"sums": ("sums", "")})
    together, each = cpu.bench(["build"], Settings(rounds=2, cpu_time=True))
    assert [timing.name for timing in together.timings] == ["one after the other", "at the same time"]
    assert all(timing.milliseconds > 10 for timing in together.timings)  # the compiler's time is no CPU time of ours
    assert set(each.figures) == {"CPU seconds", "seconds by the clock"}
    assert all(0 < figures["sums"] < 60 for figures in each.figures.values())
    assert "empty cache, " in each.name


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


def test_an_unknown_suite_is_refused() -> None:
    """Before anything is measured."""
    with pytest.raises(ValueError, match="suite: got 'casts'; needs one of cast, gemm, linear, block, statistics"):
        next(iter(cpu.bench(["casts"])))


def test_the_machine_is_named() -> None:
    """Versions of what was measured, and threads."""
    said = cpu.machine()
    assert said["threads"] == torch.get_num_threads()
    assert said["versions"]["torch"] == torch.__version__


pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="native kernels are built on Linux and macOS"),
    pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"),
]


def test_every_library_is_there_once() -> None:
    """Each C++ file, those of one dtype in all of theirs."""
    found = cpu.libraries()
    assert {name for name, _ in found.values()} == set(native_build.sources())
    assert len(set(found.values())) == len(found)
    assert found["quantize bfloat16"] == ("quantize", "")
    assert found["measure float16"] == ("measure", "OTTAVA_TYPE=Float16")
    assert found["sums"] == ("sums", "")


def test_it_is_compiled_each_time() -> None:
    """The user's cache holds the library, but is not used: the compiler takes time, less than the wall clock."""
    native_build.load("sums")
    took = cpu.build_time(("sums", ""), 2)
    assert took.cpu >= 0.01
    assert took.wall > 0.01
    assert cpu.compiled_by().count(", ") >= 1


@pytest.mark.parametrize("at_once", [1, 4])
def test_so_many_are_built_at_a_time(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each build waits until the set number runs at once; all are built."""
    together, begun = threading.Barrier(at_once), []

    def build(name: str, settings: native_build.BuildSettings, variant: str) -> native_build.Built:
        together.wait(timeout=300)
        begun.append((name, variant))
        return native_build.Built(None, "")

    monkeypatch.setattr(native_build, "build", build)
    cpu.build_all(cpu.FIRST_STEP, at_once)
    assert sorted(begun) == sorted(cpu.FIRST_STEP)


def test_what_cannot_be_built_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an empty build would look very good."""
    monkeypatch.setenv("OTTAVA_NATIVE", "0")
    with pytest.raises(RuntimeError, match="sums: switched off by OTTAVA_NATIVE=0"):
        cpu.build_time(("sums", ""), 1)


@pytest.mark.slow
def test_the_first_step_loads_what_is_said_here(tmp_path: Path) -> None:
    """In a process with an empty cache."""
    program = (
        "import torch, ottava; m = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16(); ottava.convert(m);"
        "m(torch.ones(4, 64).bfloat16()).sum().backward()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"OTTAVA_CACHE": str(tmp_path)})
    assert {path.name.split("-")[0] for path in tmp_path.glob("*.so")} == {name for name, _ in cpu.FIRST_STEP}
