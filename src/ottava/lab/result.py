"""What a study found: means over seeds with their intervals, and sentences that claim no more than these show.

Differences are paired: a recipe's loss minus BF16's with the same seed, which reads the same data from the same
weights. An interval is Student's, 95 %, over seeds. A claim needs an interval that excludes 0; of twenty claims about
nothing, one does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from ottava.base.text import data_frame, html_table, listed
from ottava.lab.casts import DISTRIBUTIONS
from ottava.lab.study import LabSettings, Measurement, operand_bits
from ottava.measure.tally import PARTS
from ottava.recipe import CELLS, GEMMS, Recipe
from ottava.train.summary import REFERENCE
from ottava.train.verdict import Interval

SCHEMA_VERSION = 1
UNBIASED = 0.05
"""A result is called unbiased only if its systematic share is that small, all of its interval."""
Outcome = Literal["worse", "better", "open", "diverged", "unknown"]
Bias = Literal["unbiased", "biased", "open", "exact"]


@dataclass(frozen=True)
class Finding:
    """One recipe against BF16."""

    recipe: str
    outcome: Outcome
    difference: Interval | None
    """Nats per byte; None if a run diverged."""
    sentence: str


@dataclass(frozen=True)
class LabResult:
    """The finished measurements of a study, at least one seed of every recipe."""

    settings: LabSettings
    measurements: Mapping[tuple[str, int], Measurement]
    command: str

    @cached_property
    def recipes(self) -> tuple[Recipe, ...]:
        """BF16 first."""
        return self.settings.all

    @property
    def others(self) -> list[str]:
        """Names without BF16."""
        return [recipe.name for recipe in self.recipes if recipe.name != REFERENCE]

    def of(self, recipe: str) -> list[Measurement]:
        """The measurements of a recipe, by seed."""
        return [
            one for (name, _), one in sorted(self.measurements.items(), key=lambda item: item[0][1]) if name == recipe
        ]

    def values(self, recipe: str, distribution: str, kind: str, place: str, name: str) -> list[float]:
        """One number of `casts.measured` over seeds; empty if the recipe has no such cast."""
        found = (one.casts[distribution][kind].get(place, {}).get(name) for one in self.of(recipe))
        return [value for value in found if value is not None]

    def interval(self, recipe: str, distribution: str, kind: str, place: str, name: str) -> Interval | None:
        """Its interval; None without a value."""
        values = self.values(recipe, distribution, kind, place, name)
        return Interval.of(values) if values else None

    def differences(self, recipe: str) -> list[float]:
        """Final loss minus BF16's, seed by seed, of runs that did not diverge."""
        base = {one.seed: one for one in self.of(REFERENCE)}
        pairs = [(one, base[one.seed]) for one in self.of(recipe) if one.seed in base]
        return [one.validation - other.validation for one, other in pairs if not (one.diverged or other.diverged)]

    def slowdown(self, recipe: str) -> Interval:
        """Seconds per step over BF16's of the same seed."""
        base = {one.seed: one.seconds_per_step for one in self.of(REFERENCE)}
        return Interval.of([one.seconds_per_step / base[one.seed] for one in self.of(recipe) if one.seed in base])

    def bits(self, recipe: Recipe) -> list[float]:
        """Of the six cells, in the order of CELLS."""
        return list(operand_bits(recipe))

    @cached_property
    def noise(self) -> Interval:
        """BF16's final losses over seeds."""
        return Interval.of([one.validation for one in self.of(REFERENCE)])

    @cached_property
    def findings(self) -> list[Finding]:
        """One for each recipe beside BF16."""
        return [self._finding(name) for name in self.others]

    def _finding(self, recipe: str) -> Finding:
        runs, deltas = self.of(recipe), self.differences(recipe)
        if lost := [one.seed for one in runs if one.diverged]:
            which = listed(map(str, lost))
            return Finding(recipe, "diverged", None, f"{recipe} diverged with seed{'s' * (len(lost) > 1)} {which}")
        if not deltas:
            return Finding(
                recipe, "unknown", None, f"{recipe}: BF16 itself diverged, so there is nothing to compare with"
            )
        found = Interval.of(deltas)
        if found.half is None:
            said = f"{recipe} ends {found.mean:+.4f} nats/byte from BF16 with one seed, which supports no claim"
            return Finding(recipe, "unknown", found, said)
        most = max(abs(found.low), abs(found.high))
        size = f"{found.mean:+.4f} ± {found.half:.4f} nats/byte".replace("-", "\N{MINUS SIGN}")
        outcome: Outcome = {1: "worse", -1: "better", 0: "open"}[found.sign]  # type: ignore[assignment]
        said = {
            "worse": f"{recipe} costs {size}",
            "better": f"{recipe} ends below BF16 by {abs(found.mean):.4f} ± {found.half:.4f} nats/byte",
            "open": f"{recipe}: no difference found ({size}); one of up to {most:.4f} may be there",
        }[outcome]
        return Finding(recipe, outcome, found, said)

    def bias(self, recipe: str, gemm: str, distribution: str) -> tuple[Bias, Interval]:
        """Whether the errors of a GEMM average out over draws: the systematic share, and what it allows to say.

        "biased": the interval excludes 0 and everything up to UNBIASED. "unbiased": all of it is below UNBIASED and it
        holds 0, or nearly. Everything else is open.
        """
        found = self.interval(recipe, distribution, "gemms", gemm, "systematic")
        assert found is not None
        if found.half is None:
            return "open", found
        if found.low > UNBIASED:
            return "biased", found
        return ("unbiased" if max(abs(found.low), abs(found.high)) < UNBIASED else "open"), found

    @property
    def headline(self) -> str:
        """The first line of the page."""
        clear = [f"{f.recipe} {f.difference.mean:+.3f}" for f in self.findings if f.outcome == "worse" and f.difference]
        lost = [f.recipe for f in self.findings if f.outcome == "diverged"]
        quiet = [f.recipe for f in self.findings if f.outcome in ("open", "better")]
        said = []
        if lost:
            said.append(f"{listed(lost)} diverged")
        if clear:
            said.append(f"{listed(clear)} nats/byte")
        if quiet:
            said.append(f"no higher loss found for {listed(quiet)}")
        line = "; ".join(said) or "nothing can be said with one seed"
        return line if lost or clear else line[0].upper() + line[1:]

    def table(self) -> list[dict[str, Any]]:
        """One row per recipe beside BF16: loss minus BF16's with half of its interval, errors of the results of GEMMs
        on normal data, whether that of dW is a bias, seconds per step over BF16's; None for what is not known."""
        rows = []
        for finding in self.findings:
            name, loss = finding.recipe, finding.difference
            errors = [self.interval(name, "normal", "gemms", gemm, "error") for gemm in GEMMS]
            row: dict[str, Any] = {"recipe": name, "outcome": finding.outcome}
            row |= {"difference": loss and loss.mean, "half": loss and loss.half}
            row |= {f"error_{y}": error and error.mean for y, error in zip(("y", "dx", "dw"), errors, strict=True)}
            rows.append(row | {"dw_is": self.bias(name, "wgrad", "normal")[0], "slowdown": self.slowdown(name).mean})
        return rows

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with the rows of `table`."""
        return data_frame(self.table())

    def __repr__(self) -> str:
        return f"<LabResult: {len(self.others)} recipes against BF16, {self.settings.seeds} seeds: {self.headline}>"

    def _repr_html_(self) -> str:
        rows = [["" if value is None else shown(value) for value in row.values()] for row in self.table()]
        return html_table([list(self.table()[0]) if rows else [], *rows], self.headline)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: settings, measurements, findings."""
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "seeds": self.settings.seeds,
            "steps": self.settings.steps,
            "recipes": [recipe.to_dict() for recipe in self.recipes],
            "findings": [asdict(finding) for finding in self.findings],
            "bf16": asdict(self.noise),
            "slowdown": {name: asdict(self.slowdown(name)) for name in self.others},
            "bits": {recipe.name: dict(zip(CELLS, self.bits(recipe), strict=True)) for recipe in self.recipes},
            "bias": {
                name: {
                    distribution: {gemm: self.bias(name, gemm, distribution)[0] for gemm in GEMMS}
                    for distribution in DISTRIBUTIONS
                }
                for name in self.others
            },
            "measurements": [asdict(one) for one in self.measurements.values()],
        }


def shown(value: float | str) -> str:
    """A cell of the table: numbers with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else value


def parts(result: LabResult, recipe: str, distribution: str, operand: str) -> list[float]:
    """The mean shares of the parts of an error, in percent; empty if nothing was cast, or exactly."""
    means = []
    for part in PARTS:
        values = [v for v in result.values(recipe, distribution, "casts", operand, part) if math.isfinite(v)]
        if not values:
            return []
        means.append(sum(values) / len(values))
    return means


def finite(values: Sequence[float]) -> list[float]:
    """Without infinities and NaNs."""
    return [value for value in values if math.isfinite(value)]
