"""Work besides GEMMs and casts in C++ at the speed of memory: SwiGLU, rotations, checksums, gradients of biases.

There are 65,536 bf16 numbers, so silu and the two factors of its gradient are tables of torch's own results. They are
used only where they give the bits of torch's kernels, which is checked when a process makes them. A rotation is two
products and a sum, each rounded to fp32. Both have torch's bits.

`checksum` tells the weight cache that a weight has changed; `column_sums` is the gradient of the bias. torch's own
operations read 1 to 4 GB/s on a core; both together took a tenth of a linear layer's step.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ottava.kernels.gate import LOWEST, PLAIN, address, custom_operator, is_plain, pointer
from ottava.kernels.native import build as native_build
from ottava.numerics.scaling import column_major

NAME = "pointwise"
_GATED = struct.Struct("=8q")  # struct Gated of src/pointwise.cpp
_ROTATION = struct.Struct("=16q")  # struct Rotation
_SMALL = 1 << 14  # elements; a single thread is done with so few before others wake up
_CHECKED = 16  # gradients by which each of the 65,536 numbers is checked


def swiglu(x: Tensor) -> Tensor | None:
    """x (..., 2 F) -> silu(gate) * up (..., F), the bits of these two operations in torch; None: not for this tensor.

    It takes bf16 without gaps on a CPU, outside of autograd and of torch.compile.
    """
    library = _library(x)
    return None if library is None else _run_gated(library, x, None, (*x.shape[:-1], x.shape[-1] // 2))


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor | None:
    """dy (..., F), x (..., 2 F) -> dx (..., 2 F): as `swiglu`, for torch's gradients of both operations."""
    library = _library(dy, x)
    return None if library is None else _run_gated(library, x, dy, x.shape)


