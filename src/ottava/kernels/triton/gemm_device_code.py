"""Device code of the FP8 GEMM: the Triton kernel behind `triton.gemm`, which imports it at the first launch.

One program a multiprocessor walks over the tiles of the result. Tiles of a and b come through tensor descriptors (TMA
on Hopper), which read zeros beyond the edges, so M, N and K may be ragged. Hopper's tensor cores keep about 14 bits of
a sum of FP8 products; after PROMOTE steps along K the kernel adds their sum to an fp32 total in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["TensorDescriptor", "gemm_kernel"]


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP rows of tiles, column by column; neighbours share a and b in L2."""
    # tiles that run at the same time should read few rows of a and few rows of b: a compact group of tiles does, a
    # whole row of tiles reads all of b
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = tile % (GROUP * tiles_n)
    return first + within % height, within // height


@triton.jit
def _scales(ptr, index, first, size, stride_row, EACH: tl.constexpr):
    """The scales of the rows `index`, from row `first` on: EACH its own, or one per 128 rows or for all."""
    if EACH:
        return tl.load(ptr + index * stride_row, mask=index < size, other=0.0)
    # a tile is at most 128 high where 128 x 128 elements share a scale, so all its rows have one
    return tl.zeros(index.shape, tl.float32) + tl.load(ptr + first // 128 * stride_row)


@triton.jit
def gemm_kernel(
    a_desc,
    b_desc,
    y,
    scale_a_ptr,
    scale_b_ptr,
    bias_ptr,
    m,
    n,
    k,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    A_EACH: tl.constexpr,
    B_EACH: tl.constexpr,
    BLOCKS: tl.constexpr,
    PROMOTE: tl.constexpr,
    BIAS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """y (m, n) = (a * scale_a) @ (b * scale_b).T + bias; a (m, k), b (n, k) are FP8 codes.

    A_EACH, B_EACH: each row has its own scale. BLOCKS: a scale for each BK of K, else one for all of K.
    PROMOTE: steps of BK between promotions, 0 for none (with BLOCKS each step is one). DESCRIBED: y is a descriptor.
    """
    tiles_m, tiles_n, steps = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.cdiv(k, BK)
    # flatten: one loop over tiles and steps, so that the loads of the next tile begin under the last steps of this one
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        row_tile, col_tile = _place(tile, tiles_m, tiles_n, GROUP)
        r, c = row_tile * BM + tl.arange(0, BM), col_tile * BN + tl.arange(0, BN)
        # (BM, BN) fp32 in registers
        total = tl.zeros((BM, BN), tl.float32)
        partial = tl.zeros((BM, BN), tl.float32)
        for step in range(steps):
            # (BM, BK) and (BN, BK): both operands are contracted over their last dimension, as everywhere here
            a = a_desc.load([row_tile * BM, step * BK])
            b = b_desc.load([col_tile * BN, step * BK])
            if BLOCKS:
                scale_a = _scales(scale_a_ptr + step * stride_ak, r, row_tile * BM, m, stride_am, A_EACH)
                scale_b = _scales(scale_b_ptr + step * stride_bk, c, col_tile * BN, n, stride_bn, B_EACH)
                # a sum from zero for each block of K: its scales multiply it outside of the tensor core, in fp32
                total += tl.dot(a, b.T) * scale_a[:, None] * scale_b[None, :]
            elif PROMOTE == 0:
                # the tensor core adds to what it has: 14 bits, all of K long
                total = tl.dot(a, b.T, total)
            else:
                partial = tl.dot(a, b.T, partial)
                # fp32 registers add what the tensor core has summed, and it begins anew before it loses bits
                if (step + 1) % PROMOTE == 0:
                    total += partial
                    partial = tl.zeros((BM, BN), tl.float32)
        # the steps after the last promotion
        if PROMOTE != 0:
            total += partial
        if not BLOCKS:
            total = total * _scales(scale_a_ptr, r, row_tile * BM, m, stride_am, A_EACH)[:, None]
            total = total * _scales(scale_b_ptr, c, col_tile * BN, n, stride_bn, B_EACH)[None, :]
        # after the scales and before the one rounding, as in the reference
        if BIAS:
            total += tl.load(bias_ptr + c, mask=c < n, other=0.0).to(tl.float32)[None, :]
        if DESCRIBED:
            y.store([row_tile * BM, col_tile * BN], total)
        else:
            where = r.to(tl.int64)[:, None] * n + c[None, :]
            tl.store(y + where, total, mask=(r[:, None] < m) & (c[None, :] < n))
