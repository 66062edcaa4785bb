"""`ottava diagnose`: exit codes, JSON, frameworks, mistakes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import command
from ottava.diagnose.diagnose import CONFIDENCE
from ottava.record.writer import RunWriter

call = partial(command.said, "diagnose")


def record(folder: Path, *, lr: float) -> Path:
    with RunWriter(folder) as writer:
        writer.describe(coverage={"linear": 4, "seen": 3, "skipped": []}, cast={"ran": False}, framework=["trl"])
        for step in range(1, 11):
            writer.step(step, loss=3.0 - 0.1 * step * (lr > 0), lr=lr)
    return folder


def test_a_clean_run_exits_0_and_says_what_was_looked_at(tmp_path: Path) -> None:
    code, text = call(record(tmp_path / "run", lr=1e-3))
    assert code == 0
    assert text.startswith("No fault found in 10 steps. No cast to FP8 was seen. The watch saw 75 %")
    assert "lack data (--all shows them, and the triage tree)" in text
    _, whole = call(tmp_path / "run", "--all")
    assert "Does the loss leave its band for good? No." in whole
    assert "M3   The loss does not measure the model: needs the graph of the loss, or batches" in whole


@pytest.mark.parametrize("fail_on, code", [("critical", 1), ("warning", 1), ("never", 0)])
def test_a_critical_finding_exits_as_asked(tmp_path: Path, fail_on: str, code: int) -> None:
    assert call(record(tmp_path / "run", lr=0.0), "--fail-on", fail_on)[0] == code


def test_the_answer_comes_first_and_the_change_is_for_the_framework(tmp_path: Path) -> None:
    _, text = call(record(tmp_path / "run", lr=0.0))
    assert text.startswith("The learning rate is 0. The learning rate is 0 in 10 of 10 steps, from step 1 on.")
    right, asked = CONFIDENCE["law"]
    said = f"on unseen faults, answers of this kind were right {right} times in {asked}"
    assert f"1. The learning rate is 0  (critical, step 1; {said})" in text
    assert "transformers:" in text
    assert "megatron:" not in text


def test_json(tmp_path: Path) -> None:
    code, text = call(record(tmp_path / "run", lr=0.0), "--json")
    values = json.loads(text)
    assert code == 1
    assert (values["schema_version"], values["findings"][0]["id"], values["fp8"]) == (2, "O2", "none")
    assert values["coverage_pct"] == 75


def test_mistakes(tmp_path: Path) -> None:
    run = record(tmp_path / "run", lr=1e-3)
    assert call(tmp_path / "none")[0] == 4
    assert call(run, "--fail-on", "critcal") == (2, "unknown value of --fail-on 'critcal'; did you mean 'critical'? "
                                                    "known: critical, warning, never")  # fmt: skip
    assert call(run, "--for", "trition")[0] == 2
