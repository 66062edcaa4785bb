"""Ctrl-C as a request: long commands finish their step, save, and say how to go on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C does nothing but make the yielded function true; the second interrupts at once.

    Example:
        >>> with stop_on_interrupt() as stopping:
        ...     stopping()
        ...     signal.raise_signal(signal.SIGINT)
        ...     stopping()
        False
        True
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
