"""The rule of a boundary, in numbers; that one update serves many doors is in test_state."""

from __future__ import annotations

import torch

from ottava.engine.quantizer import Quantizer
from ottava.engine.windows import roll_windows
from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.tensor import QuantizationSpec


def test_each_door_moves_by_its_own_spec_and_only_where_due() -> None:
    """Two specs, an idle door, one that is not due, one without state: amax in front, scale = max / largest."""
    newest = QuantizationSpec(E5M2, scaling="delayed", amax_history_len=2, amax_compute_algo="most_recent")
    largest = QuantizationSpec(E4M3, scaling="delayed", amax_history_len=3)
    doors = [Quantizer() for _ in range(5)]
    for door, spec in zip(doors, (largest, newest, largest, largest), strict=False):
        door.prepare(spec)
        door.staged.fill_(9.0)
    for amaxes in ([7.0, 4.0, 0.0, 1.0, 5.0], [3.5, 2.0, 0.0, 1.0, 5.0]):
        lanes = torch.zeros(4, 5)
        lanes[0], lanes[3] = torch.tensor(amaxes), torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])
        roll_windows(doors, lanes * lanes[3])
    assert [door.amax_history.tolist() for door in doors[:4]] == [[3.5, 7, 0], [2, 4], [0, 0, 0], [0, 0, 0]]
    assert [float(door.scale) for door in doors[:4]] == [64.0, 57344 / 2, 0.0, 0.0]
    assert [float(door.staged[0]) for door in doors[:4]] == [0.0, 0.0, 0.0, 9.0]
