"""The verdict and the noise: its limits, and its words if the noise is unknown."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from ottava.train.verdict import UNIFORM_LOSS, DemoResult, Noise, RunResult, judge, student_t95

SEEDS = Noise(losses=(1.700, 1.721, 1.712))


def test_noise_of_three_seeds_worked_by_hand() -> None:
    """Mean 1.711, squares 121 + 100 + 1 = 222e-6, std sqrt(111e-6); t(2) = 4.303; limit 4.303 * std * sqrt(2)."""
    assert SEEDS.spread == pytest.approx(0.021)
    assert SEEDS.std == pytest.approx(math.sqrt(111e-6))
    assert SEEDS.limit == pytest.approx(4.303 * math.sqrt(222e-6), rel=1e-4)


def test_quantiles_are_those_of_the_tables() -> None:
    """Two-sided 95 %, three digits behind the point; 1,000 degrees of freedom are nearly a normal distribution."""
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 10: 2.228, 29: 2.045, 30: 2.042, 120: 1.98, 1000: 1.962}
    assert {freedom: round(student_t95(freedom), 3) for freedom in table} == table


def test_limit_is_never_below_the_spread() -> None:
    """Ten losses 1, 1.5 (eight times), 2: std sqrt(0.5 / 9) = 0.236, and 2.262 * 0.236 * sqrt(2) = 0.754 < 1."""
    noise = Noise(losses=(1.0, *(1.5,) * 8, 2.0))
    assert noise.std == pytest.approx(0.2357, abs=1e-4)
    assert noise.limit == noise.spread == 1.0


@pytest.mark.parametrize(
    ("final", "outcome"),
    [(1.704, "inside"), (1.680, "inside"), (1.740, "undecided"), (1.660, "undecided"), (1.9, "worse"), (1.5, "better")],
)
def test_distance_to_bf16_decides_the_outcome(final: float, outcome: str) -> None:
    verdict = judge("r", final, 1.700, SEEDS)
    assert verdict.outcome == outcome
    assert verdict.is_bad == (outcome == "worse")
    assert verdict.delta == pytest.approx(final - 1.700)


def test_the_sentence_says_distance_side_spread_and_outcome() -> None:
    above, below = judge("tensorwise", 1.704, 1.700, SEEDS), judge("tensorwise", 1.5, 1.700, SEEDS)
    assert above.sentence == "tensorwise ends 0.004 nats/byte above BF16 (seed spread 0.021): inside the noise"
    assert "0.200 nats/byte below BF16" in below.sentence
    assert "0.000" not in judge("tensorwise", 1.7001, 1.700, SEEDS).sentence


def test_one_seed_leaves_the_noise_unknown() -> None:
    """Without a yardstick only divergence is bad, however far away a loss ends."""
    verdict = judge("r", 2.5, 1.7, Noise(losses=(1.7,)))
    assert verdict.outcome == "unknown"
    assert "noise is unknown" in verdict.sentence
    assert not verdict.is_bad


@pytest.mark.parametrize(("final", "diverged_at"), [(math.nan, 12), (math.nan, None), (math.inf, None), (5.6, None)])
def test_divergence_is_said_before_any_distance(final: float, diverged_at: int | None) -> None:
    """ln 256 = 5.545: a model that ends above it knows less than one that guesses."""
    assert abs(UNIFORM_LOSS - 5.545) < 1e-3
    for noise in (SEEDS, Noise(losses=(1.7,))):
        verdict = judge("nvfp4", final, 1.7, noise, diverged_at=diverged_at)
        assert verdict.outcome == "diverged"
        assert verdict.is_bad
        assert verdict.sentence.startswith("nvfp4 diverged")
        assert ("step 12" in verdict.sentence) == (diverged_at == 12)


def test_a_diverged_reference_is_not_held_against_the_recipe() -> None:
    verdict = judge("r", 1.7, math.nan, Noise(losses=(1.7, 1.8)))
    assert verdict.outcome == "unknown"
    assert "BF16 itself diverged" in verdict.sentence
    assert not verdict.is_bad


MakeRun = Callable[..., RunResult]
MakeDemo = Callable[[list[RunResult]], DemoResult]


def seeds(make_run: MakeRun) -> list[RunResult]:
    """Three BF16 seeds; their spread is 0.021."""
    return [make_run("bf16", seed, final=final) for seed, final in enumerate((1.700, 1.721, 1.712))]


def test_headline_has_the_worst_news_first(make_run: MakeRun, make_demo: MakeDemo) -> None:
    fine, worse = make_run("tensorwise", final=1.704), make_run("blockwise", final=1.9)
    broken = make_run("nvfp4", broken_at=60)
    demos = {
        "tensorwise ends inside the noise of BF16": [fine],
        "Both FP8 recipes end inside the noise of BF16": [fine, make_run("rowwise", final=1.71)],
        "blockwise ends clearly worse than BF16": [fine, worse],
        "nvfp4 diverged": [fine, worse, broken],
        "No recipe ends clearly worse than BF16": [fine, make_run("rowwise", final=1.74)],
        "BF16 alone, without an FP8 recipe to compare": [],
    }
    for headline, runs in demos.items():
        assert make_demo([*seeds(make_run), *runs]).headline == headline
    one_seed = make_demo([make_run("bf16"), fine])
    assert one_seed.headline == "FP8 beside BF16, with no measure of the noise"
    bad_reference = make_demo([make_run("bf16", broken_at=3), fine])
    assert bad_reference.headline == "BF16 itself diverged: nothing to compare with"


def test_news_are_sorted_worst_first_and_verdicts_stay_in_order(make_run: MakeRun, make_demo: MakeDemo) -> None:
    runs = [make_run("tensorwise", final=1.704), make_run("blockwise", final=1.9), make_run("nvfp4", broken_at=60)]
    demo = make_demo([*seeds(make_run), *runs])
    assert [verdict.recipe for verdict in demo.verdicts] == ["tensorwise", "blockwise", "nvfp4"]
    assert [verdict.recipe for verdict in demo.news] == ["nvfp4", "blockwise", "tensorwise"]


def test_a_diverged_seed_is_no_part_of_the_noise(make_run: MakeRun, make_demo: MakeDemo) -> None:
    demo = make_demo([*seeds(make_run)[:2], make_run("bf16", 2, broken_at=9), make_run("rowwise", final=1.71)])
    assert demo.noise.losses == (1.700, 1.721)


def test_speed_ratio_is_to_bf16_of_the_same_seed(usual_demo: DemoResult) -> None:
    """0.05 s a step against 0.1 s: half as fast."""
    assert [usual_demo.speed_ratio(run) for run in usual_demo.runs] == [1.0, 1.0, 1.0, 0.5, 0.5]


def test_json_has_every_number_and_null_for_what_is_not_finite(make_run: MakeRun, make_demo: MakeDemo) -> None:
    demo = make_demo([*seeds(make_run), make_run("nvfp4", broken_at=60)])
    summary = json.loads(json.dumps(demo.to_dict(), allow_nan=False))
    assert summary["schema_version"] == 1
    broken = summary["runs"][-1]
    assert broken["diverged_at"] == 60
    assert broken["final_loss"] is None
    assert broken["validation"][-1] == [60, None]
    assert summary["runs"][0]["losses"] == demo.runs[0].losses
    assert summary["noise"]["spread"] == pytest.approx(0.021)
    numbers = summary["machinery"]["nvfp4"]["numbers"]
    assert {row["sqnr_db"] for row in numbers if row["tensor"] == "weight"} == {None}  # infinite: the cast was exact


def test_a_recipe_without_its_bf16_seed_is_refused(make_run: MakeRun, make_demo: MakeDemo) -> None:
    with pytest.raises(ValueError, match="tensorwise, seed 7"):
        make_demo([make_run("bf16"), make_run("tensorwise", 7)])
    with pytest.raises(ValueError, match="no bf16 run"):
        make_demo([])


def test_a_run_that_ends_above_guessing_has_diverged(make_run: MakeRun) -> None:
    assert make_run("r", final=5.6).diverged
    assert not make_run("r", final=5.5).diverged
    assert math.isnan(make_run("r", broken_at=2).final_loss)
