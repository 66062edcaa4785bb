"""What may make a rollout's log-probabilities others than training's: each hypothesis as a switch of one setting.

Those of the dump shift or scale a list, those of the sampler look at logits, and those of the model change a
`ModelState`: what a given checkpoint of the engine has, or what engines are known to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW, PER_TENSOR
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.quantize import quantize
from ottava.serving.causes import HEAD, ROUTER
from ottava.serving.engines import EXACT
from ottava.serving.formula import formula_causes
from ottava.serving.rollout import Rollout
from ottava.serving.sides import Model, Side
from ottava.serving.twin import ModelState
from ottava.weights.layouts import InputCast

_TEMPERATURES = (0.1, 10.0)
_TOP_P = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
_TOP_K = (5, 10, 20, 40, 50, 100, 200, 500)
_PENALTIES = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3)
_EXACTLY = 1e-4
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
_KINDS = MappingProxyType(
    {
        "attention": r"attn|attention",
        "q, k, v": r"(q|k|v|qkv)_proj$|c_attn$",
        "o": r"(o_proj|attn\.c_proj)$",
        "MLP": r"mlp|feed_forward|experts",
        "gate, up": r"(gate|up|gate_up)_proj$|c_fc$",
        "down": r"(down_proj|mlp\.c_proj)$",
        "experts": r"\.experts\.",
    }
)
"""Linears that are left out, or lost, together."""
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class Sampler:
    """What an engine does with logits before it takes log-probabilities."""

    temperature: float = 1.0
    top_k: int = 0
    """Tokens that stay; 0: all."""
    top_p: float = 1.0
    """Probability of those that stay."""
    penalty: float = 1.0
    """By which positive logits of tokens that stand before are divided, and negative ones multiplied."""

    def log_probabilities(self, logits: Tensor, ids: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
        """logits (n, V), of the places before `at` in ids (B, T) -> fp32 (n,): log p of the tokens at `at`.

        A token that does not stay has that of the whole vocabulary.

        Example:
            >>> z, ids = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[2, 0]])
            >>> at = (torch.tensor([0]), torch.tensor([1]))
            >>> [round(float(one.log_probabilities(z, ids, at)), 3) for one in (Sampler(), Sampler(top_k=2))]
            [-0.408, -0.313]
        """
        if self.penalty != 1:
            seen = torch.zeros_like(logits, dtype=torch.bool)
            for i, (row, place) in enumerate(zip(*(one.tolist() for one in at), strict=True)):
                seen[i, ids[row, :place]] = True
            logits = torch.where(seen, torch.where(logits > 0, logits / self.penalty, logits * self.penalty), logits)
        logits, target = logits / self.temperature, ids[at][:, None]
        whole = logits.log_softmax(-1)
        if self.top_k or self.top_p < 1:
            ordered, places = logits.sort(-1, descending=True)
            mass = ordered.softmax(-1).cumsum(-1)
            gone = mass - ordered.softmax(-1) >= self.top_p
            if self.top_k:
                gone[:, self.top_k :] = True
            cut = logits.masked_fill(torch.zeros_like(gone).scatter(-1, places, gone), -torch.inf).log_softmax(-1)
            whole = torch.where(cut.isfinite(), cut, whole)
        return whole.gather(-1, target)[:, 0]


@dataclass(frozen=True, eq=False)
class Guess:
    """What an experiment supposes of the engine: the state of its forward, its sampler, and what became of its list."""

    state: ModelState | None
    sampler: Sampler = field(default_factory=Sampler)
    shift: int = 0
    """Places by which the rollout's list is late."""
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
    yield Hypothesis("temperature", temperatures)
    yield Hypothesis("processed", partial(_processed, int(ours.config.get("vocab_size") or 0)))
    yield _one("trainer", "the checkpoint's own log-probabilities", trainer=True)
    if found.routes is not None:
        yield _of_state("routes", "the experts of the dump", partial(replace, replay=True))
    for fmt in (E4M3, E5M2):
        yield _of_state("kv-cache", f"keys and values in {fmt.name}", partial(replace, cache=fmt))
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


def temperatures(setting: Guess, loss: Callable[[Guess], float]) -> Iterator[tuple[Guess, str]]:
    """The temperature that fits best, by thirds of an interval of its logarithm."""

    def at(power: float) -> Guess:
        return replace(setting, sampler=replace(setting.sampler, temperature=float(torch.tensor(power).exp())))

    low, high = (float(torch.tensor(t).log()) for t in _TEMPERATURES)
    grid = [low + (high - low) * i / 16 for i in range(17)]
    best = min(grid, key=lambda power: loss(at(power)))
    step = (high - low) / 16
    for _ in range(10):
        best = min((best - step, best - step / 2, best, best + step / 2, best + step), key=lambda p: loss(at(p)))
        step /= 2
    found = at(best)
    yield found, f"logits divided by {found.sampler.temperature:.4g} instead of {setting.sampler.temperature:.4g}"


def _processed(vocabulary: int, setting: Guess, _: object) -> Iterator[tuple[Guess, str]]:
    for p in _TOP_P:
        yield replace(setting, sampler=replace(setting.sampler, top_p=p)), f"top-p {p:g}"
    for k in (k for k in _TOP_K if k < vocabulary):
        yield replace(setting, sampler=replace(setting.sampler, top_k=k)), f"top-k {k}"
    for penalty in _PENALTIES:
        yield replace(setting, sampler=replace(setting.sampler, penalty=penalty)), f"a penalty of {penalty:g}"


