"""Every event that the watch writes has a sentence; others are told fact by fact."""

import re

import pytest

from ottava.report.event_text import SENTENCES, event_text
from ottava.watching.schedule import Trigger


def test_every_trigger_is_told_with_its_place_and_numbers() -> None:
    """As the schedule makes them; a loss has no place."""
    for trigger, text in (
        (Trigger("clipping", 0.281, 1e-3, "fc2", "input"), "the cast clipped 28.1 % of X of fc2; the limit is 0.100 %"),
        (
            Trigger("row_sqnr", 5.45, 12.0, "fc2", "grad_output"),
            "the median row of dY of fc2 has 5.45 dB; the limit is 12.0 dB",
        ),
        (
            Trigger("loss_z", 9.5, 6.0),
            "the loss lies 9.50 deviations above the median of the last 64; the limit is 6.00",
        ),
        (Trigger("nonfinite", float("inf"), 0.0, "fc1", "weight"), "W of fc1 has an infinity or NaN"),
        (Trigger("nonfinite", float("nan"), 0.0), "the loss is not finite"),
    ):
        assert event_text({"step": 3, "rank": 0, "kind": "trigger", **trigger.facts()}) == text


def test_what_lacks_a_fact_is_told_all_the_same() -> None:
    """Of an older run, or another tool's."""
    assert event_text({"step": 3, "kind": "flight", "first": 1}) == "first 1"
    assert event_text({"step": 3, "kind": "check", "check": "master", "value": 1.5}) == "check master, value 1.50"
    assert event_text({"step": 3}) == ""
    assert event_text({"step": 3, "kind": "fallback", "layer": "fc2", "to": "bf16"}) == "layer fc2, to bf16"


@pytest.mark.parametrize("kind", SENTENCES)
def test_a_sentence_is_whole_with_the_facts_it_names(kind: str) -> None:
    """No brace is left."""
    names = [name.removesuffix("_pct").removesuffix("_symbol") for name in re.findall(r"{(\w+)}", SENTENCES[kind])]
    first, _, reason = kind.removesuffix(", no tensor").partition(" ")
    event = {"step": 1, "kind": first, **dict.fromkeys(names, 0.5)} | ({"reason": reason} if reason else {})
    told = event_text(event)
    assert all(words in told for words in re.split(r"{\w+}", SENTENCES[kind]))
    assert "{" not in told
