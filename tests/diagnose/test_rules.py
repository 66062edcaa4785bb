"""The rule book: complete, and a mistake in one is refused with its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ottava.diagnose.rules import FRAMEWORKS, RulesError, load_rules

ROOT = Path(__file__).resolve().parents[2]
BOOK = load_rules()
REMEDY = "remedies:\n  nothing: {rung: 1, cost: none, text: nothing}\n"
RULE = """
rules:
  - id: MINE
    title: mine
    stage: numeric
    when: underflow_pct > 50
    cause: c
    refute_by: r
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_row_of_the_literature_is_a_rule() -> None:
    """18 numeric rows, 7 bug signatures, and the triage tree from T0 to T4."""
    assert {f"N{i}" for i in range(1, 19)} <= set(BOOK.rules)
    assert {f"B{i}" for i in range(1, 8)} <= set(BOOK.rules)
    assert {"T0", "T1", "T2", "T3", "T4"} <= set(BOOK.triage)


@pytest.mark.parametrize("rule", BOOK.rules.values(), ids=lambda rule: rule.id)
def test_every_rule_says_cause_refutation_remedy_and_source(rule: object) -> None:
    for field in ("title", "cause", "refute_by", "remedies", "source"):
        assert getattr(rule, field)
    assert 0 < rule.confidence < 1  # type: ignore[attr-defined]


PUBLIC = re.compile(
    r"(TransformerEngine|Megatron-LM|torchao|torchtitan|transformers|Ling-V2) (PR )?#\d+"  # an issue or a pull request
    r"|arXiv \d{4}\.\d{5}"
    r"|(Megatron-LM low_precision_training\.md|BioNeMo FP8 analysis|DeepSeek-V3|Nemotron-H|Kimi K2|trainscope)"
    r"|PyTorch: torch\.[\w.]+|cs231n"
    r"|DataFunSummit: Challenges and Debugging Strategies for FP8 Training of Large Models"
)
"""What anybody can look up; a remark may follow. A page of ours is named with its heading."""


def test_every_source_can_be_looked_up() -> None:
    """A reader of a diagnosis has our pages and the public's, and nothing else."""
    for source in (source for rule in BOOK.rules.values() for source in rule.source):
        page, _, heading = source.removeprefix("measured: ").partition(", ")
        if page.endswith(".md") and page.startswith("docs/"):
            assert f"## {heading}\n" in (ROOT / page).read_text(encoding="utf-8"), source
        else:
            assert re.fullmatch(rf"({PUBLIC.pattern})(:? .+)?", source), source
    assert not re.search(r"\bseed 0\d\d\b", (ROOT / "src/ottava/diagnose/rules.yaml").read_text("utf-8"), re.I)


def test_every_patch_is_for_a_known_framework_and_rungs_are_those_of_the_ladder() -> None:
    for remedy in BOOK.remedies.values():
        assert set(remedy.patch) <= set(FRAMEWORKS)
        assert 1 <= remedy.rung <= 10
    used = {name for rule in BOOK.rules.values() for name in rule.remedies}
    assert used == set(BOOK.remedies)


def test_explanations_have_no_circle() -> None:
    """A rule that explains another is not explained by it, not even in turn."""
    for rule in BOOK.rules.values():
        seen, frontier = set(), set(rule.explains)
        while frontier:
            seen |= frontier
            frontier = {name for one in frontier for name in BOOK.rules[one].explains} - seen
        assert rule.id not in seen


def test_a_file_of_your_own_adds_and_replaces(tmp_path: Path) -> None:
    book = load_rules(written(tmp_path, RULE + RULE.replace("\nrules:\n", "").replace("MINE", "N1")))
    assert book.rules["MINE"].title == book.rules["N1"].title == "mine"
    assert len(book.rules) == len(BOOK.rules) + 1


@pytest.mark.parametrize(
    "text, says",
    [
        (RULE.replace("underflow_pct", "underflw_pct"), "rule MINE: .*did you mean 'underflow_pct'"),
        (RULE.replace("underflow_pct > 50", "erly(kurtosis) > 1"), "rule MINE: .*did you mean 'early'"),
        (RULE.replace("underflow_pct > 50", "underflow_pct >"), "rule MINE: .*invalid syntax at the end"),
        (RULE.replace("stage: numeric", "stage: numerc"), "rule MINE: .*did you mean 'numeric'"),
        (RULE.replace("    cause: c\n", ""), "rule MINE: cause: is missing"),
        (RULE + "    confidense: 1\n", "rule MINE: .*did you mean 'confidence'"),
        (RULE + "    remedies: [margn]\n", "rule MINE: .*did you mean 'margin'"),
        (RULE + "    explains: [N99]\n", "rule MINE: unknown rule 'N99'"),
        (RULE + "    where: {tensr: input}\n", "rule MINE: .*did you mean 'tensor'"),
        (RULE + "    over: cast\n", "rule MINE: .*did you mean 'casts'"),
        (RULE.replace("underflow_pct > 50", "answer.bf16_twin == 'no'"), "did you mean 'answer.bf16_twin_recovers'"),
        ("rulez: []", "unknown section 'rulez'; did you mean 'rules'"),
        ("version: 2", "version 2; this ottava reads 1"),
        ("- a", "got list"),
        ("a: [", "is no YAML"),
        ("remedies: {x: {rung: 1, cost: c, text: t, patch: {megatrn: x}}}", "did you mean 'megatron'"),
        (
            "remedies: {x: {rung: 1, cost: c, text: t, patch: {}, notes: [{when: looks > 1, sey: x}]}}",
            "mean 'notes.0.say'",
        ),
        ("remedies: [x]", "remedies: got list; needs a dict"),
        (RULE + "    severity: [x]\n", "rule MINE: severity: got .*'x'"),
        ("rules: [3]", "rule 3: got int; needs fields"),
    ],
)
def test_a_mistake_names_file_place_and_nearest_name(tmp_path: Path, text: str, says: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(RulesError, match=says) as error:
        load_rules(path)
    assert str(path) in str(error.value)
    assert error.value.exit_code == 2


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match="cannot be read"):
        load_rules(tmp_path / "none.yaml")


def test_answers_are_checked() -> None:
    with pytest.raises(RulesError, match="did you mean 'bisect_gemm'"):
        BOOK.check_answers({"bisect_gem": "wgrad"})
    with pytest.raises(RulesError, match="did you mean 'wgrad'"):
        BOOK.check_answers({"bisect_gemm": "wgrd"})
    BOOK.check_answers({"bisect_gemm": "wgrad"})
