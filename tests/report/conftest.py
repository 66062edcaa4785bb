"""Runs to report on."""

import pytest
from report_samples import train

from ottava.record.reader import Run


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three blocks, 24 steps, outliers in the second half."""
    return train(tmp_path_factory.mktemp("report") / "small", layers=3, steps=24)


@pytest.fixture(scope="session")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Its twin without outliers."""
    return train(tmp_path_factory.mktemp("report") / "good", layers=3, steps=24, outliers=False)
