"""The second warm-up of a learning rate: within steps only, on top of a schedule, and it ends."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from ottava.optim import AdamW, rewarm


def test_steps_are_lowered_and_the_schedule_is_not() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = StepLR(optimizer, 2, gamma=0.5)
    rewarm(optimizer, 3)
    moved = []
    for _ in range(6):
        before = float(weight.detach())
        weight.grad = -torch.ones(1, dtype=torch.float64)
        optimizer.step()
        schedule.step()
        moved.append(float(weight.detach()) - before)
    assert moved == pytest.approx([0.25, 0.5, 0.75 * 0.5, 0.5, 0.25, 0.25])
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_resumed_warm_up_goes_on_and_a_removed_one_ends() -> None:
    for done, remove, wanted in ((2, False, 0.75), (0, True, 1.0), (9, False, 1.0)):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = AdamW([weight], lr=1.0, weight_decay=0.0, eps=0.0)
        handle = rewarm(optimizer, 3, done=done)
        if remove:
            handle.remove()
        weight.grad = -torch.ones(1)
        optimizer.step()
        assert float(weight.detach()) == pytest.approx(wanted)
    with pytest.raises(ValueError, match="steps is -1"):
        rewarm(optimizer, -1)
    with pytest.raises(TypeError, match="steps is '3'; needs a whole number"):
        rewarm(optimizer, "3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got a StepLR; needs a torch\.optim\.Optimizer"):
        rewarm(StepLR(optimizer, 1), 3)  # type: ignore[arg-type]
