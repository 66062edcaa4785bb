"""Loads a new library in a process of its own, before anything else does and before it is published; `native.build`
runs it.

A library that ends whoever loads it (cut off by its compiler, an instruction that the CPU does not have) ends this
process, and not the user's at this and every later start. Imports nothing but the standard library: it takes 0.05 s.

    python trial.py LIBRARY [SCRIPT]      runs SCRIPT LIBRARY once it is loaded; without one prints "ok"
"""

from __future__ import annotations

import ctypes
import runpy
import sys

NOT_LOADED = 3
"""The exit code that says so; standard output says why."""


def main(library: str, *script: str) -> int:
    """The exit code.

    Example:
        >>> main("no_such_library.so")
        no_such_library.so: cannot open shared object file: No such file or directory
        3
    """
    try:
        ctypes.CDLL(library)
    except OSError as error:
        print(error)
        return NOT_LOADED
    if not script:
        print("ok")
        return 0
    sys.argv = [script[0], library]
    runpy.run_path(script[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
