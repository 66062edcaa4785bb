"""Smooth-SwiGLU: spreads the outliers of an MLP over its channels, without changing its result.

A channel whose gate and up rows align makes far larger products than the other channels, and one scale a tensor then
flushes the others (Fishman et al., arXiv 2409.12517: FP8 training diverges after 200 billion tokens). Each channel c
gets a power of two:

    rows_c = act(x)_c s_c  before the cast,   fc2 column c / s_c          s_c = 2^round(log2(mean amax / amax_c))

Powers of two multiply without rounding, so every sum keeps its bits. s stays with the activation. If fc1 held it, one
scale a tensor would flush the rows of fc1 that it makes small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ottava.ambient import autocast
from ottava.nn.mlp import NormMLP
from ottava.quantizer import Quantizer


def smooth_swiglu(mlp: NormMLP, batches: Tensor | Iterable[Tensor]) -> Tensor:
    """Gives each channel between the linears of an MLP a power of two, so that all reach about the same magnitude.

    It multiplies the weight of fc2 in place by the inverse; `mlp.fc2.smooth` holds the powers, and is in state dicts.

    Args:
        mlp: of any activation; gated ones have the outliers.
        batches: inputs of the MLP, (..., H); they give the magnitude of each channel, in high precision.
    Returns:
        fp32 (F,): the factors of the rows from now on, from this call and earlier ones; 1 for channels that are always
        0, and for channels whose weights would leave their dtype.
    Raises:
        ValueError: there is no batch.
    Edge cases: amax histories of fc2 start again. An optimizer's moments of fc2 would fit the old weight: call it
        between two runs, or before you make the optimizer.

    Example:
        >>> import ottava
        >>> mlp = ottava.nn.NormMLP(32, 64, activation="swiglu", bias=False)
        >>> with torch.no_grad():
        ...     _ = mlp.fc1.weight[64].mul_(1000.0)                                      # the first channel's up row
        >>> bool(smooth_swiglu(mlp, torch.randn(16, 32))[0] < 0.01)
        True
    """
    amax = _amax(mlp, [batches] if isinstance(batches, Tensor) else batches)
    weight = mlp.fc2.weight
    usable = (amax > 0) & amax.isfinite()
    logs = torch.where(usable, amax, 1.0).log2()
    most = -math.log2(torch.finfo(weight.dtype).tiny)  # the power and its inverse are normal numbers
    exponent = (logs.sum() / usable.sum().clamp(min=1) - logs).round().clamp(-most, most)
    scale = torch.where(usable, exponent.exp2(), 1.0)
    with torch.no_grad():
        inverse = (1 / scale).to(weight.dtype)
        folded = weight * inverse
        exact = ((folded / inverse == weight) & folded.isfinite()).all(0)
        weight.copy_(torch.where(exact, folded, weight))
        scale = torch.where(exact, scale, 1.0)
    mlp.fc2.smooth = scale if mlp.fc2.smooth is None else mlp.fc2.smooth.float() * scale
    for door in mlp.fc2.modules():
        if isinstance(door, Quantizer):
            door.reset()
    return mlp.fc2.smooth


def _amax(mlp: NormMLP, batches: Iterable[Tensor]) -> Tensor:
    """fp32 (F,): of each channel in front of fc2."""
    found = None
    with torch.no_grad(), autocast(enabled=False):
        for batch in batches:
            rows = mlp.activated(batch).flatten(0, -2)
            if rows.shape[0]:
                amax = rows.abs().amax(0).float()
                found = amax if found is None else torch.maximum(found, amax)
    if found is None:
        raise ValueError("smooth_swiglu: got no batch; needs inputs of the MLP to take magnitudes on")
    return found
