"""Words and tables say what the analysis said, and leave out what nobody knows."""

import math

import pytest
from report_samples import comparison_of, diagnosis_of, manifest

from ottava.diagnose.what_if import cheapest, predict
from ottava.record.reader import Run
from ottava.report import sections
from ottava.report.grid import Grid

LAYER = "layers.2.mlp.down_proj"


@pytest.fixture(scope="module")
def grid(small_run: Run) -> Grid:
    return Grid.of(small_run.table(), 100)


def test_finding_has_everything_and_links_to_its_cell(grid: Grid) -> None:
    shown = sections.finding(diagnosis_of(LAYER, 20)["findings"][0], grid)
    assert (shown["severity"], shown["where"], shown["when"]) == ("critical", f"X of {LAYER}", "steps 10 to 20")
    first = shown["evidence"][0]
    assert (first["value"], first["step"]) == ("61.7 %", 20)
    assert shown["tried"][0].startswith("With X of fc2's fprop")
    slot = next(i for i, s in enumerate(grid.slots) if (s.layer, s.tensor) == (LAYER, "input"))
    assert first["link"] == f"#slot={slot}&metric=underflow_pct&step=20"
    names = [name for name, _ in shown["remedies"][0]["patches"]]
    assert names == ["ottava", "Megatron", "TransformerEngine", "torchao"]


def test_worst_table_has_every_cast_worst_first(grid: Grid) -> None:
    made = sections.worst_table(grid)
    assert {row["slot"] for row in made["rows"]} == set(range(len(grid.slots)))
    alarms = [row["alarm"] for row in made["rows"] if not math.isnan(row["alarm"])]
    assert alarms == sorted(alarms, reverse=True)
    worst = grid.worst()
    assert worst is not None
    assert made["rows"][0]["slot"] == worst.slot
    assert max(shade for _, shade in made["rows"][0]["cells"]) == 3


def test_what_if_is_that_of_the_analysis(small_run: Run) -> None:
    predictions = predict(small_run.table())
    made = sections.what_if(predictions)
    assert made is not None
    assert {row["recipe"] for row in made["recipes"]} == {p.recipe for p in predictions}
    assert sum(count for _, count, _ in made["cheapest"]) == len(cheapest(predictions))
    for layer, tensor, cells in made["rows"]:
        for recipe, cell in zip(made["columns"], cells, strict=True):
            alike = [
                p for p in predictions if (p.layer, p.recipe) == (layer, recipe) and sections.symbol(p.tensor) == tensor
            ]
            assert cell.clears == all(p.clears for p in alike)
    assert sections.what_if([]) is None


def test_difference_says_where_it_begins() -> None:
    shown = sections.difference(comparison_of(LAYER, 20))
    assert shown["first"] == (
        f"Step 10: X of {LAYER}, underflow_pct is 0.700 %; the good run stays between 0 % and 0.0500 %. It leaves 14 "
        "steps before the loss. It spreads through the forward."
    )
    assert [(row["metric"], row["good"], row["bad"], row["bar"]) for row in shown["ranked"]] == [
        ("underflow_pct", "0.0200 %", "61.7 %", 100.0),
        ("sqnr_db", "31.4 dB", "35.0 dB", 25.0),
    ]
    assert shown["loss"] == "first outside at step 24, stays outside from step 30, good 0.310, bad 2.40, gap 674 %"
    assert sections.difference({})["ranked"] == []


def test_coverage_and_cost_are_told(grid: Grid) -> None:
    told = sections.coverage(manifest(3, "delayed"), grid)
    assert told["sentence"] == "The watch saw 12 of 13 linear layers"
    assert told["cost"] == "Watching took 2.13 % of the run's time, 1.25 s of 58.7 s, in 30 looks"
    assert told["skipped"] == [("lm_head", "not converted")]
    bare = sections.coverage({}, grid)
    assert (bare["sentence"], bare["cost"]) == ("The run has statistics of 12 layers", "")


def test_command_can_be_pasted() -> None:
    assert sections.command({"command": ["python", "train.py", "--name", "a b"]}) == "python train.py --name 'a b'"
    assert sections.command({}) == ""


