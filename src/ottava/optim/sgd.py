"""SGD with momentum, in the order of torch's foreach implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ottava.optim.engine import Engine, State, Work
from ottava.optim.storage import Moments
from ottava.optim.weights import Master


class SGD(Engine):
    """SGD with a choice of how weights and momentum are stored; the common arguments are those of `AdamW`.

    Args:
        momentum: 0 keeps no state.
        weight_decay: added to the gradient, times the weight.
        nesterov: looks ahead along the momentum.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> weight.grad = torch.ones(4)
        >>> SGD([weight], lr=0.5, momentum=0.9, moments="bf16").step()
        >>> weight.data
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        master: Master | None = None,
        moments: Moments = "fp32",
        stochastic_rounding: bool = False,
        capturable: bool = False,
    ) -> None:
        if nesterov and momentum == 0.0:
            raise ValueError("SGD: nesterov needs a momentum above 0; got 0")
        own = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        options = {"master": master, "moments": moments, "stochastic_rounding": stochastic_rounding}
        super().__init__(params, {**own, **options, "capturable": capturable})

    def states(self, group: Mapping[str, Any]) -> tuple[State, ...]:
        """The momentum, if there is one."""
        return (State("momentum_buffer"),) if group["momentum"] else ()

    def update(self, work: Work, group: Mapping[str, Any]) -> None:
        """b = momentum b + g; w = w - lr b, or - lr (g + momentum b) with nesterov; g has weight_decay w added."""
        gradients: list[Tensor] | tuple[Tensor, ...] = work.gradients
        if group["weight_decay"] != 0:
            gradients = torch._foreach_add(gradients, work.weights, alpha=group["weight_decay"])
        if group["momentum"] != 0:
            buffers = work.states["momentum_buffer"]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, gradients)
            gradients = (
                torch._foreach_add(gradients, buffers, alpha=group["momentum"]) if group["nesterov"] else buffers
            )
        lr = group["lr"]
        if isinstance(lr, Tensor):
            torch._foreach_sub_(work.weights, torch._foreach_mul(gradients, lr))
        else:
            torch._foreach_add_(work.weights, gradients, alpha=-lr)
