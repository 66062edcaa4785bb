"""Runs a training script in this process as Python would: `train.py ARGUMENTS` or `-m package.module ARGUMENTS`.

The script is `__main__`, also after its last line, so pickling, spawned workers, threads and atexit handlers work as
usual. Only the modules that are already imported tell the script that something launched it.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import runpy
import sys
import zipfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any


class LaunchError(ValueError):
    """The script or module does not exist, or is no Python code; the message names it."""

    exit_code = 2


def check_script(words: Sequence[str], command: str = "watch") -> None:
    """Refuses words that `run_script` could not run, without running anything.

    Args:
        command: the one that they follow, for the message.
    Raises:
        LaunchError: the words have no script, begin with an option of Python, or name a missing file.
    """
    if not words or list(words) == ["-m"]:
        raise LaunchError(
            f"{command}: got no script; give one after --, such as: ottava {command} -- train.py --lr 1e-3"
        )
    if words[0].startswith("-") and words[0] != "-m":
        raise LaunchError(
            f"{command}: {words[0]!r} is an option of Python; give a script, or -m and a module, after --"
        )
    if words[0] != "-m" and not any(Path(words[0], name).is_file() for name in ("", "__main__.py")):
        raise LaunchError(f"{command}: there is no file {words[0]!r}; give a script, or -m and a module, after --")


def run_script(words: Sequence[str]) -> None:
    """Runs a script to its end.

    Args:
        words: as after `python`: a file, a folder or archive with a __main__.py, or -m and a module; then the
            arguments.
    Raises:
        LaunchError: the file or module does not exist.
        SystemExit: the script exits.
        Exception, KeyboardInterrupt: the script raised it; `own_traceback` gives its traceback.
    """
    check_script(words)
    if words[0] == "-m":
        _run_module(words[1], list(words[2:]))
    else:
        _run_file(words[0], list(words[1:]))


def own_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of a script's error without the frames that launched the script; None if there are no others, as
    for a SyntaxError of the script.

    Example:
        >>> try:
        ...     run_script(["-m", "no.such.module"])
        ... except LaunchError as error:
        ...     own_traceback(error)
    """
    trace = error.__traceback__
    launched = False
    while trace is not None:
        code = trace.tb_frame.f_code
        ours = code.co_filename in (__file__, runpy.__file__, "<frozen runpy>")
        if launched and not ours:
            return trace
        launched = launched or (ours and code.co_name == "run_script")
        trace = trace.tb_next
    return None


def _run_file(name: str, arguments: list[str]) -> None:
    path = Path(name)
    sys.argv = [name, *arguments]
    if path.is_dir() or path.suffix == ".pyc" or zipfile.is_zipfile(path):
        if path.suffix != ".pyc":
            sys.path.pop(0)  # runpy puts the folder or archive there
        runpy.run_path(name, run_name="__main__")
        return
    _first_on_path(str(path.resolve().parent))
    full = os.path.join(os.getcwd(), name)  # not normalized, as in Python since 3.9; sys.argv[0] stays as given
    _run(compile(path.read_bytes(), full, "exec", dont_inherit=True), {"__file__": full, "__cached__": None})


def _run_module(name: str, arguments: list[str]) -> None:
    _first_on_path(str(Path.cwd()))
    spec = _main_spec(name)
    code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]  # _main_spec checked the loader
    if code is None:
        raise LaunchError(f"watch: module {name!r} is no Python code, it cannot be run")
    sys.argv = [str(spec.origin), *arguments]
    names = {"__file__": spec.origin, "__cached__": spec.cached, "__spec__": spec}
    _run(code, {**names, "__package__": spec.parent, "__loader__": spec.loader})


def _main_spec(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the package exists, but an import in it fails
        spec = None
    if spec is None:
        raise LaunchError(f"watch: there is no module {name!r} on sys.path")
    if spec.submodule_search_locations is not None:
        if name.endswith(".__main__"):
            raise LaunchError(f"watch: package {name!r} cannot be run")
        return _main_spec(f"{name}.__main__")
    if not hasattr(spec.loader, "get_code"):
        raise LaunchError(f"watch: module {name!r} is no Python code, it cannot be run")
    return spec


def _first_on_path(folder: str) -> None:
    """Puts the script's folder first on sys.path, in place of the folder of `python -m ottava`."""
    if not sys.flags.safe_path:
        sys.path[0:1] = [folder]


def _run(code: CodeType, names: dict[str, Any]) -> None:
    main = ModuleType("__main__")
    vars(main).update({"__builtins__": builtins, "__spec__": None, "__annotations__": {}, **names})
    sys.modules["__main__"] = main
    exec(code, vars(main))
