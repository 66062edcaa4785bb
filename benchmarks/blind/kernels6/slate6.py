"""What the adapters of this folder stand on: rounding by a step of each number's own, scales from mantissa and exponent, amaxes by scatter.

    tensorwise      one scale, fp32: 448 / amax (gradients: E5M2, 57344 / amax); stored is its inverse
    rowwise         a power of two for each row
    blockwise       1x128 (weights 128x128), a power of two;  blockwise_fp32: the same in fp32
    mxfp8, mxfp4    1x32, a power of two in a byte, rounded up
    nvfp4           1x16 (weights 16x16): an E4M3 number for the block times one number of the tensor, stored as their product in fp32

Infinities saturate. An amax of 0, NaN or infinity gives the scale 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from ottava.prove import adapter
from torch import Tensor

__all__ = ["E2M1", "E4M3", "E5M2", "Kind", "Plan", "adapter", "attend", "attend_back", "block_amax", "deliver", "enlarge", "exponent_up", "fold", "grid_of", "load", "nv_scale",
           "numbers", "operand", "plan_of", "quantize", "regular", "segments", "settle", "step_round", "through", "two", "unfold", "write"]


@dataclass(frozen=True)
class Kind:
    """A format: mantissa bits, lowest exponent of a normal number, largest number, the dtype of its codes."""

    mantissa: int
    low: int
    top: float
    dtype: torch.dtype


E4M3 = Kind(3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = Kind(2, -14, 57344.0, torch.float8_e5m2)
E2M1 = Kind(1, 0, 6.0, torch.uint8)
HALVES = torch.tensor([0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7], dtype=torch.uint8)  # code of n halves
MEANING = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], dtype=torch.float64)


def two(exponent: Tensor) -> Tensor:
    """2**exponent in fp64."""
    return torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent.to(torch.int32))


def step_round(x: Tensor, kind: Kind) -> Tensor:
    """The nearest number of a format, ties to even, saturating; NaN stays."""
    x = x.to(torch.float64).clamp(-kind.top, kind.top)
    exponent = torch.frexp(x.nan_to_num(0.0))[1] - 1
    step = two(exponent.clamp(min=kind.low) - kind.mantissa)
    return torch.round(x / step).mul(step).copysign(x)


def numbers(values: Tensor, kind: Kind) -> Tensor:
    """Codes of numbers of the format."""
    if kind is not E2M1:
        return values.to(torch.float32).to(kind.dtype)
    size = HALVES[(values.abs() * 2).nan_to_num(0.0).round().long()]
    return size | (torch.signbit(values).to(torch.uint8) << 3)


def settle(x: Tensor, kind: Kind) -> Tensor:
    """Codes of any numbers."""
    return numbers(step_round(x, kind), kind)


def load(data: Tensor) -> Tensor:
    """What codes mean, fp64; uint8 is E2M1."""
    if data.dtype == torch.uint8:
        return MEANING[(data & 15).long()]
    return data.contiguous().to(torch.float32).to(torch.float64)


# --- scales ---


@dataclass(frozen=True)
class Plan:
    """How an operand is cast: format, rows and columns of a block (None: all), and the scales: fp32, pow2, byte or nv."""

    kind: Kind
    rows: int | None
    columns: int | None
    scale: str


def plan_of(recipe: str, role: str = "x") -> Plan:
    """The plan of x, weight or grad."""
    square = role == "weight"
    match recipe:
        case "tensorwise":
            return Plan(E5M2 if role == "grad" else E4M3, None, None, "fp32")
        case "rowwise":
            return Plan(E4M3, 1, None, "pow2")
        case "blockwise" | "blockwise_fp32":
            return Plan(E4M3, 128 if square else 1, 128, "fp32" if recipe.endswith("fp32") else "pow2")
        case "mxfp8":
            return Plan(E4M3, 1, 32, "byte")
        case "mxfp4":
            return Plan(E2M1, 1, 32, "byte")
    return Plan(E2M1, 16 if square else 1, 16, "nv")


def grid_of(shape: tuple[int, ...], plan: Plan) -> tuple[int, int]:
    """Blocks down and across."""
    return (-(-shape[0] // plan.rows) if plan.rows else 1, -(-shape[1] // plan.columns) if plan.columns else 1)


def places(shape: tuple[int, ...], plan: Plan) -> Tensor:
    """The number of each element's block."""
    i = torch.arange(shape[0]) // (plan.rows or max(shape[0], 1))
    j = torch.arange(shape[1]) // (plan.columns or max(shape[1], 1))
    return i[:, None] * grid_of(shape, plan)[1] + j[None, :]


def block_amax(x: Tensor, plan: Plan) -> Tensor:
    """The amax of each block, fp64; NaN shows."""
    down, across = grid_of(x.shape, plan)
    size = x.detach().to(torch.float64).abs().reshape(-1)
    found = torch.zeros(down * across, dtype=torch.float64)
    return found.scatter_reduce(0, places(x.shape, plan).reshape(-1), size, "amax").reshape(down, across)


