"""A checkpoint as it computes, and what two of them answer to a text: loss, KL and agreement by token, error by block.

A `View` is a model with weights, casts and text. Every sum is kept chunk by chunk, so that the noise of the text is
known: intervals are bootstrapped over chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ottava.base.text import progress
from ottava.base.untrusted import UntrustedError, parse_json, read_text
from ottava.nn.convert import convert
from ottava.nn.fp8_checkpoint import load_fp8
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW, PER_TENSOR
from ottava.recipe import GemmRecipe, Recipe, get_recipe
from ottava.serving.source import Source, of_folder
from ottava.serving.trained import of_model

ENGINE = "engine"
"""In place of a recipe: activations cast as an inference engine casts them beside these codes."""
_VOCABULARY = 256


@dataclass(frozen=True, eq=False)
class View:
    """One side of a comparison."""

    name: str
    """For reports: the path, and how it is read."""
    model: nn.Module
    """ids int64 (B, T) -> logits (B, T, V), or an object with `.logits`."""
    blocks: tuple[str, ...]
    """Names of its blocks in order, whose outputs are compared."""
    source: Source
    """Its weights under the names of its checkpoint, with their casts."""
    encode: Callable[[str], list[int]]
    """Text -> ids."""
    decode: Callable[[Sequence[int]], str]
    """Ids -> text."""
    mixed: bool = False
    """Compute under torch's autocast to BF16, as `ottava train` does."""
    longest: int | None = None
    """Tokens that it takes at once; None: any number."""

    def logits(self, ids: Tensor) -> Tensor:
        """ids (B, T) -> fp32 logits (B, T, V)."""
        with torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16, enabled=self.mixed):
            out: Any = self.model(ids)
        values: Tensor = getattr(out, "logits", out)
        return values.float()

    @property
    def casts_weights(self) -> bool:
        """Whether it multiplies codes, or what codes stand for."""
        return any(weight.codes is not None for weight in self.source.weights)

    @property
    def casts_activations(self) -> bool:
        """Whether it casts the input of a linear."""
        return any(weight.input_spec is not None for weight in self.source.weights)


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """The names of the modules in the longest list of equal modules: the blocks of a transformer.

    Example:
        >>> blocks_of(nn.ModuleDict({"layers": nn.ModuleList([nn.Tanh(), nn.Tanh()])}))
        ('layers.0', 'layers.1')
    """
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(one) for one in module}) == 1
    ]
    name, blocks = max(lists, key=lambda pair: len(pair[1]), default=("", ()))
    return tuple(f"{name}.{i}" if name else str(i) for i in range(len(blocks)))


def encode_bytes(text: str) -> list[int]:
    """Text -> its bytes, the tokens of `ottava train`."""
    return list(text.encode())


def decode_bytes(ids: Sequence[int]) -> str:
    """The inverse; bytes that are no text become replacement characters."""
    return bytes(ids).decode(errors="replace")


def engine_recipe(source: Source) -> Recipe:
    """The recipe whose forward is that of an engine beside these codes.

    Raises:
        ValueError: the checkpoint has no codes, or codes that no recipe multiplies.

    Example:
        >>> from ottava.ops.quantize import quantize
        >>> from ottava.numerics.formats import E4M3
        >>> from ottava.numerics.tensor import QuantizationSpec
        >>> from ottava.serving.source import Weight
        >>> cast = quantize(torch.randn(4, 64), QuantizationSpec(E4M3, PER_ROW))
        >>> source = Source((Weight("q.weight", cast.data, True, codes=cast),), {})
        >>> str(engine_recipe(source).fprop.lhs)
        'E4M3[row]'
    """
    if any(weight.input_scale_inv is not None for weight in source.weights):
        raise ValueError("its activations have static scales, which no recipe has: compare it without @engine")
    casts = [weight.cast for weight in source.weights if weight.codes is not None]
    specs = {cast.spec for cast in casts if cast is not None}
    if not specs:
        raise ValueError("it has no FP8 weights, so no engine casts beside them: name a recipe")
    if all(spec.scale_format == "e4m3" for spec in specs):
        return Recipe(ENGINE)  # NVFP4's layout says nothing of activations, so they stay in BF16
    known = {PER_TENSOR: PER_TENSOR, PER_ROW: PER_ROW, BLOCK_1X32: BLOCK_1X32, BLOCK_128X128: BLOCK_1X128}
    inputs = {known.get(spec.granularity) for spec in specs}
    if len(specs) > 1 or None in inputs:
        raise ValueError(f"its weights are {', '.join(sorted(map(str, specs)))}, which no one recipe multiplies")
    spec, size = specs.pop(), inputs.pop()
    assert size is not None
    return Recipe(ENGINE, GemmRecipe(replace(spec, granularity=size), spec))


