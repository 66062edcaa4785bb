"""What rules can ask of a run: names and functions over its casts, its steps, its events, and the run as a whole.

Three kinds of rows, one vocabulary each; `config.`, `answer.` and `run.` names are the same in every row. Adding a fact
is adding an entry to a table at the end of this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from ottava.debug.analysis.conditions import Missing, Node, Values
from ottava.debug.analysis.loss import LossCurve, robust_distance
from ottava.debug.layer_names import layer_index
from ottava.debug.run.reader import Run, Table
from ottava.debug.run.schema import SlotKey
from ottava.debug.statistics import STATISTICS
from ottava.formats import FORMATS

_EARLY = 3  # looks at either end of a series that early() and late() take the median of
_QUARTERS_TO_ZERO = 4 * 18.8074  # quarter octaves from a block's largest element, cast to 448, to what E4M3 flushes


@dataclass(frozen=True)
class Context:
    """What is known besides rows."""

    run: Run
    baseline: Run | None
    answers: Mapping[str, str]
    config: Mapping[str, tuple[str, ...]]
    """config name -> keys under which frameworks keep it."""
    findings: int = 0
    """Numeric findings so far."""

    @cached_property
    def table(self) -> Table:
        """Casts looked at in full: real ones, and of simulated recipes the first; the others are what-ifs."""
        table = self.run.table()
        first = next(iter((self.run.manifest.get("settings") or {}).get("recipes") or ()), None)
        if first is None or not len(table):
            return table
        return table.take(np.flatnonzero((table["source"] != "hook") | (table["recipe"] == first)))

    @cached_property
    def loss(self) -> LossCurve:
        """Of the run."""
        return LossCurve(self.run.steps["step"], self.run.steps["loss"])

    @cached_property
    def baseline_loss(self) -> LossCurve:
        """Of the baseline.

        Raises:
            Missing: there is none.
        """
        if self.baseline is None:
            raise Missing("a BF16 twin (--baseline RUN)")
        return LossCurve(self.baseline.steps["step"], self.baseline.steps["loss"])

    def scalar(self, name: str) -> Any:
        """A fact of the whole run, by its dotted name.

        Raises:
            Missing: not known.
        """
        prefix, _, rest = name.partition(".")
        if prefix == "run":
            return RUN_FACTS[rest].of(self)
        if prefix == "answer":
            if rest not in self.answers:
                raise Missing(f"an answer to {rest!r} (--answer {rest}=...)")
            return self.answers[rest]
        settings = self.run.manifest.get("config") or {}
        for key in self.config.get(rest, (rest,)):
            if key in settings:
                value = settings[key]
                if isinstance(value, bool):
                    return "yes" if value else "no"
                return float(value) if isinstance(value, (int, float)) else str(value)
        raise Missing(f"{rest!r} in the run's config")


@dataclass(frozen=True)
class Fact:
    """One name that rules may use."""

    meaning: str
    of: Callable[[Any], Any]


class _Rows:
    """What the three kinds share: cached facts, and names of the whole run."""

    facts: Mapping[str, Fact]
    functions: Mapping[str, Fact]

    def __init__(self, context: Context) -> None:
        self.context = context
        self._known: dict[str, Values] = {}

    @property
    def count(self) -> int:
        """How many rows."""
        raise NotImplementedError

    def value(self, name: str) -> Values:
        """See `conditions.Rows`."""
        if "." in name:
            scalar = self.context.scalar(name)
            return np.full(self.count, scalar, dtype=object if isinstance(scalar, str) else np.float64)
        if name not in self._known:
            self._known[name] = np.asarray(self.facts[name].of(self))
        return self._known[name]

    def call(self, name: str, argument: Node) -> Values:
        """See `conditions.Rows`."""
        key = f"{name}({argument})"
        if key not in self._known:
            self._known[key] = np.asarray(self.functions[name].of((self, argument)))
        return self._known[key]

    def argument(self, node: Node) -> Values:
        """Its values; NaN where a condition is unknown."""
        missing: set[str] = set()
        values = node.values(self, missing)
        if values is None:
            raise Missing(", ".join(sorted(missing)))
        return values

    def series(self) -> Iterator[np.ndarray[Any, Any]]:
        """Row numbers that belong together, in the order of steps."""
        yield np.arange(self.count)

    def over_series(self, node: Node, compute: Callable[[Any], Any]) -> Values:
        """compute(values of one series) -> one number, or one per row of it."""
        values = self.argument(node).astype(np.float64)
        result = np.full(self.count, np.nan)
        for index in self.series():
            result[index] = compute(values[index])
        return result


class CastRows(_Rows):
    """One row per cast and step that was looked at."""

    def __init__(self, context: Context, table: Table | None = None) -> None:
        super().__init__(context)
        self.table = context.table if table is None else table
        self.facts, self.functions = CAST_FACTS, CAST_FUNCTIONS

    @property
    def count(self) -> int:
        return len(self.table)

    @cached_property
    def slots(self) -> list[SlotKey]:
        """Of every row."""
        return [SlotKey(*values) for values in zip(*(self.table[name] for name in SlotKey._fields), strict=True)]

    @cached_property
    def index(self) -> Mapping[SlotKey, np.ndarray[Any, Any]]:
        """Rows of each slot in the order of steps."""
        rows: dict[SlotKey, list[int]] = {}
        for i, slot in enumerate(self.slots):
            rows.setdefault(slot, []).append(i)
        steps = self.table["step"]
        return {slot: np.array(sorted(found, key=lambda i: steps[i])) for slot, found in rows.items()}

    def series(self) -> Iterator[np.ndarray[Any, Any]]:
        yield from self.index.values()

    def positions(self) -> Values:
        """first, inner or last, by block number; the LM head is last."""
        layers = self.table["layer"]
        blocks = {layer: layer_index(layer) for layer in dict.fromkeys(layers)}
        numbers = [b for b in blocks.values() if b is not None]
        low, high = (min(numbers), max(numbers)) if numbers else (0, 0)

        def place(layer: str, kind: str) -> str:
            block = blocks[layer]
            if kind == "lm_head" or (block is not None and block == high and high > low):
                return "last"
            return "first" if block is not None and block == low and high > low else "inner"

        return np.array([place(a, b) for a, b in zip(layers, self.table["kind"], strict=True)], dtype=object)

    def by_format(self, of: Callable[[int], float]) -> Values:
        """A number that depends on the mantissa bits of the row's format."""
        known = {name: of(fmt.mantissa_bits) for name, fmt in FORMATS.items()}
        return np.array([known.get(name, math.nan) for name in self.table["format"]], dtype=np.float64)

    def peers(self, node: Node) -> Values:
        """The median over the inner layers, for the same tensor and step; NaN where there are fewer than two."""
        values, inner = self.argument(node).astype(np.float64), self.value("position") == "inner"
        groups: dict[tuple[Any, ...], list[int]] = {}
        keys = list(zip(self.table["step"], *(self.table[n] for n in ("tensor", "direction", "recipe")), strict=True))
        for i, key in enumerate(keys):
            if inner[i] and math.isfinite(values[i]):
                groups.setdefault(key, []).append(i)
        medians = {key: float(np.median(values[found])) for key, found in groups.items() if len(found) > 1}
        return np.array([medians.get(key, math.nan) for key in keys], dtype=np.float64)

    def baseline(self, node: Node) -> Values:
        """The same expression for the same tensor of the baseline, at its nearest step."""
        if self.context.baseline is None:
            raise Missing("a twin to compare with (--baseline RUN)")
        other = CastRows(Context(self.context.baseline, None, self.context.answers, self.context.config))
        values = other.argument(node).astype(np.float64)
        places: dict[tuple[str, str, str], list[int]] = {}
        for i, slot in enumerate(other.slots):
            places.setdefault(slot[:3], []).append(i)
        steps, result = other.table["step"], np.full(self.count, np.nan)
        for i, slot in enumerate(self.slots):
            if found := places.get(slot[:3]):
                result[i] = values[min(found, key=lambda j: abs(int(steps[j]) - int(self.table["step"][i])))]
        return result

    def over_ranks(self, name: str) -> Values:
        """Octaves between the largest and the smallest of a statistic over the ranks."""
        if len(self.context.run.ranks) < 2:
            raise Missing("statistics of more than one rank")
        table = self.context.run.table(merge_ranks=False)
        groups: dict[tuple[Any, ...], list[float]] = {}
        keys = zip(table["step"], *(table[n] for n in SlotKey._fields), strict=True)
        for key, value in zip(keys, table.metric(name), strict=True):
            groups.setdefault(key, []).append(float(value))
        spread = {
            key: math.log2(max(v) / min(v)) if min(v) > 0 else math.nan for key, v in groups.items() if len(v) > 1
        }
        rows = zip(self.table["step"], *(self.table[n] for n in SlotKey._fields), strict=True)
        return np.array([spread.get(key, math.nan) for key in rows], dtype=np.float64)


