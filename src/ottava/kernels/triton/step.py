"""What a step needs on NVIDIA GPUs besides casts and GEMMs, in one launch each: AdamW, and predicted scales' boundary.

AdamW's step of a parameter reads and writes each number once, with the bits of torch's foreach operations on a GPU.
Those read and write weights and moments several times, and decode 16-bit weights and moments into new memory.

In torch operations a boundary takes some 35 launches for each spec. This kernel has the bits of `state`, keeps no
state, never waits for the device, and works in a CUDA graph, because its buffers keep their addresses.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ottava.kernels.gate import launched
from ottava.kernels.triton.launch import Launch
from ottava.kernels.triton.quantize import NAME, refuse_device
from ottava.numerics.tensor import QuantizationSpec

LAUNCH = MappingProxyType({"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": False})
"""The compile-time parameters of each launch."""
_WIDE = (torch.float32, torch.bfloat16)


def supports_adamw(weight: Tensor, extra: Tensor | None, gradient: Tensor, mean: Tensor, square: Tensor) -> str | None:
    """Why `step_adamw` does not step such tensors, its first five arguments; None if it does."""
    if weight.device.type != "cuda":
        return f"{NAME}: runs on cuda; got {weight.device.type}"
    every = [tensor for tensor in (weight, extra, gradient, mean, square) if tensor is not None]
    kept = weight.dtype, None if extra is None else extra.dtype
    if kept not in ((torch.float32, None), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.int16)):
        return (
            f"{NAME}: takes float32 weights, or bfloat16 weights with a master in float32 or as a remainder; got "
            f"{kept[0]} " + ("without a master" if extra is None else f"with {kept[1]}")
        )
    if not all(tensor.dtype in _WIDE for tensor in (gradient, mean, square)):
        return (
            f"{NAME}: takes gradients and moments in float32 or bfloat16; got a gradient in {gradient.dtype}, moments "
            f"in {mean.dtype} and {square.dtype}"
        )
    if not all(tensor.is_contiguous() and tensor.numel() == weight.numel() for tensor in every):
        return f"{NAME}: takes contiguous tensors; got strides {', '.join(str(tensor.stride()) for tensor in every)}"
    # the compiler for AMD fuses other multiply-adds than torch's build does
    if torch.version.hip is not None:
        return f"{NAME}: steps on NVIDIA GPUs, where its fused multiply-adds are those of torch"
    return refuse_device(weight.device, *every)


def step_adamw(
    weight: Tensor,
    extra: Tensor | None,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of a parameter, in place; the rule is that of `ottava.optim.rules.update_adamw`.

    Args:
        weight: fp32 or bf16, contiguous, as all others are.
        extra: of a bf16 weight: its fp32 master, or int16, the remainder that `ottava.optim.storage` describes.
        gradient, mean, square: fp32 or bf16; mean and square are the moments after the last step.
        step: the number of this step, from 1.
        lr, betas, eps, weight_decay: as in `AdamW`.
    """
    launched(weight, extra, gradient, mean, square)
    beta1, beta2 = betas
    numbers = (1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** 0.5, eps)
    # a remainder is added to the bits of the weight, so the kernel reads them as integers
    stored = weight.view(torch.int16) if extra is not None and extra.dtype == torch.int16 else weight
    count = weight.numel()
    if count == 0:
        return
    torch.autograd.graph.increment_version(weight)  # as an operation in place does: autograd and caches ask for it
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        importlib.import_module("ottava.kernels.triton.device_code").adamw_kernel[(-(-count // LAUNCH["BLOCK"]),)](
            *(stored, extra, gradient, mean, square, count, *numbers, -(lr / (1 - beta1**step))),
            **LAUNCH,
        )


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
