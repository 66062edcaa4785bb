"""What differs between two runs, read from facts alone, in the order in which a training computes.

    settings     recipe and its fields, casts of each layer, optimizer, learning rate, betas, decay, dtypes, command
    code         the first call of torch that is not that of the good run, or has another result, see `calls`
    weights      hashes before the first step
    batch        hashes of inputs and labels

What a forward, a loss, a backward or an optimizer computes otherwise is the first call that parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from ottava.base.text import grouped
from ottava.diagnose.calls import apart, equal_until, parting
from ottava.diagnose.facts import Facts, bare

_SETTINGS = MappingProxyType({"lr": "learning rate", "weight_decay": "weight decay"})
_PROGRAM = MappingProxyType(
    {
        "forwards": "forwards with gradients",
        "backwards": "backwards",
        "optimizer_steps": "steps of an optimizer",
        "extra_steps": "steps of an optimizer without a new backward",
        "restarts": "optimizers that began anew",
        "eval_forwards_in_train_mode": "forwards without a gradient in training mode",
        "kept_gradient": "gradients kept from the step before",
        "written": "weights that something else than an optimizer wrote",
    }
)
"""What the loop does in a step: columns that are equal in two runs of one program."""
_SHARES = frozenset({"kept_gradient", "written"})
"""Columns that are compared as zero or not zero: their size belongs to the data."""


@dataclass(frozen=True)
class Difference:
    """One difference of two runs."""

    kind: str
    """recipe, casting, optimizer, setting, trainer, model_config, arguments, code, cast, parameter, program, weights,
    batch, labels, ranks."""
    key: str
    good: Any
    bad: Any
    sentence: str
    step: int | None = None
    where: tuple[str, ...] = ()
    group: str = ""
    """Of a setting: the optimizer's group that has it, where others have another."""


def differences(good: Facts, bad: Facts) -> list[Difference]:
    """All differences that the facts show, in the order of computation."""
    found = [*_recipes(good, bad), *_optimizers(good, bad), *_groups(good, bad)]
    weights, batch = _weights(good, bad), _batch(good, bad)
    found += [*_configured(good, bad), *_parameters(good, bad), *_arguments(good, bad), *_calls(good, bad, weights)]
    found += _evaluations(good, bad)
    found += [*sorted(_program(good, bad), key=lambda d: d.step or 0), *weights, *batch]
    return found


def _configured(good: Facts, bad: Facts) -> Iterator[Difference]:
    """What the Trainer and the model were made with: what follows from it parts inside of a library."""
    for kind, whose in (("trainer", "The Trainer's arguments differ"), ("model_config", "The model's config differs")):
        a, b = (f.manifest.get(kind) or {} for f in (good, bad))
        apart = [k for k in dict.fromkeys((*b, *a)) if a.get(k) != b.get(k)] if a and b else []
        if apart:
            said = "; ".join(f"{k} is {b.get(k)}, in the good run {a.get(k)}" for k in apart[:3])
            more = f", and {len(apart) - 3} more" if len(apart) > 3 else ""
            yield Difference(kind, apart[0], a.get(apart[0]), b.get(apart[0]), f"{whose}: {said}{more}.")


def _arguments(good: Facts, bad: Facts) -> Iterator[Difference]:
    """What the model is called with: where a batch lacks a mask, the code parts inside of a library."""
    a, b = ({str(n) for n in f.manifest.get("arguments") or ()} for f in (good, bad))
    if not (a and b) or a == b or any(n.isdigit() for n in a ^ b):
        return
    without, more = sorted(a - b), sorted(b - a)
    said = [f"without {', '.join(without)}, which the good run gives"] if without else []
    said += [f"with {', '.join(more)}, which the good run does not give"] if more else []
    yield Difference("arguments", "arguments", sorted(a), sorted(b), f"The model is called {', and '.join(said)}.", 1)


