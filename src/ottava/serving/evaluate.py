"""`evaluate`: whether two checkpoints compute the same thing, and why not (`ottava eval`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ottava.base.text import columns
from ottava.serving.answers import Answers, BlockError, block_errors, chunks_of, greedy, logit_error, sums_of, total
from ottava.serving.difference import Differences, differences
from ottava.serving.judge import TOLERANCE, Case, Verdict, judge
from ottava.serving.view import View

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
    verdict: Verdict
    answers: Answers
    """Of all texts."""
    texts: tuple[Answers, ...]
    blocks: tuple[BlockError, ...]
    logits: float
    """||b - a|| / ||a|| of the logits of the first chunks."""
    weights: Differences
    generations: tuple[Generation, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = asdict(self)
        values["weights"]["tensors"] = [asdict(one) | {"wrong": one.wrong} for one in self.weights.tensors]
        for one in (values["answers"], *values["texts"]):
            one |= {"perplexity_a": _exp(one["loss_a"]), "perplexity_b": _exp(one["loss_b"])}
        return values

    def __str__(self) -> str:
        lines = [f"A  {self.a}", f"B  {self.b}", "", f"{self.verdict.sentence}."]
        lines += [f"  {line}" for line in self.verdict.evidence]
        lines += [f"  -> {self.verdict.remedy}"] if not self.verdict.good else []
        rows: list[Sequence[object]] = [("", "perplexity A", "perplexity B", "loss B - A", "KL", "same next token")]
        for one in self.texts if len(self.texts) == 1 else (*self.texts, self.answers):
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
    case = Case(
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


def _exp(loss: float) -> float:
    return float(torch.tensor(loss, dtype=torch.float64).exp())
