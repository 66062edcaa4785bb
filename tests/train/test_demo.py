"""A whole demo on a tiny model: what it writes, that interrupting it changes nothing, and that runs do not mix."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from ottava.base.settings import ConfigError
from ottava.numerics.formats import E4M3
from ottava.train.demo import RESULTS, Demo, DemoFolder, DemoSettings
from ottava.train.display import PlainDisplay
from ottava.train.loop import Trainer
from ottava.train.verdict import DemoResult

TINY = (
    "model.layers=1",
    "model.d_model=32",
    "model.heads=2",
    "model.ffn=32",
    "batch_size=2",
    "sequence_length=32",
    "evaluation.batches=1",
)
LICENSE = str(Path(__file__).parents[2] / "LICENSE")  # one text under every Python; the standard library's differs
GIVEN = {"recipes": ("tensorwise", "delayed"), "steps": 12, "seeds": 2, "data": LICENSE, "overrides": TINY}


def never() -> bool:
    """Stands for a user who does not press Ctrl-C."""
    return False


def after(turns: int) -> Callable[[], bool]:
    """Presses Ctrl-C after `turns` questions."""
    asked = itertools.count()
    return lambda: next(asked) >= turns


def run(
    folder: DemoFolder, stopping: Callable[[], bool] = never, screen: io.StringIO | None = None
) -> DemoResult | None:
    """Runs the demo to its end; None if it was stopped."""
    demo = Demo(folder)
    with PlainDisplay(Console(file=screen or io.StringIO()), every=0.0) as display:
        if not demo.train(display, stopping):
            return None
    result = demo.result()
    demo.write(result)
    return result


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoResult]:
    """An uninterrupted demo, whose last line shows each recipe."""
    path, screen = tmp_path_factory.mktemp("demo") / "whole", io.StringIO()
    result = run(DemoFolder.open(path, GIVEN), screen=screen)
    assert result is not None
    last = screen.getvalue().splitlines()[-1]
    assert re.fullmatch(r"100 %  step 12/12  bf16 \d.*  tensorwise \d.*  delayed \d.*  0 s left", last)
    return path, result


def test_a_demo_writes_its_results_and_is_finished(whole: tuple[Path, DemoResult]) -> None:
    path, result = whole
    assert all((path / name).stat().st_size > 1000 for name in RESULTS)
    assert json.loads((path / "demo.json").read_text())["finished"] is True
    assert json.loads((path / "summary.json").read_text()) == json.loads(json.dumps(result.to_dict()))
    assert [run.label for run in result.runs] == [
        "bf16, seed 0",
        "bf16, seed 1",
        "tensorwise, seed 0",
        "delayed, seed 0",
    ]
    assert all(len(run.losses) == 12 for run in result.runs)
    assert all(run.validation[-1][0] == 12 for run in result.runs)


def test_losses_fall_and_fp8_starts_where_bf16_does(whole: tuple[Path, DemoResult]) -> None:
    """Same seed, same weights, same data: the first losses differ by FP8's rounding only.

    An operand is off by E4M3's half step, over sqrt(3) on average; six in a row lead to a logit of about 1; the loss
    is a mean over 64 tokens. Four times that.
    """
    runs = whole[1].runs
    noise = 4 * E4M3.eps / 2 / 3**0.5 * 6**0.5 / 64**0.5  # 0.044
    assert all(run.losses[-1] < run.losses[0] - 0.3 for run in runs)
    for run in runs[2:]:
        assert run.losses[0] != runs[0].losses[0]
        assert abs(run.losses[0] - runs[0].losses[0]) < noise


def test_machinery_is_what_ran(whole: tuple[Path, DemoResult]) -> None:
    """4 linears x 3 GEMMs and the 3 of the head; E4M3 forward, E5M2 gradients. 96 * 32 + 32 * 32 + 64 * 32 + 32 * 32
    = 7168 elements of weights in FP8; the head's 256 * 32 = 8192 are not."""
    _, result = whole
    for recipe in ("tensorwise", "delayed"):
        machinery = result.machinery[recipe]
        assert [row["fp8"] for row in machinery.receipt if row["gemm"] != "attention"] == [True] * 12 + [False] * 3
        assert [row["kernel"] for row in machinery.receipt if row["gemm"] == "attention"] == ["flash"]
        assert list(machinery.skipped) == ["lm_head"]
        assert machinery.fp8_fraction == 7168 / (7168 + 8192)
        formats = {row["tensor"]: row["format"] for row in machinery.numbers}
        assert formats == {"input": "E4M3", "weight": "E4M3", "grad_output": "E5M2"}
        assert {row["layer"] for row in machinery.numbers} == {
            str(row["layer"]) for row in machinery.receipt if row["fp8"]
        }
    assert result.emulated == any(not row["native"] for row in result.machinery["tensorwise"].receipt if row["fp8"])


