"""What a training step changes and a forward finds around itself: kept in memory, and restored bit for bit.

`Surroundings` are of one forward: random states, autocasts, training flags, small buffers. A `Snapshot` is of a whole
training, between two steps. It restores parameters and buffers in place, so that optimizers, compiled code and graphs
still hold the right tensors. It also restores the optimizer's state in place; load_state_dict would cast FP32 moments
of BF16 parameters to BF16.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ottava.engine.autocast import AMBIENT, Ambient
from ottava.engine.quantizer import Quantizer, WeightQuantizer
from ottava.experiments.handmade import USER, kind_of
from ottava.numerics.tensor import QuantizationSpec
from ottava.record.random_state import random_states, set_random_states

SMALL = 1 << 20
"""Bytes of a tensor up to which it is copied; larger ones are kept by reference."""
Autocasts = tuple[tuple[str, torch.dtype], ...]
Saved = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
"""The user's hooks of `torch.autograd.graph.saved_tensors_hooks`: pack and unpack."""


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

    random: Callable[[], None]
    """Sets the generators back."""
    autocasts: Autocasts
    ambient: Ambient
    training: tuple[bool, ...]
    """`training` of all modules, in the order of `modules()`."""
    buffers: Mapping[int, Tensor]
    """Number of a small buffer -> its copy."""
    saved: Saved = None

    @classmethod
    def of(cls, module: nn.Module) -> Surroundings:
        """The state at the beginning of a forward of this module."""
        return cls(
            random_now(),
            autocasts(),
            replace(AMBIENT.get(), session=None),
            tuple(m.training for m in module.modules()),
            {
                i: b.clone()
                for i, b in enumerate(module.buffers())
                if b.numel() * b.element_size() <= SMALL and not b.is_inference()
            },
            saved_by(),
        )

    def restore(self, module: nn.Module) -> None:
        """Restores random states, training flags and buffers."""
        self.random()
        for inner, training in zip(module.modules(), self.training, strict=True):
            inner.training = training
        with torch.no_grad():
            for i, buffer in enumerate(module.buffers()):
                if i in self.buffers:
                    buffer.data.copy_(self.buffers[i])  # no new version: an earlier forward's norm may have saved it


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


def saved_by() -> Saved:
    """The hooks through which autograd keeps tensors now, if they are the user's."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    code = getattr(hooks[0], "__code__", None) if hooks else None
    return hooks if code is not None and kind_of(code) == USER else None


def under_saved(hooks: Saved) -> AbstractContextManager[Any]:
    """Keeps tensors for the backward through these hooks."""
    return nullcontext() if hooks is None else torch.autograd.graph.saved_tensors_hooks(*hooks)


@contextmanager
def under_ambient(ambient: Ambient) -> Iterator[None]:
    """ottava's autocast as it was; it makes no boundary and warns of nothing."""
    with ExitStack() as stack:
        stack.callback(AMBIENT.reset, AMBIENT.set(ambient))
        yield


def random_now() -> Callable[[], None]:
    """What sets the generators of torch, Python and NumPy back to where they are now."""
    numpy = sys.modules.get("numpy")
    states, python = random_states(), random.getstate()
    state = numpy.random.get_state() if numpy is not None else None

    def set_back() -> None:
        set_random_states(states)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(state)

    return set_back


