"""The page of a study: one HTML file without other files. The template holds the words, this file the charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from ottava.base.text import data_frame, html_table, listed
from ottava.lab.study import DISTRIBUTIONS, OPERAND, LabSettings, Measurement, operand_bits
from ottava.measure.tally import PARTS
from ottava.recipe import CELLS, GEMMS, Recipe
from ottava.report.charts import Bars, Chart, Estimate, Forest, Line, color, smooth
from ottava.report.frame import render
from ottava.train.verdict import REFERENCE, Interval

_RESULT = MappingProxyType({"fprop": "Y (fprop)", "dgrad": "dX (dgrad)", "wgrad": "dW (wgrad)"})
_OPERANDS = ("X", "X.T", "W", "W.T", "dY", "dY.T")
_PART_NAMES = MappingProxyType(
    {"dead": "dead zone", "clipped": "clipping", "scale": "scale bias", "grid": "grid noise"}
)
_PART_COLORS = MappingProxyType(
    {"dead": "var(--s3)", "clipped": "var(--s2)", "scale": "var(--s1)", "grid": "var(--line)"}
)
_SHADES = ((30.0, 0), (22.0, 1), (14.0, 2))  # dB; below the last: 3


def lab_page(result: LabResult) -> str:
    """The whole page.

    Raises:
        ValueError: the study has no finished seed.
    """
    if not result.measurements:
        raise ValueError("lab: no measurement is finished; run the study first")
    return render(
        __package__,
        "lab.html.j2",
        result=result,
        color=color,
        loss=loss_chart(result),
        training=training_chart(result),
        errors={f"error-{gemm}": error_chart(result, gemm) for gemm in GEMMS} | {"price": price_chart(result)},
        biases={f"bias-{gemm}": bias_chart(result, gemm) for gemm in GEMMS} | {"shrink": shrink_chart(result)},
        anatomies=anatomy_charts(result),
        operands=_OPERANDS,
        casts=cast_table(result),
        distributions=DISTRIBUTIONS,
        cells=CELLS,
        unbiased=UNBIASED,
    )


def _estimate(values: Sequence[float], style: int, *, dots: bool = True) -> Estimate | None:
    """The mean of values over seeds with its interval."""
    known = finite(values)
    if not known:
        return None
    found = Interval.of(known)
    return Estimate(mean=found.mean, low=found.low, high=found.high, style=style, values=known if dots else ())


def loss_chart(result: LabResult) -> Forest:
    """Final loss minus BF16's, over the spread of BF16's seeds."""
    rows = []
    for style, name in enumerate(result.others, start=1):
        one = _estimate(result.differences(name), style)
        rows.append((name, [one] if one else []))
    return Forest(
        title="Validation loss minus BF16",
        description="Mean of paired differences over seeds with the 95 % interval. "
        + " ".join(f"{finding.sentence}." for finding in result.findings),
        x_label="nats per byte; left is better",
        rows=rows,
        signed=True,
    )


def training_chart(result: LabResult) -> Chart:
    """Training loss minus BF16's by step, smoothed, the mean over seeds."""
    lines = []
    base = {one.seed: one for one in result.of(REFERENCE)}
    for style, name in enumerate(result.others, start=1):
        runs = [(one.losses, base[one.seed].losses) for one in result.of(name) if one.seed in base]
        length = min((min(len(a), len(b)) for a, b in runs), default=0)
        if not length:
            continue
        gaps = [smooth([a[i] - b[i] for i in range(length)], span=16) for a, b in runs]
        mean = [(float(i + 1), sum(gap[i] for gap in gaps) / len(gaps)) for i in range(length)]
        lines.append(Line(name=name, points=mean, style=style))
    return Chart(
        title="Training loss minus BF16, by step",
        description="Mean over seeds of the smoothed difference, one line a recipe.",
        x_label="step",
        y_label="nats per byte",
        lines=lines,
        signed=True,
    )


def _by_distribution(
    result: LabResult, gemm: str, name: str, recipes: Sequence[str], percent: int = 1, **words: Any
) -> Forest:
    """One number of a GEMM by recipe and distribution, over seeds with interval; `percent` multiplies it."""
    rows = []
    for recipe in recipes:
        values = ([percent * v for v in result.values(recipe, d, "gemms", gemm, name)] for d in DISTRIBUTIONS)
        found = [_estimate(of_one, i, dots=False) for i, of_one in enumerate(values)]
        rows.append((recipe, [one for one in found if one]))
    return Forest(
        rows=rows,
        legend=[(one.replace("normal", "normal data"), i) for i, one in enumerate(DISTRIBUTIONS)],
        width=500,
        **words,
    )


