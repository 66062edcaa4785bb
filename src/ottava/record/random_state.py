"""Reads, sets and protects the states of torch's random generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor


def random_states() -> dict[str, Tensor]:
    """Device -> state (uint8) of the CPU generator and, once CUDA is in use, of every CUDA device's generator.

    Example:
        >>> states = random_states()
        >>> first = torch.rand(2)
        >>> set_random_states(states)
        >>> torch.equal(torch.rand(2), first)
        True
    """
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states |= {f"cuda:{i}": torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Sets the generators; ignores the states of devices that this machine does not have."""
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state.cpu())
        elif torch.cuda.is_available() and int(device.rpartition(":")[2]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state.cpu(), device)


@contextmanager
def random_states_kept(states: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Restores the generators at the end of the context, which begins with `states` where they are given."""
    with ExitStack() as stack:
        stack.callback(set_random_states, random_states())
        if states is not None:
            set_random_states(states)
        yield
