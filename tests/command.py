"""The command line in this process: `run` lets errors through, `ended` is what a shell sees; and its servers."""

from __future__ import annotations

import time
import urllib.request

import pytest

from ottava.cli.app import app, main


def run(*words: object) -> int:
    """The exit code of `ottava WORDS`; its errors are raised."""
    return app(list(map(str, words)), standalone_mode=False)  # type: ignore[no-any-return]


def ended(*words: object) -> int:
    """The exit code of `ottava WORDS`, with errors on stderr."""
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, words)))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def gone(url: str, seconds: float = 600) -> bool:
    """Whether nothing answers at an address, now or within that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url).close()
        except OSError:
            return True
        time.sleep(0.5)
    return False
