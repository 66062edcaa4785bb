"""The verdict of `ottava eval`: rules from facts to one of a few sentences, which say what to do.

The rules are asked in the order of `RULES`; the first that applies is the verdict. Weights come first: numbers that no
cast explains are a proof. What depends on the text needs an interval that leaves the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ottava.base.text import listed
from ottava.serving.answers import Answers, BlockError
from ottava.serving.difference import Difference, Differences

TOLERANCE = 0.01
"""Nats a token, of loss and of KL, that count as nothing: 1 % of perplexity."""
_SHOWN = 6
_LEFT_ALONE = ("lm_head", "embed", "gate.weight", "router")


@dataclass(frozen=True)
class Case:
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
class Verdict:
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


def judge(case: Case) -> Verdict:
    """The first rule that applies, with its evidence and the noise."""
    found = next(verdict for rule in RULES if (verdict := rule(case)) is not None)
    return Verdict(found.kind, found.sentence, (*found.evidence, *_measured(case)), found.remedy)


def _other_weights(case: Case) -> Verdict | None:
    if not case.weights.elsewhere:
        return None
    return Verdict(
        "other-weights",
        "B holds other weights than A in most tensors, in high precision, too: another step, or another training",
        (f"{len(case.weights.wrong)} of {len(case.weights.tensors)} tensors differ by more than any cast",),
        "To tell what serving changes, compare a checkpoint with the step that it was made of",
    )


def _wrong_values(case: Case) -> Verdict | None:
    wrong, weights = case.weights.wrong, case.weights
    if not wrong and not weights.only_a and not weights.only_b and not weights.config:
        return None
    evidence = [f"{one.name}: {one.wrong}" for one in wrong[:_SHOWN]]
    evidence += [f"and {len(wrong) - _SHOWN} more tensors"] if len(wrong) > _SHOWN else []
    for side, names in (("A", weights.only_a), ("B", weights.only_b)):
        evidence += [f"only {side} has {listed(names, _SHOWN)}"] if names else []
    evidence += [f"config.json differs in {one}" for one in weights.config]
    what = "weights" if wrong and all(not one.cast_a and not one.cast_b for one in wrong) else "scales or weights"
    if not wrong:
        what = "tensors" if weights.only_a or weights.only_b else "settings of the formula"
    where = f" in {len(wrong)} of {len(weights.tensors)} tensors" if wrong else ""
    return Verdict(
        "wrong-values",
        f"Wrong {what} are read{where}: no cast explains these numbers" if wrong else f"B has other {what} than A",
        tuple(evidence),
        f"Write {listed([one.name for one in wrong], 3) or 'B'} again from A's weights with ottava export",
    )


def _other_layers(case: Case) -> Verdict | None:
    both = any(case.casts_a) and any(case.casts_b)
    linears = case.weights.linears
    weights_too = case.casts_a[0] and case.casts_b[0]
    evidence: list[str] = []
    if weights_too:
        for side, other, pick in (("A", "B", _first), ("B", "A", _second)):
            names = [one.name for one in linears if pick(one) and not pick(one, swapped=True)]
            evidence += [f"only {side} quantizes {listed(names, _SHOWN)}; {other} has BF16"] if names else []
        casts = sorted({(one.cast_a, one.cast_b) for one in linears if one.cast_a and one.cast_b})
        casts = [(x, y) for x, y in casts if x != y]
        evidence += [f"A stores {x}, B {y}" for x, y in casts] if case.matters or evidence else []
    elif both:
        return None
    heads = [one.name for one in linears if one.cast_b and not one.cast_a and any(w in one.name for w in _LEFT_ALONE)]
    evidence += [f"B quantizes {listed(heads, _SHOWN)}: heads, routers and embeddings stay in BF16"] if heads else []
    if not evidence:
        return None
    return Verdict(
        "other-layers",
        "Layers are quantized differently" + ("" if case.matters else ", which this text does not feel"),
        tuple(dict.fromkeys(evidence)),
        "Give both the same list of layers: ottava export --keep PATTERN, or the engine's list of ignored layers",
    )


def _first(one: Difference, swapped: bool = False) -> str:
    return one.cast_b if swapped else one.cast_a


def _second(one: Difference, swapped: bool = False) -> str:
    return one.cast_a if swapped else one.cast_b


def _serve_fp8(case: Case) -> Verdict | None:
    less = [(a, b) for a, b in zip(case.casts_a, case.casts_b, strict=True) if a and not b]
    if not less or not case.matters:
        return None
    weights, _ = (a and not b for a, b in zip(case.casts_a, case.casts_b, strict=True))
    what = "weights" if weights else "activations"
    return Verdict(
        "serve-fp8",
        "Trained in FP8, served in BF16: serve it in FP8",
        (f"A casts {what} to FP8, and B computes with them in high precision",),
        "Serve the codes that training multiplied, with activations cast as in training: ottava export RUN OUT without "
        "--layout, then ottava eval RUN OUT@engine",
    )


def _too_coarse(case: Case) -> Verdict | None:
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
    return Verdict(
        "too-coarse",
        f"The casts of B are too coarse{on}",
        (f"B casts {listed(specs)}; every weight is what its cast makes of A's", *evidence),
        f"Take a recipe with smaller blocks or more bits{keep}",
    )


def _unexplained(case: Case) -> Verdict | None:
    if not case.matters:
        return None
    jump = next((one for one in case.blocks if one.own > case.tolerance), None)
    where = (f"the first block that differs alone is {jump.block}",) if jump else ()
    return Verdict(
        "unexplained",
        "The answers differ, and weights, scales and casts do not explain it",
        where,
        "Compare the code of the two forwards: norms, rotary positions, attention masks, the tokenizer",
    )


def _same_answers(case: Case) -> Verdict | None:
    codes = [one.same_codes for one in case.weights.linears if one.same_codes is not None]
    evidence = [f"{len(case.weights.tensors)} tensors agree within the error of their casts"]
    evidence += [f"{sum(codes)} of {len(codes)} quantized weights stand for the same numbers"] if codes else []
    return Verdict("same", "A and B answer alike, within the tolerance", tuple(evidence), "Nothing to repair")


RULES: tuple[Callable[[Case], Verdict | None], ...] = (
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


def _measured(case: Case) -> list[str]:
    one = case.answers
    change = f"{one.change.mean:+.4f} ({one.change.low:+.4f} to {one.change.high:+.4f})"
    kl = f"{one.kl.mean:.4f} ({one.kl.low:.4f} to {one.kl.high:.4f})"
    return [f"on {one.tokens:,} tokens: loss {change}, KL {kl} nats a token; tolerance {case.tolerance:g}"]
