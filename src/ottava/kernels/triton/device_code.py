"""Device code: the Triton kernels behind `triton.quantize` and `triton.step`, which import it when they launch.

A kernel reads each tile of x (R, C) once, in fp32, or computes it (`rows_device_code`). It writes the codes of x, and
the codes of x.T by writing the tile transposed. Blocks and scales of x.T are those of x with rows and columns swapped,
so a mode names the elements that share a scale in the orientation of x:

    "tensor"  all        "rows"  a row of x        "cols"  a row of x.T        "blocks"  BR x BC elements of x

The kernels compare magnitudes as integers: without the sign bit the bits of floats are ordered like their magnitudes,
infinity and NaN on top, so a maximum keeps NaN (a float maximum drops it) and may be atomic. Divisions are `div_rn`,
because Triton's `/` is off by an ulp. Everything else follows `scaling.compute_scale` and `rounding` to the bit.

AdamW's step has the operations of torch's foreach kernels, one after the other in fp32. Those have three fused
multiply-adds: in lerp, addcmul and addcdiv. They stand here by name, and the launch lets the compiler fuse no other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ottava.kernels.triton.rows_device_code import load_rows, tile_place


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _power_of_two(exponent):
    """2**exponent for exponents from -127 (the one subnormal of E8M0) to 127."""
    # 0x00400000 is 2**-127, a subnormal number; all others are an exponent field and nothing else
    return _float(tl.where(exponent < -126, 0x00400000, (exponent + 127) << 23))


@triton.jit
def _scale_of(
    magnitude,
    top,
    SCALE_FORMAT: tl.constexpr,
    E8M0_SHIFT: tl.constexpr,
    E8M0_MANTISSA: tl.constexpr,
    HAS_NAN: tl.constexpr,
):
    """(scale, scale_inv) from the bits of an amax: 1 if it is 0 or not finite, but then NaN as scale_inv if the codes
    have no NaN."""
    finite = magnitude < 0x7F800000
    # the amax comes as bits: the atomic maximum that found it was one of integers
    usable = (magnitude > 0) & finite
    # 0x3F800000 is 1.0: with it nothing below overflows, and the last lines replace the result
    amax = _float(tl.where(usable, magnitude, 0x3F800000))
    if (SCALE_FORMAT == "e8m0" or SCALE_FORMAT == "e8m0_floor") and E8M0_SHIFT <= -2:
        # exponent fields as they lie: what is subnormal ends at 2**-127, so nothing has to be normal. The addition
        # carries into the exponent exactly where the significand is above that of the format's largest number: one
        # octave more, so that nothing saturates; log2 would have to be exact to find the same
        CARRY: tl.constexpr = 0x007FFFFF - E8M0_MANTISSA if SCALE_FORMAT == "e8m0" else 0
        octave = (magnitude + CARRY) & 0x7F800000
        # 2**127 at most: below that the difference is smaller, unsigned
        bits = tl.minimum((0x7F000000 - (E8M0_SHIFT << 23)) - octave.to(tl.uint32, bitcast=True), 0x7F000000)
        bits = tl.where(finite, bits.to(tl.int32, bitcast=True), 0x3F800000)
        # of zeros any scale makes the same codes, but theirs is 1
        inverse = tl.where(magnitude > 0, 0x7F000000 - bits, 0x3F800000)
        scale, scale_inv = _float(bits), _float(tl.where(inverse == 0, 0x00400000, inverse))
    elif SCALE_FORMAT == "e8m0" or SCALE_FORMAT == "e8m0_floor":
        subnormal = amax < 1.1754943508222875e-38
        wide = _bits(tl.where(subnormal, amax * 4294967296.0, amax))  # exact: now it is normal
        # a subnormal number has no exponent field to read: times 2**32 it has one, 32 too large
        exponent = (wide >> 23) - tl.where(subnormal, 127 + 32, 127) + E8M0_SHIFT
        if SCALE_FORMAT == "e8m0":
            # one octave more exactly where the significand of amax is above that of the format's largest number:
            # nothing saturates then, and log2 would have to be exact to find the same
            exponent += tl.where((wide & 0x007FFFFF) > E8M0_MANTISSA, 1, 0)
        exponent = tl.where(usable, tl.minimum(tl.maximum(exponent, -127), 127), 0)
        scale, scale_inv = _power_of_two(-exponent), _power_of_two(exponent)
    else:
        # two tensors are divided, as in the reference: a scalar over a tensor would be a product with a reciprocal,
        # which rounds twice
        scale = tl.minimum(tl.math.div_rn(tl.zeros_like(amax) + top, amax), 3.4028234663852886e38)
        if SCALE_FORMAT == "pow2":
            subnormal = scale < 1.1754943508222875e-38
            wide = tl.where(subnormal, scale * 4294967296.0, scale)
            # without its mantissa a number is the power of two below it
            power = _float(_bits(wide) & 0x7F800000)
            scale = tl.where(subnormal, power * 2.3283064365386963e-10, power)
        scale = tl.where(usable, scale, 1.0)
        scale_inv = tl.math.div_rn(tl.zeros_like(scale) + 1.0, scale)
    return scale, scale_inv if HAS_NAN else tl.where(finite, scale_inv, float("nan"))


@triton.jit
def _encode(
    x,
    factor,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SIGN: tl.constexpr,
    HAS_NAN: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Codes of x * factor, one a byte, rounded to nearest even. What is beyond MAX saturates; NaN stays NaN, and an
    infinity of x becomes NaN. Without HAS_NAN infinity saturates, too, and NaN becomes MAX.

    NATIVE: "E4M3" or "E5M2" by the conversion of sm_89 and later, which saturates all but NaN; "": any format of at
    most 8 bits, by integers; "FNUZ": the same of a format whose only NaN has the code of -0.
    """
    y = x * factor
    if HAS_NAN:
        # decision 1 of the design: infinity must not saturate, or a GradScaler would not see it
        y = tl.fma(x, tl.zeros_like(x), y)  # x * 0 is a zero with the sign of y, or NaN: one instruction
    if NATIVE == "E4M3":
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    if NATIVE == "E5M2":
        return y.to(tl.float8e5).to(tl.uint8, bitcast=True)
    SHIFT: tl.constexpr = 23 - MANTISSA
    # the rest is for devices that do not convert, and for FP4 and FP6, which none converts
    nan, bits = y != y, _bits(y)
    # clamped before it is rounded: a number just above MAX must not round to the code behind it, which is no number
    magnitude = tl.minimum(bits & 0x7FFFFFFF, _bits(tl.zeros_like(y) + MAX))
    # half a unit of the last kept bit, less one, plus that bit: a tie reaches the next code only from an odd one
    rounded = magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)
    normal = (rounded >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # an ulp of this power of two is the smallest subnormal: the addition rounds, and the last bits are the code
    POWER: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    tiny = _bits(_float(magnitude) + _float(tl.zeros_like(magnitude) + POWER)) - POWER
    # below the smallest normal number of the format: (128 - BIAS) is its exponent field in fp32
    code = tl.where(magnitude < ((128 - BIAS) << 23), tiny, normal)
    if NATIVE == "FNUZ":
        negative = tl.where(nan, 1, tl.where(code == 0, 0, (bits >> 31) & 1))
        code = tl.where(nan, 0, code)
    else:
        negative = tl.where(nan, 0, (bits >> 31) & 1)
        code = tl.where(nan, (1 << SIGN) - 1, code)  # all ones; without NaN that is the largest number
    return (code | (negative << SIGN)).to(tl.uint8)


@triton.jit
def _store(q_ptr, codes, r, c, rows, cols):
    """codes (r, c) into a contiguous matrix of that many rows and columns."""
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    # int64: a place in a matrix of 2**31 elements or more does not fit in int32
    tl.store(q_ptr + r.to(tl.int64)[:, None] * cols + c[None, :], codes, mask=mask)


@triton.jit
def _per_element(per_block, TR: tl.constexpr, TC: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """One entry a block -> one an element of the tile."""
    if (BR == 1 and BC == TC) or (BR == TR and BC == 1):
        return tl.broadcast_to(per_block, (TR, TC))
    # (blocks down, 1, blocks across, 1): the two extents of a block are the ones to broadcast
    spread = tl.reshape(per_block, (TR // BR, 1, TC // BC, 1))
    return tl.reshape(tl.broadcast_to(spread, (TR // BR, BR, TC // BC, BC)), (TR, TC))


@triton.jit
def _block_amax(magnitude, TR: tl.constexpr, TC: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Bits of the largest magnitude of each block of a tile."""
    if BR == 1 and BC == TC:
        return tl.max(magnitude, axis=1)[:, None]
    if BR == TR and BC == 1:
        return tl.max(magnitude, axis=0)[None, :]
    # rows and columns of a block become axes 1 and 3
    blocks = tl.reshape(magnitude, (TR // BR, BR, TC // BC, BC))
    return tl.max(tl.max(blocks, axis=3), axis=1)


@triton.jit
def _factor(
    magnitude,
    amax_ptr,
    scale_inv_ptr,
    r,
    c,
    row_tile,
    col_tile,
    rows,
    cols,
    stride_r,
    stride_c,
    top,
    MODE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
    SCALE_FORMAT: tl.constexpr,
    E8M0_SHIFT: tl.constexpr,
    E8M0_MANTISSA: tl.constexpr,
    HAS_NAN: tl.constexpr,
):
    """The factor of each element of a tile; writes scale_inv, and amax where the tile holds whole blocks.

    stride_r, stride_c: of the grid of blocks in memory, in the orientation of x.
    """
    if MODE == "blocks":
        amax = _block_amax(magnitude, TR, TC, BR, BC)
        scale, _ = _scale_of(amax, top, SCALE_FORMAT, E8M0_SHIFT, E8M0_MANTISSA, HAS_NAN)
        if amax.numel > 1:
            # amax lies as the factors need it, many copies of a block's; a gather hands each block to one thread, so
            # that what is stored is computed once
            amax = tl.reshape(tl.gather(tl.reshape(amax, (amax.numel,)), tl.arange(0, amax.numel), 0), amax.shape)
        _, scale_inv = _scale_of(amax, top, SCALE_FORMAT, E8M0_SHIFT, E8M0_MANTISSA, HAS_NAN)
        i = row_tile * (TR // BR) + tl.arange(0, TR // BR)
        j = col_tile * (TC // BC) + tl.arange(0, TC // BC)
        # the last tile may lie beyond the last block; of a ragged block it has read zeros, which raise no amax
        inside = (i[:, None] < tl.cdiv(rows, BR)) & (j[None, :] < tl.cdiv(cols, BC))
        where = i.to(tl.int64)[:, None] * stride_r + j.to(tl.int64)[None, :] * stride_c
        tl.store(amax_ptr + where, amax, mask=inside)
        tl.store(scale_inv_ptr + where, scale_inv, mask=inside)
        return _per_element(scale, TR, TC, BR, BC)
    if MODE == "rows":
        scale, scale_inv = _scale_of(
            tl.load(amax_ptr + r, mask=r < rows, other=0), top, SCALE_FORMAT, E8M0_SHIFT, E8M0_MANTISSA, HAS_NAN
        )
        # all tiles of a row know its scale; one of them writes it
        if col_tile == 0:
            tl.store(scale_inv_ptr + r, scale_inv, mask=r < rows)
        return tl.broadcast_to(scale[:, None], (TR, TC))
    if MODE == "cols":
        scale, scale_inv = _scale_of(
            tl.load(amax_ptr + c, mask=c < cols, other=0), top, SCALE_FORMAT, E8M0_SHIFT, E8M0_MANTISSA, HAS_NAN
        )
        if row_tile == 0:
            tl.store(scale_inv_ptr + c, scale_inv, mask=c < cols)
        return tl.broadcast_to(scale[None, :], (TR, TC))
    scale, scale_inv = _scale_of(tl.load(amax_ptr), top, SCALE_FORMAT, E8M0_SHIFT, E8M0_MANTISSA, HAS_NAN)
    if row_tile + col_tile == 0:
        tl.store(scale_inv_ptr, scale_inv)
    return tl.zeros((TR, TC), tl.float32) + scale


@triton.jit
def amax_kernel(
    x_ptr,
    tensor_ptr,
    rows_ptr,
    cols_ptr,
    rows,
    cols,
    stride_r,
    stride_c,
    TENSOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
    beside_ptr=None,
    gamma_ptr=None,
    beta_ptr=None,
    MAKE: tl.constexpr = "",
    FLAG: tl.constexpr = False,
    DTYPE: tl.constexpr = "",
):
    """Bits of the amax of all of x, of its rows and of its columns, as requested; the buffers begin at 0."""
    r, c, _, _ = tile_place(tl.program_id(0), rows, cols, TR, TC)
    x = load_rows(x_ptr, beside_ptr, gamma_ptr, beta_ptr, r, c, rows, cols, stride_r, stride_c, MAKE, FLAG, DTYPE)
    magnitude = _bits(x) & 0x7FFFFFFF
    if TENSOR:
        # a maximum is exact in any order, so no bit depends on which program comes first
        tl.atomic_max(tensor_ptr, tl.max(tl.max(magnitude, axis=1), axis=0))
    if ROWS:
        tl.atomic_max(rows_ptr + r, tl.max(magnitude, axis=1), mask=r < rows)
    if COLS:
        tl.atomic_max(cols_ptr + c, tl.max(magnitude, axis=0), mask=c < cols)


@triton.jit
def cast_kernel(
    x_ptr,
    q_ptr,
    scale_inv_ptr,
    amax_ptr,
    qt_ptr,
    scale_inv_t_ptr,
    amax_t_ptr,
    rows,
    cols,
    stride_r,
    stride_c,
    top,
    MODE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    MODE_T: tl.constexpr,
    BR_T: tl.constexpr,
    BC_T: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    SCALE_FORMAT: tl.constexpr,
    E8M0_SHIFT: tl.constexpr,
    E8M0_MANTISSA: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SIGN: tl.constexpr,
    HAS_NAN: tl.constexpr,
    NATIVE: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
    beside_ptr=None,
    gamma_ptr=None,
    beta_ptr=None,
    MAKE: tl.constexpr = "",
    FLAG: tl.constexpr = False,
    DTYPE: tl.constexpr = "",
):
    """Current scaling: the codes of x (MODE) and of x.T (MODE_T), each "" if not wanted.

    SHARED: x and x.T have one scale for each element, and it is that of MODE. TURNED: scales of one column of blocks
    lie side by side, as the GEMM reads them, not those of a row.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # backwards: L2 still holds the tiles that the amax pass read last
    r, c, row_tile, col_tile = tile_place(tile, rows, cols, TR, TC)
    x = load_rows(x_ptr, beside_ptr, gamma_ptr, beta_ptr, r, c, rows, cols, stride_r, stride_c, MAKE, FLAG, DTYPE)
    magnitude = _bits(x) & 0x7FFFFFFF
    if MODE != "":
        stride_i, stride_j = (1, tl.cdiv(rows, BR)) if TURNED else (tl.cdiv(cols, BC), 1)
        factor = _factor(
            magnitude, amax_ptr, scale_inv_ptr, r, c, row_tile, col_tile, rows, cols, stride_i, stride_j, top,
            MODE, BR, BC, TR, TC, SCALE_FORMAT, E8M0_SHIFT, E8M0_MANTISSA, HAS_NAN,
        )  # fmt: skip
        codes = _encode(x, factor, MAX, MANTISSA, BIAS, SIGN, HAS_NAN, NATIVE)
        _store(q_ptr, codes, r, c, rows, cols)
        # the codes are in registers: x.T costs its stores and nothing else
        if SHARED:
            _store(qt_ptr, tl.trans(codes), c, r, cols, rows)
    if MODE_T != "":
        # x.T lies with rows and columns swapped
        stride_i, stride_j = (tl.cdiv(cols, BC_T), 1) if TURNED else (1, tl.cdiv(rows, BR_T))
        factor_t = _factor(
            magnitude, amax_t_ptr, scale_inv_t_ptr, r, c, row_tile, col_tile, rows, cols, stride_i, stride_j, top,
            MODE_T, BR_T, BC_T, TR, TC, SCALE_FORMAT, E8M0_SHIFT, E8M0_MANTISSA, HAS_NAN,
        )  # fmt: skip
        # from x, not from the codes of x: a second rounding would be another number
        codes_t = _encode(x, factor_t, MAX, MANTISSA, BIAS, SIGN, HAS_NAN, NATIVE)
        _store(qt_ptr, tl.trans(codes_t), c, r, cols, rows)


@triton.jit
def _cast_tile(
    x_ptr, q_ptr, qt_ptr, amax_ptr, tile, factor, rows, cols, stride_r, stride_c,
    AMAX: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIGN: tl.constexpr, HAS_NAN: tl.constexpr,
    NATIVE: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr,
    beside_ptr, gamma_ptr, beta_ptr, MAKE: tl.constexpr, FLAG: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One tile of a cast with one factor; AMAX: raises the amax, too."""
    r, c, _, _ = tile_place(tile, rows, cols, TR, TC)
    x = load_rows(x_ptr, beside_ptr, gamma_ptr, beta_ptr, r, c, rows, cols, stride_r, stride_c, MAKE, FLAG, DTYPE)
    # the amax of this step, for the next prediction: x is in registers anyway
    if AMAX:
        tl.atomic_max(amax_ptr, tl.max(tl.max(_bits(x) & 0x7FFFFFFF, axis=1), axis=0))
    codes = _encode(x, factor, MAX, MANTISSA, BIAS, SIGN, HAS_NAN, NATIVE)
    if ROW:
        _store(q_ptr, codes, r, c, rows, cols)
    if COL:
        _store(qt_ptr, tl.trans(codes), c, r, cols, rows)


@triton.jit
def predicted_kernel(
    x_ptr,
    given_ptr,
    q_ptr,
    qt_ptr,
    scale_inv_ptr,
    amax_ptr,
    staged_ptr,
    rows,
    cols,
    stride_r,
    stride_c,
    top,
    lowest_top,
    REDO: tl.constexpr,
    STAGES: tl.constexpr,
    GUARDED: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    SCALE_FORMAT: tl.constexpr,
    E8M0_SHIFT: tl.constexpr,
    E8M0_MANTISSA: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SIGN: tl.constexpr,
    HAS_NAN: tl.constexpr,
    NATIVE: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
    beside_ptr=None,
    gamma_ptr=None,
    beta_ptr=None,
    MAKE: tl.constexpr = "",
    FLAG: tl.constexpr = False,
    DTYPE: tl.constexpr = "",
):
    """Predicted scaling, launched twice. First: casts with the given scale and takes the amax in the same pass.

    REDO: reads that amax and ends, unless there was no prediction yet (0) or, GUARDED, it put amax above MAX or below
    lowest_top; then casts with the current scale. No host sync on the way, so it can be captured in a CUDA graph.
    STAGES: raises the door's staged entries (finite amax | 1: it was not finite | 1: the guard fired), one program.
    """
    given = tl.load(given_ptr)
    first = tl.program_id(0)
    if REDO:
        magnitude = tl.load(amax_ptr)
        taken = given > 0
        if GUARDED:
            reached = _float(magnitude) * given
            taken = taken & (((reached <= MAX) & (reached >= lowest_top)) | (magnitude == 0))
        scale, scale_inv = _scale_of(magnitude, top, SCALE_FORMAT, E8M0_SHIFT, E8M0_MANTISSA, HAS_NAN)
        predicted_inv = tl.math.div_rn(tl.zeros_like(given) + 1.0, given)
        finite = magnitude < 0x7F800000
        used_inv = tl.where(taken & (HAS_NAN | finite), predicted_inv, scale_inv)
        if first == 0:
            tl.store(scale_inv_ptr, used_inv)
            if STAGES:
                fired = (given > 0) & (used_inv != predicted_inv)
                seen = _float(tl.where(finite, magnitude, 0))
                tl.store(staged_ptr, tl.maximum(tl.load(staged_ptr), seen))
                tl.store(staged_ptr + 1, tl.maximum(tl.load(staged_ptr + 1), tl.where(finite, 0.0, 1.0)))
                tl.store(staged_ptr + 2, tl.maximum(tl.load(staged_ptr + 2), tl.where(fired, 1.0, 0.0)))
        # mostly the prediction holds, and this second launch ends here, after a few scalar loads. As few programs as
        # the device holds at once: each takes tiles from the end, which L2 still holds
        tiles = tl.cdiv(rows, TR) * tl.cdiv(cols, TC)
        for tile in range(tl.where(taken, tiles, first), tiles, tl.num_programs(0)):
            _cast_tile(
                x_ptr, q_ptr, qt_ptr, amax_ptr, tiles - 1 - tile, scale, rows, cols, stride_r, stride_c,
                False, ROW, COL, MAX, MANTISSA, BIAS, SIGN, HAS_NAN, NATIVE, TR, TC,
                beside_ptr, gamma_ptr, beta_ptr, MAKE, FLAG, DTYPE,
            )  # fmt: skip
    else:
        _cast_tile(
            x_ptr, q_ptr, qt_ptr, amax_ptr, first, given, rows, cols, stride_r, stride_c,
            True, ROW, COL, MAX, MANTISSA, BIAS, SIGN, HAS_NAN, NATIVE, TR, TC,
            beside_ptr, gamma_ptr, beta_ptr, MAKE, FLAG, DTYPE,
        )  # fmt: skip


@triton.jit
def roll_kernel(
    lanes_ptr,
    index_ptr,
    history_ptr,
    scale_ptr,
    nonfinite_ptr,
    guard_ptr,
    staged_ptr,
    doors,
    length,
    top,
    NEWEST: tl.constexpr,
    SCALE_FORMAT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """A step boundary for all tensors of one spec, one program each: windows take an amax in, scales follow.

    lanes (4, doors): amax, non-finite, guard, due; index: the column of each tensor. NEWEST: scale for the last amax,
    not for the largest. WINDOW: a power of two that holds a window.
    """
    tensor = tl.program_id(0)
    # lanes has a column for each door of the model; index picks those of this spec
    lane = lanes_ptr + tl.load(index_ptr + tensor)
    last = tl.load(lane)
    touched = last > 0
    j = tl.arange(0, WINDOW)
    window_ptr = history_ptr + tensor.to(tl.int64) * length + j
    inside = j < length
    here = tl.load(window_ptr, mask=inside, other=0.0)
    # the window moves by one place: each entry reads its newer neighbour
    before = tl.load(window_ptr - 1, mask=inside & (j > 0), other=0.0)
    tl.debug_barrier()  # all threads have read before a thread overwrites its neighbour's input
    window = tl.where(touched, tl.where(j == 0, last, before), here)
    tl.store(window_ptr, window, mask=inside)
    magnitude = tl.max(tl.where((j == 0) | (not NEWEST), _bits(window), 0), axis=0)
    scale, _ = _scale_of(magnitude, top, SCALE_FORMAT, 0, 0, True)
    # an idle tensor keeps its scale; so does one whose window holds nothing finite
    usable = touched & (magnitude > 0) & (magnitude < 0x7F800000)
    tl.store(scale_ptr + tensor, tl.where(usable, scale, tl.load(scale_ptr + tensor)))
    nonfinite = tl.load(nonfinite_ptr + tensor) + tl.load(lane + doors).to(tl.int64)
    guard = tl.load(guard_ptr + tensor) + tl.load(lane + 2 * doors).to(tl.int64)
    tl.store(nonfinite_ptr + tensor, nonfinite)
    tl.store(guard_ptr + tensor, guard)
    c = tl.arange(0, 4)
    staged = tl.load(staged_ptr + tensor * 3 + c, mask=c < 3, other=0.0)
    # due is 1 or 0: an entry that is not due stays as it was staged
    tl.store(staged_ptr + tensor * 3 + c, staged * (1.0 - tl.load(lane + 3 * doors)), mask=c < 3)


@triton.jit
def _power(base, exponent):
    """base ** exponent in float64, by squaring; the relative error is below exponent * 2**-53."""
    power = tl.full([], 1.0, tl.float64)
    while exponent > 0:
        power = tl.where(exponent % 2 == 1, power * base, power)
        base = base * base
        exponent = exponent // 2
    return power


@triton.jit
def _elements(address_ptr, place, TYPE: tl.constexpr, EVEN: tl.constexpr):
    """Pointers to elements of the tensor whose address lies at address_ptr."""
    return tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(TYPE)) + place, 16 if EVEN else 1)


@triton.jit
def adamw_kernel(
    table_ptr,
    gradient_table_ptr,
    lr_ptr,
    correction,
    size,
    eps,
    lr: tl.float64,
    weight_decay: tl.float64,
    beta1: tl.float64,
    beta2: tl.float64,
    WEIGHT: tl.constexpr,
    EXTRA: tl.constexpr,
    GRADIENT: tl.constexpr,
    MEAN: tl.constexpr,
    SQUARE: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A step of up to ROWS parameters; `step._addresses` describes their tables.

    correction: sqrt(1 - beta2**t); size: -lr / (1 - beta1**t). If they are None, they are made of the step, which is
    read, in float64 as the host does. EXTRA: the type of a master or, beside int16 weight bits, of their remainder, or
    None. EVEN: addresses and counts are multiples of 16.
    """
    program = tl.program_id(0)
    row = tl.sum((tl.load(table_ptr + tl.arange(0, ROWS)) <= program).to(tl.int32)) - 1
    table_ptr += row
    place = (program - tl.load(table_ptr)) * BLOCK + tl.arange(0, BLOCK)
    inside = place < tl.multiple_of(tl.load(table_ptr + ROWS), 16 if EVEN else 1)
    weight_ptr = _elements(table_ptr + 2 * ROWS, place, WEIGHT, EVEN)
    mean_ptr = _elements(table_ptr + 3 * ROWS, place, MEAN, EVEN)
    square_ptr = _elements(table_ptr + 4 * ROWS, place, SQUARE, EVEN)
    gradient_ptr = _elements(gradient_table_ptr + row, place, GRADIENT, EVEN)
    gradient = tl.load(gradient_ptr, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr, mask=inside, other=0.0).to(tl.float32)
    square = tl.load(square_ptr, mask=inside, other=0.0).to(tl.float32)
    split: tl.constexpr = tl.int16 == WEIGHT
    if EXTRA is not None:
        extra_ptr = _elements(table_ptr + 5 * ROWS, place, EXTRA, EVEN)
    if split:
        upper = tl.load(weight_ptr, mask=inside, other=0).to(tl.int32) << 16
        lower = tl.load(extra_ptr, mask=inside, other=0).to(tl.int32)
        w = (upper + lower).to(tl.float32, bitcast=True)
        w = tl.where(w == w, w, upper.to(tl.float32, bitcast=True))  # a zero written over a negative remainder
    elif EXTRA is not None:
        w = tl.load(extra_ptr, mask=inside, other=0.0)
        stored = tl.load(weight_ptr, mask=inside, other=0.0)
        w = tl.where(stored == w.to(stored.dtype), w, stored.to(tl.float32))  # else somebody has written the weight
    else:
        w = tl.load(weight_ptr, mask=inside, other=0.0)

    rate = tl.full([], lr, tl.float64) if lr_ptr is None else tl.load(lr_ptr).to(tl.float64)
    beta1, beta2 = tl.full([], beta1, tl.float64), tl.full([], beta2, tl.float64)
    share1, share2 = (1.0 - beta1).to(tl.float32), (1.0 - beta2).to(tl.float32)
    w = w * (1.0 - rate * weight_decay).to(tl.float32)
    zeros = tl.zeros_like(w)
    near = zeros + share1 < 0.5  # torch's lerp starts from the nearer end
    mean = tl.fma(tl.where(near, share1, share1 - 1.0), gradient - mean, tl.where(near, mean, gradient))
    square = tl.fma(zeros + share2, gradient * gradient, square * beta2.to(tl.float32))
    if correction is None:
        step = tl.load(_elements(table_ptr + 6 * ROWS, 0, tl.float32, False)).to(tl.int32)
        correction = tl.sqrt(1.0 - _power(beta2, step)).to(tl.float32)
        size = (-(rate / (1.0 - _power(beta1, step)))).to(tl.float32)
    denominator = tl.math.div_rn(tl.sqrt_rn(square), zeros + correction) + eps
    w = tl.fma(zeros + size, tl.math.div_rn(mean, denominator), w)

    tl.store(mean_ptr, mean.to(MEAN), mask=inside)
    tl.store(square_ptr, square.to(SQUARE), mask=inside)
    if split:
        bits = tl.where(w == w, w.to(tl.int32, bitcast=True), 0x7FC00000)  # the sum below would wrap with some NaNs
        upper = (bits + 0x8000) >> 16
        tl.store(weight_ptr, upper.to(tl.int16), mask=inside)
        tl.store(extra_ptr, (bits - (upper << 16)).to(tl.int16), mask=inside)
    else:
        tl.store(weight_ptr, w.to(WEIGHT), mask=inside)
        if EXTRA is not None:
            tl.store(extra_ptr, w, mask=inside)
