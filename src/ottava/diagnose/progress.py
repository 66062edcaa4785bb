"""Facts about the course of a run: when it went wrong, how its weights move, its batches, its start, its depth.

What a watch did not record is unknown, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from ottava.diagnose.conditions import Missing, Values
from ottava.diagnose.loss import LossCurve
from ottava.diagnose.rows import Context
from ottava.diagnose.training import ParameterRows
from ottava.measure.layer_names import starred
from ottava.record.reader import Run

_FAR_ABOVE = 8.0  # times ln(classes); a sharp temperature makes 5
_BETTER = 50.0  # percent of the twin's loss
_IDLE = 2e-6


class Progress:
    """When a run went wrong, and what else its steps tell."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def _column(self, name: str) -> Values:
        values = self.context.run.steps.get(name)
        if values is None or not np.isfinite(values).any():
            raise Missing(f"{name!r} in steps.jsonl")
        return np.asarray(values, dtype=np.float64)

    @cached_property
    def update_ratio(self) -> Values:
        """The median matrix's update over its weight at every step: measured at looks, else by the learning rate."""
        rows = ParameterRows(self.context)
        shapes = {name: about.get("shape") or () for name, about in rows.about.items()}
        by_step: dict[float, list[float]] = {}
        for step, name, ratio, _, _, weight, *_ in rows.rows:
            if math.isfinite(ratio) and weight > 0 and len(shapes.get(name, (0, 0))) >= 2:
                by_step.setdefault(step, []).append(ratio)
        if not by_step or not len(self.context.run.steps["step"]):
            raise Missing("updates of parameters (a watch of this version records them)")
        steps = self.context.run.steps
        lr = steps.get("lr", np.full(len(steps["step"]), np.nan))
        values, known, rate = [], math.nan, math.nan
        for step, now in zip(steps["step"], lr, strict=True):
            if float(step) in by_step:
                known, rate = float(np.median(by_step[float(step)])), now
            values.append(known * (now / rate if rate > 0 and now >= 0 else 1.0))
        return np.array(values)

    @cached_property
    def clip_norm(self) -> float:
        """The gradient norm, if it is the same in nearly every step, as clipping leaves it; inf otherwise."""
        norms = self._column("grad_norm")
        norms = norms[np.isfinite(norms)]
        if len(norms) < 4 or not norms.any():
            return math.inf
        middle = float(np.median(norms))
        return middle if float(np.mean(np.abs(norms - middle) <= 5e-3 * middle)) >= 0.75 else math.inf

    @property
    def loss_spread(self) -> float:
        """(largest - smallest) / magnitude of the loss; NaN for fewer than 5 finite losses."""
        loss = self.context.loss.loss
        loss = loss[np.isfinite(loss)]
        return float(np.ptp(loss) / max(abs(float(np.median(loss))), 1e-12)) if len(loss) >= 5 else math.nan

    @cached_property
    def _batches(self) -> list[tuple[float, ...]]:
        columns = [self._column("input_hash")]
        if "label_hash" in self.context.run.steps:
            columns.append(self._column("label_hash"))
        return list(zip(*(np.nan_to_num(column, nan=-1.0) for column in columns), strict=True))

    @property
    def batches(self) -> float:
        """Different pairs of inputs and labels."""
        return float(len(set(self._batches)))

    @property
    def repeated_pct(self) -> float:
        """Steps whose batch is that of the step before; NaN for fewer than 8 steps [%]."""
        pairs = list(zip(self._batches, self._batches[1:], strict=False))
        return 100 * float(np.mean([a == b for a, b in pairs])) if len(pairs) >= 7 else math.nan

    @property
    def idle_pct(self) -> float:
        """Steps whose update changes the median matrix by less than 2e-6 of itself, or whose learning rate is 0 [%]."""
        ratio, lr = self.update_ratio, self.context.run.steps.get("lr")
        known = np.isfinite(ratio)
        if not known.any():
            raise Missing("updates of parameters (a watch of this version records them)")
        idle = (ratio < _IDLE) | (False if lr is None else lr == 0)
        return 100 * float(np.mean(idle[known | idle]))

    @property
    def tied_apart(self) -> str:
        """Names of parameters that should be one and are not; "" if there are none."""
        if "tied" not in self.context.run.manifest:
            raise Missing("pairs of equal parameters in watch.json")
        ties = [tie for tie in self.context.run.manifest["tied"] if isinstance(tie, Mapping) and tie.get("apart")]
        return "; ".join(" and ".join(map(str, tie.get("names", ()))) for tie in ties)

    @property
    def nonfinite_at(self) -> float:
        """The first step at which a cast tensor is not finite; inf without one."""
        return self._nonfinite(("input", "weight", "grad_output"))

    @property
    def forward_nonfinite_at(self) -> float:
        """The first step at which an input or a weight is not finite; inf without one."""
        return self._nonfinite(("input", "weight"))

    def _nonfinite(self, tensors: tuple[str, ...]) -> float:
        table = self.context.run.table(phase=None)
        bad = (np.asarray(table.metric("nonfinite")) > 0) & np.isin(table["tensor"].astype(str), tensors)
        return float(min(table["step"][bad], default=math.inf))

    @property
    def learned_pct(self) -> float:
        """How far the median of the last third of losses lies below that of the first three [%]."""
        loss = self.context.loss.loss
        loss = loss[np.isfinite(loss)]
        if len(loss) < 6:
            return math.nan
        first = float(np.median(loss[:3]))
        return 100 * (first - float(np.median(loss[-(len(loss) // 3) :]))) / max(abs(first), 1e-12)

    @cached_property
    def start_ratio(self) -> float:
        """The first loss over that of a guess, ln(classes)."""
        return _start(self.context.loss.loss, self.context.run)

    @property
    def end_ratio(self) -> float:
        """The median loss of the last third over that of a guess."""
        loss = self.context.loss.loss
        late = loss[-max(len(loss) // 3, 1) :]
        late = late[np.isfinite(late)]
        return float(np.median(late)) / _guess(self.context.run) if len(late) else math.nan

    @cached_property
    def twin_agrees(self) -> str:
        """Whether the BF16 twin goes wrong at the same time; a loss far above a guess is wrong from its start."""
        loss, other = self.context.loss, self.context.baseline_loss
        if self.context.twin_casts or self.twin_recovers == "yes":
            return "no"
        if math.isfinite(loss.onset):
            return "yes" if abs(loss.onset - other.onset) <= max(2.0, 0.1 * loss.onset) else "no"
        return "yes" if self._starts_high(other) else "no"

    def _starts_high(self, other: LossCurve) -> bool:
        """Whether both begin far above a guess."""
        try:
            starts = self.start_ratio, _start(other.loss, self.context.run)
        except Missing:
            return False
        return min(starts) > _FAR_ABOVE and max(starts) < 1.1 * min(starts)

    @cached_property
    def twin_recovers(self) -> str:
        """Whether the BF16 twin learned, and this run ends half as high again: what both met does not explain that."""
        loss, other = self.context.loss, self.context.baseline_loss
        if self.context.twin_casts or self._starts_high(other):
            return "no"
        gap, _, noise = loss.gap(other)
        if not gap > max(_BETTER, 3 * noise):  # too few steps in common, too
            return "no"
        return "yes" if np.median(other.loss[-max(len(other.loss) // 4, 2) :]) < np.median(other.loss[:3]) else "no"

    @property
    def loss_first(self) -> str:
        """Whether the loss went wrong while all casts were fine, and findings about casts came later."""
        onset, first = self.context.loss.onset, self.context.first_finding
        if not math.isfinite(onset) or not math.isfinite(first) or first <= onset:
            return "no"
        return "yes" if any(onset <= step < first for step in set(self.context.table["step"])) else "no"


def start_gain(context: Context) -> float:
    """The median of rms times the root of the inputs over all cast matrices at the first look of the first step."""
    table = context.table.where(tensor="weight", direction="row")
    shapes: dict[str, list[int]] = {
        str(x.get("name")): list(x.get("shape") or ()) for x in context.run.manifest.get("layers") or ()
    }
    if not len(table) or min(table["step"]) > 2:
        raise Missing("a look at the first step")
    gains = []
    rows = zip(table["layer"], table["step"], np.asarray(table.metric("rms"), dtype=np.float64), strict=True)
    for layer, step, rms in rows:
        if step == min(table["step"]) and rms > 0 and len(shapes.get(layer, ())) == 2:
            gains.append(rms * math.sqrt(shapes[layer][-1]))
    return float(np.median(gains)) if gains else math.nan


def over_depth(context: Context, tensor: str) -> float:
    """log2 of a tensor's root mean square in the last block over that in the first, median over looks; of the layers
    with one name that with the largest distance."""
    table = context.table.where(tensor=tensor, direction="row")
    rms = np.asarray(table.metric("rms"), dtype=np.float64)
    found: dict[tuple[str, int], dict[int, float]] = {}
    for layer, step, size in zip(table["layer"], table["step"], rms, strict=True):
        name, number = starred(layer)
        if number is not None and size > 0 and math.isfinite(size):
            found.setdefault((name, int(step)), {})[number] = size
    octaves: dict[str, list[float]] = {}
    for (name, _), sizes in found.items():
        if len(sizes) > 2:
            octaves.setdefault(name, []).append(math.log2(sizes[max(sizes)] / sizes[min(sizes)]))
    if not octaves:
        raise Missing(f"casts of {tensor} in three blocks")
    return max((float(np.median(v)) for v in octaves.values()), key=abs)


def _start(loss: Values, run: Run) -> float:
    """The first loss over ln(classes)."""
    guess = _guess(run)
    if not len(loss) or int(run.steps["step"][0]) != 1:
        raise Missing("the first step of the training")
    return float(loss[0]) / guess


def _guess(run: Run) -> float:
    """The loss of a guess, ln(classes)."""
    classes = run.manifest.get("classes")
    if not isinstance(classes, int) or classes < 2:
        raise Missing("the classes of the loss in watch.json")
    return math.log(classes)
