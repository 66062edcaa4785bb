"""Gradients of 16-bit parameters, accumulated in FP32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ottava.base.errors import need


def accumulate_fp32(parameters: Iterable[Tensor]) -> None:
    """Makes the `.grad` of 16-bit parameters FP32, so that the sum over micro-batches is not rounded to BF16.

    Each backward still gives BF16 numbers; their sum is FP32 (Megatron's `main_grad`). torch's clipping, GradScaler and
    `zero_grad` work as before. It costs 2 bytes an element, and torch's optimizers refuse such gradients.

    Args:
        parameters: of a model, before its first backward.
    Raises:
        RuntimeError: a parameter has a gradient already.  TypeError: no parameters, such as a model.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> accumulate_fp32([weight])
        >>> for part in (1.0, 0.001, 0.001, 0.001):
        ...     (weight * part).sum().backward()
        >>> weight.grad                                 # in BF16 it would have stayed 1
        tensor([1.0030])
    """
    need("accumulate_fp32", parameters, Iterable, "parameters: model.parameters()")
    for parameter in parameters:
        need("accumulate_fp32", parameter, Tensor, "parameters: model.parameters()")
        if parameter.is_floating_point() and parameter.itemsize < 4:
            if parameter.grad is not None:
                raise RuntimeError(
                    "accumulate_fp32: a parameter has a gradient in 16 bits already; call zero_grad first"
                )
            parameter.grad_dtype = torch.float32
