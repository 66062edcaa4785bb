"""NVFP4 and its rivals from their definitions, in numpy: independent of ottava but for its stream of random bits.

Every function takes x (R, C) in fp32 and returns its cast: (the numbers of the codes, scale_inv of each block).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from ml_dtypes import bfloat16, float4_e2m1fn, float8_e4m3fn

from ottava.numerics.rounding import random_bits

f32 = np.float32
Array = np.ndarray
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
"""TransformerEngine's, of its file nvfp4_tensor.py."""
_GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e4m3(x: Array) -> Array:
    return np.minimum(x, f32(448)).astype(float8_e4m3fn).astype(f32)


def nearest(z: Array) -> Array:
    return np.clip(z, -6, 6).astype(float4_e2m1fn).astype(f32)


def at_random(seed: torch.Tensor) -> Callable[[Array], Array]:
    """Stochastic rounding to E2M1: the higher neighbour if the distance from the lower one, in steps, and a fraction of
    24 random bits add up to a step."""

    def rounded(z: Array) -> Array:
        bits = random_bits(seed, z.size).numpy().reshape(z.shape) >> 8
        size = np.minimum(np.abs(z).astype(np.float64), 6)
        low = np.searchsorted(_GRID, size, side="right") - 1
        below, above = _GRID[low], _GRID[np.minimum(low + 1, 7)]
        step = np.where(above > below, above - below, 1)
        up = (size - below) / step + bits * 2.0**-24 >= 1
        return np.copysign(np.where(up, above, below), z).astype(f32)

    return rounded


def blocks_of(x: Array, rows: int, cols: int = 16) -> Array:
    """(grid rows, rows, grid columns, cols), zero-padded."""
    x = np.pad(x, ((0, -x.shape[0] % rows), (0, -x.shape[1] % cols)))
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // cols, cols)


def _flat(blocks: Array, x: Array) -> Array:
    return blocks.reshape(blocks.shape[0] * blocks.shape[1], -1)[: x.shape[0], : x.shape[1]]


def _decoded(x: Array, s: Array, encode: f32, rows: int, rounded: Callable[[Array], Array]) -> tuple[Array, Array]:
    blocks = blocks_of(x, rows)
    empty = np.abs(blocks).max((1, 3)) == 0
    with np.errstate(divide="ignore"):
        scale_inv = np.where(empty, f32(1), s * f32(f32(1) / encode))
        scale = np.minimum(f32(1) / scale_inv, np.finfo(f32).max)
    return rounded(_flat(blocks * scale[:, None, :, None], x)), scale_inv


def _top(x: Array, top: float) -> f32:
    largest = np.abs(x).max()
    return f32(top) / f32(largest) if largest else f32(1)


def nvfp4(x: Array, rows: int = 1, rounded: Callable[[Array], Array] = nearest) -> tuple[Array, Array]:
    """NVIDIA's: block amaxes times (S_enc * (1 / 6)), both in fp32, rounded to E4M3 once."""
    encode = _top(x, 448 * 6)
    s = e4m3(np.abs(blocks_of(x, rows)).max((1, 3)) * f32(encode * f32(1 / 6)))
    return _decoded(x, s, encode, rows, rounded)


def unclipped(x: Array, rounded: Callable[[Array], Array]) -> tuple[Array, Array]:
    encode = _top(x, 448 * 6 * 16 / 17)
    s = e4m3(np.abs(blocks_of(x, 1)).max((1, 3)) * f32(encode / f32(6 * 16 / 17)))
    return _decoded(x, s, encode, 1, rounded)


def four_over_six(x: Array, rows: int = 1) -> tuple[Array, Array]:
    encode, found = _top(x, 256 * 6), []
    amax = np.abs(blocks_of(x, rows)).max((1, 3))
    for top in (6, 4):
        codes, scale_inv = _decoded(x, e4m3(amax * f32(encode / f32(top))), encode, rows, nearest)
        value = blocks_of(codes, rows) * scale_inv[:, None, :, None]
        error = ((value - blocks_of(x, rows)).astype(np.float64) ** 2).sum((1, 3))
        found.append((error, codes, scale_inv))
    return _better(x, rows, found)


