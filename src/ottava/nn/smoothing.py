"""Smooth-SwiGLU: spreads the outliers of an MLP over its channels, without changing its result.

A channel whose gate and up rows align makes far larger products than the other channels, and one scale a tensor then
flushes the others (Fishman et al., arXiv 2409.12517: FP8 training diverges after 200 billion tokens). Each channel c
gets a power of two:

    rows_c = act(x)_c s_c  before the cast,   fc2 column c / s_c          s_c = 2^round(log2(mean amax / amax_c))

Powers of two multiply without rounding, so every sum keeps its bits. s stays with the activation. If fc1 held it, one
scale a tensor would flush the rows of fc1 that it makes small; `fold_smooth_swiglu` puts it there for engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ottava.engine.autocast import autocast
from ottava.engine.quantizer import Quantizer
from ottava.nn.activations import Activation
from ottava.nn.mlp import NormMLP
from ottava.weights.parameter import is_quantized_weight


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


def fold_smooth_swiglu(model: nn.Module) -> list[str]:
    """Moves the powers of `smooth_swiglu` into the up rows of fc1, for engines that know no factor of channels.

    Args:
        model: its MLPs with `fc2.smooth` become plain ones, in place: the up rows of `fc1.weight` and `fc1.bias` are
            multiplied by the powers, and fc2 stays as it is.
    Returns:
        Names of the MLPs. In high precision no bit of the result changes, and the rows that fc2 casts are the same. The
        casts of fc1's weight change, since its rows do.
    Raises:
        ValueError: an activation whose result is no product with an up row (one without a gate, or with a clamp);
            weights that exist only as codes. Nothing is changed then.

    Example:
        >>> import ottava
        >>> mlp = ottava.nn.NormMLP(32, 64, activation="swiglu", bias=False)
        >>> _ = smooth_swiglu(mlp, torch.randn(16, 32))
        >>> fold_smooth_swiglu(mlp), mlp.fc2.smooth
        ([''], None)
    """
    mlps = {name: m for name, m in model.named_modules() if isinstance(m, NormMLP) and m.fc2.smooth is not None}
    for name, mlp in mlps.items():
        reason = ""
        activation = mlp.activation.activation
        if not _multiplies_up(activation):
            reason = f"the result of {activation.name} is no product with an up row, which could hold the power"
        elif is_quantized_weight(mlp.fc1.weight):
            reason = "the weight of fc1 exists only as codes; call ottava.convert(model, recipe, weights='bf16') first"
        if reason:
            raise ValueError(f"fold_smooth_swiglu: {name or 'the MLP'}: {reason}")
    for mlp in mlps.values():
        powers = mlp.fc2.smooth
        assert powers is not None
        with torch.no_grad():
            for rows in (mlp.fc1.weight, mlp.fc1.bias):
                if rows is not None:
                    up = rows[powers.numel() :]
                    up.mul_(powers.to(rows.dtype).view(-1, *[1] * (up.dim() - 1)))
        mlp.fc2.smooth = None
    return list(mlps)


def _multiplies_up(activation: Activation) -> bool:
    """Whether twice the up row gives twice the result."""
    x = torch.randn(256, 2, generator=torch.Generator().manual_seed(0)) * 10  # gate and up
    twice = activation.forward(x * torch.tensor([1.0, 2.0]))
    return activation.gated and torch.equal(twice, 2 * activation.forward(x))


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
