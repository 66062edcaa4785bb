"""GEMM on codes in C++ on a CPU: fp32 accumulation, scales and bias on the sum, ONE rounding; see src/gemm.cpp.

    y = round_once(sum_k qa * qb * scale_inv_a * scale_inv_b + bias)

It multiplies bf16 numbers in place of codes the same way, like a BF16 tensor core. On a CPU without BF16 units torch
emulates that slowly.

If the CPU has BF16 units (AVX512-BF16, NEON's BFMMLA), they compute the products without loss: codes of up to 8 bits
are exact in bf16, and so is every product in fp32. Other CPUs run the same walk in fp32. It sums in another order than
the reference, so outputs agree to the rounding of one fp32 accumulation. With one instruction set the bits do not
depend on the number of threads. `cpu_choice` measures once a machine which set runs. NEON has run on an emulator only.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.kernels import gemm_choice
from ottava.kernels.gate import address, pointer, refusal
from ottava.kernels.gemm_choice import Ranking
from ottava.kernels.native import build as native_build
from ottava.kernels.native import quantize as native_quantize
from ottava.kernels.native.build import Built
from ottava.kernels.reference import block_columns, product
from ottava.numerics.rounding import byte_values
from ottava.numerics.scaling import PER_TENSOR, Granularity
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor, RunGemm

NAME = "native_gemm"
NATIVE = False

LEVELS = ("portable", "AVX2", "AVX512", "AVX512-BF16", "NEON", "NEON-BF16")
"""Instruction sets, by their number in the library."""
_RIVALS = MappingProxyType({2: 1, 5: 4})
"""Best level -> the one that may beat it: clocks fall with wide vectors, cores split BFMMLA. In other
pairs the better level has at least twice the products an instruction, so no library (0.7 s) is built to compare."""
MODES = ("plain", "fold", "steps")
"""How scales enter: on the finished sum, folded into exponents along k, or on the sum of each step of k."""

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


_CALL = struct.Struct("=28q")  # struct Call of src/gemm.h: two sides, the result, four numbers


def built(level: int | None = None) -> Built:
    """The library for one of LEVELS (None: this CPU's best), or why there is none.

    Edge case: if the best level fails its trial, the best that passes; `note` says so.
    """
    best = native_build.load("gemm")
    # such as an instruction that this CPU reports and does not run
    if level is None and best.failed_trial:
        others = (_variant(other) for other in reversed(range(len(LEVELS))))
        return next((other._replace(note=best.reason) for other in others if other.library is not None), best)
    if level is None or (best.library is not None and best.library.ottava_gemm_level() == level):
        return best
    return _variant(level)


def _variant(level: int) -> Built:
    return native_build.load("gemm", variant=f"OTTAVA_LEVEL={level}")


def levels() -> tuple[int, ...]:
    """The LEVELS of this CPU, the best first; none without a library."""
    library = built().library
    if library is None:
        return ()
    best = library.ottava_gemm_level()
    # each level contains the next
    family = (5, 4, 0) if best > 3 else (3, 2, 1, 0)  # of aarch64, of x86-64
    return family[family.index(best) :]


def ranking() -> Ranking:
    """The measured order of the best of `levels` and its rival; the first call on a machine builds both."""
    return _ranking(built())


@functools.lru_cache(maxsize=8)
def _ranking(best: Built) -> Ranking:
    def way(level: int, a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        return run(a, b, torch.bfloat16, None, level)[0]

    candidates = [level for level in levels() if level in (levels()[0], _RIVALS.get(levels()[0]))]
    ways = {LEVELS[level]: functools.partial(way, level) for level in candidates if not built(level).reason}
    return gemm_choice.rank("levels of native_gemm", ways, best.key)


class Level(NamedTuple):
    """An instruction set with its library; `built.reason` says why there is none."""

    name: str
    """One of LEVELS; "" if there is no library."""
    built: Built
    """Its library."""
    unit: int
    """Scales may change at multiples of this k."""


def fastest() -> Level:
    """The fastest level of `ranking`, which runs here."""
    return _fastest(built())


@functools.lru_cache(maxsize=8)
def _fastest(best: Built) -> Level:
    order = _ranking(best).order
    first = built(LEVELS.index(order[0])) if order else best
    library = first.library
    if library is None:
        return Level("", first, 1)
    return Level(LEVELS[library.ottava_gemm_level()], first, library.ottava_gemm_unit())


def supports_gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None) -> str | None:
    """Why this kernel does not take the call; None if it does. It may build the library."""
    if not (a.data.is_cpu and b.data.is_cpu):
        return f"{NAME}: runs on cpu; got {a.device.type} and {b.device.type}"
    if reason := refusal(a.data, b.data, a.scale_inv, b.scale_inv, *(() if bias is None else (bias,))):
        return f"{NAME}: takes plain tensors; {reason}"
    cells = _cell(a.spec), _cell(b.spec)
    if cells[0].refused or cells[1].refused:
        return cells[0].refused or cells[1].refused
    (m, k), n = a.data.shape, b.data.shape[0]
    if 0 in (m, n, k):
        return f"{NAME}: an empty operand"
    if out_dtype not in _TYPES:
        return f"{NAME}: gives float32, bfloat16 or float16; got {out_dtype}"
    step = block_columns(cells[0].size, cells[1].size, k)
    # BF16 units multiply pairs along k: a scale may not change inside a pair
    if step % 2 and step < k:
        return f"{NAME}: scales change at odd places of k: {a.spec.granularity} and {b.spec.granularity}"
    level = fastest()
    if level.built.reason:
        return f"{NAME}: {level.built.reason}"
    if step % level.unit and step < k:
        where = f"multiples of {level.unit} of k on {level.name}"
        return f"{NAME}: scales may change at {where} only: {a.spec.granularity} and {b.spec.granularity}"
    return None


def supports_dense(a: Tensor, b: Tensor) -> str | None:
    """Why this kernel does not multiply matrices in high precision; None if it does. It may build the library."""
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16 or not (a.is_cpu and b.is_cpu):
        return f"{NAME}: takes bfloat16 on cpu; got {a.dtype} on {a.device.type} and {b.dtype} on {b.device.type}"
    if reason := refusal(a, b):
        return f"{NAME}: takes plain tensors; {reason}"
    if 0 in (*a.shape, *b.shape):
        return f"{NAME}: an empty operand"
    reason = fastest().built.reason
    return f"{NAME}: {reason}" if reason else None


def plan_dense(a: Tensor, b: Tensor, bias: Tensor | None) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """A function (a, b, bias) -> y of their dtype, for all matrices with the shapes and strides of these."""
    # "cpu" by name: torch.set_default_device may name another
    one = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    run = plan_gemm(Dense(a, one), Dense(b, one), a.dtype, bias)
    return lambda a, b, bias: run(Dense(a, one), Dense(b, one), bias)


def run(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, level: int | None = None
) -> tuple[Tensor, str]:
    """(y, its mode, one of MODES); level: one of `levels`, None: the fastest.

    Raises:
        RuntimeError: no library, no memory or no such level; `supports_gemm` foresees all but a lack of memory.
    """
    modes: list[int] = []
    y = plan_gemm(a, b, out_dtype, bias, level=level)(a, b, bias, modes)
    return y, MODES[modes[0]]


class Dense(NamedTuple):
    """An operand in high precision for `plan_gemm`: its numbers times a scale of 1."""

    data: Tensor
    scale_inv: Tensor
    spec: None = None


def plan_gemm(
    a: QuantizedTensor | Dense,
    b: QuantizedTensor | Dense,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    fast_accum: bool = False,
    *,
    level: int | None = None,
    fold: bool = True,
) -> Callable[..., Tensor]:
    """A GEMM of all operands of the specs, shapes and strides of these: (a, b, bias, modes=None) -> y (M, N).

    fast_accum changes nothing here.

    fold: fold scales that are powers of two into exponents, where the numbers allow it.
    """
    chosen = fastest().built if level is None else built(level)
    library = chosen.library
    if library is None:
        raise RuntimeError(f"{NAME}: {chosen.reason}; ask supports_gemm first")
    (m, k), n = a.data.shape, b.data.shape[0]
    cells = _cell(a.spec), _cell(b.spec)
    # the kernel walks rows or columns of codes without gaps; anything else is copied once a call
    copied, copied_b = (not _along_memory(side.data) for side in (a, b))
    strides = (k, 1) if copied else a.data.stride()
    strides_b = (k, 1) if copied_b else b.data.stride()
    first, second = cells  # their tables must live as long as this plan
    block, block_b = ((cell.size.rows or rows, cell.size.cols or k) for cell, rows in zip(cells, (m, n), strict=True))
    step, exact = block_columns(cells[0].size, cells[1].size, k), fold and cells[0].exact and cells[1].exact
    # the library widens 16-bit biases itself: a cast by torch would be one more launch in a call of microseconds
    as_it_is = bias is not None and bias.dtype in _TYPES
    code, code_of_bias = _TYPES.index(out_dtype), _TYPES.index(bias.dtype) if bias is not None and as_it_is else 0
    threads, pack, multiply, cpu = torch.get_num_threads, _CALL.pack, library.ottava_gemm, a.data.device

    def run(
        a: QuantizedTensor | Dense, b: QuantizedTensor | Dense, bias: Tensor | None, modes: list[int] | None = None
    ) -> Tensor:
        # these names keep the call's memory alive until it ends
        codes = a.data.contiguous() if copied else a.data
        codes_b = b.data.contiguous() if copied_b else b.data
        scale, scale_b = a.scale_inv, b.scale_inv
        y = torch.empty_strided((m, n), (n, 1), dtype=out_dtype, device=cpu)  # the kernel writes every element
        if bias is not None:
            bias = (bias if as_it_is else bias.to(torch.float32)).contiguous()  # C++ reads it without strides
        mode = multiply(
            pack(
                *(address(codes), m, *strides, address(scale), *scale.stride(), *block, first.address),
                *(address(codes_b), n, *strides_b, address(scale_b), *scale_b.stride(), *block_b, second.address),
                *(address(y), code, 0 if bias is None else address(bias), code_of_bias, k, step, exact, threads()),
            )
        )
        if mode < 0:
            raise RuntimeError(f"{NAME}: no memory for the operands of ({m}, {k}) x ({n}, {k})")
        if modes is not None:
            modes.append(mode)  # `run` hands it on
        return y

    return run


class _Cell(NamedTuple):
    """The facts of a spec that the kernel needs."""

    refused: str
    """Why it takes no such operand; "" if it does."""
    size: Granularity
    """The blocks of its scales."""
    exact: bool
    """Whether scales are powers of two."""
    table: Tensor | None
    """The numbers of 256 codes, fp32; None: the operand holds bf16 numbers, not codes."""
    address: int
    """The table's address."""


@functools.lru_cache(maxsize=512)
def _cell(spec: QuantizationSpec | None) -> _Cell:
    if spec is None:
        return _Cell("", PER_TENSOR, True, None, 0)
    fmt = spec.format
    refused, table = "", None
    if fmt.bits > 8 or not fmt.signed:
        refused = f"{NAME}: takes signed formats of up to 8 bits; got {fmt}"
    elif spec.scale_format == "e4m3":
        refused = f"{NAME}: two-level scales of blocks are decoded first"
    else:
        table = byte_values(fmt)
    address = pointer(table)
    return _Cell(refused, spec.granularity, spec.scale_format != "fp32", table, address)


def _along_memory(codes: Tensor) -> bool:
    """Whether codes lie row by row or column by column without gaps inside a row."""
    row, col = codes.stride()
    return (row == 1 or col == 1) and row > 0 and col > 0


class BatchInvariant:
    """`native_gemm` with each element of y as one sum over k in one order, whatever the other rows are and how many.

    Its walk already has that order. Only how power-of-two scales enter depends on the numbers of all rows (they are
    folded into exponents if the smallest product of the matrix allows it), so here they always multiply the sums of
    steps. In high precision there is one scale for each matrix, so nothing is folded.
    """

    NAME = f"{NAME} batch_invariant"
    NATIVE = NATIVE
    supports_gemm, supports_dense = staticmethod(supports_gemm), staticmethod(supports_dense)
    plan_gemm, plan_dense = staticmethod(functools.partial(plan_gemm, fold=False)), staticmethod(plan_dense)


def multiply_bf16(a: Tensor, b: Tensor) -> Tensor:
    """(M, K), (N, K) in bf16 -> (M, N) in fp32, batch invariant."""
    one = torch.ones(1, 1, dtype=torch.float32)
    first, second = Dense(a, one), Dense(b, one)
    y: Tensor = plan_gemm(first, second, torch.float32, None)(first, second, None)
    return y


class Decoded:
    """GEMMs on codes with two levels of scales: C++ decodes the operands, torch multiplies them in fp32.

    The bits are those of the reference, which decodes with a table of torch: that takes longer than the products do.
    """

    NAME = "native_decoded"
    NATIVE = False

    @staticmethod
    def supports_gemm(
        a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None
    ) -> str | None:
        """Why this kernel does not take the call; None if it does."""
        kinds = {a.spec.scale_format, b.spec.scale_format}
        if "e4m3" not in kinds or "fp32" in kinds:
            return f"{Decoded.NAME}: scales on two levels; got {a.spec.scale_format} and {b.spec.scale_format}"
        if 0 in (*a.shape, *b.shape):
            return f"{Decoded.NAME}: an empty operand"
        if max(a.scale_inv.shape[1], b.scale_inv.shape[1]) <= 1:
            return f"{Decoded.NAME}: scales change along k; got one scale for each row"
        if reason := refusal(a.scale_inv, b.scale_inv):
            return f"{Decoded.NAME}: takes plain tensors; {reason}"
        for operand in (a, b):
            if operand.scale_inv.dtype != torch.float32:
                return f"{Decoded.NAME}: takes scales in fp32; got {operand.scale_inv.dtype}"
            if reason := native_quantize.supports_decode(operand.data, operand.spec.format):
                return f"{Decoded.NAME}: {reason}"
        return None

    @staticmethod
    def plan_gemm(
        a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False
    ) -> RunGemm:
        """(a (M, K), b (N, K), bias) -> y (M, N), for all operands like these; fast_accum changes nothing here."""
        lhs, rhs = (native_quantize.plan_dequantize(side, torch.float32) for side in (a, b))

        def run(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None) -> Tensor:
            if torch.is_autocast_enabled("cpu"):  # it would multiply in BF16
                with torch.autocast("cpu", enabled=False):
                    return run(a, b, bias)
            y = product(lhs(a), rhs(b))
            if bias is not None:
                y += bias.to(torch.float32)  # before the one rounding
            return y.to(out_dtype)

        return run
