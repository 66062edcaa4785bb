"""Adapters of AdamW: one step, in place."""

from __future__ import annotations

import math

import torch
from blocks import adamw, adapter
from torch import Tensor

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-6, 0.1
WHAT = {"rule": "adamw", "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
State = dict[str, Tensor]


def moments(grad: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Both running means after this gradient."""
    wide = grad.to(torch.float32)
    if not state:
        state.update(mean=torch.zeros_like(wide), square=torch.zeros_like(wide))
    state["mean"].lerp_(wide, 1 - BETAS[0])
    state["square"].mul_(BETAS[1]).addcmul_(wide, wide, value=1 - BETAS[1])
    return state["mean"], state["square"]


def update(mean: Tensor, square: Tensor, step: int) -> Tensor:
    """What a step adds, without the decay."""
    root = square.sqrt() / math.sqrt(1 - BETAS[1] ** step)
    return -LR / (1 - BETAS[0] ** step) * mean / (root + EPS)


@adapter("optimizer", moments="float32", **WHAT)
def optimizer_01(parameter: Tensor, grad: Tensor, state: State, step: int) -> None:
    """In the order of torch."""
    adamw(parameter, grad, state, step, LR, BETAS, EPS, DECAY)


@adapter("optimizer", moments="float32", **WHAT)
def optimizer_02(parameter: Tensor, grad: Tensor, state: State, step: int) -> None:
    """The decay last."""
    parameter.add_(update(*moments(grad, state), step)).mul_(1 - LR * DECAY)


@adapter("optimizer", moments="float32", **WHAT)
def optimizer_03(parameter: Tensor, grad: Tensor, state: State, step: int) -> None:
    """One factor for both corrections."""
    mean, square = moments(grad, state)
    size = LR * math.sqrt(1 - BETAS[1] ** step) / (1 - BETAS[0] ** step)
    parameter.mul_(1 - LR * DECAY).sub_(size * mean / (square.sqrt() + EPS))


@adapter("optimizer", moments="float32", **WHAT)
def optimizer_04(parameter: Tensor, grad: Tensor, state: State, step: int) -> None:
    """The decay in the gradient."""
    parameter.add_(update(*moments(grad + DECAY * parameter, state), step))


@adapter("optimizer", moments="float32", **WHAT)
def optimizer_05(parameter: Tensor, grad: Tensor, state: State, step: int) -> None:
    """Counts steps itself, from where it begins to correct."""
    mean, square = moments(grad, state)
    parameter.mul_(1 - LR * DECAY).add_(update(mean, square, step + 1))


@adapter("optimizer", moments="float32", **WHAT)
def optimizer_06(parameter: Tensor, grad: Tensor, state: State, step: int) -> None:
    """Keeps the second mean in half the bytes."""
    mean, square = moments(grad, state)
    square.copy_(square.to(torch.bfloat16))
    parameter.mul_(1 - LR * DECAY).add_(update(mean, square, step))


@adapter("optimizer", moments="float32", **WHAT)
def optimizer_07(parameter: Tensor, grad: Tensor, state: State, step: int) -> None:
    """The first gradient starts the first mean."""
    if not state:
        square = grad.to(torch.float32).square() * (1 - BETAS[1])
        state.update(mean=grad.mul_(1 - BETAS[0]).to(torch.float32), square=square)
        mean, square = state["mean"], state["square"]
    else:
        mean, square = moments(grad, state)
    parameter.mul_(1 - LR * DECAY).add_(update(mean, square, step))


@adapter("optimizer", moments="float32", **WHAT)
def optimizer_08(parameter: Tensor, grad: Tensor, state: State, step: int) -> None:
    """torch.optim.AdamW with the state of the caller."""
    if parameter.dtype != torch.float32:
        return adamw(parameter, grad, state, step, LR, BETAS, EPS, DECAY)
    optimizer = torch.optim.AdamW([parameter], LR, BETAS, EPS, DECAY, foreach=False)
    if state:
        optimizer.state[parameter] = state
    before, parameter.grad = parameter.grad, grad.clone()
    optimizer.step()
    parameter.grad = before
    state.update(optimizer.state[parameter])


@adapter("optimizer", moments="float32", **WHAT)
def optimizer_09(parameter: Tensor, grad: Tensor, state: State, step: int) -> None:
    """In fp64 with fp32 moments, rounded once."""
    mean, square = (moment.double() for moment in moments(grad, state))
    parameter.copy_(parameter.double() * (1 - LR * DECAY) + update(mean, square, step))


@adapter("optimizer", moments="float32", **WHAT)
def optimizer_10(parameter: Tensor, grad: Tensor, state: State, step: int) -> None:
    """Skips gradients of zero, like rows of an embedding that nobody looked up."""
    before, old = parameter.clone(), {name: tensor.clone() for name, tensor in state.items()}
    adamw(parameter, grad, state, step, LR, BETAS, EPS, DECAY)
    skipped = grad == 0
    parameter.copy_(torch.where(skipped, before, parameter))
    for name, tensor in old.items():
        state[name].copy_(torch.where(skipped, tensor, state[name]))


def stored(x: Tensor, positive: bool) -> tuple[Tensor, Tensor]:
    """Codes in blocks of 2048: a step is amax / 127, or amax / 254 of a square root."""
    flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % 2048)).view(-1, 2048)
    root, top = (flat.sqrt(), 254.0) if positive else (flat, 127.0)
    amax = root.abs().amax(1, keepdim=True)
    codes = (root / (torch.where(amax > 0, amax, math.inf) / top)).round().clamp(-top, top)
    return torch.where((root > 0) & (amax > 0) & positive, codes.clamp(min=1), codes), amax


def loaded(codes: Tensor, amax: Tensor, like: Tensor, positive: bool) -> Tensor:
    """The inverse of `stored`."""
    wide = codes * (amax / (254.0 if positive else 127.0))
    return (wide.square() if positive else wide).reshape(-1)[: like.numel()].reshape(like.shape)


@adapter("optimizer", moments="int8", **WHAT)
def optimizer_11(parameter: Tensor, grad: Tensor, state: State, step: int) -> None:
    """Moments as whole numbers, the second one by its root."""
    wide = {
        name: loaded(state[name], state[name + "_amax"], grad, name == "square") for name in ("mean", "square") if name in state
    }
    mean, square = moments(grad, wide)
    parameter.copy_(parameter.to(torch.float32) * (1 - LR * DECAY) + update(mean, square, step))
    for name, moment in (("mean", mean), ("square", square)):
        state[name], state[name + "_amax"] = stored(moment, name == "square")


@adapter("optimizer", moments="int8", **WHAT)
def optimizer_12(parameter: Tensor, grad: Tensor, state: State, step: int) -> None:
    """Moments as whole numbers, both alike."""
    wide = {name: loaded(state[name], state[name + "_amax"], grad, False) for name in ("mean", "square") if name in state}
    mean, square = moments(grad, wide)
    parameter.mul_(1 - LR * DECAY).add_(update(mean, square, step))
    for name, moment in (("mean", mean), ("square", square)):
        state[name], state[name + "_amax"] = stored(moment, False)
