"""What a loss curve says of itself and of another."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from diagnose.test_diagnose import longer, record, trial
from ottava.diagnose.diagnose import diagnose
from ottava.diagnose.loss import LossCurve, event
from ottava.record.reader import Run, Table

STEPS = np.arange(1, 201)


def falling(seed: int = 0, noise: float = 0.02) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return 2 + 3 * np.exp(-STEPS / 40) + noise * generator.standard_normal(len(STEPS))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.2])
def test_a_falling_curve_does_not_diverge(seed: int, noise: float) -> None:
    assert LossCurve(STEPS, falling(seed, noise)).diverged == "no"


@pytest.mark.parametrize("start", [60, 120, 180])
def test_a_rise_for_good_is_found_where_it_begins(start: int) -> None:
    loss = falling() + np.where(start < STEPS, 0.1 * (STEPS - start), 0)
    curve = LossCurve(STEPS, loss)
    assert curve.diverged == "yes"
    assert start < curve.diverged_at < start + 12


def test_a_run_that_is_wild_from_the_start_diverges() -> None:
    """Its own noise does not hide that it ends at twice its lowest loss."""
    generator = np.random.default_rng(0)
    loss = 6 + 20 * (STEPS > 12) + 5 * generator.standard_normal(len(STEPS)) * (STEPS > 12)
    assert LossCurve(STEPS, loss).diverged == "yes"


def test_a_spike_that_heals_is_no_divergence() -> None:
    loss = falling()
    loss[100:104] += 2
    curve = LossCurve(STEPS, loss)
    assert curve.diverged == "no"
    assert [step for step, _ in curve.spikes] == [101.0]
    assert curve.recovery == 4
    assert curve.spike_rate == 5


def test_losses_that_are_not_finite_until_the_end_are_divergence() -> None:
    loss = falling()
    loss[150:] = math.nan
    assert LossCurve(STEPS, loss).diverged_at == 151


@pytest.mark.parametrize("loss", [np.full(200, math.nan), np.array([])])
def test_no_loss_says_nothing(loss: np.ndarray) -> None:
    curve = LossCurve(STEPS[: len(loss)], loss)
    assert curve.diverged == "no"
    assert curve.spikes == []


def test_gap_to_another_curve() -> None:
    late, drift, error = LossCurve(STEPS, 1.02 * falling(1)).gap(LossCurve(STEPS, falling(0)))
    assert late == pytest.approx(2, abs=4 * error + 0.3)
    assert abs(drift) < 1
    assert 0 < error < 1


def test_jumps_are_measured_in_noise() -> None:
    loss = falling()
    loss[120:] += 1.0
    jumps = LossCurve(STEPS, loss).jumps
    assert jumps[120] > 20
    assert np.nanmax(np.delete(jumps, range(120, 124))) < 6


def test_two_losses_that_differ_much_do_not_make_the_third_go_wrong() -> None:
    assert LossCurve(STEPS[:5], np.array([3.3, 1.9, 2.6, 0.8, 1.3])).onset == math.inf
    assert LossCurve(STEPS[:4], np.array([4.6, 4.5, 60.0, 5.0])).onset == 3


def test_a_loss_that_ends_as_nan_is_no_jump_that_came_back() -> None:
    """A jump that comes back is forgotten when NaN stays; a loss that has left for good before it is another matter."""
    steps = np.arange(1, 61)
    noise = 4 + 0.01 * np.random.default_rng(0).standard_normal(60)
    for jump, found in ((range(20, 21), ("not finite", 41)), (range(20, 41), ("leaves", 20))):
        loss = np.where(np.isin(steps, jump), 9.0, noise)
        happened = event(LossCurve(steps, np.where(steps > 40, np.nan, loss)))
        assert happened is not None
        assert (happened.kind, happened.step) == found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("gap", [1.0, 1.04, 1.25])
def test_noise_hides_no_lasting_gap_to_a_good_run(seed: int, gap: float) -> None:
    """Both saw the same batches, whose noise is larger than the gap."""
    random = np.random.default_rng(seed)
    steps, batch = np.arange(1, 161), 1 + 0.3 * random.random(160)
    good = (0.03 + 0.1 * np.exp(-steps / 30)) * batch
    bad = good * gap * (1 + 0.05 * random.standard_normal(160))
    found = event(LossCurve(steps, bad), LossCurve(steps, good))
    lasts = found is not None and found.stays is not None
    assert lasts == (gap > 1.1), found
    assert not lasts or "above the good run's" in found.sentence or "stays above" in found.sentence


def test_a_schedule_that_only_rises_is_told_once_it_has_lost_more_than_was_learned(tmp_path: Path) -> None:
    """A warm-up rises, too, and a loss that comes back to where it began, or a rate that falls again, is no proof."""

    def said(name: str, loss: Callable[[int], float], rate: Callable[[int], float]) -> list[str]:
        lines = (trial(5, 0.9), trial(20, 0.9))
        run = record(tmp_path / name, lambda s: {"loss": loss(s), "lr": rate(s)}, experiments=lines)
        return [finding.id for finding in diagnose(run).findings]

    lost = lambda s: 4.0 - 0.1 * s if s < 15 else 2.6 * 1.3 ** (s - 15)  # noqa: E731
    grows = lambda s: 1e-3 * 1.2**s  # noqa: E731
    assert said("lost", lost, grows) == ["O12"]
    assert said("warm-up", lambda s: 4.0 - 0.08 * s, grows) == []
    assert said("falls again", lost, lambda s: grows(min(s, 60 - s))) == []
    assert said("keeps a part", lambda s: lost(min(s, 16)) + 1e-3 * (s % 2), grows) == []


def test_a_loss_that_was_never_a_number_has_happened(tmp_path: Path) -> None:
    """Written as NaN in every step; a loss that nobody wrote is unknown."""
    broken = record(tmp_path / "broken", lambda s: {"loss": math.nan})
    unknown = record(tmp_path / "unknown", lambda s: {"loss": None})
    assert diagnose(broken).event == "The loss is not finite from step 1 on."
    assert diagnose(unknown).event == ""
    live = Run.of(tmp_path / "nowhere", {}, {"steps.jsonl": [{"step": 1, "loss": "nan"}, {"step": 2}]}, Table.of(2, {}))
    assert LossCurve.of(live).broken.tolist() == [True, False]
    assert diagnose(record(tmp_path / "late", lambda s: {"loss": None if s < 9 else math.inf})).event.endswith(
        "step 9 on."
    )


def test_a_loss_leaves_for_good_where_it_jumps_and_not_at_a_wiggle_before(tmp_path: Path) -> None:
    """A smooth loss has next to no noise, so its running median calls a wiggle a spike."""
    wiggles = lambda s: 0.9 * 0.93**s + (0.02 if s == 21 else 0.0)  # noqa: E731
    answer = diagnose(record(tmp_path / "run", lambda s: {"loss": wiggles(s) if s < 31 else 1.2}))
    assert answer.event == "The loss leaves the band of its own noise at step 31 and stays above it."
    assert answer.event in answer.sentence


def test_a_warm_up_that_is_longer_than_the_run_and_gradients_that_nobody_takes_are_told(tmp_path: Path) -> None:
    """A hundred steps at once that help by one percent say little, but where the rate has only risen."""
    tries = [{**longer(s), "loss": 1.0, "loss_after": 0.9999, "loss_longer": 0.99} for s in (5, 10, 20, 30)]
    for name, rate, said in (("rises", lambda s: 1e-6 * s, ["O13"]), ("stays", lambda s: 1e-6, [])):
        run = record(tmp_path / name, lambda s, rate=rate: {"lr": rate(s), "loss": 1.0 - 1e-4 * s}, experiments=tries)
        assert [finding.id for finding in diagnose(run).findings] == said, name
    none = record(tmp_path / "none", lambda s: {"grad_norm": 1.0, "grad_norm_used": float(s < 20)})
    last = record(tmp_path / "last", lambda s: {"grad_norm": 1.0, "grad_norm_used": float(s not in (20, 40))})
    (found,) = diagnose(none).findings
    assert (found.id, found.steps) == ("O1", [20])
    assert not diagnose(last).findings


def test_a_loss_that_does_not_depend_on_the_model_is_told(tmp_path: Path) -> None:
    """As of DPO whose reference is the policy itself. Not told: one batch, a rate of 0, and a loss that is done."""

    def said(name: str, value: float, **other: float) -> list[str]:
        run = record(tmp_path / name, lambda s: {"loss": value if s > 9 else 2.0 - 0.1 * s, "input_hash": s, **other})
        return [finding.title for finding in diagnose(run).findings]

    assert said("constant", math.log(2)) == ["The loss does not measure the model"]
    assert said("same", math.log(2), input_hash=3.0, label_hash=3.0) == []
    assert "The loss does not measure the model" not in said("still", math.log(2), lr=0.0)
    assert said("done", 0.0) == []


def test_a_sum_of_losses_that_falls_does_not_stay_at_the_guess_of_one() -> None:
    steps = np.arange(60)
    falls, stays = 5.3 + 11 * np.exp(-steps / 10), np.full(60, 4.2)
    assert event(LossCurve(steps, falls), None, guess=4.16) is None
    assert event(LossCurve(steps, stays), None, guess=4.16).kind == "flat"
