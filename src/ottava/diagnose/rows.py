"""The rows for conditions: casts, steps, events, and the run as one row.

`facts` lists the names that conditions may use; this module computes their values.
"""

from __future__ import annotations

import ast
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ottava.diagnose.conditions import Missing, Node, Values, evaluate, numbers
from ottava.diagnose.loss import LossCurve
from ottava.measure.layer_names import end_blocks, layer_index, only_simulated, starred
from ottava.numerics.formats import FORMATS, Format
from ottava.recipe import CELL_OF, RECIPES, Recipe
from ottava.record.ranks import rank_spread
from ottava.record.reader import Run, Table
from ottava.record.schema import SlotKey


@dataclass(frozen=True)
class Fact:
    """A name that rules may use."""

    meaning: str
    of: Callable[[Any], Any]


Vocabulary = Mapping[str, tuple[Mapping[str, Fact], Mapping[str, Fact]]]
"""Kind of rows -> names, functions."""


@dataclass(frozen=True)
class Context:
    """A run with everything that conditions need besides rows."""

    run: Run
    baseline: Run | None
    answers: Mapping[str, str]
    config: Mapping[str, tuple[str, ...]]
    """Name of a setting -> its keys in the frameworks."""
    vocabulary: Vocabulary
    """Names and functions of each kind of rows."""
    findings: int = 0
    """Numeric findings so far."""
    first_finding: float = math.inf
    """Their first step."""

    @cached_property
    def table(self) -> Table:
        """Full looks at real casts; if nothing is cast, those at the casts of the first simulated recipe. Other recipes
        are what-ifs, and `simulated` has the layers that stay in BF16 on purpose."""
        real = self._looks["source"] != "hook"
        return self._looks.take(np.flatnonzero(real)) if real.any() else self._looks

    @cached_property
    def layers(self) -> list[str]:
        """The layers of these casts, in the order of execution."""
        return list(dict.fromkeys(self.table["layer"]))

    @cached_property
    def simulated(self) -> Table:
        """Full looks at simulated casts beside real ones."""
        real = self._looks["source"] != "hook"
        return self._looks.take(np.flatnonzero(~real if real.any() else np.zeros(len(real), dtype=bool)))

    @cached_property
    def _looks(self) -> Table:
        """Full looks without those of other simulated recipes, and of routers that are only simulated."""
        table = self.run.table()
        casts, keys = table.casts
        wanted = np.array([not only_simulated(key.layer, key.source) for key in keys], dtype=bool)
        table = table.take(np.flatnonzero(wanted[casts]))
        first = next(iter((self.run.manifest.get("settings") or {}).get("recipes") or ()), None)
        if first is None or not len(table):
            return table
        return table.take(np.flatnonzero((table["source"] != "hook") | (table["recipe"] == first)))

    @cached_property
    def recipes(self) -> Mapping[str, Recipe]:
        """The recipes of the run by name: as recorded, or registered ones."""
        found = dict(RECIPES)
        for name, values in (self.run.manifest.get("recipes") or {}).items():
            try:
                found[str(name)] = Recipe.from_dict(values)
            except (TypeError, ValueError, KeyError):
                continue  # of another version
        return found

    @cached_property
    def twin_casts(self) -> bool:
        """Whether the baseline casts, so that it is no BF16 twin."""
        return self.baseline is not None and bool((self.baseline.table()["source"] != "hook").any())

    @cached_property
    def loss(self) -> LossCurve:
        """The run's loss."""
        return LossCurve(self.run.steps["step"], self.run.steps["loss"])

    @cached_property
    def baseline_loss(self) -> LossCurve:
        """The baseline's loss.

        Raises:
            Missing: there is no baseline.
        """
        if self.baseline is None:
            raise Missing("a BF16 twin (--baseline RUN)")
        return LossCurve(self.baseline.steps["step"], self.baseline.steps["loss"])

    def scalar(self, name: str) -> Any:
        """A fact of the whole run, by its dotted name.

        Raises:
            Missing: the fact is unknown.
        """
        prefix, _, rest = name.partition(".")
        if prefix == "run":
            return self.vocabulary["run"][0][rest].of(self)
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


