"""Muon: momentum, orthogonalized; for the matrices of hidden layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ottava.optim.adamw import ADAMW_STATES, update_adamw
from ottava.optim.engine import Engine, State, Work
from ottava.optim.storage import Moments
from ottava.optim.weights import Master

_QUINTIC = (3.4445, -4.775, 2.0315)  # a x + b x**3 + c x**5: steepest at 0 among those that keep [0, 1] near 1
_ROUNDS = 5


class Muon(Engine):
    """Muon with a choice of how weights and momentum are stored; the common arguments are those of `AdamW`.

    Args:
        params: matrices. A group with "adamw": True takes AdamW's rule: embeddings, heads, gains and biases.
        betas, eps: of these groups.
        momentum: of the running mean of gradients.
        weight_decay: decoupled.
        nesterov: looks ahead along the momentum.
        adjust_lr_fn: how lr follows the shape (R, C): "original" times sqrt(max(1, R / C)); "match_rms_adamw" times
            0.2 sqrt(max(R, C)), which takes lr and weight_decay of AdamW.
    Raises:
        ValueError: a parameter is no matrix.
    Source: Jordan et al., 2024; torch.optim.Muon, whose bits FP32 weights with FP32 momentum get. moments="int8" is the
        8-bit Muon of arXiv 2509.23106.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(8, 4))
        >>> weight.grad = torch.eye(8, 4)
        >>> Muon([weight], lr=1.0, moments="int8").step()
        >>> 0.6 < float(-weight.detach()[0, 0]) / 2**0.5 < 1.2        # an orthogonal matrix, nearly
        True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        master: Master | None = None,
        moments: Moments = "fp32",
        stochastic_rounding: bool = False,
        capturable: bool = False,
    ) -> None:
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"Muon: adjust_lr_fn is {adjust_lr_fn!r}; needs original or match_rms_adamw")
        own: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        options = {"master": master, "moments": moments, "stochastic_rounding": stochastic_rounding}
        own |= {"adjust_lr_fn": adjust_lr_fn, "betas": betas, "eps": eps, "adamw": False}
        super().__init__(params, {**own, **options, "capturable": capturable})

    def _check(self, group: Mapping[str, Any]) -> None:
        for parameter in () if group["adamw"] else group["params"]:
            if parameter.ndim != 2 or hasattr(parameter, "device_mesh"):
                what = "a sharded parameter" if parameter.ndim == 2 else f"shape {tuple(parameter.shape)}"
                raise ValueError(f"Muon: updates whole matrices; got {what}. Put it into a group with adamw=True")
        super()._check(group)

    def states(self, group: Mapping[str, Any]) -> tuple[State, ...]:
        """The momentum, or those of AdamW."""
        return ADAMW_STATES if group["adamw"] else (State("momentum_buffer"),)

    def elementwise(self, group: Mapping[str, Any]) -> bool:
        """False: the update of each element depends on the whole matrix."""
        return bool(group["adamw"])

    def update(self, work: Work, group: Mapping[str, Any]) -> None:
        """b = momentum b + (1 - momentum) g; w = (1 - lr wd) w - lr' orthogonal(b)."""
        if group["adamw"]:
            update_adamw(work, group)
            return
        lr, momentum = group["lr"], group["momentum"]
        for weight, gradient, buffer in zip(work.weights, work.gradients, work.states["momentum_buffer"], strict=True):
            buffer.lerp_(gradient, 1 - momentum)
            update = orthogonal(gradient.lerp(buffer, momentum) if group["nesterov"] else buffer)
            weight.mul_(1 - lr * group["weight_decay"])
            size = lr * _factor(weight.shape, group["adjust_lr_fn"])
            if isinstance(size, Tensor):
                weight.sub_(update.to(weight.dtype) * size)
            else:
                weight.add_(update, alpha=-size)


def orthogonal(x: Tensor) -> Tensor:
    """The nearest orthogonal matrix, roughly: all singular values of x (R, C) become about 1 (0.7 to 1.2); BF16.

    Source: the quintic Newton-Schulz iteration of Muon.

    Example:
        >>> torch.linalg.svdvals(orthogonal(torch.diag(torch.tensor([1.0, 5.0]))).float()).round()
        tensor([1., 1.])
    """
    tall = x.shape[0] > x.shape[1]
    a, b, c = _QUINTIC
    y = (x.T if tall else x).bfloat16()  # (r, k), r <= k
    y = y / y.norm().clamp(min=1e-7)  # the largest singular value is at most 1
    for _ in range(_ROUNDS):
        gram = y @ y.T  # (r, k) x (k, r) -> (r, r)
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if tall else y


def _factor(shape: torch.Size, rule: str | None) -> float:
    rows, cols = shape
    return 0.2 * math.sqrt(max(rows, cols)) if rule == "match_rms_adamw" else math.sqrt(max(1, rows / cols))
