"""The method of the GPU suites: random inputs, buffers larger than the L2 cache, contenders in turn, checks.

Inputs are random normal numbers, because zeros run 13% faster. CUDA events measure the time, behind a pause of the
device in which the host issues all work: no sample waits for Python. After a warm-up the contenders take turns; the
result is the median with the 10th and 90th percentile. The same run checks the result of every contender: one that is
wrong, or that fails, has a row with its error instead of a time, and the others go on.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

L2_BYTES = 180 * 2**20  # three times an H200's L2 cache
_AT_MOST = 64
_LEAST = 3  # samples of a contender, however little time is left
_CLOCK = 2e9  # cycles a second of a multiprocessor, at most; a longer pause costs time and changes no sample
_LONGEST = 0.02  # seconds of a pause

Rows = Iterator[dict[str, Any]]


class WrongResultError(Exception):
    """A contender computed a wrong result; its times would mean nothing."""

    exit_code = 1


@dataclass(frozen=True)
class Run:
    """Settings of a suite.

    Example:
        >>> Run(torch.device("cpu"), smoke=True, rounds=3).shapes((4096, 4096), (8192, 8192))
        ((64, 64),)
    """

    device: torch.device
    """Device of the measurement."""
    smoke: bool
    """Tiny shapes, to check the program; the times mean nothing."""
    rounds: int
    """Samples of each contender."""
    rivals: bool = True
    """Whether to measure other installed packages too."""
    compiled: bool = True
    """Whether to measure contenders under torch.compile."""
    shape: tuple[int, ...] | None = None
    """(M, K, N) in place of the shapes of a suite."""
    recipes: tuple[str, ...] = ()
    """The recipes to measure; none: those of the suite."""
    until: float = math.inf
    """When `time.monotonic` says this, no new case begins, and no contender gets more than three samples."""

    @property
    def cuda(self) -> bool:
        """Whether the device has CUDA events, graphs and a profiler."""
        return self.device.type == "cuda"

    def shapes(self, *full: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes, (M, K) or (M, K, N); the one that the user has named; in a smoke run one tiny shape."""
        if self.smoke:
            return (tuple(64 for _ in full[0]),)
        return full if self.shape is None else (self.shape[: len(full[0])],)

    def chosen(self, recipes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of a suite's recipes that the user wants, or the user's own."""
        return self.recipes or recipes

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() > self.until

    def part(self, of: int) -> Run:
        """The same with one of so many equal parts of the time that is left."""
        now = time.monotonic()
        return replace(self, until=now + max(self.until - now, 0.0) / of)


def failure(error: Exception) -> dict[str, Any]:
    """What the row of a contender that failed says instead of times.

    Example:
        >>> failure(RuntimeError("out of memory, and a long story"))
        {'error': 'RuntimeError: out of memory, and a long story'}
    """
    return {"error": f"{type(error).__name__}: {str(error).strip()[:500]}"}


def cases(run: Run, shapes: Iterable[tuple[int, ...]], measure: Callable[..., Rows]) -> Rows:
    """The rows of `measure(run, *shape)` for each shape, as they come; each has an equal part of the time left.

    A case that fails, and one that had no time, has a row that says so.
    """
    waiting = list(shapes)
    while waiting:
        shape, part = waiting[0], run.part(len(waiting))
        waiting.pop(0)
        if run.late:
            yield {"shape": list(shape), "error": "left out: the time of --budget was over"}
            continue
        try:
            yield from measure(part, *shape)
        except Exception as error:  # it need not be the end of the others
            yield {"shape": list(shape), **failure(error)}
        if run.cuda:
            torch.cuda.empty_cache()  # one that ran out of memory leaves the next one all of it


def seconds(run: Run, work: Callable[[], Any], host: float = 0.0) -> float:
    """Seconds of one call, by CUDA events on a GPU.

    host: seconds in which the host issues it; so long the device pauses first, and then it waits for nobody.
    """
    if not run.cuda:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(1.5 * min(host, _LONGEST) * _CLOCK))
    start_event.record()
    work()
    end_event.record()
    end_event.synchronize()
    return float(start_event.elapsed_time(end_event)) / 1e3


def host_seconds(run: Run, work: Callable[[], Any], _: float = 0.0) -> float:
    """Seconds of one call until the host is free again. The device is idle at the start."""
    if run.cuda:
        torch.cuda.synchronize(run.device)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def race(
    run: Run,
    contenders: Mapping[str, Callable[[], Any]],
    measure: Callable[[Run, Callable[[], Any], float], float] = seconds,
) -> dict[str, dict[str, Any]]:
    """Name -> median, p10, p90 in seconds; the contenders take turns. Who fails has an error, and drops out."""
    failed: dict[str, dict[str, Any]] = {}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    host: dict[str, float] = {}
    warm_up = 1 if run.smoke else 10
    for turn in range(warm_up + run.rounds):
        if run.late and (0 < turn < warm_up or turn >= warm_up + _LEAST):
            continue
        for name in list(times):
            try:
                if turn < warm_up:
                    host[name] = host_seconds(run, contenders[name])
                else:
                    times[name].append(measure(run, contenders[name], host[name]))
            except Exception as error:
                failed[name] = failure(error)
                del times[name]
    return {name: failed.get(name) or summary(times[name]) for name in contenders}


def summary(values: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile.

    Example:
        >>> summary([1.0, 2.0, 3.0])
        {'median': 2.0, 'p10': 1.2, 'p90': 2.8}
    """
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}


