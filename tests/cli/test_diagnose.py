"""`ottava diagnose`: exit codes, JSON, answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ottava
from ottava.cli.app import app, exit_code
from ottava.measure.walk import measure
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter


def record(folder: Path, *, massive: bool) -> Path:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    if massive:
        x[:4] *= 1e5
    key = SlotKey("layers.0.mlp.fc2", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
    with RunWriter(folder) as writer:
        writer.describe(coverage={"linear": 4, "seen": 3, "skipped": []})
        for step in (1, 2, 3):
            writer.step(step, loss=3.0)
            writer.tally(step, key, measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))))
    return folder


def call(*words: object, input: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["diagnose", *map(str, words)], standalone_mode=False, input=input)
    if result.exception is not None:
        return exit_code(result.exception), str(result.exception)  # type: ignore[arg-type]  # no BaseException here
    return result.return_value, result.stdout


def test_a_clean_run_exits_0_and_names_its_coverage(tmp_path: Path) -> None:
    code, text = call(record(tmp_path / "run", massive=False))
    assert code == 0
    assert text.startswith("no FP8 evidence found; coverage 75 %")
    assert "(--all lists them)" in text
    assert "for want of a BF16 twin (--baseline RUN)" in text
    assert "Two models share FP8 state" not in text
    _, whole = call(tmp_path / "run", "--all")
    assert "B8   Two models share FP8 state: needs an answer to 'shared_state'" in whole


@pytest.mark.parametrize("fail_on, code", [("critical", 1), ("warning", 1), ("never", 0)])
def test_a_critical_finding_exits_as_asked(tmp_path: Path, fail_on: str, code: int) -> None:
    assert call(record(tmp_path / "run", massive=True), "--fail-on", fail_on)[0] == code


def test_the_text_has_evidence_cause_and_a_patch(tmp_path: Path) -> None:
    _, text = call(record(tmp_path / "run", massive=True), "--for", "te")
    for part in (
        "critical N1",
        "layers.0.mlp.fc2.X  underflow_pct",
        "cause:",
        "refuted if:",
        "DisableQuantizationGEMM",
    ):
        assert part in text


def test_json(tmp_path: Path) -> None:
    code, text = call(record(tmp_path / "run", massive=True), "--json")
    values = json.loads(text)
    assert code == 1
    assert values["findings"][0]["id"] == "N1"
    assert values["coverage_pct"] == 75


def test_answers_from_the_command_line_and_from_a_person(tmp_path: Path) -> None:
    run = record(tmp_path / "run", massive=False)
    assert "C7" in call(run, "--answer", "downstream=all_tasks")[1]
    code, text = call(run, "--ask", input="no\n\nall_tasks\n")  # speed, gap: not known, downstream
    assert "C7" in text
    assert code == 0  # a warning


def test_questions_and_rules_of_your_own(tmp_path: Path) -> None:
    run = record(tmp_path / "run", massive=False)
    assert "bf16_twin_recovers=yes|no" in call(run, "--questions")[1]
    mine = tmp_path / "mine.yaml"
    rule = "{id: MINE, title: t, stage: bug, when: looks > 0, cause: c, refute_by: r, severity: critical}"
    mine.write_text(f"rules:\n  - {rule}\n", encoding="utf-8")
    code, text = call(run, "--rules", mine)
    assert code == 1
    assert "critical MINE" in text


def test_mistakes(tmp_path: Path) -> None:
    run = record(tmp_path / "run", massive=False)
    assert call(tmp_path / "none")[0] == 4
    assert call(run, "--fail-on", "critcal") == (2, "unknown value of --fail-on 'critcal'; did you mean 'critical'? "
                                                    "known: critical, warning, never")  # fmt: skip
    assert call(run, "--for", "trition")[0] == 2
    assert call(run, "--answer", "downstream")[0] == 2
    assert call(run, "--answer", "downstream=al_tasks")[0] == 2
    assert call(run, "--rules", tmp_path / "none.yaml")[0] == 2
