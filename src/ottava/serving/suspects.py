"""What may be true of an engine: each suspect is a switch of one setting, which an experiment tries."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from types import MappingProxyType

import torch
from torch import Tensor

from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.scaling import PER_TENSOR
from ottava.numerics.tensor import QuantizationSpec
from ottava.serving.causes import HEAD, ROUTER
from ottava.serving.formula import formula_causes
from ottava.serving.rollout import Rollout
from ottava.serving.search import (
    CASTS,
    Guess,
    Hypothesis,
    cast,
    given,
    groups,
    guessed,
    misread,
    nats,
    number,
    of_state,
    placed,
    searched,
)
from ottava.serving.sides import Model, Side
from ottava.serving.twin import ModelState
from ottava.weights.layouts import InputCast

_TEMPERATURES = (0.1, 10.0)
_TOP_P = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
_TOP_K = (5, 10, 20, 40, 50, 100, 200, 500)
_PENALTIES = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3)
_CAPS = (0.25, 64.0)
_LIMITS = (2.0**-14 * E4M3.max, 2.0**10 * E4M3.max)
"""Of a cache, whose codes depend on the scale's last bit: powers of two are tried exactly."""
_TOPS_OF_INPUTS = (0.02, 200.0)
_CLIPS = (0.7, 0.5, 0.35, 0.25, 0.12, 0.06)
_TOPS = tuple(2.0 ** (k / 2) for k in range(8, -1, -1))
_EXACTLY = 1e-4
_NEAR_1 = 0.05
_MOSTLY = 0.98
_LOWER = 0.01  # share of squares that may be of tokens which became less likely
_MODEST = 1.0  # nats: beyond it any other model makes nearly all of its own tokens more likely
_COLUMNS = re.compile(r"(o_proj|down_proj|c_proj|w2)$")
"""Linears whose columns tensor-parallel ranks share; of others they share rows."""


def hypotheses(
    found: Rollout, ours: Model | None, theirs: Model | None, before: Sequence[tuple[str, Model]]
) -> Iterator[Hypothesis]:
    """All that can be tried with what is given, cheap ones first."""
    for by in (1, -1, 2, -2):
        yield guessed("shift", f"the list moved by {by:+d}", shift=by)
    values, counts = found.rollout.unique(return_counts=True)
    if int(counts.max()) > 1:
        constant = float(values[counts.argmax()])
        yield guessed("padded", f"{int(counts.max())} tokens have {constant:g}", padded=constant)
    slope, offset = _line(found.recomputed, found.rollout)
    if slope > 0:
        line = guessed("scaled", f"log p divided by {1 / slope:.4g}", scale=1 / slope)
        yield replace(line, fitted=ours is not None)
    if ours is None:
        yield from _of_lists(found, offset)
        return
    raw = "raw log p divided by {:.4g}"
    raws = number("scaled", _TEMPERATURES, lambda s, by: replace(_sampled(s, temperature=1.0), scale=by), raw)
    # divided by 1 they are those of another temperature, which is asked next
    yield replace(raws, settings=lambda s, loss: (x for x in raws.settings(s, loss) if abs(x[0].scale - 1) > _NEAR_1))
    yield temperature()
    capped = "as if logits z were {0:.3g} tanh(z / {0:.3g}), which no config says"
    yield number("not-fp8", _CAPS, lambda s, top: _sampled(s, cap=top), capped)
    yield Hypothesis("processed", partial(_processed, int(ours.config.get("vocab_size") or 0)))
    yield guessed("trainer", "the checkpoint's own log-probabilities", trainer=True)
    if found.routes is not None:
        yield of_state("routes", "the experts of the dump", partial(replace, replay=True))
    for fmt in (E4M3, E5M2):
        for i in (None, *range(int(ours.config.get("num_hidden_layers") or 0))):
            where = f"keys and values {'' if i is None else f'of layer {i} '}in {fmt.name}"
            yield of_state("kv-cache", where, partial(replace, cache=fmt, cached=i))
    own = partial(replace, cache=E4M3, cache_top=0.0)
    yield of_state("kv-cache", "keys and values in E4M3, a scale for each token and head", own)
    if theirs is not None:
        yield from _of_checkpoint(ours, theirs)
    for name, model in before:
        yield from _stale(ours, name, model)
    yield from _of_engines(ours)


