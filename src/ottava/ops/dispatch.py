"""Chooses the kernel of a GEMM, from tables of kernels and from measurements.

The first kernel that supports a call runs it, unless a measurement found a faster one: `ops.gemm.tune_gemm` measures on
a GPU, `cpu_ranking` once a machine on a CPU. A new kernel is one file in `kernels` and one entry in a table here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from ottava.base.errors import unknown_name
from ottava.kernels import accumulate, bf16_mm, decoded, gemm_choice, reference, scaled_mm, torch_mm
from ottava.kernels.gate import no_autocast
from ottava.kernels.native import accumulate as native_accumulate
from ottava.kernels.native import gemm as native_gemm
from ottava.kernels.native.build import Built
from ottava.kernels.triton import gemm as triton_gemm
from ottava.numerics.accumulator import Accumulator
from ottava.numerics.tensor import GemmCall, QuantizedTensor, RunGemm

Kernel = TypeVar("Kernel")


class GemmKernel(Protocol):
    """The interface of a kernel file for GEMMs. Beside what stands below it has one of

        plan_gemm       (a, b, out_dtype, bias, fast_accum) -> (a, b, bias) -> Tensor, for all operands like these
        gemm            (a, b, out_dtype, bias, fast_accum) -> Tensor

    and may have

        padding         (a, b) -> the zero-padded sizes, "" if none
        ways            (a, b, out_dtype, bias, fast_accum) -> {its configurations: calls}, for `ops.gemm.tune_gemm`
        SOURCES         names of its files, if it has more than one
        reads_scales    (a, b) -> whether the answer of `supports_gemm` depends on numbers among the scales
    """

    NAME: str
    """Its name in receipts."""
    NATIVE: bool
    """Whether FP8 operands stay FP8 inside the GEMM; False: emulated."""

    def supports_gemm(
        self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None
    ) -> str | None:
        """None, or the reason why not."""


# The order of capability; `cpu_ranking` moves a kernel that is clearly faster. On a CPU torch's scaled GEMM rounds more
# often than the others. It is an oracle there, not an engine, and keeps its place.
CPU_KERNELS: tuple[GemmKernel, ...] = (native_gemm, bf16_mm, native_gemm.Decoded, reference, scaled_mm)
# Triton's runs if `tune_gemm` measured it to be the fastest; without a measurement torch's come first.
ACCELERATOR_KERNELS: tuple[GemmKernel, ...] = (scaled_mm, decoded, triton_gemm, reference)


BATCH_INVARIANT = native_gemm.BatchInvariant
"""The one kernel whose bits of a row do not depend on the other rows; it runs where it is asked for by name."""


class AccumulatingKernel(Protocol):
    """The interface of a kernel file for GEMMs under an `Accumulator`."""

    NAME: str
    NATIVE: bool

    def supports_accumulate(
        self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, accumulator: Accumulator
    ) -> str | None:
        """None, or the reason why not."""

    def plan_accumulate(
        self,
        a: QuantizedTensor,
        b: QuantizedTensor,
        out_dtype: torch.dtype,
        bias: Tensor | None,
        accumulator: Accumulator,
    ) -> Callable[..., Tensor]:
        """A function (a, b, bias, c=None) -> (M, N) for all operands like these; c starts the accumulator."""


ACCUMULATING_KERNELS: tuple[AccumulatingKernel, ...] = (native_accumulate, accumulate)
"""For a named accumulator, on any device: emulations, all with the same bits. A device's own sums have no name."""


class DenseKernel(Protocol):
    """The interface of a kernel file for matrices in high precision."""

    NAME: str

    def supports_dense(self, a: Tensor, b: Tensor) -> str | None:
        """None, or the reason why not."""

    def plan_dense(
        self, a: Tensor, b: Tensor, bias: Tensor | None
    ) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        """A function (a (M, K), b (N, K), bias) -> (M, N) in their dtype, for all matrices like these."""


DENSE_KERNELS: tuple[DenseKernel, ...] = (torch_mm, native_gemm, reference)
"""For BF16 on a CPU, in the order of capability; everywhere else torch's runs."""


def choose_accumulating(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, accumulator: Accumulator, backend: str | None = None
) -> tuple[AccumulatingKernel, tuple[str, ...]]:
    """The kernel for a call under a profile, and why those before it do not run; `backend` names one.

    Raises:
        ValueError: an unknown backend, or one that does not take the call; or no kernel takes it.
    """
    # each of them sums an element alone, so all are batch invariant
    kernels = [kernel for kernel in ACCUMULATING_KERNELS if backend in (None, kernel.NAME, BATCH_INVARIANT.NAME)]
    if not kernels:
        names = [kernel.NAME for kernel in ACCUMULATING_KERNELS]
        raise ValueError(f"gemm: {unknown_name(f'backend under accumulator {accumulator.name!r}', backend, names)}")
    return _first(kernels, lambda kernel: kernel.supports_accumulate(a, b, out_dtype, accumulator))


