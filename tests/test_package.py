"""The wheel holds what the source tree holds, but benchmarks. Asked of the build backend, without building."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
LEFT_OUT = "bench"
"""The room that only a checkout has: `ottava bench` says so."""
READ_AT_RUN_TIME = (".cpp", ".css", ".h", ".j2", ".js", ".typed", ".yaml")
"""What no import finds missing."""


def test_every_file_of_the_package_but_benchmarks_is_in_the_wheel() -> None:
    """Compiled on first use, rendered, or read as data: each would fail far from here, on somebody else's machine."""
    wheel = pytest.importorskip("hatchling.builders.wheel")
    packed = {file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    there = {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / "ottava").rglob("*")
        if path.is_file() and not {"__pycache__", LEFT_OUT} & {*path.parts}
    }
    assert packed == there
    assert (SOURCE / "ottava" / LEFT_OUT).is_dir()
    imported = re.compile(rf"^(?:from|import) ottava\.{LEFT_OUT}\b", re.MULTILINE)
    assert not [name for name in packed if name.endswith(".py") and imported.search((SOURCE / name).read_text("utf-8"))]
    written = [name for name in there if "/prebuilt/" not in name]  # `python -m ottava.kernels.native.wheel` makes it
    assert {Path(name).suffix for name in written} == {".py", *READ_AT_RUN_TIME}
