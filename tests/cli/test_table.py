"""`ottava table` and `ottava plot`: every form of output holds the same numbers."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ottava.cli.app import app, exit_code
from ottava.measure.tally import Tally
from ottava.record.schema import RunError, SlotKey
from ottava.record.writer import RunWriter


def run(*arguments: object) -> int:
    return app(list(map(str, arguments)), standalone_mode=False)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "run"
    with RunWriter(path) as writer:
        for step in (1, 2):
            for layer in ("fc1", "fc2"):
                key = SlotKey(layer, "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
                tally = Tally(n=8, n_nonzero=8, n_underflow=step, amax=2.0, sxx=4.0, see=0.5 * step, scale_min=7.0)
                writer.tally(step, key, tally)
    return path


def test_every_form_has_the_same_numbers(
    folder: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    def printed(*arguments: object) -> bytes:
        assert run("table", folder, *arguments) == 0
        return capsysbinary.readouterr().out

    rows = json.loads(printed("--format", "json"))["rows"]
    assert [(row["step"], row["layer"], row["underflow_pct"]) for row in rows] == [
        (1, "fc1", 12.5), (1, "fc2", 12.5), (2, "fc1", 25.0), (2, "fc2", 25.0)
    ]  # fmt: skip
    assert rows[0]["scale_delayed"] is None
    as_csv = list(csv.DictReader(io.StringIO(printed("--format", "csv").decode())))
    assert run("table", folder, "-o", tmp_path / "t.parquet") == 0
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
    assert text[0].split() == ["step", "layer", "tensor", "recipe", "format", "mse", "[of", "x", "squared]", "cosine"]
    assert text[1].split()[:2] == ["2", "fc2"]
    assert len(text) == 2
    assert "rank" in printed("--ranks").decode().splitlines()[0]
    assert len(printed("--statistics", "all").decode().splitlines()[0].split()) > 30


def test_pictures(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plot", folder, folder, "-o", tmp_path / "a.svg", "--statistics", "mse,amax") == 0
    picture = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert picture.count('class="chart"') == 2
    assert "fc2 X" in picture
    pytest.importorskip("resvg_py")
    assert run("plot", folder, "-o", tmp_path / "a.png") == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_statistic_that_a_run_lacks_is_no_empty_picture(folder: Path, tmp_path: Path) -> None:
    """The error names the run and its statistics; no file is written."""
    with pytest.raises(RunError, match=r"run: has no scale_delayed of these tensors; it has .*mse") as caught:
        run("plot", folder, "-o", tmp_path / "a.svg", "--statistics", "mse,scale_delayed")
    assert exit_code(caught.value) == 4
    assert "scale_delayed" not in str(caught.value).partition("it has")[2]
    with pytest.raises(ValueError, match="did you mean 'mse'"):
        run("plot", folder, "-o", tmp_path / "a.svg", "--statistics", "mes")
    assert not (tmp_path / "a.svg").exists()


def test_bad_words_are_named(folder: Path, tmp_path: Path) -> None:
    for words, message in (
        (("table", folder, "--format", "xml"), "format 'xml'"),
        (("table", folder, "--format", "parquet"), "needs a file"),
        (("table", folder, "--statistics", "cosin"), "did you mean 'cosine'"),
        (("table", folder, "-o", tmp_path / "a.xlsx"), "format 'xlsx'"),
        (("plot", folder, "-o", tmp_path / "no" / "a.svg"), "there is no folder"),
        (("plot", folder, "-o", tmp_path / "a.pdf"), r"\.svg or \.png"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*words)
    with pytest.raises(ValueError, match=r"watch\.json") as caught:
        run("table", tmp_path)
    assert caught.value.exit_code == 4  # type: ignore[attr-defined]
