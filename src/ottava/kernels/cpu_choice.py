"""The order of ways to run a GEMM on this CPU, measured once a machine, not once a process.

Capability gives an order (AVX512 before AVX2 and so on). It stands unless a measurement finds a later way to be MARGIN
faster. Each way first multiplies small integers, whose sums are exact in any order; one wrong bit excludes the way.
Times are medians of CPU time on one thread, taken in turns, so a busy machine spoils them little. The first process
writes the result beside the libraries of `native.build`, and all processes, the first included, follow that file. A
process measures again for another CPU, torch, compiler or source, or if the file is missing.

Sums of different ways agree to the rounding of an fp32 accumulation, not bit by bit. Another machine may choose another
way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.kernels import gemm_choice
from ottava.kernels.gemm_choice import Choice, Store, Timer
from ottava.kernels.native import build as native_build
from ottava.numerics.formats import E4M3
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor

_LOGGER = logging.getLogger(__name__)

MARGIN = 1.1
"""A way that capability puts first keeps its place unless another takes less than 1 / 1.1 of its time."""
SIZES = (256, 512, 512)
"""(M, N, K) of the measured GEMM: a millisecond."""

Way = Callable[[Any, Any], Tensor]
"""Two operands (of E4M3 with a scale per tensor, or of the caller's `make`) -> their product in bf16."""


class Ranking(NamedTuple):
    """Ways in their order, and its reason."""

    order: tuple[str, ...]
    """Their names."""
    choice: Choice | None
    """The measurement; None: there was one way only, or the measurement failed."""
    path: Path | None
    """The file of the measurement; None: this process only."""
    note: str = ""
    """A fault: no cache, or a failed measurement."""

    def __str__(self) -> str:
        if self.choice is None:
            return self.note or "nothing, for there is one way only"
        m, n, k = SIZES
        kept = f"delete {self.path} to measure again" if self.path is not None else self.note
        return f"{self.choice} ({m} x {n} x {k}, one thread, once a machine; {kept})"


def rank(
    what: str,
    ways: Mapping[str, Way],
    key: str,
    *,
    make: Callable[[int, int, int], tuple[Any, Any]] | None = None,
    store: Store | None = None,
    timer: Timer | None = None,
) -> Ranking:
    """The order of ways on this machine, from an earlier measurement, or measured now.

    Args:
        what: name of the choice; with the names of the ways it names the measurement.
        ways: in the order of capability.
        key: a hash of sources and compiler; times depend on it besides CPU and torch.
        make: makes the operands from (M, N, K); None: `operands`.
        store: keeps the measurement; None: the cache folder.
        timer: seconds of one call; None: CPU time of the thread.
    Edge cases: it raises nothing. If no way gives the right numbers, capability's order stays and `note` says so.

    Example:
        >>> rank("one", {"only": lambda a, b: a.data}, "").order
        ('only',)
    """
    if len(ways) < 2:
        return Ranking(tuple(ways), None, None)
    store = _store(key) if store is None else store
    call = f"{what}: {', '.join(ways)}"
    note = ""
    if (choice := store.known(call)) is None:
        measured = _measure(ways, make or operands, timer or cpu_seconds)
        if isinstance(measured, str):
            _LOGGER.warning("%s: %s", what, measured)
            return Ranking(tuple(ways), None, None, measured)
        if note := store.keep(call, measured, first=True):
            _LOGGER.info("%s: %s", what, note)
        choice = store.known(call) or measured
    return Ranking(ordered(tuple(ways), choice.milliseconds), choice, None if note else store.path(call), note)


def ordered(ways: tuple[str, ...], milliseconds: Mapping[str, float]) -> tuple[str, ...]:
    """Ways in the order of capability, but a clearly faster way before the ways that it beats; failed ones last.

    Example:
        >>> ordered(("a", "b", "c", "d"), {"b": 1.0, "a": 1.05, "c": 0.5})
        ('c', 'a', 'b', 'd')
    """
    order: list[str] = []
    waiting = [way for way in ways if way in milliseconds]
    while waiting:
        fastest = min(milliseconds[way] for way in waiting)
        order.append(next(way for way in waiting if milliseconds[way] <= MARGIN * fastest))
        waiting.remove(order[-1])
    return (*order, *(way for way in ways if way not in milliseconds))


def operands(m: int, n: int, k: int) -> tuple[QuantizedTensor, QuantizedTensor]:
    """(M, K) and (N, K) of E4M3, integers from -8 to 8: up to K = 262,144 a sum is exact in fp32 in any order.

    Example:
        >>> operands(1, 1, 2)[0].data.float()
        tensor([[-8., -7.]])
    """
    spec = QuantizationSpec(E4M3)
    sides = []
    for rows, factor in ((m, 2654435761), (n, 2246822519)):  # multipliers of hashes; torch's generator stays as it is
        i = torch.arange(rows * k, device="cpu").reshape(rows, k)
        numbers = (i * factor % 2**32 >> 15) % 17 - 8
        codes = numbers.to(torch.float32).to(E4M3.storage_dtype)
        sides.append(QuantizedTensor(codes, torch.ones(1, 1, dtype=torch.float32, device="cpu"), spec, torch.bfloat16))
    return sides[0], sides[1]


def dense_operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """The same integers in bf16.

    Example:
        >>> dense_operands(1, 1, 2)[0]
        tensor([[-8., -7.]], dtype=torch.bfloat16)
    """
    a, b = operands(m, n, k)
    return a.data.to(torch.bfloat16), b.data.to(torch.bfloat16)


def cpu_seconds(run: Callable[[], Tensor]) -> float:
    """CPU time of this thread in one call; wall-clock time if the clock of threads is coarse (Windows)."""
    clock = time.thread_time if time.get_clock_info("thread_time").resolution < 1e-5 else time.perf_counter
    before = clock()
    run()
    return clock() - before


def _measure(ways: Mapping[str, Way], make: Callable[[int, int, int], tuple[Any, Any]], timer: Timer) -> Choice | str:
    """The times, or why the measurement failed.

    It runs in a new thread, because autocast, grad mode, inference mode, the modes of a debugger and OpenMP's number of
    threads belong to a thread.
    """
    results: list[Choice | str] = []

    def work() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            a, b = make(*SIZES)
            truth = (a.data.to(torch.float32) @ b.data.to(torch.float32).t()).to(torch.bfloat16)
            calls = {name: partial(way, a, b) for name, way in ways.items()}
            results.append(gemm_choice.measure(calls, lambda _, y: _judge(truth, y), timer))
        except Exception as error:  # of any kind: the order of capability needs no measurement
            results.append(f"nothing could be measured ({type(error).__name__}: {error}): capability decides")
        finally:
            torch.set_num_threads(threads)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return results[0]


def _judge(truth: Tensor, y: Tensor) -> str:
    return "" if torch.equal(y, truth) else f"{int((y != truth).sum())} of {truth.numel()} numbers are wrong"


def _store(key: str) -> Store:
    folder, note = native_build.usable_cache(native_build.from_environment().cache)
    if note:
        _LOGGER.info("GEMM choices: %s", note)
    return Store(folder, f"{native_build.cpu()}, torch {torch.__version__}, {key or 'nothing compiled'}")
