"""The optimizer's formula beside the optimizer: what the recorded gradients should have done to the weights.

A script may cast where no layer does: weights between two steps, moments of an optimizer of its own. A twin of the
optimizer gets the same gradients and settings for a few steps, in FP32 and without conversions to FP8. Then the way
that the weights have gone is held against the way of the twin:

    error = |way - twin's way| / |twin's way|

It is about 1 where every update is lost, and sees all that happens from one step of the optimizer to the next.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ottava.experiments.handmade import Exact
from ottava.experiments.snapshot import NotReplayableError, stepped_by
from ottava.weights.parameter import local

STEPS = 8
"""Steps that a twin goes along: rounding of single updates averages out."""
_MOST = 1 << 26
"""Elements that are copied: with two moments in FP32 they take 0.8 GB."""


class OptimizerTwin:
    """A twin of an optimizer.

    Args:
        optimizer: its parameters and state are copied in FP32. What it holds besides, too, but for hooks.
    Raises:
        NotReplayableError: it holds more than 67 million elements.

    Example:
        >>> weight = nn.Parameter(torch.ones(4))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> twin = OptimizerTwin(optimizer)
        >>> for _ in range(2):
        ...     weight.grad = torch.ones(4)
        ...     twin.step()
        ...     optimizer.step()
        ...     weight.data.fill_(1.0)  # as a cast that rounds the update away
        tensor([1., 1., 1., 1.])
        tensor([1., 1., 1., 1.])
        >>> twin.error()
        1.0
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._live = stepped_by(optimizer)
        if (count := sum(p.numel() for p in self._live)) > _MOST:
            raise NotReplayableError(f"a twin of an optimizer with {count} elements takes too much memory")
        self._start = [local(p.detach()).float().clone() for p in self._live]
        self._twins = [nn.Parameter(x.clone()) for x in self._start]
        memo: dict[int, Any] = {id(p): twin for p, twin in zip(self._live, self._twins, strict=True)}
        for x in (x for p in self._live for x in optimizer.state.get(p, {}).values() if isinstance(x, Tensor)):
            if _codes(x):
                memo[id(x)] = x.dequantize() if type(x) is not Tensor else x.float()
        self._twin: Any = object.__new__(type(optimizer))
        for name, value in vars(optimizer).items():
            hooks = isinstance(value, OrderedDict) and "hook" in name
            # a schedule puts its own `step` on the instance, which is bound to the optimizer
            if hooks or not callable(value):
                vars(self._twin)[name] = OrderedDict() if hooks else copy.deepcopy(value, memo)
        for state in self._twin.state.values():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < 4:
                    state[key] = value.float()
        self._exact = Exact()
        self.steps = 0
        """Steps that it has made."""

    def follows(self, optimizer: Optimizer) -> bool:
        """Whether it is the twin of this optimizer."""
        return self._optimizer() is optimizer

    def step(self) -> None:
        """Makes the step that the optimizer is about to make."""
        optimizer = self._optimizer()
        assert optimizer is not None
        for live, twin in zip(self._live, self._twins, strict=True):
            twin.grad = None if live.grad is None else local(live.grad.detach()).float().clone()
        for group, of_twin in zip(optimizer.param_groups, self._twin.param_groups, strict=True):
            of_twin.update({k: copy.copy(v) for k, v in group.items() if k != "params"})
        with self._exact:
            self._twin.step()
        self.steps += 1

    def error(self) -> float | None:
        """How far the ways are apart, over the twin's way; None if it did not move."""
        apart = length = 0.0
        for live, start, twin in zip(self._live, self._start, self._twins, strict=True):
            way, wanted = local(live.detach()).float() - start, twin.detach() - start
            apart += float(torch.linalg.vector_norm(way - wanted, dtype=torch.float64)) ** 2
            length += float(torch.linalg.vector_norm(wanted, dtype=torch.float64)) ** 2
        return math.sqrt(apart / length) if length > 0 and math.isfinite(apart / length) else None


def narrow(optimizer: Optimizer) -> bool:
    """Whether an optimizer keeps parameters or their state in fewer than 32 bits."""
    return any(x.is_floating_point() and x.itemsize < 4 for x in (*stepped_by(optimizer), *_states(optimizer)))


def keeps_codes(optimizer: Optimizer) -> bool:
    """Whether an optimizer keeps its state as FP8 codes, plain or inside a tensor of a library."""
    return any(_codes(x) for x in _states(optimizer))


def _states(optimizer: Optimizer) -> list[Tensor]:
    return [x for p in stepped_by(optimizer)[:64] for x in optimizer.state.get(p, {}).values() if isinstance(x, Tensor)]


def _codes(x: Tensor) -> bool:
    parts: Any = x  # mypy: no tensor can be such a subclass
    if not is_traceable_wrapper_subclass(parts):
        return "float8" in str(x.dtype)
    inner = (getattr(x, name) for name in parts.__tensor_flatten__()[0])
    return any(_codes(y) for y in inner if isinstance(y, Tensor))  # a DTensor names its mesh, too