def _line(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Least squares: y = slope x; and of y - slope x the mean, with a free slope."""
    x, y = x.double(), y.double()
    return float((x * y).sum() / (x * x).sum().clamp_min(1e-30)), float((y - x).mean())


def _of_lists(found: Rollout, offset: float) -> Iterator[Hypothesis]:
    """What two lists show without a model: averages."""
    gain = found.rollout - found.recomputed
    if float((gain > -_EXACTLY).double().mean()) > _MOSTLY and offset > 0:
        yield guessed(
            "processed", f"the rollout is never less likely, on average {offset:.3g} nats more", offset=offset
        )
    x, y = found.recomputed.double(), found.rollout.double()
    spread = float(((x - x.mean()) ** 2).sum())
    if spread:
        steep = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
        if steep > 0:
            said = f"log p is steeper by {steep:.3g}, as of logits divided by about {1 / steep:.3g}"
            yield guessed("temperature", said, scale=1 / steep, offset=float(y.mean() - steep * x.mean()))


def _sampled(setting: Guess, **changed: float) -> Guess:
    return replace(setting, sampler=replace(setting.sampler, **changed))  # type: ignore[arg-type]


def temperature() -> Hypothesis:
    """Another temperature of logits."""
    said = "logits divided by {:.4g} instead of {:.4g}"
    return number("temperature", _TEMPERATURES, lambda s, t: _sampled(s, temperature=t), said)


def _processed(vocabulary: int, setting: Guess, _: object) -> Iterator[tuple[Guess, str]]:
    some = [k for k in _TOP_K if k < vocabulary]
    for name, said, values in (
        ("top_p", "top-p", _TOP_P),
        ("top_k", "top-k", some),
        ("penalty", "a penalty of", _PENALTIES),
    ):
        for value in values:
            yield _sampled(setting, **{name: value}), f"{said} {value:g}"


def _of_checkpoint(ours: Model, theirs: Model) -> Iterator[Hypothesis]:
    """Each way in which the engine's checkpoint differs, by its rules."""
    if causes := formula_causes(ours.config, theirs.config):
        said = min(causes, key=lambda cause: cause[0] != "formula")[1]
        config = theirs.config if theirs.config.get("model_type") else ours.config
        yield of_state("formula", said, lambda s: replace(s, config=config))
    pairs = {n: (a, theirs.linears[n]) for n, a in ours.linears.items() if n in theirs.linears}
    pairs = {n: (a, b) for n, (a, b) in pairs.items() if a.weight.shape == b.weight.shape}
    sets: dict[str, dict[str, Side]] = {}
    for name, (a, b) in pairs.items():
        if (a.cast is None) != (b.cast is None) or (b.codes and b.cast is None):
            sets.setdefault(_kind(name, "layers"), {})[name] = b
        elif a.cast is None and not torch.equal(a.operand(), b.operand()):
            sets.setdefault("plain", {})[name] = b
        elif a.cast is not None:
            if not torch.equal(a.operand(), b.operand()):
                how = replace(b.arithmetic, inputs=a.arithmetic.inputs)
                sets.setdefault("weights", {})[name] = replace(b, activations=a.activations, arithmetic=how)
            if (a.activations, a.arithmetic.inputs) != (b.activations, b.arithmetic.inputs):
                how = replace(a.arithmetic, inputs=b.arithmetic.inputs)
                sets.setdefault("activations", {})[name] = replace(a, activations=b.activations, arithmetic=how)
    for cause, sides in sets.items():
        yield of_state(cause, f"{len(sides)} linears as in the checkpoint", partial(given, sides))
    if "weights" in sets and "activations" in sets:
        both = {name: theirs.linears[name] for name in {*sets["weights"], *sets["activations"]}}
        yield of_state("weights", "weights and inputs as in the checkpoint", partial(given, both))
    other = {n: t for n, t in theirs.plain.items() if n in ours.plain and t.shape == ours.plain[n].shape
             and not torch.equal(t.float(), ours.plain[n].float())}  # fmt: skip
    if other:
        said = f"{len(other)} tensors in high precision as in the checkpoint"
        yield of_state("plain", said, partial(given, {}, plain=other))


def _kind(name: str, other: str) -> str:
    return "router" if ROUTER.search(name) else "head" if HEAD.search(name) else other


def _old(ours: Model, model: Model) -> tuple[dict[str, Side], dict[str, Tensor]]:
    """Weights of an earlier step, cast as today's are, and its tensors in high precision."""
    pairs = {n: (side, model.linears[n].weight) for n, side in ours.linears.items() if n in model.linears}
    sides = {n: side.holding(old) for n, (side, old) in pairs.items() if old.shape == side.weight.shape}
    return sides, {n: t for n, t in model.plain.items() if n in ours.plain and t.shape == ours.plain[n].shape}


def _stale(ours: Model, name: str, model: Model) -> Iterator[Hypothesis]:
    """Weights of an earlier step: all of them, or some."""
    sides, plain = _old(ours, model)
    yield of_state("stale", f"all weights of {name}", partial(given, sides, plain=plain))
    yield of_state("stale", f"all linears of {name}", partial(given, sides))
    yield of_state("stale", f"tensors in high precision of {name}", partial(given, {}, plain=plain))
    if (untied := _untied(ours, model)) is not None:
        yield of_state("stale", f"the head of {name}, which is tied in training", untied)
    for kind, names in groups([*sides, *plain]).items():
        some, others = {n: sides[n] for n in names if n in sides}, {n: plain[n] for n in names if n in plain}
        if kind in ("attention", "MLP"):
            yield of_state("stale", f"{kind} of {name}, linears", partial(given, some))
        yield of_state("stale", f"{kind} of {name}", partial(given, some, plain=others))
    state = ModelState.of(replace(ours, linears={**ours.linears, **sides}, plain={**ours.plain, **plain}))
    yield of_state("stale", f"cached keys and values of prompts by {name}", partial(replace, prompt=state))


def _untied(
    ours: Model, model: Model, how: Callable[[Side], Side] = lambda side: side
) -> Callable[[ModelState], ModelState] | None:
    """A head of its own, from a model's embedding, where training has none."""
    key = next((name for name in model.plain if name.endswith(("embed_tokens.weight", "wte.weight"))), None)
    if not ours.tied or key is None or key not in ours.plain or model.plain[key].shape != ours.plain[key].shape:
        return None
    config, head = {**ours.config, "tie_word_embeddings": False}, how(Side(model.plain[key]))
    return lambda state: replace(given({"lm_head": head}, state), config=config)


def _of_engines(ours: Model) -> Iterator[Hypothesis]:
    """What engines do, whatever a checkpoint says."""
    casts = ours.casts
    body = {name: side for name, side in ours.linears.items() if _kind(name, "") == ""}
    for what, (spec, inputs) in CASTS.items():
        if casts:
            rows = {n: replace(side, activations=inputs) for n, side in casts.items() if side.activations != inputs}
            yield of_state("activations", f"inputs cast with {what}", partial(given, rows))
        else:
            full = {n: cast(side, spec, inputs) for n, side in body.items()}
            yield of_state("layers", f"all linears cast with {what}", partial(given, full))
            alone = {n: cast(side, spec, None) for n, side in body.items()}
            yield of_state("layers", f"all weights cast with {what}, and no inputs", partial(given, alone))
        for (cause, pattern), fmt in product((("head", HEAD), ("router", ROUTER)), (E4M3, E5M2)):
            if spec.format.bits == 4:
                continue
            said, how = f"cast with {what}, weights in {fmt.name}", replace(spec, format=fmt)
            chosen = {n: s for n, s in ours.linears.items() if pattern.search(n) and s.cast is None}
            if chosen:
                yield of_state(cause, said, partial(given, {n: cast(s, how, inputs) for n, s in chosen.items()}))
            elif (tied := _untied(ours, ours, partial(cast, spec=how, inputs=inputs))) and cause == "head":
                yield of_state(cause, said, tied)
    if not casts:
        return
    bare = {n: Side(side.weight) for n, side in casts.items()}
    yield of_state("layers", "the engine casts nothing", partial(given, bare))
    for kind, names in groups(list(casts)).items():
        yield of_state("layers", f"{kind} in BF16", partial(given, {n: bare[n] for n in names}))
    yield from searched(casts, "", far=True)
    exact = {n: replace(side, activations=None) for n, side in casts.items() if side.activations is not None}
    yield of_state("activations", "the engine casts no inputs", partial(given, exact))
    first = next(iter(casts.values()))
    assert first.cast is not None
    left = {n: cast(s, first.cast.spec, first.activations) for n, s in body.items() if s.cast is None}
    if left:
        yield of_state("layers", "the linears that training leaves in BF16", partial(given, left))
    tensor = {n: replace(s, activations=InputCast(PER_TENSOR, False, False)) for n, s in casts.items()}
    for share in _CLIPS:
        said = f"inputs clipped at {share:g} of their largest, as by a scale of other data"
        yield of_state("activations", said, partial(given, tensor, clip=share))
    for top in _TOPS:
        said = f"inputs clipped at {top:.3g}, as by one scale for all linears"
        static = InputCast(PER_TENSOR, False, True, top / E4M3.max)
        yield of_state(
            "activations", said, partial(given, {n: replace(s, activations=static) for n, s in casts.items()})
        )
    again = {n: cast(s, s.cast.spec, s.activations) for n, s in casts.items() if s.cast is not None}
    yield of_state("weights", "codes of bf16(master)", partial(given, again))


def in_part(found: Rollout, ours: Model | None, before: Sequence[tuple[str, Model]]) -> Iterator[Hypothesis]:
    """What holds from a place on, in some linears, or beyond a limit: what holds everywhere does not explain."""
    for by in (1, -1, 2, -2):
        yield guessed("shift", f"the list moved by {by:+d} from a place on", shift=by, behind=True)
    yield guessed("shift", "each list moved by a number of its own", matched="places")
    yield guessed("not-fp8", "the lists of sequences are exchanged", matched="lists")
    gain = found.rollout.double() - found.recomputed.double()
    fallen = float((gain.clamp(max=0) ** 2).sum() / (gain**2).sum().clamp_min(1e-30))
    if fallen < _LOWER and float(nats(-gain).mean()) < _MODEST:
        said = f"no token became less likely, {float(gain.mean()):.3g} nats more on average: some tokens were left out"
        yield guessed("processed", said, raised=True)
    if ours is None:
        return
    for said, change in _SCORES.items():
        yield number("not-fp8", _CAPS, partial(_scored, change), said)
    layers = range(int(ours.config.get("num_hidden_layers") or 0))
    for held, i in [("kv", None), ("k", None), ("v", None), *(("kv", i) for i in layers)]:
        name = {"kv": "keys and values", "k": "keys", "v": "values"}[held]
        where = f"{name} {'' if i is None else f'of layer {i} '}in {E4M3.name}, by a scale that holds {{:.3g}}"
        yield number("kv-cache", _LIMITS, partial(_cached, i, held), where, round(math.log2(_LIMITS[1] / _LIMITS[0])))
    casts = ours.casts
    for name, model in before:
        old, plain = _old(ours, model)
        yield placed("stale", f" of {name}", old, plain)
        for rank in range(2):
            yield placed("stale", f" of {name}, rank {rank} of 2", _rank(ours.linears, old, rank))
    for cause, pattern in (("head", HEAD), ("router", ROUTER)):
        chosen = {n: s for n, s in ours.linears.items() if pattern.search(n)}
        if chosen:
            said = "inputs by a scale that holds {:.3g}"
            yield number(cause, _TOPS_OF_INPUTS, partial(_static, chosen), said, 12)
    if casts:
        yield placed("layers", " in BF16", {n: Side(side.weight) for n, side in casts.items()})
        yield from misread(casts)
        for kind, names in groups(list(casts)).items():
            yield from searched({n: casts[n] for n in names}, f" of {kind}", far=False)
        return
    body = {name: side for name, side in ours.linears.items() if _kind(name, "") == ""}
    for what, (spec, inputs) in CASTS.items():
        if spec.format.bits == 4:
            continue
        yield placed("layers", f" cast with {what}", {n: cast(side, spec, inputs) for n, side in body.items()})


def _rank(new: Mapping[str, Side], old: Mapping[str, Side], rank: int) -> dict[str, Side]:
    """Linears of which one of two tensor-parallel ranks has the old share."""

    def mixed(name: str, one: Tensor, other: Tensor) -> Tensor:
        size = one.shape[axis := int(bool(_COLUMNS.search(name)))] // 2
        parts = [t.split((size, t.shape[axis] - size), axis) for t in (one, other)]
        return torch.cat([parts[int(i == rank)][i] for i in range(2)], axis)

    return {n: side.holding(mixed(n, new[n].weight, side.weight)) for n, side in old.items()}


_SCORES: Mapping[str, Callable[[float], Callable[[Tensor], Tensor]]] = MappingProxyType(
    {
        "as if scores of attention z were {0:.3g} tanh(z / {0:.3g}), which no config says": lambda top: (
            lambda z: top * torch.tanh(z / top)
        ),
        "as if scores of attention were multiplied by {:.3g}, which no config says": lambda by: lambda z: by * z,
    }
)


def _scored(change: Callable[[float], Callable[[Tensor], Tensor]], setting: Guess, value: float) -> Guess:
    return setting.having(lambda state: replace(state, scores=change(value)))


def _cached(layer: int | None, held: str, setting: Guess, top: float) -> Guess:
    return setting.having(lambda state: replace(state, cache=E4M3, cached=layer, cache_top=top, held=held))


def _static(sides: Mapping[str, Side], setting: Guess, top: float) -> Guess:
    """Linears whose inputs have a scale of other data."""
    inputs = InputCast(PER_TENSOR, False, True, top / E4M3.max)
    made = {n: cast(s, QuantizationSpec(E4M3, PER_TENSOR), inputs) for n, s in sides.items()}
    return setting.having(partial(given, made))
