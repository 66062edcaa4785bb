"""Is it FP8? Reads the experiments that a watched process made, cheapest first; the first that decides, decides.

    E0  logic        no layer casts, and no call of a traced step converts
    E3  replay       the recorded steps again, as they ran and in high precision: the event stays, or it is gone
    E1  shadow step  one batch, the gradient with casts and without: their distance against the gradient itself
    E2  ablation     parts of the casts off, halving the set: the smallest set whose casts make that distance

A replay shows the event itself, so it stands above the shadow step. A distance is judged by a level of its formats: it
is about three times what rounding alone gives in small models (docs/LOG.md). A distance inside the noise of the batch
is harmless, whatever an amax does.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ottava.base.text import grouped
from ottava.diagnose.calls import overflowed, reads_codes
from ottava.diagnose.difference import some
from ottava.diagnose.facts import Facts
from ottava.diagnose.loss import Event
from ottava.diagnose.ranks import arrived
from ottava.measure.layer_names import symbol
from ottava.measure.limits import (
    SUSPICIOUS,
    beyond_chance,
    critical_db,
    flushed_limit,
    gradient_hurts,
    gradient_level,
    loss_taken,
)
from ottava.numerics.formats import E4M3, FORMATS, Format
from ottava.recipe import TENSOR_OF

Part = Literal["none", "innocent", "guilty", "unknown"]
_NEAR = 3  # steps
VANISHED = 0.3  # of the elements; a scale for every tensor flushes a few percent
_MOST = 0.5  # of a tensor, as a norm
WAY = 0.3
"""Distance of the weights' way from that of the optimizer's formula: twice the level of a gradient, for moments carry
the errors of many steps."""
_GONE = 0.05  # of the elements of a gradient; 49 healthy runs of five blind sets have at most 0.5 %
_FEW = 64  # elements: a bias may be small
_STILL = 1e-3  # of the largest gradient
_CARRIED = 0.7  # of a change; random rounding moves further than that
_LEFT, _USELESS = 0.1, 0.85  # of the first loss; of a gradient
_BLOWN = 10.0  # times the gradient of before: the model has blown up, so an error says nothing about who began


@dataclass(frozen=True)
class Trial:
    """What the experiments say about FP8."""

    part: Part
    tried: tuple[str, ...]
    """What was tried and what came out, a sentence each."""
    step: int | None = None
    """The step of the experiment that decides."""
    error: float = math.nan
    """||g_casts - g|| / ||g|| there."""
    cured: float = math.nan
    """The same with the casts of `place` off."""
    place: tuple[Mapping[str, str], ...] = ()
    """{layer, gemm, operand}: the smallest set of casts that makes it; operand and gemm may be missing. Or {site}:
    where the script itself casts. Or {outside}: where it casts outside of the model. Or {function}: whose backward is
    wrong."""
    arms: tuple[Mapping[str, Any], ...] = ()
    """{name, loss or error}: remedies that were tried, cheapest first."""
    hurts: str = "gradient"
    """What the casts move: the gradient, the updates behind it, or a tensor."""
    sound: bool = False
    """Whether it holds whatever has become of the model: what goes in is held against what comes out."""

    @property
    def layers(self) -> list[str]:
        """The layers of `place`."""
        return list(dict.fromkeys(str(p["layer"]) for p in self.place if p.get("layer")))


def judge(facts: Facts, event: Event | None) -> Trial:
    """What the experiments of a run say about FP8's part in its event.

    Example: see `diagnose`.
    """
    outside = next((str(e.get("where")) for e in facts.experiments("conversion")), "")
    shown = _arrived(facts, outside) or _changed(facts, outside, event) or _stored(facts) or _spoils(facts, event)
    if shown is not None:
        return shown
    if facts.casts is False:
        return _uncast(facts, outside)
    if (replayed := _replayed(facts, event)) is not None:
        return _placed(facts, replayed)
    shadows = _shadows(facts)
    if not shadows and not facts.casts:
        return Trial("none", ("No cast is recorded.",))
    if not shadows:
        refused = tuple(f"Step {e['step']}: {e.get('why')}." for e in facts.experiments("refused")[:2])
        return Trial("unknown", refused or ("No shadow step was taken, so nothing was tried.",))
    found = _placed(facts, _shadowed(facts, event, shadows))
    if found.part == "guilty":
        return found
    if (wrong := _muted(facts, event, shadows) or _derived(facts, event) or _lost(facts, event, shadows)) is not None:
        return wrong
    if found.part == "innocent" and (name := _makes_nan(facts, event)):
        said = f"{found.tried[0]} But `{name}`, which converts to FP8, may make the first NaN."
        return replace(found, part="unknown", tried=(said,))
    # an average or a moment may lose what no gradient shows; a gradient that is converted on its way was tried
    if found.part == "innocent" and outside and not any(_number(e, "replay_error") > _TOUCHED for e in shadows):
        said = f"{found.tried[0]} The script converts to FP8 outside the model, too: {outside}.{_ways(facts)}"
        return replace(found, part="unknown", tried=(said,))
    return found


def _uncast(facts: Facts, outside: str) -> Trial:
    """Of a run whose layers do not cast: what else converts, or that nothing seen does."""
    if outside:
        said = f"No layer casts, but the script converts to FP8 outside the model: {outside}."
        return Trial("unknown", (said + _ways(facts),))
    if (read := reads_codes(facts)) is not None:
        return Trial("unknown", (f"No layer casts, but {read.where} reads FP8 numbers. No experiment tries that.",))
    seen = "No layer casts. No step was traced, so a conversion by hand would not be seen."
    if count := len({line["step"] for line in facts.run.trace}):
        seen = f"No layer casts, and no call of {count} traced steps converts to FP8. Other steps are not traced."
    return Trial("none", (seen,))


_TOUCHED = 0.01  # of the gradient's norm
_WILD = 3.0  # times the gradient


def _ways(facts: Facts) -> str:
    """What was tried of a conversion outside of the model."""
    passed = [x for e in facts.experiments("shadow") if (x := _number(e, "replay_error")) >= 0]
    tried = [x for e in facts.experiments("optimizer") if (x := _number(e, "error")) >= 0]
    if not (passed or tried):
        return " No experiment tries that."
    said = f" The optimizer gets the gradient of the backward, {100 * max(passed):.2g} % apart." if passed else ""
    ends = f" The weights go where the optimizer's formula takes them, {100 * tried[0]:.2g} % apart." if tried else ""
    return f"{said}{ends} What else the conversion does was not tried."


def _spoils(facts: Facts, event: Event | None) -> Trial | None:
    """A conversion of the script that, up to the event, makes infinities or NaN of finite numbers."""
    if event is None or not facts.loss.broken.any():
        return None
    if (hit := overflowed(facts)) is not None:
        step, call = hit
        said = f"In step {step} the cast at {call.where} gets finite numbers and gives some that are not."
        return Trial("guilty", (said,), step, place=({"site": call.at},), hurts="tensor", sound=True)
    for entry, site, what in _sites(facts.experiments("shadow")):
        if entry["step"] <= event.step and (share := _number(what, "nonfinite")) > 0:
            said = (
                f"In step {entry['step']} {spoken(site)} gets finite numbers, "
                f"and {100 * share:.2g} % of what it gives is not finite."
            )
            return Trial("guilty", (said,), entry["step"], place=({"site": site},), hurts="tensor", sound=True)
    return None


def _makes_nan(facts: Facts, event: Event | None) -> str:
    """A function that somebody wrote around a conversion and that may be the first whose result is not finite."""
    if event is None or event.kind != "not finite":
        return ""
    words = {w for e in facts.experiments("nonfinite") for w in str(e.get("operation")).split(" or ")}
    names = [str(n) for e in facts.experiments("shadow") for n in e.get("functions") or ()]
    return next((n for n in names if n.lower() in words or re.sub(r"(?<!^)(?=[A-Z])", "_", n).lower() in words), "")


def _sites(shadows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str, Mapping[str, Any]]]:
    """(trial, place in the script, what its cast does to its tensor there)."""
    return ((entry, str(site), what) for entry in shadows for site, what in (entry.get("sites") or {}).items())


def _muted(facts: Facts, event: Event | None, shadows: Sequence[Mapping[str, Any]]) -> Trial | None:
    """Casts leave nothing of a matrix's gradient, or of small elements: the gradient's size says nothing about that."""
    tried = [({str(n) for n in e.get("muted") or ()}, e) for e in shadows]
    names = sorted(n for n in set.intersection(*(names for names, _ in tried)) if facts.size(n) > _FEW)
    last = tried[-1][1]
    sites = [{"site": site} for _, site, what in _sites([last]) if _number(what, "flushed") > VANISHED]
    if names:
        said = (
            f"With casts the gradient of {some(names)} is zero in each of {len(tried)} trials, without them it is not."
        )
        place = sites or [{"layer": n.rpartition(".")[0]} for n in names]
        return Trial("guilty", (said,), last["step"], 1.0, place=tuple(place), sound=True)
    high, hurt = [(x, e["step"]) for e in shadows if (x := _number(e, "lost")) > _GONE], damage(facts)
    scaled = sorted({str(p["held"]["optimizer"]) for p in facts.parameters if "betas" in (p.get("held") or {})})
    if not scaled or not (sites or hurt.layer) or len(high) < 2 or 2 * len(high) <= len(shadows):
        return None
    if not _number(last, "lost") > _GONE and (event is None or not event.lasts):  # it passes, as scales settle
        return None
    most = 100 * max(high)[0]
    said = (
        f"In {len(high)} of {len(shadows)} trials casts make zero of up to {most:.2g} % of the gradient's elements. "
        f"They are small, and {some(scaled)} would move them as far as others."
    )
    place = sites or [{"layer": hurt.layer}]
    return Trial("guilty", (said,), high[0][1], place=tuple(place), hurts="tensor")  # from which on they do it


def _lost(facts: Facts, event: Event | None, shadows: Sequence[Mapping[str, Any]]) -> Trial | None:
    """A cast of the script that loses most of its tensor, in most trials or in the last one.

    A gradient as a whole may hide that: one large parameter outweighs all others, and an optimizer that divides by the
    size of each does not.
    """
    tried = [e for e in _halves(event, shadows)[0] if not _fits(facts, e)]
    errors: dict[str, list[float]] = {}
    for _, site, what in _sites(tried):
        errors.setdefault(site, []).append(_number(what, "error"))
    for site, values in errors.items():
        high = [e > _MOST for e in values]
        if high[-1] or 2 * sum(high) > len(high):
            whole = max(float(e["error"]) for e in tried)
            said = (
                f"In {sum(high)} of {len(high)} trials {spoken(site)} loses most of its tensor: it moves it by up to "
                f"{100 * np.nanmax(values):.3g} % of itself. "
                f"The gradient as a whole differs by at most {100 * whole:.3g} %."
            )
            return Trial("guilty", (said,), tried[-1]["step"], place=({"site": site},), hurts="tensor")
    return None


def _arrived(facts: Facts, outside: str) -> Trial | None:
    """Casts on the way from the backward to the optimizer: the gradient is lost there."""
    for entry in facts.experiments("shadow"):
        where = outside or str(entry.get("recipe")).removeprefix("conversions at ")
        if (entry.get("vanished") or 0.0) > VANISHED and (outside or where != entry.get("recipe")):
            said = (
                f"At step {entry['step']} {100 * entry['vanished']:.3g} % of the gradient's elements are zero at the "
            )
            said += f"optimizer, though the backward gave numbers: the script converts to FP8 on the way: {where}."
            return Trial("guilty", (said,), entry["step"], place=({"outside": where},), sound=True)
    return None


def _derived(facts: Facts, event: Event | None) -> Trial | None:
    """A backward that somebody wrote around casts, and that is not the derivative of its forward without them."""
    tried = [e for e in facts.experiments("shadow") if math.isfinite(_number(e, "derivative"))]
    # a clamp that cuts numbers off has no derivative there, and a straight-through estimator has one
    tried = [e for e in tried if all(_number(what, "clipped") < 1e-3 for _, _, what in _sites([e]))]
    far = [e for e in tried if _number(e, "derivative") > _level(facts, e)]
    if not far or not beyond_chance(len(far), len(tried), 0.05, 0.05):
        return None
    worst = max(far, key=lambda e: _number(e, "derivative"))
    names = ", ".join(f"`{n}`" for n in worst.get("functions") or ())
    said = f"Without its casts the handwritten backward of {names} is not the derivative of its forward: at step "
    said += f"{worst['step']} the two gradients differ by {100 * worst['derivative']:.3g} %. "
    error, place = float(worst["derivative"]), ({"function": names},)
    if error < _WILD and (event is None or not event.lasts):  # a training that goes well may mean it
        said += "It may be meant, as in feedback alignment; else one of the two is wrong."
        return Trial("unknown", (said,), worst["step"], error)
    said += "One of the two is wrong."
    return Trial("guilty", (said,), worst["step"], error, place=place, sound=True)


def _number(entry: Mapping[str, Any], name: str) -> float:
    value = entry.get(name)
    return float(value) if isinstance(value, (int, float)) else math.nan


def _changed(facts: Facts, outside: str, event: Event | None) -> Trial | None:
    """Casts outside of the layers: the weights do not go where the optimizer's formula takes them, or the gradient that
    arrives is not the one that was computed."""
    if not outside:
        return None
    place: tuple[Mapping[str, str], ...] = ({"outside": outside},)
    for entry in facts.experiments("optimizer"):
        if (error := _number(entry, "error")) > WAY and entry.get("converts"):
            said = f"From step {entry['from']} to {entry['step']} the weights do not go where the optimizer's formula "
            said += f"takes them in FP32 and without conversions: the two ways are {100 * error:.3g} % apart (level "
            said += f"{100 * WAY:.0f} %). The script converts to FP8 outside the model: {outside}."
            return Trial("guilty", (said,), entry["step"], error, place=place, sound=True, hurts="updates")
    for step, error, _ in arrived(facts):
        if error > WAY:
            said = f"At step {step} the gradient at the optimizers differs by {100 * error:.3g} % from the average of "
            said += f"what the ranks computed, and the script converts to FP8 on the way: {outside}."
            return Trial("guilty", (said,), step, error, place=({"site": outside, "ranks": "all"},), sound=True)
    for entry in facts.experiments("shadow"):
        if (error := _number(entry, "replay_error")) > _level(facts, entry) and entry.get("tail") == "replayed":
            if event is not None and entry["step"] >= event.step:
                return None
            said = f"At step {entry['step']} the gradient at the optimizer differs by {100 * error:.3g} % from that "
            said += f"of the backward, and the script converts to FP8 outside the model: {outside}."
            return Trial("guilty", (said,), entry["step"], error, place=place)
    return None


def _stored(facts: Facts) -> Trial | None:
    """What the script keeps in FP8 from step to step, and what does not take its changes along."""
    found = grouped((str(site), (e["step"], x)) for e in facts.experiments("stored") for site, x in e["sites"].items())
    for site, moves in found.items():
        lost = [(step, share) for step, share in moves if share < _CARRIED]
        if len(lost) > 1 and 2 * len(lost) > len(moves):
            most = 100 * max(share for _, share in lost)
            said = (
                f"In {len(lost)} of {len(moves)} trials what {spoken(site)} keeps from step to step moves by at most "
            )
            said += f"{most:.2g} % of its change: what is below half a step of the format is rounded away."
            place = ({"site": site, "stored": "all"},)
            return Trial("guilty", (said,), lost[0][0], place=place, hurts="updates", sound=True)
    return None


def _replayed(facts: Facts, event: Event | None) -> Trial | None:
    for entry in facts.experiments("replay"):
        arms = {str(a.get("name")): list(a.get("losses") or ()) for a in entry.get("arms") or ()}
        ran, without = arms.get("as it ran"), arms.get("high precision")
        if event is None or not ran or not without or not int(entry.get("from", 0)) <= event.step <= entry["step"]:
            continue
        if not entry.get("reproduces"):
            return None  # weaker than a shadow step
        limit = facts.loss.at_best(event.step) + facts.loss.rise
        if ran[-1] <= limit:
            continue
        steps = f"Steps {entry['from']} to {entry['step']} were replayed: as they ran the loss reached {ran[-1]:.4g}"
        said = f"{steps}, in high precision {without[-1]:.4g}."
        others = [
            {"name": a["name"], "loss": a["losses"][-1], "inside": bool(a["losses"][-1] <= limit)}
            for a in entry["arms"]
            if a.get("name") not in ("as it ran", "high precision") and a.get("losses")
        ]
        tried = [f"Replayed under {a['name']}: {a['loss']:.4g}." for a in others]
        part: Part = "guilty" if without[-1] <= limit else "innocent"
        return Trial(part, (said, *tried), entry["step"], arms=tuple(others))
    return None


def _shadows(facts: Facts) -> list[Mapping[str, Any]]:
    """Those of real casts."""
    return [e for e in facts.experiments("shadow") if e.get("mode") != "simulated" and _number(e, "error") >= 0]


def _halves(
    event: Event | None, shadows: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The trials before the event, and those since: the loss of a step is made by the steps before it. A loss that
    comes back has hurt nothing for good, so no trial of such a run is late."""
    at = event.step if event is not None and event.lasts else math.inf
    return [e for e in shadows if e["step"] < at], [e for e in shadows if e["step"] >= at]


