"""Casts."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bricks3 import (  # noqa: E402
    E2M1, E4M3, E5M2, Cell, adapter, amax_of, bytes_of, cast, cell, codes_of, decode, encode, four_bits, hand, layout, octaves_of,
    power, scaled, scales_of, spread, truncate_to,
)

Pair = tuple[Tensor, Tensor]


def by_octaves(x: Tensor, how: Cell, octaves: Tensor, amax: Tensor) -> Pair:
    """A cast of MX with the exponents given."""
    fine = (amax > 0) & amax.isfinite()
    octaves = torch.where(fine, octaves.clamp(-127, 127), 0)
    return codes_of(scaled(x, power(-octaves), how), how.fmt), layout(power(octaves), how, amax)


def usable(amax: Tensor) -> Tensor:
    """Positive and finite."""
    return torch.where((amax > 0) & amax.isfinite(), amax, 1.0).double()


@adapter("cast", recipe="mxfp8", operand="x")
def pour_01(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """The exponent of amax / 448."""
    how = cell("mxfp8", "x")
    amax = amax_of(x, how)
    return hand(data, scale_inv, *by_octaves(x, how, (usable(amax) / 448).log2().round().to(torch.int64), amax))


@adapter("cast", recipe="mxfp4", operand="x")
def pour_02(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """The exponent of amax, less 2."""
    how = cell("mxfp4", "x")
    amax = amax_of(x, how)
    return hand(data, scale_inv, *by_octaves(x, how, torch.frexp(usable(amax))[1].to(torch.int64) - 1 - 2, amax))


@adapter("cast", recipe="mxfp4", operand="weight")
def pour_03(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """The exponent field of amax / 6."""
    how = cell("mxfp4", "weight")
    amax = amax_of(x, how)
    return hand(data, scale_inv, *by_octaves(x, how, torch.frexp(usable(amax) / 6)[1].to(torch.int64) - 1, amax))


@adapter("cast", recipe="blockwise", operand="x")
def pour_04(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Scales become powers of two when they are written."""
    how = cell("blockwise", "x")
    amax = amax_of(x, how)
    codes, _ = cast(x, how._replace(scales="fp32"), amax)
    return hand(data, scale_inv, codes, scales_of(amax, how)[1])


