"""Runs to report on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ottava.record.reader import Run


def _run(folder: Path, **settings: bool) -> Run:
    """Imported late: `pytest -m gpu` collects without pyarrow."""
    from report_samples import train

    return train(folder, layers=3, steps=24, **settings)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three blocks, 24 steps, outliers in the second half."""
    return _run(tmp_path_factory.mktemp("report") / "small")


@pytest.fixture(scope="session")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Its twin without outliers."""
    return _run(tmp_path_factory.mktemp("report") / "good", outliers=False)