def _step(entry: Mapping[str, Any]) -> int:
    return int(entry["step"])


def _shown(part: Part, said: str, entry: Mapping[str, Any], **more: Any) -> Trial:
    return Trial(part, (said,), entry["step"], float(entry["error"]), **more)


def _shadowed(facts: Facts, event: Event | None, shadows: Sequence[Mapping[str, Any]]) -> Trial:
    lasting, at = event is not None and event.lasts, math.inf if event is None else event.step
    before, after = _halves(event, shadows)
    steps = f"{len(shadows)} shadow step{'s' if len(shadows) > 1 else ''}"
    hurt = [e for e in before if _hurts(facts, e)]
    # a loss that left for good is evidence besides; without it, one trial of several may be an odd batch
    risk = 0.2 if any(float(e["error"]) > 3 * _level(facts, e) for e in hurt) else 0.05
    if hurt and (lasting or beyond_chance(len(hurt), len(before), 0.05, risk)):
        worst = max([e for e in hurt if e["step"] < at] or hurt, key=lambda e: float(e["error"]))
        found = _shown("guilty", _said(worst, facts), worst)
        if not lasting and worst.get("noise") is None:  # in a game it is many times the gradient
            said = f"{found.tried[0]} How far one batch differs from another is not known there."
            return replace(found, part="unknown", tried=(said,))
        # a loss that has not come back shows a state that was broken before the trial
        if all(at <= e["step"] < facts.loss.back(at) for e in hurt):
            cleared = behind(facts, at, found)
            if cleared.part == "innocent":
                return cleared
        # between the last that hurts and the event a trial is calm: scales had not settled, or batches were odd
        last = max((e for e in before if e["step"] < at), key=_step, default=worst)
        if lasting or float(last["error"]) > _level(facts, last) or last["step"] < hurt[-1]["step"]:
            return found
        said = f"{found.tried[0]} At step {last['step']} it is {100 * float(last['error']):.3g} %: it passes."
        return replace(found, part="innocent", tried=(said,))
    norms = [float(e.get("norm") or 0.0) for e in before]
    if not norms and event is not None and (known := facts.column("grad_norm")) is not None:
        norms = [float(n) for n in known[facts.steps <= max(event.step, facts.steps[0])] if math.isfinite(n)]
    usual = float(np.median(norms)) if norms else math.inf
    for entry in after:
        hurts, limit = _hurts(facts, entry), facts.loss.at_best(at) + facts.loss.rise
        if hurts and _number(entry, "loss_without") <= limit < _number(entry, "loss"):
            said = f"{_said(entry, facts)} The loss of its batch is {entry['loss']:.3g} with casts and "
            said += f"{entry['loss_without']:.3g} without, inside the band that it had left."
            return _shown("guilty", said, entry, sound=True)
        # a jump between two shadow steps shows in that of the trigger; later ones see what has come of it
        if before and entry["step"] > at + _NEAR and (hurts or _takes(facts, entry)):
            said = f"{_said(entry, facts)} The loss had left at step {at}, so this does not say who began."
            return _shown("unknown", said, entry)
        if hurts and float(entry.get("norm") or math.inf) <= _BLOWN * usual:
            return _shown("guilty", _said(entry, facts), entry)
        if hurts:
            said = f"{_said(entry, facts)} The gradient had already blown up, so this does not say who began."
            return _shown("unknown", said, entry)
    worst = max(before or after, key=lambda e: float(e["error"]))
    said = f"{steps}: with casts the gradient differs by at most {100 * worst['error']:.3g} % from that without"
    ends = f"{said} (level {100 * _level(facts, worst):.0f} %"
    over = float(worst["error"]) > _level(facts, worst) and not _hurts(facts, worst)
    if hurt and _level(facts, worst) > gradient_level(8):
        ends += f"; above it in {len(hurt)} of {len(before)}). "
        ends += "Whether so few bits are too coarse here, a run with more shows."
        return _shown("unknown", ends, worst)
    if hurt:
        ends += f"; above it in {len(hurt)} of {len(before)} only, as odd batches of a healthy run are)."
    else:
        noise = worst.get("noise")
        why = "the noise of the batch is not known"
        why = why if noise is None else f"{noise:.2g} times the noise of the batch, which hides it"
        why = _fits(facts, worst) or why
        ends += f"; {why})." if over else ")."
        if over and noise is None and not _fits(facts, worst):
            return _shown("unknown", ends, worst)
    return _shown("innocent", ends, worst)


