"""Interleaved timing: A B C A B C ..., and the ratio of each to A in the same round: other load hits all alike."""

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


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Of what a figure depends on; None: not installed. torch's own word names its build (2.11.0+cu130), pip's may not.

    Example:
        >>> versions(["torch", "no such package"]) == {"torch": torch.__version__, "no such package": None}
        True
    """
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = str(torch.__version__) if name == "torch" else version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def samples(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    measure: Callable[[Callable[[], object]], float],
    *,
    warm_up: int = 2,
    around: Mapping[str, Callable[[], AbstractContextManager[object]]] | None = None,
) -> dict[str, list[float]]:
    """Runs every variant once a round, and `measure`s it in the rounds after the first `warm_up` ones.

    Args:
        around: name of a variant -> what is entered before and left after each of its runs, unmeasured.
    Raises:
        ValueError: fewer than 2 rounds, or nothing to time.
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
    """Runs every variant once a round; the first is what the others are compared with.

    Args:
        variants: name -> what to time. Two rounds before the counted ones warm up (allocations, builds, compilers).
        rounds: counted ones, 2 or more.
        around: name of a variant -> what is entered before and left after each of its runs, untimed.
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

    times = samples(variants, rounds, measure, around=around)
    first = next(iter(times.values()))
    timings = []
    for name, own in times.items():
        ratios = [mine / max(base, 1e-12) for mine, base in zip(own, first, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        timings.append(Timing(name, 1e3 * statistics.median(own), middle, (low, high)))
    return timings
