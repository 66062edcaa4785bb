"""Renders a page: one HTML file that needs no other file and no network.

The template of a room extends frame.html.j2. The frame holds the head, the colours, the shared style (frame.css,
chart.css) and the shared drawing code (draw.js). A template may include files from its own folder.
"""

from __future__ import annotations

import base64
import functools
import json
import re
import zlib
from collections.abc import Sequence
from html.parser import HTMLParser
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
    """A chart as a figure of a page: once as wide as it is, and once for a phone, with text of a size to read.

    Args:
        name: an id, unique in the page; begins with a letter.
        caption: a sentence below.

    Example:
        >>> figure(Chart(title="t", description="d", x_label="x", y_label="y", lines=[]), "loss").count('role="img"')
        2
    """
    draw: Any = {Chart: charts.render, Forest: charts.forest, Bars: charts.bars}[type(chart)]
    pictures = draw(chart, chart_id=name), draw(chart, chart_id=name, width=_PHONE)
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


_VOID = frozenset({"br", "hr", "input", "wbr"})
_UNSEEN_VOID = frozenset({"area", "base", "col", "embed", "frame", "img", "link", "meta", "param", "source", "track"})
_TAGS = _VOID | frozenset(
    re.findall(
        r"\S+",
        "a article b button caption circle code dd details div dl dt em figcaption figure g h1 h2 h3 h4 header i label "
        "li line noscript ol option output p path pre rect section select small span strong sub summary sup svg table "
        "tbody td text th thead title tr ul use",
    )
)
_IDS = frozenset({"id", "for", "aria-controls", "aria-describedby", "aria-labelledby"})
_ATTRIBUTES = _IDS | frozenset(
    re.findall(
        r"\S+",
        "aria-hidden aria-label aria-live aria-selected checked class colspan cx cy d data-chart fill height hidden "
        "max min opacity open points r role rowspan rx scope selected step stroke stroke-dasharray stroke-width style "
        "tabindex text-anchor title transform type value viewbox width x x1 x2 y y1 y2",
    )
)


class PagePart(HTMLParser):
    """The main part of a page as a section of another: its ids begin with `name-`, its headings count a level lower.

    What could run, or load something, is left out, so a page that somebody else wrote does no harm.

    Example:
        >>> PagePart('<main><h1 id="a" onclick="x()">A &amp; B<script>x()</script></h1></main>', "s1").html
        Markup('<h1 id="s1-a" aria-level="2">A &amp; B</h1>')
    """

    def __init__(self, page: str, name: str, title: str = "") -> None:
        super().__init__()
        self.name, self.title = name, title
        self.headings: list[tuple[str, str]] = []
        """Id and text, the headline first."""
        self._parts, self._open, self._drawn = list[str](), list[str](), 0  # depth of an open drawing
        self._outside = "main"  # the element that is waited for, or whose end is
        self.feed(page)
        self.close()
        self.html = Markup("".join([*self._parts, *(f"</{tag}>" for tag in reversed(self._open))]))

    @property
    def headline(self) -> str:
        """The text of the first heading."""
        return " ".join(self.headings[0][1].split()) if self.headings else self.name

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Writes the tag anew, with the attributes that are known."""
        if self._outside:
            self._outside = "" if tag == self._outside == "main" else self._outside
            return
        if tag not in _TAGS:
            self._outside = "" if tag in _UNSEEN_VOID else tag
            return
        known = {name: value or "" for name, value in attrs if name in _ATTRIBUTES or name == "href"}
        known = {name: value for name, value in known.items() if _harmless(name, value)}
        for name in _IDS & known.keys():
            known[name] = " ".join(f"{self.name}-{one}" for one in known[name].split())
        if "href" in known:
            known["href"] = f"#{self.name}-{known['href'][1:]}"
        if tag == "use" and (self._drawn or not known.get("href", "").endswith("-drawn")):
            return  # a drawing of drawings of drawings may grow without end
        if tag in ("h1", "h2", "h3"):
            known["aria-level"] = str(int(tag[1]) + 1)
        if tag in ("h1", "h2"):
            self.headings.append((known.setdefault("id", f"{self.name}-h{len(self.headings)}"), ""))
        told = "".join(f' {name}="{escape(value)}"' for name, value in known.items())
        self._parts.append(f"<{tag}{told}>")
        self._open += [] if tag in _VOID else [tag]
        if known.get("id", "").endswith("-drawn"):
            self._drawn = self._drawn or len(self._open)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens and closes a tag of a picture."""
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        """Closes what is open up to the tag."""
        if self._outside:
            self._outside = "" if tag == self._outside != "main" else self._outside
        elif tag == "main":
            self._outside = "end"
        elif tag in self._open:
            while (last := self._open.pop()) != tag:
                self._parts.append(f"</{last}>")
            self._parts.append(f"</{tag}>")
            self._drawn *= len(self._open) >= self._drawn

    def handle_data(self, data: str) -> None:
        """Text stays."""
        if not self._outside:
            self._parts.append(str(escape(data)))
            if {"h1", "h2"} & {*self._open} and self.headings:
                self.headings[-1] = (self.headings[-1][0], self.headings[-1][1] + data)


def _harmless(name: str, value: str) -> bool:
    """Whether an attribute names no address; a style is a variable or a width."""
    if name == "style":
        return re.fullmatch(r"--dot: var\(--\w+\)|width: [\d.]+px", value) is not None
    return value.startswith("#") if name == "href" else "url(" not in value.lower()


def render_sections(sections: Sequence[PagePart], runs: Sequence[str], **values: Any) -> str:
    """One page of several, with a table of contents.

    Args:
        runs: the pages of watched runs; they are the first sections. Facts that are equal are stored once.
    """
    facts, numbers = ([re.findall(f'id="{name}">(.*?)</script>', page)[0] for page in runs] for name in _DATA)
    shared = dict[str, tuple[list[str], list[int]]]()
    for one in facts:
        for name, value in json.loads(zlib.decompress(base64.b64decode(one))).items():
            known, places = shared.setdefault(name, ([], []))
            said = json.dumps(value, separators=(",", ":"))
            known += [said] * (said not in known)
            places.append(known.index(said))
    told = ",".join(f'"{name}":[[{",".join(known)}],{places}]' for name, (known, places) in shared.items())
    packed = deflated(f"{{{told}}}".encode())
    return render(__package__, "results.html.j2", sections=sections, facts=packed, numbers=numbers, **values)


_DATA = ("facts", "numbers")


def deflated(data: bytes, level: int = 9) -> str:
    """base64 of deflated bytes."""
    return base64.b64encode(zlib.compress(data, level)).decode("ascii")


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
