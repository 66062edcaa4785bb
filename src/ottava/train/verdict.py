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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from ottava.base.text import finite, listed

UNIFORM_LOSS = math.log(256)
"""Nats per byte of a model that gives every byte the same probability. A run that ends above it has diverged."""

Outcome = Literal["inside", "undecided", "worse", "better", "diverged", "unknown"]
"""The outcome of one recipe. "worse" and "better" are clearly outside; "unknown": the noise is not measured."""


def student_t95(freedom: int) -> float:
    """Student's two-sided 95 % quantile for so many degrees of freedom, one or more.

    P(|T| < sqrt(freedom) * tan(angle)) is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4), here bisected.

    Example:
        >>> [round(student_t95(n), 3) for n in (1, 2, 9, 1000)]
        [12.706, 4.303, 2.262, 1.962]
    """
    odd = freedom % 2

    def inside(angle: float) -> float:
        cosine, total = math.cos(angle), 0.0
        term = cosine if odd else 1.0
        for power in range(odd, freedom - 1, 2):
            total += term
            term *= (power + 1) / (power + 2) * cosine**2
        total *= math.sin(angle)
        return 2 / math.pi * (angle + total) if odd else total

    low, high = 0.0, math.pi / 2
    for _ in range(60):  # the width of a double
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < 0.95 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


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
        """The interval of the mean of independent values, one or more.

        Example:
            >>> round(Interval.of([1.0, 2.0, 3.0]).half, 3)         # 4.303 * 1 / sqrt(3)
            2.484
        """
        mean = statistics.fmean(values)
        if len(values) == 1 or not math.isfinite(mean):
            return cls(mean, None)
        return cls(mean, student_t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)))


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
        return max(self.spread, student_t95(len(self.losses) - 1) * self.std * math.sqrt(2))


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

    Example:
        >>> judge("tensorwise", 1.704, 1.700, Noise(losses=(1.700, 1.721, 1.712))).sentence
        'tensorwise ends 0.004 nats/byte above BF16 (seed spread 0.021): inside the noise'
    """
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


# --- the result of a demo: the report, the picture and the terminal are views of it; summary.json holds it -----------

SCHEMA_VERSION = 1
REFERENCE = "bf16"
"""All other recipes are compared with this one."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One finished training run. Losses in nats per byte; training losses start at step 1."""

    recipe: str
    seed: int
    losses: Sequence[float]
    """Training loss of each step, as the optimizer saw it."""
    validation: Sequence[tuple[int, float]]
    """Step and loss on the fixed validation batches, under the recipe of training. The last entry is the result. A
    diverged run ends with NaN."""
    high_precision_loss: float
    """Loss of the final weights evaluated in BF16: it shows the difference in the weights alone."""
    seconds_per_step: float
    """Median over the steps, without evaluation."""
    tokens_per_step: int
    diverged_at: int | None = None
    """The first step with a loss or gradient that is not finite."""

    @property
    def label(self) -> str:
        """Recipe and seed, as in "bf16, seed 1"."""
        return f"{self.recipe}, seed {self.seed}"

    @property
    def final_loss(self) -> float:
        """Validation loss at the end of training."""
        return self.validation[-1][1]

    @property
    def diverged(self) -> bool:
        """Whether training failed: a loss is not finite, or the result is worse than guessing."""
        return self.diverged_at is not None or has_diverged(self.final_loss)

    @property
    def tokens_per_second(self) -> float:
        """Speed of the median step."""
        return self.tokens_per_step / self.seconds_per_step


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """Facts of the engine about one FP8 run, layer by layer."""

    receipt: Sequence[Mapping[str, Any]]
    """One row for each GEMM of the last forward and backward, from `ottava.receipt`."""
    fp8_fraction: float
    """Share of the GEMM work with quantized operands."""
    skipped: Mapping[str, str]
    """Layers that `convert` skipped, and why."""
    numbers: Sequence[Mapping[str, object]]
    """One row for each tensor of each layer on one more training batch, from `ottava.debug.observe`."""


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """A whole demo.

    Raises:
        ValueError: there is no BF16 run, or none with the seed of an FP8 run: nothing to compare with.
    """

    runs: Sequence[RunResult]
    machinery: Mapping[str, Machinery]
    """For each FP8 recipe."""
    command: str
    """The exact command of the demo."""
    config: str
    """The training config of the BF16 run, as YAML; the others differ in `recipe` and `seed` only."""
    text: str
    """Description of the training text."""
    parameters: int
    facts: Mapping[str, str]
    """Versions and machine, by name."""
    training_seconds: float
    """Time in the training steps of all runs, without evaluation."""

    def __post_init__(self) -> None:
        seeds = {run.seed for run in self.runs if run.recipe == REFERENCE}
        missing = [run.label for run in self.runs if run.seed not in seeds]
        if not seeds or missing:
            raise ValueError(f"demo result: no {REFERENCE} run with the seed of {missing or 'any run'}; add one")

    @property
    def references(self) -> list[RunResult]:
        """The BF16 runs, one for each seed."""
        return [run for run in self.runs if run.recipe == REFERENCE]

    @property
    def candidates(self) -> list[RunResult]:
        """The FP8 runs."""
        return [run for run in self.runs if run.recipe != REFERENCE]

    @property
    def emulated(self) -> bool:
        """Whether a GEMM with FP8 operands ran without FP8 hardware."""
        rows = (row for machinery in self.machinery.values() for row in machinery.receipt)
        return any(row["fp8"] and not row["native"] for row in rows)

    def reference_of(self, run: RunResult) -> RunResult:
        """The BF16 run with the same seed, hence the same initial weights and data."""
        return next(other for other in self.references if other.seed == run.seed)

    @cached_property
    def noise(self) -> Noise:
        """The seed-to-seed noise of BF16."""
        return Noise(losses=tuple(run.final_loss for run in self.references if not run.diverged))

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """One for each FP8 run, in order."""
        return [
            judge(
                run.recipe,
                run.final_loss,
                math.nan if self.reference_of(run).diverged else self.reference_of(run).final_loss,
                self.noise,
                diverged_at=run.diverged_at,
            )
            for run in self.candidates
        ]

    @property
    def news(self) -> list[Verdict]:
        """The verdicts, worst first."""
        severity = ("diverged", "worse", "undecided", "unknown", "inside", "better")
        return sorted(self.verdicts, key=lambda verdict: severity.index(verdict.outcome))

    def speed_ratio(self, run: RunResult) -> float:
        """Tokens per second divided by those of BF16 at the same seed. The runs were interleaved."""
        return self.reference_of(run).seconds_per_step / run.seconds_per_step

    @cached_property
    def headline(self) -> str:
        """The whole demo in one sentence; bad news first."""
        verdicts = self.verdicts
        if self.reference_of(self.runs[0]).diverged:
            return "BF16 itself diverged: nothing to compare with"
        for outcome, words in (("diverged", "diverged"), ("worse", "clearly worse than BF16")):
            if names := [verdict.recipe for verdict in verdicts if verdict.outcome == outcome]:
                verb = "" if outcome == "diverged" else "ends " if len(names) == 1 else "end "
                return f"{listed(names)} {verb}{words}"
        if not verdicts:
            return "BF16 alone, without an FP8 recipe to compare"
        if self.noise.spread is None:
            return "FP8 beside BF16, with no measure of the noise"
        if all(verdict.outcome == "inside" for verdict in verdicts):
            kind = "low-precision" if any("fp4" in verdict.recipe for verdict in verdicts) else "FP8"
            subject = {1: verdicts[0].recipe, 2: f"Both {kind} recipes"}.get(
                len(verdicts), f"All {len(verdicts)} {kind} recipes"
            )
            return f"{subject} {'ends' if len(verdicts) == 1 else 'end'} inside the noise of BF16"
        return "No recipe ends clearly worse than BF16"

    def to_dict(self) -> dict[str, Any]:
        """All numbers, ready for JSON: infinities and NaNs become None."""
        numbers: dict[str, Any] = finite(
            {
                "schema_version": SCHEMA_VERSION,
                "headline": self.headline,
                "unit": "nats per byte",
                "noise": {name: getattr(self.noise, name) for name in ("losses", "spread", "std", "limit")},
                "verdicts": [asdict(verdict) for verdict in self.verdicts],
                "runs": [self._run_dict(run) for run in self.runs],
                "machinery": {recipe: asdict(machinery) for recipe, machinery in self.machinery.items()},
                "command": self.command,
                "config": self.config,
                "text": self.text,
                "parameters": self.parameters,
                "facts": self.facts,
                "training_seconds": self.training_seconds,
            }
        )
        return numbers

    def _run_dict(self, run: RunResult) -> dict[str, object]:
        names = ("recipe", "seed", "final_loss", "high_precision_loss", "diverged_at", "tokens_per_second")
        numbers = {name: getattr(run, name) for name in (*names, "losses", "validation")}
        return numbers | {"speed_ratio": self.speed_ratio(run)}
