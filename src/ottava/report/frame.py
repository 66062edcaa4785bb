"""Renders a page: one HTML file that needs no other file and no network.

The template of a room extends frame.html.j2. The frame holds the head, the colours, the shared style (frame.css,
chart.css) and the shared drawing code (draw.js). A template may include files from its own folder.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from ottava.base import text
from ottava.base.files import replacing
from ottava.base.language import Language
from ottava.report import charts
from ottava.report.charts import DARK, LIGHT, Bars, Chart, Forest, css_variables


def render(package: str, template: str, **values: Any) -> str:
    """Renders a template, which has the filters of `text`, breakable, marked and figure.

    Args:
        package: the package of the template and of its included files.
        template: the name of its file.
        values: the values for the template. A missing name is an error.
    """
    colors = {"light": css_variables(LIGHT), "dark": css_variables(DARK)}
    return _environment(package).get_template(template).render(colors | values).lstrip()


@functools.cache
def _environment(package: str) -> jinja2.Environment:
    """The templates of a package, each compiled once: that takes as long as a page of 100 layers takes to fill."""
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(functools.partial(_source, package)),
    )
    shared = (text.number, text.elide, text.listed, text.duration, text.signed, text.fixed, breakable, marked, figure)
    environment.filters |= {function.__name__: function for function in shared}
    return environment


def _source(package: str, name: str) -> str | None:
    """The text of a file in the template's package, or else in this package."""
    files = (resources.files(room).joinpath(name) for room in (package, __package__))
    return next((file.read_text(encoding="utf-8") for file in files if file.is_file()), None)


def figure(chart: Chart | Forest | Bars, name: str, caption: str = "") -> Markup:
    """A chart as a figure of a page: once as wide as it is, and once for a phone, where its text would be too small.

    Args:
        name: an id, unique in the page; begins with a letter.
        caption: a sentence below.

    Example:
        >>> figure(Chart(title="t", description="d", x_label="x", y_label="y", lines=[]), "loss").count("<svg")
        2
    """
    pictures = []
    for one, width in ((name, chart.width), (f"{name}-narrow", _PHONE)):
        sized = replace(chart, width=width)
        if isinstance(sized, Chart):
            pictures.append(charts.render(sized, chart_id=one, tooltips=width == chart.width))
        elif isinstance(sized, Forest):
            pictures.append(charts.forest(sized, chart_id=one))
        else:
            pictures.append(charts.bars(sized, chart_id=one))
    below = Markup("<figcaption>{}</figcaption>").format(caption) if caption else ""
    return Markup('<figure><div class="as-wide">{}</div><div class="narrow">{}</div>{}</figure>').format(
        *map(Markup, pictures), below
    )


_PHONE = 350


def write_page(path: Path, page: str, language: str = "en") -> Path:
    """Writes a file whole or not at all, a page (F.html) in a language of `base.language`, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as scratch:
        scratch.write_text(Language(language).page(page) if path.suffix == ".html" else page, encoding="utf-8")
    return path


def marked(sentence: str) -> Markup:
    """A sentence whose `code` stands as code.

    Example:
        >>> marked("step 1: `a < b`")
        Markup('step 1: <code>a &lt; b</code>')
    """
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(sentence))))


def breakable(name: str) -> Markup:
    """A dotted name that may break after a dot.

    Example:
        >>> breakable("layers.0")
        Markup('layers.<wbr>0')
    """
    return escape(name).replace(".", Markup(".<wbr>"))


def script_json(values: Any) -> Markup:
    """JSON for a script element; infinities and NaNs become null.

    Example:
        >>> script_json({"name": "</script>"})
        Markup('{"name":"\\\\u003c/script>"}')
    """
    return Markup(json.dumps(text.finite(values), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))
