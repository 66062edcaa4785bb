"""`./x soak` tells what grows from what does not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import soak


def run(growth: float, rounds: int = 120, noise: float = 1.0) -> list[dict[str, float]]:
    """An hour in which memory grows by so many MiB."""
    rng = random.Random(0)
    flat = dict.fromkeys(soak.BOUNDS, 100.0)
    return [
        flat | {"seconds": 3600 * i / rounds, "memory": 500 + growth * i / rounds + rng.gauss(0, noise)}
        for i in range(rounds)
    ]


def test_a_slope_beyond_its_bound_grows_and_noise_does_not() -> None:
    """The bound is 5 % of the mean an hour: 25 MiB of 500."""
    for growth, noise, verdict in (
        (0, 1, soak.FLAT),
        (10, 1, soak.FLAT),
        (60, 1, soak.GROWS),
        (25, 20, soak.UNDECIDED),
    ):
        found = soak.judge(run(growth, noise=noise))
        assert found["memory"]["verdict"] == verdict, (growth, found["memory"])
        assert {found[name]["verdict"] for name in soak.BOUNDS if name != "memory"} == {soak.FLAT}


def test_the_slope_of_a_line_is_exact_and_one_wild_sample_moves_nothing() -> None:
    hours = [i / 64 for i in range(64)]
    line = [3.0 + 2.0 * hour for hour in hours]
    assert soak.theil_sen(hours, line) == pytest.approx((2.0, 2.0, 2.0))
    line[40] += 1e6
    assert soak.theil_sen(hours, line).middle == pytest.approx(2.0)


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="9 rounds are too few"):
        soak.judge(run(0, rounds=9))


def test_a_planted_leak_is_seen(tmp_path: Path) -> None:
    """Files that stay open, one a round; every other series may be undecided in so short a run."""
    held = []
    found = soak.soak(
        0.01, tmp_path, lambda sample: held.append((tmp_path / f"{len(held)}").open("w")), ("bf16", "delayed", "mxfp8")
    )
    for file in held:
        file.close()
    assert found["series"]["descriptors"]["verdict"] == soak.GROWS
    assert found["series"]["threads"]["verdict"] == soak.FLAT
    assert soak.picture(found).count('class="chart"') == len(soak.BOUNDS)