def behind(facts: Facts, began: float, trial: Trial, what: str = "The loss left") -> Trial:
    """What a trial of a state that had broken before it, at step `began`, says: that casts hurt, too.

    A trial within a few steps of that one says who began.
    """
    calm = itertools.takewhile(lambda e: not _hurts(facts, e), _shadows(facts))
    one = next((e for e in calm if abs(e["step"] - began) <= _NEAR), None)
    if one is None:
        said = f"{trial.tried[0]} It was tried when the loss had left, so this does not say who began."
        return replace(trial, part="unknown", tried=(said, *trial.tried[1:]))
    said = f"{_said(one, facts)} " + f"{what} at step {began}, so the casts did not begin it."
    if math.isfinite(trial.error) and trial.step is not None:
        said += f" At step {trial.step} they move it by {100 * trial.error:.3g} %: a consequence."
    return _shown("innocent", said, one)


def _bits(facts: Facts, entry: Mapping[str, Any]) -> int:
    """Those of the narrowest format that casts."""
    names = {str(f) for f in facts.table["format"]}
    bits = [FORMATS[name].bits for name in names if name in FORMATS]
    if "fp4" in str(entry.get("recipe", "")):
        bits.append(4)
    return min(bits, default=8)


def _level(facts: Facts, entry: Mapping[str, Any]) -> float:
    return gradient_level(_bits(facts, entry))


