"""What may be true of an engine: each suspect is a switch of one setting, which an experiment tries.

An engine's casts are searched, not listed: from training's own rule a step changes the format, the block of a scale or
the rule of scales; the step after which the KL is least is kept, and the next one is tried from there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW, PER_TENSOR
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.quantize import quantize
from ottava.serving.causes import HEAD, ROUTER
from ottava.serving.engines import EXACT
from ottava.serving.formula import formula_causes
from ottava.serving.rollout import Rollout, Sampler
from ottava.serving.sides import Model, Side, spec_of
from ottava.serving.twin import ModelState
from ottava.weights.layouts import InputCast

_TEMPERATURES = (0.1, 10.0)
_TOP_P = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
_TOP_K = (5, 10, 20, 40, 50, 100, 200, 500)
_PENALTIES = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3)
_CAPS = (2.0, 64.0)
_LIMITS = (0.05, 20.0)
_CLIPS = (0.7, 0.5, 0.35, 0.25, 0.12, 0.06)
_TOPS = tuple(2.0 ** (k / 2) for k in range(8, -1, -1))
_EXACTLY = 1e-4
_NEAR_1 = 0.05
_EXPERTS = 16  # that are tried one by one
_MOSTLY = 0.98
_CASTS = MappingProxyType(
    {
        "one scale a weight and a token": (QuantizationSpec(E4M3, PER_TENSOR), InputCast(PER_ROW, False, False)),
        "one scale a weight and all tokens": (QuantizationSpec(E4M3, PER_TENSOR), InputCast(PER_TENSOR, False, False)),
        "a scale a row and a token": (QuantizationSpec(E4M3, PER_ROW), InputCast(PER_ROW, False, False)),
        "blocks of 128": (QuantizationSpec(E4M3, BLOCK_128X128), InputCast(BLOCK_1X128, False, False)),
        "blocks of 128, powers of two": (
            QuantizationSpec(E4M3, BLOCK_128X128, "pow2"),
            InputCast(BLOCK_1X128, True, False),
        ),
        "MXFP8": (QuantizationSpec(E4M3, BLOCK_1X32, "e8m0"), InputCast(BLOCK_1X32, True, False)),
    }
)
"""What engines cast to without a checkpoint that says so: weight, input."""
_SIZES = (BLOCK_128X128, BLOCK_1X128, PER_ROW, PER_TENSOR, BLOCK_1X32)
_RULES = MappingProxyType(
    {
        ("fp32", 0): "",
        ("pow2", 0): ", powers of two",
        ("pow2", -1): ", powers of two rounded down, which clips",
        ("e8m0_floor", 0): ", powers of two by the OCP rule, which clips",
        ("fp32", -1): ", half of its largest number, which clips",
    }
)
"""Rules of scales: format and octaves of headroom."""
_STEPS = 6
_KINDS = MappingProxyType(
    {
        "attention": r"attn|attention",
        "q, k, v": r"(q|k|v|qkv)_proj$|c_attn$",
        "MLP": r"mlp|feed_forward|experts",
        "gate, up": r"(gate|up|gate_up)_proj$|c_fc$",
        "experts": r"\.experts\.",
        "norms of q and k": r"(q|k)_norm",
        "norms": r"norm|ln_",
        "biases": r"\.bias$",
        "embedding": r"embed|wte|wpe",
        "head": HEAD.pattern,
        "embedding and head": rf"embed|wte|wpe|{HEAD.pattern}",
    }
)
"""Tensors that are left out, or lost, together."""
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True, eq=False)
class Guess:
    """What an experiment supposes of the engine: the state of its forward, its sampler, and what became of its list."""

    state: ModelState | None
    sampler: Sampler = field(default_factory=Sampler)
    shift: int = 0
    """Places by which the rollout's list is late."""
    behind: bool = False
    """Only from some place of a sequence on, which is found for each."""
    scale: float = 1.0
    """By which log-probabilities were divided."""
    offset: float = 0.0
    """Added to log-probabilities."""
    padded: float | None = None
    """A constant for tokens without a log-probability."""
    trainer: bool = False
    """Take what the checkpoint gives for training's log-probabilities."""


Settings = Callable[[Guess, Callable[[Guess], float]], Iterator[tuple[Guess, str]]]


