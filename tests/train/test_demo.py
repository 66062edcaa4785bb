"""A whole demo on a tiny model: what it writes, that interrupting it changes nothing, and that runs do not mix."""

import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

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


def run(folder: DemoFolder, stopping: Callable[[], bool] = never) -> DemoResult | None:
    """Runs the demo to its end; None if it was stopped."""
    demo = Demo(folder)
    with PlainDisplay(Console(file=io.StringIO()), every=0.0) as display:
        if not demo.train(display, stopping):
            return None
    result = demo.result()
    demo.write(result)
    return result


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoResult]:
    """An uninterrupted demo."""
    path = tmp_path_factory.mktemp("demo") / "whole"
    result = run(DemoFolder.open(path, GIVEN))
    assert result is not None
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


def test_bf16_run_is_evaluated_in_bf16_either_way(whole: tuple[Path, DemoResult]) -> None:
    reference, _, tensorwise, _ = whole[1].runs
    assert reference.high_precision_loss == reference.final_loss
    assert tensorwise.high_precision_loss != tensorwise.final_loss


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
    alone = Trainer(DemoSettings.from_dict(GIVEN).config("delayed", 0), tmp_path)
    assert [record.loss for record in alone.advance()] == whole[1].runs[3].losses


def test_progress_is_shown_for_every_run(tmp_path: Path) -> None:
    screen = Console(file=io.StringIO())
    demo = Demo(DemoFolder.open(tmp_path, {**GIVEN, "recipes": ("rowwise",), "seeds": 1}))
    with PlainDisplay(screen, every=0.0) as display:
        assert demo.train(display, never)
    assert isinstance(screen.file, io.StringIO)
    lines = screen.file.getvalue().splitlines()
    assert lines[-1].startswith("100 %  step 12/12  bf16 ")
    assert "rowwise" in lines[-1]
    assert lines[-1].endswith("0 s left")


def test_a_diverging_run_is_reported_and_the_others_finish(tmp_path: Path) -> None:
    """A learning rate of 1e30 breaks every run; the demo must still end with a verdict and a report."""
    folder = DemoFolder.open(tmp_path, {**GIVEN, "overrides": (*TINY, "optimizer.learning_rate=1e30")})
    result = run(folder)
    assert result is not None
    assert result.runs[0].diverged
    assert "BF16 itself diverged" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "summary.json").read_text())["runs"][0]["final_loss"] is None
