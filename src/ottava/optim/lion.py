"""Lion: the sign of a running mean; one state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ottava.optim.engine import Engine, State, Work
from ottava.optim.storage import Moments
from ottava.optim.weights import Master


class Lion(Engine):
    """Lion with a choice of how weights and momentum are stored; the common arguments are those of `AdamW`.

    Its updates have magnitude lr, so lr is 3 to 10 times smaller than AdamW's, and weight_decay as much larger.

    Args:
        betas: weight of the momentum in the update, and of the momentum in itself.
        weight_decay: decoupled.
    Edge cases: the sign of a NaN is 0, so a NaN in a gradient stops its weight instead of making it NaN.
    Source: Chen et al., Symbolic discovery of optimization algorithms, NeurIPS 2023.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> weight.grad = torch.tensor([1e-6, 0.0, -5.0])
        >>> Lion([weight], lr=0.5, weight_decay=0.0).step()
        >>> weight.data
        tensor([0.5000, 1.0000, 1.5000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 1e-2,
        *,
        master: Master | None = None,
        moments: Moments = "fp32",
        stochastic_rounding: bool = False,
        capturable: bool = False,
    ) -> None:
        own = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        options = {"master": master, "moments": moments, "stochastic_rounding": stochastic_rounding}
        super().__init__(params, {**own, **options, "capturable": capturable})

    def states(self, group: Mapping[str, Any]) -> tuple[State, ...]:
        """The momentum."""
        return (State("exp_avg"),)

    def update(self, work: Work, group: Mapping[str, Any]) -> None:
        """w = (1 - lr wd) w - lr sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g."""
        means, (beta1, beta2), lr = work.states["exp_avg"], group["betas"], group["lr"]
        if group["weight_decay"] != 0:
            torch._foreach_mul_(work.weights, 1 - lr * group["weight_decay"])
        updates = torch._foreach_lerp(means, work.gradients, 1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(updates, lr)
        torch._foreach_sub_(work.weights, updates)
        torch._foreach_lerp_(means, work.gradients, 1 - beta2)
