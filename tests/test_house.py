"""The picture in docs/design.md is that of the code, its figures keep their limits, and a circle cannot be drawn."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command import script

DOCS = Path(__file__).resolve().parents[1] / "docs"


@functools.cache  # it parses the whole of src
def load() -> Any:
    return script(DOCS / "house.py")


def test_the_picture_is_that_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write it anew with `python docs/house.py --write`."""
    house = load()
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    assert f"```text\n{house.picture()}\n```" in page, "python docs/house.py --write"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "design.md").write_text("before\n\n```text\nsrc/ottava/\n  attic/\n```\n\nafter\n")
    monkeypatch.setattr(house, "ROOT", tmp_path)
    house.main("--write")
    assert (tmp_path / "docs" / "design.md").read_text() == f"before\n\n```text\n{house.picture()}\n```\n\nafter\n"


@pytest.mark.parametrize("name", load().LIMITS)
def test_a_figure_keeps_its_limit(name: str) -> None:
    """`./x house`. All are "at most", but comments are "at least"."""
    value, limit, sign = load().FIGURES[name](), load().LIMITS[name][0], -1 if name.startswith("comments") else 1
    moved = "remove something of the same size, or move the limit in docs/house.py and say why in the commit"
    assert sign * value <= sign * limit, f"{name}: {value}, limit {limit}; {moved}"


def test_every_figure_is_printed_with_its_limit_and_its_goal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    house = load()
    assert house.FIGURES.keys() == house.LIMITS.keys()
    monkeypatch.setattr(house, "FIGURES", {name: lambda: 1234 for name in house.FIGURES})
    house.main("--figures")
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, (limit, goal) in house.LIMITS.items():
        assert [*name.split(), "1,234", f"{limit:,}", f"{goal:,}"] in printed


def test_what_an_import_loads_is_read_from_the_source_as_python_does_it() -> None:
    """`import ottava.train.config`: the same modules by reading as by running."""
    script = "import ottava.train.config, sys; print(*(name for name in sys.modules if name.split('.')[0] == 'ottava'))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert {name.partition(".")[2] for name in ran.stdout.split()} == load().behind("train.config")


def test_rooms_are_stacked_and_circles_refused() -> None:
    house = load()
    rooms: dict[str, set[str]] = {"roof": {"wall", "ground"}, "wall": {"ground"}, "ground": set()}
    assert house.floors(rooms) == [["ground"], ["wall"], ["roof"]]
    assert house.direct("roof", rooms) == ["wall"]
    with pytest.raises(ValueError, match="a circle"):
        house.floors({"a": {"b"}, "b": {"a"}})
