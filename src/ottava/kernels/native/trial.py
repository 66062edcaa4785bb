"""Loads a new library in a separate process, before `native.build` publishes it.

A truncated library, or one with an instruction that the CPU lacks, crashes this process, and not the user's at this and
every later start. The script imports only the standard library and takes 0.05 s.

    python trial.py LIBRARY [SCRIPT]      loads LIBRARY, then runs SCRIPT LIBRARY; without a script prints "ok"
"""

from __future__ import annotations

import ctypes
import runpy
import sys

NOT_LOADED = 3
"""The exit code for a library that does not load; standard output gives the reason."""


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