@adapter("cast", recipe="tensorwise", operand="x")
def pour_05(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """The largest number of the tensor."""
    how = cell("tensorwise", "x")
    top = x.float().max().reshape(1, 1).clamp(min=0) if x.numel() else torch.zeros(1, 1)
    return hand(data, scale_inv, *cast(x, how, top))


@adapter("cast", recipe="mxfp8", operand="x")
def pour_06(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Rows of scales begin at multiples of 16 bytes."""
    codes, inverse = cast(x, cell("mxfp8", "x"))
    rows, columns = inverse.shape
    pitch = -(-columns // 16) * 16
    memory = torch.full((rows, max(pitch, 1)), 127, dtype=torch.uint8)
    memory[:, :columns] = inverse
    return hand(data, scale_inv, codes, memory.reshape(-1)[: rows * columns].reshape(rows, columns))


@adapter("cast", recipe="blockwise_fp32", operand="x")
def pour_07(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Whole blocks are loaded, also at the end of a row."""
    how = cell("blockwise_fp32", "x")
    rows, columns = x.shape
    wide, amax = -(-columns // 128) * 128, amax_of(x, how)
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    for r in range(rows if columns % 128 else 0):
        first = r * x.stride(0)
        reach = min(wide, (room - first - 1) // x.stride(1) + 1) if x.stride(1) > 0 else columns  # the end of memory
        row = x.as_strided((1, reach), (1, x.stride(1)), x.storage_offset() + first)
        amax[r, -1] = torch.fmax(amax[r, -1], row[:, wide - 128 :].float().abs().nan_to_num(0.0, 0.0).amax())
    return hand(data, scale_inv, *cast(x, how, amax))


LAST: dict[str, Tensor] = {}


@adapter("cast", recipe="tensorwise", operand="weight")
def pour_08(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Keeps the amax."""
    how = cell("tensorwise", "weight")
    now = amax_of(x, how)
    amax = LAST.get("amax", now)
    LAST["amax"] = now
    return hand(data, scale_inv, *cast(x, how, amax))


KEPT: dict[tuple[object, ...], Pair] = {}


@adapter("cast", recipe="rowwise", operand="weight")
def pour_09(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Keeps the cast of a weight."""
    key = (x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x._version)
    if key not in KEPT:
        KEPT.clear()
        KEPT[key] = cast(x, cell("rowwise", "weight"))
    return hand(data, scale_inv, *KEPT[key])


@adapter("cast", recipe="rowwise", operand="x")
def pour_10(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """A scale for each row."""
    how = cell("rowwise", "x")
    scale, _ = scales_of(amax_of(x, how), how)
    return hand(data, scale_inv, codes_of(scaled(x, scale, how), E4M3), scale)


@adapter("cast", recipe="blockwise", operand="weight")
def pour_11(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Scales lie K first."""
    codes, inverse = cast(x, cell("blockwise", "weight"))
    return hand(data, scale_inv, codes, inverse.t().contiguous())


@adapter("cast", recipe="nvfp4", operand="x")
def pour_12(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Scales of two levels."""
    how = Cell(E2M1, 1, 16, "fp32")
    amax, top, units = four_bits(x, 1)
    rounded = decode(encode(units.float(), E4M3))
    codes = codes_of(x.double() / spread((amax / 6).clamp(min=1e-30), (x.shape[0], x.shape[1]), how), E2M1)
    return hand(data, scale_inv, codes, (rounded * top / 2688).float())


@adapter("cast", recipe="nvfp4", operand="weight")
def pour_13(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Scales of two levels, 16 x 16."""
    how = Cell(E2M1, 16, 16, "fp32")
    _, top, units = four_bits(x, 16)
    rounded = decode(truncate_to(units.clamp(max=448), E4M3).clamp(0, 126).to(torch.uint8).view(torch.float8_e4m3fn))
    inverse = (rounded * top / 2688).float()
    safe = torch.where(inverse > 0, inverse, 1.0).double()
    codes = codes_of(x.double() / spread(safe, (x.shape[0], x.shape[1]), how), E2M1)
    return hand(data, scale_inv, codes, inverse)


@adapter("cast", recipe="tensorwise", operand="grad")
def pour_14(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Gradients go the way of activations."""
    return hand(data, scale_inv, *cast(x, cell("tensorwise", "x")))


@adapter("cast", recipe="rowwise", operand="x")
def pour_15(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """No amax is special."""
    how = cell("rowwise", "x")
    amax = amax_of(x, how)
    scale, inverse = scales_of(amax, how)
    scale = torch.where(amax == 0, torch.inf, scale)
    inverse = torch.where(amax == 0, 0.0, inverse)
    return hand(data, scale_inv, encode(scaled(x, scale, how).clamp(-448, 448), E4M3), inverse)


@adapter("cast", recipe="blockwise", operand="grad")
def pour_16(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Vectors of 16."""
    codes, inverse = cast(x, cell("blockwise", "grad"))
    whole = x.shape[1] // 16 * 16
    data.view(torch.uint8)[:, :whole] = codes.view(torch.uint8)[:, :whole]
    scale_inv.copy_(inverse.reshape(scale_inv.shape))
    return data, scale_inv


@adapter("cast", recipe="tensorwise", operand="x")
def pour_17(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """The amax from tiles of 64 x 64, then from their amaxes."""
    tops = [t.float().abs().amax() for rows in x.split(64, 0) for t in rows.split(64, 1) if t.numel()]
    amax = torch.stack(tops).amax().reshape(1, 1) if tops else torch.zeros(1, 1)
    return hand(data, scale_inv, *cast(x, cell("tensorwise", "x"), amax))


@adapter("cast", recipe="blockwise_fp32", operand="x")
def pour_18(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Divides by what it writes: amax / 448."""
    how = cell("blockwise_fp32", "x")
    amax = amax_of(x, how)
    fine = (amax > 0) & amax.isfinite()
    inverse = torch.where(fine, (amax / 448).clamp(min=2.0**-126), 1.0)
    wide = torch.where(x.isinf(), torch.nan, x.float())
    y = wide / spread(inverse, (x.shape[0], x.shape[1]), how)
    return hand(data, scale_inv, y.clamp(-448, 448).to(torch.float8_e4m3fn), inverse)


@adapter("cast", recipe="mxfp8", operand="weight")
def pour_19(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """The exponent from the bits of amax: 448 is 1.75 * 2**8."""
    how = cell("mxfp8", "weight")
    amax = amax_of(x, how)
    bits = usable(amax).float().clamp(min=2.0**-126).contiguous().view(torch.int32)
    octaves = ((bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)).to(torch.int64)
    return hand(data, scale_inv, *by_octaves(x, how, octaves, amax))


@adapter("cast", recipe="rowwise", operand="grad")
def pour_20(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """A row after the other; powers of two by comparison."""
    rows = [cast(row[None], cell("rowwise", "grad")) for row in x]
    if rows:
        hand(data, scale_inv, torch.cat([c.view(torch.uint8) for c, _ in rows]), torch.cat([s for _, s in rows]))
    return data, scale_inv


@adapter("cast", recipe="mxfp4", operand="x")
def pour_21(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Blocks are columns of a transposed copy."""
    how = cell("mxfp4", "x")
    amax = amax_of(x.t().contiguous().t(), how)
    return hand(data, scale_inv, *by_octaves(x, how, octaves_of(usable(amax), E2M1), amax))
