"""States of torch's random generators: taken, put back, and kept as they were around a piece of work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


def random_states() -> dict[str, Tensor]:
    """Of the global CPU generator, and of those of the CUDA devices where any was used: uint8, by device.

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
    """Puts them back; those of devices that are not here are passed over."""
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state.cpu())
        elif torch.cuda.is_available() and int(device.rpartition(":")[2]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state.cpu(), device)


@contextmanager
def random_states_kept(states: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Leaves the generators as they were found; meanwhile they stand at `states`, if any are given."""
    found = random_states()
    if states is not None:
        set_random_states(states)
    try:
        yield
    finally:
        set_random_states(found)
