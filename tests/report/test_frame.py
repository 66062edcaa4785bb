"""A page is whole, escaped, and takes what it includes from its own room and from the shared one."""

import re
from pathlib import Path

import jinja2
import pytest

from ottava.report.charts import DARK, LIGHT
from ottava.report.frame import render, script_json

TEMPLATE = """{% extends "frame.html.j2" %}
{% block title %}{{ name }}{% endblock %}
{% block css %}{% include "own.css" %}{% endblock %}
{% block main %}{{ 0.5|number }} {{ ["a", "b"]|listed }} {{ name }}{% endblock %}
{% block writer %}a test{% endblock %}
{% block source %}{% endblock %}
"""


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a template and a file beside it."""
    folder = tmp_path / "room_with_a_page"
    folder.mkdir()
    for name, text in (("__init__.py", ""), ("page.html.j2", TEMPLATE), ("own.css", ".own { color: red; }")):
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return folder.name


def test_a_page_is_the_shared_frame_around_a_rooms_own_parts(room: str) -> None:
    html = render(room, "page.html.j2", name="<b>")
    assert html.startswith("<!doctype html>")
    assert html.rstrip().endswith("</html>")
    assert "<title>&lt;b&gt;</title>" in html
    assert "0.500 a and b &lt;b&gt;" in html
    for part in (".own {", ".chart .grid", "function hover("):
        assert part in html
    for colors in (LIGHT, DARK):
        assert all(f"--{name}: {color};" in html for name, color in colors.items())
    assert set(re.findall(r"var\(--(\w+)\)", html)) <= {"dot", *LIGHT}  # a swatch brings its own


def test_what_is_missing_is_an_error(room: str) -> None:
    with pytest.raises(jinja2.TemplateNotFound, match="gone"):
        render(room, "gone.html.j2")
    with pytest.raises(jinja2.UndefinedError, match="name"):
        render(room, "page.html.j2")


def test_json_cannot_end_its_script() -> None:
    assert "<" not in script_json({"name": "</script><b>", "value": float("nan")})