def _run_gated(library: ctypes.CDLL, x: Tensor, dy: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    tables = _silu_tables()
    if tables is None:
        return None
    out = torch.empty(shape, dtype=torch.bfloat16, device="cpu")
    width, threads = x.shape[-1] // 2, torch.get_num_threads() if x.numel() > _SMALL else 1
    addresses = address(x), 0 if dy is None else address(dy), address(out), *map(address, tables)
    library.ottava_swiglu(_GATED.pack(*addresses, x.numel() // (2 * width), width, threads))
    return out


def _library(*tensors: Tensor) -> ctypes.CDLL | None:
    """The library, if it takes these tensors of bf16."""
    x = tensors[-1]
    if torch.compiler.is_compiling() or x.numel() == 0 or x.shape[-1] % 2:
        return None
    if any(dy.shape != (*x.shape[:-1], x.shape[-1] // 2) for dy in tensors[:-1]):
        return None
    for x in tensors:
        if x.dtype != torch.bfloat16 or not _readable(x) or not x.is_contiguous():
            return None
    return native_build.load(NAME).library


def _readable(x: Tensor) -> bool:
    """Whether the numbers of x lie at its address in the memory of the CPU, and autograd does not ask for x."""
    return x.is_cpu and not (x.requires_grad and torch.is_grad_enabled()) and is_plain(x)


@functools.lru_cache(maxsize=1)
def _silu_tables() -> tuple[Tensor, Tensor] | None:
    """silu of all bf16 numbers in the order of their bits (65536,), and sigmoid(x) and 1 + x (1 - sigmoid(x)) in fp32
    (65536, 2), by which dx is dy times both, from the left. None if torch's kernels here give other bits."""
    bits = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16)
    x = bits.view(torch.bfloat16)
    # as torch's silu_backward computes it; the check below decides whether this build of torch does
    sigmoid = 1 / (1 + x.float().neg().exp())
    slopes = torch.stack((sigmoid, 1 + x.float() * (1 - sigmoid)), 1)
    tables = F.silu(x), slopes
    # a mantissa of bf16 has 7 bits; other exponents of dy change the exponent of dx
    mantissas = torch.linspace(1, 2 - 2**-7, _CHECKED, dtype=torch.float32, device="cpu").bfloat16()
    dy = mantissas[:, None].expand(_CHECKED, 1 << 16).contiguous()
    wanted = torch.ops.aten.silu_backward(dy, x.expand_as(dy).contiguous())
    given = (dy.float() * slopes[:, 0] * slopes[:, 1]).bfloat16()
    return tables if torch.equal(wanted.nan_to_num(0.0), given.nan_to_num(0.0)) else None


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, *, interleaved: bool = False, back: bool = False
) -> Tensor | None:
    """x (..., heads, head_dim) -> x * cos + (each pair's other entry) * sin, in fp32, then rounded to dtype.

    None: not for these tensors. It takes heads in fp32 or bf16 on a CPU whose entries lie side by side and whose tokens
    lie at equal distances.

    Args:
        cos, sin: fp32 (..., 1, dim) without gaps, for the last dimensions of the tokens; dim at most head_dim.
        interleaved: whether neighbours are a pair, else i and i + dim / 2.
        back: take sin from the other entry of the pair: the gradient of the rotation.
    """
    types = (torch.float32, torch.bfloat16)
    if torch.compiler.is_compiling() or x.dtype not in types or dtype not in types or x.dim() < 3 or x.numel() == 0:
        return None
    if not (_readable(x) and _readable(cos) and _readable(sin)) or x.stride(-1) != 1:
        return None
    tokens, heads, size = x.shape[:-2], x.shape[-2], x.shape[-1]
    angles, dim, step = cos.shape[:-2], cos.shape[-1], x.stride(-3)
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or cos.shape[-2] != 1 or sin.shape != cos.shape:
        return None
    if not (cos.is_contiguous() and sin.is_contiguous()) or tokens[len(tokens) - len(angles) :] != angles:
        return None
    # the library takes one distance between tokens: dimensions of tokens must fold into one
    expected = step
    for n, stride in zip(reversed(tokens), reversed(x.stride()[:-2]), strict=True):
        if n != 1 and stride != expected:
            return None
        expected = stride * n if n != 1 else expected
    library = native_build.load(NAME).library
    if library is None:
        return None
    y = torch.empty(x.shape, dtype=dtype, device="cpu")
    threads = torch.get_num_threads() if x.numel() > _SMALL else 1
    library.ottava_rotate_heads(
        _ROTATION.pack(
            *(address(x), x.dtype == torch.bfloat16, tokens.numel(), heads, size, step, x.stride(-2)),
            *(address(y), dtype == torch.bfloat16, address(cos), address(sin), angles.numel(), dim),
            *(interleaved, back, threads),
        )
    )
    return y


# --- checksums of weights and gradients of biases, at the speed of memory ---------------------------------------------


_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_SEGMENT = 1 << 18  # bytes of one hash
_FEW = 1 << 16  # bytes; a single thread sums so few before others wake up
_SUMS = struct.Struct("=8q")  # struct Sums of src/sums.cpp


def checksum(x: Tensor) -> int:
    """A hash of the bits of a CPU tensor, of any dtype and strides; comparable within one process.

    One changed bit always changes it, and so does any other change but for one chance in 2**64 (2**32 without a
    library, where it is zlib's CRC).
    """
    # Not a sum, which stays the same if two rows change places. Not through numpy(): torch could not resize the storage
    # afterwards, as FSDP2 does to free it.
    bits = x if x.is_contiguous() else x.detach().contiguous()
    there, nbytes = address(bits) if bits.is_cpu else 0, bits.nbytes
    if there <= LOWEST:
        there = pointer(bits)
    library = native_build.load("sums").library
    if library is None:
        return zlib.crc32((ctypes.c_char * nbytes).from_address(there))
    if nbytes <= _SEGMENT:
        return int(library.ottava_checksum(there, nbytes, None, 1))
    hashes = (ctypes.c_uint64 * -(-nbytes // _SEGMENT))()
    return int(library.ottava_checksum(there, nbytes, hashes, torch.get_num_threads()))


def column_sums(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x (R, C) -> (C,): sums over the rows in fp32, 64 rows at a time, and one rounding to dtype; on a CPU the bits do
    not depend on the number of threads.

    Without a library, off the CPU, or for a matrix that lies column by column, it is torch's own sum. It copies other
    layouts first, because the bits of torch's sum would depend on the number of threads.

    Example:
        >>> column_sums(torch.ones(3, 2, dtype=torch.bfloat16))
        tensor([3., 3.])
    """
    if torch.compiler.is_compiling():  # for the bits of eager code
        return torch.ops.ottava.column_sums(x, dtype)  # type: ignore[no-any-return]
    return _column_sums(x, dtype)


@custom_operator(
    "column_sums(Tensor x, ScalarType dtype) -> Tensor", lambda x, dtype: x.new_empty(x.shape[1], dtype=dtype)
)
def _column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    if not x.is_cpu and x.dtype == dtype:  # one launch: a GPU's sum of 16-bit numbers is fp32 until it ends
        return x.sum(0)
    # a column-major matrix is torch's: its columns are contiguous there, and the C++ walk goes along rows
    usable = x.is_cpu and x.dtype in _TYPES and x.numel() > 0 and (x.stride(1) == 1 or not column_major(x))
    try:  # the gate's look
        usable = usable and type(x) in PLAIN and address(x) > LOWEST and not x.is_neg()
    except RuntimeError:  # torch.func has wrapped it
        usable = False
    library = native_build.load("sums").library if usable else None
    if library is None:
        return x.detach().sum(0, dtype=torch.float32).to(dtype)
    x = x if x.stride(1) == 1 else x.detach().contiguous()
    (rows, columns), in_bf16 = x.shape, dtype == torch.bfloat16
    out = torch.empty_strided((columns,), (1,), dtype=dtype if in_bf16 else torch.float32, device=x.device)
    threads = torch.get_num_threads() if x.nbytes > _FEW else 1
    sizes = _TYPES.index(x.dtype), rows, columns, x.stride(0)
    if library.ottava_column_sums(_SUMS.pack(address(x), *sizes, address(out), in_bf16, threads)):
        raise MemoryError(f"column_sums: no memory for the partial sums of {rows} x {columns} elements")
    return out if in_bf16 else out.to(dtype)
