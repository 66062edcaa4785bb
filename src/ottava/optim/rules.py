"""AdamW: FP32 arithmetic in the order of torch's foreach implementation, so that equal storages give equal bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ottava.base.errors import need_type
from ottava.kernels.triton import step as triton_step
from ottava.numerics.scaling import PER_TENSOR
from ottava.optim.engine import BOUND, Engine, State, Work
from ottava.optim.storage import Master, Moments, Piece
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
        moments: "fp32", "bf16", "fp8" (groups of 128 with dynamic range expansion), or, in blocks of 2048, "fp16" or
            "int8".
        stochastic_rounding: BF16 weights without a master are rounded up or down at random, so that small updates are
            right on average. The random bits depend on step and place only.
        amax_every: for FP8 weights with one scale. 1: each step looks for the largest magnitude that it casts. N: each
            Nth step looks for it, and the others take a bound (`bound.grow`), so they need not read the weight before
            they cast it. The bound is never below the magnitudes, and grows by up to 1.2 lr a step (betas 0.9, 0.95).
        capturable: step counts lie on the parameters' device, and a step reads nothing back, for CUDA graphs. A graph
            keeps the addresses of weights and states: capture anew after a state is loaded.
    Raises:
        ValueError: an option is unknown or does not go with the parameters.
        TypeError: a parameter is complex or sparse.
    Edge cases: parameters without a gradient are left alone. A gradient with an infinity or NaN: see `step`.
    On an NVIDIA GPU: one launch of a Triton kernel steps up to 256 parameters that are FP32, or BF16 with a master, and
        whose moments are FP32 or BF16; torch's foreach operations step all others. `ran` says what the last step of
        each group ran, and why.
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

    def refuses(self, piece: Piece, group: Mapping[str, Any]) -> str | None:
        """As `supports_adamw` says of its storages."""
        lr, scalars = group["lr"], [piece.step] if group["capturable"] else []
        if isinstance(lr, Tensor):
            if not scalars:
                return "triton: takes lr as a number; got a tensor with capturable=False"
            scalars.append(lr)
        return triton_step.supports_adamw(*_tensors(piece), *scalars)

    def fused(self, pieces: Sequence[Piece], group: Mapping[str, Any]) -> None:
        """By `step_adamw`."""
        steps = [piece.step if group["capturable"] else piece.step.item() for piece in pieces]
        rows = [triton_step.TableRow(*_tensors(piece), step) for piece, step in zip(pieces, steps, strict=True)]
        own = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        triton_step.step_adamw(rows, vars(self).setdefault("_tables", triton_step.Tables()), **own)

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


def _tensors(piece: Piece) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """What a `TableRow` begins with."""
    master, moments = next(iter(piece.state.values()), None), piece.moments
    return piece.weight, master, piece.gradient, moments["exp_avg"][""], moments["exp_avg_sq"][""]


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


# --- how large the numbers of a weight can be after a step, without a look at them ---

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
