"""Runs a training script as Python would, in this process: `train.py ARGUMENTS` or `-m package.module ARGUMENTS`.

The script is `__main__`, now and after its last line, so that pickling, spawned workers, threads and atexit handlers
find what they would find. It cannot tell the difference, but for the modules that are imported already.
"""

from __future__ import annotations

import builtins
import importlib.util
import runpy
import sys
import zipfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any


class LaunchError(ValueError):
    """There is no such script; the message says what was looked for."""

    exit_code = 2


def check_script(words: Sequence[str]) -> None:
    """Refuses what `run_script` cannot run, as far as that shows without running anything.

    Raises:
        LaunchError: no script, an option of Python, or no such file.
    """
    if not words or list(words) == ["-m"]:
        raise LaunchError("watch: got no script; needs one after --, such as: ottava watch -- train.py --lr 1e-3")
    if words[0].startswith("-") and words[0] != "-m":
        raise LaunchError(f"watch: {words[0]!r} is an option of Python; after -- needs a script, or -m and a module")
    if words[0] != "-m" and not Path(words[0]).exists():
        raise LaunchError(f"watch: there is no file {words[0]!r}; needs a script, or -m and a module")


def run_script(words: Sequence[str]) -> None:
    """Runs a script to its end.

    Args:
        words: as after `python`: a file, a folder or archive with a __main__.py, or -m and a module; then its
            arguments.
    Raises:
        LaunchError: no such file or module.
        SystemExit: the script's own.
        Exception, KeyboardInterrupt: whatever the script let pass, with a traceback that begins in the script, see
            `own_traceback`.
    """
    check_script(words)
    if words[0] == "-m":
        _run_module(words[1], list(words[2:]))
    else:
        _run_file(words[0], list(words[1:]))


def own_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of what a script raised, without the frames that launched it; None if only those are in it, as for
    a SyntaxError of the script.

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
    full = str(path.absolute())  # as Python has it since 3.9; sys.argv[0] is as given
    _run(compile(path.read_bytes(), full, "exec", dont_inherit=True), {"__file__": full, "__cached__": None})


def _run_module(name: str, arguments: list[str]) -> None:
    _first_on_path(str(Path.cwd()))
    spec = _main_spec(name)
    code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]  # _main_spec has looked
    if code is None:
        raise LaunchError(f"watch: module {name!r} is no Python code, it cannot be run")
    sys.argv = [str(spec.origin), *arguments]
    known = {"__file__": spec.origin, "__cached__": spec.cached, "__spec__": spec}
    _run(code, {**known, "__package__": spec.parent, "__loader__": spec.loader})


def _main_spec(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # a package of the name is there, and its own import fails
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
    """Python puts the script's folder first, where now that of `python -m ottava` is."""
    if not sys.flags.safe_path:
        sys.path[0:1] = [folder]


def _run(code: CodeType, names: dict[str, Any]) -> None:
    main = ModuleType("__main__")
    vars(main).update({"__builtins__": builtins, "__spec__": None, "__annotations__": {}, **names})
    sys.modules["__main__"] = main
    exec(code, vars(main))
