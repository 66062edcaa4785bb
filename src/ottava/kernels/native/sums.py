"""The work of a Linear besides GEMMs and casts: in C++ at the speed of memory, or in torch without a library.

`checksum` tells the weight cache that a weight has changed; `column_sums` is the gradient of the bias. torch's own
operations read 1 to 4 GB/s on a core; both together took a tenth of a linear layer's step.
"""

from __future__ import annotations

import ctypes
import struct
import zlib

import torch
from torch import Tensor

from ottava.kernels.custom_operator import custom_operator
from ottava.kernels.gate import LOWEST, PLAIN, address, pointer
from ottava.kernels.native import build as native_build
from ottava.numerics.scaling import column_major

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_SEGMENT = 1 << 18  # bytes of one hash
_SMALL = 1 << 16  # bytes; a single thread sums so few before others wake up
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


def _promised(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[1], dtype=dtype)


@custom_operator("column_sums(Tensor x, ScalarType dtype) -> Tensor", _promised)
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
    threads = torch.get_num_threads() if x.nbytes > _SMALL else 1
    sizes = _TYPES.index(x.dtype), rows, columns, x.stride(0)
    if library.ottava_column_sums(_SUMS.pack(address(x), *sizes, address(out), in_bf16, threads)):
        raise MemoryError(f"column_sums: no memory for the partial sums of {rows} x {columns} elements")
    return out if in_bf16 else out.to(dtype)
