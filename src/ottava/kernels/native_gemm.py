"""GEMM on codes in C++ on a CPU: fp32 accumulation, scales and bias on the sum, ONE rounding; see native_gemm.cpp.

    y = round_once(sum_k qa * qb * scale_inv_a * scale_inv_b + bias)

With AVX512-BF16 the products run on the bf16 units, which loses nothing: codes of up to 8 bits are exact there, and so
is every product in fp32. Other CPUs run the same walk on fp32. Sums are those of the reference in another order, so
outputs agree to the rounding of one fp32 accumulation, and are the same for any number of threads.
"""

from __future__ import annotations

import functools
import math
import struct

import torch
from torch import Tensor

from ottava.formats import Format
from ottava.kernels import native_build
from ottava.quantized_tensor import QuantizedTensor
from ottava.rounding import code_values
from ottava.scaling import Granularity

NAME = "native_gemm"
NATIVE = False

LEVELS = ("portable", "AVX2", "AVX512", "AVX512-BF16")
"""Instruction sets by the number that the library knows them by."""
MODES = ("plain", "fold", "steps")
"""How scales come in: on the finished sum, folded into exponents along k, or on the sum of each step of k."""

_OUT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


_CALL = "=27q"  # struct Call of native_gemm.h: two sides, the result, four numbers


def built(level: int | None = None) -> native_build.Built:
    """The library for one of LEVELS, this CPU's best by itself, or why there is none."""
    return native_build.load("native_gemm", None, "" if level is None else f"OTTAVA_LEVEL={level}")


def supports_gemm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None) -> str | None:
    """Why this kernel does not take the call; None if it does. The first call that gets so far builds the library."""
    if a.device.type != "cpu" or b.device.type != "cpu":
        return f"{NAME}: runs on cpu; got {a.device.type} and {b.device.type}"
    for fmt in (a.spec.format, b.spec.format):
        if fmt.bits > 8 or not fmt.signed:
            return f"{NAME}: takes signed formats of up to 8 bits; got {a.spec.format} and {b.spec.format}"
    if "e4m3" in (a.spec.scale_format, b.spec.scale_format):
        return f"{NAME}: two-level scales of blocks run on the reference"
    if 0 in (*a.shape, *b.shape):
        return f"{NAME}: an empty operand"
    if out_dtype not in _OUT_TYPES:
        return f"{NAME}: gives float32, bfloat16 or float16; got {out_dtype}"
    step = _step(a.spec.granularity, b.spec.granularity, a.shape[1])
    if step % 2 and step < a.shape[1]:
        return f"{NAME}: scales change at odd places of k: {a.spec.granularity} and {b.spec.granularity}"
    if (library := built().library) is None:
        return f"{NAME}: {built().reason}"
    if library.ottava_gemm_level() == 0:  # measured at 0.4 times the speed of torch's fp32 GEMM, which has AVX2
        return f"{NAME}: built for no AVX2 and no AVX512 here; the reference is faster"
    return None


def padding(a: QuantizedTensor, b: QuantizedTensor) -> str:
    """Says nothing: tails are padded inside registers."""
    return ""


def gemm(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False
) -> Tensor:
    """(M, K), (N, K) -> (M, N), both contracted over their last dimension. fast_accum changes nothing here."""
    return run(a, b, out_dtype, bias)[0]


def run(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, level: int | None = None
) -> tuple[Tensor, str]:
    """y, and which of MODES it was made in; `level` takes one of LEVELS that this CPU has, its best by itself.

    Raises:
        RuntimeError: there is no library, no memory or no such level; `supports_gemm` tells the first beforehand.
    """
    library = built(level).library
    if library is None:
        raise RuntimeError(f"{NAME}: {built(level).reason}; ask supports_gemm first")
    (m, k), n = a.data.shape, b.data.shape[0]
    y = torch.empty(m, n, dtype=out_dtype)
    if bias is not None:
        bias = bias.detach().to(torch.float32).contiguous()
    # what pointers point to is held here until the call has ended
    held = [(_along_memory(t.data), _table(t.spec.format)) for t in (a, b)]
    mode = library.ottava_gemm(
        struct.pack(
            _CALL,
            *_side(a, *held[0]),
            *_side(b, *held[1]),
            *(y.data_ptr(), _OUT_TYPES.index(out_dtype), 0 if bias is None else bias.data_ptr()),
            *(k, _step(a.spec.granularity, b.spec.granularity, k)),
            "fp32" not in (a.spec.scale_format, b.spec.scale_format),
            torch.get_num_threads(),
        )
    )
    if mode < 0:
        raise RuntimeError(f"{NAME}: no memory for the operands of ({m}, {k}) x ({n}, {k})")
    return y, MODES[mode]


def _step(a: Granularity, b: Granularity, k: int) -> int:
    """How many k no scale changes over."""
    blocks = [g.cols for g in (a, b) if g.cols is not None and g.cols < k]
    return math.gcd(*blocks) if blocks else k


def _along_memory(codes: Tensor) -> Tensor:
    """Row by row or column by column without gaps inside a row; else a copy."""
    return codes if 1 in codes.stride() and min(codes.stride()) > 0 else codes.contiguous()


def _side(x: QuantizedTensor, codes: Tensor, table: Tensor) -> tuple[int, ...]:
    rows, k = codes.shape
    scales = x.scale_inv
    return (
        *(codes.data_ptr(), rows, *codes.stride()),
        *(scales.data_ptr(), *scales.stride()),
        *x.spec.granularity.block_shape((rows, k)),
        table.data_ptr(),
    )


@functools.lru_cache(maxsize=16)
def _table(fmt: Format) -> Tensor:
    """What each of 256 codes stands for, fp32."""
    values = code_values(fmt)
    return torch.nn.functional.pad(values, (0, 256 - values.numel()))
