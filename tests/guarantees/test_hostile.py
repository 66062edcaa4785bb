"""The table of hostile files is the last run of `./x fuzz` that was kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from fuzz.campaign import WRONG
from fuzz.parsers import PARSERS

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "fuzz.json"


def test_no_damaged_file_did_harm(table: Callable[..., None]) -> None:
    """Nothing wrong was left in a row when it was written."""
    kept = json.loads(RESULTS.read_text("utf-8"))["parsers"]
    assert [row["parser"] for row in kept] == [parser.name for parser in PARSERS]
    assert not [row for row in kept if any(row[name] for name in WRONG) or row["found"]]
    rows = [[row["parser"], f"{row['cases']:,}", str(row["seed"]), f"{row['read']:,}", f"{row['refused']:,}",
             str(sum(row[name] for name in WRONG))] for row in kept]  # fmt: skip
    table("hostile", ("parser", "cases", "seed", "read", "refused with a sentence", "wrong"), rows)
