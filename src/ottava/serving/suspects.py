"""What may be true of an engine: each suspect is a switch of one setting, which an experiment tries.

How a cause is looked for stands first: a number that fits, a cast near training's own, the part of a model where it
holds. A search is given the setting so far, and what is left of the KL under another one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ottava.numerics.formats import E2M1, E4M3, E5M2
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW, PER_TENSOR
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.quantize import quantize
from ottava.serving.causes import HEAD, ROUTER
from ottava.serving.engines import EXACT
from ottava.serving.formula import formula_causes
from ottava.serving.rollout import Rollout, Sampler
from ottava.serving.sides import Model, Side, spec_of
from ottava.serving.twin import ModelState
from ottava.weights.layouts import InputCast

CASTS = MappingProxyType(
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
        "MXFP4": (QuantizationSpec(E2M1, BLOCK_1X32, "e8m0"), InputCast(BLOCK_1X32, True, False)),
        "NVFP4": (QuantizationSpec(E2M1, BLOCK_1X16, "e4m3"), InputCast(BLOCK_1X16, False, False)),
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
_HELPS = 0.95  # share of a KL that the best of a grid may leave
_BEST = 2  # kinds and blocks of which parts are tried
_MANY = 96  # kinds in single blocks that are all tried
_DEEP = 6  # blocks of which every run of neighbours is tried
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
_EXPERTS = 16  # that are tried one by one


@dataclass(frozen=True, eq=False)
class Guess:
    """What an experiment supposes of the engine: the state of its forward, its sampler, and what became of its list."""

    state: ModelState | None
    sampler: Sampler = field(default_factory=Sampler)
    shift: int = 0
    """Places by which the rollout's list is late."""
    behind: bool = False
    """Only from some place of a sequence on, which is found for each."""
    matched: str = ""
    """"places": each sequence's list is late or early by a number of its own; "lists": it is another sequence's."""
    scale: float = 1.0
    """By which log-probabilities were divided."""
    offset: float = 0.0
    """Added to log-probabilities."""
    raised: bool = False
    """Some log-probabilities are higher, by what no setting says."""
    padded: float | None = None
    """A constant for tokens without a log-probability."""
    trainer: bool = False
    """Take what the checkpoint gives for training's log-probabilities."""

    def having(self, change: Callable[[ModelState], ModelState]) -> Guess:
        """The same with a change of the state, which it has."""
        assert self.state is not None
        return replace(self, state=change(self.state))


Settings = Callable[[Guess, Callable[[Guess], float]], Iterator[tuple[Guess, str]]]


@dataclass(frozen=True)
class Hypothesis:
    """A cause, and the settings under which it may be true."""

    cause: str
    settings: Settings
    """(setting so far, the KL that is left under another one) -> changed settings, in words."""
    fitted: bool = False
    """Whether a number was chosen by the answer, so that it must explain most of it."""


def nats(gap: Tensor) -> Tensor:
    """Each token's exp(d) - 1 - d of a difference d of log-probabilities."""
    return torch.expm1(gap) - gap


def guessed(cause: str, said: str, **changed: object) -> Hypothesis:
    """A guess with other fields."""
    return Hypothesis(cause, lambda setting, _: iter([(replace(setting, **changed), said)]))  # type: ignore[arg-type]


def of_state(cause: str, said: str, change: Callable[[ModelState], ModelState]) -> Hypothesis:
    """A guess with another state of the forward."""

    def settings(setting: Guess, _: object) -> Iterator[tuple[Guess, str]]:
        if setting.state is not None:
            yield replace(setting, state=change(setting.state)), said

    return Hypothesis(cause, settings)


def number(
    cause: str, bounds: tuple[float, float], at: Callable[[Guess, float], Guess], said: str, steps: int = 16
) -> Hypothesis:
    """A suspect with a positive number: the one that fits best, by a grid of its logarithm and halves of its steps."""

    def settings(setting: Guess, loss: Callable[[Guess], float]) -> Iterator[tuple[Guess, str]]:
        low, high = map(math.log, bounds)
        step, away = (high - low) / steps, lambda power: loss(at(setting, math.exp(power)))
        best = min((low + step * i for i in range(steps + 1)), key=away)
        if away(best) > _HELPS * loss(setting):
            return
        for _ in range(10 if steps == 16 else 6):
            best = min((best - step, best - step / 2, best, best + step / 2, best + step), key=away)
            step /= 2
        yield at(setting, math.exp(best)), said.format(math.exp(best), setting.sampler.temperature)

    return Hypothesis(cause, settings, fitted=True)


