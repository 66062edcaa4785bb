"""What differs between two runs, read from facts alone, in the order in which a training computes.

    settings     recipe, optimizer, learning rate, betas, decay, dtypes, command
    code         the first call of torch that is not that of the good run, or has another result, see `calls`
    weights      hashes before the first step
    batch        hashes of inputs and labels
    forward      inputs of the layers in the first step, from the first layer on
    loss         of the first step
    backward     gradients of the layers in the first step, from the last layer on
    update       what the first step did to each parameter

Where everything before agrees, the first disagreement is the cause, or holds it: the same weights and the same batch
give the same input of every layer. A cast moves a root mean square by less than a percent; the limits are above that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ottava.diagnose.calls import bare, parting
from ottava.diagnose.facts import Facts
from ottava.measure.layer_names import symbol
from ottava.record.reader import Table

_FORWARD, _BACKWARD, _LOSS, _UPDATE = 0.02, 0.08, 0.01, 0.25  # relative, of runs that cast differently
_SAME = 0.004  # half a unit of BF16's last bit
_SETTINGS = MappingProxyType({"lr": "learning rate", "weight_decay": "weight decay"})
_PROGRAM = MappingProxyType(
    {
        "forwards": "forwards with gradients",
        "backwards": "backwards",
        "optimizer_steps": "steps of an optimizer",
        "extra_steps": "steps of an optimizer without a new backward",
        "restarts": "optimizers that began anew",
        "eval_forwards_in_train_mode": "forwards of a validation in training mode",
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
    """recipe, optimizer, setting, code, cast, parameter, program, weights, batch, forward, loss, backward, update or
    config."""
    key: str
    good: Any
    bad: Any
    sentence: str
    step: int | None = None
    where: tuple[str, ...] = ()


def differences(good: Facts, bad: Facts) -> list[Difference]:
    """All differences that the facts show, in the order of computation."""
    found = [*_recipes(good, bad), *_optimizers(good, bad), *_groups(good, bad)]
    weights, batch = _weights(good, bad), _batch(good, bad)
    found += [*_calls(good, bad, weights), *_parameters(good, bad)]
    found += [*sorted(_program(good, bad), key=lambda d: d.step or 0), *weights, *batch]
    first = _first_step(good, bad)
    # only the same weights and the same batch have to give the same numbers
    comparable = first is not None and not weights and not (batch and batch[0].step == first)
    if comparable and first is not None:
        computed = _forward(good, bad, first) or _loss(good, bad, first) or _backward(good, bad, first)
        # another setting makes another update
        settled = any(d.kind in ("setting", "optimizer") for d in found)
        found += computed or _clipping(good, bad, first) or ([] if settled else _update(good, bad, first))
    return found


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
        return ", ".join(facts.recipes) or "none" if facts.casts else "nothing is cast"

    a, b = of(good), of(bad)
    if a != b:
        yield Difference("recipe", "recipe", a, b, f"The recipe differs: {a} and {b}.")


def _optimizers(good: Facts, bad: Facts) -> Iterator[Difference]:
    def of(facts: Facts) -> set[str]:
        return {str((p.get("held") or {}).get("optimizer")) for p in facts.parameters if p.get("held")}

    a, b = of(good), of(bad)
    if a and b and a != b:
        names = ", ".join(sorted(a)), ", ".join(sorted(b))
        yield Difference("optimizer", "optimizer", *names, f"The optimizer differs: {names[0]} and {names[1]}.")


def _groups(good: Facts, bad: Facts) -> Iterator[Difference]:
    common, mine, theirs = np.intersect1d(good.steps, bad.steps, return_indices=True)
    said: set[str] = set()
    for name in bad.groups:
        if name not in good.groups or not len(common):
            continue
        a, b = good.groups[name][mine], bad.groups[name][theirs]
        apart = np.flatnonzero(
            np.isfinite(a) & np.isfinite(b) & (np.abs(a - b) > 1e-6 * np.maximum(np.abs(a), np.abs(b)))
        )
        kind, _, group = name.partition("/")
        if not len(apart) or kind in said:
            continue
        said.add(kind)
        i = int(apart[np.argmax(np.abs(a[apart] - b[apart]))])
        step = int(common[apart[0]])
        what = _SETTINGS.get(kind, f"Adam's {kind}" if kind.startswith("beta") else kind)
        several = sum(n.startswith(f"{kind}/") for n in bad.groups) > 1
        of = f" of group {group}" if several and group else ""
        from_ = "" if step == common[0] else f", from step {step} on"
        yield Difference(
            "setting",
            kind,
            float(a[i]),
            float(b[i]),
            f"The {what}{of} differs: {a[i]:.4g} and {b[i]:.4g}{from_}.",
            step,
        )
    a_groups, b_groups = (len({n.partition("/")[2] for n in f.groups if "/" in n}) for f in (good, bad))
    if a_groups and b_groups and a_groups != b_groups:
        said_groups = f"The optimizer has {a_groups} groups in the good run, {b_groups} in this."
        yield Difference("setting", "groups", a_groups, b_groups, said_groups)


def _program(good: Facts, bad: Facts) -> Iterator[Difference]:
    for name, words in _PROGRAM.items():
        a, b = (
            dict(zip(f.steps.tolist(), [] if (v := f.column(name)) is None else v, strict=False)) for f in (good, bad)
        )
        if name in _SHARES:
            a, b = ({step: float(x > 0) for step, x in of.items() if math.isfinite(x)} for of in (a, b))
        # a record may begin in the middle of the first step
        apart = [s for s in sorted(a.keys() & b.keys())[1:] if math.isfinite(a[s] + b[s]) and a[s] != b[s]]
        if not apart:
            continue
        here, there = (of[apart[0]] for of in (b, a))
        if name in _SHARES:
            one, other = ("This run", "the good one") if here > there else ("The good run", "this one")
            said = f"{one} has {words} in step {apart[0]}, {other} has none"
        else:
            said = f"Step {apart[0]} has {here:.0f} {words}, that of the good run {there:.0f}"
        yield Difference("program", name, there, here, f"{said}. The two differ in {len(apart)} steps.", apart[0])


def _by_name(facts: Facts) -> dict[str, Mapping[str, Any]]:
    return {bare(str(p["name"])): p for p in facts.parameters}


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
            said = f"The {what} of {_some(apart)} differs: {values[0]} and {values[1]}."
            yield Difference("parameter", key, values[0], values[1], said, where=tuple(apart))
    only = [n for n in a if n not in b], [n for n in b if n not in a]
    if any(only):
        said = " and ".join(f"only the {w} run has {_some(n)}" for w, n in zip(("good", "bad"), only, strict=True) if n)
        yield Difference(
            "parameter", "names", len(a), len(b), f"The models differ: {said}.", where=tuple(only[0] + only[1])
        )


def _weights(good: Facts, bad: Facts) -> list[Difference]:
    a, b = ({bare(str(n)): h for n, h in (f.manifest.get("weights") or {}).items()} for f in (good, bad))
    both = [n for n in b if n in a]
    apart = [n for n in both if a[n] != b[n]]
    if not apart:
        return []
    share = f"{len(apart)} of {len(both)} parameters"
    rest = "another seed or another checkpoint" if len(apart) > 0.5 * len(both) else _some(apart)
    said = f"The weights differ before the first step, in {share} ({rest})."
    return [Difference("weights", "weights", len(both) - len(apart), len(both), said, where=tuple(apart))]


def _batch(good: Facts, bad: Facts) -> list[Difference]:
    found = compare_batches(good, bad)
    if found is None or found["step"] is None:
        return []
    said = f"The {found['what']} differ from step {found['step']} on, in {found['share_pct']:.0f} % of the steps."
    return [Difference("batch", found["what"], None, None, said, int(found["step"]))]


def compare_batches(good: Facts, bad: Facts) -> dict[str, Any] | None:
    """{step, what, share_pct}: the first step whose batch differs, and the share of such steps; step is None if none
    does; None if a run has no hashes."""
    common, mine, theirs = np.intersect1d(good.steps, bad.steps, return_indices=True)
    apart: dict[str, Any] = {}
    known = np.zeros(len(common), dtype=bool)  # a watch with a budget hashes some steps only
    for what, name in (("inputs", "input_hash"), ("labels", "label_hash")):
        a, b = good.column(name), bad.column(name)
        if a is not None and b is not None:
            both = np.isfinite(a[mine]) & np.isfinite(b[theirs])
            apart[what], known = (a[mine] != b[theirs]) & both, known | both
    if not apart or not len(common):
        return None
    either = np.logical_or.reduce(list(apart.values()))
    if not either.any():
        return {"step": None, "what": "", "share_pct": 0.0}
    first = int(np.flatnonzero(either)[0])
    what = " and ".join(name for name, values in apart.items() if values[first])
    return {"step": int(common[first]), "what": what, "share_pct": float(f"{100 * float(either[known].mean()):.4g}")}


def _first_step(good: Facts, bad: Facts) -> int | None:
    """The first step that both runs have, if both have it first: their weights are those of the start."""
    if not len(good.steps) or not len(bad.steps) or good.steps[0] != bad.steps[0]:
        return None
    return int(good.steps[0])


def _sizes(table: Table, tensor: str, step: int) -> dict[str, float]:
    """Layer -> root mean square of a tensor at a step, in the order of the forward."""
    rows = table.where(tensor=tensor, direction="row", step=step)
    values = np.asarray(rows.metric("rms"), dtype=np.float64)
    found: dict[str, float] = {}
    for layer, value in zip(rows["layer"], values, strict=True):
        found.setdefault(bare(str(layer)), float(value))
    return found


def _apart(a: float, b: float, limit: float) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isfinite(a) != math.isfinite(b)
    return abs(a - b) > limit * max(abs(a), abs(b), 1e-30)


def _layers(good: Facts, bad: Facts, tensor: str, step: int, limit: float) -> tuple[list[str], list[str], Any, Any]:
    a, b = (_sizes(f.table, tensor, step) for f in (good, bad))
    both = [n for n in b if n in a]
    return both, [n for n in both if _apart(a[n], b[n], limit)], a, b


def _limit(good: Facts, bad: Facts, limit: float) -> float:
    """The relative distance of equal computations: that of other casts, or else a few roundings of BF16."""
    return limit if bool(good.casts) != bool(bad.casts) or good.recipes != bad.recipes else _SAME


def _forward(good: Facts, bad: Facts, step: int) -> list[Difference]:
    for tensor in ("weight", "input"):
        both, apart, a, b = _layers(good, bad, tensor, step, _limit(good, bad, _FORWARD))
        if not apart:
            continue
        name, before = apart[0], both[: both.index(apart[0])]
        where = f"{name}.{symbol(tensor)}"
        if tensor == "weight":
            sizes = f"rms {a[name]:.4g} and {b[name]:.4g} at step {step}"
            said = f"The weights that {_some(apart)} multiplies differ: {sizes}."
        else:
            fine = (
                f"{before[-1]} still gets the same input, {where} does not"
                if before
                else f"the input of the first layer, {where}, differs"
            )
            sizes = f"rms {a[name]:.4g} and {b[name]:.4g}, step {step}"
            said = f"The same weights and batch give another forward: {fine} ({sizes})."
        return [Difference("forward", where, a[name], b[name], said, step, (name,))]
    return []


def _loss(good: Facts, bad: Facts, step: int) -> list[Difference]:
    a, b = (float(f.loss.loss[0]) for f in (good, bad))
    # what casts alone do to a loss, as the shadow steps found
    moved = [
        abs(e["loss"] - e["loss_without"]) for e in bad.experiments("shadow") if _numbers(e, "loss", "loss_without")
    ]
    limit = max(_limit(good, bad, _LOSS) * max(abs(a), abs(b)), 3 * max(moved, default=0.0))
    if abs(a - b) <= limit or math.isnan(a):
        return []
    both, _, _, _ = _layers(good, bad, "input", step, _FORWARD)
    last = f": every layer gets the same input, so it is made behind {both[-1]}" if both else ""
    said = f"The same weights and batch give another loss at step {step}, {a:.4g} and {b:.4g}{last}."
    return [Difference("loss", "loss", a, b, said, step)]


def _numbers(entry: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(entry.get(n), (int, float)) and math.isfinite(entry[n]) for n in names)


def _backward(good: Facts, bad: Facts, step: int) -> list[Difference]:
    both, apart, a, b = _layers(good, bad, "grad_output", step, _BACKWARD)
    if not apart:
        norms = [f.at("grad_norm", step) for f in (good, bad)]
        if not all(map(math.isfinite, norms)) or not _apart(norms[0], norms[1], _BACKWARD):
            return []
        said = f"The same forward gives another gradient norm at step {step}: {norms[0]:.4g} and {norms[1]:.4g}."
        return [Difference("backward", "grad_norm", norms[0], norms[1], said, step)]
    name = apart[-1]  # the backward runs from the last layer on
    after = both[both.index(name) + 1 :]
    fine = f"{after[0]} still has the same dY, {name} has not" if after else f"dY of the last layer, {name}, differs"
    sizes = f"rms {a[name]:.4g} and {b[name]:.4g}, step {step}"
    said = f"The same forward gives another backward: {fine} ({sizes})."
    return [Difference("backward", f"{name}.dY", a[name], b[name], said, step, (name,))]


def _clipping(good: Facts, bad: Facts, step: int) -> list[Difference]:
    """The same gradient, and another one at the optimizer: clipping, or a GradScaler, in another order."""
    whole, used = ([f.at(name, step) for f in (good, bad)] for name in ("grad_norm", "grad_norm_used"))
    if (
        not all(map(math.isfinite, (*whole, *used)))
        or _apart(whole[0], whole[1], _BACKWARD)
        or not _apart(used[0], used[1], _BACKWARD)
    ):
        return []
    said = f"The same gradient reaches the optimizer with another norm at step {step}: {used[0]:.4g} and {used[1]:.4g}"
    return [Difference("update", "grad_norm_used", used[0], used[1], f"{said} (clipping, or unscaling).", step)]


def _update(good: Facts, bad: Facts, step: int) -> list[Difference]:
    a, b = ({bare(n): r for n, r in f.moves.get(step, {}).items()} for f in (good, bad))
    apart = [
        n for n in b
        if n in a and a[n]["ratio"] > 0
        and not _apart(a[n]["gradient"], b[n]["gradient"], _BACKWARD)
        and _apart(a[n]["ratio"], b[n]["ratio"], _UPDATE)
    ]  # fmt: skip
    if not apart:
        return []
    name = apart[0]
    said = (
        f"The same gradient gives another update of {_some(apart)} at step {step}: {a[name]['ratio']:.3g} and "
        f"{b[name]['ratio']:.3g} of the weight."
    )
    return [Difference("update", name, a[name]["ratio"], b[name]["ratio"], said, step, tuple(apart))]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