def rotating(run: Run, make: Callable[[], Any], nbytes: int) -> Callable[[], Any]:
    """Returns a function that yields several equal inputs in turn: none of them stays in the L2 cache."""
    count = 1 if run.smoke else max(2, -(-L2_BYTES // nbytes))
    turns = itertools.cycle([make() for _ in range(min(count, _AT_MOST))])
    return lambda: next(turns)


def check(name: str, got: Tensor, want: Tensor, tolerance: float) -> float:
    """Computes the relative error in the Frobenius norm, and returns it.

    Raises:
        WrongResultError: the error is not below the tolerance, or NaN.
    """
    got, want = got.detach(), want.detach()
    error = float((got.double() - want.double()).norm() / want.double().norm())
    if not error < tolerance:
        raise WrongResultError(
            f"{name}: relative error {error:.3g} is not below {tolerance}, so its times mean nothing. Run the tests on "
            "this machine: pytest -m gpu"
        )
    return error


def normal(run: Run, *shape: int) -> Tensor:
    """Random normal numbers in BF16."""
    return torch.randn(*shape, device=run.device, dtype=torch.bfloat16)


def replayed(work: Callable[[], Any]) -> Callable[[], Any]:
    """The same work as a CUDA graph: GPU time without host time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def step(module: Callable[[Tensor], Tensor], owner: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Forward and backward of `module` with the parameters of `owner`. Each call makes new gradients."""

    def work() -> None:
        x.grad = None
        for parameter in owner.parameters():
            parameter.grad = None
        module(x).backward(dy)

    return work


def step_bytes(run: Run, work: Callable[[], Any]) -> int | None:
    """Peak memory of one call, minus the memory that all contenders hold at its start. None without a GPU."""
    if not run.cuda:
        return None
    work()
    torch.cuda.synchronize(run.device)
    held = torch.cuda.memory_allocated(run.device)
    torch.cuda.reset_peak_memory_stats(run.device)
    work()
    torch.cuda.synchronize(run.device)
    return int(torch.cuda.max_memory_allocated(run.device)) - held


def launches(run: Run, work: Callable[[], Any]) -> int | None:
    """Kernels, fills and copies of one call, counted by torch's profiler. None without a GPU."""
    if not run.cuda:
        return None
    work()
    torch.cuda.synchronize(run.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize(run.device)
    return sum(bool(event.device_type.name == "CUDA") for event in profile.events() or [])


# --- rounds: A B C A B C ..., and the ratio of each to A in the same round -------------------------------------------


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

    if rounds < 2:
        raise ValueError(f"rounds: got {rounds}; needs 2 or more, for quartiles")
    if not variants:
        raise ValueError("variants: got none; needs 1 or more")
    times: dict[str, list[float]] = {name: [] for name in variants}
    for counted in (False, False, *[True] * rounds):
        for name, run in variants.items():
            with (around or {}).get(name, nullcontext)():
                start = clock()
                run()
                if counted:
                    times[name].append(clock() - start)
    first = next(iter(times.values()))
    timings = []
    for name, values in times.items():
        ratios = [value / max(base, 1e-12) for value, base in zip(values, first, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        timings.append(Timing(name, 1e3 * statistics.median(values), middle, (low, high)))
    return timings
