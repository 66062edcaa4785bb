"""What an importer hands over, and how it becomes a run folder."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ottava.debug.layer_names import layer_kind
from ottava.debug.run.schema import SlotKey, cast_key
from ottava.debug.run.writer import RunWriter
from ottava.debug.statistics import STATISTICS
from ottava.debug.tally import Tally
from ottava.quantized_tensor import QuantizationSpec
from ottava.recipe import RECIPES, TENSORS
from ottava.settings import flatten
from ottava.untrusted import MAX_STEP, MAX_YAML_BYTES, UntrustedError, parse_yaml, read_text

UNKNOWN = "unknown"
_MAX_RANK = 999_999_999
"""What the name of a part has room for."""
NO_SQNR = "mse too coarse for sqnr_db"
"""Key beside statistics: a ratio with this mean squared error would be mostly rounding."""


class ImportRunError(ValueError):
    """Nothing can be imported from there; the message says what was looked for."""

    exit_code = 4


def whole(digits: str) -> int:
    """The whole number that a file writes; of one with more digits than any that is kept, the first of them.

    Example:
        >>> whole("000100"), whole("9" * 5000) > MAX_STEP
        (100, True)
    """
    return int(digits[:20])


class Place(NamedTuple):
    """Whose statistics they are."""

    step: int
    rank: int
    layer: str
    tensor: str


class Cast(NamedTuple):
    """Which cast of a tensor; (None, "row") is the one that the run trained with."""

    recipe: str | None
    direction: str


class Collected:
    """Statistics by place and cast, numbers of steps, and what was not understood."""

    def __init__(self, *, recipe: str | None = None, tags: Mapping[str, str] | None = None) -> None:
        self.recipe, self.tags = recipe, dict(tags or {})
        self.kinds: dict[str, int] = {}
        """Files read, by kind."""
        self.unmapped: Counter[str] = Counter()
        """Statistics that have no name here, and how many values of each."""
        self.notes: list[str] = []
        """What whoever reads the run must know."""
        self.steps: defaultdict[int, dict[str, float]] = defaultdict(dict)
        self.layers: dict[str, None] = {}
        """Layers of which something is known."""
        self.spellings: dict[str, None] = {}
        """Full names of layers, also of those of which nothing is known."""
        self._tensors: defaultdict[Place, dict[str, float]] = defaultdict(dict)
        self._casts: defaultdict[Place, dict[Cast, dict[str, float]]] = defaultdict(dict)
        self._sources: dict[Place, str] = {}
        self._tallies: list[tuple[int, int, SlotKey, Tally]] = []
        self.source = UNKNOWN
        """Of the rows that come now: "import:..."."""

    def note(self, text: str) -> None:
        """Adds a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def of_tensor(self, place: Place, values: Mapping[str, float]) -> None:
        """Adds statistics that do not depend on a cast: amax, std, ..."""
        if self._seen(place):
            self._tensors[place] |= values

    def of_cast(self, place: Place, cast: Cast, values: Mapping[str, float]) -> None:
        """Adds statistics of one cast: underflow, mse, ..."""
        if self._seen(place):
            self._casts[place].setdefault(cast, {}).update(values)

    def _seen(self, place: Place) -> bool:
        if not self._counts(place.step, place.rank):
            return False
        self.layers[place.layer] = None
        self._sources.setdefault(place, self.source)
        return True

    def _counts(self, step: int, rank: int = 0) -> bool:
        """Whether a step and a rank are numbers that a run folder has room for; notes it where they are not."""
        if abs(step) <= MAX_STEP and rank <= _MAX_RANK:
            return True
        self.note(f"what stands at step {step} of rank {rank} is left out; needs a step up to {MAX_STEP:,}")
        return False

    def tensors(self) -> Iterator[tuple[Place, dict[str, float]]]:
        """What is known of each tensor, to be changed in place; also of one of which only casts are known."""
        for place in [*self._casts]:
            self._tensors.setdefault(place, {})
        yield from self._tensors.items()

    def casts(self, place: Place) -> Iterator[dict[str, float]]:
        """What is known of each cast of a tensor."""
        yield from self._casts.get(place, {}).values()

    def tally(self, step: int, rank: int, key: SlotKey, tally: Tally) -> None:
        """Adds sums that were measured here, from the tensor itself."""
        if self._counts(step, rank):
            self.layers[key.layer] = None
            self._tallies.append((step, rank, key, tally))

    def number(self, step: int, name: str, value: float) -> None:
        """Adds a number of a step: loss, grad_norm, lr, tokens."""
        if self._counts(step):
            self.steps[step][name] = value

    def write(self, source: Path, target: Path) -> None:
        """Makes the run folder.

        Raises:
            ImportRunError: nothing was understood.
        """
        places = sorted({*self._tensors, *self._casts}, key=lambda p: (p.rank, p.step))
        if not places and not self._tallies and not self.steps:
            shown = "; ".join(
                [*self.notes[:4], *(f"{name} ({count}x)" for name, count in self.unmapped.most_common(5))]
            )
            raise ImportRunError(f"{source}: nothing in it was understood. {shown or 'There were no values'}")
        ranks = sorted({0} | {place.rank for place in places} | {rank for _, rank, *_ in self._tallies})
        for rank in ranks:
            with RunWriter(target, rank=rank) as writer:
                for place in (p for p in places if p.rank == rank):
                    self._write_place(writer, place)
                for step, of, key, tally in self._tallies:
                    if of == rank:
                        writer.tally(step, key, tally)
                for step in sorted(self.steps):
                    writer.step(step, **self.steps[step])
                if rank == 0:
                    writer.describe(**self._manifest(source, [place.step for place in places]))

    def _write_place(self, writer: RunWriter, place: Place) -> None:
        of_tensor = self._tensors.get(place, {})
        casts = self._casts.get(place) or {Cast(None, "row"): {}}
        for cast, values in casts.items():
            reported = _with_derived(of_tensor | values)
            writer.tally(place.step, self._key(place, cast), Tally(), reported=reported)

    def _key(self, place: Place, cast: Cast) -> SlotKey:
        recipe = cast.recipe or self.recipe
        spec, source = spec_of(recipe, place.tensor), self._sources[place]
        if spec is None:
            how = (place.layer, place.tensor, cast.direction, recipe or UNKNOWN)
            return SlotKey(*how, *(UNKNOWN,) * 4, source=source)
        return cast_key(place.layer, place.tensor, cast.direction, recipe or UNKNOWN, spec, source)

    def _config(self, source: Path) -> dict[str, Any]:
        """Settings in YAML files beside the logs, flat: {"a.b": 1}. Damaged ones are noted and left out."""
        folder = source if source.is_dir() else source.parent
        flat: dict[str, Any] = {}
        for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])[:20]:
            try:
                values = parse_yaml(read_text(path, most=MAX_YAML_BYTES))
            except (OSError, UntrustedError) as error:
                self.note(f"{path.name}: is left out ({str(error).splitlines()[0]})")
                continue
            if isinstance(values, Mapping):
                flat |= flatten(values)
        plain = (str, int, float, type(None))
        return {key: value if isinstance(value, plain) else str(value) for key, value in flat.items()}

    def _manifest(self, source: Path, steps: list[int]) -> dict[str, Any]:
        names, config = list(self.layers), self._config(source)
        return {
            "imported": {
                "source": source.name,
                "files": self.kinds,
                "steps": len({*steps, *(step for step, *_ in self._tallies), *self.steps}),
                "not_understood": dict(self.unmapped.most_common(50)),
                "notes": self.notes,
            },
            "layers": [{"name": n, "kind": layer_kind(n), "type": UNKNOWN, "source": "import"} for n in names],
            "coverage": {"linear": len(names), "seen": len(names), "skipped": []},
            "config": config,
        }


def spec_of(recipe: str | None, tensor: str) -> QuantizationSpec | None:
    """How a registered recipe casts a tensor; None for what it does not cast, and for recipes nobody knows."""
    if recipe is None or recipe not in RECIPES:
        return None
    return RECIPES[recipe].cells(tensor)[0] if tensor in TENSORS else None


def _with_derived(values: dict[str, float]) -> dict[str, float]:
    """What follows from what was reported: E[x**2] = var + mean**2."""
    known = dict(values)
    power = known.pop("power", math.nan)
    if math.isnan(power) and {"std", "mean"} <= known.keys():
        power = known["std"] ** 2 + known["mean"] ** 2
    if power > 0 and math.isfinite(power):
        known.setdefault("rms", math.sqrt(power))
        if known.get("mse", 0.0) > 0 and NO_SQNR not in known:
            known.setdefault("sqnr_db", 10 * math.log10(power / known["mse"]))
        if "amax" in known:
            known.setdefault("outlier_ratio", known["amax"] / math.sqrt(power))
    if "underflow_pct_numel" in known:
        known.setdefault("underflow_pct", known["underflow_pct_numel"])
    return {name: value for name, value in known.items() if name in STATISTICS}