class AnyRows(ABC):
    """Base of all rows: computes each fact once, and knows the facts of the whole run."""

    kind = ""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.facts, self.functions = context.vocabulary[self.kind]
        self._known: dict[str, Values] = {}

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of rows."""

    def value(self, name: str) -> Values:
        """See `conditions.Rows`."""
        if "." in name:
            scalar = self.context.scalar(name)
            return np.full(self.count, scalar, dtype=object if isinstance(scalar, str) else np.float64)
        if name not in self._known:
            self._known[name] = np.asarray(self.facts[name].of(self))
        return self._known[name]

    def among(self, name: str, words: Collection[str]) -> Values:
        """Whether the fact of each row is one of these words."""
        values = self.value(name)
        held = {value: str(value) in words for value in dict.fromkeys(values.tolist())}
        return np.fromiter(map(held.__getitem__, values.tolist()), dtype=bool, count=len(values))

    def call(self, name: str, argument: Node) -> Values:
        """See `conditions.Rows`."""
        key = f"{name}({ast.unparse(argument)})"
        if key not in self._known:
            self._known[key] = np.asarray(self.functions[name].of((self, argument)))
        return self._known[key]

    def argument(self, node: Node) -> Values:
        """The values of a function's argument; NaN for an unknown condition."""
        missing: set[str] = set()
        values = evaluate(node, self, missing)
        if values is None:
            raise Missing(", ".join(sorted(missing)))
        return values

    def series(self) -> Iterator[np.ndarray[Any, Any]]:
        """Row numbers of each series, in the order of steps."""
        yield np.arange(self.count)

    def over_series(self, node: Node, compute: Callable[[Any], Any]) -> Values:
        """Applies compute(values of one series), which gives one number or one per row."""
        values = numbers(self.argument(node))
        result = np.full(self.count, np.nan)
        for index in self.series():
            result[index] = compute(values[index])
        return result


class CastRows(AnyRows):
    """One row per cast and full look."""

    kind = "casts"

    def __init__(self, context: Context, table: Table | None = None) -> None:
        super().__init__(context)
        self.table = context.table if table is None else table

    @property
    def count(self) -> int:
        return len(self.table)

    @cached_property
    def slots(self) -> list[SlotKey]:
        """The cast of every row."""
        return self.table.keys()

    @cached_property
    def index(self) -> Mapping[SlotKey, np.ndarray[Any, Any]]:
        """Rows of each slot in the order of steps."""
        return self.table.series()

    def series(self) -> Iterator[np.ndarray[Any, Any]]:
        """One series per cast."""
        yield from self.index.values()

    def _spec(self, slot: SlotKey) -> Any:
        """The cast that the recipe asks for; None if unknown."""
        recipe = self.context.recipes.get(slot.recipe)
        if recipe is None or (slot.tensor, slot.direction) not in CELL_OF:
            return None
        gemm, side = CELL_OF[slot.tensor, slot.direction]
        return getattr(getattr(recipe.for_layer(slot.layer), gemm), side)

    def window(self, row: int) -> float:
        """The length of the amax history behind the scale of a row; inf if unknown."""
        spec = self._spec(self.slots[row])
        return math.inf if spec is None else float(spec.amax_history_len)

    def margins(self) -> Values:
        """The margin of each row's cast in octaves; NaN if unknown."""
        casts, keys = self.table.casts
        specs = [self._spec(key) for key in keys]
        return np.asarray(np.array([math.nan if s is None else float(s.margin) for s in specs])[casts])

    def positions(self) -> Values:
        """ "first", "inner" or "last" by block number; the LM head is "last"."""
        casts, keys = self.table.casts
        blocks = {key.layer: layer_index(key.layer) for key in keys}
        low, high = end_blocks(blocks) or (math.nan, math.nan)

        def place(layer: str, kind: str) -> str:
            if kind == "lm_head" or blocks[layer] == high:
                return "last"
            return "first" if blocks[layer] == low else "inner"

        kinds = self.table["kind"][[rows[0] for rows in self.index.values()]]
        places = [place(key.layer, kind) for key, kind in zip(keys, kinds, strict=True)]
        return np.asarray(np.array(places, dtype=object)[casts])

    def by_format(self, of: Callable[[Format], float]) -> Values:
        """A number for the format of every row."""
        by_name = {name: of(fmt) for name, fmt in FORMATS.items()}
        casts, keys = self.table.casts
        return np.asarray(np.array([by_name.get(key.format, math.nan) for key in keys], dtype=np.float64)[casts])

    def peers(self, node: Node) -> Values:
        """The median over the inner layers of the same name, or else over all inner layers, for the same tensor and
        step; NaN if there are fewer than two of all."""
        values, inner = numbers(self.argument(node)), self.value("position") == "inner"
        known = np.flatnonzero(inner & np.isfinite(values))
        group, named = self._peer_groups
        medians, count = _medians(values, known, group)
        own, _ = _medians(values, known, named)
        usual = np.where(np.isfinite(own[named]), own[named], medians[group])
        return np.where(count[group] > 1, usual, np.nan)

    @cached_property
    def _peer_groups(self) -> tuple[Any, Any]:
        """The group of each row, without and with the layer's name in its block."""
        group, _ = self.table.grouped(("step", "tensor", "direction", "recipe"))
        casts, keys = self.table.casts
        names = [starred(key.layer)[0] for key in keys]
        order = {name: i for i, name in enumerate(dict.fromkeys(names))}
        name = np.array([order[n] for n in names], dtype=np.int64)[casts]
        return group, np.unique(group * max(len(order), 1) + name, return_inverse=True)[1]

    def ends(self, node: Node) -> Values:
        """Of the first and the last block, how many have a layer for which the condition holds at the step of each row:
        0 to 2. An LM head counts as both, because models have one."""
        held, places, kinds = numbers(self.argument(node)) == 1, self.value("position"), self.table["kind"]
        steps = np.unique(self.table["step"], return_inverse=True)[1]
        found = np.zeros((2, steps.max(initial=0) + 1))
        for end, name in enumerate(("first", "last")):
            found[end, steps[held & ((places == name) | ((places != "inner") & (kinds == "lm_head")))]] = 1
        return np.asarray(found.sum(0)[steps])

    def baseline(self, node: Node) -> Values:
        """The same expression for the same tensor of the baseline, at its nearest step."""
        if self.context.baseline is None:
            raise Missing("a BF16 twin (--baseline RUN)")
        other = CastRows(replace(self.context, run=self.context.baseline, baseline=None))
        values = numbers(other.argument(node))
        places: dict[tuple[str, str, str], list[int]] = {}
        for i, slot in enumerate(other.slots):
            places.setdefault(slot[:3], []).append(i)
        steps, result = other.table["step"], np.full(self.count, np.nan)
        for i, slot in enumerate(self.slots):
            if rows := places.get(slot[:3]):
                result[i] = values[min(rows, key=lambda j: abs(int(steps[j]) - int(self.table["step"][i])))]
        return result

    def over_ranks(self, name: str) -> Values:
        """Octaves between the smallest and the largest value of a statistic over ranks."""
        if len(self.context.run.ranks) < 2:
            raise Missing("statistics of more than one rank")
        spread = {(s.step, s.key): s.octaves for s in rank_spread(self.context.run, name)}
        rows = zip(self.table["step"], self.slots, strict=True)
        return np.array([spread.get(row, math.nan) for row in rows], dtype=np.float64)


