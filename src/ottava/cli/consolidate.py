"""`ottava consolidate`: joins a checkpoint of several processes to one safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ottava.base.text import to_json

SCHEMA_VERSION = 1


def consolidate(
    checkpoint: Annotated[Path, typer.Argument(metavar="FOLDER", help="RUN/checkpoints/step-000200, for example.")],
    target: Annotated[Path, typer.Argument(metavar="NEW", help="A folder that does not exist yet.")],
    everything: Annotated[
        bool, typer.Option("--all", help="Also the states of the optimizer and of random generators.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Join the shards of a checkpoint to one file NEW/model.safetensors, with whole tensors.

    FOLDER is a checkpoint of `ottava train` under torchrun, or of torch.distributed.checkpoint with its
    HuggingFaceStorageWriter. Tensors keep their names in the model; FP8 weights stay codes with their scales.

    Exit code 4 if FOLDER is damaged or holds no such files.
    """
    from ottava.train.checkpoint import consolidate as join

    sizes = join(checkpoint, target, keep=everything)
    if as_json:
        typer.echo(to_json({"schema_version": SCHEMA_VERSION, "path": str(target / "model.safetensors"), **sizes}))
    else:
        typer.echo(f"{target / 'model.safetensors'}: {sizes['tensors']} tensors, {sizes['bytes']:,} bytes")
    return 0