def _of_checkpoint(ours: Model, theirs: Model) -> Iterator[Hypothesis]:
    """Each way in which the engine's checkpoint differs, by its rules."""
    if causes := formula_causes(ours.config, theirs.config):
        said = min(causes, key=lambda cause: cause[0] != "formula")[1]
        yield _of_state("formula", said, lambda s: replace(s, config=_formula(ours, theirs)))
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
        yield _of_state("plain", said, lambda s: replace(s, plain={**s.plain, **other}))


def _formula(ours: Model, theirs: Model) -> Mapping[str, object]:
    return theirs.config if theirs.config.get("model_type") else ours.config


def _kind(name: str, other: str) -> str:
    return "router" if ROUTER.search(name) else "head" if HEAD.search(name) else other


def _given(sides: Mapping[str, Side], state: ModelState) -> ModelState:
    return replace(state, linears={**state.linears, **sides})


def _groups(names: Sequence[str]) -> dict[str, list[str]]:
    """Linears that are left out together: kinds, blocks, and the first and last block."""
    found = {kind: [n for n in names if re.search(pattern, n)] for kind, pattern in _KINDS.items()}
    blocks: dict[int, list[str]] = {}
    for name in names:
        if match := _BLOCK.search(name):
            blocks.setdefault(int(match[1]), []).append(name)
    found |= {f"block {i}": some for i, some in blocks.items()}
    if len(blocks) > 2:
        found["the first and last block"] = blocks[min(blocks)] + blocks[max(blocks)]
    return {kind: some for kind, some in found.items() if some and len(some) < len(names)}


def _stale(ours: Model, name: str, model: Model) -> Iterator[Hypothesis]:
    """Weights of an earlier step, cast as today's are: all of them, or some."""
    sides = {}
    for key, side in ours.linears.items():
        if (old := model.linears.get(key)) is not None and old.weight.shape == side.weight.shape:
            cast = None if side.cast is None else quantize(old.weight, replace(side.cast.spec, scaling="current"))
            sides[key] = replace(side, weight=old.weight, cast=cast)
    plain = {n: t for n, t in model.plain.items() if n in ours.plain and t.shape == ours.plain[n].shape}

    def change(some: Mapping[str, Side], others: Mapping[str, Tensor], state: ModelState) -> ModelState:
        return replace(state, linears={**state.linears, **some}, plain={**state.plain, **others})

    yield _of_state("stale", f"all weights of {name}", partial(change, sides, plain))
    for kind, names in _groups(list(sides)).items():
        inside = {n: t for n, t in plain.items() if kind.startswith("block") and f".{kind[6:]}." in n}
        yield _of_state("stale", f"{kind} of {name}", partial(change, {n: sides[n] for n in names}, inside))
    embeddings = {n: t for n, t in plain.items() if re.search("embed|wte|wpe", n)}
    norms = {n: t for n, t in plain.items() if n not in embeddings}
    heads = {n: side for n, side in sides.items() if HEAD.search(n)}
    for what, some, others in (
        ("embedding", {}, embeddings),
        ("head", heads, {}),
        ("embedding and head", heads, embeddings),
        ("norms and biases", {}, norms),
        ("tensors in high precision", {}, plain),
    ):
        yield _of_state("stale", f"{what} of {name}", partial(change, some, others))
    yield _of_state("stale", f"all linears of {name}", partial(change, sides, {}))


def _of_engines(ours: Model) -> Iterator[Hypothesis]:
    """What engines do, whatever a checkpoint says."""
    casts = {name: side for name, side in ours.linears.items() if side.cast is not None}
    body = {name: side for name, side in ours.linears.items() if _kind(name, "") == ""}
    for what, (spec, inputs) in _CASTS.items():
        if casts:
            weights = {n: _cast(side, spec, side.activations) for n, side in casts.items()}
            yield _of_state("weights", f"weights cast with {what}", partial(_given, weights))
            rows = {n: replace(side, activations=inputs) for n, side in casts.items() if side.activations != inputs}
            yield _of_state("activations", f"inputs cast with {what}", partial(_given, rows))
        else:
            full = {n: _cast(side, spec, inputs) for n, side in body.items()}
            yield _of_state("layers", f"all linears cast with {what}", partial(_given, full))
            alone = {n: _cast(side, spec, None) for n, side in body.items()}
            yield _of_state("layers", f"all weights cast with {what}, and no inputs", partial(_given, alone))
        for cause, pattern in (("head", HEAD), ("router", ROUTER)):
            some = {n: _cast(s, spec, inputs) for n, s in ours.linears.items() if pattern.search(n) and s.cast is None}
            if some:
                yield _of_state(cause, f"cast with {what}", partial(_given, some))
    if not casts:
        return
    bare = {n: Side(side.weight) for n, side in casts.items()}
    yield _of_state("layers", "the engine casts nothing", partial(_given, bare))
    for kind, names in _groups(list(casts)).items():
        yield _of_state("layers", f"{kind} in BF16", partial(_given, {n: bare[n] for n in names}))
    exact = {n: replace(side, activations=None) for n, side in casts.items() if side.activations is not None}
    yield _of_state("activations", "the engine casts no inputs", partial(_given, exact))
    first = next(iter(casts.values()))
    assert first.cast is not None
    left = {n: _cast(s, first.cast.spec, first.activations) for n, s in body.items() if s.cast is None}
    if left:
        yield _of_state("layers", "the linears that training leaves in BF16", partial(_given, left))
    masters = {n: _cast(s, s.cast.spec, s.activations) for n, s in casts.items() if s.cast is not None}
    yield _of_state("weights", "codes of bf16(master)", partial(_given, masters))


def _cast(side: Side, spec: QuantizationSpec, inputs: InputCast | None) -> Side:
    cast = quantize(side.weight.bfloat16(), replace(spec, scaling="current"))
    return Side(side.weight, cast, inputs, side.layer, arithmetic=EXACT)
