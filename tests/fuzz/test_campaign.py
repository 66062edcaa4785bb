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
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ottava
from fuzz import api, campaign, mutations
from fuzz.parsers import PARSERS, Parser
from ottava.base.untrusted import parse_json

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and a fork, as Linux has them")


ALWAYS = ("kernel choices", "requests of a live page")
"""Choices are measured again, and a server answers whatever comes."""


@pytest.mark.parametrize("parser", [one for one in PARSERS if one.guarded], ids=lambda one: one.name)
def test_a_damaged_file_is_read_or_refused(parser: Parser) -> None:
    """`./x fuzz --only PARSER --case I` shows a case again."""
    row = campaign.campaign(parser, 60, seed=1)
    assert row["found"] == {}
    assert row["cases"] == 60
    assert row["refused"] > 0 or parser.name in ALWAYS


FOUND = [("rollouts", 8, 77), ("device constants", 8, 1466), ("rollouts", 101, 911), ("export of a folder", 102, 313)]
FOUND += [("inspect", 102, 343), ("engine config", 102, 128), ("torch.save", 102, 105), ("scaling state", 102, 154)]
FOUND += [("commands on a run", 102, 59), ("requests of a live page", 9, 3859)]


@pytest.mark.parametrize("name, seed, case", FOUND)
def test_a_case_that_was_wrong_is_refused(name: str, seed: int, case: int) -> None:
    """Of a campaign: each ended in a traceback."""
    row = campaign.campaign(next(one for one in PARSERS if one.name == name), 1, seed, first=case)
    assert row["found"] == {}
    assert row["refused"] == 1 or name in ALWAYS


PLANTED: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "stray": ("stray", lambda folder, _: int(folder.name)),
    "an exit code of a bug": ("stray", lambda folder, _: {}["x"]),
    "a loop": ("hang", lambda *_: any(time.sleep(0) for _ in iter(int, 1))),
    "memory": ("memory", lambda *_: bytearray(8 << 30)),
    "a signal": ("crash", lambda *_: os.kill(os.getpid(), 11)),
    "a file beside": ("outside", lambda folder, _: (folder.parents[1] / "evil").write_text("x")),
    "a program": ("outside", lambda *_: os.system("true")),
    "a child": ("outside", lambda *_: subprocess.run(["true"], check=False)),
    "fine": ("refused", lambda *_: parse_json("{")),  # only a line of ottava is its sentence
    "its own place": ("read", lambda _, out: out.write_text("x")),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of wrong end, and that a case after it still runs."""
    outcome, read = PLANTED[name]

    def whole_first(folder: Path, out: Path) -> object:
        return read(folder, out) if (folder / "changed").exists() else None

    monkeypatch.setattr(campaign, "SECONDS", 1)
    first, second = (lambda folder, *_, name=name: (folder / name).touch() for name in ("a", "changed"))
    planted = Parser("planted", first, whole_first, second)
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


def called(name: str, chance: campaign.Random) -> None:
    """One call; a refusal is right."""
    try:
        api.draw(name, chance)
    except Exception as error:
        if not campaign.of_the_house(error):
            raise


@pytest.mark.parametrize("name, examples", [("cast", 200), ("gemm", 120), ("layer", 40)])
def test_a_call_is_right_or_refused(name: str, examples: int) -> None:
    """`./x fuzz --only call` plays 10,000 of each."""
    settings(max_examples=examples)(given(st.randoms(use_true_random=False))(lambda c: called(name, c)))()


def odd_columns(made: ottava.QuantizedTensor) -> ottava.QuantizedTensor:
    """A kernel that forgets the last of an odd number of columns."""
    if made.data.dim() == 2 and made.data.shape[1] % 2 and made.data.numel():
        made.data.view(torch.uint8)[:, -1] ^= 1
    return made


def loses_threads(y: Tensor) -> Tensor:
    """A result of another order with two threads."""
    return y * (1 + 2.0**-4) if torch.get_num_threads() == 2 else y


@pytest.mark.parametrize("name", ["cast", "gemm", "layer", "internal"])
def test_a_planted_call_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def after(owner: object, attribute: str, change: Callable[..., object]) -> None:
        whole = getattr(owner, attribute)
        monkeypatch.setattr(owner, attribute, lambda *given, **named: change(whole(*given, **named)))

    if name == "cast":
        after(ottava, "quantize", odd_columns)
    elif name == "gemm":
        after(ottava, "gemm", loses_threads)
    elif name == "layer":
        after(torch.func, "functional_call", lambda y: y + y.abs().amax())
    else:
        after(ottava, "quantize", lambda made: {}[made.shape])

    def many() -> None:
        for case in range(300):
            called("cast" if name == "internal" else name, campaign.Random(f"planted {case}"))

    with pytest.raises(KeyError if name == "internal" else AssertionError):
        many()


def test_a_page_for_strangers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hmac.compare_digest", lambda one, other: True)
    requests = next(one for one in PARSERS if one.name == "requests of a live page")
    assert campaign.campaign(requests, 60, seed=1)["stray"] > 0