class StepRows(_Rows):
    """One row per optimizer step."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.facts, self.functions = STEP_FACTS, STEP_FUNCTIONS
        self.columns = context.run.steps

    @property
    def count(self) -> int:
        return len(self.columns["step"])

    def column(self, name: str, why: str) -> Values:
        """A column of steps.jsonl.

        Raises:
            Missing: it was never logged.
        """
        values = self.columns.get(name)
        if values is None or not np.isfinite(np.asarray(values, dtype=np.float64)).any():
            raise Missing(f"{name!r} in steps.jsonl ({why}; watch.log({name}=...))")
        return np.asarray(values, dtype=np.float64)

    def since(self, kind: str) -> Values:
        """Steps since the last event of that kind; NaN before the first."""
        marks = sorted(int(e["step"]) for e in self.context.run.events if e.get("kind") == kind)
        steps = self.columns["step"]
        last = [max((m for m in marks if m < step), default=None) for step in steps]
        return np.array([math.nan if m is None else float(s - m) for m, s in zip(last, steps, strict=True)])

    def baseline(self, node: Node) -> Values:
        """The same expression at the baseline's nearest step."""
        if self.context.baseline is None:
            raise Missing("a BF16 twin (--baseline RUN)")
        other = StepRows(Context(self.context.baseline, None, self.context.answers, self.context.config))
        values, steps = other.argument(node).astype(np.float64), other.columns["step"]
        if not len(steps):
            raise Missing("steps of the BF16 twin")
        nearest = np.abs(steps[None, :] - self.columns["step"][:, None]).argmin(1)
        return np.asarray(values[nearest])


