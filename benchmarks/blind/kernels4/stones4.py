"""What the adapters of this folder stand on, in plain torch: codes by rounding on the step of an exponent, scales by frexp, sums in fp64.

    tensorwise        one scale, fp32:  scale = fp32(top / amax), scale_inv = fp32(1 / scale); gradients are E5M2
    rowwise           a power of two for each row
    blockwise         1x128 (weights 128x128), a power of two;  blockwise_fp32: the same in fp32
    mxfp8, mxfp4      1x32, a power of two in a byte, rounded up
    nvfp4             1x16 (weights 16x16), a scale in E4M3 times one of the tensor, written as their product in fp32

An amax of 0 has the scale 1, and so has one that is not finite. Infinities become NaN, finite numbers saturate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from ottava.prove import adapter
from torch import Tensor

__all__ = ["E2M1", "E4M3", "E5M2", "Kind", "Plan", "adapter", "cast", "codes", "fp8", "grid_amax", "grown", "hand", "halves", "layer", "lift", "numbers",
           "nv_scales", "octave", "ones_where", "plan", "product", "put", "read", "scales", "spans", "two",
           "values", "weigh", "whole_amax"]


class Kind(NamedTuple):
    """A format: bits of the mantissa, smallest exponent, largest number, dtype."""

    bits: int
    low: int
    top: float
    dtype: torch.dtype

    @property
    def last(self) -> int:
        """The code of the largest number."""
        return {448.0: 0x7E, 57344.0: 0x7B, 6.0: 7}[self.top]

    @property
    def sign(self) -> int:
        """The bit of the sign."""
        return 8 if self.dtype == torch.uint8 else 128


E4M3 = Kind(3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = Kind(2, -14, 57344.0, torch.float8_e5m2)
E2M1 = Kind(1, 0, 6.0, torch.uint8)


def two(exponent: Tensor) -> Tensor:
    """2**exponent, fp64, exact."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def halves(y: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """|y| in units of the format's step at its exponent, and the code where this unit count is 0."""
    size = y.to(torch.float64).abs().nan_to_num(0.0, 1e300)
    exponent = torch.where(size > 0, torch.frexp(size)[1].to(torch.int64) - 1, kind.low).clamp(min=kind.low, max=900)
    return size * two(kind.bits - exponent), (exponent - kind.low) << kind.bits


def weigh(code: Tensor, y: Tensor, kind: Kind) -> Tensor:
    """Codes of magnitudes with signs and NaN, in the format's dtype."""
    code = code.clamp(max=kind.last)
    code = code if kind is E2M1 else torch.where(y.isnan(), 0x7F, code)
    return (code | torch.where(torch.signbit(y), kind.sign, 0)).to(torch.uint8).view(kind.dtype)


def codes(y: Tensor, kind: Kind) -> Tensor:
    """Nearest codes, ties to even, saturating."""
    count, base = halves(y, kind)
    return weigh((torch.round(count).to(torch.int64) + base).clamp(max=kind.last), y, kind)


def values(data: Tensor, kind: Kind | None = None) -> Tensor:
    """The numbers of codes, fp64."""
    if kind is None:
        kind = {k.dtype: k for k in (E4M3, E5M2, E2M1)}[data.dtype]
    byte = data.contiguous().view(torch.uint8).to(torch.int64)
    field, mantissa = (byte & (kind.sign - 1)) >> kind.bits, byte & ((1 << kind.bits) - 1)
    size = (mantissa + torch.where(field > 0, 1 << kind.bits, 0)).to(torch.float64) * two(field.clamp(min=1) - 1 + kind.low - kind.bits)
    if kind is E4M3:
        size = torch.where((byte & 127) == 127, math.nan, size)
    if kind is E5M2:
        size = torch.where(field == 31, torch.where(mantissa == 0, math.inf, math.nan), size)
    return torch.where((byte & kind.sign) > 0, -size, size)


# --- scales ---


class Plan(NamedTuple):
    """How an operand is cast; None is the whole extent."""

    kind: Kind
    rows: int | None
    columns: int | None
    how: str


def plan(recipe: str, operand: str = "x") -> Plan:
    """The plan of x, weight or grad."""
    square = operand == "weight"
    if recipe == "tensorwise":
        return Plan(E5M2 if operand == "grad" else E4M3, None, None, "fp32")
    return {
        "rowwise": Plan(E4M3, 1, None, "pow2"),
        "blockwise": Plan(E4M3, 128 if square else 1, 128, "pow2"),
        "blockwise_fp32": Plan(E4M3, 128 if square else 1, 128, "fp32"),
        "mxfp8": Plan(E4M3, 1, 32, "byte"),
        "mxfp4": Plan(E2M1, 1, 32, "byte"),
        "nvfp4": Plan(E2M1, 16 if square else 1, 16, "nv"),
    }[recipe]


