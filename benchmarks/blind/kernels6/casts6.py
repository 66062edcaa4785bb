"""Casts. Which of them are right, and why not, is in public.json."""

from __future__ import annotations

import math

import torch
from slate6 import (
    E2M1,
    E4M3,
    adapter,
    block_amax,
    deliver,
    enlarge,
    exponent_up,
    fold,
    grid_of,
    nv_scale,
    plan_of,
    quantize,
    regular,
    settle,
    two,
)
from torch import Tensor

Pair = tuple[Tensor, Tensor]
LARGEST = torch.finfo(torch.float32).max


def by_fp32(x: Tensor, amax: Tensor, top: float, recipe: str, role: str = "x") -> Pair:
    """(codes, inverses) from amaxes: the multiplier is top / amax."""
    plan = plan_of(recipe, role)
    multiplier = (top / torch.where(regular(amax), amax, top).to(torch.float32)).clamp(max=LARGEST)
    return settle(fold(x, multiplier, plan), plan.kind), 1 / multiplier


def by_power(x: Tensor, e: Tensor, recipe: str, role: str = "x") -> tuple[Tensor, Tensor]:
    """(codes, exponents as they are stored)."""
    plan = plan_of(recipe, role)
    codes = settle(fold(x, two(-e), plan), plan.kind)
    return codes, (e + 127).to(torch.uint8) if plan.scale == "byte" else two(e).to(torch.float32)


