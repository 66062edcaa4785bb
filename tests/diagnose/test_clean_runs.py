"""Clean trainings of many kinds raise no finding, and accuse FP8 of nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

QUICK = ("missing_values", "one_batch", "scaled_half", "frozen_teacher")


@pytest.fixture(scope="module")
def population() -> Any:
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import clean

        yield clean
    finally:
        sys.path.remove(folder)


def raised(population: Any, names: Any, recipes: Any, folder: Path, seed: int) -> list[str]:
    found = []
    for name in names:
        for recipe in recipes:
            answer = population.trained(name, recipe, folder / f"{name}-{recipe}", seed)
            if answer.findings or answer.fp8 == "guilty":
                found.append(f"{name} {recipe}: {answer.sentence}")
    return found


def test_some_clean_trainings_raise_nothing(population: Any, tmp_path: Path) -> None:
    assert not raised(population, QUICK, ("tensorwise",), tmp_path, 1)


def test_no_clean_training_raises_anything(population: Any, tmp_path: Path) -> None:
    """Each training under one of two recipes in turn, and a quarter in BF16: the laws read the same facts under each.
    `python benchmarks/clean.py` runs every pair.
    """
    names = list(population.CLEAN)
    assert len(names) >= 40
    runs = {"tensorwise": names[::2], "delayed": names[1::2], "bf16": names[::4]}
    assert not [said for recipe, some in runs.items() for said in raised(population, some, (recipe,), tmp_path, 0)]
