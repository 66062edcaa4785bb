"""`ottava eval`: whether two checkpoints compute the same thing, and why not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ottava.base.text import to_json

SCHEMA_VERSION = 1


def evaluate(
    a: Annotated[str, typer.Argument(metavar="A", help="How it should be: a run, a checkpoint, or either @RECIPE.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What is served or considered; CHECKPOINT@engine, too.")],
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="A task; repeatable. Default: held-out text of ottava train."),
    ] = None,
    recipe_a: Annotated[str | None, typer.Option("--recipe-a", metavar="R", help="As A@R.")] = None,
    recipe_b: Annotated[str | None, typer.Option("--recipe-b", metavar="R", help="As B@R.")] = None,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of a chunk of text.")] = 128,
    chunks: Annotated[int, typer.Option("--chunks", min=2, help="Chunks of each text.")] = 64,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, help="Nats a token of loss or KL that count as nothing.")
    ] = 0.01,
    generate: Annotated[int, typer.Option("--generate", min=0, help="Tokens of greedy generations.")] = 32,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write an HTML page with all numbers.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Compare two checkpoints by their weights and by their answers to text, and say what is wrong.

    A and B are runs of `ottava train` (under their own recipe), or checkpoints of Hugging Face's in BF16 or FP8 (what
    the weights stand for, in BF16 arithmetic). RUN@bf16 and CHECKPOINT@rowwise compute under another recipe.
    CHECKPOINT@engine also casts activations, as an inference engine does beside these weights. Models other than those
    of ottava train need transformers.

    The verdict is one of: A and B answer alike; B holds other weights (another step or training); wrong scales or
    weights are read; layers are quantized differently; serve it in FP8; the casts are too coarse, for all texts or
    for some; what differs is unexplained. Brackets hold 95 % of
    what a bootstrap over the chunks of text gives.

    Exit code 0 if they answer alike; 1 for each other verdict; 2 for a wrong recipe or text, or other models; 3 if
    transformers is missing; 4 for a folder that cannot be read.
    """
    from ottava.serving.evaluate import evaluate as compare
    from ottava.train.views import open_view, texts_of

    first, second = open_view(a, recipe_a), open_view(b, recipe_b)
    found = compare(
        first, second, texts_of(text or ()), length=length, chunks=chunks, tolerance=tolerance, generate=generate
    )
    values = {"schema_version": SCHEMA_VERSION, **found.to_dict()}
    if out is not None:
        from ottava.serving.evaluate import write_page

        values["page"] = str(write_page(found, out))
    typer.echo(to_json(values) if as_json else str(found) + (f"\n\n{out}" if out else ""))
    return int(not found.verdict.good)
