"""How large the numbers of a weight can be after a step of AdamW, without a look at them.

One step of AdamW, with the quotient that the states of an element have:

    m' = b1 m + (1 - b1) g,   v' = b2 v + (1 - b2) g g,   e = eps**2 (1 - b2**t)
    q  = max |m| / sqrt(v + e)                                  over the elements of the weight
    q' <= sqrt(b1**2 / b2 q**2 + (1 - b1)**2 / (1 - b2))        by Cauchy and Schwarz, whatever the gradient is
    |w'| <= |1 - lr wd| amax + lr q' sqrt(1 - b2**t) / (1 - b1**t)

The last line is the bound of MOSS (arXiv 2511.05811), whose constant is the limit of q' for a state that began with
zeros: 1.17 at betas (0.9, 0.95), 7.3 at (0.9, 0.999). Here q is measured with amax, so that states may come from
anywhere, and betas and learning rate may change. e is what eps adds to the denominator at least, so squares that
vanish in FP32 do no harm. The factors below cover the rounding of all these operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

BOUND = "amax_bound"
"""Name of the two FP64 numbers in an optimizer's state: the bound of |w|, and that of q."""
SMALLEST_EPS = 1e-15
"""Above it eps**2 (1 - b2**t) is far from FP32's subnormal numbers."""
_OF_WEIGHTS = 1 + 2.0**-18  # 16 roundings of 2**-24, and a remainder's: 2**-16 ulp of the code
_OF_STATES = MappingProxyType(
    {4: 1 + 2.0**-20, 2: 1 + 2.0**-8}
)  # bytes of a moment: 16 roundings of 2**-24; two of 2**-9


def measure(weight: Tensor, mean: Tensor, square: Tensor, itemsize: int, step: int, group: Mapping[str, Any]) -> Tensor:
    """(amax of the weight, q of its states), FP64 (2,) on the CPU: it waits for a GPU.

    Args:
        weight, mean, square: FP32, after a step.
        itemsize: bytes in which the moments will be stored.
        step: its number, from 1.
        group: with betas and eps.
    Edge cases: elements with an infinity or NaN are left out: their weight is NaN after the next step.

    Example:
        >>> group = {"betas": (0.9, 0.95), "eps": 1e-8}
        >>> measure(torch.tensor([2.0, -3.0]), torch.tensor([0.1, 0.0]), torch.tensor([0.05, 0.0]), 4, 1, group)
        tensor([3.0000, 0.4472], dtype=torch.float64)
    """
    if weight.is_meta or not weight.numel():
        return torch.zeros(2, dtype=torch.float64)
    floor = group["eps"] ** 2 * (1 - group["betas"][1] ** step)
    quotients = mean.abs().div_((square + floor).sqrt_())
    largest = [torch.where(values < math.inf, values, 0.0).amax() for values in (weight.abs(), quotients)]
    measured = torch.stack(largest).to("cpu", torch.float64)
    measured[1] *= _OF_STATES[itemsize]
    return measured


def grow(before: Tensor, itemsize: int, step: int, group: Mapping[str, Any]) -> Tensor:
    """What `measure` cannot exceed after one more step; nothing is read but these two numbers.

    Args:
        before: of `measure` or `grow`, (2,).
        itemsize, step, group: as of `measure`; group also with lr and weight_decay, as the step had them.

    Example:
        >>> group = {"betas": (0.9, 0.95), "eps": 1e-8, "lr": 0.01, "weight_decay": 0.0}
        >>> bound = torch.tensor([1.0, 0.4472], dtype=torch.float64)
        >>> for step in range(2, 102):
        ...     bound = grow(bound, 4, step, group)
        >>> bound.round(decimals=2)                                       # 100 steps of at most 0.01 times 1.16
        tensor([2.1100, 1.1600], dtype=torch.float64)
    """
    (amax, quotient), (beta1, beta2), lr = before.tolist(), group["betas"], float(group["lr"])
    quotient = (beta1**2 / beta2 * quotient**2 + (1 - beta1) ** 2 / (1 - beta2)) ** 0.5 * _OF_STATES[itemsize]
    update = lr * quotient * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    amax = (abs(1 - lr * group["weight_decay"]) * amax + update) * _OF_WEIGHTS
    return torch.tensor((amax, quotient), dtype=torch.float64)


def outer_amax(bound: Tensor, weight: Tensor) -> Tensor:
    """FP32 () on the weight's device: the bound in its outer dtype, to whose numbers it is rounded before the cast."""
    amax = (bound[0] * _OF_WEIGHTS).to(torch.float32)  # not below the FP64 number
    amax = torch.maximum(amax, amax.to(weight.dtype).to(torch.float32))
    return torch.full((), float(amax), dtype=torch.float32, device=weight.device)
