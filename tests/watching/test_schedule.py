"""Which steps are looked at, and what makes it more of them."""

from __future__ import annotations

import math
import random

import pytest
import torch

import ottava
from ottava.measure.limits import robust_z
from ottava.measure.tally import Tally
from ottava.measure.walk import measure
from ottava.record.schema import SlotKey
from ottava.watching.config import Period, Triggers
from ottava.watching.schedule import Schedule

KEY = SlotKey("fc2", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")


@pytest.mark.parametrize("every", [1, 2, 7, 50, 64])
def test_looks_are_powers_of_two_and_then_regular(every: int) -> None:
    """The first steps are where delayed scaling is unsettled."""
    schedule = Schedule(every, Triggers())
    looked = [step for step in range(1, 200) if schedule.looks(step)]
    early = [2**i for i in range(10) if 2**i < every]
    assert looked == sorted({*early, *range(every, 200, every)})


def test_a_burst_is_followed_by_rest() -> None:
    """Every step for `burst` steps, and no new burst before `cooldown` steps have passed."""
    schedule = Schedule(1000, Triggers(burst=3, cooldown=10))
    assert schedule.start_burst(100)
    assert [schedule.looks(s) for s in (101, 102, 103, 104)] == [True, True, True, False]
    assert not schedule.start_burst(109)
    assert schedule.start_burst(110)


def test_a_resumed_schedule_goes_on_where_it_was() -> None:
    """The burst, the rest after it, and what a loss is compared with."""
    whole, resumed = Schedule(1000, Triggers(burst=8, cooldown=20)), Schedule(1000, Triggers(burst=8, cooldown=20))
    for value in losses():
        whole.loss(value)
    assert whole.start_burst(40)
    events = [{"step": 3, "kind": "burst", "until": 11}, {"step": 40, "kind": "burst", "until": 48}, {"step": 41}]
    resumed.resume(events, [*losses(), math.nan])
    assert [resumed.looks(step) for step in range(41, 60)] == [whole.looks(step) for step in range(41, 60)]
    assert resumed.loss(4.0) == whole.loss(4.0) is not None
    assert not resumed.start_burst(59)
    assert resumed.start_burst(60)


def losses(count: int = 40) -> list[float]:
    source = random.Random(0)
    return [3.0 - 0.01 * i + source.gauss(0, 0.02) for i in range(count)]


def test_a_spike_is_a_trigger_and_noise_is_none() -> None:
    """On a falling, noisy loss."""
    schedule = Schedule(50, Triggers(loss_z=6))
    assert [schedule.loss(value) for value in losses()] == [None] * 40
    spike = schedule.loss(4.0)
    assert spike is not None
    assert (spike.reason, spike.threshold) == ("loss_z", 6)
    assert spike.value == pytest.approx(robust_z(4.0, losses()[-32:]))


def test_the_first_losses_are_no_spikes() -> None:
    """There is nothing to compare them with."""
    schedule = Schedule(50, Triggers())
    assert [schedule.loss(value) for value in (1.0, 100.0, 1.0, 1e6)] == [None] * 4


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_a_trigger(loss: float) -> None:
    """At once, and it does not enter the window."""
    schedule = Schedule(50, Triggers())
    found = schedule.loss(loss)
    assert found is not None
    assert found.reason == "nonfinite"
    for value in losses():
        assert schedule.loss(value) is None
    assert Schedule(50, Triggers(nonfinite=False)).loss(loss) is None


def test_triggers_of_a_look_name_the_worst_tensor() -> None:
    """Clipping, rows that are noise, and infinities, from real casts."""
    torch.manual_seed(0)
    x = torch.randn(64, 256)
    spec = ottava.QuantizationSpec(ottava.E4M3)
    good = measure(x, ottava.quantize(x, spec))
    clipped = measure(x, ottava.quantize(x, spec, scale=torch.tensor(4000.0)))
    rows = x.clone()
    rows[0] *= 1e6
    flushed = measure(rows, ottava.quantize(rows, spec))
    wrong = x.clone()
    wrong[0, 0] = math.inf
    infinite = measure(wrong, ottava.quantize(x, spec))
    schedule = Schedule(50, Triggers())
    assert schedule.tallies({KEY: good}) == []
    for tally, reason in ((clipped, "clipping"), (flushed, "row_sqnr"), (infinite, "nonfinite")):
        found = schedule.tallies({KEY._replace(layer="other"): good, KEY: tally})
        assert reason in [trigger.reason for trigger in found]
        assert {(trigger.layer, trigger.tensor) for trigger in found} == {("fc2", "input")}
    assert schedule.tallies({KEY: Tally()}) == []
    router = KEY._replace(layer="mlp.gate", source="hook")  # which nothing casts
    assert [trigger.reason for trigger in schedule.tallies({router: flushed})] == []
    assert "nonfinite" in [trigger.reason for trigger in schedule.tallies({router: infinite})]


def test_scales_that_are_wrong_drift_or_hit_the_end_are_triggers() -> None:
    """A predicted scale far from the current one, a scale that leaves its own past, a saturated history."""
    torch.manual_seed(0)
    x = torch.randn(64, 256)
    spec = ottava.QuantizationSpec(ottava.E4M3, scaling="delayed")
    key = KEY._replace(recipe="delayed", scaling="delayed")

    def cast(octaves: float, x: torch.Tensor = x) -> Tally:
        return measure(x, ottava.quantize(x, spec, scale=2.0**octaves * 448 / x.abs().amax()))

    def reasons(schedule: Schedule, tally: Tally) -> dict[str, float]:
        return {found.reason: found.value for found in schedule.tallies({key: tally})}

    for octaves in (-5.0, 5.0):
        assert reasons(Schedule(50, Triggers()), cast(octaves))["scale_error"] == pytest.approx(5.0, abs=1e-5)
        assert "scale_error" not in reasons(Schedule(50, Triggers(scale_error=5.5)), cast(octaves))
    assert "scale_error" not in reasons(Schedule(50, Triggers()), cast(3.0))

    schedule = Schedule(50, Triggers())
    sizes = [1.0, 2.0, 0.5, 1.0, 2.0**-7, 2.0**9, 1.0]
    drifts = [reasons(schedule, cast(0.0, x * size)).get("scale_drift") for size in sizes]
    assert drifts[:5] + drifts[6:] == [None] * 6  # four looks come first; 7 octaves are within the limit
    assert drifts[5] == pytest.approx(9.0, abs=1e-5)

    tiny = x * 2.0**-140  # amax of some 1e-42 asks for more than fp32 holds
    ends = reasons(Schedule(50, Triggers()), measure(tiny, ottava.quantize(tiny, spec, scale=torch.tensor(3.4e38))))
    assert ends["history"] == pytest.approx(3.4e38)
    off = Schedule(50, Triggers(scale_error=None, scale_drift=None, history=False))
    assert set(reasons(off, cast(5.0))) == {"clipping", "row_sqnr"}


def test_periods_take_the_place_of_regular_looks() -> None:
    """A burst looks at all tensors."""
    periods = [Period(every=10, tensors=["X"]), Period(ranges=[(3, 4)])]  # type: ignore[arg-type]
    schedule = Schedule(50, Triggers(burst=2), periods)
    assert [s for s in range(1, 25) if schedule.looks(s)] == [3, 4, 10, 20]
    assert schedule.only(3) == [periods[1]]
    assert schedule.only(10) == [periods[0]]
    assert schedule.start_burst(11)
    assert (schedule.looks(12), schedule.only(12), schedule.looks(14)) == (True, None, False)


def test_triggers_can_be_switched_off() -> None:
    """One by one."""
    x = torch.randn(64, 256)
    tally = measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3), scale=torch.tensor(4000.0)))
    assert Schedule(50, Triggers(clipping=None, row_sqnr_db=None, nonfinite=False)).tallies({KEY: tally}) == []