@dataclass(frozen=True)
class Hypothesis:
    """A cause, and the settings under which it may be true."""

    cause: str
    settings: Settings
    """(setting so far, its loss) -> changed settings, in words."""


def hypotheses(
    found: Rollout, ours: Model | None, theirs: Model | None, before: Sequence[tuple[str, Model]]
) -> Iterator[Hypothesis]:
    """All that can be tried with what is given, cheap ones first."""
    for by in (1, -1, 2, -2):
        yield _one("shift", f"the list moved by {by:+d}", shift=by)
    values, counts = found.rollout.unique(return_counts=True)
    if int(counts.max()) > 1:
        constant = float(values[counts.argmax()])
        yield _one("padded", f"{int(counts.max())} tokens have {constant:g}", padded=constant)
    slope, offset = _line(found.recomputed, found.rollout)
    yield _one(
        "scaled", f"log p divided by {1 / slope:.4g}" if slope > 0 else "", scale=1 / slope if slope > 0 else 1.0
    )
    if ours is None:
        yield from _of_lists(found, slope, offset)
        return
    raw = "raw log p divided by {:.4g}"
    raws = _number("scaled", _TEMPERATURES, lambda s, by: replace(_sampled(s, temperature=1.0), scale=by), raw)
    # divided by 1 they are those of another temperature, which is asked next
    yield replace(raws, settings=lambda s, loss: (x for x in raws.settings(s, loss) if abs(x[0].scale - 1) > _NEAR_1))
    yield temperature()
    capped = "as if logits z were {0:.3g} tanh(z / {0:.3g}), which no config says"
    yield _number("not-fp8", _CAPS, lambda s, top: _sampled(s, cap=top), capped)
    yield Hypothesis("processed", partial(_processed, int(ours.config.get("vocab_size") or 0)))
    yield _one("trainer", "the checkpoint's own log-probabilities", trainer=True)
    if found.routes is not None:
        yield _of_state("routes", "the experts of the dump", partial(replace, replay=True))
    for fmt in (E4M3, E5M2):
        for i in (None, *range(int(ours.config.get("num_hidden_layers") or 0))):
            where = f"keys and values {'' if i is None else f'of layer {i} '}in {fmt.name}"
            yield _of_state("kv-cache", where, partial(replace, cache=fmt, cached=i))
    if theirs is not None:
        yield from _of_checkpoint(ours, theirs)
    for name, model in before:
        yield from _stale(ours, name, model)
    yield from _of_engines(ours)


def _one(cause: str, said: str, **changed: object) -> Hypothesis:
    return Hypothesis(cause, lambda setting, _: iter([(replace(setting, **changed), said)]))  # type: ignore[arg-type]


def _of_state(cause: str, said: str, change: Callable[[ModelState], ModelState]) -> Hypothesis:
    def settings(setting: Guess, _: object) -> Iterator[tuple[Guess, str]]:
        if setting.state is not None:
            yield replace(setting, state=change(setting.state)), said

    return Hypothesis(cause, settings)


