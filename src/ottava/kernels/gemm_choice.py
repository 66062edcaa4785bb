"""Measures on request which way to run a GEMM is the fastest on this device, and keeps the times on disk.

Nothing measures without a request: a job must not pause in its first steps, nor differ from run to run. A process reads
the files once. A file belongs to one call (formats, scales, M, N, K, output, bias, accumulation) on one kind of device
under certain versions of torch, CUDA and Triton. Its name is a hash of all that, and it holds a checksum. It also holds
a hash of each kernel's sources; a change of one of them outdates the choice (`Choice.made_of`). A rename publishes the
file, so racing processes do no harm, and a process ignores a damaged file. If no process can write to the cache, a
measurement holds for its own process.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.base.untrusted import parse_json, read_text
from ottava.kernels.native import build as native_build
from ottava.numerics.formats import E4M3, dtype_name
from ottava.numerics.tensor import GemmCall, QuantizationSpec, QuantizedTensor

_LOGGER = logging.getLogger(__name__)
_ROUNDS = 9
_WARM_UP = 2
_TOLD = 0.01  # an error on magnitudes that is worth a word
_FLUSH_BYTES = 256 * 2**20  # several times the L2 cache of an H200

Timer = Callable[[Callable[[], Tensor]], float]
"""One call -> its seconds."""
Judge = Callable[[str, Tensor], str]
"""A way and its result -> its fault, "" if it has none."""


class Choice(NamedTuple):
    """The measurement of one call."""

    milliseconds: Mapping[str, float]
    """Way (a kernel's name, with a configuration if it has several) -> median, the fastest first."""
    failed: Mapping[str, str]
    """Way -> its fault: an error, or a wrong result."""
    made_of: Mapping[str, str] = MappingProxyType({})
    """Name of each kernel of the device -> `hash_of_sources` at that time."""
    biased: Mapping[str, float] = MappingProxyType({})
    """Way -> its relative error on the magnitudes of the operands, where a short accumulator loses most."""

    @property
    def kernel(self) -> str:
        """Name of the fastest kernel."""
        return next(iter(self.milliseconds)).split()[0]

    def __str__(self) -> str:
        off = {way: f", {error:.0%} off on magnitudes" for way, error in self.biased.items() if error >= _TOLD}
        times = [f"{way} {value:.4g} ms{off.get(way, '')}" for way, value in self.milliseconds.items()]
        return "; ".join([*times, *(f"{way}: {why}" for way, why in self.failed.items())])


class Store:
    """The choices of one kind of device, from files and from this process.

    Args:
        folder: of the files; None: choices end with the process.
        device: kind and versions on which times depend; see `device_name`.
    """

    def __init__(self, folder: Path | None, device: str) -> None:
        self._folder, self._device = folder, device
        self._choices: dict[str, Choice] = {}
        self.changes = 0
        """The number of calls of `keep`; each outdates earlier plans."""
        # one reading of the folder: later files of other processes hold for later processes, so that no run changes
        # kernels in its middle
        for path in sorted(folder.glob(f"gemm-{_hash(device)}-*.json")) if folder is not None else ():
            if (read := _read(path)) is not None:
                self._choices[read[0]] = read[1]

    def __len__(self) -> int:
        return len(self._choices)

    def known(self, call: str) -> Choice | None:
        """The choice for a call; None: there is none yet."""
        return self._choices.get(call)

    def path(self, call: str) -> Path | None:
        """The file of a call's choice; delete it to measure again. None: the choice ends with the process."""
        return None if self._folder is None else self._folder / f"gemm-{_hash(self._device)}-{_hash(call)}.json"

    def keep(self, call: str, choice: Choice, first: bool = False) -> str:
        """Keeps a choice, for later processes too. Returns why it could not, or "".

        first: if another process has kept one in the meantime, take that one.
        """
        self._choices[call] = choice
        self.changes += 1  # plans hold the number at which they were made
        path = self.path(call)
        if path is None:
            return "no cache folder: the measurement holds for this process; set OTTAVA_CACHE"
        # mappings are read-only views, which json does not take
        plain = {name: dict(value) for name, value in choice._asdict().items()}
        body = json.dumps({"call": call, "device": self._device, **plain})
        try:
            handle, name = tempfile.mkstemp(prefix=".gemm-", dir=path.parent)
            # the checksum is that of the text as it stands in the file: parsing and writing it again may give other
            # text
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"sha256": _hash(body), "body": body}, file)
            if first and (theirs := _publish(Path(name), path)) is not None:
                self._choices[call] = theirs
            elif not first:
                os.replace(name, path)  # a reader sees the old file or the new one, whole
        except OSError as error:
            return f"{self._folder} cannot be written ({error.strerror}): the measurement holds for this process"
        return ""


