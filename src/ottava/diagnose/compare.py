"""Compares a good run with a bad one: settings that differ, the most damaged tensors, and the first to leave the band.

It pairs looks by optimizer step or by tokens, and casts by layer, tensor and direction, in any recipe.

It ranks effects of different units by the bits that an element lost:

    dB             6.02 dB of SQNR are one bit
    % of elements  a flushed or clipped element loses all bits of its format's significand: pp / 100 * (m + 1)
    octaves        growth (amax, rms, kurtosis; MSE counts half) costs no bits while the scale follows. But a delayed
                   scale clips after one octave and underflows after six. Eight octaves therefore count as one bit, so
                   that size leads the table only if no cast got worse. A lower MSE or kurtosis is no damage

SQNR is capped at that of a healthy tensor in the format, for the ranking and for the band: a few exact values give
40 dB and more, and nobody misses the excess.

MSE has the squared unit of its tensor, so it is compared only within one tensor.

The band of a statistic spans the values of the good run (and of control runs, such as other seeds) in the looks nearby,
widened by a tolerance, because a few looks estimate a spread poorly. A tensor leaves the band when two looks in a row
lie outside, or the last look does. The loss leaves the band at its first step outside; from when it stays outside is
another fact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from ottava.base.errors import unknown_name
from ottava.base.settings import flatten
from ottava.base.text import finite, progress
from ottava.diagnose.difference import compare_batches, differences
from ottava.diagnose.facts import Facts, bare
from ottava.diagnose.loss import LossCurve
from ottava.measure import limits
from ottava.measure.layer_names import only_simulated, symbol
from ottava.numerics.formats import E4M3, FORMATS
from ottava.record.reader import Run
from ottava.record.schema import RunError

Place = tuple[str, str, str]
"""(layer, tensor, direction)."""

_BITS_PER_DB, _OCTAVES_PER_BIT = 1 / limits.DECIBELS_A_BIT, 8.0
_AROUND = 2  # looks on either side that make the band
_FORWARD = ("input", "weight", "output")


@dataclass(frozen=True)
class Metric:
    """A statistic to compare."""

    name: str
    unit: Literal["dB", "pp", "octaves"]
    """Unit of the effect."""
    tolerance: float
    """Widens the band on both sides."""
    worse: Literal["low", "high", "both"]
    growth: bool = False
    """True for a size, False for an error."""

    def effect(self, good: Any, bad: Any) -> Any:
        """How much worse the bad value is (negative: better); for growth, how much larger. NaN if unknown."""
        if self.unit == "octaves":
            with np.errstate(all="ignore"):
                return np.where((good > 0) & (bad > 0), np.log2(bad) - np.log2(good), np.nan)
        return good - bad if self.worse == "low" else bad - good

    def bits(self, effect: Any, significand: int) -> Any:
        """The effect in bits lost per element; 0 or less if the value got better."""
        if self.unit == "dB":
            return effect * _BITS_PER_DB
        if self.unit == "pp":
            return effect / 100 * significand
        size = np.abs(effect) if self.worse == "both" else np.maximum(effect, 0.0)
        return size / _OCTAVES_PER_BIT / (2 if self.name == "mse" else 1)


METRICS = (
    Metric("row_sqnr_p50_db", "dB", 1.5, "low"),
    Metric("row_sqnr_p10_db", "dB", 3.0, "low"),
    Metric("underflow_pct", "pp", 0.5, "high"),
    Metric("overflow_pct", "pp", 0.05, "high"),
    Metric("subnormal_pct", "pp", 3.0, "high"),
    Metric("rms", "octaves", 1.0, "both", growth=True),
    Metric("amax", "octaves", 1.5, "both", growth=True),
    Metric("kurtosis", "octaves", 1.5, "high", growth=True),
    Metric("mse", "octaves", 3.0, "high", growth=True),
)


@dataclass(frozen=True)
class Comparison:
    """The differences between a good and a bad run."""

    config: list[dict[str, Any]]
    """{key, good, bad}: settings, versions, recipes and coverage that differ."""
    loss: dict[str, Any]
    """{left_at, diverged_at, good, bad, gap}: the first step at which the bad loss is above the good run's band; the
    step from which its running median stays above; the last losses; percent. None for what never happens."""
    ranked: list[dict[str, Any]]
    """{layer, tensor, direction, metric, good, bad, effect, unit, bits, step}: worst first."""
    first: dict[str, Any] | None
    """{step, look_before, layer, tensor, metric, good_band, value, direction, lead_steps, then}: the first exit from
    the band. look_before: step of the cast's last look inside, None if there is none; lead_steps: from this exit to the
    first of the loss, negative if the loss left before."""
    steps_compared: int
    unmatched: list[str]
    """Layers of only one of the runs."""
    verdict: str
    """A few sentences."""
    data: dict[str, Any] | None = None
    """{step, what, share_pct}: the first step whose batch differs, in inputs or labels, and the share of such steps;
    step is None if none does; None if a run has no hashes."""
    differences: Sequence[Mapping[str, Any]] = ()
    """{kind, key, good, bad, sentence, step, where}: what differs by the facts, in the order of computation."""

    @property
    def diverged(self) -> bool:
        """Whether any cast of the bad run left the good run's band, or its loss left it for good."""
        return self.first is not None or self.loss["diverged_at"] is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(finite(asdict(self)))