class Stateful(Protocol):
    """A scheduler, a gradient scaler, a sampler: anything with a state to save."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state: Any) -> Any:
        """Restores the state."""


@dataclass(frozen=True, eq=False)
class _Door:
    spec: QuantizationSpec | None
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One moment of a training, between two steps; see `take`."""

    step: int
    """Steps done."""
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    """Persistent or not, but without those of predicted scales, which are in `doors`."""
    doors: Mapping[str, _Door]
    moments: Mapping[int, Mapping[str, Any]]
    """Number of the parameter -> the optimizer's state of it."""
    groups: tuple[Mapping[str, Any], ...]
    """The optimizer's settings, such as learning rates."""
    random: Mapping[str, Tensor]
    extras: tuple[Any, ...]

    @classmethod
    def take(cls, model: nn.Module, optimizer: Optimizer, step: int, extras: tuple[Stateful, ...] = ()) -> Snapshot:
        """Copies everything to the CPU.

        Example:
            >>> model = nn.Linear(2, 2)
            >>> optimizer = torch.optim.AdamW(model.parameters())
            >>> before = model.weight.clone()
            >>> snapshot = Snapshot.take(model, optimizer, step=0)
            >>> model(torch.ones(1, 2)).sum().backward()
            >>> optimizer.step()
            >>> snapshot.restore(model, optimizer)
            >>> torch.equal(model.weight, before), len(optimizer.state)
            (True, 0)
        """
        doors = {name: door for name, door in model.named_modules() if isinstance(door, Quantizer)}
        inside = {id(tensor) for door in doors.values() for tensor in door.buffers(recurse=False)}
        return cls(
            step=step,
            parameters={name: _copy(p) for name, p in model.named_parameters()},
            buffers={name: _copy(b) for name, b in model.named_buffers() if id(b) not in inside},
            doors={name: _door(door) for name, door in doors.items()},
            moments={
                i: {key: _copy(value) for key, value in optimizer.state[p].items()}
                for i, p in enumerate(stepped_by(optimizer))
                if p in optimizer.state
            },
            groups=tuple({k: copy.copy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups),
            random=random_states(),
            extras=tuple(copy.deepcopy(extra.state_dict()) for extra in extras),
        )

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: Optimizer, extras: tuple[Stateful, ...] = ()) -> None:
        """Restores everything and drops gradients. The recipes of layers do not change."""
        for name, weight in model.named_parameters():
            weight.copy_(self.parameters[name])
            weight.grad = None
        for name, door in model.named_modules():
            if isinstance(door, Quantizer):
                _restore_door(door, self.doors[name])
        buffers = dict(model.named_buffers())
        for name, value in self.buffers.items():
            buffers[name].copy_(value)
        for i, parameter in enumerate(stepped_by(optimizer)):
            _restore_moments(optimizer.state, parameter, self.moments.get(i))
        for group, saved in zip(optimizer.param_groups, self.groups, strict=True):
            group.update({key: copy.copy(value) for key, value in saved.items()})
        set_random_states(self.random)
        for extra, state in zip(extras, self.extras, strict=True):
            extra.load_state_dict(copy.deepcopy(state))


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def stepped_by(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def calls_on(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer runs inside of another one.

    torch wraps `step` of each class of which an optimizer was made: it calls hooks twice where a class calls
    `super().step()`.
    """
    wrapper, frame, found = _wrapper(), sys._getframe(1), 0
    while frame is not None and found < 2:
        found += frame.f_code is wrapper and frame.f_locals.get("self") is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return found > 1


@functools.cache
def _wrapper() -> CodeType:
    """The code that torch puts around `step`, which calls the hooks."""
    code: CodeType = Optimizer.profile_hook_step(lambda self: None).__code__
    return code


def _door(door: Quantizer) -> _Door:
    if door.spec is None:
        return _Door(None, {})
    tensors = {name: _copy(b) for name, b in door.named_buffers(recurse=False)}
    return _Door(door.spec, {**tensors, "staged": _copy(door.staged)})


def _restore_door(door: Quantizer, saved: _Door) -> None:
    if isinstance(door, WeightQuantizer):
        door.cached = None  # a new cast of the weight has the same bits
    if saved.spec is None:
        door.drop()
        return
    if door.spec != saved.spec:
        door.prepare(saved.spec, next(iter(door.buffers()), torch.empty(0)).device)
    for name, value in saved.tensors.items():
        getattr(door, name).copy_(value)


def _restore_moments(state: Any, parameter: Tensor, saved: Mapping[str, Any] | None) -> None:
    if saved is None:
        state.pop(parameter, None)
        return
    moments = state[parameter]
    for key in [key for key in moments if key not in saved]:
        del moments[key]
    for key, value in saved.items():
        present = moments.get(key)
        if isinstance(value, Tensor) and isinstance(present, Tensor) and present.shape == value.shape:
            present.copy_(value)
        elif isinstance(value, Tensor):
            # step counters are on the CPU unless they are fused or capturable
            moments[key] = value.to(parameter.device, copy=True) if value.dim() else value.clone()
        else:
            moments[key] = copy.deepcopy(value)