def _fits(facts: Facts, entry: Mapping[str, Any]) -> str:
    """Why an error of this gradient says little: the model fits the batch; "" if it does not.

    A gradient is the difference of outputs and targets. Where little of it is left, the rounding of the outputs is
    large beside it in every healthy run. Only casts that leave nothing of it hurt there.
    """
    norms = facts.column("grad_norm")
    if norms is not None:  # a later one may be that of a blow-up
        largest = float(np.max(norms[np.isfinite(norms) & (facts.steps <= entry["step"])], initial=0.0))
        if _number(entry, "norm") < _STILL * largest:
            return "of a gradient below a thousandth of the largest"
    if 0 <= _number(entry, "loss") < _LEFT * facts.loss.first and float(entry["error"]) < _USELESS:
        return "less than a tenth of the first loss is left, where rounding is large beside any gradient"
    return ""


def _hurts(facts: Facts, entry: Mapping[str, Any]) -> bool:
    if _fits(facts, entry):
        return False
    noise = entry.get("noise")
    known = float(noise) if isinstance(noise, (int, float)) else None
    about = float(entry["error"]), known, entry.get("bias"), _bits(facts, entry)
    # rounding alone comes near the level in small models; then a cast must do worse than round, about that step
    suspicious, step = gradient_hurts(*about, hidden=SUSPICIOUS), entry["step"]
    return gradient_hurts(*about) or (suspicious and bool(damage(facts, since=step / 2, last=step).kind))


