"""The facts of a run that rules can name: of its casts, its steps, its events, and the whole run.

Each kind of rows has its own names and functions; `config.`, `answer.` and `run.` names have one value for all rows. A
new fact is one entry of a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from ottava.diagnose.conditions import Missing, Node, Values
from ottava.diagnose.loss import robust_distance
from ottava.diagnose.progress import Progress, over_depth, start_gain
from ottava.diagnose.rows import AnyRows, CastRows, Context, EventRows, Fact, Vocabulary
from ottava.diagnose.training import (
    AmaxRows,
    LayerRows,
    ParameterRows,
    activated,
    headroom,
    hidden,
    late_clip,
    made_by,
    stuck,
)
from ottava.measure import limits
from ottava.measure.statistics import STATISTICS, ratio
from ottava.record.reader import Run
from ottava.record.schema import SlotKey

_RANKED = 200  # looks of a series that rises() compares, evenly spaced; each with all others
_EARLY = 3  # looks at either end of a series whose median early() and late() take
_QUARTERS_TO_ZERO = 4 * 18.8074  # quarter octaves from a block's amax, cast to 448, down to underflow in E4M3


def _median_of(values: Any, part: slice) -> float:
    finite = values[np.isfinite(values)][part]
    return float(np.median(finite)) if len(finite) else math.nan


def _previous(values: Any) -> Any:
    return np.concatenate(([np.nan], values[:-1]))


def _rises(values: Any) -> float:
    """Kendall's tau against time: 1 if every later value is larger, 0 without a trend."""
    finite = values[np.isfinite(values)]
    if len(finite) < 4:
        return math.nan
    finite = finite[:: -(-len(finite) // _RANKED)]
    later = np.sign(finite[None, :] - finite[:, None])[np.triu_indices(len(finite), 1)]
    return float(later.mean())


def _over(compute: Callable[[Any], Any]) -> Callable[[tuple[AnyRows, Node]], Values]:
    return lambda call: call[0].over_series(call[1], compute)


def _column(name: str) -> Callable[[CastRows], Values]:
    return lambda rows: rows.table[name]


def _metric(name: str) -> Callable[[CastRows], Values]:
    return lambda rows: np.asarray(rows.table.metric(name))


def _below(rows: CastRows, name: str) -> Any:
    if rows.count and not rows.table.has_histograms(name).any():
        raise Missing('histograms of elements below the amax of their block (watch with detail="blocks")')
    return np.asarray(getattr(rows.table.tallies, name))


def _flushed_in_blocks(rows: CastRows) -> Values:
    bins = _below(rows, "below_1x128")
    return np.asarray(100 * ratio(bins[:, math.ceil(_QUARTERS_TO_ZERO) :].sum(1), bins.sum(1)))


def _at_block_amax(rows: CastRows) -> Values:
    bins = _below(rows, "below_1x32")
    tallies = rows.table.tallies  # the histogram has no zeros, and a block of zeros but one is no cluster
    return np.asarray(100 * ratio(bins[:, :2].sum(1), bins.sum(1)) * ratio(tallies.n_nonzero, tallies.n_total))


def _by_direction(rows: CastRows, of_x: str, of_transpose: str) -> Values:
    """A median SQNR of rows or channels, which x.T has the other way round."""
    both = (rows.value(f"{name}_sqnr_p50_db") for name in (of_x, of_transpose))
    return np.where(rows.value("direction") == "row", *both)


_SERIES = MappingProxyType(
    {
        "early": Fact("median of the first three looks", _over(lambda v: _median_of(v, slice(None, _EARLY)))),
        "late": Fact("median of the last three looks", _over(lambda v: _median_of(v, slice(-_EARLY, None)))),
        "usual": Fact("median of all looks", _over(lambda v: _median_of(v, slice(None)))),
        "before": Fact("the look before", _over(_previous)),
        "rises": Fact("Kendall's tau over the looks: 1 if it rises at every look", _over(_rises)),
        "repeats": Fact("looks for which the condition holds", _over(lambda v: float(np.nansum(v)))),
        "abs": Fact("magnitude", lambda call: np.abs(call[0].argument(call[1]))),
    }
)
CAST_FUNCTIONS: Mapping[str, Fact] = MappingProxyType(
    {
        **_SERIES,
        "peers": Fact(
            "median of the inner layers, same tensor and step, and same name if there is one",
            lambda call: call[0].peers(call[1]),
        ),
        "baseline": Fact("the same tensor in the twin", lambda call: call[0].baseline(call[1])),
        "ends": Fact("how many ends of the model have such a layer", lambda call: call[0].ends(call[1])),
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
        "floor_db": Fact("row SQNR of a healthy tensor in this format", lambda r: r.by_format(limits.healthy_db)),
        "warn_db": Fact("25 dB for E4M3, 20 for E5M2", lambda r: r.by_format(limits.warn_db)),
        "critical_db": Fact("15 dB for E4M3, 12 for E5M2", lambda r: r.by_format(limits.critical_db)),
        "gain_error": Fact("|gain - 1|", lambda r: np.abs(r.value("gain") - 1)),
        "cosine_distance": Fact("1 - cosine", lambda r: 1 - r.value("cosine")),
        "clipped": Fact("elements clipped", lambda r: np.asarray(r.table.tallies.n_overflow)),
        "headroom": Fact("log2(largest number of the format / scaled amax): below 0 the cast clips", headroom),
        "stuck": Fact("looks since the amax asked for another scale, and did not get it", stuck),
        "made_by": Fact("operation that made the input", made_by),
        "activated": Fact("whether an activation function made the input", activated),
        "tokens_db": Fact("SQNR of the median row of x", lambda r: _by_direction(r, "row", "channel")),
        "features_db": Fact("SQNR of the median column of x", lambda r: _by_direction(r, "channel", "row")),
        "n_features": Fact("columns of x", lambda r: r.table.tallies.channel_sqnr.sum(-1) + r.table.tallies.n_dead),
        "hidden": Fact("whether the largest element lies in a row that was not measured", hidden),
        "empty": Fact("whether every element is 0", lambda r: (np.asarray(r.table.tallies.amax) == 0) * 1.0),
        "late_clip": Fact("whether a predicted scale clips this cast", late_clip),
        "n_casts": Fact("casts in the look", lambda r: np.asarray(r.table.tallies.n_casts)),
        "margin": Fact("octaves that the recipe leaves at the top of the format", CastRows.margins),
        "looks": Fact("looks at this cast", lambda r: np.bincount(r.table.casts[0])[r.table.casts[0]] * 1.0),
        "age": Fact("steps since the first look", lambda r: r.table["step"] - (min(r.table["step"], default=0))),
        "flushed_in_blocks_pct": Fact("predicted underflow with blocks of 1x128 [%]", _flushed_in_blocks),
        "at_block_amax_pct": Fact("elements within an eighth of the amax of their 1x32 block [%]", _at_block_amax),
        "amax_rank_octaves": Fact("log2(largest / smallest amax over ranks)", lambda r: r.over_ranks("amax")),
        "scale_rank_octaves": Fact("log2(largest / smallest scale over ranks)", lambda r: r.over_ranks("scale_max")),
    }
)
"""Names for conditions over casts."""


_COLUMNS = MappingProxyType(
    {
        "loss": "the loss",
        "grad_norm": "norm of all gradients",
        "lr": "learning rate",
        "tokens": "tokens of the step",
        "input_amax": "largest magnitude in the batch",
        "input_rms": "root mean square of the batch",
        "input_nonfinite": "infinities and NaNs in the batch",
        "input_constant": "whether all whole numbers of the batch are the same",
        "label_nonfinite": "infinities and NaNs in the labels",
        "label_rms": "root mean square of the labels",
        "labels_ignored_pct": "share of labels that the loss ignores",
        "labels_equal_pct": "share of labels that are as the first one",
        "labels_alike_pct": "share of the most frequent label",
        "labels_copied": "tensors of labels that are equal to an input",
        "extra_steps": "optimizer steps without a backward since the last one",
        "restarts": "optimizers that began anew: without the state of the step before",
        "shared_parameters": "optimizers that stepped a parameter which another one had just stepped",
        "samples_alike_pct": "share of samples that are as the first one",
        "tokens_alike_pct": "share of the most frequent token",
        "blank_inputs": "inputs that are 0 everywhere",
        "kept_gradient": "largest gradient before the first backward of the step",
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
        "loss_jump": Fact("standard deviations of noise above the 5 losses before", lambda r: r.context.loss.jumps),
        "gradients_wrong": Fact(
            "whether the norm of all gradients is not finite",
            lambda r: ~np.isfinite(r.column("grad_norm", _COLUMNS["grad_norm"])) * 1.0,
        ),
        "loss_wrong": Fact("whether the loss is not finite", lambda r: ~np.isfinite(r.columns["loss"]) * 1.0),
        "onset": Fact("steps since the loss went wrong", lambda r: r.columns["step"] - r.context.loss.onset),
        "update_ratio": Fact("median update of a matrix over its weight", lambda r: Progress(r.context).update_ratio),
        "since_resume": Fact("steps since the run was resumed", lambda r: r.since("resumed")),
    }
)
"""Names for conditions over steps."""


EVENT_FACTS: Mapping[str, Fact] = MappingProxyType(
    {
        **{
            name: Fact("of the event", partial(EventRows.words, name=name))
            for name in (
                *("kind", "check", "layer", "tensor", "reason", "direction", "text"),
                *("gradients", "training", "recipe", "random", "dropout"),
            )
        },
        **{
            name: Fact("of the event", partial(EventRows.numbers, name=name)) for name in ("step", "value", "threshold")
        },
        "trained_recipe": Fact("recipe of the first forward with gradients", lambda r: _trained_recipe(r)),
    }
)
"""Names for conditions over events."""


def _trained_recipe(rows: EventRows) -> Values:
    modes = [e for e in rows.events if e.get("kind") == "mode" and e.get("gradients") is True]
    return np.full(rows.count, str(modes[0].get("recipe", "")) if modes else "", dtype=object)


PARAMETER_FACTS: Mapping[str, Fact] = MappingProxyType(
    {
        **{
            name: Fact(why, partial(ParameterRows.number, name=name))
            for name, why in {
                "ratio": "update over weight, root mean squares",
                "still": "share of weights with a gradient that the update did not change",
                "gradient": "root mean square of the gradient",
                "weight": "root mean square of the weight",
                "spread": "standard deviation of the weight over its root mean square",
                "written": "share of weights that something other than the optimizer changed",
            }.items()
        },
        "step": Fact("number of the optimizer step", ParameterRows.steps),
        "gradient_wrong": Fact(
            "whether the gradient has infinities or NaNs",
            lambda r: (np.isfinite(r.steps()) & ~np.isfinite(r.number("gradient"))) * 1.0,
        ),
        "beta1": Fact("first beta of its optimizer", partial(ParameterRows.beta, index=0)),
        "beta2": Fact("second beta of its optimizer", partial(ParameterRows.beta, index=1)),
        "beside_namesakes": Fact("its size over that of its namesakes in other blocks", ParameterRows.beside_namesakes),
        **{
            name: Fact(why, partial(ParameterRows.word, name=name))
            for name, why in {
                "dtype": "dtype of the parameter",
                "gradient_dtype": "dtype of its gradient",
                "state_dtype": "dtypes of its optimizer's state",
                "eps": "eps of its optimizer",
                "lr": "its learning rate",
                "weight_decay": "its weight decay",
                "momentum": "its momentum",
                "maximize": "whether its optimizer climbs",
            }.items()
        },
        "held": Fact("whether an optimizer holds it: yes, no or frozen", ParameterRows.held),
        "dims": Fact("its dimensions", ParameterRows.dims),
        "beside": Fact("its update over its weight, over the median of the step", ParameterRows.beside),
        "moved": Fact("whether it ever got a gradient", ParameterRows.moved),
        "ended": Fact("whether it had updates, and then none any more", ParameterRows.ended),
        "frozen_late": Fact("whether it is frozen, behind parameters that train", ParameterRows.frozen_late),
        "trains_before": Fact(
            "whether a frozen one's namesake in an earlier block trains", ParameterRows.trains_before
        ),
    }
)
"""Names for conditions over parameters."""

LAYER_FACTS: Mapping[str, Fact] = MappingProxyType(
    {
        **{
            name: Fact("of the layer", partial(LayerRows.word, name=name)) for name in ("source", "type", "why", "seen")
        },
        "kind": Fact("part of a transformer", LayerRows.kinds),
        "casts": Fact("whether its operands are cast", LayerRows.casts),
        "siblings_cast_pct": Fact("layers of this name in other blocks that are cast [%]", LayerRows.siblings_cast_pct),
        "expert_share_pct": Fact("tokens of the expert over those of the mean expert [%]", LayerRows.expert_share_pct),
    }
)
"""Names for conditions over layers."""


def _all_casts(column: str, wanted: str) -> Callable[[Context], str]:
    def ask(context: Context) -> str:
        table = context.table
        real = table["source"] != "hook"  # ignore simulated casts of high-precision layers beside real ones
        values = set(table[column][real] if real.any() else table[column])
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


def _classes(context: Context) -> float:
    classes = context.run.manifest.get("classes")
    if not isinstance(classes, int):
        raise Missing("the classes of the loss in watch.json")
    return float(classes)


def _softmax_twice(context: Context) -> str:
    if "softmax_twice" not in context.run.manifest:
        raise Missing("facts of the loss in watch.json (a watch of this version records them)")
    return "yes" if context.run.manifest["softmax_twice"] is True else "no"


def _fp32_casts(context: Context) -> float:
    layers = context.run.manifest.get("layers") or ()
    kinds = [d.get("input") for x in layers if isinstance(d := x.get("dtypes"), Mapping) and "input" in d]
    if not kinds:
        raise Missing("the dtypes of casts in watch.json (a watch of this version records them)")
    return 100.0 * float(np.mean([kind == "float32" for kind in kinds]))


def _reads_fp32(context: Context) -> str:
    try:
        return "yes" if _fp32_casts(context) > 50 else "no"
    except Missing:  # an older record, or another tool's
        return "yes" if context.scalar("config.dtype") in ("float32", "fp32", "torch.float32") else "no"


RUN_FACTS: Mapping[str, Fact] = MappingProxyType(
    {
        "steps": Fact("optimizer steps on record", lambda c: float(len(c.run.steps["step"]))),
        "looks": Fact("steps with a full look", lambda c: float(len(set(c.table["step"])))),
        "coverage_pct": Fact("linear layers that were seen", _coverage),
        "nonfinite_at": Fact("first step with a cast tensor that is not finite", lambda c: Progress(c).nonfinite_at),
        "forward_nonfinite_at": Fact(
            "first step with such an input or weight", lambda c: Progress(c).forward_nonfinite_at
        ),
        "start_gain": Fact("rms of weights times the root of their inputs at the first look", lambda c: start_gain(c)),
        "learned_pct": Fact("fall of the loss from first to last looks [%]", lambda c: Progress(c).learned_pct),
        "onset": Fact("first step with a wrong loss", lambda c: c.loss.onset),
        "loss_first": Fact("whether the loss went wrong before any cast", lambda c: Progress(c).loss_first),
        "twin_agrees": Fact("whether the BF16 twin goes wrong at the same time", lambda c: Progress(c).twin_agrees),
        "end_ratio": Fact("median loss of the last third over ln(classes)", lambda c: Progress(c).end_ratio),
        "twin_recovers": Fact(
            "whether the BF16 twin learned, and this run ends far above it", lambda c: Progress(c).twin_recovers
        ),
        "start_ratio": Fact("first loss over ln(classes)", lambda c: Progress(c).start_ratio),
        "reads_fp32": Fact("whether most casts read FP32, as recorded or else as the config says", _reads_fp32),
        "fp32_casts_pct": Fact("layers whose casts read FP32 [%]", _fp32_casts),
        "clip_norm": Fact("gradient norm that nearly all steps have", lambda c: Progress(c).clip_norm),
        "loss_spread": Fact("range of the loss over its magnitude", lambda c: Progress(c).loss_spread),
        "batches": Fact("different batches", lambda c: Progress(c).batches),
        "classes": Fact("classes of the loss", lambda c: _classes(c)),
        "repeated_pct": Fact("steps with the batch of the step before [%]", lambda c: Progress(c).repeated_pct),
        "softmax_twice": Fact("whether a softmax feeds the cross-entropy", _softmax_twice),
        "idle_pct": Fact("steps that hardly move the weights [%]", lambda c: Progress(c).idle_pct),
        "casting": Fact("whether any layer casts", lambda c: "yes" if (c.table["source"] != "hook").any() else "no"),
        "tied_apart": Fact("parameters that should be one", lambda c: Progress(c).tied_apart),
        "update_ratio": Fact(
            "largest update over weight", lambda c: float(np.nanmax(Progress(c).update_ratio, initial=-math.inf))
        ),
        "gradient_depth": Fact("octaves of dY from first to last block", lambda c: over_depth(c, "grad_output")),
        "input_depth": Fact("octaves of X from first to last block", lambda c: over_depth(c, "input")),
        "nonfinite": Fact(
            "infinities and NaNs in all tensors",
            lambda c: float(np.nansum(c.run.table(phase=None).metric("nonfinite"))),
        ),
        "findings": Fact("numeric findings so far", lambda c: float(c.findings)),
        "diverged": Fact("whether the loss rose and stayed high, or is not finite", lambda c: c.loss.diverged),
        "diverged_at": Fact("first step of the divergence", lambda c: c.loss.diverged_at),
        "spikes": Fact("loss spikes per 1000 steps", lambda c: c.loss.spike_rate),
        "recovery": Fact("median steps until a spike is over", lambda c: c.loss.recovery),
        "baseline_spikes": Fact("spikes of the twin per 1000 steps", lambda c: c.baseline_loss.spike_rate),
        "baseline_recovery": Fact("median steps until a spike of the twin is over", lambda c: c.baseline_loss.recovery),
        "gap_pct": Fact("loss above the twin's in the last quarter [%]", lambda c: c.loss.gap(c.baseline_loss)[0]),
        "gap_drift_pct": Fact("change of the gap from the quarter before", lambda c: c.loss.gap(c.baseline_loss)[1]),
        "gap_noise_pct": Fact("standard error of the gap", lambda c: c.loss.gap(c.baseline_loss)[2]),
        "odd_layers": Fact("layers with a dimension that is no multiple of 16", lambda c: float(_odd_layers(c))),
        "per_tensor": Fact("whether casts have one scale per tensor", _all_casts("granularity", "tensor")),
        "delayed": Fact("whether scales are delayed", _all_casts("scaling", "delayed")),
    }
)
"""Names that follow "run."."""

VOCABULARY: Vocabulary = MappingProxyType(
    {
        "casts": (CAST_FACTS, CAST_FUNCTIONS),
        "steps": (STEP_FACTS, STEP_FUNCTIONS),
        "events": (EVENT_FACTS, MappingProxyType({})),
        "run": (RUN_FACTS, MappingProxyType({})),
        "amaxes": (
            {**CAST_FACTS, "order_nonfinite": Fact("rank among casts that are not finite", AmaxRows.order_nonfinite)},
            CAST_FUNCTIONS,
        ),
        "would": (CAST_FACTS, CAST_FUNCTIONS),
        "parameters": (PARAMETER_FACTS, _SERIES),
        "layers": (LAYER_FACTS, MappingProxyType({})),
    }
)
"""Kind of rows that a rule may be `over` -> its names and functions. Names of "run" are written with "run." first."""


def context_of(
    run: Run,
    baseline: Run | None = None,
    answers: Mapping[str, str] | None = None,
    config: Mapping[str, tuple[str, ...]] | None = None,
) -> Context:
    """The context of a run, with the vocabulary of this module."""
    return Context(run, baseline, answers or {}, config or {}, VOCABULARY)
