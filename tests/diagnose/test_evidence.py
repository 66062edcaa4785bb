"""Evidence: the worst row of each tensor with value, threshold, unit and step; what only selects rows is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ottava.diagnose.evidence import Evidence, evidence_of
from ottava.diagnose.facts import context_of
from ottava.diagnose.fired import Fired
from ottava.diagnose.rows import StepRows
from ottava.diagnose.rules import Rule
from ottava.record.reader import Run
from ottava.record.writer import RunWriter


def test_the_worst_row_is_shown_in_octaves_beyond_its_threshold(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for step, share in enumerate((99.95, 100.0, 99.99), 1):
            writer.step(step, loss=float("nan"), labels_ignored_pct=share, grad_norm=0.5)
    rows = StepRows(context_of(Run.open(tmp_path)))
    fields = {"id": "X", "title": "t", "stage": "data", "cause": "c", "refute_by": "r", "over": "steps"}
    asked = Rule(when="labels_ignored_pct > 99.9 and grad_norm < 2 and age >= 0 and loss > 3", **fields)  # type: ignore[arg-type]
    evidence = evidence_of(Fired(asked, rows, np.array([0, 1, 2])))
    # the excess of grad_norm is the largest, and equal in all three rows: the first is shown
    assert evidence == [
        Evidence("", "", "labels_ignored_pct", 99.95, 99.9, "%", 1),
        Evidence("", "", "grad_norm", 0.5, 2.0, "", 1),
    ]
    alone = Rule(when="labels_ignored_pct > 99.9", **fields)  # type: ignore[arg-type]
    assert [e.step for e in evidence_of(Fired(alone, rows, np.array([0, 1, 2])))] == [2]
