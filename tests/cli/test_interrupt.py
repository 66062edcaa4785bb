"""Ctrl-C as a request, and its limits."""

from __future__ import annotations

import signal

import pytest

from ottava.cli.interrupt import stop_on_interrupt


def test_first_interrupt_asks_and_the_second_insists() -> None:
    with stop_on_interrupt() as stopping:
        assert not stopping()
        signal.raise_signal(signal.SIGINT)
        assert stopping()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handler_is_given_back_whatever_happens() -> None:
    def fail() -> None:
        with stop_on_interrupt():
            assert signal.getsignal(signal.SIGINT) is not before
            raise RuntimeError("inside")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert signal.getsignal(signal.SIGINT) is before
