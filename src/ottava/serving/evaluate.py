"""`evaluate`: whether two checkpoints answer alike, and why not (`ottava parity --answers`).

A verdict is made by rules from facts to one of a few sentences, which say what to do. The rules are asked in the order
of `RULES`; the first that applies is the verdict. Weights come first: numbers that no cast explains are a proof. What
depends on the text needs an interval that leaves the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ottava.base.text import columns, listed
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
from ottava.serving.difference import Differences, differences

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
        values = asdict(self)
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
    found = next(verdict for rule in RULES if (verdict := rule(case)) is not None)
    return Judgement(found.kind, found.sentence, (*found.evidence, *_measured(case)), found.remedy)


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
    some = len(case.texts) > 1 and len(hurt) < len(case.texts)
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
    jump = next((one for one in case.blocks if one.own > case.tolerance), None)
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
    """Whether the interval of loss or KL lies outside of the tolerance."""
    change = answers.change
    return change.low > tolerance or change.high < -tolerance or answers.kl.low > tolerance


def _measured(case: Compared) -> list[str]:
    one = case.answers
    change = f"{one.change.mean:+.4f} ({one.change.low:+.4f} to {one.change.high:+.4f})"
    kl = f"{one.kl.mean:.4f} ({one.kl.low:.4f} to {one.kl.high:.4f})"
    return [f"on {one.tokens:,} tokens: loss {change}, KL {kl} nats a token; tolerance {case.tolerance:g}"]
