"""The command line in this process: `run` lets errors through, `ended` is what a shell sees."""

from __future__ import annotations

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
