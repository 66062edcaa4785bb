"""Ctrl-C and SIGTERM as a request: a long command ends its step, saves, and prints the command that continues it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], signal.Signals | None]]:
    """Holds back the first Ctrl-C or SIGTERM; the yielded function returns it. The next Ctrl-C interrupts.

    A second SIGTERM does nothing: schedulers send several, and later kill a process that takes too long.

    Example:
        >>> with stop_on_interrupt() as stopping:
        ...     stopping()
        ...     signal.raise_signal(signal.SIGINT)
        ...     stopping().name
        'SIGINT'
    """
    request: signal.Signals | None = None

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal request
        request = request or signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    handlers = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def say_saved(stopped: signal.Signals | None, command: str, *, quiet: bool = False) -> int:
    """Prints on stderr that the run is saved and which command continues it, unless `quiet`.

    Returns:
        The exit code of a shell for the signal: 143 for SIGTERM, 130 for Ctrl-C. It is never 0, so that
        `ottava train && ottava export` exports no unfinished run.
    """
    terminated = stopped == signal.SIGTERM
    if not quiet:
        typer.echo(f"{'terminated' if terminated else 'interrupted'} and saved; continue with: {command}", err=True)
    return 128 + (signal.SIGTERM if terminated else signal.SIGINT)
