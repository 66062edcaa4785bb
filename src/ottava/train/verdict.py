"""Does FP8 cost accuracy? Compares final validation losses with the noise of training.

Two BF16 runs that differ only in their seed do not end at the same loss. Their spread is the yardstick: if a recipe
ends closer to BF16 than the BF16 seeds lie apart, the demo sees no cost.

    delta   = final validation loss of the recipe - that of BF16, same seed and same data order      nats per byte
    spread  = largest - smallest final loss among the BF16 seeds
    limit   = max(spread, t(n - 1) * std * sqrt(2))      distance of two runs that differ by seed alone, 95 %

    |delta| <= spread          inside the noise
    |delta| <= limit           beyond the spread, but so few seeds cannot tell: undecided
    |delta| >  limit           clearly outside

t is Student's two-sided 95 % quantile: a standard deviation of three seeds is itself uncertain. The factor sqrt(2) is
there because delta is the difference of two runs. With one seed there is no yardstick, and the verdict says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Student's t, two-sided 95 %, for 1, 2, ... degrees of freedom (any table; scipy.stats.t.ppf(0.975, df)).
_STUDENT_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

MAX_SEEDS = len(_STUDENT_T95) + 1
"""The table above ends here, and no demo needs more seeds."""

UNIFORM_LOSS = math.log(256)
"""Nats per byte of a model that gives every byte the same probability. A run that ends above it has diverged."""

Outcome = Literal["inside", "undecided", "worse", "better", "diverged", "unknown"]
"""The outcome of one recipe. "worse" and "better" are clearly outside; "unknown": the noise is not measured."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and half the width of its 95 % confidence interval (Student's t); None for one seed."""

    mean: float
    half: float | None

    @property
    def low(self) -> float:
        """Lower end; the mean for one seed."""
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        """Upper end; the mean for one seed."""
        return self.mean + (self.half or 0.0)

    @property
    def sign(self) -> int:
        """1 or -1 if the interval excludes 0, else 0; always 0 for one seed."""
        if self.half is None:
            return 0
        return (self.low > 0) - (self.high < 0)

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """The interval of the mean of independent values, at most MAX_SEEDS.

        Raises:
            ValueError: no value, or too many.

        Example:
            >>> Interval.of([1.0, 2.0, 3.0])                         # 4.303 * 1 / sqrt(3)
            Interval(mean=2.0, half=2.48433820832296)
        """
        if not 1 <= len(values) <= MAX_SEEDS:
            raise ValueError(f"an interval of {len(values)} values; needs 1 to {MAX_SEEDS}")
        mean = statistics.fmean(values)
        if len(values) == 1 or not math.isfinite(mean):
            return cls(mean, None)
        return cls(mean, _STUDENT_T95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values)))


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The seed-to-seed noise of BF16 at the end of training. All losses in nats per byte."""

    losses: tuple[float, ...]
    """Final validation loss of each BF16 seed that did not diverge."""

    @property
    def spread(self) -> float | None:
        """Largest minus smallest; None with fewer than two seeds."""
        return max(self.losses) - min(self.losses) if len(self.losses) > 1 else None

    @property
    def std(self) -> float | None:
        """Standard deviation with n - 1; None with fewer than two seeds."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else None

    @property
    def limit(self) -> float | None:
        """The distance that 95 of 100 pairs of seeds stay within; None with fewer than two seeds."""
        if self.spread is None or self.std is None:
            return None
        return max(self.spread, _STUDENT_T95[len(self.losses) - 2] * self.std * math.sqrt(2))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One recipe compared with BF16: difference, outcome and sentence."""

    recipe: str
    outcome: Outcome
    delta: float | None
    """Recipe minus BF16, nats per byte; None if one of them diverged."""
    sentence: str

    @property
    def is_bad(self) -> bool:
        """Whether the demo exits with 1: the recipe diverged, or ended clearly above the noise."""
        return self.outcome in ("diverged", "worse")


def has_diverged(final_loss: float) -> bool:
    """Whether training failed: the final loss is not finite, or above that of uniform guessing."""
    return not math.isfinite(final_loss) or final_loss > UNIFORM_LOSS


def judge(recipe: str, final_loss: float, bf16_loss: float, noise: Noise, *, diverged_at: int | None = None) -> Verdict:
    """Compares a recipe's final validation loss with that of BF16 at the same seed.

    Args:
        recipe: its name, for the sentence.
        final_loss, bf16_loss: nats per byte, on the same fixed validation batches.
        noise: the final losses of the BF16 seeds; one seed gives the outcome "unknown".
        diverged_at: the first step with a loss or gradient that is not finite; None without one.

    Raises:
        ValueError: more than MAX_SEEDS seeds.

    Example:
        >>> judge("tensorwise", 1.704, 1.700, Noise(losses=(1.700, 1.721, 1.712))).sentence
        'tensorwise ends 0.004 nats/byte above BF16 (seed spread 0.021): inside the noise'
    """
    if len(noise.losses) > MAX_SEEDS:
        raise ValueError(f"verdict: {len(noise.losses)} seeds; at most {MAX_SEEDS}: Student's t ends there")
    if diverged_at is not None or has_diverged(final_loss):
        sentence = f"{recipe} diverged {_when(final_loss, diverged_at)}"
        return Verdict(recipe=recipe, outcome="diverged", delta=None, sentence=sentence)
    if has_diverged(bf16_loss):
        sentence = f"{recipe} ends at {final_loss:.3f} nats/byte, but BF16 itself diverged: nothing to compare with"
        return Verdict(recipe=recipe, outcome="unknown", delta=None, sentence=sentence)
    delta = final_loss - bf16_loss
    outcome = _outcome(delta, noise)
    return Verdict(recipe=recipe, outcome=outcome, delta=delta, sentence=_sentence(recipe, delta, outcome, noise))


def _outcome(delta: float, noise: Noise) -> Outcome:
    if noise.spread is None or noise.limit is None:
        return "unknown"
    if abs(delta) <= noise.spread:
        return "inside"
    if abs(delta) <= noise.limit:
        return "undecided"
    return "worse" if delta > 0 else "better"


def _when(final_loss: float, diverged_at: int | None) -> str:
    if diverged_at is not None:
        return f"at step {diverged_at}: a loss or gradient that is not finite"
    if not math.isfinite(final_loss):
        return "by the end: its validation loss is not finite"
    return f"by the end: {final_loss:.3f} nats/byte is worse than guessing ({UNIFORM_LOSS:.3f})"


def _sentence(recipe: str, delta: float, outcome: Outcome, noise: Noise) -> str:
    if outcome == "unknown":
        return f"{recipe} ends {_distance(delta)}; the noise is unknown, because it needs two or more BF16 seeds"
    tails = {
        "inside": "inside the noise",
        "undecided": "beyond the spread of the seeds, but so few seeds cannot tell",
        "worse": "clearly outside the noise",
        "better": "clearly outside the noise, on the good side",
    }
    return f"{recipe} ends {_distance(delta)} (seed spread {noise.spread:.3f}): {tails[outcome]}"


def _distance(delta: float) -> str:
    if round(delta, 3) == 0:
        return "level with BF16 to 0.001 nats/byte"
    return f"{abs(delta):.3f} nats/byte {'above' if delta > 0 else 'below'} BF16"