def call_name(*call: *GemmCall) -> str:
    """The facts of a call that decide its time, in words.

    Example:
        >>> import ottava
        >>> x_q = ottava.quantize(torch.ones(2, 4), ottava.QuantizationSpec(ottava.E4M3))
        >>> call_name(x_q, x_q, torch.bfloat16, None, False)
        'E4M3[tensor] x E4M3[tensor] 2x2x4 bfloat16'
    """
    a, b, out_dtype, bias, fast_accum = call
    sides = [f"{x.spec.format}[{x.spec.granularity}]" for x in (a, b)]
    sizes = f"{a.shape[0]}x{b.shape[0]}x{a.shape[1]}"
    extras = (f" bias {dtype_name(bias.dtype)}" if bias is not None else "") + (" fast" if fast_accum else "")
    return f"{sides[0]} x {sides[1]} {sizes} {dtype_name(out_dtype)}{extras}"


def known(*call: *GemmCall) -> Choice | None:
    """The choice for a call on its device; None: there is none, or the device is no CUDA device."""
    if call[0].device.type != "cuda":
        return None
    choices = store(call[0].device)
    return choices.known(call_name(*call)) if len(choices) else None


@functools.cache
def store(device: torch.device) -> Store:
    """The choices of a CUDA device, in the cache folder of `native.build`; a process reads them once."""
    if not torch.cuda.is_available():  # a fake tensor's device
        return Store(None, str(device))
    return Store(_cache(), device_name(device))


def _cache() -> Path | None:
    folder, note = native_build.usable_cache(native_build.from_environment().cache)
    if note:
        _LOGGER.info("GEMM choices: %s", note)
    return folder


def device_name(device: torch.device) -> str:
    """The kind of device and the versions on which a choice depends."""
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    parts = [torch.cuda.get_device_name(device), capability, torch.__version__, str(torch.version.cuda)]
    try:
        parts.append(version("triton"))
    except PackageNotFoundError:
        parts.append("no triton")
    return ", ".join(parts)


@functools.cache
def hash_of_sources(kernel: ModuleType) -> str:
    """A hash of a kernel's source files: those of its SOURCES, or its own file."""
    own = Path(inspect.getfile(kernel))
    names = getattr(kernel, "SOURCES", (own.name,))
    return _hash("\0".join(own.with_name(name).read_text("utf-8") for name in names))


def measure(ways: Mapping[str, Callable[[], Tensor]], judge: Judge, timer: Timer) -> Choice:
    """Runs all ways in turns and takes medians; excludes ways that fail or give wrong numbers.

    Raises:
        RuntimeError: no way worked.
    """
    failed: dict[str, str] = {}
    for name, run in ways.items():
        try:
            y = run()  # the first run, outside of the clock: it may compile
            wrong = judge(name, y)
            for _ in range(_WARM_UP):
                run()
        except Exception as error:  # too little shared memory, a compiler's bug: any error excludes the way
            wrong = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if wrong:
            failed[name] = wrong
    samples: dict[str, list[float]] = {name: [] for name in ways if name not in failed}
    if not samples:
        raise RuntimeError(f"no way to run this GEMM works: {Choice({}, failed)}")
    # in turns, so that a neighbour who takes the machine for a moment takes it from all of them
    for _ in range(_ROUNDS):
        for name, times in samples.items():
            times.append(timer(ways[name]) * 1e3)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    return Choice(dict(sorted(medians.items(), key=lambda item: item[1])), failed)