def compare(good: Run, bad: Run, *, align: str = "step", controls: Sequence[Run] = ()) -> Comparison:
    """Compares two runs.

    Args:
        good, bad: the runs.
        align: "step", or "tokens" if batch sizes differ.
        controls: other good runs (other seeds), which widen the band.
    Raises:
        ValueError: align is something else.  RunError: a run logged no tokens, or the runs share no cast.
    Edge cases: of runs of different length it compares the common part; a run without losses has no divergence.

    Example:
        >>> import tempfile
        >>> from ottava.measure.tally import Tally
        >>> from ottava.record.schema import SlotKey
        >>> from ottava.record.writer import RunWriter
        >>> key = SlotKey("fc1", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name, lost in (("good", 1), ("bad", 7)):
        ...         with RunWriter(f"{folder}/{name}") as writer:
        ...             for step in range(1, 4):
        ...                 writer.step(step, loss=2.0 + lost)
        ...                 writer.tally(step, key, Tally(n=8, n_nonzero=8, n_underflow=lost))
        ...     first = compare(Run.open(f"{folder}/good"), Run.open(f"{folder}/bad")).first
        >>> first["step"], first["layer"]
        (1, 'fc1')
    """
    if align not in ("step", "tokens"):
        raise ValueError(f"compare: {unknown_name('alignment', align, ('step', 'tokens'))}")
    reference, *others = [_series(run, align) for run in (good, bad, *controls)]
    sides = [reference, *(_renamed(side, _layers(reference)) for side in others)]
    layers = [_layers(side) for side in sides[:2]]
    places = [place for place in sides[1] if place in sides[0]]
    if not places:
        there, here = (
            ", ".join(names[:3]) or run.not_recorded() or "none" for run, names in zip((good, bad), layers, strict=True)
        )
        raise RunError(
            f"{good.path} and {bad.path}: the runs share no cast; needs two runs whose layers have the same names "
            f"(good: {there}; bad: {here})"
        )
    loss = _compare_loss(good, bad, controls)
    ranked, exits, steps = _walk(sides, places)
    first = _first(exits, places, loss["left_at"])
    facts = Facts(good), Facts(bad)
    found, data = [asdict(d) for d in differences(*facts)], compare_batches(*facts)
    unmatched = sorted({*layers[0]} ^ {*layers[1]})
    config = _config(good.manifest, bad.manifest)
    answer = Comparison(config, loss, ranked, first, len(steps), unmatched, "", data, found)
    return replace(answer, verdict=_verdict(answer))


@dataclass(frozen=True)
class _Series:
    """The looks at one cast of one run."""

    step: Any
    at: Any
    """Places on the common axis: steps or tokens."""
    values: Mapping[str, Any]
    significand: int
    floor_db: float
    """SQNR of a healthy tensor in its format."""


_Side = dict[Place, _Series]
"""One run: the compared statistics of its casts."""