def of_hugging_face(folder: Path, recipe: str | None = None) -> View:
    """The view of a checkpoint through transformers, in BF16 on the CPU or a recipe's forward.

    Args:
        recipe: name of a recipe, or ENGINE; None: BF16 arithmetic on what the weights stand for.
    Raises:
        UntrustedError: the folder is damaged, or of a model that transformers does not know.
        ValueError: a recipe that cannot use the codes.  ImportError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"{folder}: this model or its tokenizer needs transformers: pip install transformers"
        ) from error
    source = of_folder(folder)
    fp8 = any(weight.codes is not None for weight in source.weights)
    chosen = None if recipe is None else engine_recipe(source) if recipe == ENGINE else get_recipe(recipe)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each family checks its own words, by errors of any kind
        raise UntrustedError(f"{folder}: transformers cannot read its config.json: {error}") from error
    try:
        if fp8:
            vars(config).pop("quantization_config", None)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model.tie_weights()
            load_fp8(model, folder, recipe=chosen or "bf16")
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, local_files_only=True, trust_remote_code=False, use_safetensors=True
            )
            if chosen is not None:
                convert(model, chosen)
    except (RuntimeError, OSError, KeyError, AttributeError) as error:
        raise UntrustedError(f"{folder} cannot be read: {error}") from error
    model.eval()
    encode, decode = _text_of(folder, config.vocab_size)
    if chosen is not None:
        source = Source(of_model(model).weights, source.config)
    longest = getattr(config, "max_position_embeddings", None)
    return View(named(folder, recipe), model, blocks_of(model), source, encode, decode, longest=longest)


def named(folder: Path, recipe: str | None) -> str:
    """The name of a view."""
    return str(folder) if recipe is None else f"{folder} under {recipe}"


def bytes_only(folder: Path) -> bool:
    """Whether a checkpoint's tokens are bytes: 256 of them, and no tokenizer."""
    config = parse_json(read_text(folder / "config.json"))
    return isinstance(config, dict) and config.get("vocab_size") == _VOCABULARY and not _tokenizer(folder)


def _tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))


def _text_of(folder: Path, vocabulary: int) -> tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str]]:
    if not _tokenizer(folder) and vocabulary == _VOCABULARY:
        return encode_bytes, decode_bytes
    from transformers import AutoTokenizer

    if not _tokenizer(folder):
        raise UntrustedError(f"{folder} has no tokenizer, and {vocabulary} tokens: copy its tokenizer.json there")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the Rust library raises plain exceptions
        raise UntrustedError(f"{folder}: its tokenizer cannot be read: {error}") from error
    return partial(tokenizer.encode, add_special_tokens=False), tokenizer.decode


_RESAMPLES = 2000
_BATCH = 8


@dataclass(frozen=True)
class Chunks:
    """A task: chunks of tokens."""

    name: str
    ids: Tensor
    """int64 (C, T + 1); token t + 1 is the target of token t."""


@dataclass(frozen=True)
class ChunkMean:
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
    change: ChunkMean
    """Loss of B minus loss of A."""
    kl: ChunkMean
    """KL(A || B), nats a token."""
    agreement: ChunkMean
    """Share of the tokens whose most likely next token is the same."""

    @property
    def perplexity_a(self) -> float:
        """exp of the loss."""
        return float(torch.tensor(self.loss_a, dtype=torch.float64).exp())

    @property
    def perplexity_b(self) -> float:
        """exp of the loss."""
        return float(torch.tensor(self.loss_b, dtype=torch.float64).exp())


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

    def answers(self, text: str) -> Answers:
        """The means and their intervals."""
        means = {name: getattr(self, name) / self.tokens for name in ("loss_a", "loss_b", "kl", "agreed")}
        return Answers(
            text,
            self.tokens * len(self.kl),
            float(means["loss_a"].mean()),
            float(means["loss_b"].mean()),
            interval(means["loss_b"] - means["loss_a"]),
            interval(means["kl"]),
            interval(means["agreed"]),
        )


def interval(values: Tensor, seed: int = 0) -> ChunkMean:
    """The mean of one value a chunk, and its bootstrap interval (Efron's percentiles, 2,000 resamples).

    Example:
        >>> interval(torch.tensor([1.0, 1.0, 1.0]))
        ChunkMean(mean=1.0, low=1.0, high=1.0)
    """
    values = values.double()
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, len(values), (_RESAMPLES, len(values)), generator=generator)
    means = values[drawn].mean(1)
    low, high = (float(q) for q in means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)))
    return ChunkMean(float(values.mean()), low, high)


def chunks_of(encode: Callable[[str], list[int]], name: str, text: str, *, length: int, most: int) -> Chunks:
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
    return Chunks(name, torch.tensor(different))


def sums_of(a: View, b: View, text: Chunks) -> Sums:
    """Runs both views on all chunks.

    Raises:
        ValueError: they have other vocabularies.
    """
    parts: list[tuple[Tensor, ...]] = []
    for ids in progress(text.ids.split(_BATCH), f"answering {text.name}"):
        inputs, targets = ids[:, :-1], ids[:, 1:]
        p, q = (view.logits(inputs).log_softmax(-1) for view in (a, b))
        if p.shape != q.shape:
            raise ValueError(f"{a.name} has {p.shape[-1]} tokens and {b.name} {q.shape[-1]}: they are other models")
        losses = (-x.gather(-1, targets[..., None])[..., 0].double().sum(1) for x in (p, q))
        each = p.double().exp() * (p.double() - q.double())
        kl = each.masked_fill(p == -torch.inf, 0).sum(-1).sum(1)  # a token that A excludes
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
    with ExitStack() as stack:
        for name in view.blocks:

            def look(_: nn.Module, given: Any, keywords: Any, out: Any, name: str = name) -> None:
                seen[name] = (given[0] if given else keywords["hidden_states"], given, keywords, _stream(out))

            stack.enter_context(view.model.get_submodule(name).register_forward_hook(look, with_kwargs=True))
        yield seen


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
