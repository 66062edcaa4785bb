"""A demo's result as data: headline, order of the news, JSON."""

import json
import math
from collections.abc import Callable

import pytest

from ottava.train.verdict import DemoResult, RunResult, listed

MakeRun = Callable[..., RunResult]
MakeDemo = Callable[[list[RunResult]], DemoResult]


def seeds(make_run: MakeRun) -> list[RunResult]:
    """Three BF16 seeds; their spread is 0.021."""
    return [make_run("bf16", seed, final=final) for seed, final in enumerate((1.700, 1.721, 1.712))]


def test_headline_has_the_worst_news_first(make_run: MakeRun, make_demo: MakeDemo) -> None:
    fine, worse = make_run("tensorwise", final=1.704), make_run("blockwise", final=1.9)
    broken = make_run("nvfp4", broken_at=60)
    demos = {
        "tensorwise ends inside the noise of BF16": [fine],
        "Both FP8 recipes end inside the noise of BF16": [fine, make_run("rowwise", final=1.71)],
        "blockwise ends clearly worse than BF16": [fine, worse],
        "nvfp4 diverged": [fine, worse, broken],
        "No recipe ends clearly worse than BF16": [fine, make_run("rowwise", final=1.74)],
        "BF16 alone, without an FP8 recipe to compare": [],
    }
    for headline, runs in demos.items():
        assert make_demo([*seeds(make_run), *runs]).headline == headline
    one_seed = make_demo([make_run("bf16"), fine])
    assert one_seed.headline == "FP8 beside BF16, with no measure of the noise"
    bad_reference = make_demo([make_run("bf16", broken_at=3), fine])
    assert bad_reference.headline == "BF16 itself diverged: nothing to compare with"


def test_news_are_sorted_worst_first_and_verdicts_stay_in_order(make_run: MakeRun, make_demo: MakeDemo) -> None:
    runs = [make_run("tensorwise", final=1.704), make_run("blockwise", final=1.9), make_run("nvfp4", broken_at=60)]
    demo = make_demo([*seeds(make_run), *runs])
    assert [verdict.recipe for verdict in demo.verdicts] == ["tensorwise", "blockwise", "nvfp4"]
    assert [verdict.recipe for verdict in demo.news] == ["nvfp4", "blockwise", "tensorwise"]


def test_a_diverged_seed_is_no_part_of_the_noise(make_run: MakeRun, make_demo: MakeDemo) -> None:
    demo = make_demo([*seeds(make_run)[:2], make_run("bf16", 2, broken_at=9), make_run("rowwise", final=1.71)])
    assert demo.noise.losses == (1.700, 1.721)


def test_speed_ratio_is_to_bf16_of_the_same_seed(usual_demo: DemoResult) -> None:
    """0.05 s a step against 0.1 s: half as fast."""
    assert [usual_demo.speed_ratio(run) for run in usual_demo.runs] == [1.0, 1.0, 1.0, 0.5, 0.5]


def test_json_has_every_number_and_null_for_what_is_not_finite(make_run: MakeRun, make_demo: MakeDemo) -> None:
    demo = make_demo([*seeds(make_run), make_run("nvfp4", broken_at=60)])
    summary = json.loads(json.dumps(demo.to_dict(), allow_nan=False))
    assert summary["schema_version"] == 1
    broken = summary["runs"][-1]
    assert broken["diverged_at"] == 60
    assert broken["final_loss"] is None
    assert broken["validation"][-1] == [60, None]
    assert summary["runs"][0]["losses"] == demo.runs[0].losses
    assert summary["noise"]["spread"] == pytest.approx(0.021)
    numbers = summary["machinery"]["nvfp4"]["numbers"]
    assert {row["sqnr_db"] for row in numbers if row["tensor"] == "weight"} == {None}  # infinite: the cast was exact


def test_a_recipe_without_its_bf16_seed_is_refused(make_run: MakeRun, make_demo: MakeDemo) -> None:
    with pytest.raises(ValueError, match="tensorwise, seed 7"):
        make_demo([make_run("bf16"), make_run("tensorwise", 7)])
    with pytest.raises(ValueError, match="no bf16 run"):
        make_demo([])


def test_listed_reads_like_prose() -> None:
    assert [listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == ["a", "a and b", "a, b and c"]


def test_a_run_that_ends_above_guessing_has_diverged(make_run: MakeRun) -> None:
    assert make_run("r", final=5.6).diverged
    assert not make_run("r", final=5.5).diverged
    assert math.isnan(make_run("r", broken_at=2).final_loss)
