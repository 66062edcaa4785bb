"""Device code of a norm, an activation or its gradient in front of a cast: it computes each tile of the rows where
the cast loads it.

The formulas are those of `nn.norms` and `nn.activations`, operation by operation in fp32, rounded where torch rounds.
exp, erf and tanh are CUDA's (libdevice), as in torch's kernels: Triton's are approximations.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice


@triton.jit
def _activated(x, MAKE: tl.constexpr):
    if MAKE == "silu":
        # torch's own kernel has this division too: x * sigmoid(x) would round once more
        return tl.math.div_rn(x, 1.0 + libdevice.exp(-x))
    if MAKE == "gelu":
        return x * 0.5 * (1.0 + libdevice.erf(x * 0.7071067811865476))
    if MAKE == "gelu_tanh":
        return 0.5 * x * (1.0 + libdevice.tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))
    positive = tl.where(x <= 0, 0.0, x)  # keeps NaN
    if MAKE == "relu2":
        return positive * positive
    return positive


@triton.jit
def _gradient(dy, x, DTYPE: tl.constexpr, MAKE: tl.constexpr):
    """dx of an activation without a gate; DTYPE: that of x, in which torch writes."""
    if MAKE == "silu":
        s = tl.math.div_rn(1.0, 1.0 + libdevice.exp(-x))
        return dy * s * (1.0 + x * (1.0 - s))
    if MAKE == "gelu":
        cdf = 0.5 * (1.0 + libdevice.erf(x * 0.7071067811865476))
        return dy * (cdf + x * (libdevice.exp(-0.5 * x * x) * 0.3989422804014327))
    if MAKE == "gelu_tanh":
        t = libdevice.tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x)))
        inner = 0.7978845608028654 * (1.0 + 0.134145 * (x * x))
        return dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner)
    if MAKE == "relu2":
        # torch differentiates a square as two operations, and writes the first in the dtype of x
        return (dy * 2.0).to(DTYPE).to(tl.float32) * _activated(x, "relu")
    # of NaN the comparison is false, and the gradient passes, as in torch
    return tl.where(x <= 0, 0.0, dy)


@triton.jit
def _pulled(x_ptr, dy_ptr, r, c, rows, cols, stride_r, stride_c, MAKE: tl.constexpr, GATED: tl.constexpr):
    """A tile of dx (rows, cols) of an activation's input x; dy lies row by row.

    GATED: dy has half of the columns, a multiple of 16 of them, so that 16 neighbours of dx read neighbours.
    """
    # x and dx are (rows, 2 features) with a gate: first the gate, then what it multiplies
    wide = cols // 2 if GATED else cols
    # both halves of dx read the same elements of x; the compiler could not see that neighbours stay neighbours, and
    # would load them one by one
    first = tl.max_contiguous(tl.multiple_of(tl.where(c >= wide, c - wide, c), 16), 16) if GATED else c
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    where = x_ptr + r.to(tl.int64)[:, None] * stride_r + first.to(tl.int64)[None, :] * stride_c
    x = tl.load(where, mask=mask, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    dy = tl.load(dy_ptr + r.to(tl.int64)[:, None] * wide + first[None, :], mask=mask, other=0.0)
    # torch's kernels take dy in the dtype of x
    dy = dy.to(dtype).to(tl.float32)
    if not GATED:
        return _gradient(dy, x, dtype, MAKE)
    # a tile may hold columns of both halves
    is_gate = (c < wide)[None, :]
    up = tl.load(where + wide.to(tl.int64) * stride_c, mask=mask & is_gate, other=1.0).to(tl.float32)
    dy = (dy * up).to(dtype).to(tl.float32)
    if MAKE == "silu":  # the same with one division for both: less registers
        q = tl.math.div_rn(tl.where(is_gate, 1.0, x), 1.0 + libdevice.exp(-x))
        return dy * tl.where(is_gate, q, q.to(dtype).to(tl.float32)) * tl.where(is_gate, 1.0 + x * (1.0 - q), 1.0)
    return tl.where(is_gate, _gradient(dy, x, dtype, MAKE), dy * _activated(x, MAKE).to(dtype).to(tl.float32))


@triton.jit
def tile_place(tile, rows, cols, TR: tl.constexpr, TC: tl.constexpr):
    """(row and column numbers, row tile, column tile) of a tile; tiles go along rows."""
    across = tl.cdiv(cols, TC)
    # along rows: neighbouring programs read neighbouring memory
    row_tile, col_tile = tile // across, tile % across
    return row_tile * TR + tl.arange(0, TR), col_tile * TC + tl.arange(0, TC), row_tile, col_tile


@triton.jit
def load_rows(
    x_ptr,
    beside_ptr,
    gamma_ptr,
    beta_ptr,
    r,
    c,
    rows,
    cols,
    stride_r,
    stride_c,
    MAKE: tl.constexpr,
    FLAG: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """A tile in fp32, 0 beyond the edges: of x itself (MAKE ""), or of the rows of a norm or an activation, rounded to
    the dtype of x and then to DTYPE, "bf16" or "fp16", if that is another.

    "rmsnorm" and "layernorm" read (mean, rstd) of each row beside x, (2, rows), and gamma and beta (cols) where they
    are not None; FLAG: gamma is added to 1. The others are activations; FLAG: with a gate, in the first half of the
    columns of x. With dy beside x they make dx, which has the columns of x.
    """
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    where = x_ptr + r.to(tl.int64)[:, None] * stride_r + c.to(tl.int64)[None, :] * stride_c
    x = tl.load(where, mask=mask, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    if MAKE == "":
        return x
    # as `nn.norms` has it, operation by operation: a fused multiply-add would give other bits
    if MAKE == "rmsnorm" or MAKE == "layernorm":
        if MAKE == "layernorm":
            x -= tl.load(beside_ptr + r, mask=r < rows, other=0.0)[:, None]
        y = x * tl.load(beside_ptr + rows + r, mask=r < rows, other=0.0)[:, None]
        if gamma_ptr is not None:
            gamma = tl.load(gamma_ptr + c, mask=c < cols, other=0.0).to(tl.float32)
            y *= (gamma + 1.0 if FLAG else gamma)[None, :]
        if beta_ptr is not None:
            y += tl.load(beta_ptr + c, mask=c < cols, other=0.0).to(tl.float32)[None, :]
        # beta made numbers of the zeros beyond the edges, and these would raise an amax
        y = tl.where(mask, y, 0.0)
    elif beside_ptr is not None:
        y = _pulled(x_ptr, beside_ptr, r, c, rows, cols, stride_r, stride_c, MAKE, FLAG)
    else:
        y = _activated(x, MAKE)
        if FLAG:
            up = tl.load(where + tl.cast(cols, tl.int64) * stride_c, mask=mask, other=0.0).to(tl.float32)
            y = y.to(dtype).to(tl.float32) * up
    y = y.to(dtype).to(tl.float32)
    # an autocast casts the result again; two roundings are not one
    if DTYPE == "bf16":
        y = y.to(tl.bfloat16).to(tl.float32)
    if DTYPE == "fp16":
        y = y.to(tl.float16).to(tl.float32)
    return y


@triton.jit
def rows_kernel(
    x_ptr,
    y_ptr,
    beside_ptr,
    gamma_ptr,
    beta_ptr,
    rows,
    cols,
    stride_r,
    stride_c,
    MAKE: tl.constexpr,
    FLAG: tl.constexpr,
    DTYPE: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
):
    """Writes the rows themselves, y (rows, cols), for other casts: the same numbers that these kernels cast."""
    r, c, _, _ = tile_place(tl.program_id(0), rows, cols, TR, TC)
    y = load_rows(x_ptr, beside_ptr, gamma_ptr, beta_ptr, r, c, rows, cols, stride_r, stride_c, MAKE, FLAG, DTYPE)
    where = y_ptr + r.to(tl.int64)[:, None] * cols + c[None, :]
    tl.store(where, y.to(y_ptr.dtype.element_ty), mask=(r[:, None] < rows) & (c[None, :] < cols))


@triton.jit
def gate_gradient_kernel(
    x_ptr,
    dx_ptr,
    dy_ptr,
    rows,
    wide,
    stride_r,
    MAKE: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
):
    """Writes dx (rows, 2 wide) of a gate and what it multiplies, from dy (rows, wide); dy and dx lie row by row.

    A tile has both halves, so that each exponential is computed once; the bits are those of `_pulled`.
    """
    r, c, _, _ = tile_place(tl.program_id(0), rows, wide, TR, TC)
    mask = (r[:, None] < rows) & (c[None, :] < wide)
    where = x_ptr + r.to(tl.int64)[:, None] * stride_r + c[None, :]
    dtype = x_ptr.dtype.element_ty
    x = tl.load(where, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(where + wide, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + r.to(tl.int64)[:, None] * wide + c[None, :], mask=mask, other=0.0).to(dtype).to(tl.float32)
    d = (dy * up).to(dtype).to(tl.float32)
    if MAKE == "silu":
        above = 1.0 + libdevice.exp(-x)
        s = tl.math.div_rn(1.0, above)
        gate, act = d * s * (1.0 + x * (1.0 - s)), tl.math.div_rn(x, above)
    else:
        gate, act = _gradient(d, x, dtype, MAKE), _activated(x, MAKE)
    # both halves of a row of dx, gate and up, lie side by side; 64 bits, because 2**31 elements are a long sequence
    out = dx_ptr + r.to(tl.int64)[:, None] * (2 * wide) + c[None, :]
    tl.store(out, gate.to(dtype), mask=mask)
    tl.store(out + wide, (dy * act.to(dtype).to(tl.float32)).to(dtype), mask=mask)


@triton.jit
def row_statistics_kernel(x_ptr, statistics_ptr, rows, cols, stride_r, eps, MAKE: tl.constexpr, TC: tl.constexpr):
    """Mean (not for "rmsnorm") and rstd of a row, one program each: statistics (2, rows); about the mean, in fp32."""
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * stride_r
    mean = 0.0
    if MAKE == "layernorm":
        total = tl.zeros((TC,), tl.float32)
        for start in range(0, cols, TC):
            c = start + tl.arange(0, TC)
            total += tl.load(x_ptr + c, mask=c < cols, other=0.0).to(tl.float32)
        mean = tl.math.div_rn(tl.sum(total, axis=0), tl.cast(cols, tl.float32))
        tl.store(statistics_ptr + row, mean)
    total = tl.zeros((TC,), tl.float32)
    for start in range(0, cols, TC):
        c = start + tl.arange(0, TC)
        # about the mean, in a second pass: a difference of two large sums would cancel
        d = tl.where(c < cols, tl.load(x_ptr + c, mask=c < cols, other=0.0).to(tl.float32) - mean, 0.0)
        total += d * d
    variance = tl.math.div_rn(tl.sum(total, axis=0), tl.cast(cols, tl.float32))
    tl.store(statistics_ptr + rows + row, tl.math.div_rn(1.0, tl.sqrt_rn(variance + eps)))


@triton.jit
def norm_kernel(
    x_ptr,
    y_ptr,
    statistics_ptr,
    gamma_ptr,
    beta_ptr,
    rows,
    cols,
    stride_r,
    eps,
    MAKE: tl.constexpr,
    CENTERED: tl.constexpr,
    TC: tl.constexpr,
):
    """A norm alone, one program a row that holds all of it: y (rows, cols), and statistics (2, rows) for backward."""
    row = tl.program_id(0)
    c = tl.arange(0, TC)
    inside = c < cols
    x = tl.load(x_ptr + row.to(tl.int64) * stride_r + c, mask=inside, other=0.0).to(tl.float32)
    if MAKE == "layernorm":
        mean = tl.math.div_rn(tl.sum(x, axis=0), tl.cast(cols, tl.float32))
        tl.store(statistics_ptr + row, mean)
        x = tl.where(inside, x - mean, 0.0)  # outside, the 0 that was loaded became -mean
    variance = tl.math.div_rn(tl.sum(x * x, axis=0), tl.cast(cols, tl.float32))
    rstd = tl.math.div_rn(1.0, tl.sqrt_rn(variance + eps))
    tl.store(statistics_ptr + rows + row, rstd)
    y = x * rstd
    if gamma_ptr is not None:
        gamma = tl.load(gamma_ptr + c, mask=inside, other=0.0).to(tl.float32)
        y *= gamma + 1.0 if CENTERED else gamma
    if beta_ptr is not None:
        y += tl.load(beta_ptr + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row.to(tl.int64) * cols + c, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_gradient_kernel(
    x_ptr,
    dy_ptr,
    dx_ptr,
    statistics_ptr,
    gamma_ptr,
    d_gamma_ptr,
    d_beta_ptr,
    rows,
    cols,
    stride_r,
    MAKE: tl.constexpr,
    CENTERED: tl.constexpr,
    TC: tl.constexpr,
):
    """dx of a norm, rstd (dg - mean(dg) - x^ mean(dg x^)) with dg = dy gamma, without mean(dg) for "rmsnorm".

    Program i takes rows i, i + programs and so on, and keeps its sums for gamma and beta: d_gamma (programs, cols).
    """
    c = tl.arange(0, TC)
    inside = c < cols
    size = tl.cast(cols, tl.float32)
    # sums of a program's own rows: no atomics, so the bits do not depend on which program ends first
    d_gamma, d_beta = tl.zeros((TC,), tl.float32), tl.zeros((TC,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        wide = tl.zeros((), tl.int64) + row  # a loop's variable has 32 bits
        x = tl.load(x_ptr + wide * stride_r + c, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + wide * cols + c, mask=inside, other=0.0).to(tl.float32)
        if MAKE == "layernorm":
            x = tl.where(inside, x - tl.load(statistics_ptr + row), 0.0)
        rstd = tl.load(statistics_ptr + rows + row)
        x *= rstd
        d_gamma += dy * x
        d_beta += dy
        if gamma_ptr is not None:
            # read in each row: from L1, in the place of registers that the sums take
            gamma = tl.load(gamma_ptr + c, mask=inside, other=0.0).to(tl.float32)
            dy *= gamma + 1.0 if CENTERED else gamma
        dx = dy - x * tl.math.div_rn(tl.sum(dy * x, axis=0), size)
        if MAKE == "layernorm":
            dx -= tl.math.div_rn(tl.sum(dy, axis=0), size)
        tl.store(dx_ptr + wide * cols + c, (dx * rstd).to(dx_ptr.dtype.element_ty), mask=inside)
    part = tl.program_id(0).to(tl.int64) * cols + c
    if d_gamma_ptr is not None:
        tl.store(d_gamma_ptr + part, d_gamma, mask=inside)
    if d_beta_ptr is not None:
        tl.store(d_beta_ptr + part, d_beta, mask=inside)
