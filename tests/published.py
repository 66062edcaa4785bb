"""Tables of docs/guarantees.md: a test computes the rows, and the page must have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guarantees.md"


def hold(name: str, header: Sequence[str], rows: Sequence[Sequence[str]], publish: bool) -> None:
    """Fails unless the page's table of that name has exactly these rows; with `publish` writes them there instead."""
    lines = [header, ["---"] * len(header), *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    before, found, rest = PAGE.read_text("utf-8").partition(f"<!-- table: {name} -->\n")
    assert found, f"{PAGE.name} has no table {name}"
    shown, end, after = rest.partition("<!-- end -->")
    assert end, f"the table {name} of {PAGE.name} has no end"
    if publish:
        PAGE.write_text(before + found + table + end + after, "utf-8")
    else:
        assert shown == table, (
            f"table {name} of {PAGE.name} is not what ran: python -m pytest tests/guarantees --publish"
        )
