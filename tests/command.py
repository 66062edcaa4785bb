"""The command line here: `run` raises errors, `said` returns them, `ended` is what a shell sees; servers; scripts."""

from __future__ import annotations

import importlib.util
import sys
import time
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from ottava.cli.app import app, exit_code, main


def run(*words: object) -> int:
    """The exit code of `ottava WORDS`; its errors are raised."""
    return app(list(map(str, words)), standalone_mode=False)  # type: ignore[no-any-return]


def said(*words: object) -> tuple[int, str]:
    """The exit code of `ottava WORDS`, and what it prints, or the message of its error."""
    result = CliRunner().invoke(app, list(map(str, words)), standalone_mode=False)
    if result.exception is not None:
        return exit_code(result.exception), str(result.exception)  # type: ignore[arg-type]  # no BaseException here
    return result.return_value, result.stdout


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


def script(path: Path, *, known: bool = False) -> ModuleType:
    """A script that is no module of a package; known: others may import it by its name from now on."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module = sys.modules.setdefault(path.stem, module) if known else module
    spec.loader.exec_module(module)
    return module