def _first(kernels: Iterable[Kernel], ask: Callable[[Kernel], str | None]) -> tuple[Kernel, tuple[str, ...]]:
    """The first kernel that takes a call, and why those before it do not. Raises ValueError if none takes it."""
    refusals: list[str] = []
    for kernel in kernels:
        if (reason := ask(kernel)) is None:
            return kernel, tuple(refusals)
        refusals.append(reason)
    raise ValueError("gemm: no kernel takes this call. " + "; ".join(refusals))


def told(kernels: Iterable[Any], chosen: Any, ask: Callable[[Any], str | None], why: str = "comes first") -> list[str]:
    """A line for each kernel of a table: that it runs, or why not."""
    return [
        f"{one.NAME}: runs" if one is chosen else ask(one) or f"{one.NAME}: supported, but {chosen.NAME} {why}"
        for one in kernels
    ]


def explain_accumulating(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, profile: Accumulator) -> str:
    """Which kernel emulates a profile, and why not the others; as `ops.gemm.explain`."""
    chosen = choose_accumulating(a, b, out_dtype, profile)[0]
    lines = told(ACCUMULATING_KERNELS, chosen, lambda kernel: kernel.supports_accumulate(a, b, out_dtype, profile))
    return "\n".join([*lines, f"accumulator: {profile}{'' if profile.confirmed else ', unconfirmed'}"])


def gemm_kernels(device: torch.device) -> tuple[GemmKernel, ...]:
    """The kernels of a device, in the order in which dispatch asks them."""
    if device.type != "cpu":
        return ACCELERATOR_KERNELS  # no ranking: there each call has a measurement of its own
    return _in_order(CPU_KERNELS, native_gemm.built())


@functools.lru_cache(maxsize=8)
def _in_order(kernels: tuple[GemmKernel, ...], native: Built) -> tuple[GemmKernel, ...]:
    """The measured kernels change places among themselves; `native_decoded` makes the reference's bits before it."""
    # names of ways carry their instruction set behind a blank
    order = [way.split()[0] for way in _cpu_ranking(kernels, native).order]
    fastest = iter(sorted((kernel for kernel in kernels if kernel.NAME in order), key=lambda k: order.index(k.NAME)))
    placed = [
        next(fastest) if kernel.NAME in order else kernel for kernel in kernels if kernel is not native_gemm.Decoded
    ]
    if native_gemm.Decoded in kernels:
        placed.insert(placed.index(reference), native_gemm.Decoded)
    return tuple(placed)


def cpu_ranking() -> gemm_choice.Ranking:
    """The order of kernels on this CPU, measured once a machine; it builds the native kernel."""
    return _cpu_ranking(CPU_KERNELS, native_gemm.built())


