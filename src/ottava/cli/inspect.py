"""`ottava inspect`: shows the scaling state in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ottava.base.text import to_json

SCHEMA_VERSION = 1


def inspect(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A safetensors file or a folder of them, or a file of torch.save.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Show the FP8 scaling state of ottava or TransformerEngine in a checkpoint, and check it.

    For each tensor it shows how full the amax history is, the newest and the largest amax, the scale, and how the scale
    follows from the history. It executes no code of the file, and refuses a pickle that would run code.

    Exit code 0; 1 if a state contradicts itself; 4 if the file is damaged, refused or holds no scaling state.
    """
    from ottava.interop.state_file import read_scaling_state

    state = read_scaling_state(file)
    typer.echo(to_json({"schema_version": SCHEMA_VERSION, **state.to_dict()}) if as_json else str(state))
    return 1 if state.problems else 0
