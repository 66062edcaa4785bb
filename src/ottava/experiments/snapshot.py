"""Copies everything that a training step changes to memory, and restores it bit for bit.

It restores parameters and buffers in place, so that optimizers, compiled code and graphs still hold the right tensors.
It also restores the optimizer's state in place; load_state_dict would cast FP32 moments of BF16 parameters to BF16.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ottava.engine.quantizer import Quantizer, WeightQuantizer
from ottava.numerics.tensor import QuantizationSpec
from ottava.record.random_state import random_states, set_random_states


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
                for i, p in enumerate(_parameters(optimizer))
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
        for i, parameter in enumerate(_parameters(optimizer)):
            _restore_moments(optimizer.state, parameter, self.moments.get(i))
        for group, saved in zip(optimizer.param_groups, self.groups, strict=True):
            group.update({key: copy.copy(value) for key, value in saved.items()})
        set_random_states(self.random)
        for extra, state in zip(extras, self.extras, strict=True):
            extra.load_state_dict(copy.deepcopy(state))


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


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