@functools.lru_cache(maxsize=8)
def _cpu_ranking(kernels: tuple[GemmKernel, ...], native: Built) -> gemm_choice.Ranking:
    def way(kernel: GemmKernel, a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        return runner(kernel, a, b, torch.bfloat16, None, False)(a, b, None)

    a, b = gemm_choice.operands(2, 2, 32)  # only to ask who takes such formats; `rank` times large ones
    # torch's FP8 GEMM on a CPU is an oracle for tests, not a rival
    rivals = [one for one in kernels if one is not scaled_mm and one.supports_gemm(a, b, torch.bfloat16, None) is None]
    return gemm_choice.rank("kernels", {_way_of(one): partial(way, one) for one in rivals}, native.key)


def _way_of(kernel: GemmKernel | DenseKernel) -> str:
    return f"{kernel.NAME} {native_gemm.fastest().name}" if kernel is native_gemm else kernel.NAME


def dense_kernels(device: torch.device, dtype: torch.dtype) -> tuple[DenseKernel, ...]:
    """The kernels for high precision, in the order in which dispatch asks them."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return (torch_mm,)
    return _dense_in_order(DENSE_KERNELS, native_gemm.built())


@functools.lru_cache(maxsize=8)
def _dense_in_order(kernels: tuple[DenseKernel, ...], native: Built) -> tuple[DenseKernel, ...]:
    order = [way.split()[0] for way in _dense_ranking(kernels, native).order]
    return tuple(sorted((k for k in kernels if k.NAME in order), key=lambda k: order.index(k.NAME)))


def dense_ranking() -> gemm_choice.Ranking:
    """The order of kernels for BF16 operands on this CPU, measured once a machine.

    torch emulates BF16 on a CPU without BF16 units, which takes longer than fp32.
    """
    return _dense_ranking(DENSE_KERNELS, native_gemm.built())


@functools.lru_cache(maxsize=8)
def _dense_ranking(kernels: tuple[DenseKernel, ...], native: Built) -> gemm_choice.Ranking:
    def way(kernel: DenseKernel, a: Tensor, b: Tensor) -> Tensor:
        return kernel.plan_dense(a, b, None)(a, b, None)

    a, b = gemm_choice.dense_operands(2, 2, 2)
    ways = {_way_of(one): partial(way, one) for one in kernels if one.supports_dense(a, b) is None}
    return gemm_choice.rank("kernels of BF16 operands", ways, native.key, make=gemm_choice.dense_operands)


def choose_dense(a: Tensor, b: Tensor, backend: str | None = None) -> tuple[DenseKernel, tuple[str, ...]]:
    """The kernel for two matrices in high precision, and why the kernels before it do not run.

    Raises:
        ValueError: the batch invariant kernel was asked for, and does not take the call.
    """
    if backend == BATCH_INVARIANT.NAME:
        if reason := BATCH_INVARIANT.supports_dense(a, b):
            raise ValueError(f"gemm: backend {backend!r} was asked for, but {reason}")
        return BATCH_INVARIANT, ()
    # torch takes everything, so a GEMM in high precision is never refused
    return _first((*dense_kernels(a.device, a.dtype), torch_mm), lambda kernel: kernel.supports_dense(a, b))


def explain_dense(a: Tensor, b: Tensor) -> str:
    """Which kernel multiplies two matrices in high precision, and why not the others; as `ops.gemm.explain`."""
    chosen, kernels = choose_dense(a, b)[0], dense_kernels(a.device, a.dtype)
    lines = told(kernels, chosen, lambda kernel: kernel.supports_dense(a, b))
    if len(kernels) > 1:
        lines.append(f"measured: {dense_ranking()}")
    return "\n".join(lines)


@functools.cache
def torch_is_beaten() -> bool:
    """Whether another kernel than torch's GEMM comes first for BF16 operands on this CPU."""
    return dense_kernels(torch.device("cpu"), torch.bfloat16)[0] is not torch_mm


def choose_gemm(*call: *GemmCall, backend: str | None = None) -> tuple[GemmKernel, tuple[str, ...], bool]:
    """(The kernel for a call, why those before it do not run, whether it runs all such calls); `backend` names one.

    The last is False where the choice depends on numbers among the scales.

    Raises:
        ValueError: an unknown backend, or one that does not take the call; or no kernel takes it.
    """
    a, b, out_dtype, bias, _ = call
    kernels = gemm_kernels(a.device)
    if backend is not None:
        # the batch invariant kernel is in no table, because only who asks for it pays for it
        every: tuple[GemmKernel, ...] = (*kernels, BATCH_INVARIANT)
        named = [kernel for kernel in every if backend == kernel.NAME]
        if not named:
            raise ValueError(f"gemm: {unknown_name('backend', backend, [kernel.NAME for kernel in kernels])}")
        if reason := named[0].supports_gemm(a, b, out_dtype, bias):
            raise ValueError(f"gemm: backend {backend!r} was asked for, but {reason}")
        return named[0], (), False
    if (choice := measured(*call)) is not None:
        fastest = choice.kernel
        # stable: the others keep the order of capability
        kernels = tuple(sorted(kernels, key=lambda kernel: fastest != kernel.NAME))
    kernel, refusals = _first(kernels, lambda kernel: kernel.supports_gemm(a, b, out_dtype, bias))
    # a plan is kept by shapes: where a refusal read numbers, the next operands may get another kernel
    reads = [getattr(asked, "reads_scales", None) for asked in kernels[: len(refusals) + 1]]
    return kernel, refusals, not any(read is not None and read(a, b) for read in reads)


def made_of(device: torch.device) -> dict[str, str]:
    """Name of each kernel of a device -> a hash of its sources."""
    return {kernel.NAME: gemm_choice.hash_of_sources(cast(ModuleType, kernel)) for kernel in gemm_kernels(device)}


def measured(*call: *GemmCall) -> gemm_choice.Choice | None:
    """The measurement of a call on its device; None: there is none, or a kernel has changed since."""
    choice = gemm_choice.known(*call)
    # a changed kernel may be faster, slower or wrong now: its old measurement says nothing
    if choice is not None and choice.made_of != made_of(call[0].device):
        return None
    return choice


def runner(kernel: GemmKernel, *call: *GemmCall) -> RunGemm:
    """A function that runs a kernel on all operands like these: from its `plan_gemm`, else its `gemm`."""
    # a kernel without a plan decides anew in each call
    plan = getattr(kernel, "plan_gemm", None)
    if plan is not None:
        run: RunGemm = plan(*call)
        return run

    gemm: Callable[..., Tensor] = kernel.gemm  # type: ignore[attr-defined]  # a kernel has one of the two
    _, _, out_dtype, _, fast_accum = call

    def anew(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None) -> Tensor:
        if a.data.is_cpu and not torch.is_autocast_enabled("cpu"):  # the common case, without the price of a context
            return gemm(a, b, out_dtype, bias, fast_accum)
        with no_autocast(a.data.device):
            return gemm(a, b, out_dtype, bias, fast_accum)

    return anew


def gemm_ways(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
) -> dict[str, Callable[[], Tensor]]:
    """Name of each kernel and configuration that takes this call here -> the call; without the reference."""
    ways: dict[str, Callable[[], Tensor]] = {}
    for kernel in gemm_kernels(a.device):
        # the reference is the truth that ways are held against
        if kernel is reference or kernel.supports_gemm(a, b, out_dtype, bias) is not None:
            continue
        several = getattr(kernel, "ways", None)
        if several is not None:
            ways |= several(a, b, out_dtype, bias, fast_accum)
        else:
            ways[kernel.NAME] = partial(runner(kernel, a, b, out_dtype, bias, fast_accum), a, b, bias)
    return ways
