"""`evaluate`: whether two checkpoints answer alike, and why not (`ottava parity --answers`).

A verdict is made by rules from facts to one of a few sentences, which say what to do. The rules are asked in the order
of `RULES`; the first that applies is the verdict. Weights come first: numbers that no cast explains are a proof. What
depends on the text needs an interval that leaves the tolerance.

A cast to nearest moves a number x by at most half a step: 2^-(m + 1) |x|, m the bits of the mantissa, or half the
smallest subnormal times its scale. A number that lies further away was not made by the cast: a scale or a code is
wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ottava.base.text import columns, listed, progress
from ottava.numerics.scaling import PER_ROW, amax
from ottava.numerics.tensor import QuantizedTensor
from ottava.serving.answers import (
    Answers,
    BlockError,
    View,
    block_errors,
    chunks_of,
    greedy,
    logit_error,
    sums_of,
    total,
)
from ottava.serving.formula import formula_causes
from ottava.serving.source import Source, Weight, same_numbers

TOLERANCE = 0.01
"""Nats a token, of loss and of KL, that count as nothing: 1 % of perplexity."""
_PROMPTS = 3
_PROMPT_SHARE = 2  # half of a chunk is the prompt
_SHOWN = 12


@dataclass(frozen=True)
class Generation:
    """A prompt, and what the two views say next."""

    prompt: str
    a: str
    b: str
    same: int
    """Tokens before the first one that differs."""
    tokens: int


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found."""

    a: str
    b: str
    verdict: Judgement
    answers: Answers
    """Of all texts."""
    texts: tuple[Answers, ...]
    blocks: tuple[BlockError, ...]
    logits: float
    """||b - a|| / ||a|| of the logits of the first chunks."""
    weights: Differences
    generations: tuple[Generation, ...]

    @property
    def good(self) -> bool:
        """Whether A and B answer alike."""
        return self.verdict.good

    @property
    def headline(self) -> str:
        """The answer in one line."""
        return self.verdict.sentence

    @property
    def rows(self) -> tuple[Answers, ...]:
        """Of each text; of several also their sum."""
        return self.texts if len(self.texts) == 1 else (*self.texts, self.answers)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = {"written_by": "ottava parity", "sentence": self.headline, **asdict(self)}
        values["weights"]["tensors"] = [asdict(one) | {"wrong": one.wrong} for one in self.weights.tensors]
        for one, own in zip((values["answers"], *values["texts"]), (self.answers, *self.texts), strict=True):
            one |= {"perplexity_a": own.perplexity_a, "perplexity_b": own.perplexity_b}
        return values

    def __str__(self) -> str:
        lines = [f"A  {self.a}", f"B  {self.b}", "", f"{self.verdict.sentence}."]
        lines += [f"  {line}" for line in self.verdict.evidence]
        lines += [f"  -> {self.verdict.remedy}"] if not self.verdict.good else []
        rows: list[Sequence[object]] = [("", "perplexity A", "perplexity B", "loss B - A", "KL", "same next token")]
        for one in self.rows:
            change, kl, agreed = one.change, one.kl, one.agreement
            rows.append(
                (
                    f"  {one.text}",
                    f"{one.perplexity_a:.4g}",
                    f"{one.perplexity_b:.4g}",
                    f"{change.mean:+.4f} [{change.low:+.4f}, {change.high:+.4f}]",
                    f"{kl.mean:.4f} [{kl.low:.4f}, {kl.high:.4f}]",
                    f"{agreed.mean:.1%} [{agreed.low:.1%}, {agreed.high:.1%}]",
                )
            )
        lines += ["", "Answers; in brackets 95 % of what other texts would give", *columns(*rows)]
        if self.blocks:
            shown = [one for one in self.blocks if one in sorted(self.blocks, key=lambda e: -e.own)[:_SHOWN]]
            table = [(f"  {one.block}", f"{one.total:.3g}", f"{one.own:.3g}") for one in shown]
            lines += ["", "Error behind a block, relative", *columns(("", "so far", "of this block alone"), *table)]
        lines.append(f"  logits  {self.logits:.3g}")
        for one_ in self.generations:
            lines += ["", f"{one_.same} of {one_.tokens} greedy tokens alike", f"  A {one_.a!r}", f"  B {one_.b!r}"]
        return "\n".join(lines)


