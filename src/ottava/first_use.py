"""Public names whose modules are imported when somebody first asks for them (PEP 562).

Python imports a package before any module in it, so what `ottava/__init__.py` imports is paid by `ottava --help` and by
each press of the tab key as well: torch and all of the engine, seconds, before the first line of `ottava.cli` runs.

    def __getattr__(name: str) -> Any:
        return first_use(__name__, _HOMES, name)

A public name may not be that of a module beside it: importing the module would put it in the name's place.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def first_use(package: str, homes: Mapping[str, tuple[str, ...]], name: str) -> Any:
    """What `package.name` is; kept in the package, so that this runs once a name.

    Args:
        homes: dotted name of a module -> the public names that it defines.
        name: one of these, or a module of the package, which is imported.
    Raises:
        AttributeError: neither. Python adds the nearest name.

    Example:
        >>> first_use("ottava", {"ottava.formats": ("E4M3",)}, "E4M3").name
        'E4M3'
    """
    home = next((module for module, names in homes.items() if name in names), None)
    if home is not None:
        value = getattr(import_module(home), name)
    elif not name.startswith("_") and find_spec(f"{package}.{name}"):
        value = import_module(f"{package}.{name}")
    else:
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
    setattr(sys.modules[package], name, value)
    return value
