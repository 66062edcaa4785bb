"""A few cases of each parser of `./x fuzz`, and the proof that a wrong reader is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz import campaign, mutations
from fuzz.parsers import PARSERS, Parser
from ottava.base.untrusted import parse_json

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and a fork, as Linux has them")
CHEAP = ("config", "overrides", "watch config", "recipe", "json and yaml", "run folder", "parquet", "amax series",
         "dumps", "sharded checkpoint", "pickle", "scaling state", "torch.save", "event file", "import of logs",
         "device constants", "kernel choices")  # fmt: skip
"""Those that read a case in some milliseconds."""


@pytest.mark.parametrize("parser", [pytest.param(one, marks=() if one.name in CHEAP else pytest.mark.slow)
                                    for one in PARSERS], ids=lambda one: one.name)  # fmt: skip
def test_a_damaged_file_is_read_or_refused(parser: Parser) -> None:
    """`./x fuzz --only PARSER --case I` shows a case again."""
    row = campaign.campaign(parser, 60, seed=1)
    assert row["found"] == {}
    assert row["cases"] == 60
    assert row["refused"] > 0 or parser.name == "kernel choices"  # which is measured again


def _refuses(*_: Path) -> None:
    parse_json("{")  # only a line of ottava is its sentence


PLANTED: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "stray": ("stray", lambda folder, _: int(folder.name)),
    "an exit code of a bug": ("stray", lambda folder, _: {}["x"]),
    "a loop": ("hang", lambda *_: any(time.sleep(0) for _ in iter(int, 1))),
    "memory": ("memory", lambda *_: bytearray(8 << 30)),
    "a signal": ("crash", lambda *_: os.kill(os.getpid(), 11)),
    "a file beside": ("outside", lambda folder, _: (folder.parents[1] / "evil").write_text("x")),
    "a program": ("outside", lambda *_: os.system("true")),
    "a child": ("outside", lambda *_: subprocess.run(["true"], check=False)),
    "fine": ("refused", _refuses),
    "its own place": ("read", lambda _, out: out.write_text("x")),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of wrong end, and that a case after it still runs."""
    outcome, read = PLANTED[name]

    def whole_first(folder: Path, out: Path) -> object:
        return read(folder, out) if (folder / "changed").exists() else None

    def change(folder: Path, _: object) -> None:
        (folder / "changed").touch()

    monkeypatch.setattr(campaign, "SECONDS", 1)
    planted = Parser("planted", lambda folder: (folder / "a").touch(), whole_first, change)
    row = campaign.campaign(planted, 2, seed=0)
    assert (row[outcome], row["cases"]) == (2, 2), row
    assert bool(row["found"]) == (outcome in campaign.WRONG)


def test_a_case_follows_from_its_seed_alone(tmp_path: Path) -> None:
    """And most cases of a format differ."""
    made = []
    for _ in range(2):
        path = tmp_path / "a.json"
        for case in range(20):
            path.write_text(json.dumps({"a": [1, 2, {"b": "c"}], "d": 1.5}, indent=1))
            mutations.file(path, campaign.Random(f"0 x {case}"))
            made.append(path.read_bytes())
    assert made[:20] == made[20:]
    assert len(set(made[:20])) > 15
