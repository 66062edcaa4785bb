"""Finds the best amax history for a run: replays recorded amaxes under other settings (TransformerEngine #1169).

A predicted scale depends on earlier amaxes only. One recorded run therefore gives exact scales for every window length,
algorithm and margin, without training again:

    window_k = max(amax_(k-L) .. amax_(k-1))       of the steps in which the tensor was cast; most_recent: amax_(k-1)
    scale_k  = compute_scale(window_k, margin)     the rule of `windows.roll_windows`; no window yet: that of amax_k
    clipped    amax_k * scale_k beyond what still rounds to fmt.max (as `statistics` counts overflow)
    lost bits  log2(fmt.max / amax_k / scale_k), where positive: octaves at the bottom of the format that stay unused

A replay cannot tell how a setting would have changed the training itself, and thereby later amaxes. `record.amaxes`
records a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ottava.base.text import grouped
from ottava.numerics.formats import Format
from ottava.numerics.scaling import ScaleFormat, compute_scale
from ottava.record.amaxes import Recording, Setting

DEFAULT_SETTINGS = tuple(
    Setting(length, "max" if length > 1 else "most_recent", margin)
    for length in (1, 4, 16, 64, 256, 1024)
    for margin in (0, 1, 2, 3)
)
"""Windows of one step (where both algorithms are one) to TransformerEngine's default of 1024."""


@dataclass(frozen=True, slots=True)
class HistoryScore:
    """The effect of a setting on one tensor, or on all tensors."""

    casts: int
    """Steps in which the tensor was cast; for all tensors, their sum."""
    clipped: int
    """Casts that clipped."""
    worst_clip_octaves: float
    """log2(largest scaled amax / largest number of the format); 0 if no cast clipped."""
    lost_bits_mean: float
    """Mean over all casts."""
    lost_bits_p99: float
    """99 % of the casts lost at most so many bits."""
    guard_fires: int
    """Casts in which `guarded` would have taken the current scale instead."""


@dataclass(frozen=True)
class SettingOutcome:
    """The effect of one setting."""

    setting: Setting
    total: HistoryScore
    """Sum over all tensors."""
    clipped_steps: int
    """Steps in which at least one tensor clipped."""
    unbeaten: bool
    """True if no other setting clips less without losing more, or loses less without clipping more."""
    tensors: tuple[HistoryScore, ...]
    """In the order of the recording's tensors."""


@dataclass(frozen=True)
class HistoryReplay:
    """The settings, ranked: fewest clipped casts first, then least lost bits on average, then the shortest window."""

    recording: Recording
    outcomes: tuple[SettingOutcome, ...]
    """Best first. They include the run's own setting if the recording knows it."""

    @property
    def own(self) -> SettingOutcome | None:
        """The outcome of the run's own setting."""
        return next((o for o in self.outcomes if o.setting == self.recording.setting), None)

    def advice(self) -> str:
        """One sentence with numbers that compares the best setting with the run's own setting."""
        best, own = self.outcomes[0], self.own
        casts = f"of {best.total.casts:,} casts ({len(self.recording.steps):,} steps)"
        if own is None:
            why = "differ from tensor to tensor" if any(t.setting for t in self.recording.tensors) else "are not known"
            return f"{best.setting} would have {_did(best, casts)} on average; the run's own settings {why}."
        guarded = f"guarded, it would take the current scale in {own.total.guard_fires:,}"
        if own is best:
            return f"No setting here beats the run's own: {own.setting} {_did(own, casts)} on average; {guarded}."
        beside = f"the run's own {own.setting} {_did(own)}; {guarded}"
        return f"{best.setting} would have {_did(best, casts)} on average; {beside}."

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        tensors = [{"layer": t.layer, "tensor": t.tensor, "format": t.format.name} for t in self.recording.tensors]
        return {
            "steps": len(self.recording.steps),
            "own_setting": asdict(self.recording.setting) if self.recording.setting else None,
            "advice": self.advice(),
            "outcomes": [
                {
                    **asdict(o.setting),
                    **asdict(o.total),
                    "clipped_steps": o.clipped_steps,
                    "unbeaten": o.unbeaten,
                    "tensors": [{**name, **asdict(outcome)} for name, outcome in zip(tensors, o.tensors, strict=True)],
                }
                for o in self.outcomes
            ],
        }

    def __str__(self) -> str:
        head = "  setting                  clipped  in steps  worst clip   lost bits  99 of 100   guard fires"
        lines = [head, *(_row(o, own=o is self.own) for o in self.outcomes)]
        return "\n".join([*lines, "* no other setting clips less and loses less", "", self.advice()])


