"""`ottava parity`: a certificate that an engine multiplies what training multiplied."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ottava.serving.sides import Text
    from ottava.serving.source import Source


def parity(
    train: Annotated[
        Path,
        typer.Argument(metavar="TRAIN", help="A run of ottava train, one of its checkpoints, or a BF16 checkpoint."),
    ],
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="The folder that the engine reads.")],
    engine: Annotated[
        str, typer.Option("--engine", "-e", metavar="E", help="vllm, sglang, transformers or trtllm.")
    ] = "vllm",
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="R", help="The recipe of the training, if TRAIN is in BF16.")
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option("--engine-config", metavar="F", help="JSON: settings of the engine, in its own words."),
    ] = None,
    ran: Annotated[
        Path | None,
        typer.Option("--receipt", metavar="F", help="receipt.json of the training; a run brings its own."),
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", metavar="F", help="A text to measure the KL on.")] = None,
    kl: Annotated[bool, typer.Option("--kl/--no-kl", help="Measure the KL of each linear that differs, alone.")] = True,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="F", help="Write the certificate as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as one JSON object.")] = False,
) -> int:
    """Compare what training multiplied with what an engine multiplies after it has read a checkpoint.

    Same linears, codes, scales, casts of activations, heads, ties. No engine runs: its rules are emulated. The first
    difference in the order of execution comes first, with its cause. Equal inputs give an equal certificate, byte by
    byte.

    Exit code 0 if they are equal; 1 if not; 2 for a wrong engine or recipe; 4 for a folder that cannot be read.
    """
    from ottava.base.files import replacing
    from ottava.serving.parity import parity as compare

    source, found = _source(train)
    certificate = compare(
        source,
        checkpoint,
        engine,
        recipe=recipe,
        settings=_object(settings),
        ran=_object(ran or found),
        text=_text(source, checkpoint, text) if kl else None,
    )
    if out is not None:
        with replacing(out) as scratch:
            scratch.write_text(certificate.to_json(), encoding="utf-8")
    typer.echo(certificate.to_json().rstrip() if as_json else str(certificate))
    return int(not certificate.equal)


def _source(folder: Path) -> tuple[Source, Path | None]:
    """The train side, and the receipt of its run."""
    from ottava.serving.source import of_folder
    from ottava.train.llama import of_run, run_of

    run = run_of(folder)
    if not (run / "config.yaml").is_file():
        return of_folder(folder), None
    receipt = run / "receipt.json"
    return of_run(folder), receipt if receipt.is_file() else None


def _object(path: Path | None) -> dict[str, Any] | None:
    from ottava.base.untrusted import UntrustedError, parse_json, read_text

    if path is None:
        return None
    found = parse_json(read_text(path))
    if not isinstance(found, dict):
        raise UntrustedError(f"{path}: needs one JSON object")
    return found


def _text(source: Source, checkpoint: Path, path: Path | None) -> Text:
    """Bytes for a model that reads bytes, the tokens of the checkpoint's tokenizer, or always the same tokens."""
    import torch

    from ottava.serving.sides import SAMPLE, Text, made_up

    vocabulary, length = int(source.config.get("vocab_size") or 0), 128
    if vocabulary == 256:
        raw = SAMPLE.encode() if path is None else path.read_bytes()
        name = "a sentence of ottava's" if path is None else path.name
        return Text(torch.tensor(list(raw[:length])), f"{len(raw[:length])} bytes of {name}")
    tokenizer = checkpoint / "tokenizer.json"
    if path is not None and tokenizer.is_file():
        try:
            from tokenizers import Tokenizer  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise ImportError("--text needs a tokenizer; install it with: pip install tokenizers") from error
        ids = Tokenizer.from_file(str(tokenizer)).encode(path.read_text(encoding="utf-8")).ids[:length]
        return Text(torch.tensor(ids), f"{len(ids)} tokens of {path.name}")
    return made_up(max(vocabulary, 1), length)
