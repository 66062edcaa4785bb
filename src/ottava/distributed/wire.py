"""Scales as bytes: an E8M0 scale travels as its biased exponent."""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.rounding import floor_log2, power_of_two

_BIAS = 127


def exponent_bytes(scale_inv: Tensor) -> Tensor:
    """Powers of two, fp32, from 2**-127 to 2**127 -> uint8 of that shape; 255 is left for others (E8M0's NaN).

    Source: OCP MX v1.0, section 5.4.1.

    Example:
        >>> exponent_bytes(torch.tensor([2.0**-127, 1.0, 8.0]))
        tensor([  0, 127, 130], dtype=torch.uint8)
    """
    return (floor_log2(scale_inv) + _BIAS).to(torch.uint8)


def from_exponent_bytes(exponents: Tensor) -> Tensor:
    """The inverse of `exponent_bytes`; fp32. 255 gives infinity.

    Example:
        >>> from_exponent_bytes(torch.tensor([0, 127, 255], dtype=torch.uint8))
        tensor([5.8775e-39, 1.0000e+00,        inf])
    """
    return power_of_two(exponents.long() - _BIAS).float()
