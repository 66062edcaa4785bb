"""`ottava watch` of an unmodified script, `import` of other logs, and what `table`, `plot` and `report` show."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import ottava
import warm
from command import ended, run
from ottava.base.settings import ConfigError
from ottava.cli.app import exit_code
from ottava.measure.tally import Tally
from ottava.measure.walk import measure
from ottava.record.reader import Run
from ottava.record.schema import RunError, SlotKey
from ottava.record.writer import RunWriter
from ottava.watching.launch import LaunchError

# --- watch -----------------------------------------------------------------------------------------------------------


SCRIPT = """
import argparse, sys, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--debug", action="store_true")
parser.add_argument("--end")
given = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=given.lr)
for step in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(2, 8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), torch.rand(()).item().hex())
print(given.debug)
if given.end == "raise":
    raise RuntimeError("boom")
if given.end is not None:
    sys.exit(int(given.end) if given.end.isdigit() else given.end)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT.lstrip())
    return tmp_path


def start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm.run(words, cwd=folder)


def test_output_numbers_and_arguments_are_the_scripts_own(folder: Path) -> None:
    script = ("train.py", "--lr", "0.5", "--debug")
    alone = start(folder, *script)
    options = ("--out", "run", "--every", "2", "--recipe", "blockwise", "--tensors", "X,dY", "--layers", "2")
    options += ("--detail", "numbers")
    watched = start(folder, "-m", "ottava", "watch", *options, "--", *script)
    assert alone.returncode == watched.returncode == 0, watched.stderr
    assert watched.stdout == alone.stdout
    assert "4 steps, 1 of 2 linear layers seen" in watched.stderr
    assert "no sample" not in watched.stderr
    run = Run.open(folder / "run")
    table = run.table(phase="full")
    assert {(key.layer, key.tensor, key.recipe) for key in table.slots()} == {
        ("2", "input", "blockwise"),
        ("2", "grad_output", "blockwise"),
    }
    losses = [float.fromhex(line.split()[1]) for line in alone.stdout.splitlines()[:4]]
    assert list(run.steps["loss"]) == pytest.approx(losses)
    assert run.manifest["coverage"]["linear"] == 2
    assert run.manifest["settings"]["detail"] == "numbers"
    assert 'watched with detail="numbers"' in table.not_recorded()


@pytest.mark.parametrize(("end", "code"), [("3", 3), ("bad luck", 1), ("raise", 1)])
def test_exit_code_and_traceback_are_the_scripts_own(folder: Path, end: str, code: int) -> None:
    watched = start(
        folder, "-m", "ottava", "watch", "--json", "--out", "run", "--", "train.py", "--lr", "1", "--end", end
    )
    assert watched.returncode == code
    facts = json.loads(watched.stdout.splitlines()[-1])
    assert (facts["steps"], facts["script_exit_code"]) == (4, code)
    if end == "raise":
        lines = watched.stderr.splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[-1] == "RuntimeError: boom"
        assert [line for line in lines if "File" in line] == [
            f'  File "{folder / "train.py"}", line 19, in <module>',
        ]
    elif code == 1:
        assert watched.stderr.splitlines()[0] == end


def test_a_pattern_without_a_layer_is_a_wrong_command(folder: Path) -> None:
    watched = start(folder, "-m", "ottava", "watch", "--out", "run", "--layers", "nope*", "--", "train.py", "--lr", "1")
    assert watched.returncode == 2
    assert "the pattern 'nope*' matches no layer; the layers are: 0, 2" in watched.stderr
    assert "Traceback" not in watched.stderr


def test_several_processes_need_one_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="--out"):
        run("watch", "--", str(folder / "train.py"))


def test_what_is_wrong_is_said_before_anything_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(LaunchError, match=r"no file .absent\.py."):
        run("watch", "--", "absent.py")
    for options, why in (
        (["--every", "0"], "every"),
        (["--tensors", "Z"], "tensor"),
        (["--compiled", "maybe"], "compiled"),
        (["--config", "absent.yaml"], "absent.yaml"),
    ):
        with pytest.raises(ConfigError, match=why):
            run("watch", "--out", "run", *options, "--", "train.py")
    assert not (folder / "run").exists()