def grid_amax(x: Tensor, p: Plan) -> Tensor:
    """The amax of each block, fp64; NaN shows."""
    rows, columns = p.rows or max(x.shape[0], 1), p.columns or max(x.shape[1], 1)
    grid = (-(-x.shape[0] // rows) if p.rows else 1, -(-x.shape[1] // columns) if p.columns else 1)
    if x.numel() == 0:
        return torch.zeros(grid, dtype=torch.float64)
    full = torch.zeros(grid[0] * rows, grid[1] * columns, dtype=torch.float64)
    full[: x.shape[0], : x.shape[1]] = x.to(torch.float64).abs()
    return full.view(grid[0], rows, grid[1], columns).amax((1, 3))


def ones_where(amax: Tensor) -> Tensor:
    """1 where an amax is 0 or not finite."""
    return torch.where((amax > 0) & amax.isfinite(), amax, 1.0)


def octave(amax: Tensor, kind: Kind) -> Tensor:
    """The smallest e with amax <= top 2**e, from -127 to 127."""
    part, exponent = torch.frexp(amax)
    top, top_exponent = math.frexp(kind.top)
    return (exponent.to(torch.int64) - top_exponent + (part > top).to(torch.int64)).clamp(-127, 127)


def scales(amax: Tensor, p: Plan) -> tuple[Tensor, Tensor]:
    """(scale, inverse) of each block, fp64; scales in fp32 are rounded to it."""
    plain = (amax > 0) & amax.isfinite()
    if p.how == "fp32":
        scale = (torch.tensor(p.kind.top) / ones_where(amax).to(torch.float32)).clamp(max=torch.finfo(torch.float32).max)
        scale, inverse = scale.to(torch.float64), (1 / scale).to(torch.float64)
    else:
        e = octave(ones_where(amax), p.kind)
        scale, inverse = two(-e), two(e)
    return torch.where(plain, scale, 1.0), torch.where(plain, inverse, 1.0)


def nv_scales(amax: Tensor, top: Tensor) -> Tensor:
    """What is written of NVFP4's scales, fp64 that holds fp32: E4M3 of each block times that of the tensor."""
    top = ones_where(top)
    return (values(codes(amax * 448 / top, E4M3)) * (top / 2688)).to(torch.float32).to(torch.float64)


def whole_amax(amax: Tensor) -> Tensor:
    """The largest amax of the blocks that are finite."""
    return torch.where(amax.isfinite(), amax, 0.0).amax() if amax.numel() else torch.tensor(0.0, dtype=torch.float64)


def grown(grid: Tensor, shape: tuple[int, ...], p: Plan) -> Tensor:
    """A block's entry for each of its elements."""
    rows, columns = p.rows or max(shape[0], 1), p.columns or max(shape[1], 1)
    return grid.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def lift(x: Tensor, scale: Tensor, p: Plan) -> Tensor:
    """x times its scales; products of fp32 scales are fp32's. Infinities are NaN in FP8."""
    wide = x.to(torch.float64)
    wide = wide if p.kind is E2M1 else torch.where(wide.isinf(), math.nan, wide)
    y = wide * grown(scale, x.shape, p)
    return y.to(torch.float32) if p.how == "fp32" else y


def read(scale: Tensor) -> Tensor:
    """Scales as (rows, columns), fp64; 255 is NaN."""
    if scale.dtype != torch.float32:
        byte = scale.view(torch.uint8).to(torch.int64)
        scale = torch.where(byte == 255, math.nan, two(byte - 127))
    return scale.to(torch.float64).reshape(scale.shape if scale.dim() == 2 else (1, 1))


def cast(x: Tensor, p: Plan, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(codes, inverses as they are stored)."""
    amax = grid_amax(x, p) if amax is None else amax
    if p.how == "nv":
        inverse = nv_scales(amax, whole_amax(amax))
        per = grown(inverse, x.shape, p)
        y = torch.where(per > 0, x.to(torch.float64) / per, 0.0).copysign(x.to(torch.float64))
        return codes(y, E2M1), torch.where(amax.isfinite(), inverse, math.nan).to(torch.float32)
    scale, inverse = scales(amax, p)
    data = codes(lift(x, scale, p), p.kind)
    if p.how == "byte":
        byte = (torch.frexp(inverse)[1] + 126).to(torch.uint8)
        return data, torch.where(amax.isfinite(), byte, 255 if p.kind is E2M1 else byte).to(torch.uint8)
    return data, inverse.to(torch.float32)


def hand(data: Tensor, scale_inv: Tensor, own: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Writes both results into their buffers."""
    data.view(torch.uint8).copy_(own.view(torch.uint8))
    scale_inv.view(torch.uint8 if inverse.dtype == torch.uint8 else torch.float32).copy_(inverse.reshape(scale_inv.shape))
    return data, scale_inv


# --- products ---


def put(out: Tensor, y: Tensor) -> Tensor:
    """Writes a product, rounded once more."""
    out.copy_(y.to(torch.float32))
    return out


def fp8(data: Tensor, scale: Tensor, recipe: str, operand: str) -> Tensor:
    """An operand as numbers, fp64."""
    return values(data) * grown(read(scale), data.shape, plan(recipe, operand))


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, recipe: str) -> Tensor:
    """a (M, K) times b (N, K), fp64."""
    return fp8(a, scale_a, recipe, "x") @ fp8(b, scale_b, recipe, "weight").t()


def spans(ends: Tensor) -> list[tuple[int, int, int]]:
    """(group, first row, end)."""
    cuts = [0, *ends.tolist()]
    return [(g, cuts[g], cuts[g + 1]) for g in range(len(cuts) - 1)]


def numbers(x: Tensor, p: Plan) -> Tensor:
    """x behind its cast, fp64."""
    data, inverse = cast(x, p)
    return values(data, p.kind) * grown(read(inverse), x.shape, p)


def layer(x: Tensor, weight: Tensor, grad: Tensor, recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """(y, dx, dw), fp64."""
    side, square, back = plan(recipe), plan(recipe, "weight"), plan(recipe, "grad")
    y = numbers(x, side) @ numbers(weight, square).t()
    dx = numbers(grad, back) @ numbers(weight.t(), square).t()
    return y, dx, numbers(grad.t(), back) @ numbers(x.t(), side).t()
