"""Times of compiling: of what, in which cache, and what is said where it cannot be done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ottava.bench import builds
from ottava.kernels.native import build as native_build

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="native kernels are built on Linux and macOS"),
    pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"),
]


def test_every_library_is_there_once() -> None:
    """Each C++ file, those of one dtype in all of theirs."""
    found = builds.libraries()
    assert {name for name, _ in found.values()} == set(native_build.sources())
    assert len(set(found.values())) == len(found)
    assert found["quantize bfloat16"] == ("quantize", "")
    assert found["measure float16"] == ("measure", "OTTAVA_TYPE=Float16")
    assert found["sums"] == ("sums", "")


def test_it_is_compiled_each_time() -> None:
    """The user's cache holds the library, but is not used: the compiler takes time, less than the wall clock."""
    native_build.load("sums")
    took = builds.build_time(("sums", ""), 2)
    assert took.cpu >= 0.01
    assert took.wall > 0.01
    assert builds.compiled_by().count(", ") >= 1


@pytest.mark.parametrize("at_once", [1, 4])
def test_so_many_are_built_at_a_time(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each build waits until the set number runs at once; all are built."""
    together, begun = threading.Barrier(at_once), []

    def build(name: str, settings: native_build.BuildSettings, variant: str) -> native_build.Built:
        together.wait(timeout=300)
        begun.append((name, variant))
        return native_build.Built(None, "")

    monkeypatch.setattr(native_build, "build", build)
    builds.build_all(builds.FIRST_STEP, at_once)
    assert sorted(begun) == sorted(builds.FIRST_STEP)


def test_what_cannot_be_built_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an empty build would look very good."""
    monkeypatch.setenv("OTTAVA_NATIVE", "0")
    with pytest.raises(RuntimeError, match="sums: switched off by OTTAVA_NATIVE=0"):
        builds.build_time(("sums", ""), 1)


@pytest.mark.slow
def test_the_first_step_loads_what_is_said_here(tmp_path: Path) -> None:
    """In a process with an empty cache."""
    program = (
        "import torch, ottava; m = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16(); ottava.convert(m);"
        "m(torch.ones(4, 64).bfloat16()).sum().backward()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"OTTAVA_CACHE": str(tmp_path)})
    assert {path.name.split("-")[0] for path in tmp_path.glob("*.so")} == {name for name, _ in builds.FIRST_STEP}
