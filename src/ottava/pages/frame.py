"""Puts a page together: one HTML file that needs nothing else, has no network, and opens anywhere.

A room's template extends frame.html.j2, which has the head, the colours, the looks that all pages share (frame.css,
chart.css) and the drawing that they share (draw.js). A template may include files that lie beside it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup, escape

from ottava import text
from ottava.pages.charts import DARK, LIGHT, css_variables


def render(package: str, template: str, *, filters: Mapping[str, Callable[..., Any]] | None = None, **said: Any) -> str:
    """A page.

    Args:
        package: where the template and what it includes lie.
        template: the name of its file.
        filters: those of the template, beside number, elide, listed, duration, signed, fixed and breakable.
        said: what the template shows; a name that it uses and nobody gave is an error.
    """
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(functools.partial(_source, package)),
    )
    shared = (text.number, text.elide, text.listed, text.duration, text.signed, text.fixed, breakable)
    environment.filters |= {function.__name__: function for function in shared} | dict(filters or {})
    colors = {"light": css_variables(LIGHT), "dark": css_variables(DARK)}
    return environment.get_template(template).render(colors | said).lstrip()


def _source(package: str, name: str) -> str | None:
    """The text of a file in the template's room, or in this one."""
    files = (resources.files(room).joinpath(name) for room in (package, __package__))
    return next((file.read_text(encoding="utf-8") for file in files if file.is_file()), None)


def breakable(name: str) -> Markup:
    """A dotted name that may go on in the next line after a dot.

    Example:
        >>> breakable("layers.0")
        Markup('layers.<wbr>0')
    """
    return escape(name).replace(".", Markup(".<wbr>"))


def script_json(values: Any) -> Markup:
    """JSON that may stand in a script element; numbers that are not finite become null.

    Example:
        >>> script_json({"name": "</script>"})
        Markup('{"name":"\\\\u003c/script>"}')
    """
    return Markup(json.dumps(text.finite(values), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))