def test_diagnosis_is_told_once() -> None:
    """The badge says the severity, the headline the rest."""
    assert sections.headline({"verdict": "none", "sentence": "No fault found in 9 steps. FP8 is innocent."}) == (
        "No fault found in 9 steps"
    )
    assert sections.headline(diagnosis_of(LAYER, 20)) == "Outlier tokens own the scale of FC2's input"
    diagnosis = diagnosis_of(LAYER, 20)
    assert sections.questions(diagnosis) == [("T1", "Does a BF16 run spike as often?", "unknown; an answer")]
    assert sections.untested(diagnosis) == [("N9", "Attention logits grow", "max_logit in steps.jsonl")]
    assert (sections.questions({}), sections.untested({})) == ([], [])


def test_the_deciding_experiment_is_a_picture() -> None:
    """A replay stands above a shadow step; a loss that is not finite is no bar, and is said."""
    shadows: list[dict[str, object]] = [
        {"kind": "shadow", "step": step, "error": error, "noise": 0.5, "loss": 4.1, "loss_without": 2.6}
        for step, error in ((5, 0.05), (20, 0.4))
    ]
    picture, said = sections.decisive(shadows, sections.experiment(shadows, ["E4M3"]), {}) or (None, "")
    assert picture is not None
    assert "step 20" in picture.title
    assert [(name, max(parts), text) for name, parts, text in picture.bars] == [
        ("error by casts", 40.0, "40.0 %"),
        ("level that hurts", 15.0, "15.0 %"),
        ("noise of the batch", 80.0, "80.0 %"),
    ]
    assert "with casts 4.10, without 2.60" in said
    arms = [{"name": "as it ran", "losses": [3.0, float("nan")]}, {"name": "high precision", "losses": [2.5]}]
    replay = {"kind": "replay", "reproduces": True, "from": 3, "step": 9, "arms": arms}
    picture, _ = sections.decisive([*shadows, replay], sections.experiment(shadows, ["E4M3"]), {}) or (None, "")
    assert picture is not None
    assert [(name, max(parts), text) for name, parts, text in picture.bars] == [
        ("with casts", 0.0, "not finite"),
        ("without casts", 2.5, "2.50"),
    ]
    assert picture.bars[0][1].index(0.0) != picture.bars[1][1].index(2.5)  # their colours differ
    assert sections.decisive([], sections.experiment([], []), {}) is None
    # casts that only an experiment made show nothing of the answer
    assert sections.decisive(shadows, sections.experiment(shadows, ["E4M3"]), {"fp8": "none"}) is None


def test_the_picture_is_of_the_experiment_that_the_answer_tells() -> None:
    """Not of the largest error, which may be a consequence; and of the batch's loss where the learning rate is it."""
    shadows: list[dict[str, object]] = [
        {"kind": "shadow", "step": step, "error": error, "loss": 5.0, "loss_after": 6.0, "loss_tenth": 4.5}
        for step, error in ((2, 0.05), (3, 1.2))
    ]
    tried = {"tried": ["At step 2 the gradient with casts differs by 5 %. At step 3 they move it by 120 %."]}
    picture, _ = sections.decisive(shadows, sections.experiment(shadows, ["E4M3"]), tried) or (None, "")
    assert picture is not None
    assert picture.title == "One batch of step 2, with and without casts"
    rate = {"id": "O12", "steps": [2], "remedies": [{"name": "lower_lr"}]}
    for answer in ({"findings": [rate]}, {"findings": [{"remedies": [{"name": "good_lr"}]}], "notes": [rate]}):
        picture, _ = sections.decisive(shadows, sections.experiment(shadows, ["E4M3"]), answer) or (None, "")
        assert picture is not None
        assert [(name, parts.index(max(parts)), text) for name, parts, text in picture.bars] == [
            ("before its step", 1, "5.00"),
            ("after its step", 0, "6.00"),
            ("after a tenth of it", 1, "4.50"),
        ]


def test_no_word_of_the_sentence_is_left_alone() -> None:
    tried = "At step 2 the gradient differs by 5 %."
    said = f"The rate is high. It differs. FP8 is innocent: {tried} It ended. The watch saw 97 % of the linear layers."
    answer = {"sentence": said, "tried": [tried], "coverage_pct": 96.8}
    rest = sections.rest({**answer, "findings": [{"title": "The rate is high", "cause": "It differs."}]})
    assert rest == "It ended."
