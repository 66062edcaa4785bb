"""Collects the values of importers and writes them as a run folder."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ottava.base.files import replacing_folder
from ottava.base.settings import flatten
from ottava.base.untrusted import MAX_STEP, MAX_YAML_BYTES, UntrustedError, parse_yaml, read_text
from ottava.measure.layer_names import layer_kind
from ottava.measure.statistics import STATISTICS
from ottava.measure.tally import Tally
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import RECIPES, TENSORS
from ottava.record.schema import RunError, SlotKey, cast_key
from ottava.record.writer import RunWriter

UNKNOWN = "unknown"
_MAX_RANK = 999_999_999
"""Largest rank that fits into the name of a part."""
NO_SQNR = "mse too coarse for sqnr_db"
"""Key beside statistics: this mean squared error has too few digits for a ratio."""


class ImportRunError(ValueError):
    """The source has nothing to import; the message says what the importers looked for."""

    exit_code = 4


def whole(digits: str) -> int:
    """A whole number in a file, from its first 20 digits: a larger one is beyond every limit anyway.

    Example:
        >>> whole("000100"), whole("9" * 5000) > MAX_STEP
        (100, True)
    """
    return int(digits[:20])


class Place(NamedTuple):
    """The place of statistics."""

    step: int
    rank: int
    layer: str
    tensor: str


class Cast(NamedTuple):
    """A cast of a tensor; (None, "row") is the cast of the training itself."""

    recipe: str | None
    direction: str


class Collected:
    """Statistics by place and cast, numbers of steps, and the values that were not understood."""

    def __init__(self, *, recipe: str | None = None, tags: Mapping[str, str] | None = None) -> None:
        self.recipe, self.tags = recipe, dict(tags or {})
        self.kinds: dict[str, int] = {}
        """Kind -> number of files."""
        self.unmapped: Counter[str] = Counter()
        """Unknown statistics -> number of values."""
        self.notes: list[str] = []
        """Notes for readers of the run."""
        self.steps: defaultdict[int, dict[str, float]] = defaultdict(dict)
        self.layers: dict[str, None] = {}
        """Layers with values."""
        self.spellings: dict[str, None] = {}
        """Full names of layers, also of layers without values."""
        self._tensors: defaultdict[Place, dict[str, float]] = defaultdict(dict)
        self._casts: defaultdict[Place, dict[Cast, dict[str, float]]] = defaultdict(dict)
        self._sources: dict[Place, str] = {}
        self._tallies: list[tuple[int, int, SlotKey, Tally]] = []
        self.source = UNKNOWN
        """Source of the next rows: "import:..."."""

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
        """Whether step and rank fit into a run folder; notes it if they do not."""
        if abs(step) <= MAX_STEP and rank <= _MAX_RANK:
            return True
        self.note(f"left out step {step} of rank {rank}; needs a step up to {MAX_STEP:,}")
        return False

    def tensors(self) -> Iterator[tuple[Place, dict[str, float]]]:
        """The statistics of each tensor, also of a tensor with casts only; callers may change them in place."""
        for place in [*self._casts]:
            self._tensors.setdefault(place, {})
        yield from self._tensors.items()

    def casts(self, place: Place) -> Iterator[dict[str, float]]:
        """The statistics of each cast of a tensor."""
        yield from self._casts.get(place, {}).values()

    def tally(self, step: int, rank: int, key: SlotKey, tally: Tally) -> None:
        """Adds sums that we measured from the tensor itself."""
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
            ImportRunError: no value was understood.
        """
        places = sorted({*self._tensors, *self._casts}, key=lambda p: (p.rank, p.step))
        if not places and not self._tallies and not self.steps:
            unmapped = [f"{name} ({count}x)" for name, count in self.unmapped.most_common(5)]
            shown = "; ".join(self.notes[:4] + unmapped)
            raise ImportRunError(f"{source}: understood no value. {shown or 'The files have none'}")
        ranks = sorted({0} | {place.rank for place in places} | {rank for _, rank, *_ in self._tallies})
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise RunError(f"{target} exists and is not empty; give a new folder")
        with replacing_folder(target) as scratch:
            for rank in ranks:
                with RunWriter(scratch, rank=rank) as writer:
                    self._write_rank(writer, rank, [place for place in places if place.rank == rank])
                    if rank == 0:
                        writer.describe(**self._manifest(source, [place.step for place in places]))

    def _write_rank(self, writer: RunWriter, rank: int, places: Sequence[Place]) -> None:
        for place in places:
            of_tensor = self._tensors.get(place, {})
            casts = self._casts.get(place) or {Cast(None, "row"): {}}
            for cast, values in casts.items():
                reported = _with_derived(of_tensor | values)
                writer.tally(place.step, self._key(place, cast), Tally(), reported=reported)
        for step, owner, key, tally in self._tallies:
            if owner == rank:
                writer.tally(step, key, tally)
        for step in sorted(self.steps):
            writer.step(step, **self.steps[step])

    def _key(self, place: Place, cast: Cast) -> SlotKey:
        recipe = cast.recipe or self.recipe
        spec, source = spec_of(recipe, place.tensor), self._sources[place]
        if spec is None:
            how = (place.layer, place.tensor, cast.direction, recipe or UNKNOWN)
            return SlotKey(*how, *(UNKNOWN,) * 4, source=source)
        return cast_key(place.layer, place.tensor, cast.direction, recipe or UNKNOWN, spec, source)

    def _config(self, source: Path) -> dict[str, Any]:
        """Settings in YAML files beside the logs, flat: {"a.b": 1}. Notes damaged files and leaves them out."""
        folder = source if source.is_dir() else source.parent
        flat: dict[str, Any] = {}
        for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])[:20]:
            try:
                values = parse_yaml(read_text(path, most=MAX_YAML_BYTES))
            except (OSError, UntrustedError) as error:
                self.note(f"left out {path.name} ({str(error).splitlines()[0]})")
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
    """The spec by which a registered recipe casts a tensor; None if it does not, or if the recipe is unknown."""
    if recipe is None or recipe not in RECIPES:
        return None
    return RECIPES[recipe].cells(tensor)[0] if tensor in TENSORS else None


def _with_derived(values: dict[str, float]) -> dict[str, float]:
    """Adds the statistics that follow from the reported ones: E[x**2] = var + mean**2."""
    values = dict(values)
    power = values.pop("power", math.nan)
    if math.isnan(power) and {"std", "mean"} <= values.keys():
        power = values["std"] ** 2 + values["mean"] ** 2
    if power > 0 and math.isfinite(power):
        values.setdefault("rms", math.sqrt(power))
        if values.get("mse", 0.0) > 0 and NO_SQNR not in values:
            values.setdefault("sqnr_db", 10 * math.log10(power / values["mse"]))
        if "amax" in values:
            values.setdefault("outlier_ratio", values["amax"] / math.sqrt(power))
    if "underflow_pct_numel" in values:
        values.setdefault("underflow_pct", values["underflow_pct_numel"])
    return {name: value for name, value in values.items() if name in STATISTICS}
