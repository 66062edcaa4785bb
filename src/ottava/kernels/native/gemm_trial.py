"""Runs a new library of src/gemm.cpp in a separate process, before others load it; see `native.build`.

An instruction that the CPU lacks crashes this process and not the user's, and ottava does not use a library with wrong
numbers. With small integers and power-of-two scales sums are exact in any order, so the trial compares each of them
with Python's. It imports only the standard library and takes 0.1 s.

    python gemm_trial.py LIBRARY      prints "ok", or the fault
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from operator import mul

M, N, K, BLOCK = 37, 67, 104, 32
"""Whole tiles and a rest of rows, a panel and a rest of columns, three blocks of scales and a rest of k."""
MODES = ("plain", "fold", "steps")


def trial(library: ctypes.CDLL) -> str:
    """The fault of a library; "" if every number is right in each mode and layout.

    Edge cases: an illegal instruction crashes the process.
    """
    rows = [[(7 * i + 3 * k + i * k) % 9 - 4 for k in range(K)] for i in range(M)]
    columns = [[(5 * j + 11 * k + j * k) % 9 - 4 for k in range(K)] for j in range(N)]
    blocks = -(-K // BLOCK)
    scales = [[float(2 ** ((i + s) % 4)) for s in range(blocks)] for i in range(M)]
    scaled = [[x * scales[i][k // BLOCK] for k, x in enumerate(row)] for i, row in enumerate(rows)]
    plain = [float(sum(map(mul, row, column))) for row in rows for column in columns]
    blockwise = [float(sum(map(mul, row, column))) for row in scaled for column in columns]
    for mode, name in enumerate(MODES):
        for by_columns in (False, True):
            of_a = [scale for row in scales for scale in row] if mode else [1.0]
            y, ran = _multiply(library, rows, columns, of_a, mode, by_columns)
            if ran != mode:
                return f"it ran {MODES[ran] if ran >= 0 else ran} where {name} was asked for"
            wrong = sum(x != truth for x, truth in zip(y, blockwise if mode else plain, strict=True))
            if wrong:
                return f"{wrong} of {len(y)} numbers are wrong ({name})"
    return ""


def _multiply(
    library: ctypes.CDLL, a: list[list[int]], b: list[list[int]], of_a: list[float], mode: int, by_columns: bool
) -> tuple[array[float], int]:
    """y, and the mode that ran; the argument is laid out as `Call` of src/gemm.h."""
    table = array("f", [128.0 - code if code > 127 else code for code in range(256)])  # sign and magnitude, as formats
    held: list[object] = []
    sides: list[int] = []
    for x, scales in ((a, array("f", of_a)), (b, array("f", [1.0]))):
        lines = zip(*x, strict=True) if by_columns else x
        codes = array("B", [v if v >= 0 else 128 - v for line in lines for v in line])
        strides = (1, len(x)) if by_columns else (K, 1)
        blocks = len(scales) // len(x)
        layout = (blocks, 1, 1, BLOCK) if blocks else (0, 0, len(x), K)
        pointers = [values.buffer_info()[0] for values in (codes, scales, table)]
        sides += [pointers[0], len(x), *strides, pointers[1], *layout, pointers[2]]
        held += [codes, scales]
    y = array("f", bytes(4 * M * N))
    numbers = (K, BLOCK if mode else K, int(mode == 1), 1)
    return y, library.ottava_gemm((ctypes.c_int64 * 28)(*sides, y.buffer_info()[0], 0, 0, 0, *numbers))


if __name__ == "__main__":
    print(trial(ctypes.CDLL(sys.argv[1])) or "ok")
