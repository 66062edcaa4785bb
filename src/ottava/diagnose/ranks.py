"""What the ranks of one training have in common: they are runs of one program, so they are compared as two runs are.

Ranks that hold the same weights are copies of each other: they take the same settings, the same steps and the same
updates, and see other batches. Weights that are split over ranks, by FSDP or tensor parallelism, are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ottava.base.text import grouped
from ottava.diagnose.difference import Difference, settings_and_loop, some
from ottava.diagnose.facts import Facts, bare

_ONE_RANK = frozenset({"eval_forwards_in_train_mode", "forwards"})
"""What one rank may do alone: a validation."""
_NEAR = 0.1  # of a gradient, in a sketch
_SAME = 1e-6  # relative; equal numbers in one order of additions are equal to the bit


def copies(facts: Facts, other: Facts) -> list[str]:
    """The parameters that begin as copies on two ranks.

    A vector of equal numbers, such as the weight of a norm, has one hash whatever it belongs to. So all parameters of
    a module have to be equal, and one parameter of the model that is no constant.
    """
    mine, theirs = facts.weights, other.weights
    split = {bare(str(p["name"])) for p in facts.parameters if p.get("sharded")}
    modules = grouped((name.rpartition(".")[0], name) for name in mine.keys() & theirs.keys())
    whole = [names for names in modules.values() if not any(n in split or mine[n] != theirs[n] for n in names)]
    found = sorted(n for names in whole for n in names)
    first = next((rows for _, rows, _ in _looks(facts, other)), {})
    return found if any(first.get(n, {}).get("spread", 0.0) > 0 for n in found) else []


def parted(facts: Facts) -> Iterator[Difference]:
    """How the ranks differ where they should not, the earliest first in each rank."""
    for rank, other in facts.ranks.items():
        same = copies(facts, other)
        if same:
            found = [d for d in settings_and_loop(facts, other) if d.key not in _ONE_RANK]
            found += _weights(facts, other, same)
            for d in sorted(found, key=lambda d: d.step or 0):
                yield replace(d, sentence=f"Rank {rank} beside rank 0: {d.sentence}")
        else:
            yield from _unequal_start(facts, other)


def same_batches(facts: Facts) -> bool:
    """Whether ranks that are copies of each other in all their weights trained on the same batches all the time."""
    for other in facts.ranks.values():
        shared = facts.beside(other, "input_hash")
        if shared is None or not facts.weights or {*copies(facts, other)} != {*facts.weights}:
            continue
        steps, mine, theirs = shared
        if len(steps) > 3 and (mine == theirs).all():
            return True
    return False


def _looks(
    facts: Facts, other: Facts
) -> Iterator[tuple[int, dict[str, dict[str, float]], dict[str, dict[str, float]]]]:
    for step in sorted(facts.moves.keys() & other.moves.keys()):
        mine, theirs = ({bare(n): row for n, row in f.moves[step].items()} for f in (facts, other))
        yield step, mine, theirs


def _apart(a: float, b: float) -> bool:
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) > _SAME * max(abs(a), abs(b))


def _meet(facts: Facts, other: Facts) -> bool:
    """Whether the weights of two ranks part and are equal again, twice at least: each trains alone for some steps on
    purpose, and then they take one average."""
    if (shared := facts.beside(other, "weights")) is None:
        return False
    _, mine, theirs = shared
    equal = mine == theirs
    return int((equal[1:] & ~equal[:-1]).sum()) > 1


def _weights(facts: Facts, other: Facts, same: list[str]) -> Iterator[Difference]:
    if _meet(facts, other):
        return
    unreduced: int | None = None
    for step, mine, theirs in _looks(facts, other):
        both = [n for n in same if n in mine and n in theirs]
        apart = [n for n in both if _apart(mine[n]["weight"], theirs[n]["weight"])]
        if apart:
            now = "not" if unreduced is None and step == min(facts.moves) else "no longer"
            said = f"{len(apart)} of {len(both)} copies ({some(apart)}) are {now} equal in the look at step {step}"
            # some optimizers average the gradients themselves: then the weights stay equal
            since = "" if unreduced is None else _why(facts, other, unreduced)
            a, b = mine[apart[0]]["weight"], theirs[apart[0]]["weight"]
            yield Difference("ranks", "weight", a, b, f"{said}{since}.", unreduced or step, tuple(apart))
            return
        if unreduced is None and any(_apart(mine[n]["gradient"], theirs[n]["gradient"]) for n in both):
            unreduced = step


def arrived(facts: Facts) -> Iterator[tuple[int, float, float]]:
    """(step, distance of what arrived at the optimizers from the average over all ranks, and from a rank's own
    gradient), each the worst of the ranks, over its norm and with the factor that fits; by sketches, so within 10 %."""
    told = (e for e in facts.experiments("shadow") if e.get("sketch") and e.get("arrived"))
    steps = grouped((int(entry["step"]), entry) for entry in told)
    for step, entries in sorted(steps.items()):
        if len(entries) != 1 + len(facts.ranks) or len(entries) < 2:
            continue
        own, came = (np.array([e[k] for e in entries], dtype=np.float64) for k in ("sketch", "arrived"))
        if np.isfinite(own).all() and np.isfinite(came).all() and (came**2).sum(1).all():
            mean = np.broadcast_to(own.mean(0), came.shape)
            yield step, _distance(mean, came), _distance(own, came)


def _distance(a: Any, b: Any) -> float:
    factor = (a * b).sum(1, keepdims=True) / np.maximum((a * a).sum(1, keepdims=True), 1e-300)
    return float((np.linalg.norm(factor * a - b, axis=1) / np.linalg.norm(b, axis=1)).max())


def _why(facts: Facts, other: Facts, step: int) -> str:
    """Why the gradients differ at the optimizer."""
    whole, used = ([f.at(name, step) for f in (facts, other)] for name in ("grad_norm", "grad_norm_used"))
    said = f"; their gradients differ from step {step} on"
    if _apart(*used) and all(map(math.isfinite, whole)) and not _apart(*whole):
        return f"{said}, and are equal before clipping (norms {used[0]:.4g} and {used[1]:.4g} behind it)"
    # a rank alone says where its gradient went
    apart, own = next(((mean, own) for _, mean, own in arrived(facts)), (math.inf, 0.0))
    if own > _NEAR:
        return said if apart <= _NEAR else f"{said}, and are neither its own nor their average"
    return f"{said}: nobody averaged them"


def _unequal_start(facts: Facts, other: Facts) -> Iterator[Difference]:
    """Ranks that get the same gradients from other batches should have the same weights."""
    for step, mine, theirs in _looks(facts, other):
        both = [n for n in mine if n in theirs and mine[n]["gradient"] > 0]
        equal = [n for n in both if not _apart(mine[n]["gradient"], theirs[n]["gradient"])]
        weights = [n for n in equal if _apart(mine[n]["weight"], theirs[n]["weight"])]
        if len(both) > 1 and len(equal) == len(both) and weights:
            said = "Ranks share their gradients and hold other weights"
            yield Difference("ranks", "weight", 0.0, 1.0, f"{said}, in the look at step {step}.", step, tuple(weights))
        return
