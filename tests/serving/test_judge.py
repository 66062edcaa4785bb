"""The order of the rules, and what each of them needs."""

from __future__ import annotations

from dataclasses import replace

from ottava.serving.answers import Answers, Interval
from ottava.serving.difference import Difference, Differences
from ottava.serving.judge import RULES, Case, judge

CLEAN = Difference("m.up.weight", "", "", "", "", True, None, 0.0, 1.0, 1.0, False)


def case(one: Difference = CLEAN, kl: float = 0.0, change: float = 0.0, a: bool = False, b: bool = False) -> Case:
    def interval(x: float) -> Interval:
        return Interval(x, x - 0.001, x + 0.001)

    answers = Answers("t", 64, 1.0, 1.0 + change, interval(change), interval(kl), interval(0.9))
    return Case(Differences((one,), (), (), ()), answers, (answers,), (), (a, a), (b, b))


def test_each_rule_answers_to_its_facts_and_an_earlier_one_wins() -> None:
    wrong = replace(CLEAN, outside=1.0, factor=2.0)
    cast = replace(CLEAN, cast_b="E4M3[tensor]", activation_b="E4M3[tensor]")
    mixed = replace(cast, cast_a="E4M3[row]", activation_a="E4M3[row]")
    for facts, kind in (
        (case(), "same"),
        (case(kl=0.0109), "same"),  # the interval still touches the tolerance
        (case(kl=0.02), "unexplained"),
        (case(change=-0.02), "unexplained"),
        (case(cast, b=True), "same"),
        (case(cast, kl=0.02, b=True), "too-coarse"),
        (case(mixed, a=True, b=True), "same"),
        (case(mixed, kl=0.02, a=True, b=True), "other-layers"),
        (case(replace(CLEAN, cast_a="E4M3[row]"), kl=0.02, a=True), "serve-fp8"),
        (case(replace(CLEAN, cast_a="E4M3[row]"), a=True, b=True), "other-layers"),
        (case(replace(cast, name="lm_head.weight"), b=True), "other-layers"),
        (case(wrong, kl=0.02, b=True), "wrong-values"),
    ):
        verdict = judge(facts)
        assert verdict.kind == kind, verdict
        assert verdict.good == (kind == "same")
        assert verdict.evidence
        assert verdict.remedy
    assert len(RULES) == 7