def _evaluations(good: Facts, bad: Facts) -> Iterator[Difference]:
    """What forwards without a gradient are given, where the training of both runs is equal until then."""

    def of(facts: Facts) -> dict[tuple[Any, ...], Mapping[str, Any]]:
        modes = [e for e in facts.of_kind("mode") if not e.get("gradients")]
        return {(e["step"], e.get("training")): e.get("given") or {} for e in modes}

    a, b = of(good), of(bad)
    for step, training in (key for key in b if key in a):
        theirs, mine = a[step, training], b[step, training]
        pairs = [(name, theirs[name], there) for name, there in mine.items() if name in theirs]
        said = [
            f"`{name}` is {there[0]} of mean {there[2]:.4g} and rms {there[3]:.4g}, in the good run {here[0]} of mean "
            f"{here[2]:.4g} and rms {here[3]:.4g}"
            for name, here, there in pairs
            if len(here) == len(there) == 6 and (here[0] != there[0] or apart([here], [there]))
        ]
        if said and equal_until(good, bad, step):
            text = f"At step {step} a forward without gradients is given other numbers: {'; '.join(said)}."
            yield Difference("arguments", "evaluation", "", "", text, step)


def _calls(good: Facts, bad: Facts, weights: Sequence[Difference]) -> Iterator[Difference]:
    """The first call of torch in which the code parts."""
    # other weights nearly everywhere are those of another seed
    same = not weights or weights[0].good > 0.5 * weights[0].bad
    pairs = [(good, bad, ""), *((good.ranks[r], bad.ranks[r], f" On rank {r}.") for r in good.ranks.keys() & bad.ranks)]
    found = [(p, of) for a, b, of in pairs if (p := parting(a, b, values=same)) is not None]
    if found:
        first, of = min(found, key=lambda pair: pair[0].step)
        where = (first.module,) if first.module else ()
        kind = "cast" if first.cast else "code"
        yield Difference(kind, first.place, first.good, first.bad, first.sentence + of, first.step, where)


def settings_and_loop(good: Facts, bad: Facts) -> list[Difference]:
    """The differences between two runs of one program on other data."""
    return [*_optimizers(good, bad), *_groups(good, bad), *_program(good, bad)]


def _recipes(good: Facts, bad: Facts) -> Iterator[Difference]:
    def of(facts: Facts) -> str:
        cast = {str(x["recipe"]) for x in facts.described if x.get("casts") and x.get("recipe")}
        return ", ".join(sorted(cast) or facts.recipes) or "none" if facts.casts else "nothing is cast"

    a, b = of(good), of(bad)
    if a != b:
        yield Difference("recipe", "recipe", a, b, f"The recipe differs: {a} and {b}.")
    elif bad.casts:
        yield from _castings(good, bad)


def _castings(good: Facts, bad: Facts) -> Iterator[Difference]:
    """Under recipes of one name: their fields, then the formats of each layer."""
    a, b = ({k: v for k, v in _fields(f.manifest.get("recipes") or {}) if "overrides" not in k} for f in (good, bad))
    apart = sorted({path[-1] for path in a.keys() | b.keys() if a.get(path) != b.get(path)})
    for key in apart:
        path = next(p for p in (*b, *a) if p[-1] == key and a.get(p) != b.get(p))
        here, there = (side.get(path, "its default") for side in (b, a))
        said = f"The recipe '{path[0]}' has {key} {here} in {'.'.join(path[1:-1])}, in the good run {there}."
        yield Difference("casting", key, there, here, said)
    formats = [{bare(x["name"]): _formats(x) for x in f.described} for f in (good, bad)]
    other = [n for n in formats[1] if n in formats[0] and formats[0][n] != formats[1][n]]
    if other and not apart:
        there, here = (side[other[0]] for side in formats)
        said = f"{some(other)}: operands are cast to {here or 'nothing'}, in the good run to {there or 'nothing'}."
        yield Difference("casting", "layers", there, here, said, where=tuple(other))


