"""Instruction sets of the native GEMM: which runs, which is passed over, and those that this machine does not have."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.operands import cast
from ottava.kernels import gemm_choice
from ottava.kernels.gemm_choice import Ranking
from ottava.kernels.native import build as native_build
from ottava.kernels.native import gemm as native_gemm
from ottava.kernels.native.build import Built
from ottava.numerics.formats import E4M3
from ottava.numerics.scaling import BLOCK_1X32, Granularity
from ottava.numerics.tensor import QuantizationSpec

SOURCE = native_build.SOURCES / "gemm.cpp"
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
BUILT = native_gemm.built()
needs_library = pytest.mark.skipif(BUILT.library is None, reason=BUILT.reason)

MX = QuantizationSpec(E4M3, BLOCK_1X32, "e8m0")


# --- instruction sets that are not here ------------------------------------------------------------------------------


@pytest.mark.skipif(not all(map(shutil.which, (CROSS, EMULATOR))), reason=f"needs {CROSS} and {EMULATOR}")
@pytest.mark.parametrize("name", ["NEON", "NEON-BF16"])
def test_aarch64_is_right_on_an_emulator(name: str, tmp_path: Path) -> None:
    """Every mode and layout, tails, threads, exact integers, the bound of an fp32 accumulation; one output in 10,000
    that is not correctly rounded, though BFMMLA rounds to odd (4 standard deviations of 16,384 draws are 5 more)."""
    binary = tmp_path / "harness"
    flags = ["-O2", "-ftree-vectorize", "-std=c++17", "-static", "-ffp-contract=off", "-fopenmp", f"-I{SOURCE.parent}"]
    flags += ["-march=armv8.2-a+bf16", f"-DOTTAVA_LEVEL={native_gemm.LEVELS.index(name)}"]
    command = [CROSS, *flags, str(Path(__file__).with_name("gemm_harness.cpp")), "-o", str(binary)]
    subprocess.run(command, check=True, capture_output=True)
    ran = subprocess.run([EMULATOR, "-cpu", "max", str(binary)], capture_output=True, text=True, timeout=800)
    assert ran.stdout.startswith("ok "), ran.stdout + ran.stderr
    assert int(ran.stdout.split()[1]) <= 1.6 + 5


# --- which level runs ------------------------------------------------------------------------------------------------


@needs_library
def test_the_fastest_level_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured; its bits, unless another is asked for."""
    native_gemm._ranking.cache_clear()
    native_gemm._fastest.cache_clear()
    names = [native_gemm.LEVELS[level] for level in native_gemm.levels()[:2]]
    a, b = (cast(torch.randn(rows, 300), MX) for rows in (40, 70))
    try:
        for favourite in names:
            ranking = Ranking(tuple(sorted(names, key=lambda name: name != favourite)), None, None)
            monkeypatch.setattr(gemm_choice, "rank", lambda *_, ranking=ranking: ranking)
            native_gemm._ranking.cache_clear()
            native_gemm._fastest.cache_clear()
            assert native_gemm.fastest().name == favourite
            y, _ = native_gemm.run(a, b, torch.float32, None)
            assert torch.equal(y, native_gemm.run(a, b, torch.float32, None, native_gemm.LEVELS.index(favourite))[0])
    finally:
        native_gemm._ranking.cache_clear()
        native_gemm._fastest.cache_clear()


@needs_library
def test_levels_are_measured_with_right_numbers() -> None:
    """Nothing failed here, and what runs is what was measured to be the fastest, or capability's first; rivals only."""
    ranking = native_gemm.ranking()
    best = native_gemm.levels()[0]
    assert set(ranking.order) <= {native_gemm.LEVELS[level] for level in (best, native_gemm._RIVALS.get(best, best))}
    assert ranking.order[0] == native_gemm.fastest().name
    assert ranking.choice is None or ranking.choice.failed == {}


def test_a_family_of_levels_is_known_by_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """x86-64 and aarch64 share the portable one."""
    for best, levels in ((0, (0,)), (2, (2, 1, 0)), (3, (3, 2, 1, 0)), (4, (4, 0)), (5, (5, 4, 0))):
        monkeypatch.setattr(native_gemm, "built", lambda level=None, best=best: Built(Fake(best), ""))
        assert native_gemm.levels() == levels
    monkeypatch.setattr(native_gemm, "built", lambda level=None: Built(None, "no C++ compiler"))
    assert native_gemm.levels() == ()


class Fake:
    """A library that is asked only what it is."""

    def __init__(self, level: int) -> None:
        self.level = level

    def ottava_gemm_level(self) -> int:
        return self.level

    def ottava_gemm_unit(self) -> int:
        return 4 if native_gemm.LEVELS[self.level] == "NEON-BF16" else 2


def loads(**libraries: Fake | str) -> Callable[..., Built]:
    """native_build.load, where `best`, or a level by its number, is what there is."""

    def load(name: str, dtype: object = None, variant: str = "") -> Built:
        found = libraries.get(f"level_{variant[-1:]}" if variant else "best", "no such instruction set")
        return Built(None, found, failed_trial=not variant) if isinstance(found, str) else Built(found, "")  # type: ignore[arg-type]

    return load


def test_a_level_that_fails_its_trial_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best that does not is this CPU's best then, and says why."""
    monkeypatch.setattr(native_build, "load", loads(best="its trial was ended by SIGILL", level_3=Fake(3)))
    assert native_gemm.fastest().name == "AVX512-BF16"
    assert native_gemm.built().note == "its trial was ended by SIGILL"
    monkeypatch.setattr(native_build, "load", loads(best="its trial was ended by SIGILL"))
    assert native_gemm.fastest().built.reason == "its trial was ended by SIGILL"


def test_bfmmla_takes_scales_at_multiples_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of k; the reference takes the others."""
    monkeypatch.setattr(native_build, "load", loads(best=Fake(5)))
    for cols, taken_ in ((4, True), (6, False), (32, True)):
        a = cast(torch.ones(4, 64), QuantizationSpec(E4M3, Granularity(1, cols)))
        reason = native_gemm.supports_gemm(a, a, torch.bfloat16, None)
        assert (reason is None) == taken_
        assert taken_ or "scales may change at multiples of 4 of k on NEON-BF16 only" in str(reason)
