"""AdamW: FP32 arithmetic in the order of torch's foreach implementation, so that equal storages give equal bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ottava.base.errors import need_type
from ottava.kernels.triton import adamw
from ottava.numerics.scaling import PER_TENSOR
from ottava.optim.bound import BOUND, SMALLEST_EPS, grow, measure, outer_amax
from ottava.optim.engine import Engine, State, Work
from ottava.optim.storage import Moments
from ottava.optim.weights import Master, Piece, WeightStore
from ottava.weights.parameter import is_quantized_weight

ADAMW_STATES = (State("exp_avg"), State("exp_avg_sq"))


class AdamW(Engine):
    """AdamW with a choice of how weights and moments are stored.

    Args:
        params: parameters, named parameters, or groups of them; every option below may stand in a group.
        lr: learning rate; a tensor on the parameters' device goes with `capturable`.
        betas: of the running means of gradient and squared gradient.
        eps: added to the root of the second one.
        weight_decay: decoupled: each step multiplies weights by 1 - lr * weight_decay.
        master: None, "fp32" (4 bytes an element more) or "remainder" (2 bytes more, the same master bit for bit), for
            parameters of 16 or 8 bits. Without a master an update smaller than half an ulp of a weight is lost.
        moments: "fp32", "bf16", "fp8" (groups of 128 with dynamic range expansion) or "int8" (blocks of 2048).
        stochastic_rounding: BF16 weights without a master are rounded up or down at random, so that small updates are
            right on average. The random bits depend on step and place only.
        amax_every: for FP8 weights with one scale. 1: each step looks for the largest magnitude that it casts. N: each
            Nth step looks for it, and the others take a bound (`bound.grow`), so they need not read the weight before
            they cast it. The bound is never below the magnitudes, and grows by up to 1.2 lr a step (betas 0.9, 0.95).
        capturable: step counts lie on the parameters' device, and a step reads nothing back, for CUDA graphs.
    Raises:
        ValueError: an option is unknown or does not go with the parameters.
        TypeError: a parameter is complex or sparse.
    Edge cases: parameters without a gradient are left alone. A gradient with an infinity or NaN: see `step`.
    On an NVIDIA GPU: one Triton kernel steps a parameter that is FP32, or BF16 with a master, if its moments are FP32
        or BF16; torch's foreach operations step all others. `ran` says what the last step of each group ran, and why.
    Source: Loshchilov and Hutter, ICLR 2019; FP32 parameters with FP32 moments get the bits of
        torch.optim.AdamW(foreach=True).

    Example:
        >>> model = torch.nn.Linear(64, 64).bfloat16()
        >>> optimizer = AdamW(model.parameters(), lr=1e-3, master="remainder", moments="fp8")
        >>> model(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> {name: str(value.dtype) for name, value in optimizer.state[model.weight].items() if value.ndim == 2}
        {'remainder': 'torch.int16', 'exp_avg': 'torch.float8_e4m3fn', 'exp_avg_sq': 'torch.float8_e4m3fn'}
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master: Master | None = None,
        moments: Moments = "fp32",
        stochastic_rounding: bool = False,
        amax_every: int = 1,
        capturable: bool = False,
    ) -> None:
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options = {"master": master, "moments": moments, "stochastic_rounding": stochastic_rounding}
        super().__init__(params, {**own, **options, "amax_every": amax_every, "capturable": capturable})

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        need_type("AdamW: amax_every", group["amax_every"], int)
        if group["amax_every"] < 1:
            raise ValueError(f"AdamW: amax_every is {group['amax_every']}; needs 1 or more steps")
        if group["amax_every"] == 1:
            return
        if group["moments"] not in ("fp32", "bf16") or group["capturable"] or group["eps"] < SMALLEST_EPS:
            raise ValueError(
                "AdamW: amax_every above 1 is for moments in fp32 or bf16, capturable=False and eps of "
                f"{SMALLEST_EPS:g} or more; got moments={group['moments']!r}, capturable={group['capturable']} and "
                f"eps={group['eps']}"
            )
        for parameter in group["params"]:
            weight = getattr(parameter, "_local_tensor", parameter)
            if is_quantized_weight(weight) and (weight.spec.granularity != PER_TENSOR or weight.dim() != 2):
                raise ValueError(
                    f"AdamW: amax_every above 1 is for weights with one scale; got one stored as {weight.spec}. "
                    "Put it into a group with amax_every=1"
                )

    def states(self, group: Mapping[str, Any]) -> tuple[State, ...]:
        """The running means."""
        return ADAMW_STATES

    def fused(self, store: WeightStore, piece: Piece, group: Mapping[str, Any]) -> str | None:
        """By `step_adamw`, for the storages that it takes."""
        if group["capturable"] or isinstance(group["lr"], Tensor):
            got = "capturable=True" if group["capturable"] else "lr as a tensor"
            return f"triton: takes step and lr as numbers; got {got}"
        extra = piece.state[store.keys[0]] if store.keys else None
        moments = [piece.moments[one.name][""] for one in ADAMW_STATES]
        reason = adamw.supports_adamw(piece.weight, extra, piece.gradient, *moments)
        if reason is None:
            own = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            adamw.step_adamw(piece.weight, extra, piece.gradient, *moments, step=piece.step.item(), **own)
        return reason

    def known_amax(self, index: int, piece: Piece, work: Work, group: Mapping[str, Any]) -> Tensor | None:
        """A bound, or at each Nth step of `amax_every` the largest magnitude itself, of the FP32 numbers."""
        if group["amax_every"] == 1 or not is_quantized_weight(piece.weight):
            return None
        state, step = self.state[piece.parameter], int(piece.step.item())
        itemsize = piece.moments["exp_avg"][""].itemsize
        if BOUND in state and step % group["amax_every"]:
            bound = grow(state[BOUND], itemsize, step, group)
        else:
            means, squares = (work.states[one.name][index] for one in ADAMW_STATES)
            bound = measure(work.weights[index], means, squares, itemsize, step, group)
        state[BOUND] = bound
        return outer_amax(bound, piece.weight)

    def update(self, work: Work, group: Mapping[str, Any]) -> None:
        """As `update_adamw`."""
        update_adamw(work, group)


def update_adamw(work: Work, group: Mapping[str, Any]) -> None:
    """m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g g; w = (1 - lr wd) w - lr m' / (sqrt(v') + eps)."""
    weights, means, squares = work.weights, work.states["exp_avg"], work.states["exp_avg_sq"]
    (beta1, beta2), lr = group["betas"], group["lr"]
    if group["weight_decay"] != 0:
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
    torch._foreach_lerp_(means, work.gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, work.gradients, work.gradients, 1 - beta2)
    denominators = torch._foreach_sqrt(squares)
    if group["capturable"]:
        # lr / (1 - b1 ** t), negative, and sqrt(1 - b2 ** t) on the device
        steps = torch._foreach_pow(beta1, work.steps)
        torch._foreach_sub_(steps, 1)
        torch._foreach_div_(steps, lr)
        torch._foreach_reciprocal_(steps)
        corrections = torch._foreach_pow(beta2, work.steps)
        torch._foreach_sub_(corrections, 1)
        torch._foreach_neg_(corrections)
        torch._foreach_sqrt_(corrections)
        torch._foreach_div_(denominators, corrections)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_div_(denominators, steps)
        torch._foreach_addcdiv_(weights, means, denominators)
    else:
        counts = [step.item() for step in work.steps]
        sizes = [-(float(lr) / (1 - beta1**count)) for count in counts]
        torch._foreach_div_(denominators, [(1 - beta2**count) ** 0.5 for count in counts])
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(weights, means, denominators, sizes)
