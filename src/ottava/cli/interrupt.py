"""Ctrl-C and SIGTERM as a request: long commands finish their step, save, and say how to go on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], signal.Signals | None]]:
    """Inside, the first Ctrl-C or SIGTERM does nothing but make the yielded function tell it; Ctrl-C then interrupts.

    A second SIGTERM does nothing: schedulers send several, and kill what takes too long.

    Example:
        >>> with stop_on_interrupt() as stopping:
        ...     stopping()
        ...     signal.raise_signal(signal.SIGINT)
        ...     stopping().name
        'SIGINT'
    """
    asked: signal.Signals | None = None

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = asked or signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say_saved(stopped: signal.Signals | None, command: str) -> int:
    """Says on stderr that everything is saved and which command goes on; returns the exit code for that signal.

    0 for SIGTERM, by which a scheduler asks for just this; 130 for Ctrl-C.
    """
    terminated = stopped == signal.SIGTERM
    typer.echo(f"{'terminated' if terminated else 'interrupted'} and saved; go on with: {command}", err=True)
    return 0 if terminated else 130
