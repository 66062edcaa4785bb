"""Fixtures of the made-up demo."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

import demo_samples
from ottava.train.verdict import DemoResult, RunResult


@pytest.fixture
def make_run() -> Callable[..., RunResult]:
    return demo_samples.made_run


@pytest.fixture
def make_demo() -> Callable[[Sequence[RunResult]], DemoResult]:
    return demo_samples.made_demo


@pytest.fixture
def usual_runs() -> list[RunResult]:
    return demo_samples.usual_runs()


@pytest.fixture
def usual_demo(usual_runs: list[RunResult]) -> DemoResult:
    return demo_samples.made_demo(usual_runs)