def _takes(facts: Facts, entry: Mapping[str, Any]) -> float:
    """What casts take from the loss of one batch, see `loss_taken`."""
    both = _number(entry, "loss"), _number(entry, "loss_without")
    return loss_taken(facts.loss.first, *both, facts.loss.noise)


def _said(entry: Mapping[str, Any], facts: Facts) -> str:
    noise, bias = entry.get("noise"), entry.get("bias")
    rank = f" on rank {entry['rank']}" if entry.get("rank") else ""
    said = f"At step {entry['step']}{rank} the gradient with casts differs by {100 * float(entry['error']):.3g} % from "
    said += f"that without (level {100 * _level(facts, entry):.0f} %)"
    if isinstance(noise, (int, float)) and math.isfinite(noise):
        said += f", {noise:.2g} times the noise of the batch"
    if isinstance(bias, (int, float)) and abs(bias) > 0.05:
        said += f"; it is {100 * abs(bias):.0f} % too {'long' if bias > 0 else 'short'} along the gradient"
        said += ", so it points the other way" if bias < -1 else ""
    if share := _takes(facts, entry):
        said += f". The loss of its batch is {entry['loss']:.3g} with casts and {entry['loss_without']:.3g} without: "
        said += f"they take {100 * share:.0f} % of what training gained"
    return said + "."