def error_chart(result: LabResult, gemm: str) -> Forest:
    """|e| / |Y| of one GEMM, every recipe and distribution."""
    return _by_distribution(
        *(result, gemm, "error", [recipe.name for recipe in result.recipes]),
        title=f"Error of {_RESULT[gemm]}",
        description=f"Relative error of the result of {gemm} by recipe and distribution, over seeds with interval.",
        x_label="relative error, |e| / |exact|",
        log=True,
    )


def bias_chart(result: LabResult, gemm: str) -> Forest:
    """The systematic share of one GEMM's error."""
    return _by_distribution(
        *(result, gemm, "systematic", result.others),
        title=f"Systematic share, {_RESULT[gemm]}",
        description=f"0: errors of {gemm} average out over draws; 1: they do not. Mean over seeds with interval.",
        x_label="<e, e′> / |e| |e′| of two draws; 0 is unbiased",
        signed=True,
        band=(-UNBIASED, UNBIASED),
    )


def shrink_chart(result: LabResult) -> Forest:
    """The share that dW loses along itself."""
    return _by_distribution(
        *(result, "wgrad", "shrink", result.others, 100),
        title="Shrinkage of dW (wgrad)",
        description="The share of dW that the recipe loses along dW, in percent; mean over seeds with interval.",
        x_label="% of dW; above 0: too small",
        signed=True,
    )


def price_chart(result: LabResult) -> Chart:
    """Error of dW on normal data against the bits of an element."""
    lines = []
    for style, recipe in enumerate(result.recipes):
        error = result.interval(recipe.name, next(iter(DISTRIBUTIONS)), "gemms", "wgrad", "error")
        assert error is not None
        cells = result.bits(recipe)
        point = (sum(cells) / len(cells), 100 * error.mean)
        lines.append(Line(name=recipe.name, points=[point], style=style, markers=True))
    bits = [line.points[0][0] for line in lines]
    return Chart(
        title="Error of dW against bits",
        description="Relative error of dW on normal data by the mean bits of an operand's element, scales included.",
        x_label="bits of an element, mean of the six operands",
        y_label="relative error, %",
        lines=lines,
        x_range=(min(bits) - 1, max(bits) + 1),
        y_range=(0.0, 1.1 * max(line.points[0][1] for line in lines)),
        width=500,
        height=300,
    )


def anatomy_charts(result: LabResult) -> list[Bars]:
    """The parts of the error of the operand that a distribution is about, one chart a distribution."""
    charts = []
    for name in DISTRIBUTIONS:
        operand, rows = OPERAND[name], []
        for recipe in result.others:
            shares = parts(result, recipe, name, operand)
            if shares:
                sqnr = _estimate(result.values(recipe, name, "casts", operand, "sqnr_db"), 0)
                rows.append((recipe, shares, f"{sqnr.mean:.1f} dB" if sqnr else "exact"))
        charts.append(
            Bars(
                title=f"{operand}, {name}",
                description=f"Shares of the squared error of the cast of {operand} on {name} data.",
                x_label="% of the squared error; right: SQNR",
                parts=[(_PART_NAMES[part], _PART_COLORS[part]) for part in PARTS],
                bars=rows,
                width=500,
            )
        )
    return charts


def cast_table(result: LabResult) -> dict[str, list[dict[str, Any]]]:
    """SQNR of every operand by distribution and recipe, with the tint of its cell (0 to 3)."""
    table: dict[str, list[dict[str, Any]]] = {}
    for name in DISTRIBUTIONS:
        table[name] = []
        for recipe in result.others:
            cells = []
            for operand in _OPERANDS:
                known = finite(result.values(recipe, name, "casts", operand, "sqnr_db"))
                found = Interval.of(known) if known else None
                shade = 0 if found is None else next((i for limit, i in _SHADES if found.mean >= limit), 3)
                text = "\N{EN DASH}" if found is None else f"{found.mean:.1f}"
                hint = "" if found is None or found.half is None else f"± {found.half:.2f} dB"
                cells.append({"text": text, "shade": shade, "hint": hint})
            table[name].append({"recipe": recipe, "cells": cells})
    return table


# --- what the measurements say ---------------------------------------------------------------------------------------

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
        clear = [
            f"{f.recipe} costs {f.difference.mean:.3f}" for f in self.findings if f.outcome == "worse" and f.difference
        ]
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
