"""Parameters, and steps of several optimizers with the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Parameters = list[nn.Parameter]
Make = Callable[[Any], Any]


def made(matrices: bool = False, dtype: torch.dtype = torch.float32) -> Parameters:
    shapes = [(33, 17), (64, 128), *([] if matrices else [(129,), (), (0, 3)])]
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def copies(parameters: Parameters) -> Parameters:
    return [nn.Parameter(p.detach().clone()) for p in parameters]


def steps(pairs: Iterable[tuple[Any, Parameters]], count: int, skip: int = 5) -> None:
    """Some steps with the same gradients; one parameter has none in each."""
    pairs = list(pairs)
    for number in range(count):
        gradients = [torch.randn(p.shape) * 10 ** torch.randn(()) for p in pairs[0][1]]
        for optimizer, parameters in pairs:
            for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                parameter.grad = None if number % skip == index else gradient.to(parameter.dtype)
            optimizer.step()


def same(one: Parameters, two: Parameters) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def follows_torch(ours: Make, theirs: Make, *, matrices: bool = False) -> None:
    """30 steps of both, in FP32 and FP64: the same weights and states, bit for bit."""
    for dtype in (torch.float32, torch.float64):
        parameters = made(matrices, dtype)
        twins = copies(parameters)
        one, two = ours(parameters), theirs(twins)
        for group in two.param_groups:
            group.update({"foreach": True} if "foreach" in group else {})
        steps([(one, parameters), (two, twins)], 30)
        assert same(parameters, twins)
        for a, b in zip(parameters, twins, strict=True):
            for name, value in two.state[b].items():
                assert value is None or torch.equal(one.state[a][name], value), name
