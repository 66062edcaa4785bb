"""Which finding explains which: a cause comes first, and what follows from it is shown below it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ottava.diagnose.conditions import Missing
from ottava.diagnose.fired import Fired
from ottava.diagnose.rows import CastRows, RunRows, StepRows

STAGES = ("bug", "data", "config", "numeric", "training")
"""What is asked first."""


def explained(fired: list[Fired]) -> list[Fired]:
    """Removes rows that other findings explain."""
    by_id = {hit.rule.id: hit for hit in fired}
    # of numerics and training that which came first explains what came later; at one step training is asked first
    order = sorted(fired, key=_precedence)
    for hit in order:
        # a twin that learned met the same training: this does not explain why the casts fail
        if not len(hit.index) or (hit.rule.stage == "training" and _twin_recovers(hit)):
            continue
        for name in hit.rule.explains:
            other = by_id.get(name)
            if other is None or not len(other.index) or other is hit:
                continue
            unexplained = [i for i, under in zip(other.index, _under(hit, other), strict=True) if not under]
            if len(unexplained) < len(other.index):
                other.index = np.array(unexplained, dtype=int)
                hit.also.append(f"{other.rule.id} {other.rule.title}")
    return [hit for hit in fired if len(hit.index)]


def _twin_recovers(hit: Fired) -> bool:
    try:
        return bool(hit.rows.context.scalar("run.twin_recovers") == "yes")
    except Missing:
        return False


def _precedence(hit: Fired) -> tuple[float, ...]:
    # a NaN that a computation makes may itself come from weights that a learning rate blew up
    early = hit.rule.stage in ("bug", "data", "config") or hit.rule.reach == "everywhere"
    early = early and hit.rule.over != "amaxes"
    rank = STAGES.index(hit.rule.stage)
    if early:
        return 0, rank, 0.0, -len(hit.rule.explains)
    return 1, 0.0 if hit.rule.reach == "slot" else hit.first, -rank, -len(hit.rule.explains)


def _under(cause: Fired, effect: Fired) -> list[bool]:
    """Whether the cause reaches each row of the effect."""
    places, steps = effect.places(), effect.steps()
    if cause.rule.reach == "everywhere" or isinstance(effect.rows, (RunRows, StepRows)):
        return [True] * len(places)
    if cause.rule.reach == "run":
        first = min(cause.steps(), default=0)
        # an update changes the casts of later steps only
        first += cause.rule.stage == "training" and isinstance(cause.rows, StepRows)
        earlier = _earlier(cause, effect)
        return [step >= first and place not in earlier for place, step in zip(places, steps, strict=True)]
    since: dict[Any, int] = {}
    for key, step in zip(_keys(cause, cause.rule.reach), cause.steps() or [0] * len(cause.index), strict=True):
        since[key] = min(step, since.get(key, step))
    keys = _keys(effect, cause.rule.reach)
    return [key in since and step >= since[key] for key, step in zip(keys, steps, strict=True)]


def _earlier(cause: Fired, effect: Fired) -> set[tuple[str, str]]:
    """The casts that went wrong before those of the cause did, in the order of steps and of execution."""
    if not isinstance(cause.rows, CastRows) or cause.rows is not effect.rows:
        return set()
    began = min(zip(cause.steps(), cause.index, strict=True))
    rows = zip(effect.steps(), effect.index, effect.places(), strict=True)
    own = set(cause.places())
    return {place for step, row, place in rows if (step, row) < began and place not in own}


def _keys(hit: Fired, reach: str) -> list[Any]:
    if reach == "slot" and isinstance(hit.rows, CastRows):
        # both directions of a tensor have the same values, cast along another dimension
        return [(hit.rows.slots[i].layer, hit.rows.slots[i].tensor) for i in hit.index]
    return [layer if reach == "layer" else (layer, tensor) for layer, tensor in hit.places()]


def began(hit: Fired) -> tuple[float, float, float]:
    """Where a finding began: its first step, the first of its casts in the order of execution, and its confidence."""
    at = min(hit.index, key=lambda i: (hit.rows.value("step")[i], i)) if isinstance(hit.rows, CastRows) else 0
    return hit.first, float(at), -hit.rule.confidence
