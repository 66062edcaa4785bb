"""Interleaved timing: A B C A B C ..., and the ratio of each to A in the same round: other load hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Timing:
    """One variant of one case."""

    name: str
    """Of the variant."""
    milliseconds: float
    """Median of its rounds."""
    ratio: float
    """Median of its time over the first variant's in the same round."""
    quartiles: tuple[float, float]
    """First and third quartile of those ratios."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "milliseconds": self.milliseconds,
            "ratio": self.ratio,
            "quartiles": list(self.quartiles),
        }


def samples(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    measure: Callable[[Callable[[], object]], float],
    *,
    warm_up: int = 2,
) -> dict[str, list[float]]:
    """Runs every variant once a round, and `measure`s it in the rounds after the first `warm_up` ones.

    Raises:
        ValueError: fewer than 2 rounds, or nothing to time.
    """
    if rounds < 2:
        raise ValueError(f"rounds: got {rounds}; needs 2 or more, for quartiles")
    if not variants:
        raise ValueError("variants: got none; needs 1 or more")
    for _ in range(warm_up):
        for run in variants.values():
            run()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            times[name].append(measure(run))
    return times


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Runs every variant once a round; the first is what the others are compared with.

    Args:
        variants: name -> what to time. Two rounds before the counted ones warm up (allocations, builds, compilers).
        rounds: counted ones, 2 or more.
    Raises:
        ValueError: fewer rounds, or nothing to time.

    Example:
        >>> [timing.name for timing in interleaved({"a": lambda: 1, "b": lambda: 2}, 2)]
        ['a', 'b']
    """

    def measure(run: Callable[[], object]) -> float:
        start = clock()
        run()
        return clock() - start

    times = samples(variants, rounds, measure)
    first = next(iter(times.values()))
    timings = []
    for name, own in times.items():
        ratios = [mine / max(base, 1e-12) for mine, base in zip(own, first, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        timings.append(Timing(name, 1e3 * statistics.median(own), middle, (low, high)))
    return timings
