"""Tables of docs/guarantees.md and docs/determinism.md: a test computes the rows, and the page must have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def hold(
    name: str, header: Sequence[str], rows: Sequence[Sequence[str]], publish: bool, page: str = "guarantees.md"
) -> None:
    """Fails unless the page's table of that name has exactly these rows; with `publish` writes them there instead."""
    place = DOCS / page
    lines = [header, ["---"] * len(header), *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    before, found, rest = place.read_text("utf-8").partition(f"<!-- table: {name} -->\n")
    assert found, f"{page} has no table {name}"
    shown, end, after = rest.partition("<!-- end -->")
    assert end, f"the table {name} of {page} has no end"
    if publish:
        place.write_text(before + found + table + end + after, "utf-8")
    else:
        assert shown == table, f"table {name} of {page} is not what ran: python -m pytest tests/guarantees --publish"
