"""The wheel holds what the source tree holds: code, C++, rules, pages. Asked of the build backend, without building."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
READ_AT_RUN_TIME = (".cpp", ".css", ".h", ".j2", ".js", ".typed", ".yaml")
"""What no import finds missing."""


def test_every_file_of_the_package_is_in_the_wheel() -> None:
    """Compiled on first use, rendered, or read as data: each would fail far from here, on somebody else's machine."""
    wheel = pytest.importorskip("hatchling.builders.wheel")
    packed = {file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    there = {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / "ottava").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == there
    assert {Path(name).suffix for name in there} == {".py", *READ_AT_RUN_TIME}