def _series(run: Run, align: str) -> _Side:
    position = _tokens(run) if align == "tokens" else None
    series: _Side = {}
    for slot, rows in run.table().groups():
        place = (slot.layer, slot.tensor, slot.direction)
        # the same tensor under a second recipe, and routers, which every framework leaves in high precision
        if place in series or only_simulated(slot.layer, slot.source):
            continue
        order = np.argsort(rows["step"], kind="stable")
        steps = rows["step"][order]
        at = steps.astype(np.float64) if position is None else np.interp(steps, *position)
        values = {metric.name: np.asarray(rows.metric(metric.name), dtype=np.float64)[order] for metric in METRICS}
        fmt = FORMATS.get(slot.format, E4M3)
        series[place] = _Series(steps, at, values, fmt.mantissa_bits + 1, limits.healthy_db(fmt))
    return series


def _tokens(run: Run) -> tuple[Any, Any]:
    tokens = run.steps.get("tokens")
    if tokens is None or not np.isfinite(tokens).any():
        raise RunError(f"{run.path}: no tokens in steps.jsonl; log them with watch.log(tokens=...), or align by step")
    tokens = np.nan_to_num(tokens)
    # if they rise at every step, they count all steps so far; otherwise only their own
    return run.steps["step"], tokens if len(tokens) > 1 and bool((np.diff(tokens) > 0).all()) else tokens.cumsum()


def _closest(axis: Any, at: Any) -> Any:
    """For each place, the index of the nearest one on an ascending axis."""
    upper = np.clip(np.searchsorted(axis, at), 1, max(len(axis) - 1, 1))
    lower = upper - 1
    upper = np.minimum(upper, len(axis) - 1)
    return np.where(np.abs(axis[lower] - at) <= np.abs(axis[upper] - at), lower, upper)


def _nearest(axis: Any, at: Any) -> Any:
    """For each place, the index of the nearest look; -1 if it is further away than half the distance of looks."""
    index = _closest(axis, at)
    spacing = float(np.median(np.diff(axis))) if len(axis) > 1 else 0.0
    return np.where(np.abs(axis[index] - at) <= spacing / 2 + 1e-9 * np.abs(at), index, -1)


def _layers(side: _Side) -> list[str]:
    """Layers in the order of the forward."""
    return list(dict.fromkeys(layer for layer, _, _ in side))


def _renamed(side: _Side, reference: Sequence[str]) -> _Side:
    """A run whose layers have the names of equal ones: by their names without wrappers, or by their order."""
    known, layers = {bare(name): name for name in reference}, _layers(side)
    names = {name: known[bare(name)] for name in layers if name not in reference and bare(name) in known}
    if not names and len(layers) == len(reference) and not {*layers} & {*reference}:
        names = dict(zip(layers, reference, strict=True))
    return {(names.get(place[0], place[0]), *place[1:]): series for place, series in side.items()}


def _walk(
    sides: Sequence[_Side], places: Sequence[Place]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], set[int]]:
    """The worst effect of every cast and statistic, the look at which each left its band, and the steps that have
    looks in both runs."""
    ranked, exits, steps = [], [], set[int]()
    for place in progress(places, "comparing tensors"):
        mine = sides[1][place]
        references = [side[place] for side in (sides[0], *sides[2:]) if place in side]
        theirs = _nearest(references[0].at, mine.at)
        looks = np.flatnonzero(theirs >= 0)
        steps |= {*mine.step[looks].tolist()}
        pairs = looks, theirs[looks]
        around = [(series, _closest(series.at, mine.at[looks])) for series in references]
        for metric in METRICS:
            worst, exit_ = _judge(place, metric, mine, references[0], pairs, around)
            if worst is not None:
                ranked.append(worst)
            if exit_ is not None:
                exits.append(exit_)
    ranked.sort(key=lambda entry: -entry["bits"])
    return ranked, exits, steps


