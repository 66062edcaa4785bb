"""What two views of a model answer to the same text: loss, KL and agreement by token, and the error behind each block.

Every sum is kept chunk by chunk, so that the noise of the text is known: `Interval`s are bootstrapped over chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ottava.serving.view import View

_RESAMPLES = 2000
_BATCH = 8


@dataclass(frozen=True)
class Text:
    """A task: chunks of tokens."""

    name: str
    ids: Tensor
    """int64 (C, T + 1); token t + 1 is the target of token t."""


@dataclass(frozen=True)
class Interval:
    """A mean over tokens, with the interval that holds 95 % of the means of resampled chunks."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Answers:
    """Means over the tokens of one text, or of all."""

    text: str
    tokens: int
    loss_a: float
    """Nats a token."""
    loss_b: float
    change: Interval
    """Loss of B minus loss of A."""
    kl: Interval
    """KL(A || B), nats a token."""
    agreement: Interval
    """Share of the tokens whose most likely next token is the same."""

    @property
    def perplexity_a(self) -> float:
        """exp of the loss."""
        return math.exp(self.loss_a)

    @property
    def perplexity_b(self) -> float:
        """exp of the loss."""
        return math.exp(self.loss_b)


@dataclass(frozen=True)
class BlockError:
    """||b - a|| / ||a|| of what comes out of a block, over all tokens."""

    block: str
    total: float
    """Each view with its own stream: what the blocks before it did is in it."""
    own: float
    """B's block on A's stream: this block alone."""


@dataclass(frozen=True)
class Sums:
    """Of each chunk, in nats or tokens."""

    loss_a: Tensor
    loss_b: Tensor
    kl: Tensor
    agreed: Tensor
    tokens: int
    """Of a chunk."""

    def answers(self, text: str, seed: int = 0) -> Answers:
        """The means and their intervals."""
        means = {name: getattr(self, name) / self.tokens for name in ("loss_a", "loss_b", "kl", "agreed")}
        return Answers(
            text,
            self.tokens * len(self.kl),
            float(means["loss_a"].mean()),
            float(means["loss_b"].mean()),
            interval(means["loss_b"] - means["loss_a"], seed),
            interval(means["kl"], seed),
            interval(means["agreed"], seed),
        )


def interval(values: Tensor, seed: int = 0) -> Interval:
    """The mean of one value a chunk, and its bootstrap interval (Efron's percentiles, 2,000 resamples).

    Example:
        >>> interval(torch.tensor([1.0, 1.0, 1.0]))
        Interval(mean=1.0, low=1.0, high=1.0)
    """
    values = values.double()
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, len(values), (_RESAMPLES, len(values)), generator=generator)
    means = values[drawn].mean(1)
    low, high = (float(q) for q in means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)))
    return Interval(float(values.mean()), low, high)


