"""Copies numbers from a device to the host without waiting, and reads them when they have arrived.

To read a number from a GPU, the host waits for all queued work, and the GPU then idles while the host queues the next
step. A copy into pinned memory is queued like a kernel instead; an event behind it tells when it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ottava.measure.tally import Tallies
from ottava.record.schema import SlotKey
from ottava.watching.training import Drained


class Amaxes(NamedTuple):
    """The amaxes of one step."""

    step: int
    keys: Sequence[SlotKey]
    amax: Sequence[float]
    scale_inv: Sequence[float]
    """NaN where a cast has more than one scale."""


class Ended(NamedTuple):
    """A step that has ended, but whose numbers may not have arrived yet."""

    step: int
    numbers: dict[str, float]
    tallies: Tallies[SlotKey]
    keys: Sequence[SlotKey]
    """Casts of the amaxes."""
    reading: Reading
    """Amaxes, scales, and the loss of each micro-batch."""
    looked: bool
    training: Drained


class Reading:
    """Begins to copy tensors of any shape, with their values at this point of their streams.

    There is one copy per device, with an event behind each copy from a CUDA device.

    Args:
        tensors: on any device. Those of a CUDA device arrive later, as fp32; all others at once.

    Example:
        >>> reading = Reading([torch.tensor([1.0, 2.0]), torch.tensor(3.5)])
        >>> reading.ready(), reading.values()
        (True, [[1.0, 2.0], [3.5]])
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sizes = [tensor.numel() for tensor in tensors]
        self._copies: list[tuple[list[int], Tensor, torch.cuda.Event | None]] = []
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            members = [i for i, tensor in enumerate(tensors) if tensor.device == device]
            flat = [tensors[i].detach().reshape(-1) for i in members]
            if device.type != "cuda":
                self._copies.append((members, torch.cat(flat).cpu(), None))
                continue
            joined = torch.cat([part.to(torch.float32) for part in flat])
            host = torch.empty(joined.shape, dtype=torch.float32, pin_memory=True).copy_(joined, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(device))
            self._copies.append((members, host, arrived))

    def ready(self) -> bool:
        """Whether the numbers have arrived; never waits."""
        return all(arrived is None or arrived.query() for _, _, arrived in self._copies)

    def values(self) -> list[list[float]]:
        """The numbers of each tensor; waits for them.

        Raises:
            RuntimeError: the device failed before the copy.
        """
        numbers: dict[int, list[float]] = {}
        for members, host, arrived in self._copies:
            if arrived is not None:
                arrived.synchronize()
            parts = host.split([self._sizes[i] for i in members])
            numbers |= {i: part.tolist() for i, part in zip(members, parts, strict=True)}
        return [numbers[i] for i in range(len(self._sizes))]
