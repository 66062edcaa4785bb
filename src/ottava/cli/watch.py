"""`ottava watch`: a training script, watched."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ottava.debug.watch import Watch

SCHEMA_VERSION = 1
_FAILED, _INTERRUPTED = 1, 130


def watch(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- SCRIPT [ARGUMENTS]", help="As after `python`: a file, or -m MODULE."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="The run folder; default runs/watch-SCRIPT-TIME.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE.yaml", help="Settings; options have the last word."),
    ] = None,
    every: Annotated[
        int | None, typer.Option(metavar="N", help="Steps from one full look, at all statistics, to the next [50].")
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(metavar="R", help="Recipe to simulate in layers that are not ottava's; repeatable [tensorwise]."),
    ] = None,
    layers: Annotated[
        list[str] | None, typer.Option(metavar="P", help="Only layers of such names, as '*.down_proj'; repeatable [*].")
    ] = None,
    tensors: Annotated[
        str | None, typer.Option(metavar="T", help="Which of X,W,dY,Y,dX,dW, with commas between [X,W,dY].")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(metavar="N", help="Measure one row in N [16], at least 32 of a tensor; 1: all.")
    ] = None,
    detail: Annotated[
        str | None, typer.Option(metavar="D", help="How much: numbers, exponents, blocks (for what-if) [blocks].")
    ] = None,
    sink: Annotated[
        list[str] | None, typer.Option(metavar="S", help="terminal, tensorboard, wandb, trackio; repeatable.")
    ] = None,
    compiled: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="Compiled layers: warn that they go unseen, or look at them eager [warn]."),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(metavar="HOW", help="mean of micro-batches, or sum where the loop divides them (HF) [mean]."),
    ] = None,
    append: Annotated[bool, typer.Option("--append", help="Go on in a folder that holds a watched run.")] = False,
    step: Annotated[
        int,
        typer.Option(metavar="N", help="With --append: optimizer steps done so far; later ones are taken off record."),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was watched as one JSON object, last.")] = False,
) -> int:
    """Run a training script, unchanged, and record what FP8 does to its tensors.

    Example: ottava watch --every 20 --recipe blockwise --out runs/a -- train.py --lr 1e-3

    Any PyTorch script will do: layers of ottava show the operands that their GEMMs get, all others what the recipe
    would make of them. Training is bit for bit what it is unwatched. Under torchrun every rank writes its own files:
    torchrun --nproc-per-node 8 -m ottava watch --out runs/a -- train.py

    Afterwards: ottava diagnose DIR says what is wrong, ottava report DIR shows it. The exit code is the script's.
    """
    from ottava.debug.watch import watch as start
    from ottava.debug.watch.launch import LaunchError, check_script

    check_script(command)
    if out is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LaunchError("watch: several processes write to one folder; say which, with --out DIR")
    given = {
        "every": every,
        "recipes": recipe,
        "layers": layers,
        "tensors": tensors.split(",") if tensors is not None else None,
        "sample": sample,
        "detail": detail,
        "sinks": sink,
        "compiled": compiled,
        "loss": loss,
    }
    settings = {name: value for name, value in given.items() if value not in (None, [])}
    seen = start(None, out or _folder(command), config, step=step, append=append, **settings)
    _tell(seen, code := _run(seen, command), as_json=as_json)
    return code


def _run(seen: Watch, command: list[str]) -> int:
    """Runs the script to its end, and says what it died of as Python does; returns its exit code."""
    from ottava.debug.watch.launch import LaunchError, own_traceback, run_script
    from ottava.settings import ConfigError

    try:
        with seen:
            try:
                run_script(command)
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise
    except (LaunchError, ConfigError):
        raise
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else _said(end.code)
    except (Exception, KeyboardInterrupt) as error:
        sys.excepthook(type(error), error.with_traceback(own_traceback(error)), error.__traceback__)
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else _FAILED
    return 0


def _folder(command: list[str]) -> Path:
    script = command[1].split(".")[-1] if command[0] == "-m" else Path(command[0]).stem
    return Path("runs") / f"watch-{script}-{datetime.now():%Y%m%d-%H%M%S}"


def _said(message: object) -> int:
    """sys.exit("text") prints the text and means 1."""
    print(message, file=sys.stderr)
    return _FAILED


def _tell(seen: Watch, code: int, *, as_json: bool) -> None:
    """What was watched: on stdout as JSON, or on stderr, out of the way of what the script prints."""
    if seen.rank != 0:
        return
    coverage = seen.writer.manifest["coverage"]
    facts = {
        "schema_version": SCHEMA_VERSION,
        "folder": str(seen.folder),
        "steps": seen.steps_done,
        "layers": coverage["linear"],
        "layers_seen": coverage["seen"],
        "overhead": seen.overhead,
        "script_exit_code": code,
    }
    if as_json:
        typer.echo(json.dumps(facts))
        return
    typer.echo(
        f"ottava watch: {facts['steps']} steps, {facts['layers_seen']} of {facts['layers']} linear layers seen, "
        f"{100 * seen.overhead:.1f}% of the time; {seen.folder}",
        err=True,
    )
    if not seen.steps_done:
        typer.echo(
            "ottava watch: no step of a torch optimizer ended in this process, so nothing is on record. A script that "
            "starts its own training processes (mp.spawn) is not followed into them: start it with torchrun",
            err=True,
        )
