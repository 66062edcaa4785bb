"""Laws of training: what a step that works cannot break. A law is data: an entry of `LAWS`, and a function of facts.

Two kinds. An exact law reads a fact of the program: no optimizer holds this weight. A statistical law reads a number
that is far outside what training gives; it is asked only where something happened to the loss, because the same number
may be harmless elsewhere. FP8 has no part in a law: `trials` says what the casts did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from ottava.base.text import grouped, progress
from ottava.diagnose.calls import squared, starts_high
from ottava.diagnose.difference import some
from ottava.diagnose.facts import Facts, Values
from ottava.diagnose.loss import Event
from ottava.diagnose.ranks import parted, same_batches
from ottava.diagnose.trials import VANISHED
from ottava.measure.limits import OVERSHOOTS, beyond_chance, overshoots


@dataclass(frozen=True)
class Broken:
    """How a run breaks a law."""

    sentence: str
    """What was seen, with its numbers."""
    since: int | None = None
    """The first step; None if it holds for the whole run."""
    where: tuple[str, ...] = ()
    """Parameters or layers."""
    numbers: dict[str, Any] = field(default_factory=dict)
    grave: bool = True
    """False: it may be meant, so it is a note unless something happened to the loss that lasts."""
    shown: bool = False
    """An experiment at the event shows that this made it."""
    title: str = ""
    remedy: str = ""
    """In place of those of the law."""


@dataclass(frozen=True)
class Law:
    """A law and how to ask it."""

    id: str
    title: str
    """The answer if this law is the first one broken."""
    ask: Callable[[Facts, Event | None], Broken | None]
    remedy: str
    """A name in `remedies.REMEDIES`."""
    needs: str
    """The law needs one of these facts. `NEEDS` has them in words; "": it needs none."""
    exact: bool = True
    """Whether it reads a fact of the program; a statistical law is asked where something happened to the loss."""
    always: bool = False
    """Asked even where nothing happened to the loss, though it is not exact: an experiment tells."""


def broken(facts: Facts, event: Event | None) -> list[tuple[Law, Broken]]:
    """The laws that a run breaks: exact ones first, then the earliest, then in the order of computation."""
    found = []
    for law in progress(LAWS, "testing laws"):
        if not (law.exact or law.always) and event is None:
            continue
        if (how := law.ask(facts, event)) is not None:
            found.append((law, how))
    return sorted(found, key=lambda pair: (not pair[0].exact, pair[1].since or 0))


def _names(names: Sequence[str]) -> str:
    return some(names, most=4)


def _counted(facts: Facts, name: str) -> Values:
    """In which steps a counter is above zero; in none of a run that does not have it."""
    values = facts.column(name)
    return np.zeros(len(facts.steps), dtype=bool) if values is None else np.nan_to_num(values) > 0


def _rate(facts: Facts, step: float) -> str:
    return f" with lr {lr:.3g}" if math.isfinite(lr := facts.at("lr", step)) else ""


# data


def _inputs_broken(facts: Facts, event: Event | None) -> Broken | None:
    for what, name in (("inputs", "input_nonfinite"), ("labels", "label_nonfinite")):
        if (hit := _counted(facts, name)).any():
            first = facts.since(hit)
            said = f"The {what} hold infinities or NaN in {hit.sum()} steps, first at step {first}."
            # a model may fill in what is missing
            return Broken(said, first, grave=event is not None and event.kind == "not finite")
    return None


def _labels_dead(facts: Facts, event: Event | None) -> Broken | None:
    ignored, equal = facts.column("labels_ignored_pct"), facts.column("labels_equal_pct")
    if ignored is not None and (hit := np.nan_to_num(ignored) >= 100.0).mean() >= 0.25:
        return Broken(f"All labels are ignored in {hit.sum()} of {len(hit)} steps.", facts.since(hit))
    if equal is not None and (hit := np.nan_to_num(equal) >= 100.0).mean() >= 0.75 and len(hit) > 3:
        # the same in every step, they are places in a list of candidates, as of a contrastive loss
        hashes = facts.column("label_hash")
        always = hashes is not None and len(hashes) > 3 and len(set(hashes[np.isfinite(hashes)].tolist())) == 1
        said = f"All labels of a batch are one class in {hit.sum()} of {len(hit)} steps."
        return Broken(said, facts.since(hit), grave=not always)
    return None


def _labels_shifted(facts: Facts, event: Event | None) -> Broken | None:
    """A model of the next token whose labels are other tokens of its own input."""
    same, following, after = (facts.column(f"labels_ahead_{k}_pct") for k in range(3))
    if same is None or following is None or after is None:
        return None
    # a model that gives but its loss may have moved its own input, as the writer of an autoencoder does
    scores = all(e["sees_later"] is not None for e in facts.experiments("shadow") if "sees_later" in e)
    for column, said in (
        (same, "the token that it is given: nothing has shifted them"),
        (after, "the token after the next one: they are shifted twice"),
    ):
        hit = (np.nan_to_num(column) >= _MATCH) & ~(following >= _CHANCE)
        if hit.mean() > 0.9:
            told = f"The labels ask at each place for {said}, in {hit.sum()} of {len(hit)} steps."
            return Broken(told, grave=scores or column is after)
        known = np.isfinite(column)
        seen, right = hit[known], (following >= _MATCH)[known]
        turn = len(seen) - int(np.argmin(seen[::-1])) if len(seen) else 0  # behind the last step that does not
        if len(seen) - turn >= _MANY and right[:turn].sum() > 0.9 * max(turn, _MANY):
            step = int(facts.steps[known][turn])
            told = f"From step {step} on the labels ask at each place for {said}; before, for the next token."
            return Broken(told, step)
    return None


_MATCH, _CHANCE = 99.0, 90.0  # percent of the labels
_MANY = 8  # steps of one kind of labels


def _same_batch(facts: Facts, event: Event | None) -> Broken | None:
    batches = facts.batches
    if batches is None or len(batches) < 8:
        return None
    repeated = np.append(False, batches[1:] == batches[:-1])
    if repeated[1:].mean() < 0.8:
        return None
    first = facts.since(repeated)
    count = len(set(batches.tolist()))
    said = "Every step trains on the same batch" if count == 1 else f"From step {first} on the batch repeats"
    return Broken(f"{said}: {count} different batches in {len(batches)} steps.", first, grave=False)


def _ranks_part(facts: Facts, event: Event | None) -> Broken | None:
    first = min(parted(facts), key=lambda d: (d.step or 0, d.kind == "ranks"), default=None)
    if first is not None:
        return Broken(first.sentence, first.step, first.where)
    if same_batches(facts):
        return Broken(f"All {1 + len(facts.ranks)} ranks train on the same batches, so one of them would do.")
    return None


# the optimizer


_FEW, _SAME = 4, 12  # steps
_OUTSIDE = "optimizer["  # begins the name of what an optimizer steps, and no model has


def _own(facts: Facts) -> list[Mapping[str, Any]]:
    return [p for p in facts.parameters if p.get("trains") and not str(p["name"]).startswith(_OUTSIDE)]


def _never_stepped(facts: Facts, event: Event | None) -> Broken | None:
    own, others = _own(facts), [p for p in facts.parameters if str(p["name"]).startswith(_OUTSIDE)]
    moves = facts.unmoved is not None and not {str(p["name"]) for p in own or facts.parameters} <= facts.unmoved
    elsewhere = bool(facts.manifest.get("functional"))  # they are what torch.func.functional_call runs the model with
    if own and not any(p.get("held") for p in own) and others and not moves and not elsewhere:
        said = f"The optimizer steps {len(others)} tensors, and none of them is a parameter of the model that ran."
        return Broken(said)
    steps, backwards = facts.column("optimizer_steps"), facts.column("backwards")
    if steps is not None and backwards is not None and np.nansum(steps) == 0 and np.nansum(backwards) > 3 and not moves:
        return Broken(f"{np.nansum(backwards):.0f} backwards ran, and no optimizer stepped.")
    given, used = facts.column("grad_norm"), facts.column("grad_norm_used")
    lost = any((e.get("vanished") or 0.0) > VANISHED for e in facts.experiments("shadow"))  # on its way: O4, or casts
    if given is not None and used is not None and not lost:
        gets = np.flatnonzero(~((given > 0) & (used == 0)))
        first = int(gets[-1]) + 1 if len(gets) else 0
        if len(used) - first >= max(_FEW, 0.1 * len(used)):
            step = int(facts.steps[first])
            said = f"From step {step} on the backward gives gradients (norm {given[first]:.3g})"
            return Broken(f"{said}, and the optimizer gets none of them.", step)
    return None


def _lr_zero(facts: Facts, event: Event | None) -> Broken | None:
    lr = facts.column("lr")
    if lr is None or len(lr) < 4:
        return None
    zero = lr == 0
    # a warm-up begins, and a schedule ends, with 0
    inner = zero[1:-1] if zero.sum() < len(zero) else zero
    if inner.sum() < max(3, 0.1 * len(lr)):
        return None
    first = facts.since(zero if zero.all() else zero & (facts.steps > facts.steps[0]))
    return Broken(f"The learning rate is 0 in {zero.sum()} of {len(lr)} steps, from step {first} on.", first)


def _unheld(facts: Facts, event: Event | None) -> Broken | None:
    """By who holds them, and by what came out, where the run ended: weights that are what they were."""
    if event is not None and event.kind == "flat":  # a model that knows nothing, and cannot move what names the classes
        frozen = [str(p["name"]) for p in facts.parameters if not p.get("trains")]
        heads = [n for p in facts.parameters if facts.shape(n := str(p["name"]))[:1] == [facts.manifest.get("classes")]]
        if heads and heads[-1] in frozen:
            said = f"The layer that gives the classes does not train: {heads[-1]}. "
            said += f"Of {len(facts.parameters)} parameters "
            return Broken(f"{said}{len(frozen)} have requires_grad False.", where=(heads[-1],), remedy="thaw")
    own = [str(p["name"]) for p in _own(facts)]
    held = {str(p["name"]) for f in (facts, *facts.ranks.values()) for p in f.parameters if p.get("held")}
    # a frozen teacher needs no gradient, and gets none
    useless = {str(p["name"]) for p in facts.parameters if p.get("reached") is False}
    lost = [n for n in own if n not in held and n not in useless]
    if (unmoved := facts.unmoved) is not None:
        lost = [n for n in lost if n in unmoved]
    if not lost or len(lost) == len(own):
        return None
    share = sum(map(facts.size, lost)) / max(sum(map(facts.size, own)), 1)
    end = ", and end as they began" if unmoved is not None else ""
    said = (
        f"{len(lost)} of {len(own)} parameters are to be trained ({_names(lost)}), {100 * share:.3g} % of the elements"
    )
    return Broken(f"{said}{end}: no optimizer holds them.", where=tuple(lost), grave=share > 0.02)


def _no_gradient(facts: Facts, event: Event | None) -> Broken | None:
    looks = list(facts.moves.values())
    names = [str(p["name"]) for p in _own(facts) if p.get("held")]
    if len(looks) < 2 or not names:
        return None
    dead = [n for n in names if all((look.get(n) or {}).get("gradient", 0.0) <= 0 for look in looks)]
    if (unmoved := facts.unmoved) is not None:  # what a look did not see may have moved since: phases, players, experts
        dead = [n for n in dead if n in unmoved or all(n in look for look in looks)]
    # an experiment says whether the backward gave none, or whether it was lost behind the backward
    tried = [{str(n) for n in e["silent"]} for e in facts.experiments("shadow") if "silent" in e]
    muted = {str(n) for e in facts.experiments("shadow") for n in e.get("muted") or () if e.get("mode") == "real"}
    dead = [n for n in dead if n not in muted]  # casts do it
    # an experiment may know a model by a part of it: its names lack what the part is called
    silent = [{n for n in dead if any(f".{n}".endswith(f".{s}") for s in names)} for names in tried]
    lost = [n for n in dead if tried and not any(n in one for one in silent)]
    dead = lost or [n for n in dead if all(n in one for one in silent)]
    if not dead:
        return None
    share = sum(map(facts.size, dead)) / max(sum(map(facts.size, names)), 1)
    said = f"{len(dead)} of {len(names)} parameters get no gradient in any look ({_names(dead)})"
    ends = f": {100 * share:.3g} % of all elements"
    if lost:
        ends += ". The backward gives one, so it is lost before the optimizer: in clipping, unscaling, a hook or a sum"
    return Broken(f"{said}{ends}.", where=tuple(dead), grave=share > 0.3 and bool(tried))


_OFTEN = 0.25  # of the steps
_APART = 0.3  # of the gradient: micro-batches have more in common than their noise


def _kept_gradient(facts: Facts, event: Event | None) -> Broken | None:
    if (lost := _lost_backwards(facts)) is not None:
        return lost
    hit, forwards = _counted(facts, "kept_gradient"), facts.column("forwards")
    # a copy that ran in the model's place gives it its gradients
    hit = hit if forwards is None else hit & (forwards != 0)
    if hit.sum() < max(2, _OFTEN * len(hit)):  # now and then it is a phase that begins
        return None
    said = f"In {hit.sum()} steps the gradient of the step before was still there when the first backward began."
    return Broken(said, facts.since(hit))


def _lost_backwards(facts: Facts) -> Broken | None:
    """Of several micro-batches the last alone reaches the optimizer. A second pass for one step, as of a probe, is
    meant, and so are gradients that are put together by hand: then the norm of the last is not that of the step."""
    names = ("backwards", "accumulated", "grad_norm", "grad_norm_used")
    columns = [facts.column(name) for name in names]
    if any(column is None for column in columns):
        return None
    count, added, last, used = np.stack([column for column in columns if column is not None])[:, 1:]
    known = np.isfinite(count) & np.isfinite(added)
    shadows = (e for e in facts.experiments("shadow") if e.get("tail") == "replayed" and _known(e, "replay_error"))
    apart = [float(e["replay_error"]) for e in shadows]
    alone = bool(known.any()) and (count[known] > 2).all() and not added[known].any()
    if not alone or len(apart) < 2 or min(apart) < _APART or not np.allclose(last, used, rtol=1e-3, equal_nan=True):
        return None
    said = f"Each step has {np.median(count[known]):.0f} backwards, and none adds to the gradient of the one before: "
    said += f"what the optimizer gets differs from their sum by {100 * min(apart):.3g} % or more."
    return Broken(said, remedy="once")


def _written(facts: Facts, event: Event | None) -> Broken | None:
    moves = ((name, step, row) for step, rows in sorted(facts.moves.items()) for name, row in rows.items())
    found = grouped((name, step) for name, step, row in moves if row["written"] > 0.01)
    every = facts.steps[_counted(facts, "written")].tolist()
    if facts.column("written") is None:  # a record of version 1 has looks only
        every = sorted({s for seen in found.values() for s in seen})
    if not every:
        return None
    names = sorted(found, key=lambda n: found[n][0])
    what = f"{len(names)} parameters ({_names(names)})" if names else "Weights"
    said = f"{what} changed between two steps, not by an optimizer, before {len(every)} of {len(facts.steps)} steps"
    # clamped or normalized weights are written in every step; what moves the loss begins as the loss leaves
    began = event is not None and 0 <= event.step - every[0] <= 3
    # a script that begins a new optimizer there, too, begins a new task: Reptile, a merge of adapters
    renewed = np.isin(every, facts.steps[_counted(facts, "restarts")]).mean() > 0.8
    rises = facts.loss.hurt_at(np.asarray(every)) and not renewed
    ends = ", and the loss rises at these steps" if rises else ""
    return Broken(
        f"{said}, first before step {every[0]}{ends}.", every[0], tuple(names), grave=began or rises, shown=rises
    )


def _vanish(facts: Facts, event: Event | None) -> Broken | None:
    halves = [str(p["name"]) for p in facts.parameters if p.get("held") and p.get("dtype") in _HALF]
    for entry in facts.experiments("optimizer"):
        if halves and not entry.get("converts") and _known(entry, "error") and entry["error"] > _LOST:
            said = f"From step {entry['from']} to {entry['step']} the weights go {100 * entry['error']:.3g} % another "
            said += (
                f"way than the optimizer's formula takes them in FP32, and {_names(halves)} have 16 bits: updates are"
            )
            return Broken(f"{said} lost in rounding.", entry["step"], tuple(halves))
    low = {n for p in facts.parameters if p.get("dtype") in _HALF and facts.size(n := str(p["name"])) > 64}
    looks = [rows for step, rows in facts.moves.items() if facts.at("lr", step) != 0]
    moved = ((name, row["still"]) for rows in looks for name, row in rows.items() if name in low)
    still = grouped((name, value) for name, value in moved if math.isfinite(value))
    stuck = [n for n, values in still.items() if float(np.median(values)) >= 0.9]
    if not stuck or len(stuck) < 0.5 * len(still):
        return None
    ways = [e["error"] for e in facts.experiments("optimizer") if _known(e, "error")]
    if ways and max(ways) < 0.5:  # rounded, but not lost
        return None
    return Broken(
        f"{len(stuck)} of {len(still)} 16-bit weights do not move in 90 % of their elements ({_names(stuck)}): the "
        "update is smaller than half a unit of the weight's last bit.",
        where=tuple(stuck),
    )


_HALF = ("bfloat16", "float16")
_LOST = 0.7  # of the way
_RISEN = 10.0


def _lr_high(facts: Facts, event: Event | None) -> Broken | None:
    """The step itself is too long: its own batch gets worse by it, and better by a part of it.

    A step that no length helps follows the moments of other batches, as in a policy gradient.
    """
    if event is None:
        return None
    tried = [e for e in facts.experiments("shadow") if _known(e, "loss", "loss_after")]
    parts = [(e, part) for e in tried for part in ("tenth", "thousandth") if overshoots(e, part)]
    # step 1 is never tried, so where it made the event step 2 speaks for it
    # the step behind the event speaks where nothing is learned up to the end
    learned = bool(facts.loss.smooth[-1] < facts.loss.first - facts.loss.rise)
    made = [one for one in parts if learned <= max(event.step, 3) - one[0]["step"] <= _SOON]
    made = [one for one in made if one[0]["loss_after"] - one[0]["loss"] > facts.loss.rise]
    asked = [e for e in tried if e.get("why") != OVERSHOOTS]
    often = [(e, part) for e, part in parts if e in asked]
    # the loss of a policy gradient has no lower end, and says little
    chance = not event.lasts or (facts.loss.loss < 0).any() or not beyond_chance(len(often), len(asked))
    if not made and chance:
        return _only_rises(facts, event)
    one, part = (made or often)[0]
    rate = _rate(facts, event.step)
    said = f"Where the loss left, a step{rate} made its own batch worse, and a {part} of it makes it better: "
    if not made:
        said = (
            f"The step makes its own batch worse in {len(often)} of {len(asked)} trials{rate}, "
            "and a tenth of it better: "
        )
    said += f"at step {one['step']} the loss of the same batch goes from {one['loss']:.4g} to {one['loss_after']:.4g}, "
    said += f"and with a {part} of the step to {one[f'loss_{part}']:.4g}."
    ratios = [ratio for _, ratio in facts.update_ratio(last=one["step"])]
    numbers = {"update_ratio": max(ratios)} if ratios else {}
    return Broken(said, one["step"], numbers=numbers, shown=bool(made))


def _lr_low(facts: Facts, event: Event | None) -> Broken | None:
    """Many times a step still helps its own batch many times as much, in every trial up to the end.

    A schedule begins and ends with short steps. A loss without a lower end, as a policy gradient's, has no step that is
    too long. A batch of one sample is learned by heart.
    """
    tried = [e for e in facts.experiments("shadow") if _known(e, "loss", "loss_after", "longer", "loss_longer")]
    first, last = (0.05 * facts.steps[-1], 0.8 * facts.steps[-1]) if len(facts.steps) else (0, 0)
    tried = [e for e in tried if first <= e["step"] <= last]
    lr = facts.column("lr")
    short_of = lr is not None and len(lr) > _SAME and bool((np.diff(lr) >= 0).all()) and lr[-1] > 1.2 * lr[len(lr) // 2]
    clip = facts.clip if event is not None and event.kind == "flat" else None
    short_of |= clip is not None and float(np.nanmedian(clip)) > 20
    gone = [short_of or facts.length(e["step"]) < _GONE for e in tried]  # a warm-up longer than the run, a tiny norm
    short = [_still_helps(e) or (g and e["loss_longer"] <= e["loss"]) for e, g in zip(tried, gone, strict=True)]
    count = short[::-1].index(False) if False in short else len(short)
    if count < 2 or (facts.loss.loss < 0).any():
        return None
    if event is not None and event.lasts and facts.at("lr", event.step) > _RISEN * facts.at("lr", tried[-1]["step"]):
        return None  # trials of before say nothing of that step
    one, begins = tried[-1], tried[len(tried) - count]
    # with no reason on record a careful rate may be meant; at most rates a hundred steps at once are too far somewhere
    always = count == len(tried) > 2 and all(e.get("noise") is not None for e in tried)
    if not (why := _shortened(facts, one["step"])) and not always:
        return None
    said = f"The steps are far too short in {count} of {len(tried)} trials: at step {one['step']} the loss of the same "
    said += f"batch goes from {one['loss']:.4g} to {one['loss_after']:.4g}, and with {one['longer']} times the step to "
    said += f"{one['loss_longer']:.4g}."
    since = None if count == len(tried) else begins["step"]
    remedy = "schedule" if why.startswith(" The learning") else "unscale" if "GradScaler" in why else ""
    grave = bool(why) or (event is not None and event.kind == "flat")
    return Broken(said + why, since, numbers={"raise": _RAISE}, grave=grave, shown=True, remedy=remedy)


def _still_helps(trial: Any) -> bool:
    gain, wide = trial["loss"] - trial["loss_after"], trial["loss"] - trial["loss_longer"]
    far = wide > 0.02 * trial["loss"] and wide > 0.3 * trial["longer"] * gain
    return bool(far and trial["loss_longer"] >= 0)


def _shortened(facts: Facts, step: int) -> str:
    """What makes a step short, where the record shows it."""
    clip, lr = facts.clip, facts.column("lr")
    if clip is not None and (usual := float(np.nanmedian(clip))) > 20:
        said = f" Clipping shortens the gradient {usual:.3g} times in the median step"
        factor = facts.at("grad_scale", step)
        # nobody clips to a number that is a plain one times the factor by choice
        inside = factor > 1000 and 0.01 < factor * facts.at("grad_norm_used", step) < 100
        ends = f": the GradScaler's factor, {factor:.3g}, is still in the gradient that is clipped" if inside else ""
        return f"{said}{ends}."
    now = facts.at("lr", step)
    # a warm-up that is stepped by epochs may have its last rate long before the end
    early = int(0.4 * len(facts.steps))
    low, at = (now, step) if lr is None else min((now, step), (float(lr[early]), int(facts.steps[early])))
    if lr is not None and lr[-1] >= float(np.nanmax(lr)) > 1.2 * low:
        last = f"{lr[-1]:.3g}"
        return f" The learning rate rises up to the end of the run: it is {low:.3g} at step {at}, and {last} at last."
    # a schedule with restarts is low now and then; one that spends most of the run there is at fault
    if lr is not None and now < 0.1 * (largest := float(np.nanmax(lr))) and np.nanmean(lr < 0.1 * largest) > 0.5:
        return f" The learning rate is {now:.3g} there; the largest is {largest:.3g}."
    look = facts.moves.get(max((s for s in facts.moves if s <= step), default=0), {})
    looks = [(row["gradient"], facts.held(name).get("eps")) for name, row in look.items()]
    over = [eps for gradient, eps in looks if isinstance(eps, float) and eps > gradient > 0]
    if len(over) > 0.5 * len(looks):
        return f" The optimizer's eps, {max(over):.3g}, is larger than the gradient of most parameters."
    return ""


_GONE = 0.002  # of the largest rate, before the last fifth of a run
_RAISE = 30  # times: the trial is near the line up to about a hundred
_SOON = 3  # steps from what makes an event to the event


def _only_rises(facts: Facts, event: Event) -> Broken | None:
    """A schedule that never falls, while the loss loses more than all that it had learned."""
    rates, loss = facts.column("lr"), facts.loss
    if not event.lasts or rates is None or not np.isfinite(rates).all() or (np.diff(rates) < 0).any():
        return None
    lowest, ends = int(np.argmin(loss.smooth)), float(loss.smooth[-1])
    if rates[-1] < _RISEN * rates[lowest] or ends < loss.loss[0] + loss.rise:
        return None
    low, at, last = f"{rates[lowest]:.3g}", f"{loss.steps[lowest]:.0f}", f"{rates[-1]:.3g}"
    said = f"The learning rate rises up to the end of the run: it is {low} at step {at}, and {last} at last."
    is_now = f"{ends:.4g}" if math.isfinite(ends) else "not finite"
    said += f" The loss is {loss.smooth[lowest]:.3g} there, and {is_now} at last; it began at {loss.loss[0]:.3g}."
    return Broken(said, event.step, shown=True, remedy="falls")


def _known(entry: Any, *names: str) -> bool:
    return all(isinstance(entry.get(n), (int, float)) and math.isfinite(entry[n]) for n in names)


# gradients and the loop


def _summed(facts: Facts, event: Event | None) -> Broken | None:
    """Each loss is a mean, and the gradient is their sum, or is divided twice: SGD makes a step of another length."""
    share, backwards = facts.column("loss_share"), facts.column("backwards")
    if share is None or backwards is None or facts.optimizers != {"SGD"}:
        return None
    known = np.isfinite(share) & np.isfinite(backwards)
    parts, adds = float(np.median(backwards[known])), float(np.median(share[known]))
    # a loop of two passes for one step clears the gradient between them
    added = facts.column("accumulated")
    if not parts > 1 or added is None or float(np.median(added[known])) < parts - 1:
        return None
    forwards, before, used = (facts.column(name) for name in ("forwards", "grad_norm", "grad_norm_used"))
    if forwards is not None and float(np.median(forwards[known])) < parts:
        return None  # several losses of one batch
    if before is not None and used is not None and float(np.nanmedian(before / used)) > 0.9 * parts:
        return None  # something divides the gradient behind the last backward, as a pipeline's schedule does
    if 0.9 < adds * parts < 1.1:  # as where a library divides what the loop has divided
        said = f"Losses of {parts:.0f} micro-batches add up to {adds:.3g} of a mean: they are divided twice."
        return Broken(f"{said} A step of SGD is {parts:.0f} times shorter.", remedy="divide_once")
    if adds <= 0.9 * parts:
        return None
    said = f"Each of {parts:.0f} micro-batches gives the mean of its own loss, and nothing divides them."
    if adds > 1.1 * parts:
        said = f"The losses of {parts:.0f} micro-batches add up to {adds:.3g} means over their labels: they are sums."
    said += f" The gradient is their sum, so a step of SGD is {adds:.3g} times as long."
    return Broken(said, grave=event is not None and _lr_high(facts, event) is not None)  # a small rate may allow for it


# the model


def _trains_in_eval(facts: Facts, event: Event | None) -> Broken | None:
    """A training that falls into evaluation mode, as after a validation, and stays there."""
    values, modes = facts.column("train_forwards_in_eval_mode"), facts.of_kind("mode")
    kinds = {str(k) for e in modes for k in e.get("random") or ()}
    if values is None or not kinds:
        return None
    inside = np.flatnonzero(values <= 0)
    start = int(inside[-1]) + 1 if len(inside) else 0
    if start == len(values) or len(values) - start < max(3, 0.2 * len(values)):
        return None
    first = int(facts.steps[start])
    said = f"From step {first} on every step trains in evaluation mode, so {', '.join(sorted(kinds))} stays"
    fresh = any(e.get("fresh") for e in modes if e.get("gradients") and not e.get("training"))
    ends = ", and its norms have statistics of no batch" if fresh and not start else ""
    # from the first step on it may be meant, as of pretrained statistics
    return Broken(f"{said} as in a validation{ends}.", first, grave=start > 0 or fresh)


def _sees_answer(facts: Facts, event: Event | None) -> Broken | None:
    """The labels are the next tokens, and changing a token changes the output before it."""
    column = facts.column("labels_ahead_1_pct")
    tried = next((e for e in facts.experiments("shadow") if e.get("sees_later")), None)
    if tried is None or column is None or not float(np.nanmedian(column)) >= _MATCH:
        return None
    said = "The model is to predict each next token, and sees it: other later tokens change the output before them"
    return Broken(f"{said}, tried at step {tried['step']}.")


def _samples_mix(facts: Facts, event: Event | None) -> Broken | None:
    for entry in facts.experiments("shadow"):
        for name, said in (
            ("mixes", "With other samples in the second half of the batch the output of the first half is another"),
            ("in_time", "A sample changes the outputs of those behind it, and the first half of its own sequence none"),
        ):
            if entry.get(name):
                return Broken(f"{said}, tried in evaluation mode at step {entry['step']}.")
    return None


def _mask_leaks(facts: Facts, event: Event | None) -> Broken | None:
    for entry in facts.experiments("shadow"):
        for name, said in _MASKS:
            if entry.get(name):
                return Broken(f"{said}, tried at step {entry['step']}.")  # and so from the first step on
    return None


_MASKS = (
    ("hidden", "The output of a row's last token does not depend on the tokens before it: the mask hides them"),
    ("padding", "A row without its padding has another output: the mask lets padding through"),
    ("unmasked", "Short rows are filled up with one token that no mask hides: others in its place change the outputs"),
    ("crosses", "Other tokens in the first document of a packed row change the output of the last one"),
    ("uncounted", "The positions that the model is given do not count along the sequence"),
    ("taught", "More than a fifth of the labels are those of padding, which the mask hides"),
)


def _every_pair(facts: Facts, event: Event | None) -> Broken | None:
    """A loss of (N, 1) beside (N): broadcasting makes (N, N) of it, every sample beside every other one."""
    if (found := squared(facts)) is None:
        return None
    step, call, size = found
    said = f"`{call.name}` at {call.where} gets ({size}, 1) and ({size}), so it compares every sample with every other"
    return Broken(f"{said}, at step {step}.", step)


def _nothing_loaded(facts: Facts, event: Event | None) -> Broken | None:
    if (one := next(iter(facts.of_kind("load")), None)) is None:
        return None
    named = f"it has {one['given']} as `{one['theirs']}`, the model {one['own']} as `{one['mine']}`"
    said = f"A checkpoint was loaded at step {one['step']}, and no name of it is one of the model: {named}."
    return Broken(said, one["step"], remedy="" if one["theirs"].endswith(f".{one['mine']}") else "names")


def _loss_wrong(facts: Facts, event: Event | None) -> Broken | None:
    if facts.manifest.get("softmax_twice"):
        return Broken("A softmax feeds the cross-entropy, which has its own.", title="Softmax is applied twice")
    loss, lr, batches = facts.loss.loss, facts.column("lr"), facts.batches
    if (
        (event is not None and event.kind == "flat")
        or len(loss) < _SAME
        or lr is None
        or batches is None
        or not math.isfinite(last := float(loss[-1]))
    ):
        return None
    other = np.flatnonzero(~(np.abs(loss - last) <= 1e-6 * abs(last)))
    first = int(other[-1]) + 1 if len(other) else 0
    count, differ = len(loss) - first, len(set(batches[first:].tolist()))
    # a loss that is 0 has nothing left to teach
    if count < max(_SAME, 0.25 * len(loss)) or abs(last) < 1e-3 or differ < 0.5 * count or not (lr[first:] > 0).all():
        return None
    said = f"From step {facts.steps[first]} on the loss is {last:.6g} in every step, of {differ} different batches"
    said = f"{said}: it does not depend on the model."
    return Broken(said, int(facts.steps[first]), remedy="reference")


def _starts_high(facts: Facts, event: Event | None) -> Broken | None:
    if (found := starts_high(facts, 4.0)) is None:
        return None
    call, loss, guess = found
    said = f"The first cross-entropy, at {call.where}, is {loss:.4g}, {loss / guess:.2g} times that of a guess "
    # casts may make it so, too: then it is small without them
    exact = [e["loss_without"] for e in facts.experiments("shadow") if _known(e, "loss_without")][:1]
    grave = event is not None and (facts.casts is False or (bool(exact) and exact[0] > 2 * guess))
    return Broken(f"{said}({guess:.3g}): logits are far too large before any step.", 1, grave=grave)


def _not_finite(facts: Facts, event: Event | None) -> Broken | None:
    """The first number that is none, in the order in which a step computes."""
    lost = event is not None and event.kind == "not finite"
    first = _first_broken(facts, event.step if event is not None and lost else math.inf)
    for entry in facts.experiments("nonfinite") if lost else ():
        if first is not None and first.since is not None and first.since < entry["step"]:
            break  # it reads what that step has left
        operand = f", {entry['operand']}" if entry.get("operand") else ""
        module, behind, before = (str(entry.get(key) or "") for key in ("module", "behind", "before"))
        place = f"in {module}" if module else f"behind {behind}" if behind else "in the loss"
        if before and not module:
            place = f"between {behind} and {before}" if behind else f"in front of {before}"
        what, way, step = entry.get("operation"), f"{entry.get('direction')}{operand}", entry["step"]
        said = f"The first result that is not finite is {what}, {place} ({way}), at step {step}."
        if entry.get("brought"):
            said = f"The first operation that reads a NaN of no layer is {what}, {place} ({way}), at step {step}."
            return Broken(said, step, (module,) if module else (), remedy="given")
        return Broken(said, step, (module,) if module else ())
    if first is not None or event is None or not lost:
        return first
    triggers = [e for e in facts.run.events if e.get("kind") == "trigger" and e.get("reason") == "nonfinite"]
    table = facts.run.table(phase=None)
    bad = np.flatnonzero(np.asarray(table.metric("nonfinite")) > 0)
    if not (seen := [e for e in triggers if e.get("layer")]):  # a look at every tensor comes later than this one
        rows = bad[np.argsort(table["step"][bad], kind="stable")][:1]
        seen = [{name: table[name][i] for name in ("tensor", "layer", "step")} for i in rows]
    if seen:
        tensor, where, step = seen[0]["tensor"], str(seen[0]["layer"]), int(seen[0]["step"])
        return Broken(f"The first {tensor} that is not finite is that of {where}, at step {step}.", step, (where,))
    if len(table) and (table["step"] >= event.step - 1).any():
        return Broken("The loss is not finite, and every recorded tensor is: look at the loss itself.", event.step)
    return None


def _first_broken(facts: Facts, lost: float) -> Broken | None:
    """What was not finite in the last step before the loss, or the weights, are so for good; None if nothing was.

    Args:
        lost: the step from which on the loss is not finite.
    """
    run, steps = facts.run, facts.steps
    weights = run.broken("weights")
    sound = np.flatnonzero(~weights)
    # weights that begin so are meant, as those of a mask
    broke = sound[-1] + 1 if len(sound) and not weights[:2].any() else len(steps)
    i = int(min(broke, np.searchsorted(steps, lost))) - 1
    if not 0 <= i < len(steps) - 1:
        return None
    at, norm = int(steps[i]), facts.at("grad_norm_used", int(steps[i]))
    if run.broken("grad_norm")[i]:
        said = f"The gradient of step {at} is not finite, and its loss was: a backward makes it."
        return Broken(f"{said} So does that of a square root at 0, or of a softmax of a row that a mask hides.", at)
    if run.broken("grad_norm_used")[i]:
        said = f"The backward of step {at} gave a finite gradient, and the optimizer got one that is not."
        return Broken(f"{said} Something between the two makes it.", at, remedy="between")
    if run.broken("lr")[i]:
        return Broken(f"The learning rate of step {at} is not finite, and so are its weights.", at, remedy="rates")
    if weights[i + 1] and math.isfinite(norm):
        said = f"Step {at} leaves weights that are not finite{_rate(facts, at)}, of a gradient of norm {norm:.3g}."
        return Broken(said, at, remedy="update")
    return None


NEEDS = MappingProxyType(
    {
        "input_hash": "inputs (batches: true)", "labels_ignored_pct": "labels of a cross-entropy",
        "labels_ahead_1_pct": "labels and inputs of a cross-entropy",
        "parameters": "parameters of the optimizers", "moves": "two full looks",
        "kept_gradient": "gradients before backward", "loss_share": "losses of several micro-batches",
        "loss_longer": "shadow steps", "loss_tenth": "a shadow step, or full looks", "ranks": "several ranks",
        "train_forwards_in_eval_mode": "modes of forwards", "trace": "a trace of torch's calls",
        "sees_later": "a shadow step, and labels", "mixes": "a shadow step",
        "softmax_twice|input_hash": "the graph of the loss, or batches",
        "padding|uncounted": "a shadow step, and a mask",
    }
)  # fmt: skip
"""What is shown in place of the names of these facts, see `Facts.has`."""

LAWS: tuple[Law, ...] = (
    Law("D1", "The batches hold infinities or NaN", _inputs_broken, "data", "input_hash"),
    Law("D3", "The labels teach nothing", _labels_dead, "labels", "labels_ignored_pct"),
    Law("D6", "The labels are not the next tokens", _labels_shifted, "labels", "labels_ahead_1_pct"),
    Law("D4", "The same batch comes again and again", _same_batch, "data", "input_hash"),
    Law("O1", "No optimizer moves this model", _never_stepped, "optimizer", "parameters"),
    Law("O2", "The learning rate is 0", _lr_zero, "schedule", "lr"),
    Law("O3", "Some parameters do not train", _unheld, "optimizer", "parameters"),
    Law("O4", "Parameters get no gradient at the optimizer", _no_gradient, "graph", "moves"),
    Law("O5", "Gradients are cleared at the wrong time", _kept_gradient, "zero_grad", "kept_gradient"),
    Law("O7", "Something else than the optimizer writes the weights", _written, "written", "moves"),
    Law("O8", "Updates vanish in 16-bit weights", _vanish, "masters", "moves"),
    Law("O13", "The steps are far too short", _lr_low, "raise_lr", "loss_longer", exact=False, always=True),
    Law("O12", "The learning rate is too high", _lr_high, "lower_lr", "loss_tenth", exact=False),
    Law("O14", "The losses of micro-batches make no mean", _summed, "divide", "loss_share"),
    Law("R1", "The ranks do not work as one", _ranks_part, "ranks", "ranks"),
    Law("M6", "The training is in evaluation mode", _trains_in_eval, "train", "train_forwards_in_eval_mode"),
    Law("M7", "The loss mixes up its samples", _every_pair, "shapes", "trace"),
    Law("M8", "The model sees what it has to predict", _sees_answer, "mask", "sees_later"),
    Law("M9", "A sample's output depends on the rest of its batch", _samples_mix, "rows", "mixes"),
    Law("M10", "Masks, positions or labels do not fit the rows", _mask_leaks, "masks", "padding|uncounted"),
    Law("M1", "Nothing of a checkpoint was loaded", _nothing_loaded, "load", ""),
    Law("M3", "The loss does not measure the model", _loss_wrong, "softmax", "softmax_twice|input_hash"),
    Law("M4", "The model begins far above a guess", _starts_high, "init", "trace"),
    Law("M5", "A result is not finite", _not_finite, "nonfinite", "", exact=False, always=True),
)
"""In the order of computation: data, model and optimizer."""