def _placed(facts: Facts, trial: Trial) -> Trial:
    """The trial with the place that an ablation found, or else that of the worst parameter."""
    if trial.part != "guilty":
        return trial
    # a record of before may have searches in the loss
    if found := [e for e in facts.experiments("ablation") if e.get("set") and not e.get("of_loss")]:
        best = min(found, key=lambda e: abs(e["step"] - (trial.step or 0)))
        if best["step"] != trial.step and (worse := _grown(facts, trial, best["set"])) is not None:
            return worse
        place = tuple({**p, "operand": _operand(p)} for p in best["set"])
        here, before, after = named(place), _number(best, "error_before"), _number(best, "error_after")
        fell = f"falls from {100 * before:.3g} % to {100 * after:.3g} %"
        said = f"With {here} in high precision the gradient's error {fell}."
        if best["step"] != trial.step:
            said = f"With {here} in high precision the gradient's error of step {best['step']} {fell}."
        return replace(trial, tried=(*trial.tried, said), cured=after, place=place)
    shadow = next((e for e in facts.experiments("shadow") if e["step"] == trial.step), None)
    worst = (shadow or {}).get("worst") or []
    layers = [str(w["parameter"]).rpartition(".")[0] for w in worst if w.get("parameter")]
    known = {str(n) for n in facts.real_casts()["layer"]}
    cast = [n for n in layers if not known or n in known]  # a norm behind a cast is hurt, too
    cast = [hurt.layer] if (hurt := damage(facts)).layer else cast  # what is before it may make its parameters' error
    return replace(trial, place=tuple({"layer": n} for n in cast[:1]))