def _did(outcome: SettingOutcome, casts: str = "") -> str:
    return f"clipped {outcome.total.clipped:,} {casts}".rstrip() + f" and lost {outcome.total.lost_bits_mean:.1f} bits"


def _row(outcome: SettingOutcome, *, own: bool) -> str:
    total, mark = outcome.total, "*" if outcome.unbeaten else " "
    worst = f"{total.worst_clip_octaves:.2f} oct" if total.clipped else "-"
    return (
        f"{mark} {outcome.setting!s:22}  {total.clipped:8,}  {outcome.clipped_steps:8,}  {worst:>10}  "
        f"{total.lost_bits_mean:10.2f}  {total.lost_bits_p99:9.2f}  {total.guard_fires:12,}"
        + ("  <- the run's own" if own else "")
    )


def replay(recording: Recording, settings: Iterable[Setting] = DEFAULT_SETTINGS) -> HistoryReplay:
    """Replays the recorded amaxes under every setting, and under the run's own.

    Args:
        recording: from `read_series`, or from `Recording.of` for numbers of your own.
    Raises:
        ValueError: the recording has no cast, or there is no setting.
    Edge cases: an idle step is no cast and moves no window; a tensor's first cast takes the current scale.

    Example:
        >>> spike = Recording.of({"fc1.input": ("E4M3", [1.0] * 8 + [64.0] + [1.0] * 8)})
        >>> for outcome in replay(spike, [Setting(4), Setting(1, "most_recent")]).outcomes:
        ...     print(outcome.setting, outcome.total.clipped, round(outcome.total.lost_bits_mean, 2))
        most_recent, margin 0 1 0.35
        L=4, max, margin 0 1 1.41
    """
    if not bool((recording.amax > 0).any()):
        raise ValueError("replay: the recording has no cast; record some steps of training first")
    casts = _casts(recording)
    choices = dict.fromkeys(settings)
    if recording.setting is not None:
        choices.setdefault(recording.setting)
    outcomes = [_evaluate(setting, casts) for setting in choices]
    if not outcomes:
        raise ValueError("replay: got no settings; needs at least one, or leave out the argument for the default")
    keys = [(o.total.clipped, o.total.lost_bits_mean) for o in outcomes]
    marked = [
        replace(o, unbeaten=not any(one != own and one[0] <= own[0] and one[1] <= own[1] for one in keys))
        for o, own in zip(outcomes, keys, strict=True)
    ]
    ranked = sorted(marked, key=lambda o: (o.total.clipped, o.total.lost_bits_mean, o.setting.amax_history_len))
    return HistoryReplay(recording, tuple(ranked))


def predict_scales(recording: Recording, setting: Setting) -> Tensor:
    """The scale of each recorded cast under a setting: fp32 (S, T), 0 where the tensor was idle.

    Example:
        >>> predict_scales(Recording.of({"fc1.input": ("E4M3", [1.0, 0.0, 2.0, 1.0])}), Setting(16)).t()
        tensor([[448.,   0., 448., 224.]])
    """
    scales = torch.zeros(len(recording.tensors), len(recording.steps), dtype=torch.float32)
    for kind in _casts(recording):
        used = torch.where(kind.amax > 0, _predict(setting, kind)[0], 0.0)
        scales[kind.rows] = torch.zeros_like(used).scatter(1, kind.step, used)
    return scales.t()


