"""In which order ways to run a GEMM on this CPU are to be tried: measured once a machine, not once a process.

Capability gives an order (AVX512 before AVX2 and so on); it stands unless a later way was measured to be MARGIN faster.
Each way first multiplies small integers, whose sums are exact in any order: one wrong bit and it is out. Times are CPU
time on one thread, in turns, medians: a busy machine spoils them little. The first process to measure writes the result
beside the libraries of `native.build`, and all processes, itself included, go by what is there. It is measured anew for
another CPU, torch, compiler or source, and when the file is deleted.

Sums of different ways agree to the rounding of an fp32 accumulation, not bit by bit, and another machine may choose
another way.
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

from ottava.formats import E4M3
from ottava.kernels import gemm_choice
from ottava.kernels.gemm_choice import Choice, Store, Timer
from ottava.kernels.native import build as native_build
from ottava.quantized_tensor import QuantizationSpec, QuantizedTensor

_LOGGER = logging.getLogger(__name__)

MARGIN = 1.1
"""A way that capability puts first keeps its place unless another takes less than 1 / 1.1 of its time."""
SIZES = (256, 512, 512)
"""(M, N, K) of what is measured: a millisecond."""

Way = Callable[[Any, Any], Tensor]
"""Two operands (of E4M3 with a scale per tensor, or what else was made) -> their product in bf16."""


class Ranking(NamedTuple):
    """Ways in the order in which they are to be tried, and why."""

    order: tuple[str, ...]
    """Their names."""
    choice: Choice | None
    """What was measured; None: there was nothing to choose, or nothing could be measured."""
    path: Path | None
    """The file that says so; None: this process only."""
    note: str = ""
    """What is not as it should be: no cache, or nothing could be measured."""

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
    """The order in which ways are to be tried here: as it was measured on this machine, now if that has not happened.

    Args:
        what: is chosen; with the names of the ways it names the measurement.
        ways: in the order of capability.
        key: what times depend on besides CPU and torch: a hash of sources and compiler.
        make: makes what is multiplied, of (M, N, K); None: `operands`.
        store: where it is kept; None: the cache folder.
        timer: seconds of one call; None: CPU time of the thread.
    Edge cases: nothing is raised. Where no way gives the right numbers, capability's order stays and `note` says so.

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
    """Ways in the order of capability, but those that are clearly faster before those that they beat; failed ones last.

    Example:
        >>> ordered(("a", "b", "c", "d"), {"b": 1.0, "a": 1.05, "c": 0.5})
        ('c', 'a', 'b', 'd')
    """
    order: list[str] = []
    left = [way for way in ways if way in milliseconds]
    while left:
        fastest = min(milliseconds[way] for way in left)
        order.append(next(way for way in left if milliseconds[way] <= MARGIN * fastest))
        left.remove(order[-1])
    return (*order, *(way for way in ways if way not in milliseconds))


def operands(m: int, n: int, k: int) -> tuple[QuantizedTensor, QuantizedTensor]:
    """(M, K) and (N, K) of E4M3, integers from -8 to 8: up to K = 262,144 a sum is exact in fp32 in any order.

    Example:
        >>> operands(1, 1, 2)[0].data.float()
        tensor([[-8., -7.]])
    """
    spec = QuantizationSpec(E4M3)
    sides = []
    for rows, factor in ((m, 2654435761), (n, 2246822519)):  # as hashes scatter; no generator is touched
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
    """CPU time of this thread in one call; where the clock of threads is coarse (Windows), wall-clock time."""
    clock = time.thread_time if time.get_clock_info("thread_time").resolution < 1e-5 else time.perf_counter
    before = clock()
    run()
    return clock() - before


def _measure(ways: Mapping[str, Way], make: Callable[[int, int, int], tuple[Any, Any]], timer: Timer) -> Choice | str:
    """What they take, or why nothing could be measured.

    In a thread of its own: autocast, gradients, inference and the modes of a debugger are a thread's own, and so is the
    number of threads that OpenMP takes.
    """
    found: list[Choice | str] = []

    def work() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            a, b = make(*SIZES)
            truth = (a.data.to(torch.float32) @ b.data.to(torch.float32).t()).to(torch.bfloat16)
            calls = {name: partial(way, a, b) for name, way in ways.items()}
            found.append(gemm_choice.measure(calls, partial(_judge, truth), timer))
        except Exception as error:  # whatever it is: the order of capability needs no measurement
            found.append(f"nothing could be measured ({type(error).__name__}: {error}): capability decides")
        finally:
            torch.set_num_threads(threads)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def _judge(truth: Tensor, y: Tensor) -> str:
    return "" if torch.equal(y, truth) else f"{int((y != truth).sum())} of {truth.numel()} numbers are wrong"


def _store(key: str) -> Store:
    folder, note = native_build.usable_cache(native_build.from_environment().cache)
    if note:
        _LOGGER.info("GEMM choices: %s", note)
    return Store(folder, f"{native_build.cpu()}, torch {torch.__version__}, {key or 'nothing compiled'}")