def _fields(values: Mapping[str, Any], *above: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _fields(value, *above, str(key))
        else:
            yield (*above, str(key)), value


def _formats(layer: Mapping[str, Any]) -> str:
    casts = layer.get("casts") or {}
    return ", ".join(dict.fromkeys(f"{c.get('format')}[{c.get('granularity', 'tensor')}]" for c in casts.values()))


def _optimizers(good: Facts, bad: Facts) -> Iterator[Difference]:
    if good.optimizers and bad.optimizers and good.optimizers != bad.optimizers:
        there, here = (", ".join(sorted(f.optimizers)) for f in (good, bad))
        yield Difference("optimizer", "optimizer", there, here, f"The optimizer differs: {there} and {here}.")


def _same_parameters(good: Facts, bad: Facts) -> dict[tuple[str, str], list[str]]:
    """(group in the good run, group in the bad run) -> the parameters that they hold; those of most elements first."""
    a, b = _by_name(good), _by_name(bad)
    held = ((n, a[n].get("held"), b[n].get("held")) for n in b if n in a)
    found = grouped(((str(x.get("group", "")), str(y.get("group", ""))), n) for n, x, y in held if x and y)
    size = {pair: sum(math.prod(b[n].get("shape") or [0]) for n in names) for pair, names in found.items()}
    if all(one == other for one, other in found):  # numbers of groups mean the same
        return {(n, n): [] for n in dict.fromkeys(name.partition("/")[2] for name in bad.groups)}
    return {pair: found[pair] for pair in sorted(found, key=lambda pair: -size[pair])}


def _groups(good: Facts, bad: Facts) -> Iterator[Difference]:
    common, mine, theirs = np.intersect1d(good.steps, bad.steps, return_indices=True)
    kinds = dict.fromkeys(name.partition("/")[0] for name in bad.groups) if len(common) else {}
    pairs = _same_parameters(good, bad)
    for kind in kinds:
        several = sum(n.startswith(f"{kind}/") for n in bad.groups) > 1
        found: list[tuple[float, str, Difference, str]] = []
        for pair, held in pairs.items():
            names = [f"{kind}/{n}".removesuffix("/") for n in pair]
            if names[0] not in good.groups or names[1] not in bad.groups:
                continue
            a, b = good.groups[names[0]][mine], bad.groups[names[1]][theirs]
            with np.errstate(invalid="ignore"):  # infinities
                far = np.abs(a - b) / np.maximum(np.maximum(np.abs(a), np.abs(b)), 1e-300)
            apart = np.flatnonzero(far > 1e-6)
            if len(apart):
                i, step = int(apart[np.argmax(np.abs(a[apart] - b[apart]))]), int(common[apart[0]])
                most = f", most at step {common[i]}" if far[i] > 2 * far[apart[0]] else ""
                group = pair[1] if several and not held else ""
                one = Difference("setting", kind, float(a[i]), float(b[i]), "", step, tuple(held), group)
                found.append((float(far[i]), f"{b[i] / a[i]:.4g}" if a[i] else "", one, most))
        if found:
            one, most = max(found, key=lambda one: one[0])[2:]
            if len(found) == len(pairs) and len({ratio for _, ratio, *_ in found}) == 1:  # of no group alone
                one = replace(one, where=(), group="")
            what = _SETTINGS.get(kind, f"Adam's {kind}" if kind.startswith("beta") else kind)
            of = f" of {some(one.where)}" if one.where else f" of group {one.group}" if one.group else ""
            from_ = "" if one.step == common[0] else f", from step {one.step} on"
            yield replace(one, sentence=f"The {what}{of} differs: {one.good:.4g} and {one.bad:.4g}{from_}{most}.")
    a_groups, b_groups = (len({n.partition("/")[2] for n in f.groups if "/" in n}) for f in (good, bad))
    if a_groups and b_groups and a_groups != b_groups:
        said_groups = f"The optimizer has {a_groups} groups in the good run, {b_groups} in this."
        yield Difference("setting", "groups", a_groups, b_groups, said_groups)


def _program(good: Facts, bad: Facts) -> Iterator[Difference]:
    for name, words in _PROGRAM.items():
        if (shared := good.beside(bad, name)) is None:
            continue
        steps, a, b = shared
        a, b = ((x > 0).astype(float) if name in _SHARES else x for x in (a, b))
        # a record may begin in the middle of its first step
        apart = np.flatnonzero((a != b) & (steps > max(good.steps[0], bad.steps[0])))
        if not len(apart):
            continue
        step, there, here = int(steps[apart[0]]), float(a[apart[0]]), float(b[apart[0]])
        if name in _SHARES:
            one, other = ("This run", "the good one") if here > there else ("The good run", "this one")
            said = f"{one} has {words} in step {step}, {other} has none"
        else:
            said = f"Step {step} has {here:.0f} {words}, that of the good run {there:.0f}"
        yield Difference("program", name, there, here, f"{said}. The two differ in {len(apart)} steps.", step)


def _by_name(facts: Facts) -> dict[str, Mapping[str, Any]]:
    """Parameters by their names; those of a second model of the same class, as of a reference, say so."""
    found: dict[str, Mapping[str, Any]] = {}
    for p in sorted(facts.parameters, key=lambda p: not p.get("held")):
        name, number = bare(str(p["name"])), 1
        while (own := name if number == 1 else f"model {number}'s {name}") in found:
            number += 1
        found[own] = p
    return found


def _parameters(good: Facts, bad: Facts) -> Iterator[Difference]:
    a, b = _by_name(good), _by_name(bad)
    both = [n for n in b if n in a]
    if not both:
        return

    def value(parameter: Mapping[str, Any], key: str) -> Any:
        if key == "held":
            return "held by an optimizer" if parameter.get("held") else "held by no optimizer"
        return parameter.get(key)

    for key, what in (("dtype", "dtype"), ("shape", "shape"), ("trains", "training"), ("held", "optimizer")):
        apart = [n for n in both if value(a[n], key) != value(b[n], key)]
        values = [value(side[n], key) for n in apart[:1] for side in (a, b)]
        if apart:
            said = f"The {what} of {some(apart)} differs: {values[0]} and {values[1]}."
            yield Difference("parameter", key, values[0], values[1], said, where=tuple(apart))
    only = [n for n in a if n not in b], [n for n in b if n not in a]
    if any(only):
        # what an optimizer holds in one run alone does not train in the other, whatever its name there
        def steps(side: Mapping[str, Any], names: list[str]) -> list[str]:
            return [n for n in names if side[n].get("held") and side[n].get("trains")]

        held = steps(a, only[0]), steps(b, only[1])
        verb, only = ("trains", held) if any(held) else ("has", only)
        sides = zip(("good", "bad"), only, strict=True)
        said = " and ".join(f"only the {w} run {verb} {some(n)}" for w, n in sides if n)
        yield Difference(
            "parameter", "names", len(a), len(b), f"The models differ: {said}.", where=tuple(only[0] + only[1])
        )


def _weights(good: Facts, bad: Facts) -> list[Difference]:
    a, b = (f.weights for f in (good, bad))
    both = [n for n in b if n in a]
    apart = [n for n in both if a[n] != b[n]]
    if not apart:
        return []
    share = f"{len(apart)} of {len(both)} parameters"
    rest = "another seed or another checkpoint" if len(apart) > 0.5 * len(both) else some(apart)
    said = f"The weights differ before the first step, in {share} ({rest})."
    return [Difference("weights", "weights", len(both) - len(apart), len(both), said, where=tuple(apart))]


def _batch(good: Facts, bad: Facts) -> list[Difference]:
    found = compare_batches(good, bad)
    if found is None or found["step"] is None:
        return []
    share = f"{found['share_pct']:.0f} % of the steps"
    said = f"The {found['what']} differ from step {found['step']} on, in {share} from there."
    hashed = all(side.column("input_hash") is not None for side in (good, bad))
    # equal inputs with other labels are no other order of the data
    kind = "labels" if found["what"] == "labels" and hashed else "batch"
    return [Difference(kind, found["what"], None, None, said, int(found["step"]))]


def compare_batches(good: Facts, bad: Facts) -> dict[str, Any] | None:
    """{step, what, share_pct}: the first step whose batch differs, and the share of such steps from it on; step is None
    if none does; None if a run has no hashes."""
    both = {"inputs": good.beside(bad, "input_hash"), "labels": good.beside(bad, "label_hash")}
    found = {what: shared for what, shared in both.items() if shared is not None}
    if not found or not np.isin(good.steps, bad.steps).any():
        return None
    apart = {what: {*steps[a != b].tolist()} for what, (steps, a, b) in found.items()}
    if not (either := set[int]().union(*apart.values())):
        return {"step": None, "what": "", "share_pct": 0.0}
    first = min(either)
    # a watch with a budget hashes some steps only
    known = {step for steps, _, _ in found.values() for step in steps.tolist() if step >= first}
    what = " and ".join(name for name, steps in apart.items() if first in steps)
    return {"step": first, "what": what, "share_pct": float(f"{100 * (len(either) / len(known)):.4g}")}


def some(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
