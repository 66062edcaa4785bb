"""Sums statistics of every cast of a model on the GPU: no step waits for the host, and CUDA graphs can capture it.

`observe` reads numbers back at every cast. Here each door has slots on the device. A small kernel
(`kernels.triton.statistics`) adds the sums of a sample of the cast to them, and `tallies` reads them.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from ottava.base.errors import need
from ottava.kernels.triton.statistics import fill_slot, new_slot, read_slot, supports_statistics
from ottava.measure.observer import Key, watch_doors
from ottava.measure.tally import Detail, Tally, tile_fields
from ottava.numerics.tensor import QuantizedTensor


class Slots:
    """Sums of the casts at the doors of a model, kept on the GPU until `tallies` reads them.

    Args:
        model: its ottava layers are watched, until `remove` or the end of a `with`.
        every: one tile of 16 x 128 elements in `every` is measured.
        detail: "exponents", or "numbers" for no histogram at all.
    Raises:
        ValueError: every is less than 1, or another detail.

    These tallies have only the histogram of exponents, and nothing about rows, blocks and scales, which need more than
    a tile. The first cast of each door makes its slot, so capture a CUDA graph after a warm-up, as torch asks for
    anyway; each replay reads phase and switch. Compiled code calls no hooks.

    Example:
        >>> import ottava
        >>> model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
        >>> report = ottava.convert(model, "tensorwise")
        >>> with Slots(model, every=8) as slots:
        ...     y = model(torch.ones(4, 64, dtype=torch.bfloat16))
        ...     slots.advance()
        >>> slots.tallies(), set(slots.refused.values())          # on a GPU: (layer, tensor, direction, spec) -> Tally
        ({}, {'triton: runs on cuda; got cpu'})
    """

    def __init__(self, model: nn.Module, *, every: int = 64, detail: Detail = "exponents") -> None:
        need("Slots", model, nn.Module)
        if every < 1:
            raise ValueError(f"Slots: every is {every}; needs 1 (each tile) or more")
        if detail not in ("numbers", "exponents"):
            raise ValueError(f"Slots: detail is {detail!r}; needs 'numbers' or 'exponents': tiles know no other blocks")
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.every = every
        self.refused: dict[Key, str] = {}
        """Casts that the kernel cannot measure -> the reason."""
        self._empty = new_slot(device, tile_fields(detail))
        self._slots: dict[Key, Tensor] = {}
        self._phase = torch.zeros((), dtype=torch.int64, device=device)
        self._on = torch.ones((), dtype=torch.int32, device=device)
        self._handles = watch_doors(model, self._take)

    def advance(self) -> None:
        """Selects other tiles: call it once a step, inside a graph or outside."""
        self._phase.add_(1)

    def switch(self, on: bool) -> None:
        """Turns measuring on or off, also in captured graphs. While it is off, a launched kernel returns at once."""
        self._on.fill_(int(on))

    def clear(self) -> None:
        """Resets all slots, in place."""
        for slot in self._slots.values():
            slot.copy_(self._empty)

    def tallies(self) -> dict[Key, Tally]:
        """The tallies since the last `clear`. Waits for the device."""
        return {key: Tally(**read_slot(slot)) for key, slot in self._slots.items()}

    def remove(self) -> None:
        """Stops measuring; the tallies stay."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _take(self, key: Key, x: Tensor, x_q: QuantizedTensor) -> None:
        if reason := supports_statistics(x, x_q):
            self.refused[key] = reason
            return
        if key not in self._slots:
            self._slots[key] = self._empty.to(x.device, copy=True)
        fill_slot(self._slots[key], x, x_q, every=self.every, phase=self._phase, on=self._on)