def given(
    sides: Mapping[str, Side], state: ModelState, *, plain: Mapping[str, Tensor] = MappingProxyType({}), **others: Any
) -> ModelState:
    """A state with other linears and tensors."""
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


def _ranges(names: Sequence[str]) -> dict[str, frozenset[str]]:
    """Tensors of blocks that follow each other; of a deep model those that begin or end it, and single ones."""
    block = {name: int(match[1]) for name in names if (match := _BLOCK.search(name))}
    many = sorted(set(block.values()))
    ends = [(a, b) for i, a in enumerate(many) for b in many[i:]]
    if len(many) > _DEEP:
        ends = [(a, b) for a, b in ends if a == b or a == many[0] or b == many[-1]]
    found = {(a, b): frozenset(n for n, at in block.items() if a <= at <= b) for a, b in ends}
    return {f"block {a}" if a == b else f"blocks {a} to {b}": some for (a, b), some in found.items()}


def placed(
    cause: str, said: str, sides: Mapping[str, Side], plain: Mapping[str, Tensor] = MappingProxyType({})
) -> Hypothesis:
    """Where other linears and tensors stand: the kind, or the blocks, that fit best, and then parts of these."""
    names = (*sides, *plain)

    def settings(setting: Guess, loss: Callable[[Guess], float]) -> Iterator[tuple[Guess, str]]:
        if setting.state is None or not names:
            return
        state, left = setting.state, dict[str, float]()

        def under(some: frozenset[str]) -> Guess:
            now = given(
                {n: sides[n] for n in some & sides.keys()}, state, plain={n: plain[n] for n in some - sides.keys()}
            )
            return replace(setting, state=now)

        kinds = {
            kind: frozenset(some) for kind, some in groups(names).items() if not kind.startswith(("block ", "the "))
        }
        ranges = _ranges(names)
        parts = kinds | ranges
        single = [(k, r) for k, r in product(kinds, ranges) if r.startswith("block ")]
        if len(single) <= _MANY:  # one module alone does not show in its kind, nor in its block
            parts |= {f"{k} of {r}": both for k, r in single if (both := kinds[k] & ranges[r])}
        for _ in range(2):
            left |= {label: loss(under(some)) for label, some in parts.items() if label not in left}
            best = sorted(left, key=lambda label: left[label])[:_BEST]
            pairs = [(k, r) for k, r in product(kinds, ranges) if k in best or r in best]
            parts |= {f"{k} of {r}": both for k, r in pairs if (both := kinds[k] & ranges[r])}
        label = min(left, key=lambda label: left[label])
        yield under(parts[label]), f"{label}{said}"

    return Hypothesis(cause, settings)


def searched(casts: Mapping[str, Side], where: str, *, far: bool) -> Iterator[Hypothesis]:
    """Casts of weights, and of inputs, near training's own; `far`: several steps from it, and weights cast twice."""
    first, names = next(iter(casts.values())), tuple(casts)
    assert first.cast is not None
    yield Hypothesis("weights", partial(_search, first.cast.spec, names, f"weights{where}", far))
    if first.activations is not None:
        spec = spec_of(first.activations, first.cast.spec)
        yield Hypothesis("activations", partial(_search, spec, names, f"inputs{where}", far))


def _search(
    spec: QuantizationSpec, names: Sequence[str], what: str, far: bool, setting: Guess, loss: Callable[[Guess], float]
) -> Iterator[tuple[Guess, str]]:
    """Steps from a rule of casts to the best one beside it, until none is better."""

    def under(one: QuantizationSpec, before: QuantizationSpec | None) -> Guess:
        now = {n: state.linears[n] for n in names}
        made = {n: cast(s, one, s.activations, before) if weights else replace(s, inputs=one) for n, s in now.items()}
        return replace(setting, state=given(made, state))

    if setting.state is None:
        return
    state, best, least, here, weights = setting.state, setting, math.inf, loss(setting), what[0] == "w"
    first: QuantizationSpec | None = None
    for step in range(_STEPS if far else 1):
        if step > 1 and least >= here:
            break
        rules = [(one, first) for one in _beside(spec)]
        rules += [(one, None) for one, _ in CASTS.values()] if weights and far and not step else []  # may be far
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
    key = spec.scale_format, spec.margin
    return f"{spec.format.name}[{spec.granularity}]{_RULES.get(key, f', {key[0]}')}"