class EventRows(_Rows):
    """One row per event."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.facts, self.functions = EVENT_FACTS, MappingProxyType({})
        self.events = context.run.events

    @property
    def count(self) -> int:
        return len(self.events)

    def words(self, name: str) -> Values:
        """A field as words, "" where it is missing."""
        return np.array([str(event.get(name, "")) for event in self.events], dtype=object)

    def numbers(self, name: str) -> Values:
        """A field as numbers, NaN where it is missing."""
        return np.array([_number(event.get(name)) for event in self.events], dtype=np.float64)


class RunRows(_Rows):
    """One row: the run."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.facts = self.functions = MappingProxyType({})

    @property
    def count(self) -> int:
        return 1


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _median_of(values: Any, part: slice) -> float:
    known = values[np.isfinite(values)][part]
    return float(np.median(known)) if len(known) else math.nan


def _previous(values: Any) -> Any:
    return np.concatenate(([np.nan], values[:-1]))


def _rises(values: Any) -> float:
    """Kendall's tau against time: 1 if every later value is larger, 0 without a trend."""
    known = values[np.isfinite(values)]
    if len(known) < 4:
        return math.nan
    later = np.sign(known[None, :] - known[:, None])[np.triu_indices(len(known), 1)]
    return float(later.mean())


def _over(compute: Callable[[Any], Any]) -> Callable[[tuple[_Rows, Node]], Values]:
    return lambda call: call[0].over_series(call[1], compute)


def _ratio(part: Any, whole: Any) -> Any:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), np.nan)


def _column(name: str) -> Callable[[CastRows], Values]:
    return lambda rows: rows.table[name]


def _metric(name: str) -> Callable[[CastRows], Values]:
    return lambda rows: np.asarray(rows.table.metric(name))


def _flushed_in_blocks(rows: CastRows) -> Values:
    bins = np.asarray(rows.table.tallies.below_1x128)
    return np.asarray(100 * _ratio(bins[:, math.ceil(_QUARTERS_TO_ZERO) :].sum(1), bins.sum(1)))