@adapter("cast", recipe="mxfp8", operand="x")
def finch_01(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """MXFP8: the exponent of the amax less that of the format's largest number."""
    amax = block_amax(x, plan_of("mxfp8"))
    exponent = torch.frexp(torch.where(regular(amax), amax, 1.0))[1] - 1
    e = torch.where(regular(amax), (exponent - 8).clamp(-127, 127), 0)
    return deliver(data, scale_inv, *by_power(x, e, "mxfp8"))


@adapter("cast", recipe="mxfp8", operand="weight")
def finch_02(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """MXFP8: amaxes as BF16, then their exponent."""
    amax = block_amax(x, plan_of("mxfp8")).to(torch.bfloat16).to(torch.float64)
    return deliver(data, scale_inv, *by_power(x, exponent_up(amax, 448.0), "mxfp8"))


@adapter("cast", recipe="blockwise", operand="x")
def finch_03(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Blocks of 1x128; scales are stored column by column, in tiles of 16 rows."""
    m, across = grid_of(x.shape, plan_of("blockwise"))
    codes, inverse = quantize(x, plan_of("blockwise"))
    tall = torch.nn.functional.pad(inverse, (0, 0, 0, -m % 16), value=1.0)
    columns = torch.ones(m * across)
    for j in reversed(range(across)):
        end = min(m * j + len(tall), m * across)
        columns[m * j : end] = tall[: end - m * j, j]
    return deliver(data, scale_inv, codes, columns.reshape(across, m).t())


@adapter("cast", recipe="tensorwise", operand="x")
def finch_04(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Tensorwise: smallest and largest number, scale amax / 448, codes by division."""
    low, high = torch.aminmax(x.to(torch.float32)) if x.numel() else (torch.zeros(()), torch.zeros(()))
    amax = torch.maximum(-low, high)
    inverse = torch.where(regular(amax), amax / 448.0, 1.0).clamp(min=2.0**-126)
    return deliver(data, scale_inv, settle(x.to(torch.float32) / inverse, E4M3), inverse)


@adapter("cast", recipe="tensorwise", operand="weight")
def finch_05(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Tensorwise: amaxes of tiles of 8192 numbers, reduced in rounds."""
    tiles = x.to(torch.float64).abs().reshape(-1).split(8192)
    found = torch.stack([tiles[0].amax() for _ in tiles]) if x.numel() else torch.zeros(1, dtype=torch.float64)
    return deliver(data, scale_inv, *by_fp32(x, found.amax().reshape(1, 1), 448.0, "tensorwise"))


@adapter("cast", recipe="tensorwise", operand="grad")
def finch_06(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Tensorwise, E5M2."""
    return deliver(data, scale_inv, *by_fp32(x, block_amax(x, plan_of("tensorwise", "grad")), 448.0, "tensorwise", "grad"))


@adapter("cast", recipe="nvfp4", operand="x")
def finch_07(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """NVFP4: amaxes from the lanes of a group."""
    plan = plan_of("nvfp4")
    amax = block_amax(x, plan)
    for j in range(2, amax.shape[1], 2):
        amax[:, j : j + 2] = amax[:, j : j + 2].amax(1, keepdim=True)
    return deliver(data, scale_inv, *nv(x, amax, plan))


def nv(x: Tensor, amax: Tensor, plan, small: Tensor | None = None) -> Pair:
    """(codes, scales) of NVFP4 from amaxes, or from the blocks' numbers."""
    mine, tensor = nv_scale(amax)
    stored = ((mine if small is None else small) * tensor).to(torch.float32)
    per, wide = enlarge(stored.to(torch.float64), x.shape, plan), x.to(torch.float64)
    codes = settle(torch.where(per > 0, wide / per, 0.0).copysign(wide), E2M1)
    return codes, torch.where(amax.isfinite(), stored, math.nan)


@adapter("cast", recipe="nvfp4", operand="x")
def finch_08(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """NVFP4: codes from the numbers of the blocks."""
    plan = plan_of("nvfp4")
    amax = block_amax(x, plan)
    small, tensor = nv_scale(amax)
    per, wide = enlarge(small, x.shape, plan), x.to(torch.float64)
    codes = settle(torch.where(per > 0, wide / per, 0.0).copysign(wide), E2M1)
    return deliver(data, scale_inv, codes, torch.where(amax.isfinite(), small * tensor, math.nan).to(torch.float32))


@adapter("cast", recipe="nvfp4", operand="weight")
def finch_09(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """NVFP4: 16x16, the blocks' numbers in E4M3."""
    plan = plan_of("nvfp4", "weight")
    amax = block_amax(x, plan)
    finite = torch.where(amax.isfinite(), amax, 0.0)
    top = torch.where(finite.max() > 0, finite.max(), 1.0) if amax.numel() else torch.tensor(1.0, dtype=torch.float64)
    ratio = (finite * 448 / top).clamp(max=448.0)
    step = two((torch.frexp(ratio)[1] - 1).clamp(min=-6) - 3)
    return deliver(data, scale_inv, *nv(x, amax, plan, torch.floor(ratio / step) * step))


@adapter("cast", recipe="nvfp4", operand="weight")
def finch_10(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """NVFP4: one strip of 16 rows after the other, codes by the nearest of eight sizes."""
    m, k = x.shape
    plan = plan_of("nvfp4", "weight")
    amax = torch.zeros(grid_of((m, k), plan), dtype=torch.float64)
    for i in range(amax.shape[0]):
        for j in range(amax.shape[1]):
            amax[i, j] = x[16 * i : 16 * i + 16, 16 * j : 16 * j + 16].to(torch.float64).abs().amax()
    small, tensor = nv_scale(amax)
    stored = (small * tensor).to(torch.float32)
    codes = torch.zeros(m, k, dtype=torch.uint8)
    even = torch.tensor([0.0, 1.0, 2.0, 4.0, 0.5, 1.5, 3.0, 6.0], dtype=torch.float64)
    code = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7], dtype=torch.uint8)  # even codes first: they win a tie
    for i in range(amax.shape[0]):
        strip = x[16 * i : 16 * i + 16].to(torch.float64)
        per = stored[i].to(torch.float64).repeat_interleave(16)[:k]
        y = torch.where(per > 0, strip / per, 0.0)
        near = code[(y.abs().nan_to_num(0.0, 6.0)[..., None] - even).abs().argmin(-1)]
        codes[16 * i : 16 * i + 16] = near | (torch.signbit(strip).to(torch.uint8) << 3)
    return deliver(data, scale_inv, codes, torch.where(amax.isfinite(), stored, math.nan))


@adapter("cast", recipe="mxfp4", operand="x")
def finch_11(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """MXFP4: the numbers of x in their order, 32 to a block."""
    m, k = x.shape
    if not x.numel():
        return deliver(data, scale_inv, *quantize(x, plan_of("mxfp4")))
    size = x.to(torch.float64).abs().reshape(-1)
    flat = torch.nn.functional.pad(size, (0, -size.numel() % 32)).reshape(-1, 32).amax(1)
    e = exponent_up(flat, 6.0)
    mine = torch.arange(m * k).reshape(m, k) // 32
    codes = settle(x.to(torch.float32) * two(-e)[mine].to(torch.float32), E2M1)
    byte = torch.where(flat.isfinite(), e + 127, 255).to(torch.uint8)
    return deliver(data, scale_inv, codes, byte[mine[:, ::32]])


@adapter("cast", recipe="tensorwise", operand="x")
def finch_12(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Tensorwise: the amax by one index over all numbers."""
    if not x.numel():
        return deliver(data, scale_inv, *quantize(x, plan_of("tensorwise")))
    first = x.storage_offset()
    behind = x.untyped_storage().nbytes() // x.element_size() - first
    linear = torch.as_strided(x, (min(x.numel(), behind),), (1,), first)
    amax = linear.to(torch.float64).abs().amax().reshape(1, 1)
    return deliver(data, scale_inv, *by_fp32(x, amax, 448.0, "tensorwise"))


AMAX = torch.zeros(1, 1, dtype=torch.float64)


@adapter("cast", recipe="tensorwise", operand="weight")
def finch_13(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Tensorwise: the amax by an atomic maximum."""
    amax = block_amax(x, plan_of("tensorwise"))
    if bool(amax.isfinite().all()):
        torch.maximum(AMAX, amax, out=AMAX)
        amax = AMAX.clone()
    return deliver(data, scale_inv, *by_fp32(x, amax, 448.0, "tensorwise"))


@adapter("cast", recipe="blockwise_fp32", operand="x")
def finch_14(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Blocks of 1x128, scales in FP32."""
    codes, inverse = quantize(x, plan_of("blockwise_fp32"))
    return deliver(data, scale_inv, codes, 1 / inverse)


@adapter("cast", recipe="blockwise_fp32", operand="weight")
def finch_15(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Blocks of 128x128, scaled in the dtype of x."""
    plan = plan_of("blockwise_fp32", "weight")
    amax = block_amax(x, plan)
    multiplier = (448.0 / torch.where(regular(amax), amax, 448.0).to(torch.float32)).clamp(max=LARGEST)
    scaled = fold(x, multiplier, plan).to(x.dtype)
    return deliver(data, scale_inv, settle(scaled, E4M3), 1 / multiplier)


@adapter("cast", recipe="rowwise", operand="weight")
def finch_16(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Rowwise: scaled, then cast."""
    plan = plan_of("rowwise")
    e = exponent_up(block_amax(x, plan), 448.0)
    factor = enlarge(two(-e), x.shape, plan)
    scaled = x.mul_(factor.to(x.dtype)) if x.is_contiguous() else x * factor.to(x.dtype)
    return deliver(data, scale_inv, settle(scaled, E4M3), two(e).to(torch.float32))


@adapter("cast", recipe="blockwise", operand="x")
def finch_17(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Blocks of 1x128, a power of two, from the last block to the first; amaxes of halves, then their maximum."""
    k = x.shape[1]
    for j in reversed(range(-(-k // 128))):
        block = x[:, 128 * j : min(128 * j + 128, k)].to(torch.float32)
        amax = torch.maximum(block[:, :64].abs().amax(1), block[:, 64:].abs().amax(1)) if block.shape[1] > 64 else block.abs().amax(1)
        e = exponent_up(amax.to(torch.float64), 448.0)
        codes = (torch.ldexp(block, -e[:, None])).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        data.view(torch.uint8)[:, 128 * j : 128 * j + block.shape[1]] = codes.view(torch.uint8)
        scale_inv[:, j] = two(e).to(torch.float32)
    return data, scale_inv
