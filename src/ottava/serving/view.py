"""A checkpoint as it computes: a model with weights, casts and text, which `evaluate` compares with another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ottava.base.untrusted import UntrustedError, parse_json, read_text
from ottava.nn.convert import convert
from ottava.nn.fp8_checkpoint import load_fp8
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW, PER_TENSOR
from ottava.recipe import GemmRecipe, Recipe, get_recipe
from ottava.serving.source import Source, of_folder, of_model

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
    config = transformers.AutoConfig.from_pretrained(folder)
    try:
        if fp8:
            vars(config).pop("quantization_config", None)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model.tie_weights()
            load_fp8(model, folder, recipe=chosen or "bf16")
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            if chosen is not None:
                convert(model, chosen)
    except (RuntimeError, OSError) as error:
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
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return partial(tokenizer.encode, add_special_tokens=False), tokenizer.decode