# --- import run ------------------------------------------------------------------------------------------------------


LINES = "".join(
    f"2025-11-03 10:15:01,123 - INFO - layers.{i}.mlp.fc2_activation_{name} \t iteration=000100 \t value=12.5000\n"
    for i in range(3)
    for name in ("underflows%", "l1_norm")
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "logs" / "nvdlfw_inspect_globalrank-0.log"
    path.parent.mkdir()
    path.write_text(LINES, encoding="utf-8")
    return path


def test_a_log_becomes_a_run(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was read, what was not understood, and what to do next."""
    assert ended("import", log.parent, tmp_path / "run", "--recipe", "delayed") == 0
    text = capsys.readouterr().out
    assert "3 rows of 3 layers at 1 steps" in text
    assert "not understood: l1_norm (3)" in text
    assert "ottava diagnose" in text
    assert Run.open(tmp_path / "run").table()["scaling"].tolist() == ["delayed"] * 3


def test_json_is_one_object(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("import", log, tmp_path / "run", "--json", "--kind", "te_log") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rows"], facts["files"], facts["not_understood"]) == (3, {"te_log": 1}, {"l1_norm": 3})


@pytest.mark.parametrize(
    "arguments, exit_code, words",
    [
        (("--recipe", "delayd"), 2, "did you mean 'delayed'"),
        (("--tag", "loss"), 2, "needs TAG=NAME"),
        (("--kind", "te_lgo"), 4, "did you mean 'te_log'"),
        (("--kind", "tensorboard"), 4, "nothing to import"),
    ],
)
def test_mistakes_are_named(
    log: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    exit_code: int,
    words: str,
) -> None:
    """Each has the exit code of its kind, and leaves no file behind."""
    assert ended("import", log, tmp_path / "run", *arguments) == exit_code
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# --- table -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def watched_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "run"
    with RunWriter(path) as writer:
        for step in (1, 2):
            for layer in ("fc1", "fc2"):
                key = SlotKey(layer, "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
                tally = Tally(n=8, n_nonzero=8, n_underflow=step, amax=2.0, sxx=4.0, see=0.5 * step, scale_min=7.0)
                writer.tally(step, key, tally)
    return path


def test_every_form_has_the_same_numbers(
    watched_run: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    def printed(*arguments: object) -> bytes:
        assert run("table", watched_run, *arguments) == 0
        return capsysbinary.readouterr().out

    rows = json.loads(printed("--format", "json"))["rows"]
    assert [(row["step"], row["layer"], row["underflow_pct"]) for row in rows] == [
        (1, "fc1", 12.5), (1, "fc2", 12.5), (2, "fc1", 25.0), (2, "fc2", 25.0)
    ]  # fmt: skip
    assert rows[0]["scale_delayed"] is None
    as_csv = list(csv.DictReader(io.StringIO(printed("--format", "csv").decode())))
    assert run("table", watched_run, "-o", tmp_path / "t.parquet") == 0
    as_parquet = pq.read_table(tmp_path / "t.parquet").to_pylist()
    for one, two, three in zip(rows, as_csv, as_parquet, strict=True):
        for name, value in one.items():
            if isinstance(value, str):
                assert value == two[name] == three[name]
            elif value is None:
                assert math.isnan(float(two[name]))
                assert math.isnan(three[name])
            else:
                assert value == float(two[name]) == three[name]
    capsysbinary.readouterr()
    text = printed("--layers", "fc2", "--steps", "2:", "--statistics", "mse,cosine").decode().splitlines()
    assert text[0].split() == ["step", "layer", "tensor", "recipe", "format", "mse[of_x_squared]", "cosine"]
    assert text[1].split()[:2] == ["2", "fc2"]
    assert len(text) == 2
    assert printed("--json") == printed("--format", "json")
    for line, row in zip(printed().decode().splitlines()[1:], rows, strict=True):  # each number is one that float reads
        words = line.split()
        assert len(words) == len(row)
        for word, value in zip(words, row.values(), strict=True):
            if not isinstance(value, str):
                assert float(word) == pytest.approx(math.nan if value is None else value, rel=1e-3, nan_ok=True)
    assert "rank" in printed("--ranks").decode().splitlines()[0]
    assert len(printed("--statistics", "all").decode().splitlines()[0].split()) > 30


def test_pictures(watched_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plot", watched_run, watched_run, "-o", tmp_path / "a.svg", "--statistics", "mse,amax") == 0
    picture = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert picture.count('class="chart"') == 2
    assert "fc2 X" in picture
    pytest.importorskip("resvg_py")
    assert run("plot", watched_run, "-o", tmp_path / "a.png") == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_statistic_that_a_run_lacks_is_no_empty_picture(watched_run: Path, tmp_path: Path) -> None:
    """The error names the run and its statistics; no file is written."""
    with pytest.raises(RunError, match=r"run: has no scale_delayed of these tensors; it has .*mse") as caught:
        run("plot", watched_run, "-o", tmp_path / "a.svg", "--statistics", "mse,scale_delayed")
    assert exit_code(caught.value) == 4
    assert "scale_delayed" not in str(caught.value).partition("it has")[2]
    with pytest.raises(ValueError, match="did you mean 'mse'"):
        run("plot", watched_run, "-o", tmp_path / "a.svg", "--statistics", "mes")
    assert not (tmp_path / "a.svg").exists()


def test_bad_words_are_named(watched_run: Path, tmp_path: Path) -> None:
    for words, message in (
        (("table", watched_run, "--format", "xml"), "format 'xml'"),
        (("table", watched_run, "--format", "parquet"), "needs a file"),
        (("table", watched_run, "--format", "csv", "--json"), "got --format csv, too"),
        (("table", watched_run, "--statistics", "cosin"), "did you mean 'cosine'"),
        (("table", watched_run, "-o", tmp_path / "a.xlsx"), "format 'xlsx'"),
        (("plot", watched_run, "-o", tmp_path / "no" / "a.svg"), "there is no folder"),
        (("plot", watched_run, "-o", tmp_path / "a.pdf"), r"\.svg or \.png"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*words)
    with pytest.raises(ValueError, match=r"watch\.json") as caught:
        run("table", tmp_path)
    assert caught.value.exit_code == 4  # type: ignore[attr-defined]


# --- report ----------------------------------------------------------------------------------------------------------


def looked_at(path: Path, outliers: float) -> Path:
    """Eight looks at FC2's input, of which four tokens are so much larger."""
    key = SlotKey("layers.1.mlp.down_proj", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
    torch.manual_seed(0)
    with RunWriter(path) as writer:
        for step in range(1, 9):
            x = torch.randn(128, 256)
            x[:4] *= outliers
            writer.step(step, loss=2.0 - 0.1 * step)
            writer.tally(step, key, measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))))
    return path