def _at_block_amax(rows: CastRows) -> Values:
    bins = np.asarray(rows.table.tallies.below_1x32)
    return np.asarray(100 * _ratio(bins[:, :2].sum(1), bins.sum(1)))


_SERIES = MappingProxyType(
    {
        "early": Fact("median of the first three looks", _over(lambda v: _median_of(v, slice(None, _EARLY)))),
        "late": Fact("median of the last three looks", _over(lambda v: _median_of(v, slice(-_EARLY, None)))),
        "usual": Fact("median of all looks", _over(lambda v: _median_of(v, slice(None)))),
        "before": Fact("the look before", _over(_previous)),
        "rises": Fact("Kendall's tau over the looks: 1 if it only ever rises", _over(_rises)),
        "repeats": Fact("looks for which the condition holds", _over(lambda v: float(np.nansum(v)))),
        "abs": Fact("magnitude", lambda call: np.abs(call[0].argument(call[1]))),
    }
)
CAST_FUNCTIONS: Mapping[str, Fact] = MappingProxyType(
    {
        **_SERIES,
        "peers": Fact("median of the inner layers, same tensor and step", lambda call: call[0].peers(call[1])),
        "baseline": Fact("the same tensor in the twin", lambda call: call[0].baseline(call[1])),
    }
)
STEP_FUNCTIONS: Mapping[str, Fact] = MappingProxyType(
    {**_SERIES, "baseline": Fact("the same step of the twin", lambda call: call[0].baseline(call[1]))}
)

CAST_FACTS: Mapping[str, Fact] = MappingProxyType(
    {
        **{s.name: Fact(f"{s.meaning} [{s.unit}]", _metric(s.name)) for s in STATISTICS.values()},
        **{name: Fact("column of the statistics", _column(name)) for name in ("step", "kind", *SlotKey._fields)},
        "position": Fact("first, inner or last block", CastRows.positions),
        "floor_db": Fact("row SQNR of a healthy tensor in this format", lambda r: r.by_format(_floor)),
        "warn_db": Fact("25 dB for E4M3, 20 for E5M2", lambda r: r.by_format(lambda m: 10.0 + 5 * m)),
        "critical_db": Fact("15 dB for E4M3, 12 for E5M2", lambda r: r.by_format(lambda m: 6.0 + 3 * m)),
        "gain_error": Fact("|gain - 1|", lambda r: np.abs(r.value("gain") - 1)),
        "cosine_distance": Fact("1 - cosine", lambda r: 1 - r.value("cosine")),
        "clipped": Fact("elements clipped", lambda r: np.asarray(r.table.tallies.n_overflow)),
        "looks": Fact("looks at this cast", lambda r: _sizes(r)),
        "age": Fact("steps since the first look", lambda r: r.table["step"] - (min(r.table["step"], default=0))),
        "flushed_in_blocks_pct": Fact("predicted underflow with blocks of 1x128 [%]", _flushed_in_blocks),
        "at_block_amax_pct": Fact("elements within an eighth of the amax of their 1x32 block [%]", _at_block_amax),
        "amax_rank_octaves": Fact("log2(largest / smallest amax over ranks)", lambda r: r.over_ranks("amax")),
        "scale_rank_octaves": Fact("log2(largest / smallest scale over ranks)", lambda r: r.over_ranks("scale_max")),
    }
)
"""Names in conditions over casts."""


def _floor(mantissa_bits: int) -> float:
    return 13.5 + 6.02 * mantissa_bits


def _sizes(rows: CastRows) -> Values:
    return np.array([len(rows.index[slot]) for slot in rows.slots], dtype=np.float64)


_COLUMNS = MappingProxyType(
    {
        "loss": "the loss",
        "grad_norm": "norm of all gradients",
        "lr": "learning rate",
        "tokens": "tokens of the step",
        "max_logit": "largest attention logit",
        "update_rms": "RMS of Adam's update over its learning rate, largest over tensors",
        "dw_angle": "angle between dW in FP8 and in high precision, degrees",
        "dx_angle": "angle between dX in FP8 and in high precision, degrees",
    }
)


def _logged(name: str, why: str) -> Fact:
    return Fact(why, lambda rows: rows.column(name, why))


