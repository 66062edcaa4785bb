"""Guarded scaling: the predicted scale where it is good, the current one where it would clip or waste, exactly."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ottava
from ottava.engine.quantizer import Quantizer
from ottava.numerics.formats import Format
from scaling_samples import (
    GUARDED,
    amax_of,
    cast,
    door_after,
    everything,
    roll,
    same_operand,
    unchanged,
    was_cast_with,
)

MAGNITUDES = st.floats(2.0**-20, 2.0**20, width=32)


@settings(max_examples=60)
@given(
    steps=st.lists(st.lists(MAGNITUDES, min_size=1, max_size=3), min_size=1, max_size=8),
    fmt=st.sampled_from([ottava.E4M3, ottava.E5M2]),
    margin=st.integers(0, 2),
    guard_bits=st.integers(1, 5),
)
def test_guarded_is_delayed_where_that_is_good_and_current_elsewhere(
    steps: list[list[float]], fmt: Format, margin: int, guard_bits: int
) -> None:
    """Each cast: amax * scale in (max / 2**guard_bits .. max), or the very bits of current scaling. Same histories."""
    guarded = replace(GUARDED, format=fmt, margin=margin, guard_bits=guard_bits)
    delayed, current = replace(guarded, scaling="delayed"), replace(guarded, scaling="current")
    door, twin, fired_steps = Quantizer(), Quantizer(), 0
    for micro_batches in steps:
        fired = False
        for amax in micro_batches:
            x = amax_of(amax)
            got, predicted = cast(door, x, guarded), cast(twin, x, delayed)
            exact = ottava.quantize(x, current)
            top = torch.tensor(amax) * (door.scale if door.scale > 0 else exact.scale_inv.reciprocal().squeeze())
            if fmt.max * 2.0**-guard_bits <= top.item() <= fmt.max or door.scale == 0:
                assert torch.equal(got.scale_inv, predicted.scale_inv)
                assert torch.equal(got.data.view(torch.uint8), predicted.data.view(torch.uint8))
            else:
                assert torch.equal(got.scale_inv, exact.scale_inv)
                assert torch.equal(got.data.view(torch.uint8), exact.data.view(torch.uint8))
                fired |= not torch.equal(got.scale_inv, predicted.scale_inv)
            assert amax / got.scale_inv.item() <= fmt.max * (1 + 2.0**-22)  # scale and product are rounded once each
        fired_steps += fired
        roll(door)
        roll(twin)
        assert torch.equal(door.amax_history, twin.amax_history)
        assert torch.equal(door.scale, twin.scale)
        assert (door.guard_count.item(), twin.guard_count.item()) == (fired_steps, 0)


def test_guard_fires_above_the_top_and_below_its_octaves() -> None:
    """Scale 224 from amax 2, guard_bits 3: 2 (448) and 0.25 (56) pass, one ulp beyond each is cast exactly."""
    up, down = (torch.nextafter(torch.tensor(v), torch.tensor(t)).item() for v, t in ((2.0, 9.0), (0.25, 0.0)))
    for amax, count in ((2.0, 0), (up, 1), (0.25, 0), (down, 1), (0.0, 0)):
        door = door_after(2.0, spec=GUARDED)
        got = cast(door, amax_of(amax), GUARDED)
        assert was_cast_with(got, 224) == (count == 0)
        assert same_operand(got, ottava.quantize(amax_of(amax), GUARDED)) == (count == 1 or amax == 2.0)
        roll(door)
        assert door.guard_count.item() == count


def test_guard_does_not_count_in_evaluation() -> None:
    """A validation batch 100 times larger is cast with its own scale, and leaves no trace."""
    door = door_after(2.0, spec=GUARDED)
    before = everything(door)
    got = cast(door, amax_of(200.0), GUARDED, record=False)
    assert same_operand(got, ottava.quantize(amax_of(200.0), GUARDED))
    assert unchanged(door, before)
