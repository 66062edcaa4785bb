"""AdamW's step of one parameter on an NVIDIA GPU: one launch that reads and writes each number once.

torch's foreach operations read and write weights and moments several times, and decode 16-bit weights and moments into
new memory. The bits are those of torch's foreach operations on a GPU.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType

import torch
from torch import Tensor

from ottava.kernels.gate import launched, refusal
from ottava.kernels.triton.quantize import NAME, refuse_device

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
    if reason := refusal(*every):
        return f"{NAME}: takes plain tensors; {reason}"
    # the compiler for AMD fuses other multiply-adds than torch's build does
    if torch.version.hip is not None:
        return f"{NAME}: steps on NVIDIA GPUs, where its fused multiply-adds are those of torch"
    return refuse_device(weight.device)


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
        importlib.import_module("ottava.kernels.triton.adamw_device_code").adamw_kernel[
            (-(-count // LAUNCH["BLOCK"]),)
        ](
            *(stored, extra, gradient, mean, square, count, *numbers, -(lr / (1 - beta1**step))),
            **LAUNCH,
        )
