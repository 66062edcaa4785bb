"""The facts of a recorded run, read once: columns of its steps, parameters, batches, casts and experiments.

A fact that the run folder does not have is None or NaN, never zero. Laws, experiments and comparisons read runs only
through this class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ottava.diagnose.loss import LossCurve
from ottava.record.reader import Run, Table, number_of

Values = npt.NDArray[Any]
_MOVES = ("ratio", "still", "gradient", "weight", "spread", "written")
GROUP_SETTINGS = ("lr", "weight_decay", "beta1", "beta2", "eps", "momentum")
"""Settings of an optimizer's group that a watch writes at every step."""
_FROM_ZERO = 1e6  # the first step of a weight that begins at zero, as LoRA's, is no part of it


def bare(name: str) -> str:
    """A layer's name without wrappers: two runs of one model differ in them.

    Example:
        >>> bare("_orig_mod.module.layers.0.fc1")
        'layers.0.fc1'
    """
    for word in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.", "model."):
        name = name.replace(word, "") if word.startswith("_") else name.removeprefix(word)
    return name


class Facts:
    """What is known of a run.

    Args:
        run: the run folder.

    Example:
        >>> import tempfile
        >>> from ottava.record.writer import RunWriter
        >>> with tempfile.TemporaryDirectory() as folder, RunWriter(f"{folder}/run") as writer:
        ...     for step in (1, 2):
        ...         writer.step(step, loss=3.0 - step, lr=0.0)
        ...     writer.flush()
        ...     facts = Facts(Run.open(f"{folder}/run"))
        ...     facts.column("lr").tolist(), facts.column("grad_norm") is None
        ([0.0, 0.0], True)
    """

    def __init__(self, run: Run) -> None:
        self.run, self.manifest = run, run.manifest

    # --- steps --------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> Values:
        """Numbers of the recorded steps."""
        return np.asarray(self.run.steps["step"])

    def column(self, name: str) -> Values | None:
        """A column of the steps, float64; None if no step has it."""
        values = self.run.steps.get(name)
        if values is None or not np.isfinite(np.asarray(values, dtype=np.float64)).any():
            return None
        return np.asarray(values, dtype=np.float64)

    def has(self, names: str) -> bool:
        """Whether one of "a|b" is known: a column, an entry of the manifest or of a shadow, or a property; "": yes."""
        return not names or any(
            self.column(name) is not None
            or name in self.manifest
            or any(name in entry for entry in self.experiments("shadow"))
            or bool(getattr(self, name, None) or getattr(self.run, name, None))
            for name in names.split("|")
        )

    def beside(self, other: Facts, name: str) -> tuple[Values, Values, Values] | None:
        """(steps, values here, values there) where both runs know a column; None if one has none."""
        mine, theirs = self.column(name), other.column(name)
        if mine is None or theirs is None:
            return None
        steps, here, there = np.intersect1d(self.steps, other.steps, return_indices=True)
        mine, theirs = mine[here], theirs[there]
        known = np.isfinite(mine) & np.isfinite(theirs)
        return steps[known], mine[known], theirs[known]

    @cached_property
    def loss(self) -> LossCurve:
        """The loss over steps."""
        return LossCurve.of(self.run)

    def at(self, name: str, step: float) -> float:
        """A column's value at the last recorded step up to `step`; NaN if unknown."""
        values = self.column(name)
        if values is None:
            return math.nan
        known = np.flatnonzero(np.isfinite(values) & (self.steps <= step))
        return float(values[known[-1]]) if len(known) else math.nan

    def since(self, holds: Values) -> int:
        """The first step at which a condition holds."""
        return int(self.steps[int(np.flatnonzero(holds)[0])])

    @cached_property
    def groups(self) -> dict[str, Values]:
        """Settings of the optimizer's groups over the steps: "lr/0", "beta1/1", and "lr" where no group was named."""
        names = [n for n in self.run.steps if n.partition("/")[0] in GROUP_SETTINGS and "/" in n]
        names = names or [n for n in ("lr",) if n in self.run.steps]
        return {name: values for name in names if (values := self.column(name)) is not None}

    @property
    def clip(self) -> Values | None:
        """How many times clipping shortened each step's gradient; 1 where it did not; None if unknown.

        A GradScaler divides by a power of two; that is no clipping.
        """
        before, after = self.column("grad_norm"), self.column("grad_norm_used")
        if before is None or after is None:
            return None
        with np.errstate(all="ignore"):
            ratio = before / after
            scaled = np.abs(np.log2(ratio) - np.round(np.log2(ratio))) < 1e-4
        return np.where(np.isfinite(ratio) & ~scaled, ratio, 1.0)

    def length(self, step: float) -> float:
        """The share of its full length that schedule and clipping leave to a step."""
        lr, clip = self.column("lr"), self.clip
        share = 1.0 if lr is None or not np.nanmax(lr) > 0 else self.at("lr", step) / float(np.nanmax(lr))
        return share if clip is None else share / float(np.max(clip[self.steps <= step][-1:], initial=1.0))

    # --- parameters ---------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> list[Mapping[str, Any]]:
        """Every parameter: name, shape, dtype, trains, held (the optimizer's settings, or None)."""
        return [p for p in self.manifest.get("parameters") or () if isinstance(p, Mapping) and p.get("name")]

    @cached_property
    def _about(self) -> dict[str, Mapping[str, Any]]:
        return {str(p["name"]): p for p in sorted(self.parameters, key=lambda p: bool(p.get("held")))}  # a copy's: not

    @cached_property
    def weights(self) -> dict[str, Any]:
        """Parameter -> hash of its values before the first step."""
        return {bare(name): value for name, value in (self.manifest.get("weights") or {}).items()}

    @property
    def unmoved(self) -> set[str] | None:
        """Parameters that end as they began; None if the record does not say, as of a run that was killed."""
        names = self.manifest.get("unmoved")
        return {str(n) for n in names} if isinstance(names, list) else None

    @property
    def optimizers(self) -> set[str]:
        """Names of the optimizers that hold parameters."""
        return {str(p["held"].get("optimizer")) for p in self.parameters if p.get("held")}

    def shape(self, name: str) -> list[int]:
        """Of a parameter; [0] if unknown."""
        return [int(n) for n in (self._about.get(name) or {}).get("shape") or [0]]

    def size(self, name: str) -> int:
        """Elements of a parameter; 0 if unknown."""
        return math.prod(self.shape(name))

    def held(self, name: str) -> Mapping[str, Any]:
        """The optimizer's settings for a parameter; {} if no optimizer holds it, or nobody knows."""
        return (self._about.get(name) or {}).get("held") or {}

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """What the watch wrote of the training: updates, modes of forwards, loads."""
        return [e for e in self.run.training if e.get("kind") == kind]

    @cached_property
    def moves(self) -> dict[int, dict[str, dict[str, float]]]:
        """Step of a look -> parameter -> its update: ratio (update over weight), still, gradient, weight, spread,
        written; NaN for what is unknown."""
        found: dict[int, dict[str, dict[str, float]]] = {}
        for event in self.of_kind("updates"):
            names = [str(n) for n in event.get("parameters") or ()]
            columns = {k: event.get(k) or [math.nan] * len(names) for k in _MOVES}
            rows = found.setdefault(event["step"], {})
            for i, name in enumerate(names):
                rows[name] = {k: number_of(c[i]) if i < len(c) else math.nan for k, c in columns.items()}
        return found

    def update_ratio(self, last: float) -> list[tuple[int, float]]:
        """(step, median of update over weight over all matrices) of the looks up to a step."""
        found = []
        for step, rows in sorted(self.moves.items()):
            ratios = [r["ratio"] for n, r in rows.items() if len((self._about.get(n) or {}).get("shape") or (0, 0)) > 1]
            ratios = [r for r in ratios if math.isfinite(r) and r < _FROM_ZERO]
            if ratios and step <= last:
                found.append((step, float(np.median(ratios))))
        return found

    @cached_property
    def ranks(self) -> dict[int, Facts]:
        """Rank -> its facts, for the ranks above 0."""
        return {rank: Facts(run) for rank, run in self.run.of_ranks.items()}

    # --- batches ------------------------------------------------------------------------------------------------

    @cached_property
    def batches(self) -> Values | None:
        """A number for each step's batch, equal for equal inputs and labels, below zero without a hash; None without
        any."""
        inputs, labels = self.column("input_hash"), self.column("label_hash")
        if inputs is None and labels is None:
            return None
        columns = [c for c in (inputs, labels) if c is not None]
        pairs = np.stack([np.nan_to_num(c, nan=-1.0) for c in columns], axis=1)
        numbers = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
        return np.where((pairs >= 0).any(axis=1), numbers, -1 - np.arange(len(numbers)))

    # --- casts --------------------------------------------------------------------------------------------------

    @cached_property
    def table(self) -> Table:
        """The statistics of full looks."""
        return self.run.table()

    @cached_property
    def casts(self) -> bool | None:
        """Whether a real cast ran in a step of this run; None if nobody knows."""
        if any(e.get("mode") == "real" for e in self.experiments("shadow")):
            return True
        said = (self.manifest.get("cast") or {}).get("ran") if isinstance(self.manifest.get("cast"), Mapping) else None
        if said is not None:
            return bool(said)
        sources = {str(s) for s in self.table["source"]}
        if any(s != "hook" for s in sources):
            return True
        if any(x.get("casts") for x in self.described):
            return True
        return False if sources else None

    @property
    def described(self) -> list[Mapping[str, Any]]:
        """What the manifest says of each layer: name, recipe, casts, package."""
        return [x for x in self.manifest.get("layers") or () if isinstance(x, Mapping) and x.get("name")]

    @cached_property
    def recipes(self) -> list[str]:
        """Recipes whose casts are recorded, the most frequent first; "" where none has a name."""
        names = [str(n) for n in self.table["recipe"]]
        return sorted(set(names), key=lambda n: -names.count(n))

    def real_casts(self) -> Table:
        """The rows of real casts."""
        return self.table.take([i for i, source in enumerate(self.table["source"]) if source != "hook"])

    # --- experiments and events -----------------------------------------------------------------------------------

    def experiments(self, kind: str) -> list[Mapping[str, Any]]:
        """The experiments of one kind on all ranks, in the order of steps; a rank above 0 is `rank`."""
        found = [e for e in self.run.experiments if e.get("kind") == kind]
        found += [{**e, "rank": rank} for rank, other in self.ranks.items() for e in other.experiments(kind)]
        return sorted(found, key=lambda e: e["step"])

    def checks(self) -> Iterator[Mapping[str, Any]]:
        """Operands that were not the cast of their tensor."""
        return (e for e in self.run.events if e.get("kind") == "check" and number_of(e.get("value")) > 0)

    @property
    def frameworks(self) -> list[str]:
        """Packages that drove the training; [] for a plain loop."""
        return [str(name) for name in self.manifest.get("framework") or ()]

    @cached_property
    def packages(self) -> set[str]:
        """Packages of the layers that cast."""
        found = {str(x["package"]) for x in self.described if x.get("package") and (x.get("casts") or x.get("recipe"))}
        return found or ({"ottava"} if "door" in {str(s) for s in self.table["source"]} else set())

    @property
    def coverage(self) -> float:
        """Share of the linear layers that the watch saw [%]; NaN if unknown."""
        seen = self.manifest.get("coverage") or {}
        return 100.0 * seen["seen"] / seen["linear"] if seen.get("linear") else math.nan

    @property
    def guess(self) -> float:
        """The loss of a guess, ln(classes) of the cross-entropy; NaN if unknown."""
        classes = self.manifest.get("classes")
        return math.log(classes) if isinstance(classes, int) and classes > 1 else math.nan
