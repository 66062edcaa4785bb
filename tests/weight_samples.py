"""A stored weight and its bits, for the tests of weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ottava.numerics.formats import E4M3
from ottava.numerics.tensor import QuantizationSpec
from ottava.weights.parameter import QuantizedWeight, quantized_weight


def bits(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Codes and scales."""
    return weight.codes.view(torch.uint8).clone(), weight.scale_inv.clone()


def same(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Whether no bit differs."""
    return all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


def parameter(keep: bool = False) -> QuantizedWeight:
    """(64, 96) in E4M3, BF16 outside."""
    values = torch.randn(64, 96, dtype=torch.bfloat16)
    weight = quantized_weight(values, QuantizationSpec(E4M3), keep_high_precision=keep)
    return nn.Parameter(weight)  # type: ignore[return-value]