def _judge(
    place: Place, metric: Metric, mine: _Series, good: _Series, pairs: tuple[Any, Any], around: Sequence[Any]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The look with the worst effect, and the look at which the cast left the band; None if there is none."""
    layer, tensor, direction = place
    a, b = good.values[metric.name][pairs[1]], mine.values[metric.name][pairs[0]]
    effect = metric.effect(a, b)
    capped = metric.effect(*(np.minimum(side, mine.floor_db) for side in (a, b))) if metric.unit == "dB" else effect
    bits = metric.bits(capped, mine.significand)
    indices = np.flatnonzero(np.isfinite(effect))
    if not len(indices):
        return None, None

    def entry(i: int) -> dict[str, Any]:
        where = {"layer": layer, "tensor": tensor, "direction": direction, "metric": metric.name}
        numbers = {"good": _tidy(a[i]), "bad": _tidy(b[i]), "effect": _tidy(effect[i]), "unit": metric.unit}
        return {**where, **numbers, "bits": _tidy(bits[i]), "step": int(mine.step[pairs[0][i]])}

    worst = indices[int(np.argmax(bits[indices]))]
    low, high = _band(metric, around)
    if metric.unit == "dB":
        low = np.minimum(low, mine.floor_db)
    under, over = b < low, b > high
    outside = (over if metric.worse == "high" else under if metric.worse == "low" else over | under)[indices]
    stays = np.flatnonzero(outside & np.append(outside[1:], True))
    exit_ = None
    if len(stays):
        i = indices[stays[0]]
        before = int(mine.step[pairs[0][indices[stays[0] - 1]]]) if stays[0] else None
        exit_ = {**entry(i), "good_band": [_tidy(low[i]), _tidy(high[i])], "look_before": before}
    return (entry(worst) if bits[worst] > 0.01 else None), exit_


def _band(metric: Metric, around: Sequence[tuple[_Series, Any]]) -> tuple[Any, Any]:
    """The band at each place: the references' values in the looks nearby, and the tolerance; infinite if unknown."""
    low: Any = math.inf
    high: Any = -math.inf
    for series, nearest in around:
        values = series.values[metric.name]
        padded = np.pad(values, _AROUND, constant_values=np.nan)
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * _AROUND + 1)
        finite = np.isfinite(windows)
        low = np.minimum(low, np.where(finite, windows, np.inf).min(1)[nearest])
        high = np.maximum(high, np.where(finite, windows, -np.inf).max(1)[nearest])
    low, high = np.where(low == math.inf, -math.inf, low), np.where(high == -math.inf, math.inf, high)
    if metric.unit == "octaves":
        return low * 2.0**-metric.tolerance, high * 2.0**metric.tolerance
    share = np.where(np.isfinite(high), 0.1 * high, 0.0) if metric.unit == "pp" else 0.0  # 50 and 55 % are alike
    return low - metric.tolerance - share, high + metric.tolerance + share


def _first(exits: Sequence[dict[str, Any]], places: Sequence[Place], left_at: int | None) -> dict[str, Any] | None:
    """The earliest exit. Of several at one step it takes the first in the forward, then the first in the backward; and
    of one cast an error before a size."""
    if not exits:
        return None
    order = {place[0]: number for number, place in reversed(list(enumerate(places)))}
    growth = {metric.name: metric.growth for metric in METRICS}

    def key(entry: dict[str, Any]) -> tuple[Any, ...]:
        forward = entry["tensor"] in _FORWARD
        place = order[entry["layer"]]
        # the backward comes later and runs through the layers in reverse
        return entry["step"], not forward, place if forward else -place, growth[entry["metric"]], -entry["bits"]

    first, *later = sorted(exits, key=key)
    then: list[str] = []
    for entry in later:
        name = f"{entry['layer']}.{symbol(entry['tensor'])} at step {entry['step']}"
        if entry["layer"] != first["layer"] and all(not t.startswith(f"{entry['layer']}.") for t in then):
            then.append(name)
    direction = "forward" if first["tensor"] in _FORWARD else "backward"
    lead = None if left_at is None else left_at - first["step"]
    kept = {name: first[name] for name in ("step", "look_before", "layer", "tensor", "metric", "good_band")}
    return {**kept, "value": first["bad"], "direction": direction, "lead_steps": lead, "then": then[:5]}