@dataclass(frozen=True)
class _Casts:
    """The casts of all tensors with equal format, scale format and guard. Rows skip idle steps; zeros pad their end."""

    format: Format
    scale_format: ScaleFormat
    guard_bits: int
    rows: list[int]
    """Numbers of these tensors in the recording."""
    amax: Tensor
    """fp32 (rows, S)."""
    step: Tensor
    """int64 (rows, S): the row of the recording that each amax comes from."""

    def scale(self, amax: Tensor, margin: int) -> Tensor:
        """The scales for these amaxes: fp32, shape of amax."""
        return compute_scale(amax, self.format, scale_format=self.scale_format, margin=margin).scale


def _casts(recording: Recording) -> list[_Casts]:
    kinds = grouped(((t.format, t.scale_format, t.guard_bits), row) for row, t in enumerate(recording.tensors))
    casts = []
    for kind, rows in kinds.items():
        amax = recording.amax[:, rows].t().contiguous()
        step = (amax == 0).to(torch.uint8).argsort(dim=1, stable=True)
        casts.append(_Casts(*kind, rows, amax.gather(1, step), step))
    return casts


def _evaluate(setting: Setting, casts: list[_Casts]) -> SettingOutcome:
    tensors: dict[int, HistoryScore] = {}
    all_lost: list[Tensor] = []
    clips_of_step = torch.zeros(casts[0].amax.shape[1], dtype=torch.int64)
    for kind in casts:
        used, clipped, fires = _predict(setting, kind)
        clips_of_step += kind.step[clipped].bincount(minlength=len(clips_of_step))
        top = torch.where(clipped, kind.amax * used, kind.format.max).amax(dim=1)
        octaves = (top.double() / kind.format.max).log2()
        lost = (kind.scale(kind.amax, 0).double() / used).log2().clamp_(min=0)
        columns = (clipped.sum(dim=1).tolist(), octaves.tolist(), fires.sum(dim=1).tolist())
        for i, (row, casts_of_row) in enumerate(zip(kind.rows, (kind.amax > 0).sum(dim=1).tolist(), strict=True)):
            all_lost.append(lost[i, :casts_of_row])
            tensors[row] = _outcome(all_lost[-1], *(column[i] for column in columns))
    ordered = tuple(tensors[row] for row in sorted(tensors))
    worst = max(outcome.worst_clip_octaves for outcome in ordered)
    sums = sum(outcome.clipped for outcome in ordered), worst, sum(outcome.guard_fires for outcome in ordered)
    total = _outcome(torch.cat(all_lost), *sums)
    return SettingOutcome(setting, total, int((clips_of_step > 0).sum()), unbeaten=False, tensors=ordered)


def _predict(setting: Setting, kind: _Casts) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, S) each: the scale used; whether the cast clipped; whether the guard would have fired."""
    fmt, amax = kind.format, kind.amax
    window = _window(amax, setting.reach)
    predicted = kind.scale(window, setting.margin)
    current = kind.scale(amax, setting.margin)
    used = torch.where(window > 0, predicted, current)
    clipped = fmt.clips(amax * used)  # products in fp32, as in the cast and in the guard
    top = amax * predicted
    inside = (top <= fmt.max) & (top >= fmt.max * 2.0**-kind.guard_bits)
    fires = (amax > 0) & (window > 0) & ~inside & (current.reciprocal() != predicted.reciprocal())
    return used, clipped, fires


def _window(amax: Tensor, reach: int) -> Tensor:
    """The largest of the `reach` entries before each entry; 0 for the first. The width doubles in each pass."""
    widest, width = amax, 1
    while width < min(reach, amax.shape[1]):
        more = min(width, reach - width)
        widest = torch.cat([widest[:, :more], torch.maximum(widest[:, more:], widest[:, :-more])], dim=1)
        width += more
    return torch.cat([torch.zeros_like(amax[:, :1]), widest[:, :-1]], dim=1)


def _outcome(lost: Tensor, clipped: int, worst: float, fires: int) -> HistoryScore:
    casts = lost.numel()
    if not casts:
        return HistoryScore(0, 0, 0.0, 0.0, 0.0, 0)
    p99 = lost.kthvalue(math.ceil(0.99 * casts)).values
    return HistoryScore(casts, clipped, worst, float(lost.mean()), float(p99), fires)
