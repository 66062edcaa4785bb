"""Checks that a page is one complete HTML file that needs no other."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"wbr", "hr", "meta", "br", "link", "input", "img"}


class Checker(HTMLParser):
    """Refuses unbalanced tags, repeated ids and references to elsewhere; keeps all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.problems: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(html)
        assert (self.problems, self.open) == ([], [])
        assert len(self.ids) == len(set(self.ids))
        assert all(reference.startswith("#") for reference in self.references)
        assert html.startswith("<!doctype html>")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "srcset", "action", "xlink:href"):
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """<rect/> opens and closes."""

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data