def _grown(facts: Facts, trial: Trial, place: Sequence[Mapping[str, str]]) -> Trial | None:
    """The trial with a cast of the script that is damaged at its step, where an ablation of another step blamed casts
    that are not; None if there is none."""
    own = [e for e in facts.experiments("shadow") if e["step"] == trial.step]
    errors = {site: error for _, site, what in _sites(own) if (error := _number(what, "error")) >= 0}
    blamed = max((errors.get(str(p.get("site")), 0.0) for p in place), default=0.0)
    site = max(errors, key=lambda one: errors[one], default="")
    if not site or errors[site] < max(_OF_SITES[-1][3], 3 * blamed):
        return None
    said = f"At step {trial.step} {spoken(site)} moves its tensor by {100 * errors[site]:.3g} %."
    return replace(trial, tried=(*trial.tried, said), place=({"site": site},))


def _operand(part: Mapping[str, str]) -> str:
    """The tensor that a side of a GEMM is."""
    gemm, side = part.get("gemm") or "", part.get("operand") or ""
    return TENSOR_OF[gemm, side][0] if (gemm, side) in TENSOR_OF else side


def spoken(site: str) -> str:
    """A site in words.

    Example:
        >>> spoken("train.py:7"), spoken("the backward of a conversion")
        ('the cast at train.py:7', 'the backward of a conversion')
    """
    return site if site.startswith("the ") else f"the cast at {site}"


def named(place: Sequence[Mapping[str, str]]) -> str:
    """A set of casts in words.

    Example:
        >>> named([{"layer": "fc1", "gemm": "wgrad", "operand": "input"}])
        "X of fc1's wgrad"
    """
    words = []
    for part in place:
        layer, gemm, operand = (part.get(k) or "" for k in ("layer", "gemm", "operand"))
        if part.get("function"):
            words.append(f"the forward or the backward of {part['function']}")
        elif site := part.get("site") or part.get("outside"):
            words.append(spoken(site))
        elif gemm:
            of = "both operands" if operand == "both" else symbol(operand)
            words.append(f"{of} of {layer}'s {gemm}" if operand else f"{layer}'s {gemm}")
        else:
            words.append(f"{symbol(operand)} of {layer}" if operand else layer)
    return some(words)


@dataclass(frozen=True)
class Damage:
    """What a cast does to its tensor."""

    kind: Literal["clipped", "flushed", "coarse", ""]
    sentence: str
    layer: str = ""
    tensor: str = ""
    metric: str = ""
    value: float = math.nan
    step: int | None = None


_CLIPPED = "{value:.3g} % of the elements of {where} are clipped"
_FLUSHED = "{value:.3g} % of the elements of {where} underflow to zero"
_COARSE = "the median row of {where} keeps {value:.3g} dB: one scale must serve a few large values and all others"
_KINDS: tuple[tuple[Any, str, float, str], ...] = (
    ("clipped", "overflow_pct", 1.0, _CLIPPED),
    ("flushed", "underflow_pct", 1.0, _FLUSHED),
    ("coarse", "row_sqnr_p50_db", 0.0, _COARSE),
)
"""(kind, statistic, the largest `_badness` of a healthy cast, in words), the plainest first."""
_OF_SITES: tuple[tuple[Any, str, str, float, str], ...] = (
    ("clipped", "clipped", "overflow_pct", 1e-3, _CLIPPED),
    ("flushed", "flushed", "underflow_pct", 0.1, _FLUSHED),
    ("coarse", "error", "error_pct", 0.1, "a cast moves {where} by {value:.3g} %"),
)


def _badness(kind: str, value: float, fmt: Format | None) -> float:
    if kind == "coarse":
        return critical_db(fmt) - value if fmt else math.nan
    return value / (flushed_limit(fmt or E4M3) if kind == "flushed" else 0.1)