def chunks_of(encode: Callable[[str], list[int]], name: str, text: str, *, length: int, most: int) -> Text:
    """A text in chunks of `length` tokens and their targets, at most `most`, spread evenly over it, each once.

    Raises:
        ValueError: it is too short for two chunks, or repeats one: then nothing is known about its noise.
    """
    ids = torch.tensor(encode(text), dtype=torch.int64)
    count = min(most, (len(ids) - 1) // length)
    if count < 2:
        raise ValueError(
            f"{name} has {len(ids):,} tokens; needs at least {2 * length + 1:,}, two chunks: give more text, or a "
            "smaller --length"
        )
    starts = torch.linspace(0, len(ids) - length - 1, count, dtype=torch.float64).long()
    chunks = ids[starts[:, None] + torch.arange(length + 1)].tolist()
    different = list(dict.fromkeys(map(tuple, chunks)))
    if len(different) < 2:
        raise ValueError(f"{name} repeats itself: all its chunks are equal, so its noise is unknown; give another text")
    return Text(name, torch.tensor(different))


def sums_of(a: View, b: View, text: Text) -> Sums:
    """Runs both views on all chunks.

    Raises:
        ValueError: they have other vocabularies.
    """
    parts: list[tuple[Tensor, ...]] = []
    for ids in text.ids.split(_BATCH):
        inputs, targets = ids[:, :-1], ids[:, 1:]
        p, q = (view.logits(inputs).log_softmax(-1) for view in (a, b))
        if p.shape != q.shape:
            raise ValueError(f"{a.name} has {p.shape[-1]} tokens and {b.name} {q.shape[-1]}: they are other models")
        losses = (-x.gather(-1, targets[..., None])[..., 0].double().sum(1) for x in (p, q))
        kl = (p.double().exp() * (p.double() - q.double())).sum(-1).sum(1)
        agreed = (p.argmax(-1) == q.argmax(-1)).double().sum(1)
        parts.append((*losses, kl, agreed))
    loss_a, loss_b, kl, agreed = (torch.cat(column) for column in zip(*parts, strict=True))
    return Sums(loss_a, loss_b, kl, agreed, text.ids.shape[1] - 1)


def block_errors(a: View, b: View, ids: Tensor) -> list[BlockError]:
    """The error behind each block, and that of each block alone; empty if the views have other blocks.

    Args:
        ids: int64 (B, T).
    """
    if len(a.blocks) != len(b.blocks) or not a.blocks:
        return []
    errors = []
    with _seen(a) as ours, _seen(b) as theirs:
        a.logits(ids), b.logits(ids)
    for name, other in zip(a.blocks, b.blocks, strict=True):
        (stream, _, _, wanted), (own, arguments, keywords, got) = ours[name], theirs[other]
        moved = stream.to(own.dtype)  # the other arguments, such as rotary tables, are B's
        arguments = tuple(moved if one is own else one for one in arguments)
        keywords = {key: moved if one is own else one for key, one in keywords.items()}
        with torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16, enabled=b.mixed):
            alone = _stream(b.model.get_submodule(other)(*arguments, **keywords))
        errors.append(BlockError(name, _error(got.float(), wanted.float()), _error(alone.float(), wanted.float())))
    return errors


@contextmanager
def _seen(view: View) -> Iterator[dict[str, tuple[Tensor, Any, Any, Tensor]]]:
    """The stream that goes into each block, all its arguments, and what comes out."""
    seen: dict[str, tuple[Tensor, Any, Any, Tensor]] = {}
    handles = []
    for name in view.blocks:

        def look(_: nn.Module, given: Any, keywords: Any, out: Any, name: str = name) -> None:
            seen[name] = (given[0] if given else keywords["hidden_states"], given, keywords, _stream(out))

        handles.append(view.model.get_submodule(name).register_forward_hook(look, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _stream(out: Any) -> Tensor:
    stream: Tensor = out[0] if isinstance(out, tuple) else out
    return stream


def _error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm().clamp_min(torch.finfo(torch.float32).tiny))


def logit_error(a: View, b: View, ids: Tensor) -> float:
    """||b - a|| / ||a|| of the logits."""
    return _error(b.logits(ids), a.logits(ids))


def greedy(view: View, prompts: Tensor, tokens: int) -> Tensor:
    """Takes the most likely token, again and again, without a cache: (B, T) -> (B, tokens).

    A model that takes fewer tokens at once sees the last ones.
    """
    ids = prompts
    for _ in range(tokens):
        seen = ids if view.longest is None else ids[:, -view.longest :]
        ids = torch.cat((ids, view.logits(seen)[:, -1].argmax(-1, keepdim=True)), 1)
    return ids[:, prompts.shape[1] :]


def total(sums: Sequence[Sums]) -> Sums:
    """All chunks of several texts."""
    joined = {name: torch.cat([getattr(one, name) for one in sums]) for name in ("loss_a", "loss_b", "kl", "agreed")}
    return Sums(**joined, tokens=sums[0].tokens)
