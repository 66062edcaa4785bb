"""Ctrl-C and SIGTERM as a request, and its limits."""

from __future__ import annotations

import signal

import pytest

from ottava.cli.interrupt import stop_on_interrupt


def test_first_interrupt_asks_and_the_second_insists() -> None:
    with stop_on_interrupt() as stopping:
        signal.raise_signal(signal.SIGINT)
        assert stopping() is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with stop_on_interrupt() as stopping:
        assert stopping() is None
        for _ in range(2):  # a scheduler may send several
            signal.raise_signal(signal.SIGTERM)
            assert stopping() is signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handler_is_given_back_whatever_happens() -> None:
    def fail() -> None:
        with stop_on_interrupt():
            assert signal.getsignal(signal.SIGINT) is not before[0]
            assert signal.getsignal(signal.SIGTERM) is not before[1]
            raise RuntimeError("inside")

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