def _line(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Least squares: y = slope x; and of y - slope x the mean, with a free slope."""
    x, y = x.double(), y.double()
    return float((x * y).sum() / (x * x).sum().clamp_min(1e-30)), float((y - x).mean())


def _of_lists(found: Rollout, slope: float, offset: float) -> Iterator[Hypothesis]:
    """What two lists show without a model: averages."""
    gain = found.rollout - found.recomputed
    if float((gain > -_EXACTLY).double().mean()) > _MOSTLY and offset > 0:
        yield _one("processed", f"the rollout is never less likely, on average {offset:.3g} nats more", offset=offset)
    x, y = found.recomputed.double(), found.rollout.double()
    spread = float(((x - x.mean()) ** 2).sum())
    if spread:
        steep = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
        if steep > 0:
            said = f"log p is steeper by {steep:.3g}, as of logits divided by about {1 / steep:.3g}"
            yield _one("temperature", said, scale=1 / steep, offset=float(y.mean() - steep * x.mean()))


def _number(
    cause: str, bounds: tuple[float, float], at: Callable[[Guess, float], Guess], said: str, steps: int = 16
) -> Hypothesis:
    """A suspect with a positive number: the one that fits best, by a grid of its logarithm and halves of its steps."""

    def settings(setting: Guess, loss: Callable[[Guess], float]) -> Iterator[tuple[Guess, str]]:
        low, high = map(math.log, bounds)
        step, away = (high - low) / steps, lambda power: loss(at(setting, math.exp(power)))
        best = min((low + step * i for i in range(steps + 1)), key=away)
        for _ in range(10 if steps > 8 else 3):
            best = min((best - step, best - step / 2, best, best + step / 2, best + step), key=away)
            step /= 2
        yield at(setting, math.exp(best)), said.format(math.exp(best), setting.sampler.temperature)

    return Hypothesis(cause, settings)


def _sampled(setting: Guess, **changed: float) -> Guess:
    return replace(setting, sampler=replace(setting.sampler, **changed))  # type: ignore[arg-type]


def temperature() -> Hypothesis:
    """Another temperature of logits."""
    said = "logits divided by {:.4g} instead of {:.4g}"
    return _number("temperature", _TEMPERATURES, lambda s, t: _sampled(s, temperature=t), said)


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
        yield _of_state("formula", said, lambda s: replace(s, config=config))
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
        yield _of_state(cause, f"{len(sides)} linears as in the checkpoint", partial(_given, sides))
    if "weights" in sets and "activations" in sets:
        both = {name: theirs.linears[name] for name in {*sets["weights"], *sets["activations"]}}
        yield _of_state("weights", "weights and inputs as in the checkpoint", partial(_given, both))
    other = {n: t for n, t in theirs.plain.items() if n in ours.plain and t.shape == ours.plain[n].shape
             and not torch.equal(t.float(), ours.plain[n].float())}  # fmt: skip
    if other:
        said = f"{len(other)} tensors in high precision as in the checkpoint"
        yield _of_state("plain", said, partial(_given, {}, plain=other))


def _kind(name: str, other: str) -> str:
    return "router" if ROUTER.search(name) else "head" if HEAD.search(name) else other


def _given(
    sides: Mapping[str, Side], state: ModelState, *, plain: Mapping[str, Tensor] = MappingProxyType({}), **others: Any
) -> ModelState:
    return replace(state, linears={**state.linears, **sides}, plain={**state.plain, **plain}, **others)


def groups(names: Sequence[str]) -> dict[str, list[str]]:
    """Linears left out together: kinds, those of one name, one expert everywhere, blocks, the first and last block."""
    found = {kind: [n for n in names if re.search(pattern, n)] for kind, pattern in _KINDS.items()}
    blocks: dict[int, list[str]] = {}
    for name in names:
        if match := _BLOCK.search(name):
            blocks.setdefault(int(match[1]), []).append(name)
            alike = ".".join([word for word in name[match.end() :].split(".") if not word.isdigit()][-2:])
            found.setdefault(alike, []).append(name)
            if (expert := re.search(r"\.experts\.(\d+)\.", name)) and int(expert[1]) < _EXPERTS:
                found.setdefault(f"expert {expert[1]}", []).append(name)
    found |= {f"block {i}": some for i, some in blocks.items()}
    if len(blocks) > 2:
        found["the first and last block"] = blocks[min(blocks)] + blocks[max(blocks)]
    return {kind: some for kind, some in found.items() if some and len(some) < len(names)}


def _modules(names: Iterable[str]) -> dict[str, list[str]]:
    """Linears below each module inside of a block; an expert is one, its linears are none."""
    found: dict[str, list[str]] = {}
    for name in names:
        if match := _BLOCK.search(name):
            words = name[match.end() :].split(".")
            for k in range(1, len(words) + ("experts" not in words)):
                found.setdefault(name[: match.end()] + ".".join(words[:k]), []).append(name)
    return found


def _old(ours: Model, model: Model) -> dict[str, Side]:
    """Weights of an earlier step, cast as today's are."""
    sides = {}
    for key, side in ours.linears.items():
        if (old := model.linears.get(key)) is not None and old.weight.shape == side.weight.shape:
            cast = None if side.cast is None else quantize(old.weight, replace(side.cast.spec, scaling="current"))
            sides[key] = replace(side, weight=old.weight, cast=cast)
    return sides


def _stale(ours: Model, name: str, model: Model) -> Iterator[Hypothesis]:
    """Weights of an earlier step: all of them, or some."""
    sides = _old(ours, model)
    plain = {n: t for n, t in model.plain.items() if n in ours.plain and t.shape == ours.plain[n].shape}
    yield _of_state("stale", f"all weights of {name}", partial(_given, sides, plain=plain))
    yield _of_state("stale", f"all linears of {name}", partial(_given, sides))
    yield _of_state("stale", f"tensors in high precision of {name}", partial(_given, {}, plain=plain))
    for kind, names in groups([*sides, *plain]).items():
        some, others = {n: sides[n] for n in names if n in sides}, {n: plain[n] for n in names if n in plain}
        if kind in ("attention", "MLP"):
            yield _of_state("stale", f"{kind} of {name}, linears", partial(_given, some))
        yield _of_state("stale", f"{kind} of {name}", partial(_given, some, plain=others))


def _of_engines(ours: Model) -> Iterator[Hypothesis]:
    """What engines do, whatever a checkpoint says."""
    casts = {name: side for name, side in ours.linears.items() if side.cast is not None}
    body = {name: side for name, side in ours.linears.items() if _kind(name, "") == ""}
    for what, (spec, inputs) in _CASTS.items():
        if casts:
            rows = {n: replace(side, activations=inputs) for n, side in casts.items() if side.activations != inputs}
            yield _of_state("activations", f"inputs cast with {what}", partial(_given, rows))
        else:
            full = {n: _cast(side, spec, inputs) for n, side in body.items()}
            yield _of_state("layers", f"all linears cast with {what}", partial(_given, full))
            alone = {n: _cast(side, spec, None) for n, side in body.items()}
            yield _of_state("layers", f"all weights cast with {what}, and no inputs", partial(_given, alone))
        for (cause, pattern), fmt in product((("head", HEAD), ("router", ROUTER)), (E4M3, E5M2)):
            chosen = {n: s for n, s in ours.linears.items() if pattern.search(n) and s.cast is None}
            some = {n: _cast(s, replace(spec, format=fmt), inputs) for n, s in chosen.items()}
            if some:
                yield _of_state(cause, f"cast with {what}, weights in {fmt.name}", partial(_given, some))
    if not casts:
        return
    bare = {n: Side(side.weight) for n, side in casts.items()}
    yield _of_state("layers", "the engine casts nothing", partial(_given, bare))
    for kind, names in groups(list(casts)).items():
        yield _of_state("layers", f"{kind} in BF16", partial(_given, {n: bare[n] for n in names}))
    yield from _searched(casts, "", far=True)
    exact = {n: replace(side, activations=None) for n, side in casts.items() if side.activations is not None}
    yield _of_state("activations", "the engine casts no inputs", partial(_given, exact))
    first = next(iter(casts.values()))
    assert first.cast is not None
    left = {n: _cast(s, first.cast.spec, first.activations) for n, s in body.items() if s.cast is None}
    if left:
        yield _of_state("layers", "the linears that training leaves in BF16", partial(_given, left))
    tensor = {n: replace(s, activations=InputCast(PER_TENSOR, False, False)) for n, s in casts.items()}
    for share in _CLIPS:
        said = f"inputs clipped at {share:g} of their largest, as by a scale of other data"
        yield _of_state("activations", said, partial(_given, tensor, clip=share))
    for top in _TOPS:
        said = f"inputs clipped at {top:.3g}, as by one scale for all linears"
        static = InputCast(PER_TENSOR, False, True, top / E4M3.max)
        yield _of_state(
            "activations", said, partial(_given, {n: replace(s, activations=static) for n, s in casts.items()})
        )
    again = {n: _cast(s, s.cast.spec, s.activations) for n, s in casts.items() if s.cast is not None}
    yield _of_state("weights", "codes of bf16(master)", partial(_given, again))


def _searched(casts: Mapping[str, Side], where: str, *, far: bool) -> Iterator[Hypothesis]:
    """Casts of weights, and of inputs, near training's own; `far`: several steps from it, and weights cast twice."""
    first, names = next(iter(casts.values())), tuple(casts)
    assert first.cast is not None
    yield Hypothesis("weights", partial(_search, first.cast.spec, names, f"weights{where}", far))
    if first.activations is not None:
        spec = spec_of(first.activations, first.cast.spec)
        yield Hypothesis("activations", partial(_search, spec, names, f"inputs{where}", far))


def _search(
    spec: QuantizationSpec,
    names: Sequence[str],
    what: str,
    far: bool,
    setting: Guess,
    loss: Callable[[Guess], float],
) -> Iterator[tuple[Guess, str]]:
    """Steps from a rule of casts to the best one beside it, until none is better."""

    def under(one: QuantizationSpec, before: QuantizationSpec | None) -> Guess:
        now = {n: state.linears[n] for n in names}
        cast = {n: _cast(s, one, s.activations, before) if weights else replace(s, inputs=one) for n, s in now.items()}
        return replace(setting, state=_given(cast, state))

    if setting.state is None:
        return
    state, best, least, here, weights = setting.state, setting, math.inf, loss(setting), what.startswith("weights")
    first: QuantizationSpec | None = None
    for step in range(_STEPS if far else 1):
        if step > 1 and least >= here:
            break
        rules = [(one, first) for one in _beside(spec)]
        rules += [(one, None) for one, _ in _CASTS.values()] if weights and far and not step else []  # may be far
        if weights and far and least < here:
            rules += [(spec, QuantizationSpec(fmt, size)) for fmt, size in product((E4M3, E5M2), _SIZES)]
        guesses = [under(*rule) for rule in rules]
        losses = [loss(guess) for guess in guesses]
        if not min(losses) < least:
            break
        place = losses.index(min(losses))
        least, best, (spec, first) = losses[place], guesses[place], rules[place]
    before = "" if first is None else f"{_worded(first)}, and then to "
    yield best, f"{what} cast to {before}{_worded(spec)}"


def _beside(spec: QuantizationSpec) -> Iterator[QuantizationSpec]:
    """Casts that differ from one in format, in block, or in the rule of scales."""
    rule = "pow2" if spec.scale_format == "e8m0" else spec.scale_format, spec.margin
    for fmt, size, one in product((E4M3, E5M2), _SIZES, _RULES):
        if (fmt != spec.format) + (size != spec.granularity) + (one != rule) == 1:
            yield QuantizationSpec(fmt, size, one[0], margin=one[1])  # type: ignore[arg-type]


def _worded(spec: QuantizationSpec) -> str:
    return f"{spec.format.name}[{spec.granularity}]{_RULES[spec.scale_format, spec.margin]}"


def in_part(ours: Model | None, before: Sequence[tuple[str, Model]]) -> Iterator[Hypothesis]:
    """What holds from a place on, in some linears, or beyond a limit: what holds everywhere does not explain."""
    for by in (1, -1, 2, -2):
        yield _one("shift", f"the list moved by {by:+d} from a place on", shift=by, behind=True)
    if ours is None:
        return
    for i in (None, *range(int(ours.config.get("num_hidden_layers") or 0))):
        where = f"keys and values {'' if i is None else f'of layer {i} '}in {E4M3.name}, clipped at {{:.3g}}"
        yield _number("kv-cache", _LIMITS, partial(_cached, i), where, 8)
    casts = {name: side for name, side in ours.linears.items() if side.cast is not None}
    ways = [("stale", f"of {name}", _old(ours, model)) for name, model in before]
    ways += [("layers", "in BF16", {n: Side(side.weight) for n, side in casts.items()})]
    for cause, said, sides in ways:
        for part, names in _modules(sides).items():
            yield _of_state(cause, f"{part} {said}", partial(_given, {n: sides[n] for n in names}))
    body = casts or {name: side for name, side in ours.linears.items() if _kind(name, "") == ""}
    for kind, names in groups(list(body)).items():
        some = {n: body[n] for n in names}
        if casts:
            yield from _searched(some, f" of {kind}", far=False)
        for what, (spec, inputs) in () if casts or "block" in kind else _CASTS.items():
            full = {n: _cast(side, spec, inputs) for n, side in some.items()}
            yield _of_state("layers", f"{kind} cast with {what}", partial(_given, full))


def _cached(layer: int | None, setting: Guess, top: float) -> Guess:
    assert setting.state is not None
    return replace(setting, state=replace(setting.state, cache=E4M3, cached=layer, cache_top=top))


def _cast(side: Side, spec: QuantizationSpec, inputs: InputCast | None, twice: QuantizationSpec | None = None) -> Side:
    """Another cast of a weight, or of what its cast `twice` gives."""
    near = side.weight.bfloat16()
    near = near if twice is None else quantize(near, twice).dequantize(torch.float32)
    cast = quantize(near, replace(spec, scaling="current"))
    return Side(side.weight, cast, inputs, side.layer, arithmetic=EXACT, inputs=side.inputs)
