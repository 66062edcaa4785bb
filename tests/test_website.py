"""The site is made of docs/index.md, README and docstrings, and needs nothing from elsewhere (docs/website.py)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from command import script

ROOT = Path(__file__).resolve().parents[1]


def load() -> ModuleType:
    return script(ROOT / "docs" / "website.py")


def test_llms_txt_is_that_of_the_index() -> None:
    """`./x docs` writes it. Every page of the index stands in it once, behind its question, and its links hold."""
    website = load()
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    assert text == website.llms(), "python docs/website.py --llms"
    assert text.startswith("# ottava\n\n> ")
    links = re.findall(r"^- \[\w+\]\(([^)]+)\): .+$", text, re.MULTILINE)
    assert links == ["README.md", *(entry.path for entry in website.entries())]
    assert all((ROOT / link).is_file() for link in links)


def test_the_contents_of_the_site_are_those_of_the_index() -> None:
    """Every page of docs stands in one list of README's contents, and a twin in that of its language."""
    website = load()
    pages = re.findall(r"^(?:README|AGENTS|CONTRIBUTING|CHANGELOG|docs/\S+)[\w.-]*$", website.contents(), re.MULTILINE)
    assert len(pages) == len(set(pages))
    there = {f"docs/{page.stem}" for page in (ROOT / "docs").glob("*.md")}
    assert {page for page in pages if page.count("/") == 1} == there
    source = ["# Title\n\ntext\n"]
    website.read_source(None, "docs/faq", source)
    assert source == ["# Title\n\n[中文](faq.zh-CN.md)\n\ntext\n"]
    website.read_source(None, "docs/state", source)
    assert "state" not in source[0]
    website.read_source(None, "docs/explorer.zh-CN", source)
    assert '\n<p><a href="../explorer.html#lang=zh">' in source[0]


def test_the_site_opens_with_the_explorer(tmp_path: Path) -> None:
    """It is built into the site, is what its first page leads to, and leads to the pages of words."""
    load().write_explorer(tmp_path)
    assert "url=explorer.html" in (tmp_path / "index.html").read_text(encoding="utf-8")
    page = (tmp_path / "explorer.html").read_text(encoding="utf-8")
    assert page.index('href="README.html"') < page.index("<h1>")
    assert list(load().from_elsewhere(tmp_path)) == []


def test_docstrings_become_what_sphinx_reads() -> None:
    """A section on one line stands apart, stars mean no emphasis, and indented code stays code."""
    website = load()
    lines = [
        *(
            "The product a * b.",
            "",
            "    y = a * b",
            "",
            "Args:",
            "    a, b: factors of a*b.",
            "Shapes: (M, K) * `x*y`",
            "    wide.",
        ),
        *("Raises:", "    ValueError: never.", "", "Example:", "    >>> 2 * 3", "    6"),
    ]
    website.docstring(None, "", "", None, None, lines)
    assert lines[:5] == [r"The product a \* b.", "", "::", "", "    y = a * b"]
    assert r"    a, b: factors of a\*b." in lines
    assert lines[lines.index("Raises:") - 4 : lines.index("Raises:")] == [
        "",
        r"**Shapes:** (M, K) \* `x*y`",
        "wide.",
        "",
    ]
    assert lines[-3:] == ["Example:", "    >>> 2 * 3", "    6"]
    constant = ["A format: up to `a: b`."]
    website.docstring(None, "data", "", None, None, constant)
    assert constant == ["A format \u2013 up to `a: b`."]


def test_a_resource_from_elsewhere_is_found(tmp_path: Path) -> None:
    """Fonts, scripts and styles of other hosts; a link to click is none."""
    website = load()
    (tmp_path / "page.html").write_text(
        '<a href="https://a.example">a</a><script src="https://b.example/b.js"></script>'
        '<link rel="stylesheet" href="//c.example/c.css"><img src="d.png">',
        encoding="utf-8",
    )
    (tmp_path / "page.css").write_text(
        "@import url(https://e.example/e.css); a { background: url(f.png) }", encoding="utf-8"
    )
    hosts = [found.partition("//")[2].partition("/")[0] for found in website.from_elsewhere(tmp_path)]
    assert hosts == ["e.example", "b.example", "c.example"]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """All public names have their place, both languages point at each other, and nothing comes from elsewhere."""
    for package in ("sphinx", "myst_nb", "furo"):
        pytest.importorskip(package, reason="./x docs installs it")
    words = [sys.executable, str(ROOT / "docs" / "website.py"), "--out", str(tmp_path / "site")]
    run = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "no page loads anything from elsewhere" in run.stdout
    import ottava

    page = (tmp_path / "site" / "docs" / "api" / "ottava.html").read_text(encoding="utf-8")
    names = [name for name in ottava.__all__ if not isinstance(getattr(ottava, name), ModuleType)]
    assert [name for name in names if f"<h2>{name}<" not in page] == []
    assert "faq.zh-CN.html" in (tmp_path / "site" / "docs" / "faq.html").read_text(encoding="utf-8")
    assert (tmp_path / "site" / "llms.txt").read_text(encoding="utf-8") == (ROOT / "llms.txt").read_text(
        encoding="utf-8"
    )
