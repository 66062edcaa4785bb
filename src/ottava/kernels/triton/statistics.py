"""Sums about a cast in a slot on the GPU, for runs that must not wait for the device.

A launch reads one tile in `every`. The phase, a number on the device, decides which; while a flag on the device is 0
the launch reads none. So a captured launch in a CUDA graph can rotate through the tiles and be switched on and off. It
is separate from the cast: casts keep their registers and their speed, it works after any cast, and it reads 1 / every
of the result.

Counts are exact; sums are fp64, over the tiles in the order of their programs.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ottava.base.errors import refuse_other_sums
from ottava.kernels.triton.launch import Launch
from ottava.kernels.triton.quantize import refuse_device
from ottava.numerics.formats import E2M1, E2M3, E3M2, E4M3, E5M2
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor

NAME = "triton"

_NUMBERS = (
    *("n", "n_nonfinite", "n_nonzero", "n_underflow", "n_subnormal", "n_overflow"),
    *("sx", "sabs", "sxx", "sx4", "see", "sxe", "srel", "amax", "max_error", "amin", "n_total", "n_casts"),
)
"""The sums of `statistics_kernel`, in its order, by names of measure/tally.py; then, optionally, `exponents`."""

_FORMATS = (E4M3, E5M2, E2M1, E2M3, E3M2)
_TILE = MappingProxyType({"TR": 16, "TC": 128, "num_warps": 8, "enable_fp_fusion": False})  # x - q rounds q, as it is


def supports_statistics(x: Tensor, x_q: QuantizedTensor) -> str | None:
    """Why this kernel does not measure this cast; None if it does."""
    if x.device.type != "cuda":
        return f"{NAME}: runs on cuda; got {x.device.type}"
    if x_q.spec.format not in _FORMATS:
        return f"{NAME}: decodes {', '.join(map(str, _FORMATS))}; got {x_q.spec.format}"
    if x.numel() == 0:
        return f"{NAME}: an empty tensor"
    return refuse_device(x.device, x)


def new_slot(device: torch.device | str, fields: Mapping[str, int]) -> Tensor:
    """An empty slot: fp64, a number for each field except `exponents`; the bins of `exponents` come last.

    Args:
        fields: name -> bins, 0 for a number; `exponents` is optional.
    Raises:
        ValueError: the fields are not those that the kernel sums.
    """
    bins = fields.get("exponents", 0)
    refuse_other_sums("triton_statistics", fields, dict.fromkeys(_NUMBERS, 0) | ({"exponents": bins} if bins else {}))
    slot = torch.zeros(len(_NUMBERS) + bins, dtype=torch.float64, device=device)
    # minima merge by the minimum; all other fields begin at zero
    slot[_NUMBERS.index("amin")].fill_(math.inf)
    return slot


def fill_slot(slot: Tensor, x: Tensor, x_q: QuantizedTensor, *, every: int, phase: Tensor, on: Tensor) -> None:
    """Adds the sums over some tiles of 16 x 128 elements of the cast of x (R, C) to x_q.

    Args:
        slot: from `new_slot`; its fields decide whether it has a histogram. The kernel changes it in place.
        every: one tile in so many.
        phase: int64 (), on the device: the kernel reads tiles whose number, along rows, is phase modulo every.
        on: int32 (), on the device: 0 reads nothing.
    Raises:
        ValueError: every is less than 1.
    """
    if every < 1:
        raise ValueError(f"fill_slot: every is {every}; needs 1 (each tile) or more")
    spec = x_q.spec
    constants = statistics_launch(spec, len(slot) - len(_NUMBERS))
    tiles = -(-x.shape[0] // constants["TR"]) * -(-x.shape[1] // constants["TC"])
    scale_rows, scale_cols = x_q.scale_inv.stride()
    # a stride of 0 reads the one scale for every row or column of a tile
    blocks = (scale_rows if spec.granularity.rows else 0, scale_cols if spec.granularity.cols else 0)
    sizes = (*x.shape, *x.stride(), *x_q.data.stride(), *blocks, every)
    launch = _bound(spec, len(slot) - len(_NUMBERS), -(-tiles // every), sizes)
    launch((x.detach(), x_q.data.view(torch.uint8), x_q.scale_inv, slot, phase, on))


@functools.lru_cache(maxsize=1024)
def _bound(spec: QuantizationSpec, bins: int, programs: int, sizes: tuple[int, ...]) -> Launch:
    kernel = importlib.import_module("ottava.kernels.triton.device_code").statistics_kernel
    return Launch(kernel, programs, sizes, (spec.format.clip, 2.0**spec.format.emin), statistics_launch(spec, bins))


def read_slot(slot: Tensor) -> dict[str, Any]:
    """Field of a tally -> a number, or the histogram, if the slot has it, as a numpy array. Waits for the device."""
    values = slot.cpu()
    histogram = {"exponents": values[len(_NUMBERS) :].numpy()} if len(values) > len(_NUMBERS) else {}
    return dict(zip(_NUMBERS, values.tolist(), strict=False)) | histogram


@functools.lru_cache(maxsize=256)
def statistics_launch(spec: QuantizationSpec, bins: int) -> Mapping[str, Any]:
    """The compile-time parameters with which `statistics_kernel` is launched; bins: 0 for no histogram."""
    fmt, granularity = spec.format, spec.granularity
    constants = {
        "BR": granularity.rows or 1,
        "BC": granularity.cols or 1,
        "MANTISSA": fmt.mantissa_bits,
        "BIAS": fmt.bias,
        "SIGN": fmt.bits - 1,
        "TIES_CLIP": fmt.tie_clips,
        "BINS": bins,
        "NUMBERS": len(_NUMBERS),
    }
    return MappingProxyType({**constants, **_TILE})