STEP_FACTS: Mapping[str, Fact] = MappingProxyType(
    {
        "step": Fact("number of the optimizer step", lambda r: r.columns["step"].astype(np.float64)),
        **{name: _logged(name, why) for name, why in _COLUMNS.items()},
        "age": Fact("steps since the first one on record", lambda r: r.columns["step"] - min(r.columns["step"])),
        "loss_z": Fact(
            "robust standard deviations above the 64 losses before",
            lambda r: robust_distance(r.column("loss", _COLUMNS["loss"])),
        ),
        "since_resume": Fact("steps since the run was resumed", lambda r: r.since("resumed")),
    }
)
"""Names in conditions over steps."""


def _words(name: str) -> Callable[[EventRows], Values]:
    return lambda rows: rows.words(name)


def _numbers(name: str) -> Callable[[EventRows], Values]:
    return lambda rows: rows.numbers(name)


EVENT_FACTS: Mapping[str, Fact] = MappingProxyType(
    {
        **{name: Fact("of the event", _words(name)) for name in ("kind", "check", "layer", "tensor")},
        **{name: Fact("of the event", _words(name)) for name in ("reason", "direction", "text")},
        **{name: Fact("of the event", _numbers(name)) for name in ("step", "value", "threshold")},
    }
)
"""Names in conditions over events."""


def _all_casts(column: str, wanted: str) -> Callable[[Context], str]:
    def ask(context: Context) -> str:
        values = set(context.table[column])
        return "yes" if values == {wanted} else "no" if wanted not in values else "partly"

    return ask


def _odd_layers(context: Context) -> int:
    layers = context.run.manifest.get("layers")
    if not layers:
        raise Missing("the layers in watch.json")
    return sum(any(int(n) % 16 for n in layer.get("shape") or ()) for layer in layers)


def _coverage(context: Context) -> float:
    coverage = context.run.manifest.get("coverage") or {}
    if not coverage.get("linear"):
        raise Missing("the coverage in watch.json")
    return 100.0 * float(coverage["seen"]) / float(coverage["linear"])


RUN_FACTS: Mapping[str, Fact] = MappingProxyType(
    {
        "steps": Fact("optimizer steps on record", lambda c: float(len(c.run.steps["step"]))),
        "looks": Fact("steps looked at", lambda c: float(len(set(c.table["step"])))),
        "coverage_pct": Fact("linear layers that were seen", _coverage),
        "findings": Fact("numeric findings so far", lambda c: float(c.findings)),
        "diverged": Fact("whether the loss rose for good, or is not finite", lambda c: c.loss.diverged),
        "diverged_at": Fact("since which step", lambda c: c.loss.diverged_at),
        "spikes": Fact("loss spikes per 1000 steps", lambda c: c.loss.spike_rate),
        "recovery": Fact("median steps until a spike is over", lambda c: c.loss.recovery),
        "baseline_spikes": Fact("spikes of the twin per 1000 steps", lambda c: c.baseline_loss.spike_rate),
        "baseline_recovery": Fact("median steps of the twin's", lambda c: c.baseline_loss.recovery),
        "gap_pct": Fact("loss above the twin's in the last quarter [%]", lambda c: c.loss.gap(c.baseline_loss)[0]),
        "gap_drift_pct": Fact("change of the gap from the quarter before", lambda c: c.loss.gap(c.baseline_loss)[1]),
        "gap_noise_pct": Fact("what that gap is uncertain by", lambda c: c.loss.gap(c.baseline_loss)[2]),
        "odd_layers": Fact("layers with a dimension that is no multiple of 16", lambda c: float(_odd_layers(c))),
        "per_tensor": Fact("whether casts have one scale a tensor", _all_casts("granularity", "tensor")),
        "delayed": Fact("whether scales are delayed", _all_casts("scaling", "delayed")),
    }
)
"""Names after "run."."""

KINDS_OF_ROWS: Mapping[str, tuple[type[Any], Mapping[str, Fact], Mapping[str, Fact]]] = MappingProxyType(
    {
        "casts": (CastRows, CAST_FACTS, CAST_FUNCTIONS),
        "steps": (StepRows, STEP_FACTS, STEP_FUNCTIONS),
        "events": (EventRows, EVENT_FACTS, MappingProxyType({})),
        "run": (RunRows, MappingProxyType({}), MappingProxyType({})),
    }
)
"""What a rule may be `over`; see also `Context.scalar`."""