def evaluate(
    a: View,
    b: View,
    texts: Mapping[str, str],
    *,
    length: int = 128,
    chunks: int = 64,
    tolerance: float = TOLERANCE,
    generate: int = 32,
) -> Evaluation:
    """Compares two views of a model on texts: their weights, their answers, their blocks, and what they generate.

    Args:
        a: how it should be, such as the run.
        b: what is served, or considered.
        texts: name -> text, a task each. A verdict about all tasks and one about some of them differ.
        length: tokens of a chunk; at most what both views take.
        chunks: of each text, spread evenly over it.
        tolerance: nats a token, of loss and KL, that count as nothing.
        generate: tokens of three greedy generations, side by side; 0 for none.
    Returns:
        Evaluation; its intervals are bootstrapped over chunks with a fixed seed, so a repetition gives the same.
    Raises:
        ValueError: no text, a text that is too short, or views of other models.
    """
    if not texts:
        raise ValueError("evaluate: needs a text")
    weights = differences(a.source, b.source)
    length = min(length, *(view.longest or length for view in (a, b)))
    parts = [chunks_of(a.encode, name, text, length=length, most=chunks) for name, text in texts.items()]
    for name, text in texts.items():
        if a.encode(text[:1000]) != b.encode(text[:1000]):
            raise ValueError(f"{a.name} and {b.name} read {name} as other tokens: their tokenizers differ")
    sums = [sums_of(a, b, part) for part in parts]
    every = total(sums).answers("all texts")
    each = tuple(one.answers(part.name) for one, part in zip(sums, parts, strict=True))
    ids = parts[0].ids[:4, :-1]
    blocks = tuple(block_errors(a, b, ids))
    case = Compared(
        weights,
        every if len(each) > 1 else each[0],
        each,
        blocks,
        (a.casts_weights, a.casts_activations),
        (b.casts_weights, b.casts_activations),
        tolerance,
    )
    generations = _generations(a, b, ids[:_PROMPTS, : length // _PROMPT_SHARE], generate) if generate else ()
    return Evaluation(
        a.name, b.name, judge(case), case.answers, each, blocks, logit_error(a, b, ids), weights, generations
    )


def _generations(a: View, b: View, prompts: torch.Tensor, tokens: int) -> tuple[Generation, ...]:
    ours, theirs = (greedy(view, prompts, tokens) for view in (a, b))
    same = (ours == theirs).long().cumprod(1).sum(1)
    return tuple(
        Generation(a.decode(p.tolist()), a.decode(x.tolist()), b.decode(y.tolist()), int(n), tokens)
        for p, x, y, n in zip(prompts, ours, theirs, same, strict=True)
    )


_NAMED = 6
_LEFT_ALONE = ("lm_head", "embed", "gate.weight", "router")


@dataclass(frozen=True)
class Compared:
    """What the rules look at."""

    weights: Differences
    answers: Answers
    """Of all texts."""
    texts: Sequence[Answers]
    blocks: Sequence[BlockError]
    casts_a: tuple[bool, bool]
    """Whether A has FP8 weights, and casts activations."""
    casts_b: tuple[bool, bool]
    tolerance: float = TOLERANCE

    @property
    def matters(self) -> bool:
        """Whether loss or KL left the tolerance, with the noise of the text."""
        return _beyond(self.answers, self.tolerance) or any(_beyond(one, self.tolerance) for one in self.texts)


@dataclass(frozen=True)
class Judgement:
    """The answer."""

    kind: str
    """same, other-weights, wrong-values, other-layers, serve-fp8, too-coarse or unexplained."""
    sentence: str
    evidence: tuple[str, ...]
    remedy: str

    @property
    def good(self) -> bool:
        """Whether there is nothing to repair."""
        return self.kind == "same"


def judge(case: Compared) -> Judgement:
    """The first rule that applies, with its evidence and the noise."""
    found, one = next(verdict for rule in RULES if (verdict := rule(case)) is not None), case.answers
    change = f"{one.change.mean:+.4f} ({one.change.low:+.4f} to {one.change.high:+.4f})"
    kl = f"{one.kl.mean:.4f} ({one.kl.low:.4f} to {one.kl.high:.4f})"
    noise = f"on {one.tokens:,} tokens: loss {change}, KL {kl} nats a token; tolerance {case.tolerance:g}"
    return replace(found, evidence=(*found.evidence, noise))


def _other_weights(case: Compared) -> Judgement | None:
    if not case.weights.elsewhere:
        return None
    return Judgement(
        "other-weights",
        "B holds other weights than A in most tensors, in high precision, too: another step, or another training",
        (f"{len(case.weights.wrong)} of {len(case.weights.tensors)} tensors differ by more than any cast",),
        "To tell what serving changes, compare a checkpoint with the step that it was made of",
    )


def _wrong_values(case: Compared) -> Judgement | None:
    wrong, weights = case.weights.wrong, case.weights
    if not wrong and not weights.only_a and not weights.only_b and not weights.config:
        return None
    evidence = [f"{one.name}: {one.wrong}" for one in wrong[:_NAMED]]
    evidence += [f"and {len(wrong) - _NAMED} more tensors"] if len(wrong) > _NAMED else []
    for side, names in (("A", weights.only_a), ("B", weights.only_b)):
        evidence += [f"only {side} has {listed(names, _NAMED)}"] if names else []
    evidence += [f"config.json: {one}" for one in weights.config]
    what = "weights" if wrong and all(not one.cast_a and not one.cast_b for one in wrong) else "scales or weights"
    if not wrong:
        what = "tensors" if weights.only_a or weights.only_b else "settings of the formula"
    where = f" in {len(wrong)} of {len(weights.tensors)} tensors" if wrong else ""
    return Judgement(
        "wrong-values",
        f"Wrong {what} are read{where}: no cast explains these numbers" if wrong else f"B has other {what} than A",
        tuple(evidence),
        f"Write {listed([one.name for one in wrong], 3) or 'B'} again from A's weights with ottava export",
    )


def _other_layers(case: Compared) -> Judgement | None:
    both = any(case.casts_a) and any(case.casts_b)
    linears = case.weights.linears
    weights_too = case.casts_a[0] and case.casts_b[0]
    evidence: list[str] = []
    if weights_too:
        for side, other, own, there in (("A", "B", "cast_a", "cast_b"), ("B", "A", "cast_b", "cast_a")):
            names = [one.name for one in linears if getattr(one, own) and not getattr(one, there)]
            evidence += [f"only {side} quantizes {listed(names, _NAMED)}; {other} has BF16"] if names else []
        casts = sorted({(one.cast_a, one.cast_b) for one in linears if one.cast_a and one.cast_b})
        casts = [(x, y) for x, y in casts if x != y]
        evidence += [f"A stores {x}, B {y}" for x, y in casts] if case.matters or evidence else []
    elif both:
        return None
    heads = [one.name for one in linears if one.cast_b and not one.cast_a and any(w in one.name for w in _LEFT_ALONE)]
    evidence += [f"B quantizes {listed(heads, _NAMED)}: heads, routers and embeddings stay in BF16"] if heads else []
    if not evidence:
        return None
    return Judgement(
        "other-layers",
        "Layers are quantized differently" + ("" if case.matters else ", which this text does not feel"),
        tuple(dict.fromkeys(evidence)),
        "Give both the same list of layers: ottava export --keep PATTERN, or the engine's list of ignored layers",
    )


def _serve_fp8(case: Compared) -> Judgement | None:
    weights, activations = (a and not b for a, b in zip(case.casts_a, case.casts_b, strict=True))
    if not (weights or activations) or not case.matters:
        return None
    what = "weights" if weights else "activations"
    return Judgement(
        "serve-fp8",
        "Trained in FP8, served in BF16: serve it in FP8",
        (f"A casts {what} to FP8, and B computes with them in high precision",),
        "Serve the codes that training multiplied, with activations cast as in training: ottava export RUN OUT without "
        "--layout, then ottava eval RUN OUT@engine",
    )


def _too_coarse(case: Compared) -> Judgement | None:
    more = any(b and not a for a, b in zip(case.casts_a, case.casts_b, strict=True))
    casts_differ = any((one.cast_a, one.activation_a) != (one.cast_b, one.activation_b) for one in case.weights.linears)
    if not case.matters or not (more or casts_differ):
        return None
    hurt = [one.text for one in case.texts if _beyond(one, case.tolerance)]
    some = 0 < len(hurt) < len(case.texts)  # none: their noise hides it, and only all together show it
    on = f" for {listed(hurt)}" if some else "" if len(case.texts) == 1 else " for all texts"
    worst = sorted(case.blocks, key=lambda one: one.own, reverse=True)[:3]
    evidence = [f"only these texts leave the tolerance: {listed(hurt)}"] if some else []
    shown = ", ".join(f"{one.block} {one.own:.2g}" for one in worst)
    evidence += [f"largest errors of single blocks: {shown}"] if worst else []
    specs = sorted({one.activation_b or one.cast_b for one in case.weights.linears} - {""})
    keep = f", or keep {worst[0].block} in BF16 (first and last blocks first)" if worst else ""
    return Judgement(
        "too-coarse",
        f"The casts of B are too coarse{on}",
        (f"B casts {listed(specs)}; every weight is what its cast makes of A's", *evidence),
        f"Take a recipe with smaller blocks or more bits{keep}",
    )


def _unexplained(case: Compared) -> Judgement | None:
    if not case.matters:
        return None
    jump = next((one for one in case.blocks if not one.own <= case.tolerance), None)  # also NaN
    where = (f"the first block that differs alone is {jump.block}",) if jump else ()
    return Judgement(
        "unexplained",
        "The answers differ, and weights, scales and casts do not explain it",
        where,
        "Compare the code of the two forwards: norms, rotary positions, attention masks, the tokenizer",
    )


def _same_answers(case: Compared) -> Judgement | None:
    codes = [one.same_codes for one in case.weights.linears if one.same_codes is not None]
    evidence = [f"{len(case.weights.tensors)} tensors agree within the error of their casts"]
    evidence += [f"{sum(codes)} of {len(codes)} quantized weights stand for the same numbers"] if codes else []
    return Judgement("same", "A and B answer alike, within the tolerance", tuple(evidence), "Nothing to repair")


RULES: tuple[Callable[[Compared], Judgement | None], ...] = (
    _other_weights,
    _wrong_values,
    _other_layers,
    _serve_fp8,
    _too_coarse,
    _unexplained,
    _same_answers,
)


def _beyond(answers: Answers, tolerance: float) -> bool:
    """Whether the interval of loss or KL lies outside of the tolerance, or is not finite."""
    change = answers.change
    outside = change.low > tolerance or change.high < -tolerance or answers.kl.low > tolerance
    return outside or not math.isfinite(change.mean + answers.kl.mean)


# --- the weights: each number against the error that its cast may make ------------------------------------------------


_BF16 = 2.0**-8  # half a step of BF16, relative to the number
_SLACK = 1.01  # for products and quotients in fp32
_UNRELATED, _ALIKE = 0.5, 0.98
_FACTOR, _MANY = 0.02, 1024
_MOST = 0.9


@dataclass(frozen=True)
class Difference:
    """One tensor that both checkpoints have."""

    name: str
    cast_a: str
    """Spec of the codes; "" in high precision."""
    cast_b: str
    activation_a: str
    """Spec of the cast of its input; "" in high precision."""
    activation_b: str
    linear: bool
    same_codes: bool | None
    """Whether codes and scales stand for the same numbers; None: one has none."""
    outside: float
    """Share of the numbers that lie further apart than their casts may put them."""
    factor: float
    """Least squares: B is about factor x A."""
    correlation: float
    """Cosine of the angle between A and B."""
    inverse: bool
    """Whether B fits A with the inverse of its scales."""
    places: tuple[int, int] = (0, 0)
    """Blocks of B's cast (rows, in high precision) with such a number, and all."""

    @property
    def wrong(self) -> str:
        """What is wrong with the numbers; "" if casts explain the difference.

        Example:
            >>> Difference("w", "", "", "", "", True, None, 1.0, 2.0, 0.99, False).wrong
            'B holds 2 times the numbers of A: a scale is wrong'
        """
        if not self.outside:
            return ""
        bad, places = self.places
        if self.inverse:
            return "B's scales fit when inverted: the inverse scale was stored or taken"
        if self.outside > 1 / 2 and self.correlation > _ALIKE and abs(self.factor - 1) > _FACTOR:
            return f"B holds {self.factor:.3g} times the numbers of A: a scale is wrong"
        if self.correlation < _UNRELATED:
            return f"B holds other numbers (correlation {self.correlation:.2f}): another tensor, order or checkpoint"
        if bad < _MOST * places:
            what = "scales" if self.cast_b else "numbers"
            return f"the {what} of {bad:,} of its {places:,} {'blocks' if self.cast_b else 'rows'} are wrong"
        return f"{self.outside:.0%} of its numbers lie too far from A (correlation {self.correlation:.3f})"


@dataclass(frozen=True)
class Differences:
    """Two checkpoints, tensor by tensor."""

    tensors: tuple[Difference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    config: tuple[str, ...]
    """Keys of config.json that decide the formula and differ, with both values."""

    @property
    def wrong(self) -> list[Difference]:
        """Tensors with numbers that no cast explains."""
        return [one for one in self.tensors if one.wrong]

    @property
    def elsewhere(self) -> bool:
        """Whether most tensors that no side casts differ, too: another step, or another training."""
        plain = [one for one in self.tensors if not one.cast_a and not one.cast_b]
        return len(plain) > 2 and len([one for one in plain if one.wrong]) > len(plain) / 2

    @property
    def linears(self) -> list[Difference]:
        """Those of linears."""
        return [one for one in self.tensors if one.linear]


def differences(a: Source, b: Source) -> Differences:
    """Compares the tensors of two checkpoints under the same name, one at a time; a tied head may be absent.

    Raises:
        ValueError: they share no linear, or a tensor has another shape.

    Example:
        >>> from ottava.serving.source import Weight
        >>> x = torch.randn(64, 64).bfloat16()
        >>> a, b = (Source((Weight("up.weight", values, linear=True),), {}) for values in (x, 2 * x))
        >>> [one.factor for one in differences(a, b).wrong]
        [2.0]
    """
    ours, theirs = ({weight.name: weight for weight in source.weights} for source in (a, b))
    shared = [name for name in ours if name in theirs]
    if not any(ours[name].linear for name in shared):
        raise ValueError("the two checkpoints have no linear of one name in common: they are other models")
    for name in shared:
        if ours[name].shape != theirs[name].shape:
            raise ValueError(
                f"{name} has shape {ours[name].shape} in A and {theirs[name].shape} in B: they are other models"
            )
    only_a, only_b = (
        tuple(name for name in one if name not in other and not name.endswith("lm_head.weight"))
        for one, other in ((ours, theirs), (theirs, ours))
    )
    fields = formula_causes(a.config, b.config, sides=("in A", "in B"))
    config = tuple(said for cause, said in fields if cause == "formula" and not said.startswith("dtype "))
    return Differences(
        tuple(compare(ours[n], theirs[n]) for n in progress(shared, "comparing weights")), only_a, only_b, config
    )


def compare(a: Weight, b: Weight) -> Difference:
    """One tensor of A and of B, which have one shape."""
    cast_a, cast_b = a.cast, b.cast
    x, y = _multiplied(a, cast_a), _multiplied(b, cast_b)
    magnitude = torch.maximum(x.abs(), y.abs())
    if cast_b is not None:
        magnitude = x.abs()  # a wrong scale of B must not widen its own bound
    allowed = _SLACK * (_bound(magnitude, cast_a) + _bound(magnitude, cast_b))
    apart = ~((y - x).abs() <= allowed) & (x != y) & ~(x.isnan() & y.isnan())  # NaN on one side is no cast's
    outside = float(apart.double().mean()) if apart.numel() else 0.0
    normal = allowed <= 0.5 * magnitude  # a cast may flush smaller numbers, which pulls the factor down
    factor, correlation = _fit(x, y)
    if not outside and int(normal.sum()) >= _MANY and abs(_fit(x[normal], y[normal])[0] - 1) > _FACTOR:
        outside = 1.0  # every number is near enough, and yet all lie on one side
    inverse = bool(outside) and cast_b is not None and _fits_inverted(x, cast_a, cast_b)
    return Difference(
        a.name,
        _text(cast_a and cast_a.spec),
        _text(cast_b and cast_b.spec),
        _text(a.input_spec),
        _text(b.input_spec),
        a.linear or b.linear,
        None if cast_a is None or cast_b is None else same_numbers(cast_a, cast_b),
        outside,
        factor,
        correlation,
        inverse,
        _places(apart, cast_b),
    )


def _places(apart: Tensor, cast: QuantizedTensor | None) -> tuple[int, int]:
    if apart.dim() != 2:
        return int(apart.sum()), apart.numel()
    size = cast.spec.granularity if cast is not None and cast.scale_inv.numel() > 1 else PER_ROW
    blocks = amax(apart.float(), size)
    return int(blocks.sum()), blocks.numel()


def _fit(x: Tensor, y: Tensor) -> tuple[float, float]:
    """The least-squares factor from x to y, and their cosine; 1 for zeros."""
    dot, xx, yy = (float((u.double() * v.double()).sum()) for u, v in ((x, y), (x, x), (y, y)))
    return (dot / xx if xx else 1.0), (dot / (xx * yy) ** 0.5 if xx * yy else float(xx == yy))


def _multiplied(weight: Weight, cast: QuantizedTensor | None) -> Tensor:
    return (weight.tensor if cast is None else cast.dequantize(torch.float32)).detach().float().cpu()


def _bound(magnitude: Tensor, cast: QuantizedTensor | None) -> Tensor:
    """How far a cast, from BF16 or to BF16, may move numbers of these magnitudes."""
    near = _BF16 * magnitude
    if cast is None:
        return near
    spec = cast.spec
    steps = 2.0 if spec.rounding == "stochastic" else 1.0
    scale_inv = cast.scale_inv if cast.scale_inv.dtype != torch.uint8 else cast.scale_inv.view(torch.float8_e8m0fnu)
    shape = (cast.shape[0], cast.shape[1])
    floor = spec.granularity.expand(scale_inv.float().cpu(), shape) * spec.format.min_subnormal / 2
    bound = near + steps * torch.maximum(2.0 ** -(spec.format.mantissa_bits + 1) * magnitude, floor)
    top = spec.granularity.expand(scale_inv.float().cpu(), shape) * spec.format.max
    clipped = cast.dequantize(torch.float32).cpu().abs() >= top
    # A scale that is rounded down clips up to an eighth (OCP MX: 512 to 448); one from older steps clips anything.
    return torch.where(clipped, bound.maximum(magnitude / 8) if not spec.predicted else torch.inf, bound)


def _fits_inverted(x: Tensor, cast_a: QuantizedTensor | None, cast: QuantizedTensor) -> bool:
    other = QuantizedTensor(cast.data, 1 / cast.scale_inv.float(), cast.spec, cast.dtype)
    y = other.dequantize(torch.float32).cpu()
    magnitude = x.abs()
    return bool(((y - x).abs() <= _SLACK * (_bound(magnitude, cast_a) + _bound(magnitude, other))).all())


def _text(spec: Any) -> str:
    return "" if spec is None else str(spec)
