"""Interleaved timing: A B C A B C ..., and the ratio of each to A in the same round.

So other load on the machine slows all variants alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of one variant of one case."""

    name: str
    """Name of the variant."""
    milliseconds: float
    """Median of its rounds."""
    ratio: float
    """Median over rounds of its time divided by that of the first variant."""
    quartiles: tuple[float, float]
    """First and third quartile of these ratios."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "milliseconds": self.milliseconds,
            "ratio": self.ratio,
            "quartiles": list(self.quartiles),
        }


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Versions of packages; None: not installed. torch.__version__ names the build (2.11.0+cu130), pip's may lack it.

    Example:
        >>> versions(["torch", "no such package"]) == {"torch": torch.__version__, "no such package": None}
        True
    """
    result: dict[str, str | None] = {}
    for name in names:
        try:
            result[name] = str(torch.__version__) if name == "torch" else version(name)
        except PackageNotFoundError:
            result[name] = None
    return result


def samples(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    measure: Callable[[Callable[[], object]], float],
    *,
    warm_up: int = 2,
    around: Mapping[str, Callable[[], AbstractContextManager[object]]] | None = None,
) -> dict[str, list[float]]:
    """Runs every variant once a round, and calls `measure` on it after the first `warm_up` rounds.

    Args:
        around: name of a variant -> context manager around each of its runs; its own time does not count.
    Raises:
        ValueError: fewer than 2 rounds, or no variants.
    """
    if rounds < 2:
        raise ValueError(f"rounds: got {rounds}; needs 2 or more, for quartiles")
    if not variants:
        raise ValueError("variants: got none; needs 1 or more")
    times: dict[str, list[float]] = {name: [] for name in variants}
    for counted in [False] * warm_up + [True] * rounds:
        for name, run in variants.items():
            with (around or {}).get(name, nullcontext)():
                if counted:
                    times[name].append(measure(run))
                else:
                    run()
    return times


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    around: Mapping[str, Callable[[], AbstractContextManager[object]]] | None = None,
) -> list[Timing]:
    """Runs every variant once a round, and compares the others with the first.

    Args:
        variants: name -> function to time. Two extra rounds come first and warm up allocations, builds and compilers.
        rounds: number of counted rounds, 2 or more.
        around: name of a variant -> context manager around each of its runs; its own time does not count.
    Raises:
        ValueError: fewer than 2 rounds, or no variants.

    Example:
        >>> [timing.name for timing in interleaved({"a": lambda: 1, "b": lambda: 2}, 2)]
        ['a', 'b']
    """

    def measure(run: Callable[[], object]) -> float:
        start = clock()
        run()
        return clock() - start

    times = samples(variants, rounds, measure, around=around)
    first = next(iter(times.values()))
    timings = []
    for name, values in times.items():
        ratios = [value / max(base, 1e-12) for value, base in zip(values, first, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        timings.append(Timing(name, 1e3 * statistics.median(values), middle, (low, high)))
    return timings
