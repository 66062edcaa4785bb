"""`ottava inspect`: what is in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ottava.text import to_json

SCHEMA_VERSION = 1


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A safetensors file, or one of torch.save.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Show the FP8 scaling state in a checkpoint, of ottava or TransformerEngine, and check it.

    Per tensor: how full its amax history is, the newest and the largest amax, the scale, and how that scale follows
    from the history. Nothing in the file is executed; a pickle that wants to run something is refused.

    Exit code 0; 1 if a state contradicts itself; 4 if the file is damaged, refused or holds no scaling state.
    """
    from ottava.debug.state_file import read_scaling_state

    found = read_scaling_state(file)
    typer.echo(to_json({"schema_version": SCHEMA_VERSION, **found.to_dict()}) if as_json else str(found))
    return 1 if found.problems else 0