@pytest.mark.parametrize("turns", [1, 9])
def test_an_interrupted_demo_ends_as_if_it_had_not_been(
    turns: int, whole: tuple[Path, DemoResult], tmp_path: Path
) -> None:
    """One question is before the second run begins, nine are in the middle."""
    assert run(DemoFolder.open(tmp_path / "d", GIVEN), after(turns)) is None
    assert not (tmp_path / "d" / "report.html").exists()
    folder = DemoFolder.open(tmp_path / "d", GIVEN)
    assert folder.resumed
    result = run(folder)
    assert result is not None
    assert [(r.label, r.losses, r.validation) for r in result.runs] == [
        (r.label, r.losses, r.validation) for r in whole[1].runs
    ]
    assert repr(result.machinery) == repr(whole[1].machinery)  # a statistic that says nothing is NaN


def test_a_run_of_the_demo_is_the_run_that_trains_alone(whole: tuple[Path, DemoResult], tmp_path: Path) -> None:
    alone = Trainer(DemoSettings(**GIVEN).config("delayed", 0), tmp_path)
    assert [record.loss for record in alone.advance()] == whole[1].runs[3].losses


def test_a_diverging_run_is_reported_and_the_others_finish(tmp_path: Path) -> None:
    """A learning rate of 1e30 breaks every run; the demo must still end with a verdict and a report."""
    folder = DemoFolder.open(tmp_path, {**GIVEN, "overrides": (*TINY, "optimizer.learning_rate=1e30")})
    result = run(folder)
    assert result is not None
    assert result.runs[0].diverged
    assert "BF16 itself diverged" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "summary.json").read_text())["runs"][0]["final_loss"] is None


PLAN = {"recipes": ("rowwise",), "steps": 20}


def unfinished(path: Path) -> DemoFolder:
    """A demo that has begun, with a file in one of its runs."""
    folder = DemoFolder.open(path, PLAN)
    folder.run("rowwise", 0).mkdir(parents=True)
    (folder.run("rowwise", 0) / "progress").write_text("some")
    return folder


def finished(path: Path) -> DemoFolder:
    """A demo with its results."""
    folder = unfinished(path)
    for name in RESULTS:
        folder.write(name, f"old {name}")
    folder.mark(finished=True)
    return folder


def files(path: Path) -> dict[str, str]:
    """Every file below a folder but its lock, with its text."""
    found = (file for file in sorted(path.rglob("*")) if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(path)): file.read_text() for file in found}


def test_nothing_found_starts_and_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no demo to resume"):
        DemoFolder.open(tmp_path, {}, resume=True)
    assert files(tmp_path) == {}
    for options in ({}, {"fresh": True}):
        folder = DemoFolder.open(tmp_path / f"new{len(options)}", PLAN, **options)
        assert folder.settings == DemoSettings(recipes=("rowwise",), steps=20)
        assert (folder.resumed, folder.news) == (False, ())
        assert json.loads((folder.path / "demo.json").read_text())["finished"] is False


def test_an_unfinished_demo_goes_on_by_itself_and_with_its_saved_settings(tmp_path: Path) -> None:
    unfinished(tmp_path)
    before = files(tmp_path)
    for given, resume in ((PLAN, False), ({}, True)):
        folder = DemoFolder.open(tmp_path, given, resume=resume)
        assert folder.resumed
        assert folder.settings == DemoSettings(recipes=("rowwise",), steps=20)
        assert "continuing" in folder.news[0]
        assert files(tmp_path) == before
        del folder


