"""What an earlier demo in the folder means for a new one: the table in the module, row by row."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from ottava.base.settings import ConfigError
from ottava.train.demo import RESULTS, DemoFolder, DemoSettings

GIVEN = {"recipes": ("rowwise",), "steps": 20}


def unfinished(path: Path) -> DemoFolder:
    """A demo that has begun, with a file in one of its runs."""
    folder = DemoFolder.open(path, GIVEN)
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


def test_nothing_found_starts(tmp_path: Path) -> None:
    for options in ({}, {"fresh": True}):
        folder = DemoFolder.open(tmp_path / f"new{len(options)}", GIVEN, **options)
        assert folder.settings == DemoSettings(recipes=("rowwise",), steps=20)
        assert not folder.resumed
        assert folder.news == ()
        assert json.loads((folder.path / "demo.json").read_text())["finished"] is False


def test_nothing_found_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no demo to resume"):
        DemoFolder.open(tmp_path, {}, resume=True)
    assert files(tmp_path) == {}


def test_an_unfinished_demo_goes_on_by_itself(tmp_path: Path) -> None:
    unfinished(tmp_path)
    before = files(tmp_path)
    folder = DemoFolder.open(tmp_path, GIVEN)
    assert folder.resumed
    assert "continuing" in folder.news[0]
    assert files(tmp_path) == before


def test_resume_takes_the_saved_settings(tmp_path: Path) -> None:
    unfinished(tmp_path)
    folder = DemoFolder.open(tmp_path, {}, resume=True)
    assert folder.resumed
    assert folder.settings == DemoSettings(recipes=("rowwise",), steps=20)


@pytest.mark.parametrize(("given", "resume"), [({}, False), ({"steps": 30}, True), ({**GIVEN, "seeds": 2}, False)])
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
def test_a_finished_demo_runs_again_and_its_report_is_kept(tmp_path: Path, fresh: bool) -> None:
    finished(tmp_path)
    folder = DemoFolder.open(tmp_path, GIVEN, fresh=fresh)
    assert not folder.resumed
    (aside,) = (tmp_path / "earlier").iterdir()
    assert files(aside) == {name: f"old {name}" for name in sorted(RESULTS)}
    assert str(aside) in folder.news[0]
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "runs").exists()


def test_a_finished_demo_cannot_be_resumed(tmp_path: Path) -> None:
    finished(tmp_path)
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=r"finished .*report\.html"):
        DemoFolder.open(tmp_path, {}, resume=True)
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "content", ["", "{}", "not json", "[" * 5000, "[]", '{"finished": true, "settings": {"speed": 1}}']
)
def test_anything_else_is_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "demo.json").write_text(content)
    for options in ({}, {"resume": True}, {"fresh": True}):
        with pytest.raises(ConfigError, match="--run-dir"):
            DemoFolder.open(tmp_path, {}, **options)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_resume_and_fresh_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of them"):
        DemoFolder.open(tmp_path, {}, resume=True, fresh=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recipes": ("rowise",)}, "did you mean 'rowwise'"),
        ({"recipes": ("rowwise", "rowwise")}, "once"),
        ({"recipes": ("bf16",)}, "BF16 always runs"),
        ({"steps": 3}, "at least 10"),
        ({"seeds": 0}, "1 to 10"),
        ({"seeds": 11}, "1 to 10"),
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
            DemoFolder.open(tmp_path, GIVEN, **options)
    assert list(files(tmp_path)) == ["demo.json", "runs/rowwise-seed0/progress"]
    del folder


def test_settings_survive_json_and_name_the_command_that_repeats_them() -> None:
    settings = DemoSettings(recipes=("rowwise",), data="/a b", overrides=("optimizer.betas=[0.9, 0.99]",))
    assert DemoSettings.from_dict(json.loads(json.dumps(asdict(settings)))) == settings
    expected = "--recipes rowwise --steps 240 --seeds 3 --data '/a b' --set 'optimizer.betas=[0.9, 0.99]'"
    assert settings.command() == f"ottava demo {expected}"


def test_runs_are_bf16_with_every_seed_then_each_recipe_with_the_first() -> None:
    settings = DemoSettings(recipes=("rowwise", "mxfp8"), seeds=2, overrides=("model.layers=3",))
    assert settings.runs() == [("bf16", 0), ("bf16", 1), ("rowwise", 0), ("mxfp8", 0)]
    config = settings.config("rowwise", 1)
    assert (config.recipe, config.seed, config.steps, config.model.layers) == ("rowwise", 1, 240, 3)


def test_a_recipe_with_a_slash_has_one_folder() -> None:
    folder = DemoFolder(Path("d"), DemoSettings(), resumed=False, news=())
    assert folder.run("tensorwise/fp8_inputs_bf16_gemm", 0) == Path("d/runs/tensorwise-fp8_inputs_bf16_gemm-seed0")
