"""Ctrl-C and SIGTERM as a request: a long command finishes its step, saves, and prints how to go on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], signal.Signals | None]]:
    """Holds the first Ctrl-C or SIGTERM back: the yielded function returns it. The next Ctrl-C interrupts.

    A second SIGTERM does nothing: schedulers send several, and kill a process that takes too long.

    Example:
        >>> with stop_on_interrupt() as stopping:
        ...     stopping()
        ...     signal.raise_signal(signal.SIGINT)
        ...     stopping().name
        'SIGINT'
    """
    request: signal.Signals | None = None

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal request
        request = request or signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    handlers = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def say_saved(stopped: signal.Signals | None, command: str) -> int:
    """Prints on stderr that the run is saved and which command continues it. Returns the exit code of the signal.

    0 for SIGTERM, because a scheduler asks for a save with it; 130 for Ctrl-C.
    """
    terminated = stopped == signal.SIGTERM
    typer.echo(f"{'terminated' if terminated else 'interrupted'} and saved; go on with: {command}", err=True)
    return 0 if terminated else 130
