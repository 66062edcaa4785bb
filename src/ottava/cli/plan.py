"""`ottava plan`: what would have been better, from what a run has recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

SCHEMA_VERSION = 1


def plan(
    history: Annotated[
        Path, typer.Option("--history", metavar="RUN", help="Folder of a run whose recipe predicts scales.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Rank amax histories for delayed scaling by what they would have done in a recorded run.

    Replays the amaxes in RUN/amax.jsonl under other window lengths, algorithms and margins. A setting is better if
    fewer casts clip, and then if fewer bits are lost: octaves at the bottom of the format that the scale leaves unused.
    "guard fires": casts in which recipe guarded would have taken the current scale instead of the predicted one.

    Exit code 4 if the run has no recording or it is damaged.
    """
    from ottava.debug.history import replay
    from ottava.debug.recording import RecordingError, read_series

    recording = read_series(history)
    if not bool(recording.amax.any()):
        raise RecordingError(f"{history}: no tensor was cast in its {len(recording.steps)} recorded steps; train some")
    result = replay(recording)
    if as_json:
        values = {"schema_version": SCHEMA_VERSION, "run_dir": str(history), **result.to_dict()}
        typer.echo(json.dumps(values, allow_nan=False))
    else:
        layers = len({tensor.layer for tensor in recording.tensors})
        typer.echo(f"{history}: {len(recording.steps):,} steps, {len(recording.tensors)} tensors of {layers} layers\n")
        typer.echo(str(result))
    return 0
