"""Rules are asked row by row; one without its data is listed, and one noisy row of many is no finding."""

from __future__ import annotations

from pathlib import Path

from ottava.diagnose.conditions import Condition
from ottava.diagnose.facts import context_of
from ottava.diagnose.fired import ask_rules, asks_for_findings, holds
from ottava.diagnose.rules import Rule
from ottava.record.reader import Run
from ottava.record.writer import RunWriter


def rule(when: str, **fields: object) -> Rule:
    given: dict[str, object] = {"id": "X", "title": "t", "stage": "training", "cause": "c", "refute_by": "r"}
    return Rule(when=when, **{**given, "over": "steps", **fields})  # type: ignore[arg-type]


def test_a_rule_holds_for_rows_lacks_data_or_says_nothing(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for step in range(1, 7):
            writer.step(step, loss=1.0, extra_steps=float(step in (2, 5)), grad_norm=3.0)
    context = context_of(Run.open(tmp_path))
    rules = [
        rule("extra_steps > 0", id="TWICE", least=2),
        rule("extra_steps > 0", id="THRICE", least=3),
        rule("max_logit > 1", id="LACKS"),
        rule("grad_norm > 5", id="QUIET"),
        rule("mse > 1", id="CASTS", over="casts", where={"tensor": "input"}),
        rule("value > 0", id="CHECKS", over="events", where={"kind": "check", "check": "master"}),
        rule("run.steps == 6", id="RUN", over="run"),
    ]
    fired, untested = ask_rules(context, rules, {})
    assert [hit.rule.id for hit in fired] == ["TWICE", "RUN"]
    assert fired[0].steps() == [2, 5]
    assert fired[0].first == 2
    assert fired[0].places() == [("", "")] * 2
    needs = {entry["id"]: entry["needs"] for entry in untested}
    assert set(needs) == {"LACKS", "CASTS", "CHECKS"}
    assert "watch.log(max_logit=" in needs["LACKS"]
    assert needs["CASTS"] == "casts of tensor input"
    assert holds(Condition.parse("grad_norm == 3"), fired[0]) is True
    assert holds(Condition.parse("step == 3"), fired[0]) is False
    assert holds(Condition.parse("max_logit > 1"), fired[0]) is None
    assert holds(None, fired[0]) is None


def test_rules_about_findings_come_last() -> None:
    assert asks_for_findings(rule("run.findings == 0", over="run"))
    assert asks_for_findings(rule("loss > 1", support=["run.loss_first == 'yes'"]))
    assert not asks_for_findings(rule("loss > 1"))