@pytest.mark.parametrize(("given", "resume"), [({}, False), ({"steps": 30}, True), ({**PLAN, "seeds": 2}, False)])
def test_an_unfinished_demo_with_other_settings_is_never_mixed(
    tmp_path: Path, given: dict[str, object], resume: bool
) -> None:
    unfinished(tmp_path)
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="other settings") as refused:
        DemoFolder.open(tmp_path, given, resume=resume)
    for remedy in ("--resume", "--fresh", "--run-dir"):
        assert remedy in str(refused.value)
    assert files(tmp_path) == before


def test_fresh_discards_an_unfinished_demo(tmp_path: Path) -> None:
    unfinished(tmp_path)
    folder = DemoFolder.open(tmp_path, {"steps": 30}, fresh=True)
    assert not folder.resumed
    assert "discarded" in folder.news[0]
    assert list(files(tmp_path)) == ["demo.json"]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_finished_demo_runs_again_its_report_is_kept_and_it_cannot_be_resumed(tmp_path: Path, fresh: bool) -> None:
    finished(tmp_path)
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=r"finished .*report\.html"):
        DemoFolder.open(tmp_path, {}, resume=True)
    assert files(tmp_path) == before
    folder = DemoFolder.open(tmp_path, PLAN, fresh=fresh)
    assert not folder.resumed
    (aside,) = (tmp_path / "earlier").iterdir()
    assert files(aside) == {name: f"old {name}" for name in sorted(RESULTS)}
    assert str(aside) in folder.news[0]
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "content", ["", "{}", "not json", "[" * 5000, "[]", '{"finished": true, "settings": {"speed": 1}}']
)
def test_anything_else_is_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "demo.json").write_text(content)
    for options in ({}, {"resume": True}, {"fresh": True}):
        with pytest.raises(ConfigError, match="--run-dir"):
            DemoFolder.open(tmp_path, {}, **options)
    with pytest.raises(ConfigError, match="give one of them"):
        DemoFolder.open(tmp_path, {}, resume=True, fresh=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recipes": ("rowise",)}, "did you mean 'rowwise'"),
        ({"recipes": ("rowwise", "rowwise")}, "once"),
        ({"recipes": ("bf16",)}, "BF16 always runs"),
        ({"steps": 3}, "at least 10"),
        ({"seeds": 0}, "1 or more"),
        ({"overrides": ("model.layer=2",)}, "model.layers"),
        ({"overrides": ("seed=2",)}, "use --seeds"),
        ({"overrides": ("init=/runs/a",)}, "runs start from their seeds"),
        ({"overrides": ("batch_size=1000000000000",)}, "GB of memory"),
        ({"data": "/nope"}, "/nope: does not exist"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written_or_discarded(
    tmp_path: Path, given: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DemoFolder.open(tmp_path / "new", given)
    assert list(tmp_path.iterdir()) == []
    for make in (unfinished, finished):
        before = files(make(tmp_path / make.__name__).path)
        with pytest.raises(ValueError, match=message):
            DemoFolder.open(tmp_path / make.__name__, given, fresh=True)
        assert files(tmp_path / make.__name__) == before


def test_demo_of_another_process_is_refused(tmp_path: Path) -> None:
    folder = unfinished(tmp_path)
    for options in ({}, {"resume": True}, {"fresh": True}):
        with pytest.raises(ConfigError, match="is in use by process"):
            DemoFolder.open(tmp_path, PLAN, **options)
    assert list(files(tmp_path)) == ["demo.json", "runs/rowwise-seed0/progress"]
    del folder


def test_settings_survive_json_and_name_the_command_that_repeats_them() -> None:
    settings = DemoSettings(recipes=("rowwise",), data="/a b", overrides=("optimizer.betas=[0.9, 0.99]",))
    assert DemoSettings(**json.loads(settings.model_dump_json())) == settings
    expected = "--recipes rowwise --steps 240 --seeds 3 --data '/a b' --set 'optimizer.betas=[0.9, 0.99]'"
    assert settings.command() == f"ottava demo {expected}"
