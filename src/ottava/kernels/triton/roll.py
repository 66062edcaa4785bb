"""The step boundary of predicted scales on NVIDIA GPUs: one launch for all tensors of a spec, with the bits of `state`.

In torch operations a boundary takes some 35 launches for each spec. This kernel keeps no state, never waits for the
device, and works in a CUDA graph, because its buffers keep their addresses.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ottava.kernels.triton.launch import Launch
from ottava.kernels.triton.quantize import refuse_device
from ottava.numerics.tensor import QuantizationSpec

NAME = "triton"

_LONGEST = 4096


def supports_roll(spec: QuantizationSpec, history: Tensor, lanes: Tensor) -> str | None:
    """Why this kernel does not roll these windows; None if it does."""
    if history.device.type != "cuda":
        return f"{NAME}: runs on cuda; got {history.device.type}"
    if callable(spec.amax_compute_algo):
        return f"{NAME}: takes the largest amax or the last one; got a function of the window"
    if history.shape[1] > _LONGEST:
        return f"{NAME}: takes windows of up to {_LONGEST} steps; got {history.shape[1]}"
    if lanes.device != history.device:
        return f"{NAME}: the amaxes are on {lanes.device} and the windows on {history.device}"
    return refuse_device(history.device)


def roll(
    spec: QuantizationSpec,
    lanes: Tensor,
    index: Tensor,
    history: Tensor,
    scale: Tensor,
    nonfinite_count: Tensor,
    guard_count: Tensor,
    staged: Tensor,
) -> None:
    """Moves the windows of T tensors of one spec on, in place; the rule is that of `windows.roll_windows`.

    Args:
        lanes: fp32 (4, doors): amax, non-finite, guard, and 1 for a door that is due; where that is 0 all are.
        index: int64 (T,): the column of each tensor in lanes.
        history: fp32 (T, L), newest first.
        scale: fp32 (T,).
        nonfinite_count, guard_count: int64 (T,).
        staged: fp32 (T, 3); cleared where due.
    """
    tensors, length = history.shape
    launch = _bound(spec, tensors, (lanes.shape[1], length))
    launch((lanes.contiguous(), index, history, scale, nonfinite_count, guard_count, staged))


@functools.lru_cache(maxsize=256)
def _bound(spec: QuantizationSpec, tensors: int, sizes: tuple[int, int]) -> Launch:
    kernel = importlib.import_module("ottava.kernels.triton.device_code").roll_kernel
    return Launch(kernel, tensors, sizes, (float(spec.format.max * 2.0**-spec.margin),), roll_launch(spec))


@functools.lru_cache(maxsize=256)
def roll_launch(spec: QuantizationSpec) -> Mapping[str, Any]:
    """The compile-time parameters with which `roll_kernel` is launched."""
    # Triton's ranges have lengths of powers of two; the kernel masks the rest
    window = 1 << (spec.amax_history_len - 1).bit_length()
    constants = {"NEWEST": spec.amax_compute_algo == "most_recent", "SCALE_FORMAT": spec.scale_format, "WINDOW": window}
    return MappingProxyType(constants | {"num_warps": max(1, min(4, window // 256))})