def test_clean_run_exits_0_and_writes_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = looked_at(tmp_path / "run", 1.0)
    assert run("report", folder, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    written = Path(values["report"])
    assert (written, values["bytes"]) == (folder / "report.html", written.stat().st_size)
    assert values["verdict"] == "none"
    assert "layers.1.mlp.down_proj" in written.read_text(encoding="utf-8")
    assert [path.name for path in folder.glob("report*")] == ["report.html"]  # nothing half-written


def test_a_broken_operand_exits_1_and_a_damaged_cast_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, out = looked_at(tmp_path / "good", 1.0), looked_at(tmp_path / "bad", 1e5), tmp_path / "page.html"
    assert run("report", bad, "--baseline", good, "--out", out) == 0
    assert "Nothing was tried, so this is no proof." in capsys.readouterr().out
    with RunWriter(bad, append=True, step=8) as writer:
        writer.event(8, "check", check="stale_weight", layer="layers.1.mlp.down_proj", tensor="weight", value=3.0)
    assert run("report", bad, "--baseline", good, "--out", out) == 1
    sentence = capsys.readouterr().out.splitlines()[0]
    html = out.read_text(encoding="utf-8")
    assert "critical" in html
    assert 'id="difference"' in html
    assert sentence
    assert not (bad / "report.html").exists()
    assert Run.open(bad).manifest == json.loads((bad / "watch.json").read_text())  # a report changes nothing


def test_folder_without_a_run_is_a_bad_input(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"watch\.json") as caught:
        run("report", tmp_path)
    assert caught.value.exit_code == 4