def cast(side: Side, spec: QuantizationSpec, inputs: InputCast | None, twice: QuantizationSpec | None = None) -> Side:
    """Another cast of a weight, or of what its cast `twice` gives."""
    near = side.weight.bfloat16()
    near = near if twice is None else quantize(near, twice).dequantize(torch.float32)
    made = quantize(near, replace(spec, scaling="current"))
    return Side(side.weight, made, inputs, side.layer, arithmetic=EXACT, inputs=side.inputs)


_READINGS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "the grid of scales transposed": lambda s: s.t().reshape(s.shape),
        "scales of the next block of rows": lambda s: s.roll(-1, 0),
        "scales of the next block of columns": lambda s: s.roll(-1, -1),
        "the exponents of scales alone": lambda s: torch.exp2(s.log2().floor()),
        "scales rounded up to powers of two": lambda s: torch.exp2(s.log2().ceil()),
        "the largest scale for all": lambda s: s.amax().expand_as(s),
        "the first scale for all": lambda s: s.reshape(-1)[0].expand_as(s),
        "scales in BF16": lambda s: s.bfloat16().float(),
    }
)
"""What a kernel may make of stored scales."""
_PAIRS = (("gate_proj", "up_proj"), ("q_proj", "k_proj"), ("k_proj", "v_proj"), ("q_proj", "v_proj"), ("w1", "w3"))


def misread(casts: Mapping[str, Side]) -> Iterator[Hypothesis]:
    """Scales that a kernel reads in another way than they were written."""
    for said, reading in _READINGS.items():
        sides = {n: _read(s, reading) for n, s in casts.items()}
        if any(not torch.equal(s.operand(), casts[n].operand()) for n, s in sides.items()):
            yield of_state("weights", f"of weights, {said}", partial(given, sides))
        inputs = {n: replace(s, scales=reading) for n, s in casts.items() if s.activations is not None}
        if inputs:
            yield of_state("activations", f"of inputs, {said}", partial(given, inputs))
    near = {n: replace(s, arithmetic=replace(s.arithmetic, weights="bf16")) for n, s in casts.items()}
    yield of_state("weights", "weights decoded to BF16", partial(given, near))
    near = {n: replace(s, arithmetic=replace(s.arithmetic, inputs="bf16")) for n, s in casts.items()}
    yield of_state("activations", "inputs scaled in BF16", partial(given, near))
    yield of_state("weights", "weights cut toward zero", partial(given, {n: _cut(s) for n, s in casts.items()}))
    for pair in _PAIRS:
        swapped = {}
        for name, side in casts.items():
            head, _, last = name.rpartition(".")
            other = casts.get(f"{head}.{pair[1 - pair.index(last)]}") if last in pair else None
            cast = None if other is None else other.cast
            if cast is not None and side.cast is not None and cast.scale_inv.shape == side.cast.scale_inv.shape:
                swapped[name] = _read(side, lambda _, scale=cast.scale_inv: scale)  # type: ignore[misc]
        if swapped:
            yield of_state("weights", f"the scales of {' and '.join(pair)} exchanged", partial(given, swapped))


def _cut(side: Side) -> Side:
    """Codes of a cast that rounds toward zero."""
    assert side.cast is not None
    again = quantize(side.weight.bfloat16(), replace(side.cast.spec, scaling="current"))
    codes = again.data.view(torch.uint8)
    far = again.dequantize(torch.float32).abs() > side.weight.bfloat16().float().abs()
    if again.spec.format.bits == 8:
        codes = codes - far.to(torch.uint8)
    return replace(side, cast=replace(again, data=codes.view(again.data.dtype)))


def _read(side: Side, reading: Callable[[Tensor], Tensor]) -> Side:
    assert side.cast is not None
    scale = side.cast.scale_inv
    grid = scale if scale.ndim == 2 else scale.reshape(1, -1)
    made = replace(side.cast, scale_inv=reading(grid).reshape(scale.shape).contiguous())
    return replace(side, cast=made, arithmetic=replace(side.arithmetic, weights="codes"))


# --- the suspects -----------------------------------------------------------------------------------------------------


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