def _medians(values: Values, known: Any, group: Any) -> tuple[Values, Values]:
    """The median of the known rows in each group, NaN without one; and how many there are."""
    known = known[np.lexsort((values[known], group[known]))]
    count = np.bincount(group[known], minlength=int(group.max(initial=-1)) + 1)
    start = np.cumsum(count) - count
    medians = np.full(len(count), np.nan)
    some = np.flatnonzero(count)
    low, high = start[some] + (count[some] - 1) // 2, start[some] + count[some] // 2
    medians[some] = (values[known[low]] + values[known[high]]) / 2
    return medians, count


class StepRows(AnyRows):
    """One row per optimizer step."""

    kind = "steps"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.columns = context.run.steps

    @property
    def count(self) -> int:
        return len(self.columns["step"])

    def column(self, name: str, why: str) -> Values:
        """A column of steps.jsonl.

        Raises:
            Missing: the run never logged it.
        """
        values = self.columns.get(name)
        if values is None or not np.isfinite(np.asarray(values, dtype=np.float64)).any():
            raise Missing(f"{name!r} in steps.jsonl ({why}: watch.log({name}=...))")
        return np.asarray(values, dtype=np.float64)

    def since(self, kind: str) -> Values:
        """Steps since the last event of this kind; NaN before the first."""
        marks = sorted(int(e["step"]) for e in self.context.run.events if e.get("kind") == kind)
        steps = self.columns["step"]
        last = [max((m for m in marks if m < step), default=None) for step in steps]
        return np.array([math.nan if m is None else float(s - m) for m, s in zip(last, steps, strict=True)])

    def baseline(self, node: Node) -> Values:
        """The same expression at the baseline's nearest step."""
        if self.context.baseline is None:
            raise Missing("a BF16 twin (--baseline RUN)")
        other = StepRows(replace(self.context, run=self.context.baseline, baseline=None))
        values, steps = numbers(other.argument(node)), other.columns["step"]
        if not len(steps):
            raise Missing("steps of the BF16 twin")
        nearest = np.abs(steps[None, :] - self.columns["step"][:, None]).argmin(1)
        return np.asarray(values[nearest])


class EventRows(AnyRows):
    """One row per event."""

    kind = "events"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.events = [*context.run.events, *(e for e in context.run.training if e.get("kind") == "mode")]

    @property
    def count(self) -> int:
        return len(self.events)

    def words(self, name: str) -> Values:
        """A field as words; "" if missing."""
        return np.array([str(event.get(name, "")) for event in self.events], dtype=object)

    def numbers(self, name: str) -> Values:
        """A field as numbers; NaN if missing."""
        return numbers([event.get(name) for event in self.events])


class RunRows(AnyRows):
    """One row: the run."""

    kind = "run"

    @property
    def count(self) -> int:
        return 1
