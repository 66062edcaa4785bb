"""The result of a demo as data: curves, verdicts, receipts and machine. summary.json holds it.

The report, the picture and the lines in the terminal are views of one `DemoResult`. All numbers are computed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ottava.base.text import finite, listed
from ottava.train.verdict import Noise, Verdict, has_diverged, judge

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
