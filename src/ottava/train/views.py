"""Opens one side of `ottava eval`: a run or a Hugging Face checkpoint, optionally under a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ottava.base.untrusted import UntrustedError, regular_size
from ottava.nn.convert import convert
from ottava.recipe import get_recipe
from ottava.serving.answers import (
    ENGINE,
    View,
    blocks_of,
    bytes_only,
    decode_bytes,
    encode_bytes,
    engine_recipe,
    named,
    of_hugging_face,
)
from ottava.serving.source import Source, of_folder
from ottava.train.checkpoint import CheckpointError, high_precision_weights, restore_weights
from ottava.train.config import DataConfig
from ottava.train.data import ByteCorpus, DataError
from ottava.train.llama import as_llama, model_of, model_of_run, run_of, settings_of
from ottava.train.model import ByteTransformer


def open_view(given: str, recipe: str | None = None) -> View:
    """The view that words of a command line name.

    Args:
        given: a run of `ottava train` or one of its checkpoints, or the folder of a checkpoint of Hugging Face's;
            behind an @ the name of a recipe, or "engine".
        recipe: in place of the name behind the @. None for a run: its own recipe. None for a checkpoint: what its
            weights stand for, in BF16 arithmetic.
    Raises:
        CheckpointError: there is no such folder, or it holds neither.
        ValueError: an unknown recipe, or one that cannot use the codes; two recipes.
    """
    path, own = Path(given), None
    if not path.exists() and "@" in given:
        head, _, own = given.rpartition("@")
        path = Path(head)
    if own and recipe and own != recipe:
        raise ValueError(f"{given} under {recipe}: name one recipe")
    recipe = own or recipe
    if recipe not in (None, ENGINE):
        get_recipe(str(recipe))  # an unknown name ends here
    if not path.is_dir() and not path.is_file():
        raise CheckpointError(f"{path}: does not exist; needed: a run of `ottava train`, or a checkpoint's folder")
    if (run_of(path) / "config.yaml").is_file():
        return _of_run(path, recipe)
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path}: has neither config.yaml (a run) nor config.json (a checkpoint), so nothing says what model it is"
        )
    return _of_bytes(path, recipe) if bytes_only(path) else of_hugging_face(path, recipe)


def _of_run(path: Path, recipe: str | None) -> View:
    if recipe == ENGINE:
        raise ValueError(f"{path}: engines serve checkpoints: run ottava export first, then compare OUT@{ENGINE}")
    model, config, checkpoint = model_of_run(path)
    masters = high_precision_weights(checkpoint)
    if recipe is not None:
        with torch.random.fork_rng(devices=[]):
            model = ByteTransformer(config.model, config.sequence_length)
        restore_weights(checkpoint, model)
        convert(model, recipe)
    model.eval()
    return View(
        named(path, recipe),
        model,
        blocks_of(model),
        as_llama(model, config.model, config.sequence_length, masters=masters),
        encode_bytes,
        decode_bytes,
        mixed=config.dtype == "bfloat16",
        longest=config.sequence_length,
    )


def _of_bytes(path: Path, recipe: str | None) -> View:
    source = of_folder(path)
    chosen = engine_recipe(source) if recipe == ENGINE else recipe
    model, longest = model_of(source, path, chosen)
    model.eval()
    if chosen is not None:
        config, _ = settings_of(source.config, path)
        source = Source(as_llama(model, config, longest).weights, source.config)
    name = named(path, recipe)
    return View(name, model, blocks_of(model), source, encode_bytes, decode_bytes, mixed=True, longest=longest)


def texts_of(paths: Sequence[Path]) -> dict[str, str]:
    """Name -> text of each file; without files the text that `ottava train` holds out by default.

    Raises:
        DataError: a file is missing, or no text.
    """
    if not paths:
        corpus = ByteCorpus.load(DataConfig())
        return {"held-out text": bytes(corpus.validation.numpy()).decode(errors="replace")}
    texts = {}
    for path in paths:
        try:
            regular_size(path)
            texts[str(path)] = path.read_text(encoding="utf-8", errors="replace")
        except (OSError, UntrustedError) as error:
            why = getattr(error, "strerror", None) or error
            raise DataError(f"{path}: cannot be read ({why}); --text takes a text file") from error
    return texts
