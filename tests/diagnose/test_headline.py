"""The first line says how many steps were seen, and whether the run ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from ottava.diagnose.diagnose import diagnose
from ottava.record.reader import Run
from ottava.record.writer import RunWriter


@pytest.mark.parametrize("ended, said", [("", "did not end"), ("closed", ""), ("KeyError: x", "with KeyError: x")])
def test_a_run_that_was_cut_off_is_named(tmp_path: Path, ended: str, said: str) -> None:
    with RunWriter(tmp_path) as writer:
        writer.describe(ended=ended)
        for step in range(1, 5):
            writer.step(step, loss=1.0 / step)
    sentence = diagnose(Run.open(tmp_path)).sentence
    assert "4 steps seen" in sentence
    assert said in sentence
    assert ("after step 4" in sentence) == (ended != "closed")