def _compare_loss(good: Run, bad: Run, controls: Sequence[Run]) -> dict[str, Any]:
    """When the bad loss left the good run's band, for the first time and for good, and the last losses."""
    a, b, *others = map(LossCurve.of, (good, bad, *controls))
    common, mine, theirs = np.intersect1d(a.steps, b.steps, return_indices=True)
    result: dict[str, Any] = dict.fromkeys(("left_at", "diverged_at", "good", "bad", "gap"))
    finite = [i for i in range(len(common)) if math.isfinite(a.loss[mine[i]])]
    if not finite:
        return result
    exits = zip(("left_at", "diverged_at"), b.exits(a, *others), strict=True)
    result |= {name: int(step) if math.isfinite(step) else None for name, step in exits}
    last = finite[-1]
    for name, value in (("good", a.loss[mine[last]]), ("bad", b.loss[theirs[last]])):
        result[name] = _tidy(float(value)) if math.isfinite(value) else None
    gap = a.gap(b)[0]
    result["gap"] = _tidy(-gap) if math.isfinite(gap) else None
    return result


def _config(good: Mapping[str, Any], bad: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings that differ; those of the training come first."""
    differences = []
    good, bad = ({**x, "run": {"command": " ".join(map(str, x.get("command") or ()))}} for x in (good, bad))
    for section in ("config", "versions", "host", "settings", "run"):
        a, b = flatten(good.get(section) or {}), flatten(bad.get(section) or {})
        for key in dict.fromkeys((*a, *b)):
            if a.get(key) != b.get(key):
                name = key if section == "config" else f"{section}.{key}"
                differences.append({"key": name, "good": a.get(key), "bad": b.get(key)})
    recipes = [sorted({layer.get("recipe") or "" for layer in run.get("layers") or ()}) for run in (good, bad)]
    if recipes[0] != recipes[1]:
        differences.append({"key": "layers.recipe", "good": ", ".join(recipes[0]), "bad": ", ".join(recipes[1])})
    return differences


def _verdict(of: Comparison) -> str:
    loss, first = of.loss, of.first
    settings = [f"{d['key']} ({d['good']} and {d['bad']})" for d in of.config if "." not in d["key"]][:3]
    parts = [f"The configurations differ in {', '.join(settings)}."] if settings else []
    parts += [d["sentence"] for d in of.differences[:4]] or ([] if settings else ["No recorded fact differs."])
    if of.data is not None and of.data["step"] is None:
        parts.append("Both runs saw the same batches.")
    if first is None:
        parts.append(f"In {of.steps_compared} looks no cast leaves the good run's band.")
    else:
        low, high = (f"{b:.4g}" for b in first["good_band"])
        parts.append(
            f"First to leave the good run's band: {first['layer']}.{symbol(first['tensor'])} at step {first['step']}, "
            f"{first['metric']} {first['value']:.4g} (good: {low} to {high}), in the "
            f"{first['direction']}{said_of_lead(first)}."
        )
    if loss["left_at"] is not None:
        stays = loss["diverged_at"]
        ends = " and returns" if stays is None else ", and its running median stays above it"
        ends += f" from step {stays} on" if stays not in (None, loss["left_at"]) else ""
        parts.append(f"The loss leaves the good run's band at step {loss['left_at']}{ends}.")
    elif loss["good"] is None:
        parts.append("No loss to compare.")
    else:
        bad = "not finite" if loss["bad"] is None else f"{loss['bad']:.4g}"
        parts.append(f"The loss stays in the good run's band (last {loss['good']:.4g} and {bad}).")
    worst = next((entry for entry in of.ranked if entry["unit"] != "octaves"), None)
    if first is not None and worst is not None:
        parts.append(
            f"Most damaged: {worst['layer']}.{symbol(worst['tensor'])}, {worst['metric']} {worst['bad']:.4g} "
            f"instead of {worst['good']:.4g} at step {worst['step']}."
        )
    return " ".join(parts)


def said_of_lead(first: Mapping[str, Any]) -> str:
    """How far the first exit of a cast is ahead of the loss, as the end of a sentence; empty if the loss never left."""
    lead = first["lead_steps"]
    if lead is None:
        return ""
    steps = f"{abs(lead)} step{'s' if abs(lead) > 1 else ''}"
    if lead > 0:
        return f", {steps} before the loss"
    if lead == 0:
        return ", at the same step as the loss"
    seen = first["look_before"]
    # between two looks a cast leaves unseen
    inside = "" if seen is None else f" (its last look inside is at step {seen})"
    return f", {steps} after the loss{inside}"


def _tidy(value: float) -> float:
    """Six digits, more than any of these numbers deserves."""
    return float(f"{value:.6g}")