def four_over_six_te(x: Array, rows: int = 1, bound: int = 256, power: int = 1) -> tuple[Array, Array]:
    """TransformerEngine's: fp32 throughout; a row's errors one after the other, then rows i and i + half."""
    encode, largest, found = _top(x, bound * 6), f32(np.abs(x).max()), []
    for wider in (1, 1.5):
        s = e4m3(np.abs(blocks_of(x, rows)).max((1, 3)) / f32(6) * encode * f32(wider))
        codes, scale_inv = _decoded(x, s, encode, rows, nearest)
        value = blocks_of(codes, rows) * s[:, None, :, None] * largest / f32(bound * 6)
        error, total = np.abs(value - blocks_of(x, rows)) ** power, f32(0)
        for column in range(16):
            total = total + error[..., column]
        while (half := total.shape[1] // 2) > 0:
            total = total[:, :half] + total[:, half:]
        assert total.dtype == f32
        found.append((total[:, 0], codes, scale_inv))
    return _better(x, rows, found)


def _better(x: Array, rows: int, found: list[tuple[Array, Array, Array]]) -> tuple[Array, Array]:
    (error6, codes6, six), (error4, codes4, four) = found
    by_four = error4 < error6
    wide = by_four.repeat(rows, 0).repeat(16, 1)[: x.shape[0], : x.shape[1]]
    return np.where(wide, codes4, codes6), np.where(by_four, four, six)


def ms_eden(y: Array, seed: torch.Tensor, group: int = 128) -> tuple[Array, Array]:
    """Of a tensor that was rotated in groups."""
    k = 0.93 * 17 / 16
    encode = _top(y, 255.99 * 6 / k)
    s = e4m3(np.abs(blocks_of(y, 1)).max((1, 3)) * f32(encode / f32(6 / k)))
    s = np.where(s > 0, s, f32(1))
    codes, scale_inv = _decoded(y, s, encode, 1, nearest)
    z = _flat(blocks_of(y, 1) * (f32(1) / scale_inv)[:, None, :, None], y).astype(np.float64)
    zz, zq = ((z * other).reshape(y.shape[0], -1, group).sum(-1) for other in (z, codes))
    eta = np.where(zq > 0, zz / np.where(zq > 0, zq, 1), 1).astype(f32)
    wanted = (s * eta.repeat(group // 16, 1)).astype(f32)
    bits = random_bits(seed, wanted.size).numpy().reshape(wanted.shape) >> 8
    quantum = np.exp2(np.maximum(np.floor(np.log2(wanted)), -6) - 3)
    stored = np.minimum(np.floor(wanted / quantum + bits * 2.0**-24) * quantum, 448).astype(f32)
    empty = np.abs(blocks_of(y, 1)).max((1, 3)) == 0
    return codes, np.where(empty, f32(1), stored * f32(f32(1) / encode))


def hadamard(size: int) -> Array:
    """Sylvester's, by parity of common bits, over the root of its size."""
    index = np.arange(size)
    parity = [[bin(i & j).count("1") % 2 for j in index] for i in index]
    return (1 - 2 * np.array(parity)) / np.sqrt(size)


def rotated(x: Array, size: int = 16, signs: Array | list[int] = SIGNS, to_bf16: bool = True) -> Array:
    """x times diag(signs) H in groups of columns, zero-padded."""
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % size))).astype(np.float64)
    matrix = np.array(signs)[:, None] * hadamard(size)
    y = (x.reshape(x.shape[0], -1, size) @ matrix).reshape(x.shape).astype(f32)
    return y.astype(bfloat16).astype(f32) if to_bf16 else y


def fresh_signs(seed: torch.Tensor, size: int = 128) -> Array:
    return 1 - 2 * (random_bits(seed, size).numpy() & 1)


def mxfp4(x: Array, rounded: Callable[[Array], Array] = nearest) -> tuple[Array, Array]:
    """1x32, the exponent of amax / 6 rounded up."""
    amax = np.abs(blocks_of(x, 1, 32)).max((1, 3)).astype(np.float64)
    mantissa, exponent = np.frexp(np.where(amax > 0, amax / 6, 1))
    scale_inv = np.where(amax > 0, np.exp2(np.where(mantissa == 0.5, exponent - 1, exponent)), 1).astype(f32)
    return rounded(_flat(blocks_of(x, 1, 32) / scale_inv[:, None, :, None], x)), scale_inv
