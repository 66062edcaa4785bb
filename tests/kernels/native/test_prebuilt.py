"""Libraries that a wheel carries: who takes which, and that a wrong one is never run."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ottava.kernels.native import build as native_build
from ottava.kernels.native.build import SOURCES, BuildSettings, build, cpu
from ottava.kernels.native.prebuilt import LEVELS, Entry, candidates, digest, features, of_sources, write_index
from ottava.kernels.native.wheel import compile_all

HERE = features(cpu())
RUNS = [name for name, level in LEVELS.items() if level.machine == platform.machine() and set(level.needs) <= HERE]
pytestmark = [
    pytest.mark.skipif(os.name != "posix" or not RUNS, reason="no level of a wheel runs here"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
SOURCE = SOURCES / "gemm.cpp"


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GEMM of each level that this machine runs, with threads and without."""
    folder = tmp_path_factory.mktemp("carried")
    made = compile_all(folder, ["g++"], RUNS, ["gemm"])
    assert [entry.level for entry in made] == [level for level in RUNS for _ in range(2)]
    return folder


def settings(folder: Path, cache: Path, compiler: str = "nowhere") -> BuildSettings:
    """As on a machine without a compiler."""
    return BuildSettings(compiler=compiler, cache=cache, prebuilt=folder)


def test_a_machine_without_a_compiler_takes_the_best_and_keeps_it(carried: Path, tmp_path: Path) -> None:
    """Its numbers are right (the trial of the GEMM multiplies in its own process); the second time it lies in the
    cache; a compiler comes first."""
    first = build("gemm", settings(carried, tmp_path))
    assert first.library is not None, first.reason
    assert first.threads
    assert first.library.ottava_gemm is not None
    (kept,) = tmp_path.glob("gemm-*.so")
    assert kept.read_bytes() == (carried / f"gemm-{RUNS[0]}.so").read_bytes()
    before = kept.stat().st_mtime_ns
    assert build("gemm", settings(carried, tmp_path)).library is not None
    assert kept.stat().st_mtime_ns == before
    assert "native" in " ".join(build("gemm", settings(carried, tmp_path / "own", "g++")).flags)


def test_a_level_needs_every_instruction_and_the_machine(carried: Path) -> None:
    """With one word less in /proc/cpuinfo, or on another machine, it is no candidate; nor is anything without words."""
    for name in RUNS:
        level = LEVELS[name]
        for missing in level.needs:
            text = "flags : " + " ".join(HERE - {missing})
            found = candidates(carried, SOURCE, "", level.machine, text)
            assert isinstance(found, str) or all(missing not in LEVELS[entry.level].needs for entry, _ in found)
        assert isinstance(candidates(carried, SOURCE, "", "riscv64", cpu()), str)
    assert "runs none of the libraries" in candidates(carried, SOURCE, "", platform.machine(), "")
    found = candidates(carried, SOURCE, "", platform.machine(), cpu())
    assert not isinstance(found, str)
    assert [entry.level for entry, _ in found] == RUNS * 2
    assert [entry.threads for entry, _ in found] == [True] * len(RUNS) + [False] * len(RUNS)


def test_levels_name_what_the_compiler_may_use() -> None:
    """Each set that g++ switches on under the flags of a level stands in its needs, under the name of Linux."""
    linux = {"lzcnt": "abm", "sse3": "pni", "sahf": "lahf_lm", "avx512bf16": "avx512_bf16", "sse4.1": "sse4_1"}
    linux |= {"sse4.2": "sse4_2", "bmi": "bmi1"}
    always = {"64", "mmx", "sse", "sse2", "fxsr", "sse4", "crc32", "evex512", "80387", "fancy-math-387", "hard-float"}
    for name in (name for name in RUNS if LEVELS[name].machine == "x86_64"):
        asked = ["g++", *LEVELS[name].flags, "-Q", "--help=target"]
        text = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        on = {line.split()[0].removeprefix("-m") for line in text.splitlines() if line.rstrip().endswith("[enabled]")}
        sets = {linux.get(one, one) for one in on - always}
        known = {linux.get(one, one) for one in [*LEVELS[name].needs]}
        cpu_words = {one for one in sets if one in HERE or one.startswith(("avx", "bmi", "sse", "fma", "f16c"))}
        assert cpu_words <= known, cpu_words - known


def test_damage_other_sources_and_crashes_are_refused(carried: Path, tmp_path: Path) -> None:
    """A changed byte; headers that have changed since; a library that traps is passed over for the next one."""
    folder = tmp_path / "carried"
    shutil.copytree(carried, folder)
    entries = [Entry(**entry) for entry in json.loads((folder / "index.json").read_text())]
    good = next(entry for entry in entries if entry.level == RUNS[-1] and entry.threads)

    content = (folder / good.file).read_bytes()
    write_index(folder, [good])
    (folder / good.file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "is damaged: install ottava anew" in build("gemm", settings(folder, tmp_path / "1")).reason
    (folder / good.file).write_bytes(content)

    write_index(folder, [replace(good, sources="0" * 64)])
    assert "were compiled from other sources" in build("gemm", settings(folder, tmp_path / "2")).reason

    trap = folder / "trap.cpp"
    trap.write_text("__attribute__((constructor)) void now() { __builtin_trap(); }\n")
    subprocess.run(["g++", "-shared", "-fPIC", str(trap), "-o", str(folder / "trap.so")], check=True)
    bad = replace(good, file="trap.so", level=RUNS[0], content=digest([(folder / "trap.so").read_bytes()]))
    write_index(folder, [bad])
    refused = build("gemm", settings(folder, tmp_path / "3"))
    assert refused.library is None
    assert refused.failed_trial
    write_index(folder, [bad, good] if len(RUNS) > 1 else [bad, replace(good, threads=False)])
    assert build("gemm", settings(folder, tmp_path / "3")).library is not None


def test_an_installation_without_libraries_misses_a_compiler(tmp_path: Path) -> None:
    """No folder, or an index that is none."""
    for text in (None, "[", '[{"file": 1}]'):
        if text is not None:
            (tmp_path / "index.json").write_text(text)
        reason = build("gemm", settings(tmp_path, tmp_path / "cache")).reason
        assert reason.startswith("the compiler 'nowhere' (CXX) was not found")
        assert reason.endswith("install g++ or clang++")  # and not a word of libraries that nobody has
    assert of_sources(SOURCE) != of_sources(SOURCES / "sums.cpp")
    assert native_build.sources()
