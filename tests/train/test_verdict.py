"""The verdict and the noise: its limits, and its words if the noise is unknown."""

import math

import pytest

from ottava.train.verdict import MAX_SEEDS, UNIFORM_LOSS, Noise, judge

SEEDS = Noise(losses=(1.700, 1.721, 1.712))


def test_noise_of_three_seeds_worked_by_hand() -> None:
    """Mean 1.711, squares 121 + 100 + 1 = 222e-6, std sqrt(111e-6); t(2) = 4.303; limit 4.303 * std * sqrt(2)."""
    assert SEEDS.spread == pytest.approx(0.021)
    assert SEEDS.std == pytest.approx(math.sqrt(111e-6))
    assert SEEDS.limit == pytest.approx(4.303 * math.sqrt(222e-6))


def test_limit_is_never_below_the_spread() -> None:
    """Ten losses 1, 1.5 (eight times), 2: std sqrt(0.5 / 9) = 0.236, and 2.262 * 0.236 * sqrt(2) = 0.754 < 1."""
    noise = Noise(losses=(1.0, *(1.5,) * (MAX_SEEDS - 2), 2.0))
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


def test_more_seeds_than_the_table_has_are_refused() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_SEEDS}"):
        judge("r", 1.7, 1.7, Noise(losses=(1.7,) * (MAX_SEEDS + 1)))
