"""Smooth-SwiGLU: spreads the outliers of a gated MLP over its channels, without changing what it computes.

A channel whose gate and up rows align makes products far larger than all others', and one scale a tensor then flushes those
(Fishman et al., arXiv 2409.12517: FP8 training that diverges after 200 billion tokens). Each channel c gets a power of two:

    up row c * s_c, up bias c * s_c, fc2 column c / s_c          s_c = 2^round(log2(mean amax / amax_c))

act(gate) * up is linear in up, and powers of two multiply without rounding: every sum of the MLP keeps its bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ottava.ambient import autocast
from ottava.functional import produced
from ottava.nn.activations import Activation, ActivationFormula
from ottava.nn.mlp import NormMLP
from ottava.quantizer import Quantizer


def smooth_swiglu(mlp: NormMLP, batches: Tensor | Iterable[Tensor]) -> Tensor:
    """Folds a power of two a channel into fc1 and fc2, in place, so that all channels reach about the same magnitude.

    Args:
        mlp: of a gated activation.
        batches: inputs of the MLP, (..., H), on which the magnitude of each channel is taken, in high precision.
    Returns:
        fp32 (F,): the powers of two that the up rows were multiplied with; 1 for channels that are always 0, and for
        those whose weights would leave their dtype.
    Raises:
        ValueError: the activation has no gate, or is not linear in what the gate multiplies; or there is no batch.
    Edge cases: amax histories of the MLP start again. Moments that an optimizer holds are those of the old weights:
        call it between two runs or before the optimizer is made.

    Example:
        >>> import ottava
        >>> mlp = ottava.nn.NormMLP(32, 64, activation="swiglu", bias=False)
        >>> with torch.no_grad():
        ...     _ = mlp.fc1.weight[64].mul_(1000.0)                                      # the first channel's up row
        >>> bool(smooth_swiglu(mlp, torch.randn(16, 32))[0] < 0.01)
        True
    """
    activation = mlp.activation.activation
    if not _linear_in_up(activation):
        raise ValueError(
            f"smooth_swiglu: {activation.name!r} is not a gate times a linear branch, which is what a factor may move "
            "along; needs swiglu, geglu, reglu or another of that kind"
        )
    amax = _amax(mlp, [batches] if isinstance(batches, Tensor) else batches)
    usable = (amax > 0) & amax.isfinite()
    logs = torch.where(usable, amax, 1.0).log2()
    mean = logs.sum() / usable.sum().clamp(min=1)
    scale = torch.where(usable, (mean - logs).round().exp2(), 1.0)
    features = mlp.fc2.in_features
    up = [mlp.fc1.weight[features:]] + ([] if mlp.fc1.bias is None else [mlp.fc1.bias[features:, None]])
    with torch.no_grad():
        exact = _exact(mlp.fc2.weight.t(), 1 / scale)
        for rows in up:
            exact &= _exact(rows, scale)
        scale = torch.where(exact, scale, 1.0)
        for rows in up:
            rows.copy_(rows * scale[:, None].to(rows.dtype))
        mlp.fc2.weight.copy_(mlp.fc2.weight * (1 / scale).to(mlp.fc2.weight.dtype))
    for door in mlp.modules():
        if isinstance(door, Quantizer):
            door.reset()
    return scale


def _linear_in_up(activation: Activation) -> bool:
    if not activation.gated:
        return False
    gate, up = torch.tensor([0.5, 2.0, 3.0]), torch.tensor([3.0, -5.0, 11.0])
    one, other = (activation.forward(torch.cat((gate, factor * up))) for factor in (1.0, 4.0))
    return torch.equal(4.0 * one, other)


def _amax(mlp: NormMLP, batches: Iterable[Tensor]) -> Tensor:
    """fp32 (F,): of each channel behind the gate."""
    found = None
    with torch.no_grad(), autocast(enabled=False):
        for batch in batches:
            rows = produced(ActivationFormula(mlp.activation.activation), mlp.fc1(batch)).flatten(0, -2)
            if rows.shape[0]:
                amax = rows.abs().amax(0).float()
                found = amax if found is None else torch.maximum(found, amax)
    if found is None:
        raise ValueError("smooth_swiglu: got no batch; needs inputs of the MLP to take magnitudes on")
    return found


def _exact(rows: Tensor, scale: Tensor) -> Tensor:
    """(F,): which rows come back bit for bit from their product with a power of two."""
    own = scale[:, None].to(rows.dtype)
    product = rows * own
    return ((product / own == rows) & product.isfinite()).all(-1)
