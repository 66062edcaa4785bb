"""What every room may use: errors, files, settings, texts, and how to read what other people wrote."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__version__ = "0.2.0"  # of ottava: a checkout on PYTHONPATH has no metadata


def first_use(package: str, homes: Mapping[str, tuple[str, ...]], name: str) -> Any:
    """Imports the module of a public name when code first uses the name (PEP 562); returns `package.name`.

    Python imports a package before any module in it. If `ottava/__init__.py` imported torch and the engine, `ottava
    --help` and each press of the tab key would wait for them, seconds before the first line of `ottava.cli` runs.

        def __getattr__(name: str) -> Any:
            return first_use(__name__, _HOMES, name)

    The package keeps the value, so this runs once for each name. No public name may equal the name of a module beside
    it: importing that module would overwrite the name.

    Args:
        homes: dotted name of a module -> its public names.
        name: one of these, or a module of the package.
    Raises:
        AttributeError: `name` is neither. Python adds the nearest name to the message.

    Example:
        >>> first_use("ottava", {"ottava.numerics.formats": ("E4M3",)}, "E4M3").name
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
