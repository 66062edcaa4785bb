"""A step boundary updates the windows and scales of doors by one rule, in one update for all doors of a spec."""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.engine.quantizer import Quantizer, WeightQuantizer
from ottava.kernels.triton import roll as triton_roll
from ottava.numerics.tensor import QuantizationSpec


class _Pack:
    """Stacked buffers of all doors of one spec; the doors hold views.

    So a boundary runs a few operations on vectors, and not a few for each door.
    """

    def __init__(self, doors: list[Quantizer], columns: list[int]) -> None:
        self.ids, self.columns = [id(door) for door in doors], columns  # a reference to a door would keep both alive
        device = doors[0].scale.device
        self.index = torch.tensor(columns, device=device)  # made once: making it waits for the device
        self.history = torch.stack([door.amax_history for door in doors])  # (T, L), newest first
        self.scale = torch.stack([door.scale for door in doors])
        self.nonfinite_count = torch.stack([door.nonfinite_count for door in doors])
        self.guard_count = torch.stack([door.guard_count for door in doors])
        self.staged = torch.stack([door.staged for door in doors])  # (T, 3)
        for i, door in enumerate(doors):
            door.amax_history, door.scale = self.history[i], self.scale[i]
            door.nonfinite_count, door.guard_count = self.nonfinite_count[i], self.guard_count[i]
            door.staged = self.staged[i]
            door.pack = self

    def holds(self, doors: list[Quantizer], columns: list[int]) -> bool:
        """Whether all doors still hold views: a moved, copied or newly prepared door has buffers of its own."""
        same = self.columns == columns and self.ids == [id(door) for door in doors]
        return same and all(door.pack is self for door in doors)


def roll_windows(doors: list[Quantizer], lanes: Tensor) -> None:
    """One fused update: each window takes its door's amax, each scale follows, and the staged amaxes become 0.

    The rule for a door that is due, with `last` its amax since the previous boundary:
        last == 0   idle: window and scale stay
        else        window = [last, *window[:-1]];  scale = fmt.max * 2**-margin / max(window)
    Source: TransformerEngine common/recipe/delayed_scaling.cu; but here no non-finite amax arrives.

    lanes: (4, doors): amax, non-finite and guard, as `Quantizer.staged`, and 1 for a door that is due. For other doors
        all four are 0.
    """
    groups: dict[tuple[QuantizationSpec, torch.device], list[int]] = {}
    for index, door in enumerate(doors):
        if door.spec is not None:
            groups.setdefault((door.spec, door.staged.device), []).append(index)
    for (spec, device), columns in groups.items():
        members = [doors[i] for i in columns]
        pack = members[0].pack
        if not isinstance(pack, _Pack) or not pack.holds(members, columns):
            pack = _Pack(members, columns)
        if triton_roll.supports_roll(spec, pack.history, lanes) is None:
            counts = pack.nonfinite_count, pack.guard_count
            triton_roll.roll(spec, lanes, pack.index, pack.history, pack.scale, *counts, pack.staged)
            continue
        last, nonfinite, guard, due = lanes.to(device)[:, pack.index]
        touched = last > 0
        rolled = torch.cat([last[:, None], pack.history[:, :-1]], dim=1)
        pack.history.copy_(torch.where(touched[:, None], rolled, pack.history))
        scale, usable = spec.from_window(pack.history)
        pack.scale.copy_(torch.where(touched & usable, scale, pack.scale))
        pack.nonfinite_count.add_(nonfinite.to(torch.int64))
        pack.guard_count.add_(guard.to(torch.int64))
        pack.staged.mul_(1 - due[:, None])
    for door in doors:
        if isinstance(door, WeightQuantizer) and door.spec is not None:
            door.cached = None  # the next forward casts again, so that its amax enters the next window
