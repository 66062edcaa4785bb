"""The report is one complete HTML file that says everything the result holds."""

import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from ottava.train.demo import difference_chart, ends_chart, heat_grids, loss_chart, render_picture, render_report
from ottava.train.verdict import DemoResult, RunResult
from page_checker import Checker


@pytest.fixture
def all_recipes(make_run: Callable[..., RunResult], make_demo: Callable[..., DemoResult]) -> DemoResult:
    """Every kind of ending, and ten recipes."""
    seeds = [make_run("bf16", seed, final=final) for seed, final in enumerate((1.700, 1.721, 1.712))]
    recipes = [make_run(f"recipe{i}", final=1.69 + 0.02 * i) for i in range(9)]
    return make_demo([*seeds, *recipes, make_run("nvfp4/fp8_inputs_bf16_gemm", broken_at=60)])


@pytest.mark.parametrize("which", ["usual_demo", "all_recipes"])
def test_report_is_balanced_offline_and_small(which: str, request: pytest.FixtureRequest) -> None:
    html = render_report(request.getfixturevalue(which))
    Checker(html)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\((?!#)", html)
    assert len(html.encode()) < 310_000


def test_report_shows_every_run_verdict_and_fact(all_recipes: DemoResult) -> None:
    html = render_report(all_recipes)
    for run in all_recipes.runs:
        assert run.label in html
    for verdict in all_recipes.verdicts:
        assert verdict.sentence in html
    for text in (all_recipes.command, "1,049,984", "2.13.0+cpu", "recipe: bf16", all_recipes.headline):
        assert text in html
    assert html.index("nvfp4/fp8_inputs_bf16_gemm diverged at step 60") < html.index(all_recipes.verdicts[0].sentence)


def test_text_from_outside_is_escaped(usual_demo: DemoResult) -> None:
    """The platform of the sample is "Linux <x86_64>"."""
    html = render_report(usual_demo)
    assert "Linux &lt;x86_64&gt;" in html
    assert "<x86_64>" not in html


def test_report_of_one_seed_says_that_the_noise_is_unknown(
    make_run: Callable[..., RunResult], make_demo: Callable[..., DemoResult]
) -> None:
    html = render_report(make_demo([make_run("bf16"), make_run("tensorwise", final=1.71)]))
    assert "noise unknown" in html
    assert "--seeds 3" in html


@pytest.mark.parametrize("broken", ["bf16", "tensorwise"])
def test_a_report_is_written_whatever_diverged(
    broken: str, make_run: Callable[..., RunResult], make_demo: Callable[..., DemoResult]
) -> None:
    """From the very first step, before anything could be evaluated."""
    demo = make_demo([make_run(name, broken_at=1 if name == broken else None) for name in ("bf16", "tensorwise")])
    assert "diverged" in render_report(demo)
    ElementTree.fromstring(render_picture(demo))


def test_charts_draw_bf16_every_recipe_and_the_band_of_seeds(usual_demo: DemoResult) -> None:
    for chart in (loss_chart(usual_demo), difference_chart(usual_demo)):
        assert [line.name for line in chart.lines if not line.faint] == ["bf16", "tensorwise", "blockwise"]
        assert [band.name[-15:] for band in chart.bands] == ["of 3 bf16 seeds"]


def test_difference_is_to_bf16_of_the_same_seed(usual_demo: DemoResult) -> None:
    """Final losses 1.700, 1.704 and 1.9; the seeds 1.700, 1.721, 1.712 lie 0.021 apart: the band, both ways."""
    chart = difference_chart(usual_demo)
    ends = [line.points[-1] for line in chart.lines]
    assert [step for step, _ in ends] == [200, 200, 200]
    assert [y for _, y in ends] == pytest.approx([0.0, 0.004, 0.2])
    assert chart.bands[0].points[-1] == pytest.approx((200, -0.021, 0.021))
    assert chart.y_range is not None
    assert chart.y_range[1] > 0.2


def test_the_picture_of_the_ends_has_every_run(usual_demo: DemoResult, all_recipes: DemoResult) -> None:
    chart = ends_chart(usual_demo)
    assert chart is not None
    assert [(name, [(e.mean, e.low, e.high) for e in row]) for name, row in chart.rows] == [
        ("bf16", [(1.700, 1.700, 1.721)]),
        ("tensorwise", [(1.704, 1.704, 1.704)]),
        ("blockwise", [(1.9, 1.9, 1.9)]),
    ]
    assert chart.rows[0][1][0].values == [1.700, 1.721, 1.712]
    assert chart.band == pytest.approx((1.679, 1.721))  # BF16 with seed 0, and the seed farthest from it
    lost = ends_chart(all_recipes)
    assert lost is not None
    assert lost.rows[-1] == ("nvfp4/fp8_inputs_bf16_gemm, diverged", [])


def test_heat_shows_the_worse_direction_and_its_tooltip_both(usual_demo: DemoResult) -> None:
    """Columns of the last gradient underflow by 40 %, its rows by 0.02 %; weights are exact: infinite decibels."""
    sqnr, underflow = heat_grids(usual_demo.machinery["tensorwise"].numbers).values()
    _, columns, rows = underflow[2]
    assert columns == ["0", "1", "2", "3", "4"]
    name, cells = rows[-1]
    assert name == "layers.*.mlp.down_proj"
    assert cells[-1] is not None
    assert (cells[-1].text, cells[-1].level) == ("40", 3)
    assert "row: E4M3 1x128, 0.02 %" in cells[-1].hint
    assert "col: E4M3 1x128, 40 %" in cells[-1].hint
    assert [(cell.text, cell.level) for cell in cells[:-1] if cell] == [("0.02", 0)] * 4
    weight = sqnr[1][2][0][1][0]
    assert weight is not None
    assert (weight.text, weight.level) == ("exact", 0)