def device_timer(device: torch.device) -> Timer:
    """A timer by CUDA events; it empties the L2 cache before each call."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def seconds(run: Callable[[], Tensor]) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()  # operands come from memory, as in a step
        before.record()
        run()
        after.record()
        after.synchronize()  # the one wait: events are read when the call has ended
        return float(before.elapsed_time(after)) / 1e3

    return seconds


def _publish(written: Path, path: Path) -> Choice | None:
    """First writer wins: puts a file in its place, or returns the choice of a whole file that is already there."""
    try:
        # a link fails where the name is taken, and a rename would not: so the first of several processes decides
        os.link(written, path)
    except OSError:  # it exists, or this file system has no links
        if (theirs := _read(path)) is not None:
            written.unlink()
            return theirs[1]
        os.replace(written, path)
    else:
        written.unlink()
    return None


def _read(path: Path) -> tuple[str, Choice] | None:
    """(call, choice); None for a damaged or foreign file."""
    try:
        outer = parse_json(read_text(path))
        if outer["sha256"] != _hash(outer["body"]):
            return None
        body: dict[str, Any] = parse_json(outer["body"])
        times = {str(way): float(value) for way, value in body["milliseconds"].items()}
        # a file with the right checksum may still be one of another program
        if not times or not all(math.isfinite(value) for value in times.values()):
            return None
        biased = {str(way): float(value) for way, value in body.get("biased", {}).items()}
        return str(body["call"]), Choice(times, dict(body["failed"]), dict(body.get("made_of", {})), biased)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]  # 80 bits: a name of a file, and no secret


# --- a CPU: the order of ways to run a GEMM, measured once a machine ---

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
    """
    if len(ways) < 2:
        return Ranking(tuple(ways), None, None)
    if store is None:
        store = Store(_cache(), f"{native_build.cpu()}, torch {torch.__version__}, {key or 'nothing compiled'}")
    call = f"{what}: {', '.join(ways)}"
    note = ""
    if (choice := store.known(call)) is None:
        measured = _measure(ways, make or operands, timer or cpu_seconds)
        if isinstance(measured, str):
            _LOGGER.warning("%s: %s", what, measured)
            return Ranking(tuple(ways), None, None, measured)
        if note := store.keep(call, measured, first=True):
            _LOGGER.info("%s: %s", what, note)
        choice = store.known(call) or measured  # another process may have been first
    return Ranking(ordered(tuple(ways), choice.milliseconds), choice, None if note else store.path(call), note)


def ordered(ways: tuple[str, ...], milliseconds: Mapping[str, float]) -> tuple[str, ...]:
    """Ways in the order of capability, but a clearly faster way before the ways that it beats; failed ones last.

    Example:
        >>> ordered(("a", "b", "c", "d"), {"b": 1.0, "a": 1.05, "c": 0.5})
        ('c', 'a', 'b', 'd')
    """
    order: list[str] = []
    waiting = [way for way in ways if way in milliseconds]
    # not a sort by time: a way keeps its place before one that is faster by less than MARGIN, so two machines of one
    # kind have one order
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
        # no random numbers: drawing some would move the generator of a run that only asks for a kernel
        i = torch.arange(rows * k, device="cpu").reshape(rows, k)
        numbers = (i * factor % 2**32 >> 15) % 17 - 8
        codes = numbers.to(torch.float32).to(E4M3.storage_dtype)
        sides.append(QuantizedTensor(codes, torch.ones(1, 1, dtype=torch.float32, device="cpu"), spec, torch.bfloat16))
    return sides[0], sides[1]


def dense_operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """The same integers in bf16."""
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
        torch.set_num_threads(1)  # one thread: the order shall not depend on who else computes
        try:
            a, b = make(*SIZES)
            truth = (a.data.to(torch.float32) @ b.data.to(torch.float32).t()).to(torch.bfloat16)
            calls = {name: partial(way, a, b) for name, way in ways.items()}
            results.append(measure(calls, lambda _, y: _judge(truth, y), timer))
        except Exception as error:  # of any kind: the order of capability needs no measurement
            results.append(f"nothing could be measured ({type(error).__name__}: {error}): capability decides")
        finally:
            torch.set_num_threads(threads)

    # torch.set_num_threads(1) in this thread would stay for the caller's OpenMP team
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return results[0]


def _judge(truth: Tensor, y: Tensor) -> str:
    return "" if torch.equal(y, truth) else f"{int((y != truth).sum())} of {truth.numel()} numbers are wrong"
