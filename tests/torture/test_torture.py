"""The campaign (`./x torture`) on a few cases: all attacks are survived, and each reports the fault planted for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from attacks import ATTACKS, unable

import warm

PROGRAM = Path(__file__).with_name("torture.py")
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "torture.json"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads the status of forks as Linux does")


def test_every_attack_is_survived(tmp_path: Path) -> None:
    """A round: each at least once, kills twelve times; the program prints what is lost."""
    ended = warm.run(
        [str(PROGRAM), "--cases", "24", "--seed", "tests", "--out", str(tmp_path / "out.json")], timeout=850
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "out.json").read_text())["attacks"]
    assert sum(row["tries"] for row in found.values()) == 24
    assert len(found) >= 10
    assert all(row["resumed"] + row["refused"] == row["tries"] and not row["lost"] for row in found.values())
    assert found["kill"]["kills"] > 10


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_planted_fault_is_reported(attack: str) -> None:
    if why := unable(attack):
        pytest.skip(why)
    ended = warm.run([str(PROGRAM), "--planted", "--only", attack], timeout=850)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{attack}: reported in case" in ended.stdout


def test_the_page_shows_the_campaign_that_ran(table: object) -> None:
    """docs/guarantees.md has the rows of benchmarks/results/torture.json, and nothing was lost in it."""
    facts = json.loads(RESULTS.read_text())
    rows = [
        [name, *(f"{row[key]:,}" for key in ("tries", "kills", "resumed", "refused")), str(len(row["lost"]))]
        for name, row in facts["attacks"].items()
    ]
    table("torture", ["attack", "tries", "kills", "resumed bit for bit", "refused", "lost"], rows)  # type: ignore[operator]
