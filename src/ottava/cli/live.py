"""`ottava live`, and the process that `watch --live` and `train --live` start: the report of a run that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

_LAST_LOOK = 2.0
"""Seconds in which an open page may load the last state, before the server goes."""


def live(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a run; it may not exist yet.", show_default=False)],
    every: Annotated[float, Option(metavar="S", min=0.1, help="Seconds between two looks at the folder.")] = 2.0,
    port: Annotated[int, Option(metavar="N", min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
    open_it: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False,
) -> int:
    """Show the report of a running training, on this machine alone, and follow it.

    The server listens on 127.0.0.1, reads the run's folder, and makes the page again after a change, in at most a tenth
    of one core's time. The link has a secret; requests without it, of other hosts or other origins, and everything but
    GET are refused. The page follows the run while nobody touches it. A folder that several processes write is one run.

    Ctrl-C ends it. Exit code 0; 2 if RUN is a file or the port is taken.
    """
    from ottava.report.live import LiveReport

    if run.is_file():
        raise typer.BadParameter(f"{run} is a file; live needs the folder of a run")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        server = LiveReport(run, every=every, port=port)
    except OSError as error:
        raise typer.BadParameter(f"port {port} of 127.0.0.1 cannot be used: {error.strerror}; name another") from error
    with server:
        typer.echo(f"ottava live: {server.url}", err=True)
        if open_it:
            typer.launch(server.url)
        while not stop.wait(0.5) and not _orphan():
            pass
        server.refresh()
        threading.Event().wait(_LAST_LOOK)
    return 0


def _orphan() -> bool:
    """Whether the training that started this process is gone without a word, as after SIGKILL."""
    return os.environ.get("OTTAVA_LIVE_PARENT", str(os.getppid())) != str(os.getppid())


@contextmanager
def followed(folder: Path, wanted: bool) -> Iterator[None]:
    """Runs `ottava live FOLDER` beside the block, in a process of its own; its link goes to stderr.

    Example:
        >>> with followed(Path("nowhere"), wanted=False):
        ...     pass
    """
    if not wanted:
        yield
        return
    words = [sys.executable, "-P", "-m", "ottava", "live", str(folder)]  # -P: no module of the current folder
    child = subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | {"OTTAVA_LIVE_PARENT": str(os.getpid())},
    )
    try:
        yield
    finally:
        child.terminate()
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
