"""How a cause is looked for: a number that fits, a cast near training's own, the part of a model where it holds.

A search is given the setting so far, and what is left of the KL under another one.
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
from ottava.serving.causes import HEAD
from ottava.serving.engines import EXACT
from ottava.serving.rollout import Sampler
from ottava.serving.sides import Side, spec_of
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
