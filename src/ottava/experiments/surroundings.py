"""What a forward finds around itself, and how to restore it: random states, autocasts, training flags, buffers."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ottava.engine.autocast import AMBIENT, Ambient
from ottava.record.random_state import random_states, set_random_states

SMALL = 1 << 20
"""Bytes of a tensor up to which it is copied; larger ones are kept by reference."""
Autocasts = tuple[tuple[str, torch.dtype], ...]


class NotReplayableError(RuntimeError):
    """What was captured cannot be run again; the message is a sentence that says why."""


class Kept:
    """A tensor of the training that a replay will need: a copy if it is small, else a reference.

    Args:
        x: the tensor. A leaf that needs a gradient, such as a parameter, is kept as it is.
        copies: whether a replay writes to it, so that each replay needs a copy.

    Example:
        >>> x = torch.ones(3)
        >>> kept = Kept(x)
        >>> _ = x.zero_()
        >>> kept.value().tolist()
        [1.0, 1.0, 1.0]
    """

    __slots__ = ("_copies", "_requires_grad", "_tensor", "_version")

    def __init__(self, x: Tensor, *, copies: bool = False) -> None:
        leaf = x.requires_grad and x.is_leaf
        self._requires_grad = x.requires_grad and not isinstance(x, nn.Parameter)
        self._copies, self._version = copies, None if x.is_inference() else x._version
        self._tensor = x
        if isinstance(x, nn.Parameter) or (leaf and not copies):
            self._requires_grad = False
            self._version = None
        elif copies or (x.numel() * x.element_size() <= SMALL and not x.is_inference()):
            self._tensor, self._copies, self._version = x.detach().clone(), True, None
        else:
            self._tensor = x.detach()

    @property
    def leaf(self) -> Tensor | None:
        """The tensor if it is a leaf that needs a gradient."""
        return self._tensor if self._tensor.requires_grad else None

    def value(self) -> Tensor:
        """The tensor as it was.

        Raises:
            NotReplayableError: something has written to it since.
        """
        if self._tensor.requires_grad:
            return self._tensor
        if self._version is not None and self._tensor._version != self._version:
            shape = tuple(self._tensor.shape)
            raise NotReplayableError(f"the training has overwritten a tensor {shape} that the step had read")
        x = self._tensor.clone() if self._copies else self._tensor.detach()
        return x.requires_grad_() if self._requires_grad else x


@dataclass(frozen=True, eq=False)
class Surroundings:
    """The state around one forward."""

    torch_random: Mapping[str, Tensor]
    python_random: Any
    numpy_random: Any
    autocasts: Autocasts
    ambient: Ambient
    training: tuple[bool, ...]
    """`training` of all modules, in the order of `modules()`."""
    buffers: Mapping[int, Tensor]
    """Number of a small buffer -> its copy."""

    @classmethod
    def of(cls, module: nn.Module) -> Surroundings:
        """The state at the beginning of a forward of this module."""
        numpy = sys.modules.get("numpy")
        return cls(
            random_states(),
            random.getstate(),
            numpy.random.get_state() if numpy is not None else None,
            autocasts(),
            replace(AMBIENT.get(), session=None),
            tuple(m.training for m in module.modules()),
            {
                i: b.clone()
                for i, b in enumerate(module.buffers())
                if b.numel() * b.element_size() <= SMALL and not b.is_inference()
            },
        )

    def restore(self, module: nn.Module) -> None:
        """Restores random states, training flags and buffers."""
        set_random_states(self.torch_random)
        random.setstate(self.python_random)
        if self.numpy_random is not None:
            sys.modules["numpy"].random.set_state(self.numpy_random)
        for inner, training in zip(module.modules(), self.training, strict=True):
            inner.training = training
        with torch.no_grad():
            for i, buffer in enumerate(module.buffers()):
                if i in self.buffers:
                    buffer.copy_(self.buffers[i])


def autocasts() -> Autocasts:
    """The device types with torch.autocast on, and its dtype."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple((d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d))


@contextmanager
def under_autocasts(wanted: Autocasts) -> Iterator[None]:
    """torch.autocast as it was."""
    if wanted == autocasts():
        yield
        return
    with ExitStack() as stack:
        for device, _ in autocasts():
            stack.enter_context(torch.autocast(device, enabled=False))
        for device, dtype in wanted:
            stack.enter_context(torch.autocast(device, dtype))
        yield


@contextmanager
def under_ambient(ambient: Ambient) -> Iterator[None]:
    """ottava's autocast as it was; it makes no boundary and warns of nothing."""
    token = AMBIENT.set(ambient)
    try:
        yield
    finally:
        AMBIENT.reset(token)


@contextmanager
def random_kept() -> Iterator[None]:
    """Restores the generators of torch, Python and NumPy at the end of the context."""
    numpy = sys.modules.get("numpy")
    states, python = random_states(), random.getstate()
    state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        set_random_states(states)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(state)
