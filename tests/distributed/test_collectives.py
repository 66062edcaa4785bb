"""Which collectives a step made, and that neither late ranks nor the order of their ends change a bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import all_hold, scenarios_of
from torch import nn

import ottava
from ottava.engine.groups import CollectiveRow


@pytest.mark.parametrize("size, module", [(2, "collective_scenarios"), (3, "order_scenarios")], ids=["what", "when"])
def test_every_scenario_holds_on_every_rank(size: int, module: str, tmp_path: Path) -> None:
    all_hold(size, tmp_path, scenarios_of(module))


def test_a_receipt_prints_and_saves_what_was_sent() -> None:
    rows = (
        CollectiveRow("all_reduce", "float32", "SUM", 2, "", 4, 12_300_000),
        CollectiveRow("all_gather", "uint8", "", 8, "mesh_<b>", 1, 64),
    )
    made = ottava.receipt(nn.Linear(4, 4), collectives=rows)
    said = [
        "all_reduce float32 SUM over 2 ranks x 4 (12.3 MB)",
        "all_gather uint8 over 8 ranks (mesh_<b>) x 1 (64 bytes)",
    ]
    assert str(made).splitlines()[-2:] == said
    assert [row["dtype"] for row in made.to_dict()["collectives"]] == ["float32", "uint8"]
    assert "mesh_&lt;b&gt;" in made._repr_html_()
    plain = ottava.receipt(nn.Linear(4, 4))
    assert (plain.collectives, "collectives" in plain._repr_html_()) == ((), False)
