"""What a step boundary does to the windows and scales of doors: the rule, in one update for all doors of a spec."""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.kernels.triton import roll as triton_roll
from ottava.quantized_tensor import QuantizationSpec
from ottava.quantizer import Quantizer, WeightQuantizer


class _Pack:
    """The buffers of all doors of one spec in some tensors, of which the doors' own are views.

    A boundary then costs some operations on vectors instead of some per door.
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
        """Whether it is still theirs: a door that was moved, copied or prepared anew has buffers of its own."""
        same = self.columns == columns and self.ids == [id(door) for door in doors]
        return same and all(door.pack is self for door in doors)


def roll_windows(doors: list[Quantizer], lanes: Tensor) -> None:
    """One fused update: every touched window takes its amax in, every scale follows; staging is cleared.

    The rule, per door that is due, with `last` its amax since the previous boundary:
        last == 0   idle: neither window nor scale moves
        else        window = [last, *window[:-1]];  scale = fmt.max * 2**-margin / max(window)
    Source: TransformerEngine common/recipe/delayed_scaling.cu, except that a non-finite amax never arrives here.

    lanes: (4, doors): amax, non-finite and guard, as `Quantizer.staged`, and 1 for a door that is due; where that is 0
        all are.
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
            door.cached = None  # the next forward casts anew, and its amax enters the next window
