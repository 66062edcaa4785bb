"""`ottava watch`: runs a training script and records its casts."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ottava.watching import Watch

SCHEMA_VERSION = 1
_FAILED, _INTERRUPTED = 1, 130


def watch(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- SCRIPT [ARGUMENTS]", help="The words after `python`: a file, or -m MODULE."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="The run folder; default runs/watch-SCRIPT-TIME.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE.yaml", help="Settings; options overrule them."),
    ] = None,
    every: Annotated[
        int | None, typer.Option(metavar="N", help="Steps from one full look, with all statistics, to the next [50].")
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(metavar="R", help="Recipe to simulate in layers of other packages; repeatable [tensorwise]."),
    ] = None,
    layers: Annotated[
        list[str] | None, typer.Option(metavar="P", help="Only layers with names like '*.down_proj'; repeatable [*].")
    ] = None,
    tensors: Annotated[
        str | None, typer.Option(metavar="T", help="Some of X,W,dY,Y,dX,dW, separated by commas [X,W,dY].")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(metavar="N", help="Measure one row in N [16], at least 32 rows of a tensor; 1: all.")
    ] = None,
    detail: Annotated[
        str | None, typer.Option(metavar="D", help="Record numbers, exponents, blocks or anatomy (of errors) [blocks].")
    ] = None,
    sink: Annotated[
        list[str] | None, typer.Option(metavar="S", help="terminal, tensorboard, wandb, trackio; repeatable.")
    ] = None,
    compiled: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="For compiled layers: warn, or eager (watched steps run uncompiled) [warn]."),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(metavar="HOW", help="mean of micro-batches, or sum if the loop divides their losses (HF) [mean]."),
    ] = None,
    shadow: Annotated[
        int | None, typer.Option(metavar="N", help="Steps from one gradient without casts to the next [100]; 0: none.")
    ] = None,
    replay: Annotated[
        int | None, typer.Option(metavar="N", help="Snapshot every N steps, to replay a spike without casts [0: none].")
    ] = None,
    append: Annotated[bool, typer.Option("--append", help="Continue the watched run in DIR.")] = False,
    step: Annotated[
        int,
        typer.Option(metavar="N", help="With --append: optimizer steps done so far. Later records are removed."),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as one JSON object at the end.")] = False,
) -> int:
    """Run a training script, unchanged, and record what FP8 does to its tensors.

    Example: ottava watch --every 20 --recipe blockwise --out runs/a -- train.py --lr 1e-3

    Any PyTorch script works. In layers of ottava the watch measures the operands of the GEMMs; everywhere else it
    simulates the casts of the recipe. The watch changes no bit of the training. Under torchrun every rank writes its
    own files: torchrun --nproc-per-node 8 -m ottava watch --out runs/a -- train.py

    Then `ottava diagnose DIR` explains the run, and `ottava report DIR` shows it. The exit code is the script's.
    """
    from ottava.watching import watch as start
    from ottava.watching.launch import LaunchError, check_script

    check_script(command)
    if out is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LaunchError("watch: several processes write to one folder; name it with --out DIR")
    options = {
        "every": every,
        "recipes": recipe,
        "layers": layers,
        "tensors": tensors.split(",") if tensors is not None else None,
        "sample": sample,
        "detail": detail,
        "sinks": sink,
        "compiled": compiled,
        "loss": loss,
        "shadow": shadow,
        "replay": replay,
    }
    settings = {name: value for name, value in options.items() if value not in (None, [])}
    session = start(None, out or _folder(command), config, step=step, append=append, **settings)
    _print_summary(session, code := _run(session, command), as_json=as_json)
    return code


def _run(session: Watch, command: list[str]) -> int:
    """Runs the script and returns its exit code. Prints an exception of the script as Python would."""
    from ottava.base.settings import ConfigError
    from ottava.watching.launch import LaunchError, own_traceback, run_script

    try:
        with session:
            try:
                run_script(command)
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise
    except (LaunchError, ConfigError):
        raise
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else _print_exit(end.code)
    except (Exception, KeyboardInterrupt) as error:
        sys.excepthook(type(error), error.with_traceback(own_traceback(error)), error.__traceback__)
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else _FAILED
    return 0


def _folder(command: list[str]) -> Path:
    script = command[1].split(".")[-1] if command[0] == "-m" else Path(command[0]).stem
    return Path("runs") / f"watch-{script}-{datetime.now():%Y%m%d-%H%M%S}"


def _print_exit(message: object) -> int:
    """Prints the text of sys.exit("text"), and returns the exit code 1, as Python does."""
    print(message, file=sys.stderr)
    return _FAILED


def _print_summary(session: Watch, code: int, *, as_json: bool) -> None:
    """Prints the summary of the watch: JSON on stdout, or text on stderr, where the script's output is not."""
    if session.rank != 0:
        return
    coverage = session.writer.manifest["coverage"]
    facts = {
        "schema_version": SCHEMA_VERSION,
        "folder": str(session.folder),
        "steps": session.steps_done,
        "layers": coverage["linear"],
        "layers_seen": coverage["seen"],
        "overhead": session.overhead,
        "script_exit_code": code,
    }
    if as_json:
        typer.echo(json.dumps(facts))
        return
    typer.echo(
        f"ottava watch: {facts['steps']} steps, {facts['layers_seen']} of {facts['layers']} linear layers seen, "
        f"{100 * session.overhead:.1f}% of the time; {session.folder}",
        err=True,
    )
    if not session.steps_done:
        typer.echo(
            "ottava watch: no torch optimizer finished a step in this process, so the watch recorded nothing. It does "
            "not follow a script into processes that the script starts (mp.spawn): use torchrun",
            err=True,
        )