def enlarge(grid: Tensor, shape: tuple[int, ...], plan: Plan) -> Tensor:
    """The entry of its block for each element."""
    return grid.reshape(-1)[places(shape, plan)] if math.prod(shape) else torch.zeros(shape, dtype=grid.dtype)


def regular(amax: Tensor) -> Tensor:
    """Where an amax gives a scale."""
    return (amax > 0) & (amax < math.inf)


def exponent_up(amax: Tensor, top: float) -> Tensor:
    """The smallest e >= -127 with amax <= top * 2**e; 0 where there is no scale."""
    fraction, exponent = torch.frexp(torch.where(regular(amax), amax, 1.0))
    top_fraction, top_exponent = math.frexp(top)
    e = exponent - top_exponent + (fraction > top_fraction)
    return torch.where(regular(amax), e.clamp(-127, 127), 0)


def nv_scale(amax: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4: (E4M3 numbers of the blocks, the tensor's number), fp64."""
    finite = torch.where(amax.isfinite(), amax, 0.0)
    top = finite.max() if amax.numel() else torch.tensor(0.0, dtype=torch.float64)
    top = torch.where(top > 0, top, 1.0)
    return step_round(amax * 448 / top, E4M3), top / 2688


def fold(x: Tensor, multiplier: Tensor, plan: Plan) -> Tensor:
    """x times the scale of its block, fp32."""
    return x.to(torch.float32) * enlarge(multiplier, x.shape, plan).to(torch.float32)


def quantize(x: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """(codes, scales as they are stored)."""
    amax = block_amax(x, plan)
    if plan.scale == "nv":
        small, tensor = nv_scale(amax)
        stored = (small * tensor).to(torch.float32)
        per = enlarge(stored.to(torch.float64), x.shape, plan)
        y = torch.where(per > 0, x.to(torch.float64) / per, 0.0).copysign(x.to(torch.float64))
        return settle(y, E2M1), torch.where(amax.isfinite(), stored, math.nan)
    if plan.scale == "fp32":
        multiplier = (plan.kind.top / torch.where(regular(amax), amax, plan.kind.top).to(torch.float32)).clamp(max=torch.finfo(torch.float32).max)
        return settle(fold(x, multiplier, plan), plan.kind), 1 / multiplier
    e = exponent_up(amax, plan.kind.top)
    codes = settle(fold(x, two(-e), plan), plan.kind)
    if plan.scale == "pow2":
        return codes, two(e).to(torch.float32)
    byte = (e + 127).to(torch.uint8)
    return codes, torch.where(amax.isfinite(), byte, 255).to(torch.uint8) if plan.kind is E2M1 else byte


def deliver(data: Tensor, scale_inv: Tensor, codes: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Both results into their buffers."""
    data.view(torch.uint8).copy_(codes.view(torch.uint8))
    target = scale_inv if stored.dtype == torch.float32 else scale_inv.view(torch.uint8)
    target.copy_(stored.reshape(scale_inv.shape))
    return data, scale_inv


# --- products ---


def unfold(scale: Tensor) -> Tensor:
    """Stored scales as fp64."""
    if scale.dtype == torch.float32:
        return scale.to(torch.float64)
    byte = scale.view(torch.uint8).to(torch.int32)
    return torch.where(byte == 255, math.nan, two(byte - 127))


def operand(data: Tensor, scale: Tensor, recipe: str, role: str) -> Tensor:
    """What an operand means, fp64."""
    plan = plan_of(recipe, role)
    return load(data) * enlarge(unfold(scale).reshape(grid_of(data.shape, plan)), data.shape, plan)


def write(out: Tensor, y: Tensor) -> Tensor:
    """y into out, through fp32."""
    out.copy_(y.to(torch.float32))
    return out


def segments(ends: Tensor) -> list[tuple[int, int, int]]:
    """(group, first row, end) of each group."""
    bounds = [0, *ends.tolist()]
    return [(g, bounds[g], bounds[g + 1]) for g in range(len(bounds) - 1)]


# --- layers ---


def through(x: Tensor, recipe: str, role: str = "x") -> Tensor:
    """x as its cast leaves it, fp64."""
    codes, stored = quantize(x, plan_of(recipe, role))
    return operand(codes, stored, recipe, role if role == "weight" else "x") if recipe != "tensorwise" else load(codes) * unfold(stored)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(probabilities, o), fp64."""
    s = q.double() @ k.double().mT / math.sqrt(max(q.shape[-1], 1))
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    p = s.softmax(-1)
    return p, p @ v.double()


def attend_back(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, p: Tensor, o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from probabilities and o."""
    g = grad.double()
    ds = p * (g @ v.double().mT - (g * o).sum(-1, keepdim=True)) / math.sqrt(max(q.shape[-1], 1))
    return ds @ k.double(), ds.mT @ q.double(), p.mT @ g
