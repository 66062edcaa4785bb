"""The drawing in docs/design.md is that of the code, and a circle cannot be drawn."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("house", DOCS / "house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_drawing_is_that_of_the_code() -> None:
    """Print it anew with `python docs/house.py`."""
    drawing = load().draw()
    assert drawing in (DOCS / "design.md").read_text(encoding="utf-8"), f"docs/design.md should show:\n{drawing}"


def test_rooms_are_stacked_and_circles_refused() -> None:
    house = load()
    rooms: dict[str, set[str]] = {"roof": {"wall", "ground"}, "wall": {"ground"}, "ground": set()}
    assert house.floors(rooms) == [["ground"], ["wall"], ["roof"]]
    assert house.direct("roof", rooms) == ["wall"]
    with pytest.raises(ValueError, match="a circle"):
        house.floors({"a": {"b"}, "b": {"a"}})