def damage(
    facts: Facts, layers: Sequence[str] = (), last: float = math.inf, sites: Sequence[str] = (), since: float = 0.0
) -> Damage:
    """The worst that a recorded real cast did to a tensor: clipped, flushed, or coarse.

    Args:
        layers: only these; none: all.
        since, last: only looks of these steps.
        sites: of a script's own casts, asked first.
    """
    for site in sites:
        seen = [what for _, one, what in _sites(facts.experiments("shadow")) if one == site]
        for kind, name, metric, limit, text in _OF_SITES:
            if seen and (value := max(float(e.get(name) or 0.0) for e in seen)) > limit:
                said = text.format(value=100 * value, where=f"the input of {spoken(site)}")
                return Damage(kind, f"{said[0].upper()}{said[1:]}.", metric=metric, value=100 * value)
    table = facts.real_casts()
    steps, among = np.asarray(table["step"]), [not layers or n in layers for n in table["layer"]]
    table = table.take(np.flatnonzero((steps >= since) & (steps <= last) & np.array(among, dtype=bool)))
    formats = [FORMATS.get(str(f)) for f in table["format"]]
    for kind, metric, limit, text in _KINDS if len(table) else ():
        values = table.metric(metric)
        bad = np.array([_badness(kind, *pair) for pair in zip(values, formats, strict=True)])
        if np.isfinite(bad).any() and np.nanmax(bad) > limit:
            i = int(np.nanargmax(bad))
            layer, tensor, step = str(table["layer"][i]), str(table["tensor"][i]), int(table["step"][i])
            said = text.format(value=values[i], where=f"{layer}.{symbol(tensor, str(table['direction'][i]))}")
            said = f"{said[0].upper()}{said[1:]} (step {step})."
            return Damage(kind, said, layer, tensor, metric, float(values[i]), step)
    return Damage("", "")


def forecast(facts: Facts) -> list[str]:
    """What simulated casts say about a model that does not cast: "If you switch this model to FP8"."""
    said = []
    for entry in facts.experiments("shadow"):
        if entry.get("mode") == "simulated" and not entry.get("rank") and (error := _number(entry, "error")) >= 0:
            said.append(
                f"Under {entry.get('recipe')} the gradient of step {entry['step']} would differ by {100 * error:.3g} % "
                f"(level {100 * _level(facts, entry):.0f} %)."
            )
    return said[-2:]


def triage(facts: Facts, good: Facts | None, event: Event | None, trial: Trial) -> list[dict[str, Any]]:
    """The path through the tree: {id, question, answer, say, needs}; answer is yes, no or unknown."""
    path: list[dict[str, Any]] = []

    def ask(name: str, question: str, answer: bool | None, yes: str, no: str, needs: str = "") -> bool | None:
        word = "unknown" if answer is None else "yes" if answer else "no"
        say = "" if answer is None else yes if answer else no
        needed = [needs] if answer is None and needs else []
        path.append({"id": name, "question": question, "answer": word, "say": say, "needs": needed})
        return answer

    loss, known = facts.loss, len(facts.steps) > 0
    first = float(loss.loss[0]) if known else math.nan
    high = first > 1.5 * facts.guess if math.isfinite(facts.guess) and math.isfinite(first) else None
    ask("T0", "Does the run start far above a guess?", high, "Look at initial weights and scales of logits first.",
        "The start is fine.", "a cross-entropy whose classes the watch saw")  # fmt: skip
    count = len(loss.spikes)
    seen = f"{count} spike{'s' * (count > 1)}."
    if ask("T1", "Does the loss spike?", bool(count) if known else None, seen, "No spikes.", "losses"):
        more = None if good is None else loss.spike_rate > 2 * good.loss.spike_rate
        ask("T1b", "Are spikes more frequent than in the good run?", more, "The good run has fewer.",
            "The good run has them, too: look at data and learning rate.", "--baseline RUN")  # fmt: skip
    stays = None if not known else event is not None and event.stays is not None
    if ask("T2", "Does the loss leave its band for good?", stays, "" if event is None else event.sentence,
           "It does not.", "losses"):  # fmt: skip
        assert event is not None
        ask("T2a", "Within the first 1000 steps?", event.step < 1000, "Look for bugs first, then at the recipe.",
            "Look at the recipe first: what grew slowly?")  # fmt: skip
    casts = {"guilty": True, "innocent": False, "none": False}.get(trial.part)
    said = trial.tried[0] if trial.tried else ""
    if ask("T2b", "Do the casts do it?", casts, said, said, "a shadow step, or `ottava watch --replay`"):
        place = bool(trial.place)
        ask("T3", "Do you know which GEMM?", place, f"{named(trial.place)}.", "Run `ottava bisect RUN`.")
        ask("T2c", "Is it the accumulator?", None, "", "", "ottava bisect RUN --accumulator hopper")
    ask("T4", "Is the loss fine, but downstream tasks are not?", None, "", "", "ottava parity --answers")
    return path
