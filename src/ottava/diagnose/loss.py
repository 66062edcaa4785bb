"""Reads a loss curve: when it first left a band, from when it stays outside, its spikes, and its gap to another curve.

All limits are relative to the curve's noise, the distances of losses to their running median, so units and batch sizes
do not matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ottava.measure.limits import GAUSSIAN, LEAST
from ottava.record.reader import Run

Values = npt.NDArray[Any]
_SPIKE = 6.0  # standard deviations
_BEFORE = 5  # losses before a jump
_RISE = 0.02  # of the loss before: a smaller jump is no spike
_RISE_NOISE = 6.0
_ONSET = 1 / 3
_FEW = 12  # losses; fewer have no course
_REACH = 5  # losses that the running median reaches ahead, and their neighbours
_AROUND = 2  # losses on either side that make the band of a good run
_GAP = 0.01  # of the loss
_APART = 10.0  # percent between two curves: no noise of a seed


class LossCurve:
    """A loss over steps.

    Args:
        steps: ascending.
        loss: same length; NaN if unknown, infinite if it is known and no number.

    Example:
        >>> steps = np.arange(200)
        >>> LossCurve(steps, 5.0 - 0.01 * steps).diverged, LossCurve(steps, 3.0 + abs(steps - 100) / 50).diverged_at
        ('no', 113.0)
    """

    def __init__(self, steps: Values, loss: Values) -> None:
        self.steps = np.asarray(steps, dtype=np.float64)
        self.loss = np.asarray(loss, dtype=np.float64)

    @classmethod
    def of(cls, run: Run) -> LossCurve:
        """The loss of a run; infinite where it was written and is none."""
        return cls(run.steps["step"], np.where(run.broken("loss"), np.inf, run.steps["loss"]))

    @cached_property
    def broken(self) -> Values:
        """Where the loss is infinite, or NaN although it was due: a run that logs every tenth loss lacks the others."""
        finite, at = np.isfinite(self.loss), np.arange(len(self.loss))
        last = np.maximum.accumulate(np.where(finite, at, -1)) if len(at) else at
        gap = float(np.median(np.diff(at[finite]))) if finite.sum() > 1 else 1.0
        return np.isinf(self.loss) | (np.isnan(self.loss) & (last >= 0) & (at - last >= gap))

    @cached_property
    def smooth(self) -> Values:
        """The running median over a twentieth of the run, at least 5 steps; broken losses are infinite."""
        width = max(5, len(self.loss) // 20) | 1
        filled = np.where(self.broken, np.inf, self.loss)
        return np.array([_median(filled[max(0, i - width // 2) : i + width // 2 + 1]) for i in range(len(filled))])

    @cached_property
    def _apart(self) -> Values:
        with np.errstate(invalid="ignore"):  # infinity less infinity
            return self.loss - self.smooth

    @cached_property
    def noise(self) -> float:
        """Standard deviation of losses around the running median."""
        return _spread(self._apart)

    @cached_property
    def _known(self) -> bool:
        return bool(np.isfinite(self.loss).any())

    @cached_property
    def _early(self) -> float:
        """The noise up to the lowest loss: what happens later must not widen its own band."""
        lowest = int(np.argmin(self.smooth)) if len(self.smooth) else 0
        return _spread(self._apart[: max(lowest + 1, LEAST)])

    @cached_property
    def first(self) -> float:
        """What the training began with: the median of its first three losses; NaN without one."""
        return _median(self.loss[np.isfinite(self.loss)][:3])

    @cached_property
    def rise(self) -> float:
        """A rise that is no noise: six standard deviations of the noise, and a tenth of all that the loss fell before.

        A loss near zero, as that of a policy gradient, has no scale of its own, so a share of it is no measure.
        """
        finite = self.loss[np.isfinite(self.loss)]
        if not len(finite):
            return math.inf
        lowest = float(np.min(self.smooth[np.isfinite(self.smooth)], initial=math.inf))
        fell = max(self.first - lowest, 0.0)
        return max(_RISE_NOISE * self._early, 0.1 * fell, 1e-9)

    def at_best(self, before: float) -> float:
        """The lowest smoothed loss of the steps before one; the first loss if there are none."""
        part = self.smooth[self.steps < before]
        part = part[np.isfinite(part)]
        return float(part.min()) if len(part) else float(self.loss[0]) if len(self.loss) else math.nan

    def worst(self, left: float) -> float:
        """The largest smoothed loss from a step on; minus infinity without one."""
        part = self.smooth[self.steps >= left]
        return float(part[np.isfinite(part)].max(initial=-math.inf))

    def back(self, left: float) -> float:
        """The first step behind one that left at which the loss is no more than `rise` above its best before; inf if
        it is never."""
        inside = self.steps[(self.steps > left) & (self.loss <= self.at_best(left) + self.rise)]
        return float(inside[0]) if len(inside) else math.inf

    def only_a_batch(self, left: float) -> bool:
        """Whether a loss that comes back left for single batches only: its running median stayed."""
        near = (self.steps >= left) & (self.steps <= self.back(left))
        limit = self.at_best(left) + self.rise
        return math.isfinite(self.back(left)) and not (self.smooth[near] > limit).any() and not self.broken[near].any()

    def hurt_at(self, steps: Values) -> bool:
        """Whether the loss rises at four of five of these steps, as it does at one in forty of the others."""
        change, at = np.diff(self.loss), np.isin(self.steps[1:], steps)
        if at.sum() < 4 or at.sum() > 0.5 * len(at):
            return False
        middle = float(np.nanmedian(change[~at]))
        spread = GAUSSIAN * float(np.nanmedian(np.abs(change[~at] - middle)))
        return float(np.mean(change[at] > max(middle + 2 * spread, 0.0))) >= 0.8

    @cached_property
    def diverged_at(self) -> float:
        """The step from which the loss stays above its lowest, or is not finite; inf if it did not diverge."""
        if not self._known:
            return float(np.min(self.steps[self.broken], initial=math.inf))
        # missing lines are NaN too, so the run must end without a finite loss
        if not np.isfinite(self.loss[-3:]).any():
            return float(self.steps[int(np.flatnonzero(np.isfinite(self.loss))[-1]) + 1])
        if len(self.loss) < _FEW:
            return math.inf
        lowest = int(np.argmin(self.smooth))
        above = self.smooth > self.smooth[lowest] + self.rise
        if not above[-1]:
            return math.inf
        under = np.flatnonzero(~above)
        start = int(under[-1]) + 1 if len(under) else 0
        return float(self.steps[start]) if start > lowest else math.inf

    @cached_property
    def onset(self) -> float:
        """The first step whose loss is not finite, or above all earlier ones by more than `rise` and five times the
        usual change; inf without one."""
        low, changes, last = math.inf, list[float](), math.nan
        for step, loss, broken in zip(self.steps, self.loss, self.broken, strict=True):
            if not math.isfinite(loss):
                if broken:
                    return float(step)
                continue
            usual = float(np.median(changes)) if changes else 0.0
            if loss - low > max(self.rise, _ONSET * abs(low), 5 * usual):
                return float(step)
            changes += [abs(loss - last)] if math.isfinite(last) else []
            low, last = min(low, loss), loss
        return math.inf

    def exits(self, *good: LossCurve) -> tuple[float, float]:
        """The first step outside the band, and the step from which the loss stays outside; inf for what never happens.

        Args:
            good: curves of good runs, which make the band; none: the band is that of the curve's own noise.

        A good run's band ends a hundredth, or four times the noise of the first, above the losses nearby. The loss
        leaves it when two losses in a row are outside, or one at twice that distance: single batches of another seed
        reach six times the noise. Smoothed losses stay outside.

        Example:
            >>> steps = np.arange(40)
            >>> loss = np.where(steps == 9, 4.0, np.where(steps >= 20, 3.0, 2.0))
            >>> LossCurve(steps, loss).exits(LossCurve(steps, np.full(40, 2.0)))
            (9.0, 20.0)
        """
        good = tuple(curve for curve in good if curve._known)
        if not good:
            spikes = [at for at, _ in self.spikes[:1]]
            if math.isfinite(
                self.diverged_at
            ):  # a loss that leaves for good does so at its own step, not at a small one
                spikes = [at for at in spikes if self.loss[self.steps == at][0] - self.at_best(at) > self.rise]
            return min([self.onset, self.diverged_at, *spikes]), self.diverged_at
        shared = np.flatnonzero(np.isin(self.steps, good[0].steps))
        step = self.steps[shared]
        highest, margin = _band(step, good, smooth=False)
        above = self.loss[shared] > highest + margin
        left = (above & np.append(above[1:], False)) | (self.loss[shared] > highest + 2 * margin) | self.broken[shared]
        highest, margin = _band(step, good, smooth=True)
        outside = (self.smooth[shared] > highest + margin) | self.broken[shared]
        inside = np.flatnonzero(~outside)
        start = int(inside[-1]) + 1 if len(inside) else 0
        stays = float(step[start]) if start < len(step) else math.inf
        first = float(step[left][0]) if left.any() else stays
        # the running median sees a lasting rise a few steps before its first loss, and some that no single loss shows
        return (first, max(stays, first)) if stays < first <= stays + _REACH else (min(first, stays), stays)

    @property
    def diverged(self) -> str:
        """ "yes" or "no"."""
        return "yes" if math.isfinite(self.diverged_at) else "no"

    @cached_property
    def spikes(self) -> list[tuple[float, float]]:
        """(first step, number of steps until the loss was back) of each spike."""
        spikes: list[tuple[float, float]] = []
        at = 0
        while at < len(self.loss):
            before = self._before[at]
            if not (self.jumps[at] > _SPIKE and self.loss[at] - before > _RISE * abs(before)):
                at += 1
                continue
            limit = before + 3 * max(self.noise, 1e-3 * abs(before))
            back = next((j for j in range(at + 1, len(self.loss)) if self.loss[j] <= limit), len(self.loss))
            spikes.append((float(self.steps[at]), float(back - at)))
            at = back + 1
        return spikes

    @cached_property
    def jumps(self) -> Values:
        """Each loss above the median of the 5 before it, in standard deviations of the noise; NaN at first."""
        least = max(self.noise, 1e-12)
        with np.errstate(invalid="ignore"):  # infinity less infinity
            return (self.loss - self._before) / np.maximum(least, 1e-3 * np.abs(self._before))

    @cached_property
    def _before(self) -> Values:
        return np.array([_median(self.loss[max(0, i - _BEFORE) : i]) for i in range(len(self.loss))])

    @property
    def spike_rate(self) -> float:
        """Spikes per 1000 steps."""
        return 1000.0 * len(self.spikes) / max(len(self.loss), 1)

    @property
    def recovery(self) -> float:
        """Median number of steps until a spike is over; 0 without spikes."""
        return float(np.median([length for _, length in self.spikes])) if self.spikes else 0.0

    def gap(self, other: LossCurve) -> tuple[float, float, float]:
        """The gap of this curve above another one at the same steps.

        Returns:
            The gap in the last quarter, in percent of the other loss; its change from the quarter before; and its
            standard error. NaN without common steps.
        """
        common, mine, theirs = np.intersect1d(self.steps, other.steps, return_indices=True)
        if len(common) < 8:
            return math.nan, math.nan, math.nan
        a, b = self.loss[mine], other.loss[theirs]
        with np.errstate(all="ignore"):  # a loss of 0 has no percent
            percent = 100 * (a - b) / np.abs(b)
        quarter = max(len(common) // 4, 2)
        last, earlier = percent[-quarter:], percent[-2 * quarter : -quarter]
        last, earlier = last[np.isfinite(last)], earlier[np.isfinite(earlier)]
        if not len(last) or not len(earlier):
            return math.nan, math.nan, math.nan
        late = float(np.median(last))
        return late, late - float(np.median(earlier)), _spread(last - late) / math.sqrt(len(last))


def _band(steps: Values, good: tuple[LossCurve, ...], *, smooth: bool) -> tuple[Values, Values]:
    """The highest good loss near each step, infinite if there is none, and how far above it the band ends."""
    highest = np.full(len(steps), -math.inf)
    for curve in good:
        values = curve.smooth if smooth else curve.loss
        padded = np.pad(np.where(np.isfinite(values), values, -math.inf), _AROUND, constant_values=-math.inf)
        near = np.lib.stride_tricks.sliding_window_view(padded, 2 * _AROUND + 1).max(1)
        highest = np.maximum(highest, near[np.abs(curve.steps[:, None] - steps).argmin(0)])
    known = np.isfinite(highest)
    margin = np.maximum(_GAP * np.abs(np.where(known, highest, 0.0)), 4 * good[0].noise)
    return np.where(known, highest, math.inf), margin


def _spread(distances: Values) -> float:
    """Their standard deviation, if they are those to a median: by the median, which a few large ones do not move."""
    known = distances[np.isfinite(distances)]
    return GAUSSIAN * float(np.median(np.abs(known))) if len(known) else 0.0


def _median(values: Any) -> float:
    numbers = values[~np.isnan(values)]
    return float(np.median(numbers)) if len(numbers) else math.nan


@dataclass(frozen=True)
class Event:
    """What happened to a loss."""

    kind: str
    """ "not finite", "leaves", "high" (outside the good run's band from the first step on) or "flat"."""
    step: int
    """The first step outside the band."""
    stays: int | None
    """The step from which the loss stays outside; None if it comes back."""
    sentence: str

    @property
    def lasts(self) -> bool:
        """Whether it has not come back."""
        return self.kind != "leaves" or self.stays is not None


def event(loss: LossCurve, good: LossCurve | None = None, guess: float = math.nan) -> Event | None:
    """The first thing that happens to a loss, told against its own noise or against a good run; None if nothing does.

    Args:
        loss, good: the curves.
        guess: ln(classes), the loss of a model that knows nothing; NaN if unknown.

    Example:
        >>> steps = np.arange(1, 41)
        >>> event(LossCurve(steps, np.where(steps < 20, 3.0, np.nan))).sentence
        'The loss is not finite from step 20 on.'
        >>> event(LossCurve(steps, 4 - steps / 20)) is None
        True
    """
    if not (loss._known or loss.broken.any()):
        return None
    if known := good is not None and good._known:
        at, stays = loss.exits(good)
    else:
        at, stays = loss.exits()
    first = float(np.min(loss.steps[loss.broken], initial=math.inf))
    apart = 0.0
    if good is not None and known and math.isinf(stays):  # noise may hide a gap from every band
        apart, _, error = loss.gap(good)
        if apart := apart if apart > max(_APART, 5 * error) else 0.0:
            stays = float(loss.steps[-(len(loss.steps) // 4)])
            at = min(at, stays)
    if math.isfinite(first) and (first <= at or loss.back(at) < first):  # what came back before it is no event
        return Event("not finite", int(first), int(first), f"The loss is not finite from step {first:.0f} on.")
    if math.isinf(at):
        return _flat(loss, guess) if not known else None
    lasting = None if math.isinf(stays) else int(stays)
    start = float(loss.steps[0])
    band = "the good run's band" if known else "the band of its own noise"
    if known and at <= start + 1 and lasting is not None and lasting <= start + 1:
        return Event("high", int(at), lasting, f"The loss is above the good run's from step {at:.0f} on.")
    ends = _back(loss, at) if lasting is None and not known else " and comes back"
    ends = ends if lasting is None else " and stays above it"
    if lasting == int(loss.steps[-1]):  # of one step nobody knows whether it comes back
        lasting, ends = None, ", the last of the record"
    ends += f" from step {lasting} on" if lasting not in (None, int(at)) else ""
    ends = f", and is {apart:.3g} % above the good run's in the last quarter" if apart else ends
    return Event("leaves", int(at), lasting, f"The loss leaves {band} at step {at:.0f}{ends}.")


def _back(loss: LossCurve, left: float) -> str:
    """How a loss comes back: to what, if that is above all noise of the best one before."""
    best, finite = loss.at_best(left), loss.smooth[np.isfinite(loss.smooth)]
    end = float(finite[-1]) if len(finite) else math.nan
    if end - best > 4 * loss._early:
        return f" and comes back to {end:.3g} only; before, its median was {best:.3g}"
    back = loss.back(left)
    return f" and is back at step {back:.0f}" if math.isfinite(back) else " and comes back"


def _flat(loss: LossCurve, guess: float) -> Event | None:
    """A loss that stays where a guess is."""
    finite = loss.loss[np.isfinite(loss.loss)]
    if len(finite) < 3 * _FEW or not math.isfinite(guess):
        return None
    third = len(finite) // 3
    early, late = float(np.median(finite[:third])), float(np.median(finite[-third:]))
    # a sum of several losses begins far above a guess of one, and falls
    if late < 0.98 * guess or late > 1.5 * guess or late < 0.9 * early:
        return None
    return Event("flat", int(loss.steps[0]), None, f"The loss stays at {late:.3g}; a guess has {guess:.3g}.")
